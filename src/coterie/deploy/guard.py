"""Ends the programs of a process, and all that they started, once that process is gone.

    python guard.py MARK

The process holds the other end of standard input, which the system closes with it, even at kill -9.
Nothing of coterie is imported here, so that a guard starts at once.
"""

import os
import signal
import sys
import time
from contextlib import suppress

import psutil

MARK = "COTERIE_PROGRAM"  # in the environment of a program, and so of all that it starts
_PATIENCE_S = 2.0  # seconds from SIGTERM to SIGKILL


def processes(name: str, begins: str) -> list[psutil.Process]:
    """Return the other processes in whose environment a variable begins with a text."""
    return [
        process
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get(name, "").startswith(begins)
        and process.pid != os.getpid()
    ]


def end(mark: str, patience: float) -> None:
    """End processes whose mark begins with `mark`: SIGTERM and, `patience` seconds on, SIGKILL."""
    deadline = time.monotonic() + patience
    for process in processes(MARK, mark):
        with suppress(psutil.Error):
            process.terminate()
    while time.monotonic() < deadline and processes(MARK, mark):
        time.sleep(0.1)
    kill(mark)


def kill(mark: str) -> None:
    """Kill the processes whose mark begins with `mark`, and those that they start meanwhile."""
    while remaining := processes(MARK, mark):
        for process in remaining:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.02)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # meant for a whole group, say
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(sys.argv[1], _PATIENCE_S)
