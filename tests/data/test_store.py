"""The cache of token streams."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coterie.core.errors import DataError, SaveError
from coterie.data import Folders
from coterie.data.federation import Federation
from coterie.data.store import default_cache, dtype_for, key_of

WORDS = "the cat and the dog and the bird "


@pytest.fixture
def folders(tmp_path: Path) -> Folders:
    for client in ("ann", "bob"):
        for i in range(20):
            path = tmp_path / "texts" / client / f"{i:02}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{client} {i} " + WORDS * 5, encoding="utf-8")
    return Folders(path=tmp_path / "texts")


def entries() -> list[Path]:
    return list(default_cache().iterdir())


def sizes(federation: Federation) -> list[int]:
    return [len(split) for data in federation.clients.values() for split in data.splits]


def test_the_second_load_encodes_nothing_whatever_the_context(folders, tokenizer) -> None:
    first = folders.load(tokenizer, 8)
    assert len(tokenizer.texts) == 40
    second = folders.load(tokenizer, 16, order_seed=1)
    assert len(tokenizer.texts) == 40
    assert np.array_equal(first.clients["ann"].train.tokens, second.clients["ann"].train.tokens)
    assert first.clients["ann"].train.tokens.dtype == np.uint16
    assert not first.clients["ann"].train.tokens.flags.writeable


def test_what_the_tokens_depend_on_makes_an_entry_of_its_own(
    folders, tokenizer, make_tokenizer
) -> None:
    folders.load(tokenizer, 8)
    folders.model_copy(update={"seed": 1}).load(tokenizer, 8)
    folders.load(make_tokenizer(270), 8)
    folders.load(make_tokenizer(end=None), 8)
    assert len(entries()) == 4
    (folders.path / "ann/00.txt").write_text("changed " + WORDS, encoding="utf-8")
    folders.load(tokenizer, 8)
    assert len(entries()) == 5


@pytest.mark.parametrize(
    "damage", ["cut", "no tokens", "no manifest", "bad manifest", "empty manifest"]
)
def test_a_damaged_entry_is_built_again(folders, tokenizer, damage: str) -> None:
    first = sizes(folders.load(tokenizer, 8))
    [entry] = entries()
    tokens, manifest = entry / "tokens.bin", entry / "manifest.json"
    {
        "cut": lambda: tokens.write_bytes(tokens.read_bytes()[:-2]),
        "no tokens": tokens.unlink,
        "no manifest": manifest.unlink,
        "bad manifest": lambda: manifest.write_text("{"),
        "empty manifest": lambda: manifest.write_text(json.dumps({})),
    }[damage]()
    assert sizes(folders.load(tokenizer, 8)) == first
    assert len(tokenizer.texts) == 80
    assert len(entries()) == 1  # nothing is left behind


def test_a_refusal_leaves_nothing_in_the_cache(folders, tokenizer) -> None:
    with pytest.raises(DataError):
        folders.model_copy(update={"train_tokens": (1, 2, 3)}).load(tokenizer, 8)
    assert not default_cache().exists()


def test_another_process_may_be_faster(folders, tokenizer, monkeypatch) -> None:
    read = Folders._read

    def slow(self, *found):
        monkeypatch.setattr(Folders, "_read", read)
        folders.load(tokenizer, 8)  # the other process
        return read(self, *found)

    monkeypatch.setattr(Folders, "_read", slow)
    assert folders.load(tokenizer, 8).clients.keys() == {"ann", "bob"}
    assert len(entries()) == 1


def test_a_cache_that_cannot_be_written(folders, tokenizer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(SaveError, match="COTERIE_CACHE"):
        folders.load(tokenizer, 8, cache=tmp_path / "file")


def test_vocabularies_with_large_ids_take_four_bytes(make_tokenizer: Callable, monkeypatch) -> None:
    tokenizer = make_tokenizer()
    assert dtype_for(tokenizer) is np.uint16
    ids = tokenizer.get_vocab() | {"far": 2**16}  # no more than 300 tokens: the ids have a hole
    monkeypatch.setattr(type(tokenizer), "get_vocab", lambda _: ids)
    assert dtype_for(tokenizer) is np.uint32


def test_slow_tokenizers_are_refused() -> None:
    with pytest.raises(DataError, match="not a fast tokenizer"):
        key_of(object())


def test_the_cache_folder(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("COTERIE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache() == tmp_path / "coterie"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache/coterie"
