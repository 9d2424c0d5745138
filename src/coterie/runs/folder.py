"""A run's folder: its lock, its name, and checksums of its files."""

import os
import re
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from coterie.core.errors import CheckpointError, Refused
from coterie.core.files import digest_later, make_folder, write_atomically

SUMS = "SHA256SUMS"  # checksums of files beside it, in the form of `sha256sum`
_SUM = re.compile(r"([0-9a-f]{64})  (.+)")


def new_folder(name: str) -> Path:
    """Return a new folder under runs/, named by what is run and the time."""
    return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def latest_folder(name: str) -> Path:
    """Return the latest folder under runs/ of what is run. Raises Refused where there is none."""
    found = sorted(Path("runs").glob(f"{name}-*-*"))
    if not found:
        raise Refused(
            f"there is no run of {name} under runs/ to resume",
            "Name its folder by --out, or start it without --resume.",
        )
    return found[-1]


def check_apart(folder: Path, data: Path, option: str = "--out") -> None:
    """Refuse a folder for results that lies in a folder of data, or the other way round: the one
    would be taken for the other.

    Raises:
        Refused: Naming both.
    """
    ours, theirs = folder.expanduser().resolve(), data.expanduser().resolve()
    if not theirs.is_dir() or not (ours.is_relative_to(theirs) or theirs.is_relative_to(ours)):
        return
    how = "is" if ours == theirs else "lies in" if ours.is_relative_to(theirs) else "holds"
    elsewhere = theirs.parent / f"{theirs.name}-run"
    raise Refused(
        f"{option} {folder} {how} the folder of the data, {data}: results would be mixed with data",
        f"Choose a folder beside it: {option} {elsewhere}",
    )


def write_sums(folder: Path, digests: Mapping[str, str]) -> None:
    """Write the SHA-256 of files in a folder, by their paths in it; `sha256sum -c` reads that
    too. Raises SaveError.
    """
    write_atomically(
        folder / SUMS, "".join(f"{digest}  {name}\n" for name, digest in digests.items()).encode()
    )


def read_sums(folder: Path) -> dict[str, str]:
    """Return what `write_sums` wrote.

    Raises:
        CheckpointError: It is missing or damaged.
    """
    path = folder / SUMS
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist, so the files beside it cannot be verified"
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    found = [_SUM.fullmatch(line) for line in lines]
    if not all(found):
        raise CheckpointError(f"{path} is damaged: not in the format of sha256sum")
    return {line[2]: line[1] for line in found if line}


def check_sums(folder: Path, names: Iterable[str], sums: Mapping[str, str]) -> None:
    """Refuse files in a folder that are not as they were when their checksums were written.

    Raises:
        CheckpointError: Naming the first that is missing, has no checksum, or another one.
    """
    computed = {name: digest_later(folder / name) for name in names}
    for name, digest in computed.items():
        try:
            same = digest.result() == sums.get(name)
        except FileNotFoundError:
            raise CheckpointError(f"{folder / name} does not exist") from None
        except OSError as error:
            raise CheckpointError(f"{folder / name} cannot be read ({error.strerror})") from None
        if not same:
            how = (
                "it has changed since it was written: its SHA-256 does not match"
                if name in sums
                else f"{SUMS} does not list it"
            )
            raise CheckpointError(f"{folder / name} is damaged: {how}")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a run's folder for the block. A lock that a killed process left is ignored.

    Raises:
        Refused: Somebody else does, who is named; or the folder cannot be written to.
    """
    make_folder(folder)
    path = folder / "lock"
    lock = FileLock(path, timeout=0, is_singleton=True)
    holder = ""
    with suppress(OSError):
        holder = path.read_text(errors="replace")[:200].strip()
    try:
        lock.acquire()
    except Timeout:
        who = f" by {holder}" if holder.isprintable() and holder else ""
        raise Refused(
            f"{folder} is in use{who}",
            "Wait until that process has ended, or choose another --out.",
        ) from None
    except OSError as error:
        raise Refused(
            f"cannot write in {folder}: {error.strerror}",
            "Check its permissions, or choose another --out.",
        ) from None
    try:
        _sign(path, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if lock.lock_counter == 1:
            _sign(path, "")
        lock.release()


def _sign(path: Path, text: str) -> None:
    """Write who holds a lock, if that can be written."""
    with suppress(OSError):
        path.write_text(text, encoding="utf-8")
