"""The number of threads of a process, how they wait for each other, and whether the machine has
cores for them.

Threads that compute one product wait for the last of them. If another program uses the core of that
one, the others spin while they wait (OpenMP), and take up the time that it needs: a step of a tenth
of a second then takes many (benchmarks/results/threads.md). So waiting threads soon sleep, and only
as many are used as help at present.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# if one of these is set, the user has chosen the number of threads
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
# GNU's runtime, which PyTorch's wheels for Linux bring: turns of a loop before a thread sleeps,
# instead of 300,000. LLVM's: milliseconds.
_BRIEFLY = {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}
_PROBE_S = 0.3  # seconds for the passes with one thread, and again for those with all
_GAIN = 0.9  # the share of one thread's time that all together must stay below to be worth it
_WHOLE = 0.8  # of a core: whoever computes and gets less than this shares it
_STAT = Path("/proc/stat")
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


@dataclass(frozen=True)
class Usage:
    """The use of this machine's processors over a period."""

    own: float  # cores that this process kept busy: CPU seconds per second
    # cores that other processes did; None if not reported (but on Linux)
    others: float | None = None
    cores: int = os.cpu_count() or 1

    @property
    def crowded(self) -> bool:
        """Whether one thread had to share its core, or others keep a quarter of the cores busy."""
        return self.own < _WHOLE or (self.others is not None and self.others >= self.cores / 4)


class Watch:
    """A meter of `Usage` since it was created or last read."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._then, self._cpu_seconds = time.monotonic(), time.process_time()
        self._busy = _busy_seconds()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._then

    def look(self) -> Usage:
        """Return the usage since the last look."""
        seconds, before = max(self.seconds, 1e-6), self._busy
        used = time.process_time() - self._cpu_seconds
        self._begin()
        if self._busy is None or before is None:
            return Usage(used / seconds)
        return Usage(used / seconds, max(self._busy - before - used, 0.0) / seconds)


def _busy_seconds() -> float | None:
    """Return the busy seconds of all cores since the machine started, time taken by a hypervisor
    included, as no thread here could have it; None if not reported (all systems but Linux).
    """
    try:
        line = _STAT.read_text().partition("\n")[0]
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, line.split()[1:])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def choose(work: Callable[[int], object], most: int) -> int:
    """Return with how many threads, one or `most`, some work is fastest on this machine at present.
    One, if others compute too or all are not a tenth faster; but all, if a pass of one thread takes
    as long as one of all should, since the waiting then does not matter. Takes less than a second;
    `work` does one pass with a given number of threads.
    """
    work(1)  # warm-up, not timed
    watch, alone = Watch(), 0
    while watch.seconds < _PROBE_S:
        work(1)
        alone += 1
    each, usage = watch.seconds / alone, watch.look()
    if usage.crowded:
        return 1
    if each >= _PROBE_S:
        return most
    work(most)
    if watch.seconds >= _PROBE_S:
        return 1
    watch, together = Watch(), 0
    while watch.seconds < _PROBE_S:
        work(most)
        together += 1
    return most if watch.seconds / together < _GAIN * each else 1
