"""The number of threads of a process, and how they wait for each other.

Threads that compute one product wait for the last of them. If another program uses the core of that
one, the others spin while they wait (OpenMP), and take up the time that it needs: a step of a tenth
of a second then takes many (benchmarks/results/threads.md). So waiting threads soon sleep.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# if one of these is set, the user has chosen the number of threads
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# GNU's runtime, which PyTorch's wheels for Linux bring: turns of a loop before a thread sleeps,
# instead of 300,000. LLVM's: milliseconds.
_BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_this = threading.local()  # of each thread: the event that stops it


class Stopped(Exception):
    """A thread must stop: another one failed, or the program was interrupted."""


def stopped_by(event: threading.Event) -> None:
    """Have `check_stopped` raise in this thread once an event is set."""
    _this.event = event


def check_stopped() -> None:
    """Raise Stopped if this thread should stop."""
    event: threading.Event | None = getattr(_this, "event", None)
    if event is not None and event.is_set():
        raise Stopped


def wait_briefly() -> None:
    """Have waiting threads sleep soon, unless the environment says; before PyTorch's import."""
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(_BRIEFLY)


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Set the number of PyTorch's threads within the block."""
    import torch  # which the start of a device does without

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
