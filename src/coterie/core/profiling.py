"""The trace of a round, of the first steps of each part, for the PyTorch profiler's tools."""

import gzip
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

from coterie.core import devices
from coterie.core.errors import SaveError

# of each part of a round, whichever comes first: a trace stays small, and the rest of the run
# as fast as without
STEPS, TASKS = 10, 2
# what the name of an optimiser step's span begins with; all other spans are tasks of clients
STEP = "step"
_GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_NOTHING = nullcontext()
# the profile to notify when a span ends: one at most, as a process has one profiler
_recording: list["Profile"] = []


def span(name: str) -> AbstractContextManager[None]:
    """Return a named range in a trace (`step router`); unrecorded, it takes less than 1 us."""
    return _range(name) if _recording else _NOTHING


def records() -> bool:
    """Return whether spans of this thread are being recorded."""
    return bool(_recording)


@contextmanager
def _range(name: str) -> Iterator[None]:
    with record_function(name):
        yield
    for recording in tuple(_recording):
        recording.passed(name)


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress Kineto's messages on stderr, which would garble a live display."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@dataclass
class Cost:
    """The calls of an operator or GPU kernel in a trace, and its own milliseconds."""

    calls: int = 0
    ms: float = 0.0


@dataclass
class Profile:
    """The trace of the first tasks and steps of each part (exchange, evaluation ...) of a round."""

    path: Path | None = None  # `.json.gz` of Chrome's trace events; None: nothing is recorded
    active: bool = False  # whether the current round is recorded
    device: str = "CPU"  # whose time `costs` measures: the GPU's if it was used
    # by operator or kernel, the most expensive first
    costs: dict[str, Cost] = field(default_factory=dict)
    _stopped: list[profile] = field(default_factory=list)
    _profiler: profile | None = None

    def begin(self, recorded: bool) -> None:
        """Begin a round, and the recording if `recorded`."""
        self.active = recorded and self.path is not None and not self._stopped

    def enter(self, part: str) -> None:
        """Begin a part of the recorded round, and end the one before it."""
        self.leave()
        if not self.active:
            return
        self._steps = self._tasks = 0
        device_activity = getattr(ProfilerActivity, (devices.accelerator() or "cpu").upper(), None)
        activities = {ProfilerActivity.CPU} | (
            {device_activity} if device_activity is not None else set()
        )
        self._profiler = profile(activities=activities, record_shapes=True, profile_memory=True)
        with _quiet():
            self._profiler.start()
        self._range = ExitStack()
        self._range.enter_context(record_function(part))
        _recording.append(self)

    def passed(self, name: str) -> None:
        """Count a span that has ended; after enough spans stop recording the part."""
        if name.startswith(STEP):
            self._steps += 1
        else:
            self._tasks += 1
        if self._steps >= STEPS or self._tasks >= TASKS:
            self.leave()

    def leave(self) -> None:
        """End the part."""
        if self._profiler is None:
            return
        _recording.remove(self)
        profiler, self._profiler = self._profiler, None
        self._range.close()
        with _quiet():
            profiler.stop()
        self._stopped.append(profiler)

    def end(self) -> None:
        """End the recorded round and write its trace. Raises SaveError."""
        self.leave()
        if not self.active or self.path is None:
            return
        self.active = False
        trace = _joined(self._stopped)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(self.path, "wt", compresslevel=5) as file:
                file.write(json.dumps(trace))
        except OSError as error:
            raise SaveError(
                f"cannot write {self.path}: {error.strerror}",
                "Free some space, or run without --profile.",
            ) from error
        self.costs = costs(trace["traceEvents"], _GPU)
        self.device = "GPU" if self.costs else "CPU"
        self.costs = self.costs or costs(trace["traceEvents"], {"cpu_op"})

    @property
    def written(self) -> bool:
        return bool(self._stopped) and not self.active


def costs(events: Sequence[Mapping[str, Any]], kinds: Set[str]) -> dict[str, Cost]:
    """Return the own cost of each operator of these categories, the most expensive first. `X`
    events of a trace have a start `ts` and a length `dur` in microseconds, and are nested by
    thread.
    """
    by_name: dict[str, Cost] = {}
    # by thread, the operators that have not ended yet
    around: dict[Any, list[Mapping[str, Any]]] = {}
    timed = (event for event in events if event.get("ph") == "X" and event.get("cat") in kinds)
    for event in sorted(timed, key=lambda e: (e["ts"], -e["dur"])):
        stack = around.setdefault((event["pid"], event["tid"]), [])
        while stack and event["ts"] >= stack[-1]["ts"] + stack[-1]["dur"]:
            stack.pop()
        if stack:
            by_name[stack[-1]["name"]].ms -= event["dur"] / 1000
        stack.append(event)
        cost = by_name.setdefault(event["name"], Cost())
        cost.calls, cost.ms = cost.calls + 1, cost.ms + event["dur"] / 1000
    return dict(sorted(by_name.items(), key=lambda item: item[1].ms, reverse=True))


def _joined(parts: list[profile]) -> dict[str, Any]:
    """Return the parts, whose clocks are the same, as one trace."""
    about: dict[str, Any] = {}
    events: list[dict[str, Any]] = []
    for number, part in enumerate(parts):
        with tempfile.TemporaryDirectory() as folder:
            part.export_chrome_trace(f"{folder}/part.json")
            about = json.loads(Path(folder, "part.json").read_bytes())
        for event in about.pop("traceEvents"):
            if event.get("ph") in ("s", "t", "f"):  # arrows, which each part numbers from the start
                event["id"] = f"{number}/{event['id']}"
            events.append(event)
    return about | {"traceEvents": events}
