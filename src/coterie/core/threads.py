"""The number of threads of a process, how they wait for each other, and whether the machine has
cores for them.

Threads that work on one product wait for the last of them. Where another program has that one's
core, the others wait for it after every product; and as OpenMP has them spin while they wait, they
use up the time that the last one lacks. A step that takes a tenth of a second on a quiet machine
then takes many (benchmarks/results/threads.md). So threads go to sleep soon; and as many are taken
as help now.
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
    """A thread was told to stop: another one failed, or the program was interrupted."""


def stopped_by(event: threading.Event) -> None:
    """Have `check_stopped` raise in this thread from when an event is set."""
    _this.event = event


def check_stopped() -> None:
    """Raise Stopped if this thread should do no more."""
    event: threading.Event | None = getattr(_this, "event", None)
    if event is not None and event.is_set():
        raise Stopped


def wait_briefly() -> None:
    """Have threads that wait for each other sleep soon; before PyTorch is imported, and unless
    the environment says how they wait.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ.update(_BRIEFLY)


@contextmanager
def computing(threads: int) -> Iterator[None]:
    """Have PyTorch compute with so many threads within the block."""
    import torch  # which the start of a device does without

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Usage:
    """The use of the processors of this machine over a period.

    Args:
        own: Cores that this process kept busy: its CPU seconds per second.
        others: Cores that all others did; None if the system does not report it (only Linux does).
        cores: Of the machine.
    """

    own: float
    others: float | None = None
    cores: int = os.cpu_count() or 1

    def cores_of_others(self, threads: int) -> int:
        """Return how many cores others kept busy where so many threads did not get the cores that
        they wanted; 0 where they did.
        """
        if self.others is None:  # with half a core and less it is not that work was uneven
            return int(self.own < _WHOLE / 2)
        idle = self.cores - self.own - self.others
        if self.own >= _WHOLE * threads or self.others < 0.5 or idle > 0.1 * self.cores:
            return 0
        return max(round(self.others), 1)

    @property
    def crowded(self) -> bool:
        """Whether a process that computed with one thread had to share its core, or others have
        a quarter of the machine.
        """
        return self.own < _WHOLE or (self.others is not None and self.others >= self.cores / 4)


class Watch:
    """A meter of `Usage` since it was made or last read."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._then, self._cpu_seconds, self._busy = (
            time.monotonic(),
            time.process_time(),
            _busy_seconds(),
        )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._then

    def look(self) -> Usage:
        """Return what was used since the last look."""
        seconds, before = max(self.seconds, 1e-6), self._busy
        used = time.process_time() - self._cpu_seconds
        self._begin()
        if self._busy is None or before is None:
            return Usage(used / seconds)
        return Usage(used / seconds, max(self._busy - before - used, 0.0) / seconds)


def _busy_seconds() -> float | None:
    """Return the seconds that all cores together were busy since the machine started; None if the
    system does not report it (only Linux does).

    Time that a hypervisor took away counts as busy: no thread here could have it.
    """
    try:
        line = _STAT.read_text().partition("\n")[0]
        user, nice, system, _, _, irq, softirq, steal, *_ = map(int, line.split()[1:])
        return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads.

    Args:
        threads: The number of threads.
        others: Cores that others kept busy, for which one thread was taken; 0: it was not for
            them.
    """

    threads: int
    others: int = 0


def choose(work: Callable[[int], object], most: int) -> ThreadChoice:
    """Return the number of threads with which some work is fastest on this machine at present: one,
    or all.

    One, where others compute as well, or all together are not a tenth faster. Where a single pass
    of one thread takes as long as all of them should, products are so large that waiting for each
    other is no matter: all. It takes less than a second.

    Args:
        work: Does one pass of the work with the given number of threads.
        most: The number of all threads.
    """
    work(1)  # warm-up, not timed
    watch, alone = Watch(), 0
    while watch.seconds < _PROBE_S:
        work(1)
        alone += 1
    each, usage = watch.seconds / alone, watch.look()
    if usage.crowded:
        return ThreadChoice(1, max(round(usage.others or 0), 1))
    if each >= _PROBE_S:
        return ThreadChoice(most)
    work(most)
    if watch.seconds >= _PROBE_S:
        return ThreadChoice(1)
    watch, together = Watch(), 0
    while watch.seconds < _PROBE_S:
        work(most)
        together += 1
    return ThreadChoice(most if watch.seconds / together < _GAIN * each else 1)
