"""Atomic writing of files (tensors, JSON), reading, digests; and SHA-256 checksums of a folder's
files.
"""

import errno
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file as _encode_file

from coterie.core import devices, foreign
from coterie.core.errors import CheckpointError, Refused, SaveError
from coterie.core.foreign import read_bytes
from coterie.core.tensors import MOST_HEADER, Named, Tensors, _dense, _owned, check_header

_WINDOWS = sys.platform == "win32"


def write_atomically(path: Path, data: bytes, lasting: bool = True) -> None:
    """Write a file atomically: after a crash or on a full disk it has the old or the new content.
    Missing parent folders are created; with `lasting`, the call waits until the file is on the disk
    and survives a power cut. Raises SaveError; a former file is then unchanged.
    """
    _replace(path, lambda new: new.write_bytes(data), lasting)


def _replace(path: Path, write: Callable[[Path], object], lasting: bool) -> None:
    """Let `write` make a temporary file, and rename it to `path`. Raises SaveError."""
    new = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(new)
        if lasting:
            with open(new, "rb") as file:
                os.fsync(file.fileno())
        os.replace(new, path)
    except (OSError, SafetensorError) as error:
        new.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def flush(path: Path) -> None:
    """Flush a file, or a folder's entries, to disk, so that a power cut loses neither. Windows
    opens no folders, and flushes only what may be written.
    """
    if _WINDOWS and path.is_dir():
        return
    descriptor = os.open(path, os.O_RDWR if _WINDOWS else os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unwritable(path: Path, error: OSError | SafetensorError) -> SaveError:
    """Return the error to raise if a file could not be written and nothing was lost."""
    reason = error.strerror if isinstance(error, OSError) else str(error)
    full = isinstance(error, SafetensorError) or error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "Free some space and resume." if full else "Check the folder's permissions."
    return SaveError(f"cannot write {path}: {reason}; what was there before is unchanged", remedy)


@contextmanager
def writing(what: Path | str, remedy: str) -> Iterator[None]:
    """Raise an OSError of the block as a SaveError: `what` cannot be written."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"cannot write {what}: {error.strerror}", remedy) from error


def save(
    path: Path, named: Named, metadata: Mapping[str, str] | None = None, lasting: bool = True
) -> None:
    """Write a safetensors file atomically, without a copy in memory. Raises SaveError."""
    noted = dict(metadata or {}) or None
    _replace(path, lambda new: _encode_file(_dense(named), new, metadata=noted), lasting)


def load(path: Path, most_header: int = MOST_HEADER) -> tuple[Tensors, dict[str, str]]:
    """Load tensors, which own their memory, and metadata from a safetensors file with at most
    `most_header` bytes of header. Raises CheckpointError: it is missing, damaged or larger than
    memory.
    """
    with _opened(path, most_header) as file:
        return {name: _owned(file.get_tensor(name)) for name in file.keys()}, dict(  # noqa: SIM118
            file.metadata() or {}
        )


# beside the work: hashlib lets other threads run
_HASHING = ThreadPoolExecutor(min(4, os.cpu_count() or 1), thread_name_prefix="sha256")


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file's content, as `sha256sum` writes it. Raises OSError."""
    with foreign.opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_later(path: Path) -> "Future[str]":
    """Return the result of `digest_of` a file, computed in another thread."""
    return _HASHING.submit(digest_of, path)


def _too_large(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: {path.stat().st_size:,} bytes of tensors do not fit into memory",
        "It was not written by coterie on a machine like this, or other programs need the memory.",
    )


@contextmanager
def _opened(path: Path, most_header: int) -> Iterator[Any]:
    try:
        with foreign.opened(path) as file:
            check_header(file, most_header)
            # a sparse file takes no disk
            if os.fstat(file.fileno()).st_size > (devices.free_memory() or math.inf):
                raise _too_large(path)
            with safe_open(foreign.path_of(file, path), framework="pt") as tensors:
                yield tensors
    except RuntimeError:  # of PyTorch, which has no other where memory cannot be had
        raise _too_large(path) from None
    except (FileNotFoundError, IsADirectoryError):
        problem = f"no tensors at {path}: the file does not exist"
        raise CheckpointError(problem, "Check the path.") from None
    except (SafetensorError, OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        problem = f"{path} is truncated or not a safetensors file ({reason})"
        raise CheckpointError(problem, "Use an earlier copy, or make it again.") from None


def write_json(path: Path, value: object) -> None:
    """Write JSON atomically. Raises SaveError."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def make_folder(path: Path) -> None:
    """Make a folder for results, with its parents. Raises Refused if that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot make the folder {path}: {error.strerror}"
        raise Refused(problem, "Choose another --out.") from None


def read_json(path: Path, finite: bool = True) -> Any:
    """Read JSON, see `foreign.json_of`. Raises CheckpointError if it is missing or damaged."""
    try:
        return foreign.json_of(foreign.read_bytes(path), finite)
    except FileNotFoundError:
        remedy = "Is this the folder of a run? See `coterie run --out`."
        raise CheckpointError(f"{path} does not exist", remedy) from None
    except OSError as error:
        problem = f"{path} cannot be read ({error.strerror})"
        raise CheckpointError(problem, "Check the path and its permissions.") from None
    except ValueError as error:
        remedy = "It was not written by coterie, or was changed by hand."
        raise CheckpointError(f"{path} is damaged ({error})", remedy) from None


SUMS = "SHA256SUMS"
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")
_MOST = 2**24  # bytes of the file of checksums


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write SHA-256 checksums by relative path, in the form of `sha256sum`. Raises SaveError."""
    write_atomically(
        folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    )


def read_sums(folder: Path) -> dict[str, str]:
    """Return what `write_sums` wrote. Raises CheckpointError if it is missing or damaged."""
    path = folder / SUMS
    try:
        *lines, rest = read_bytes(path, _MOST).decode().split("\n")
    except FileNotFoundError:
        problem = f"{path} does not exist, so the files beside it cannot be verified"
        raise CheckpointError(problem) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    matches = [_SUM.fullmatch(line) for line in lines]
    if rest or not all(matches):
        raise CheckpointError(f"{path} is damaged: not in the format of sha256sum")
    return {line[2]: line[1] for line in matches if line}


def check_sums(folder: Path, names: Iterable[str], sums: Mapping[str, str]) -> None:
    """Raise CheckpointError for the first file that is missing, changed, or has no checksum."""
    computed = {name: digest_later(folder / name) for name in names}
    for name, digest in computed.items():
        try:
            same = digest.result() == sums.get(name)
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} does not exist") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror})") from None
        if not same:
            how = "it has changed since it was written: its SHA-256 does not match"
            if name not in sums:
                how = f"{SUMS} does not list it"
            raise CheckpointError(f"{folder / name} is damaged: {how}")


def write_all_sums(folder: Path) -> None:
    """Write the checksums of all files in a folder and below it. Raises SaveError."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != SUMS)
    write_sums(folder, {path.relative_to(folder).as_posix(): digest_of(path) for path in paths})


def check_all_sums(folder: Path) -> None:
    """Raise CheckpointError for a changed, missing or added file; not below or hidden."""
    try:
        sums, present = read_sums(folder), _files(folder)
        sums.pop(SUMS, None)  # of `sha256sum *`, whose own output was empty then
        for name in sorted(sums.keys() - present):
            raise CheckpointError(f"{folder / name} does not exist, or is no file")
        check_sums(folder, sorted(present), sums)
    except CheckpointError as error:
        remedy = (
            "Take an earlier copy of the folder, or make it again. If you changed it yourself, "
            f"write new checksums: (cd {shlex.quote(str(folder))} && sha256sum * > {SUMS})"
        )
        raise CheckpointError(error.problem, remedy) from None


@contextmanager
def replaced(folder: Path) -> Iterator[Path]:
    """Replace files of a folder and their checksums together: the block writes them to a temporary
    folder, and they are moved once all are on the disk. On a SaveError the old files are unchanged.
    """
    new = folder / ".new"
    try:
        shutil.rmtree(new, ignore_errors=True)  # left by a process that was killed
        new.mkdir(parents=True)
        yield new
        written = _files(new)
        paths = {name: folder / name for name in _files(folder)} | {n: new / n for n in written}
        write_sums(new, {name: digest_of(path) for name, path in sorted(paths.items())})
        for name in (*sorted(written), SUMS):
            os.replace(new / name, folder / name)
    except OSError as error:
        raise unwritable(folder, error) from error
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _files(folder: Path) -> set[str]:
    """Return the names of the files in a folder that are neither hidden nor its checksums."""
    names = {path.name for path in folder.iterdir() if path.is_file()} - {SUMS}
    return {name for name in names if not name.startswith(".")}
