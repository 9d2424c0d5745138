"""Odd, broken and hostile inputs become messages that name them: never a traceback, a hang, or
all of the memory.
"""

import gzip
import json
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from coterie import personal
from coterie.cli.base import app
from coterie.core.errors import CheckpointError, CoterieError, DataError, Refused, TensorError
from coterie.core.files import write_all_sums
from coterie.core.tensors import from_bytes, to_bytes
from coterie.data.federation import check_id
from coterie.data.folders import Folders
from coterie.data.store import LONGEST
from coterie.data.text_encoding import TextEncoder
from coterie.data.text_streams import RunningText, SplitTexts
from coterie.models.architecture import tokenizer
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.runs import run as runs
from coterie.runs.recipes import recipe as recipes

# Recipes

SETTINGS = {
    "a date": ("seed=2020-99-99", "month must be in 1..12"),
    "a date that is one": ("seed=2020-01-01", "seed: input should be a valid integer"),
    "5,000 digits": ("seed=" + "9" * 5000, "not valid YAML"),
    "4,000 digits": ("method.rounds=" + "9" * 4000, "method.rounds: must be below 2"),
    "hexadecimal name": ("name=0x" + "f" * 6000, "name: "),
    "base 60": ("seed=" + "1:" * 200_000 + "1", "a number of 400,001 characters"),
    "hexadecimal": ("seed=0x" + "f" * 6000, "seed: must be below 2"),
    "a timestamp": ("seed=!!timestamp x", "not valid YAML"),
    "a bool": ("seed=!!bool x", "not valid YAML"),
    "code": ("seed=!!python/object/apply:os.system [touch x]", "not valid YAML"),
    "deep lists": ("seed=" + "[" * 2000, "not valid YAML"),
    "deep sections": (
        "seed=" + "{a: " * 100 + "}" * 100,
        "sections nested more than 50 deep",
    ),
    "itself": ("seed=&a [*a]", "sections nested more than 50 deep"),
    "a list for a section": ("model=[]", "model: kind should be"),
    "nothing for a section": ("data=null", "data: input should be"),
    "half a pair": ('description="\\ud800"', "surrogate"),
    "a NUL": ("seed=\0", "not valid YAML"),
    **{
        f"{key} {value}": (f"{key}={value}", f"{key}: must be a finite number")
        for key in (
            "training.experts.lr",
            "model.alpha",
            "model.dropout",
            "quorum.deadline",
            "memory",
            "data.fractions",
        )
        for value in (".inf", "-.inf", ".nan")
    },
    "noise": ("privacy={noise: .inf, clip: 1}", "privacy.noise: must be a finite number"),
    "clip": ("privacy={noise: 1, clip: .nan}", "privacy.clip: must be a finite number"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_odd_settings_are_refused_by_name(name: str) -> None:
    setting, message = SETTINGS[name]
    with pytest.raises(Refused, match=message) as caught:
        recipes.load("quickstart", [setting])
    assert len(str(caught.value)) < 1500


LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + k)}: &{chr(98 + k)} [{','.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(8)
)
GOOD = "data: {kind: stdlib}\nmethod: {name: local}\n"
FILES = {
    "a billion laughs": (
        (LAUGHS + GOOD).encode(),
        "aliases that stand for more than 100,000 values",
    ),
    "deep lists": (
        f"data: {'[' * 20_000}{']' * 20_000}".encode(),
        "sections nested more than 50 deep",
    ),
    "within itself": (
        b"data: &a {kind: *a}\nmethod: {name: local}",
        "sections nested more than 50 deep",
    ),
    "50 MB": (
        GOOD.encode() + b"# " + b"x" * (50 << 20),
        r"52,4\d\d,\d{3} bytes, at most 1,000,000 are read",
    ),
    "UTF-16": ("data: x".encode("utf-16"), "not valid YAML"),
    "NULs": (bytes(1000), "not valid YAML"),
    "nothing": (b"", "not a mapping of sections"),
    "two documents": (b"a: 1\n---\nb: 2\n", "not valid YAML"),
    "a date for a key": (b"2020-01-01: x\n" + GOOD.encode(), "2020-01-01: unknown key"),
}


@pytest.mark.parametrize("name", FILES)
def test_odd_recipes_are_refused(name: str, tmp_path: Path) -> None:
    content, message = FILES[name]
    (tmp_path / "r.yaml").write_bytes(content)
    with pytest.raises(Refused, match=message):
        recipes.load(str(tmp_path / "r.yaml"))


def test_aliases_that_are_meant_are_fine(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text(
        "data: {kind: stdlib}\nmethod: {name: local}\ntraining: {experts: &e {lr: 0.5}, routers: "
        "*e}\n"
    )
    assert recipes.load(str(tmp_path / "r.yaml")).training.routers.lr == 0.5


def test_a_recipe_over_the_wire_is_no_exception() -> None:
    section = recipes.load("quickstart").model_dump(mode="json")
    for value in (float("nan"), 10**30, "\ud800"):
        with pytest.raises(Refused, match="training"):
            recipes.validate(section | {"training": {"batch_size": value}}, "of the server")


# Data


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for name in ("ann", "ben"):
        (tmp_path / "texts" / name).mkdir(parents=True)
        for k in range(12):
            (tmp_path / "texts" / name / f"{k}.txt").write_text(
                f"{name} wrote {k} lines of text about gardens and the sea. " * 5
            )
    return tmp_path / "texts"


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "x.txt")


ODD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a number of 5,000 digits": (
        lambda f: (f / "x.jsonl").write_text('{"text":"a b c","n":' + "1" * 5000 + "}\n"),
        "x.jsonl:1: not JSON",
    ),
    "a deep row": (
        lambda f: (f / "x.jsonl").write_text("[" * 100_000 + "\n"),
        "x.jsonl:1: not JSON",
    ),
    "half a pair": (
        lambda f: (f / "x.jsonl").write_text('{"text":"\\ud800"}\n'),
        "x.jsonl:1: column 'text' is not valid text \\(half of a surrogate pair\\)",
    ),
    "latin1": (lambda f: (f / "x.txt").write_bytes(b"caf\xe9"), "x.txt:1: not UTF-8"),
    "a bomb": (
        lambda f: (f / "x.jsonl.gz").write_bytes(gzip.compress(b"x" * (65 << 20), 9)),
        "would expand to more than 67,108,864",
    ),
    "half a gzip file": (
        lambda f: (f / "x.jsonl.gz").write_bytes(gzip.compress(b"x" * 1000)[:20]),
        "damaged gzip",
    ),
    "a loop": (lambda f: (f / "loop").symlink_to(f), "loop is a link to"),
    "two loops": (
        lambda f: [(f / name).symlink_to(f.parent) for name in ("up", "down")],
        "is a link to",
    ),
    "a link to nowhere": (
        lambda f: (f / "x.txt").symlink_to("/nowhere"),
        "x.txt: a broken link",
    ),
    "a link to itself": (
        lambda f: (f / "x.txt").symlink_to(f / "x.txt"),
        "x.txt: a broken link",
    ),
    "a pipe": (_pipe, "x.txt: not a regular file"),
    "a long name": (lambda f: f.rename(f.with_name("x" * 101)), "has 101 characters"),
    "no test": (
        lambda f: [(f / "train").mkdir(), (f / "train/a.txt").write_text("hi there")],
        "ann has train but no valid, test",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_data_is_refused_by_name(
    name: str, texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    make, message = ODD[name]
    make(texts / "ann")
    with pytest.raises(DataError, match=message):
        Folders(path=texts).load(tokenizer(tiny_base), 8, tmp_path / "cache")


def test_a_folder_of_a_files_name_and_a_link_to_a_file_are_fine(
    texts: Path, tiny_base: Path, tmp_path: Path
) -> None:
    (texts / "ann/x.txt").mkdir()
    (texts / "ann/y.txt").symlink_to(texts / "ben/1.txt")
    (texts / "ann/ben").symlink_to(texts / "ben")
    found = Folders(path=texts).load(tokenizer(tiny_base), 8, tmp_path / "cache")
    assert list(found.clients) == ["ann", "ben"]


@pytest.mark.slow
def test_a_line_of_50_mb_takes_a_bounded_amount_of_memory(texts: Path, tmp_path: Path) -> None:
    """Of twelve gigabytes, where a tokenizer that got it whole would take ten."""
    (texts / "ann/x.jsonl").write_text(json.dumps({"text": "word and more " * 3_700_000}) + "\n")
    code = f"""
import resource
from pathlib import Path
from coterie.data.folders import Folders
from coterie.models.architecture import tokenizer
tokens = tokenizer("embedded")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
texts, cache = Path({str(texts)!r}), Path({str(tmp_path / "cache")!r})
Folders(path=texts, train_tokens=3_000_000).load(tokens, 64, cache)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < 1500  # MB


def test_what_is_encoded_in_parts_is_what_is_encoded_at_once(tiny_base: Path) -> None:
    tokens = tokenizer(tiny_base)
    texts = ["word and more " * 80_000, "", "a b"]
    encoder = RunningText(TextEncoder(tokens))

    def encoded(limit: int | None) -> list[int]:
        streams = encoder.streams([SplitTexts("ann", "train", texts, limit)], 64)
        return [int(i) for _, _, pieces in streams for piece in pieces for i in piece]

    whole = [
        i
        for text in texts
        for i in [*tokens(text, add_special_tokens=False)["input_ids"], tokens.eos_token_id]
    ]
    assert encoded(None) == whole
    assert len(texts[0]) > LONGEST
    assert encoded(1_010_000) == whole[:1_010_000]


def test_long_ids_are_refused_before_anything_is_written() -> None:
    check_id("x" * 100)
    with pytest.raises(DataError, match="it has 240 characters"):
        check_id("x" * 240)


# Personal models


@pytest.fixture(scope="module")
def model(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, backbone = tmp_path_factory.mktemp("model") / "ann", Backbone.load(tiny_base)
    about = personal.About("ann", str(tiny_base), Layout(), 16, "local", "r", 1, 0)
    personal.save(folder, about, dict(LanguageModel(backbone, Layout()).adapter.named_parameters()))
    return folder


def header(found: dict[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(found).encode()
    return struct.pack("<Q", len(text)) + text + body


BIG = {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 16]}
CLIENT_JSON: dict[str, Callable[[dict[str, Any]], Any]] = {
    "base above": lambda j: j.update(base="../../../../etc"),
    "base a file": lambda j: j.update(base="/etc/passwd"),
    "base a number": lambda j: j.update(base=5),
    "base a list": lambda j: j.update(base=["a"]),
    "base nothing": lambda j: j.update(base=""),
    "base NUL": lambda j: j.update(base="a\0b"),
    "rank 1e9": lambda j: j["layout"].update(rank=10**9),
    "rank 1e18": lambda j: j["layout"].update(rank=10**18),
    "rank 1e30": lambda j: j["layout"].update(rank=10**30),
    "rank text": lambda j: j["layout"].update(rank="8"),
    "rank -1": lambda j: j["layout"].update(rank=-1),
    "rank true": lambda j: j["layout"].update(rank=True),
    "generalists 1e9": lambda j: j["layout"].update(generalists=10**9),
    "generalists 1e12": lambda j: j["layout"].update(generalists=10**12),
    "alpha NaN": lambda j: j["layout"].update(alpha=float("nan")),
    "dropout 2": lambda j: j["layout"].update(dropout=2),
    "routing odd": lambda j: j["layout"].update(routing="odd"),
    "layout null": lambda j: j.update(layout=None),
    "layout list": lambda j: j.update(layout=[1]),
    "layout more": lambda j: j["layout"].update(evil=1),
    "context text": lambda j: j.update(context="x"),
    "client list": lambda j: j.update(client=[1]),
    "kind": lambda j: j.update(kind="classifier"),
    "kind list": lambda j: j.update(kind=["classifier"]),
    "format": lambda j: j.update(format=2),
    "format list": lambda j: j.update(format=[1]),
    "more": lambda j: j.update(evil=1),
    "less": lambda j: j.pop("round"),
}
WHOLE: dict[str, Callable[[Path], Any]] = {
    "json deep": lambda f: (f / "client.json").write_text("[" * 200_000),
    "json a number": lambda f: (f / "client.json").write_text('{"format":' + "9" * 5000 + "}"),
    "json a list": lambda f: (f / "client.json").write_text("[]"),
    "json latin1": lambda f: (f / "client.json").write_bytes(b'{"format": "\xe9"}'),
    "json a folder": lambda f: ((f / "client.json").unlink(), (f / "client.json").mkdir()),
    "tensors empty": lambda f: (f / "adapter.safetensors").write_bytes(b""),
    "tensors a pickle": lambda f: torch.save({"x": torch.zeros(1)}, f / "adapter.safetensors"),
    "tensors a folder": lambda f: (
        (f / "adapter.safetensors").unlink(),
        (f / "adapter.safetensors").mkdir(),
    ),
    "tensors huge": lambda f: (f / "adapter.safetensors").write_bytes(
        header({"a": BIG}, bytes(16))
    ),
    "header huge": lambda f: (f / "adapter.safetensors").write_bytes(
        struct.pack("<Q", 2**63) + b"{}"
    ),
    "none": lambda f: (f / "adapter.safetensors").write_bytes(header({})),
}


@pytest.mark.parametrize("name", [*CLIENT_JSON, *WHOLE])
def test_odd_personal_models_are_refused(name: str, model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "ann"))
    if name in WHOLE:
        WHOLE[name](folder)
    else:
        found = json.loads((folder / "client.json").read_text())
        CLIENT_JSON[name](found)
        (folder / "client.json").write_text(json.dumps(found))
    write_all_sums(folder)  # by whoever means harm
    with bounded():
        for words in (
            ["predict", "--text", "in"],
            ["generate", "--text", "in"],
            ["export", "--out", str(tmp_path / "peft")],
        ):
            done = CliRunner().invoke(app, [words[0], str(folder), *words[1:]])
            assert done.exit_code == 2, f"{done.output}\n{done.exception!r}"
            assert done.output.startswith("coterie: ")


@contextmanager
def bounded(more: int = 4 << 30) -> Iterator[None]:
    """Within the block, address space may grow by so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_odd_classifiers_are_refused(tmp_path: Path) -> None:
    settings = ("method.rounds=1", "compare_with=[]", "data.clients=6", "data.unseen={aligned: 2}")
    runs.run(recipes.load("ddome-digits", settings), tmp_path / "run")
    folder = next(path for path in sorted((tmp_path / "run/clients").iterdir()))
    text = (folder / "client.json").read_text()
    odd: list[Callable[[dict[str, Any]], Any]] = [
        lambda j: j["network"].update(hidden=[10**9]),
        lambda j: j["network"].update(hidden=[10**15, 10**15]),
        lambda j: j["network"].update(classes=10**12),
        lambda j: j["network"].update(hidden="x"),
        lambda j: j["pool"].update(size=10**9),
        lambda j: j["pool"].update(gate_width=10**10),
        lambda j: j["pool"].update(experts=[-1]),
        lambda j: j["pool"]["common"].update(hidden=[10**10]),
        lambda j: j.update(network={"base": "/etc/passwd", "classes": 10, "length": 5}),
        lambda j: j.update(names=[1]),
        lambda j: j.update(network=None),
        lambda j: j.pop("kind"),
    ]
    with bounded():
        for change in odd:
            found = json.loads(text)
            change(found)
            (folder / "client.json").write_text(json.dumps(found))
            write_all_sums(folder)
            with pytest.raises(Refused):
                personal.load(folder)


# Messages


_DTYPES = st.sampled_from(
    ["F32", "F64", "F16", "BF16", "I64", "U8", "BOOL", "F8_E4M3", "U64", "C64", "F4", "XX"]
)
_SIZES = st.sampled_from([0, 1, 2, 3, 2**31, 2**40, 2**62, 2**63, 2**64 - 1, -1, 1.5, "x"])
_OFFSETS = st.lists(
    st.sampled_from([0, 4, 8, 12, 16, 64, -1, 2**63, 2**64 - 1, 2**64]), min_size=2, max_size=2
)
_ENTRY = st.fixed_dictionaries(
    {"dtype": _DTYPES, "shape": st.lists(_SIZES, max_size=4), "data_offsets": _OFFSETS}
)
_NAMES = st.sampled_from(["a", "b", "__metadata__", "", "../x", "\0"])
GOOD_MESSAGE = to_bytes(
    {"a": torch.randn(3, 4), "b": torch.arange(5), "c": torch.randn(2, 2).to(torch.bfloat16)}
)


def decoded(data: bytes) -> None:
    """Nothing but tensors or an error of ours comes back."""
    try:
        found = from_bytes(data)
    except TensorError:
        return
    assert all(isinstance(tensor, torch.Tensor) for tensor in found.values())


@settings(max_examples=400)
@given(st.dictionaries(_NAMES, _ENTRY, max_size=3), st.binary(max_size=80), st.integers(-1, 1))
def test_headers_of_any_kind_are_tensors_or_refused(
    found: dict[str, Any], body: bytes, off: int
) -> None:
    text = json.dumps(found).encode()
    decoded(struct.pack("<Q", max(len(text) + off, 0)) + text + body)


@settings(max_examples=400)
@given(
    st.lists(st.tuples(st.integers(0, len(GOOD_MESSAGE) - 1), st.integers(0, 255)), max_size=6),
    st.integers(0, len(GOOD_MESSAGE)),
)
def test_changed_bytes_are_tensors_or_refused(changes: list[tuple[int, int]], cut: int) -> None:
    data = bytearray(GOOD_MESSAGE)
    for place, value in changes:
        data[place] = value
    decoded(bytes(data))
    decoded(bytes(data[:cut]))


# A full disk, and paths that are no text


@pytest.mark.parametrize("size", [0, 200, 3_000, 20_000])
def test_a_disk_that_is_full_from_some_file_on_is_a_message(size: int, tmp_path: Path) -> None:
    words = [
        "run",
        "cobo-digits",
        "--set",
        "method.rounds=3",
        "--set",
        "compare_with=[]",
        "--set",
        "checkpoint_every=1",
    ]
    before, handler = (
        resource.getrlimit(resource.RLIMIT_FSIZE),
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "o")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert done.exit_code == 1, done.output
    assert "File too large" in done.output
    assert isinstance(done.exception, SystemExit)
    done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "o"), "--resume"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    "name", ["tensorboard", "metrics.jsonl", "checkpoints", "recipe.yaml", "inputs.json", "lock"]
)
def test_a_folder_with_something_else_in_the_way_is_a_message(name: str, tmp_path: Path) -> None:
    if name in ("tensorboard", "checkpoints"):
        (tmp_path / name).write_text("x")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(CoterieError):
        runs.run(
            recipes.load(
                "cobo-digits", ["method.rounds=2", "compare_with=[]", "checkpoint_every=1"]
            ),
            tmp_path,
            resume=True,
        )


def test_a_path_that_is_no_text_can_be_said(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "coterie",
            "predict",
            os.fsencode(tmp_path) + b"/caf\xe9",
            "--text",
            "in",
        ],
        env=os.environ | {"PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert b"Traceback" not in done.stderr


def test_errors_of_checkpoints_and_models_are_refusals() -> None:
    assert CheckpointError.exit_code == 2
