"""A run's folder: its lock and its name."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from filelock import FileLock, Timeout

from coterie.core.errors import Refused
from coterie.core.files import make_folder
from coterie.core.foreign import opened


def new_folder(name: str, within: str = "runs") -> Path:
    """Return a new folder in runs/ or another, named by what is in it and the time."""
    return Path(within) / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"


def latest_folder(name: str) -> Path:
    """Return the latest folder in runs/ of this name. Raises Refused if there is none."""
    folders = sorted(Path("runs").glob(f"{name}-*-*"))
    if not folders:
        problem = f"there is no run of {name} under runs/ to resume"
        raise Refused(problem, "Name its folder by --out, or start it without --resume.")
    return folders[-1]


def check_apart(folder: Path, data: Path, option: str = "--out") -> None:
    """Refuse a folder for results in, or around, a folder of data. Raises Refused."""
    ours, theirs = folder.expanduser().resolve(), data.expanduser().resolve()
    if not theirs.is_dir() or not (ours.is_relative_to(theirs) or theirs.is_relative_to(ours)):
        return
    how = "is" if ours == theirs else "lies in" if ours.is_relative_to(theirs) else "holds"
    elsewhere = theirs.parent / f"{theirs.name}-run"
    raise Refused(
        f"{option} {folder} {how} the folder of the data, {data}: results would be mixed with data",
        f"Choose a folder beside it: {option} {elsewhere}",
    )


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Lock a run's folder for the block; a killed process's lock is ignored. Raises Refused if
    another process uses the folder, or it cannot be written to.
    """
    is_new = not folder.exists()
    make_folder(folder)
    path = folder / "lock"
    lock = FileLock(path, timeout=0, is_singleton=True)
    holder = ""
    with suppress(OSError), opened(path) as file:
        holder = file.read(200).decode(errors="replace").strip()
    try:
        lock.acquire()
    except Timeout:
        who = f" by {holder}" if holder.isprintable() and holder else ""
        remedy = "Wait until that process has ended, or choose another --out."
        raise Refused(f"{folder} is in use{who}", remedy) from None
    except OSError as error:
        if is_new:  # an empty folder would look like a run that can be resumed
            folder.rmdir()
        problem = f"cannot write in {folder}: {error.strerror}"
        raise Refused(problem, "Check its permissions, or choose another --out.") from None
    try:
        _sign(path, f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        if lock.lock_counter == 1:
            _sign(path, "")
        lock.release()


def _sign(path: Path, text: str) -> None:
    with suppress(OSError):
        path.write_text(text, encoding="utf-8")
