"""SHA-256 checksums of a folder's files, in a file of the form of `sha256sum`. They detect flipped
bits and lost files, not someone who also writes new checksums.
"""

import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from coterie.core.errors import CheckpointError
from coterie.core.files import digest_later, digest_of, unwritable, write_atomically
from coterie.core.foreign import read_bytes

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
    """Raise CheckpointError for the first file that has changed, is missing, or was added.
    Subfolders and hidden files are not checked.
    """
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
    return {
        path.name
        for path in folder.iterdir()
        if path.is_file() and path.name != SUMS and not path.name.startswith(".")
    }
