"""The readers of foreign bytes, each as a function of one input. The only rule: it ends with a
result or a CoterieError.
"""

import io
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from coterie.core import packs
from coterie.core.errors import CoterieError
from coterie.core.files import digest_of, write_sums
from coterie.core.tensors import from_bytes, to_bytes
from coterie.data.archives import archives_in
from coterie.data.archives import rows_of as archive_rows
from coterie.data.chats.reading import read_conversations
from coterie.data.rows import rows_of
from coterie.engines.messages import Reply, Request, parsed
from coterie.export.gguf_files import Tokens
from coterie.models.architecture import Architecture, tokenizer
from coterie.models.artifact import ABOUT, WEIGHTS
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import About, save
from coterie.personal.api.requests import ApiError, ChatRequest, CompletionRequest
from coterie.personal.api.requests import parsed as parsed_body
from coterie.personal.model import PersonalModel
from coterie.runs import recipes
from coterie.runs.device import limits
from coterie.runs.device.account import Account
from coterie.runs.recipes import recipe as recipe_files

TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz", ".csv.gz")
ME = ("ann", "user", "a@b")
ARCHIVES = (".json", ".txt", ".mbox", ".jsonl")
ROOM = Path(tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None))


class Target(NamedTuple):
    """A reader.

    Args:
        read: Reads an input.
        seeds: Valid inputs to begin with.
        words: Parts of inputs that random bytes hardly come upon.
    """

    read: Callable[[bytes], object]
    seeds: Callable[[], Sequence[bytes]]
    words: Sequence[str] = ()


def chosen(data: bytes, count: int) -> tuple[int, bytes]:
    """Return a choice among `count` by an input's first byte, and the rest of it."""
    return (data[0] % count, data[1:]) if data else (0, data)


def file_of(data: bytes, name: str) -> Path:
    """Return a file with these bytes."""
    path = ROOM / name
    path.write_bytes(data)
    return path


def wire(data: bytes) -> None:
    """Read a request, a reply or tensors."""
    kind, rest = chosen(data, 3)
    if kind == 2:
        from_bytes(rest)
    else:
        parsed((Request, Reply)[kind], rest.decode(errors="surrogateescape"))


def wire_seeds() -> list[bytes]:
    """Return one of each kind."""
    section = recipe_files.load("quickstart").model_dump(mode="json")
    request = Request(action="task", run="r", recipe=section, client="ann", task="train")
    reply = Reply(client="ann", task="train", metrics={"tokens": 5, "router/train": [[0.5, 0.5]]})
    tensors = to_bytes({"a": torch.zeros(2, 3), "b": torch.arange(3)}, {"format": "pt"})
    texts = (request.model_dump_json(), reply.model_dump_json())
    return [b"\0" + texts[0].encode(), b"\1" + texts[1].encode(), b"\2" + tensors]


def recipe(data: bytes) -> None:
    """Read a recipe."""
    recipe_files.load(str(file_of(data, "recipe.yaml")))


def recipe_seeds() -> list[bytes]:
    """Return all shipped recipes."""
    return [path.read_bytes() for path in sorted(recipes.FOLDER.glob("*.yaml"))]


def limits_seeds() -> list[bytes]:
    """Return limits of every kind."""
    return [
        b"epsilon: 8.0\nlocal_privacy: {noise_at_least: 4.0, clip_at_most: null}\nunit: client\n",
        b"methods: [fedavg, local]\ntasks: [train]\nbases: [embedded]\nruns: 3\nrounds: 10\n",
        b'{"secure": true, "scores": false, "exchanges": 8, "data": ["a:B"], "delta": 1e-6}',
    ]


def account(data: bytes) -> None:
    """Read an account whose checksum is that of its text."""
    path = file_of(f"{sha256(data).hexdigest()}\n".encode() + data, ".account")
    Account(path).epsilon(1e-5)


def account_seeds() -> list[bytes]:
    """Return what an account looks like."""
    run = {"recipe": "r", "masked": [1, 2], "left": {"0": ["c"]}}
    ledger = {"squared": 0.25, "renyi": [], "orders": "", "noised": ["c"], "summed": []}
    return [json.dumps(ledger | {"runs": {"run": run}}).encode()]


