"""Files that others may have written are read by `coterie.core.foreign` alone: who reads in
another way says here why.
"""

import ast
from pathlib import Path

import coterie

SOURCE = Path(coterie.__file__).parent
FUNCTIONS = {
    *("json.load", "json.loads", "json.JSONDecoder", "from_json"),
    *("yaml.load", "yaml.safe_load", "yaml.full_load", "yaml.SafeLoader"),
    *("tomllib.load", "tomllib.loads", "pickle.load", "pickle.loads", "torch.load", "np.load"),
    *("safe_open", "load_file", "gzip.open", "gzip.GzipFile", "mailbox.mbox"),
    *("parquet.ParquetFile", "Image.open", "open", "io.open"),
}
METHODS = {"read_text", "read_bytes", "open", "validate_json", "model_validate_json"}
STRICT = "it is what `foreign` offers, or is opened by it"
OWN = "coterie wrote it, into its cache, its package or its memory, or it is the system's"
ALLOWED = {
    "core/foreign.py": "the strict readers themselves",
    "cli/deploy.py": "the program that starts it has written this argument",
    "cli/lists.py": OWN,
    "core/devices.py": OWN,
    "core/errors.py": OWN,
    "core/files.py": STRICT,
    "data/archives/mail.py": STRICT,
    "data/chats/encoding.py": OWN,
    "data/chats/jinja_process.py": "its own process, which holds a bounded line",
    "data/chats/jinja_worker.py": "its own parent",
    "data/chats/reading.py": "what it wrote itself; and whether a text is one of messages, which "
    "`messages.parsed` then reads strictly",
    "data/images.py": STRICT,
    "data/rows.py": "rows have their own decoder, without keys that hide others: NaN is no value",
    "data/by_client.py": OWN,
    "data/text_encoding.py": OWN,
    "deploy/process.py": "Flower's own command, and what is the system's",
    "export/gguf.py": "the server that it has started",
    "export/gguf_files.py": "a tokenizer that was loaded",
    "export/web.py": OWN,
    "models/artifact.py": "JSON that was read strictly, and written again in memory",
    "models/text.py": OWN,
    "reports/parts.py": OWN,
    "reports/trackers.py": "a tracker, not a file",
}


def reads(node: ast.Call) -> bool:
    """Whether a call reads a file or parses a text by itself."""
    name = ast.unparse(node.func)
    modes = {str(part.value) for part in ast.walk(node) if isinstance(part, ast.Constant)}
    if name.endswith("open") and modes & {"wb", "wt", "ab", "a+b"}:
        return False
    if isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
        return not name.startswith(("foreign.", "os."))
    return name in FUNCTIONS


def test_foreign_files_are_read_strictly() -> None:
    readers = {
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and reads(node)
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }
    assert readers - ALLOWED.keys() == set(), "use coterie.core.foreign, or say why not"
    assert ALLOWED.keys() - readers == set(), "these need no exception any more"


def test_readers_are_recognised() -> None:
    for text in ("json.loads(x)", "path.read_text()", "open(x)", "Image.open(x)", "p.open('rb')"):
        assert reads(ast.parse(text, mode="eval").body), text  # type: ignore[arg-type]
    for text in ("open(x, 'wb')", "foreign.read_bytes(x)", "read_text(x)", "json_of(x)"):
        assert not reads(ast.parse(text, mode="eval").body), text  # type: ignore[arg-type]
