"""Faults within a program: a clock that is wrong, and a disk that is full. They come and go with
files in a folder, whatever time it is for the program.

    clock   seconds that the clock is wrong by, e.g. -3600
    full    a word: whatever has it in its path cannot be written; nothing: no file can
"""

import datetime
import errno
import os
import sys
import time
from pathlib import Path
from typing import Any

_time, _time_ns, _datetime = time.time, time.time_ns, datetime.datetime
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Disk:
    """A disk that is full for some files below a folder.

    Args:
        folder: Whose files count; others can be written.
        faults: The folder with `full`.

    Attributes:
        opened: The files that a program wanted to write, in their order; None: not recorded.
    """

    def __init__(self, folder: Path, faults: Path) -> None:
        self.folder, self.fault = str(folder), str(faults / "full")
        self.faults, self.opened = str(faults), None
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.mkdir" or (event == "open" and (arguments[2] or 0) & _WRITES):
            self._written(arguments[0])

    def _written(self, place: object) -> None:
        path = os.path.abspath(os.fsdecode(place)) if isinstance(place, str | bytes) else ""
        if not path.startswith(self.folder) or path.startswith(self.faults):
            return
        if self.opened is not None:
            self.opened.append(path)
        try:
            with open(self.fault) as file:
                word = file.read()
        except OSError:
            return
        if word in path.removeprefix(self.folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


class _AlsoReal(type):
    """What the real class made counts as of ours."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _datetime)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, _datetime)


def shift_clock(faults: Path) -> None:
    """Have Python's clock obey the file `clock`. What counts seconds only (`time.monotonic`) goes
    on, as it does when somebody sets the clock of a machine.
    """
    place = str(faults / "clock")

    def wrong_by() -> float:
        try:
            with open(place) as file:
                return float(file.read() or 0)
        except OSError:
            return 0.0

    class Shifted(_datetime, metaclass=_AlsoReal):
        """`datetime.datetime` by the shifted clock."""

        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> Any:
            return super().now(tz) + datetime.timedelta(seconds=wrong_by())

        @classmethod
        def utcnow(cls) -> Any:
            return cls.now(datetime.UTC).replace(tzinfo=None)

        @classmethod
        def today(cls) -> Any:
            return cls.now()

    Shifted.__name__ = Shifted.__qualname__ = "datetime"
    datetime.datetime = Shifted  # type: ignore[misc]
    time.time = lambda: _time() + wrong_by()
    time.time_ns = lambda: _time_ns() + int(wrong_by() * 1e9)