@cache
def base() -> Backbone:
    """Return the embedded base."""
    return Backbone.load("embedded")


@cache
def saved() -> dict[str, bytes]:
    """Return the files of a personal model, by their names."""
    layout = Layout(rank=1)
    adapter = LanguageModel(base(), layout).adapter
    about = About("ann", "embedded", layout, 16, "local", "r", 1, 0)
    save(ROOM / "saved", about, dict(adapter.named_parameters()))
    return {name: (ROOM / "saved" / name).read_bytes() for name in (ABOUT, WEIGHTS)}


def personal_model(data: bytes) -> None:
    """Load a personal model of which one file is the input, and have it write a token."""
    kind, rest = chosen(data, 2)
    folder = ROOM / "ann"
    folder.mkdir(exist_ok=True)
    for number, (name, content) in enumerate(saved().items()):
        (folder / name).write_bytes(rest if number == kind else content)
    write_sums(folder, {name: digest_of(folder / name) for name in saved()})
    PersonalModel.load(folder, backbone=base()).generate("I", max_new_tokens=1)


def model_seeds() -> list[bytes]:
    """Return the two files."""
    return [bytes([number]) + content for number, content in enumerate(saved().values())]


def pack(data: bytes) -> None:
    """Read a set of tensors at some place of a pack."""
    offset, length = (int.from_bytes(data[i : i + 8], "little", signed=False) for i in (0, 8))
    packs.Entry(file_of(data[16:], "000001.pack"), offset, length, 0).read()


def pack_seeds() -> list[bytes]:
    """Return packs of one and of two sets."""
    one = to_bytes({"a": torch.zeros(2)})
    return [
        bytes(8) + len(one).to_bytes(8, "little") + one,
        len(one).to_bytes(8, "little") * 2 + one * 2,
    ]


def gguf(data: bytes) -> None:
    """Read a foreign base's tokenizer as what is written into a GGUF file: coterie reads none."""
    folder = ROOM / "tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "tokenizer.json").write_bytes(data)
    Tokens.of(tokenizer(folder), 300)


def gguf_seeds() -> list[bytes]:
    """Return a small byte-level BPE."""
    added = {"id": 3, "content": "</s>", "special": True, "single_word": False}
    added |= {"lstrip": False, "rstrip": False, "normalized": False}
    split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
    whole = {"version": "1.0", "added_tokens": [added], "model": model}
    return [json.dumps(whole | {"pre_tokenizer": split | {"use_regex": True}}).encode()]


def base_folder(data: bytes) -> None:
    """Look at a base's folder whose settings are the input."""
    folder = ROOM / "base"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_bytes(data)
    Architecture.from_base(folder)


def base_seeds() -> list[bytes]:
    """Return the settings of a small base of each of two families."""
    llama = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": 9}
    bases = ({"model_type": "llama"} | llama | heads, {"model_type": "gpt2"} | gpt2)
    return [json.dumps(base).encode() for base in bases]


def table(data: bytes) -> None:
    """Read a table."""
    kind, rest = chosen(data, len(TABLES))
    for _ in rows_of([file_of(rest, f"table{TABLES[kind]}")]):
        pass


def table_seeds() -> list[bytes]:
    """Return tables of each kind."""
    import gzip

    import pyarrow as pa
    from pyarrow import parquet

    rows = [{"client": "ann", "text": 'a "b", c\nd'}, {"client": "ben", "text": "e"}]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    csv = b'client,text\nann,"a ""b"", c\nd"\nben,e\n'
    buffer = io.BytesIO()
    parquet.write_table(pa.Table.from_pylist(rows), buffer)
    contents = (
        lines,
        json.dumps(rows).encode(),
        csv,
        csv.replace(b",", b"\t"),
        buffer.getvalue(),
        gzip.compress(lines),
        gzip.compress(csv),
    )
    return [bytes([number]) + content for number, content in enumerate(contents)]


