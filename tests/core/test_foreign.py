"""Files that others may have written: pipes, sizes, keys that occur twice, nesting, numbers."""

import io
import json
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.core import foreign
from coterie.core.errors import CheckpointError, CoterieError, DataError, TensorError
from coterie.core.files import load, read_json, save
from coterie.core.packs import Entry
from coterie.core.tensors import MOST_OF_ONE, from_bytes, to_bytes
from coterie.data.archives import archives_in
from coterie.data.chats.fields import template_text
from coterie.data.plain_text import read_text
from coterie.data.rows import rows_of
from coterie.engines.messages import Reply, parsed
from coterie.models.architecture import Architecture, locate
from coterie.models.networks import NetworkShape
from coterie.personal.api.requests import ApiError, CompletionRequest
from coterie.personal.api.requests import parsed as parsed_body
from coterie.personal.samples import as_samples
from coterie.runs.device import limits
from coterie.runs.recipes import recipe as recipes


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    """What waits for ever fails instead."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


IMAGES = NetworkShape("mlp", (1, 8, 8), 2)
READERS: dict[str, Callable[[Path], Any]] = {
    "recipe.yaml": lambda path: recipes.load(str(path)),
    "limits.yaml": limits.read,
    "client.json": read_json,
    "adapter.safetensors": load,
    "000001.pack": lambda path: Entry(path, 0, 8, 0).read(),
    "template.jinja": lambda path: template_text(str(path)),
    "text.txt": read_text,
    "text.txt.gz": read_text,
    "image.png": lambda path: as_samples(path, IMAGES),
    **{
        f"table{ending}": lambda path: list(rows_of([path]))
        for ending in (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".jsonl.gz")
    },
}


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_refused_and_not_waited_for(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises((CoterieError, ValueError), match=r"no such file|not a regular file"):
        READERS[name](tmp_path / name)


def test_a_pipe_in_a_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    locate(tmp_path)
    for name in ("model.safetensors", "tokenizer.json"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(CoterieError, match=rf"{name}: cannot be read \(not a regular file\)"):
            locate(tmp_path)
        (tmp_path / name).unlink()


def test_a_device_without_end_is_no_file() -> None:
    with pytest.raises(OSError, match="not a regular file"):
        foreign.read_bytes(Path("/dev/zero"))


def test_the_file_that_is_open_is_the_one_that_is_read(tmp_path: Path) -> None:
    """Whatever is put in its place meanwhile."""
    save(tmp_path / "a", {"x": torch.ones(2)})
    with foreign.opened(tmp_path / "a") as file:
        (tmp_path / "a").unlink()
        os.mkfifo(tmp_path / "a")
        assert load(Path(foreign.path_of(file, tmp_path / "a")))[0]["x"].tolist() == [1, 1]


def test_size_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "client.json"
    path.write_bytes(b"{}")
    os.truncate(path, 10**12)  # sparse: reading it would take all memory
    with pytest.raises(CheckpointError, match="1,000,000,000,000 bytes, at most 268,435,456"):
        read_json(path)
    for read in (limits.read, lambda path: recipes.load(str(path))):
        path = tmp_path / "long.yaml"
        path.write_bytes(b"# " + b"x" * 1_000_000)
        with pytest.raises(CoterieError, match="1,000,002 bytes, at most 1,000,000 are read"):
            read(path)


TWICE = {
    '{"epsilon": 1, "epsilon": 400}': "key 'epsilon' occurs twice in one object",
    '{"a": [1, {"b": {"x": 1, "y": 2, "x": 1}}]}': "'a': 1: 'b': key 'x' occurs twice",
    '{"a": 1, "\\u0061": 2}': "key 'a' occurs twice",
    '{"\\ud800": {"\\ud801": 1, "\\ud801": 2}}': r"'\\ud800': key '\\ud801' occurs",
}
ODD = TWICE | {
    "[" * 900 + '{"a": 1, "a": 1}' + "]" * 900: "nested more than 50 deep|: key 'a' occurs twice",
    '{"a": {"x": 1, "x": 2}, "b": ' + "[" * 10**5 + "]" * 10**5 + "}": "nested more than 50 deep",
    "NaN": "NaN is no finite number",
    '{"a": -Infinity}': "-Infinity is no finite number",
    "[1e999]": "1e999 is no finite number",
    "[" * 51 + "]" * 51: "nested more than 50 deep",
    "[" * 10**6: "nested more than 50 deep",
    "1" * 5000: "a number of 5,000 digits",
    '"\\ud800"': "half of a surrogate pair",
    '{"\\udc00x": 1}': "half of a surrogate pair",
    '["\udc80"]': "half of a surrogate pair|invalid continuation byte",
    "[1,]": "Expecting value",
    "": "Expecting value",
}


@pytest.mark.parametrize("text", ODD)
def test_odd_json_is_refused_by_name(text: str, tmp_path: Path) -> None:
    for given_text in (text, text.encode(errors="surrogatepass")):
        with pytest.raises(ValueError, match=ODD[text]):
            foreign.json_of(given_text)
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=f"a.json is damaged .*({ODD[text]})"):
        read_json(tmp_path / "a.json")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text() | st.floats(width=32),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(VALUES)
def test_other_json_is_read_as_python_reads_it(value: Any) -> None:
    text = json.dumps(value)
    expected = json.loads(text)
    assert json.dumps(foreign.json_of(text, finite=False)) == json.dumps(expected)
    if "NaN" not in text and "Infinity" not in text:
        assert foreign.json_of(text.encode()) == expected


YAML = {
    "epsilon: 1.0\nepsilon: 400.0": "line 2: key 'epsilon' occurs twice",
    "a:\n  b: 1\n  c: 2\n  'b': 3": "line 4: key 'b' occurs twice",
    "{a: {1: x, 0x1: y}}": "line 1: key 1 occurs twice",
    "a: {<<: {b: 1}, <<: {b: 2}}": "key '<<' occurs twice",
}


@pytest.mark.parametrize("text", YAML)
def test_a_key_twice_in_yaml_is_refused_by_name_and_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    for read in (limits.read, lambda path: recipes.load(str(path))):
        with pytest.raises(CoterieError, match=YAML[text]):
            read(path)


@pytest.mark.parametrize(
    "field", ["epsilon", "delta", "runs", "rounds", "exchanges", "local_privacy.noise_at_least"]
)
def test_true_is_no_number_of_limits(field: str, tmp_path: Path) -> None:
    """`epsilon: true` once was an epsilon of 1."""
    section, _, name = field.rpartition(".")
    (tmp_path / "limits.yaml").write_text(
        f"{section}: {{{name}: true}}" if section else f"{name}: true"
    )
    with pytest.raises(CoterieError, match=f"{field}: must be a number, found true"):
        limits.read(tmp_path / "limits.yaml")


def test_what_a_merge_brings_may_be_said_anew() -> None:
    assert foreign.yaml_of("x: &x {a: 1, b: 2}\ny: {<<: *x, a: 3}")["y"] == {"a": 3, "b": 2}


def test_a_setting_with_a_key_twice_is_refused() -> None:
    with pytest.raises(CoterieError, match="key 'noise' occurs twice"):
        recipes.load("quickstart", ["privacy={noise: 1, clip: 1, noise: 0}"])


@pytest.mark.parametrize("name", ["table.jsonl", "table.json"])
def test_a_key_twice_in_a_row_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text('[{"client": "a", "client": "b"}]'[name == "table.jsonl" : None])
    if name == "table.jsonl":
        (tmp_path / name).write_text('{"client": "a", "client": "b"}\n')
    with pytest.raises(DataError, match="key 'client' occurs twice"):
        list(rows_of([tmp_path / name]))


def test_a_key_twice_in_messages_is_refused() -> None:
    text = Reply(client="ann").model_dump_json()
    parsed(Reply, text)
    with pytest.raises(TensorError, match="reply: key 'client' occurs twice"):
        parsed(Reply, text.replace("{", '{"client":"ben",', 1))
    with pytest.raises(ApiError, match="key 'n' occurs twice"):
        parsed_body(CompletionRequest, b'{"model": "ann", "n": 1, "n": 2}')


def test_a_key_twice_in_a_base_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "model_type": "gpt2"}')
    with pytest.raises(CoterieError, match="key 'model_type' occurs twice"):
        locate(tmp_path)


def test_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    """The safetensors library takes the last one."""
    entry = '"dtype":"%s","shape":[1],"data_offsets":[0,4]'
    header = f'{{"x":{{{entry % "F32"}}},"x":{{{entry % "I32"}}}}}'.encode()
    content = struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(CheckpointError, match="key 'x' occurs twice"):
        load(tmp_path / "a")
    with pytest.raises(TensorError, match="key 'x' occurs twice"):
        from_bytes(content)


def test_a_long_header_is_not_parsed(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(struct.pack("<Q", 99_000_002) + b"{" + b" " * 99_000_000 + b"}")
    with pytest.raises(CheckpointError, match="a header of 99,000,002 bytes, at most 16,777,216"):
        load(tmp_path / "a")


def test_a_hundred_thousand_tensors_of_one_client_are_not_parsed(tmp_path: Path) -> None:
    """Eight seconds of work for a reply of 6 MB without a value in it."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"x{k}": entry for k in range(100_000)}).encode()
    content = struct.pack("<Q", len(header)) + header
    (tmp_path / "a").write_bytes(content)
    begun = time.process_time()
    with pytest.raises(TensorError, match="at most 2,097,152 are read"):
        from_bytes(content, most_header=MOST_OF_ONE)
    with pytest.raises(CheckpointError, match="at most 2,097,152 are read"):
        load(tmp_path / "a", MOST_OF_ONE)
    assert time.process_time() - begun < 0.5


