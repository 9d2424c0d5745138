"""Token streams on disk: encoded once, then memory-mapped by every process."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from coterie.core.errors import SaveError
from coterie.core.files import writing
from coterie.core.foreign import json_of, read_bytes
from coterie.core.protocol import ClientId
from coterie.data.splits import Tokens
from coterie.data.text_encoding import backend_of

FORMAT = 2  # raise it whenever equal keys would no longer mean equal tokens

Streams = Iterable[tuple[ClientId, str, Iterable[Tokens]]]  # client, split, the ids in pieces

# characters encoded at a time, and of a text in one piece: a tokenizer takes 200 bytes for each
LONGEST = 1_000_000

NO_SPACE = (
    "Free some space there, or name another folder in the environment variable COTERIE_CACHE."
)


T = TypeVar("T")


class Tokenizer(Protocol):
    """The part of a fast tokenizer of transformers that is used here."""

    eos_token_id: int | None
    backend_tokenizer: Any

    def get_vocab(self) -> dict[str, int]: ...


def default_cache() -> Path:
    """Return $COTERIE_CACHE, else $XDG_CACHE_HOME/coterie, else ~/.cache/coterie."""
    if folder := os.environ.get("COTERIE_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "coterie"


def key_of(tokenizer: Tokenizer, *parts: Any) -> str:
    """Return the name of a cache entry: a hash of tokenizer and JSON values. Raises DataError."""
    backend = backend_of(tokenizer).to_str()
    text = json.dumps([FORMAT, parts, tokenizer.eos_token_id, backend], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def dtype_for(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """Return the smallest type that holds every id."""
    return np.uint16 if max(tokenizer.get_vocab().values()) < 2**16 else np.uint32


def stored(
    cache: Path,
    key: str,
    dtype: type[np.unsignedinteger],
    build: Callable[[], tuple[Streams, Iterable[str]]],
) -> tuple[dict[ClientId, dict[str, Tokens]], tuple[str, ...]]:
    """Return the token streams of a cache entry, memory-mapped and read-only, and the notes about
    their texts; built first if missing or damaged. Raises SaveError.

    All streams of an entry are in one file, since every memory map costs a file descriptor and a
    federation may have thousands of clients. Writing is atomic, so several processes may build the
    same entry.
    """
    return cached(cache / key, "token", _open, lambda: partial(_write, dtype, *build()))


def cached(
    entry: Path,
    kind: str,
    read: Callable[[Path], T | None],
    build: Callable[[], Callable[[Path], None]],
) -> T:
    """Return an entry of the cache, written first if it is missing or damaged. Raises SaveError.
    `read` returns the entry in a folder, None if it is missing or damaged; `build` makes the
    content before anything is written, so that a refusal leaves nothing in the cache, and returns
    what writes it to an empty folder; `kind` is what the cache holds, for messages.
    """
    if (content := read(entry)) is None:
        with writing(f"the {kind} cache {entry}", NO_SPACE):
            _replace(entry, read, build())
        content = read(entry)
    if content is None:
        problem = f"the {kind} cache {entry} is damaged right after it was written"
        raise SaveError(problem, "Set COTERIE_CACHE to a folder on another disk.")
    return content


def _replace(
    entry: Path, read: Callable[[Path], object | None], write: Callable[[Path], None]
) -> None:
    """Write an entry beside its place, then rename it, unless another process was faster."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        write(new)
        if read(entry) is None:
            shutil.rmtree(entry, ignore_errors=True)
        try:
            os.rename(new, entry)
        except OSError:
            if read(entry) is None:
                raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _open(entry: Path) -> tuple[dict[ClientId, dict[str, Tokens]], tuple[str, ...]] | None:
    """Return the streams and the notes of an entry; None if it is missing or damaged."""
    try:
        manifest = json_of(read_bytes(entry / "manifest.json"))
        dtype, total = np.dtype(manifest["dtype"]), int(manifest["tokens"])
        if (entry / "tokens.bin").stat().st_size != total * dtype.itemsize:
            return None
        tokens = (
            np.memmap(entry / "tokens.bin", dtype=dtype, mode="r") if total else np.empty(0, dtype)
        )
        streams: dict[ClientId, dict[str, Tokens]] = {}
        for client, split, start, stop in manifest["streams"]:
            streams.setdefault(client, {})[split] = tokens[start:stop]
        return streams, tuple(manifest["notes"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(
    dtype: type[np.unsignedinteger], streams: Streams, notes: Iterable[str], folder: Path
) -> None:
    places, total = [], 0
    with open(folder / "tokens.bin", "wb") as file:
        for client, split, pieces in streams:
            start = total
            for piece in pieces:
                file.write(piece.tobytes())
                total += len(piece)
            places.append([client, split, start, total])
    manifest = {
        "dtype": np.dtype(dtype).name,
        "tokens": total,
        "streams": places,
        "notes": list(notes),  # complete once the streams have been read
    }
    (folder / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
