"""Token streams on disk: encoded once, then memory-mapped by every process."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from coterie.core.errors import DataError, SaveError
from coterie.core.protocol import ClientId
from coterie.data.splits import Tokens

FORMAT = 1  # raise it whenever equal keys would no longer mean equal tokens

Streams = Iterable[tuple[ClientId, str, Iterable[Tokens]]]  # client, split, the ids in pieces

_DOCUMENTS = 64  # encoded at a time: enough for the tokenizer's threads, few beyond a token bound
# characters encoded at a time, and of a text in one piece: a tokenizer takes 200 bytes for each
LONGEST = 1_000_000


class Tokenizer(Protocol):
    """The part of a fast tokenizer of transformers that is used."""

    eos_token_id: int | None
    backend_tokenizer: Any

    def __call__(
        self, text: list[str], *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, Any]: ...
    def __len__(self) -> int: ...


def default_cache() -> Path:
    """$COTERIE_CACHE, else $XDG_CACHE_HOME/coterie, else ~/.cache/coterie."""
    if own := os.environ.get("COTERIE_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "coterie"


def key_of(tokenizer: Tokenizer, *parts: Any) -> str:
    """Return the name of a cache entry: a hash of what the tokens depend on.

    Args:
        tokenizer: Its whole content counts.
        parts: Anything that JSON can express.

    Raises:
        DataError: It is not a fast tokenizer.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise DataError(
            f"{type(tokenizer).__name__} is not a fast tokenizer",
            "Use a base model with a tokenizer.json.",
        )
    text = json.dumps([FORMAT, parts, tokenizer.eos_token_id, backend.to_str()], sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def encode(tokenizer: Tokenizer, texts: Iterable[str], limit: int | None) -> Iterator[Tokens]:
    """Return the token ids of the texts in pieces, the tokenizer's end token behind each text; at
    most `limit` tokens in all.

    Texts behind the limit are not encoded. One of more than a million characters is encoded in
    parts, cut at spaces where there are any.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    dtype, remaining = dtype_for(tokenizer), _batches(texts)
    while (limit is None or limit > 0) and (some := next(remaining, None)):
        encoded = tokenizer([text for text, _ in some], add_special_tokens=False, verbose=False)[
            "input_ids"
        ]  # no warning about long texts
        behind = [end if last else [] for _, last in some]
        piece = np.array(
            [id for ids, own in zip(encoded, behind, strict=True) for id in (*ids, *own)],
            dtype=dtype,
        )[:limit]
        limit = None if limit is None else limit - len(piece)
        yield piece


def _batches(texts: Iterable[str]) -> Iterator[list[tuple[str, bool]]]:
    """Parts of texts that are encoded at a time, each with whether it ends its text."""
    batch: list[tuple[str, bool]] = []
    characters = 0
    for part in (part for text in texts for part in _parts(text)):
        if batch and (len(batch) == _DOCUMENTS or characters + len(part[0]) > LONGEST):
            yield batch
            batch, characters = [], 0
        batch.append(part)
        characters += len(part[0])
    if batch:
        yield batch


def _parts(text: str) -> Iterator[tuple[str, bool]]:
    """Return a text in parts of a million characters at most, each but the first one beginning with
    a space where there is one.
    """
    start = 0
    while len(text) - start > LONGEST:
        space = text.rfind(" ", start + LONGEST // 2, start + LONGEST)
        end = space if space > start else start + LONGEST
        yield text[start:end], False
        start = end
    yield text[start:], True


def dtype_for(tokenizer: Tokenizer) -> type[np.unsignedinteger]:
    """Return the smallest type that holds every id."""
    return np.uint16 if len(tokenizer) <= 2**16 else np.uint32


def stored(
    cache: Path, key: str, dtype: type[np.unsignedinteger], build: Callable[[], Streams]
) -> dict[ClientId, dict[str, Tokens]]:
    """Return the token streams of a cache entry, read-only and memory-mapped; built first if it is
    missing or damaged.

    All streams of an entry lie in one file, since every memory map costs a file descriptor and a
    federation may have thousands of clients. An entry appears at once or not at all, and several
    processes may build it at the same time.

    Raises:
        SaveError: The cache cannot be written.
    """
    entry = cache / key
    if (found := _open(entry)) is None:
        try:
            _write(entry, dtype, build())
        except OSError as error:
            remedy = (
                "Free some space there, or name another folder in the environment variable "
                "COTERIE_CACHE."
            )
            raise SaveError(
                f"cannot write the token cache {entry}: {error.strerror}", remedy
            ) from error
        found = _open(entry)
    if found is None:
        raise SaveError(
            f"the token cache {entry} is damaged right after it was written",
            "Set COTERIE_CACHE to a folder on another disk.",
        )
    return found


def _open(entry: Path) -> dict[ClientId, dict[str, Tokens]] | None:
    """Return the streams of an entry; None if it is missing or damaged."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        dtype, total = np.dtype(manifest["dtype"]), int(manifest["tokens"])
        if (entry / "tokens.bin").stat().st_size != total * dtype.itemsize:
            return None
        tokens = (
            np.memmap(entry / "tokens.bin", dtype=dtype, mode="r") if total else np.empty(0, dtype)
        )
        streams: dict[ClientId, dict[str, Tokens]] = {}
        for client, split, start, stop in manifest["streams"]:
            streams.setdefault(client, {})[split] = tokens[start:stop]
        return streams
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(entry: Path, dtype: type[np.unsignedinteger], streams: Streams) -> None:
    """Build an entry in a folder beside it, then rename it into place."""
    entry.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{entry.name}.", dir=entry.parent))
    try:
        places, total = [], 0
        with open(new / "tokens.bin", "wb") as file:
            for client, split, pieces in streams:
                start = total
                for piece in pieces:
                    file.write(piece.tobytes())
                    total += len(piece)
                places.append([client, split, start, total])
        manifest = {"dtype": np.dtype(dtype).name, "tokens": total, "streams": places}
        (new / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        put_in_place(new, entry, _open)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def put_in_place(new: Path, entry: Path, read: Callable[[Path], object | None]) -> None:
    """Put a complete entry into its place, unless another process was faster; `read` gives None
    for one that is missing or damaged.
    """
    if read(entry) is None:
        shutil.rmtree(entry, ignore_errors=True)
    try:
        os.rename(new, entry)
    except OSError:
        if read(entry) is None:
            raise