@pytest.mark.parametrize(("offset", "length"), [(0, 2**62), (2**70, 8), (8, 2**40)])
def test_what_a_pack_cannot_hold_is_not_read(offset: int, length: int, tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(to_bytes({"a": torch.zeros(2)}))
    with pytest.raises(CheckpointError, match="truncated"):
        Entry(tmp_path / "p", offset, length, 8).content()


def test_text_is_read_as_python_reads_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a\r\nb\rc\n")
    assert foreign.read_text(tmp_path / "a") == io.open(tmp_path / "a").read()  # noqa: SIM115, UP020


def test_archives_in_pipes_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chat.json")
    assert archives_in([tmp_path / "chat.json"]) == []


def test_tensors_beyond_memory_are_not_loaded(tmp_path: Path) -> None:
    """A sparse file takes no room on a disk, and all of the memory."""
    numbers = 2**40
    entry = {"dtype": "F32", "shape": [numbers], "data_offsets": [0, 4 * numbers]}
    header = json.dumps({"x": entry}).encode()
    (tmp_path / "a").write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(tmp_path / "a", 8 + len(header) + 4 * numbers)
    with pytest.raises(CheckpointError, match=r"4,398,046,511,[0-9]+ bytes of tensors do not fit"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "llama", "num_hidden_layers": 10**9},
        {"model_type": "qwen2", "num_hidden_layers": 10**9},
        {"model_type": "gpt2", "n_layer": 10**9},
        {"model_type": "mixtral", "num_local_experts": 10**9},
        {"model_type": "llama", "num_labels": 10**12},
        {"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**9}},
    ],
)
def test_a_base_of_a_billion_layers_is_not_made(settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(CoterieError, match=r"is 1,000,000,000(,000)?, at most 1,000(,000)? are"):
        Architecture.from_base(tmp_path)