def chat(data: bytes) -> None:
    """Read conversations, or somebody's archive."""
    kind, rest = chosen(data, len(ARCHIVES))
    path = file_of(rest, f"chats{ARCHIVES[kind]}")
    found = archives_in([path])
    read_conversations(archive_rows(found, ME) if found else rows_of([path]))


def chat_seeds() -> list[bytes]:
    """Return archives and tables of conversations."""
    said = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    telegram = {
        "name": "ben",
        "type": "personal_chat",
        "id": 1,
        "messages": [
            {"id": 1, "type": "message", "date": "2024-01-01T10:00:00", "from": "ann", "text": "a"}
        ],
    }
    mapping = {
        "a": {
            "id": "a",
            "parent": None,
            "children": [],
            "message": {
                "id": "a",
                "author": {"role": "user"},
                "content": {"content_type": "text", "parts": ["hi"]},
            },
        }
    }
    chatgpt = [{"title": "t", "create_time": 1.5, "mapping": mapping, "current_node": "a"}]
    mail = b"From a@b Mon Jan  1 00:00:00 2024\nFrom: ann <a@b>\nTo: ben <c@d>\nSubject: s\n\nhi\n"
    whatsapp = b"01.02.24, 10:00 - ann: hi\n01.02.24, 10:01 - ben: ho\n"
    share = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    lines = ({"messages": said, "tools": [tool]}, share, {"prompt": "a", "completion": "b"})
    return [
        b"\0" + json.dumps(telegram).encode(),
        b"\0" + json.dumps(chatgpt).encode(),
        b"\1" + whatsapp,
        b"\2" + mail,
        *(b"\3" + json.dumps(line).encode() + b"\n" for line in lines),
    ]


def body(data: bytes) -> None:
    """Read the body of a request to the API."""
    kind, rest = chosen(data, 2)
    try:
        request: Any = parsed_body((CompletionRequest, ChatRequest)[kind], rest)
        request.sampling()
        if kind:
            read_conversations([("body", {"messages": request.messages, "tools": request.tools})])
    except ApiError:  # with a status of HTTP's
        return


def body_seeds() -> list[bytes]:
    """Return a request of each kind."""
    shared = {"model": "ann", "n": 2, "temperature": 0.5, "stop": ["a"], "logit_bias": {"5": -1}}
    said = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    bodies = (
        {"prompt": "a", "logprobs": 2, "echo": True},
        {"messages": said, "tools": [], "stream": True, "top_logprobs": 2, "logprobs": True},
    )
    return [bytes([kind]) + json.dumps(shared | own).encode() for kind, own in enumerate(bodies)]


def fields(*models: Any) -> list[str]:
    """Return the names of the fields of what pydantic reads."""
    return [name for model in models for name in model.model_fields]


TARGETS = {
    "wire": Target(wire, wire_seeds, fields(Request, Reply)),
    "recipes": Target(recipe, recipe_seeds, ("kind:", "name:", "&a", "*a", "<<:", "!!", "null")),
    "limits": Target(
        lambda data: limits.read(file_of(data, "limits.yaml")),
        limits_seeds,
        fields(limits.Limits, limits.LocalPrivacy),
    ),
    "accounts": Target(account, account_seeds, ("squared", "renyi", "orders", "runs", "left")),
    "personal-models": Target(personal_model, model_seeds, [*About.__dataclass_fields__, "F32"]),
    "packs": Target(pack, pack_seeds, ("dtype", "shape", "data_offsets", "F32", "I64", "BOOL")),
    "gguf": Target(gguf, gguf_seeds, ("vocab", "merges", "added_tokens", "BPE", "Split")),
    "bases": Target(base_folder, base_seeds, ("gpt2", "gemma3_text", "rope_theta", "head_dim")),
    "tables": Target(table, table_seeds, ("client", "text", '"",""', "sep=;", "\ufeff")),
    "chats": Target(chat, chat_seeds, ("messages", "role", "content", "mapping", "text_entities")),
    "api": Target(body, body_seeds, fields(CompletionRequest, ChatRequest)),
}


def run(target: Target, data: bytes) -> None:
    """Read one input. Raises whatever is no CoterieError."""
    try:
        target.read(data)
    except CoterieError as error:
        str(error).encode()  # it can be printed
