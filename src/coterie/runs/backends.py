"""Backends of a run: clients in this process, in a simulation, or on devices of Flower's grid."""

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import torch

from coterie.core.devices import free_memory, peak_memory
from coterie.core.errors import CheckpointError, CoterieError
from coterie.core.files import read_json
from coterie.core.protocol import ClientId, batched
from coterie.core.threads import THREAD_VARIABLES
from coterie.engines.engine import Engine, Listener
from coterie.engines.inprocess import ENGINES
from coterie.engines.messages import Member
from coterie.engines.states import States, half_of_memory
from coterie.models.classifier import Classifier
from coterie.models.pool import PoolClassifier
from coterie.models.windows import shortened
from coterie.runs.device.device import Device
from coterie.runs.folder.checkpoints import KEPT
from coterie.runs.problems.language import Language
from coterie.runs.problems.members import check_member, prepare_remote
from coterie.runs.problems.prepare import Prepared, prepare, share_data
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe, changed

if TYPE_CHECKING:
    from coterie.engines.flower.engine import Flower, Grid

# the file of a run in which exchanges under masks are written down before they begin
JOURNAL = "begun.json"
SHORT = 16  # tokens of the first gradients, which decide where they already take long
# seconds of a gradient from which on threads are faster: benchmarks/results/at_once.json
STEP_S = 0.01
ARRIVAL_S = 60.0  # seconds for devices that were there a moment ago
GPUS = ("cuda", "xpu")  # devices that Ray counts as GPUs


@dataclass(frozen=True)
class LocalBackend:
    """All clients in this process, or in Flower's simulation, which may span several machines."""

    carrier: str | None = None  # the engine's name; None for the recipe's
    # whether clients are on machines of their own: what they must not know is drawn from a secret
    devices: ClassVar[bool] = False

    def prepare(self, recipe: Recipe, loaded: LearningProblem | None = None) -> Prepared:
        """Check all that can be checked in advance, see `prepare.prepare`. Raises Refused."""
        if self._carrier(recipe) == "flower":
            from coterie.engines.flower import engine  # noqa: F401 - refused at once where it is not installed
        return prepare(recipe, loaded)

    def engine(self, prepared: Prepared, folder: Path, listener: Listener) -> Engine:
        """Return the engine of one run. Raises ClientError if clients cannot be reached."""
        if (name := self._carrier(prepared.recipe)) != "flower":
            kind, memory = ENGINES[name], prepared.recipe.memory
            most = half_of_memory(prepared.problem.device) if memory is None else memory * 2**30
            kept = States(folder, most)
            return kind(prepared.site, prepared.method, listener, kept, prepared.at_once)
        from coterie.engines.flower.apps import simulated
        from coterie.engines.flower.engine import gathered

        clients, threads = len(prepared.site.data), computing_threads(prepared)
        recipe, place = prepared.recipe, prepared.problem.device.type
        if on_gpus := place in GPUS:  # each sees one alone, its first, whichever is ours
            recipe = changed(recipe, {"model.device": place})
        cores = 1 if on_gpus else threads
        grid = simulated(clients, cores, simulated_device, accelerators=int(on_gpus))
        engine = flower_engine(
            recipe, grid, listener, tuple(prepared.site.data), folder, threads, shared=True
        )
        gathered(engine, lambda members: len(members) == clients, patience=600)
        return engine

    def _carrier(self, recipe: Recipe) -> str:
        return self.carrier or recipe.engine


@dataclass
class DeviceBackend:
    """Clients on separate devices: the connected ones of Flower's grid."""

    grid: "Grid"
    members: Sequence[Member]
    devices: ClassVar[bool] = True

    @classmethod
    def connect(
        cls, grid: "Grid", recipe: Recipe, least: int, patience: float, listener: Listener
    ) -> "DeviceBackend":
        """Return the backend of the connected clients once there are enough. Raises ClientError."""
        from coterie.engines.flower.engine import gathered

        engine, announced = flower_engine(recipe, grid, listener), -1

        def enough(members: Sequence[Member]) -> bool:
            nonlocal announced
            if announced < (connected := len(members)) < least:
                names = ", ".join(member.client for member in members) or "none"
                listener.noted(
                    "the server",
                    f"{connected} of {least} clients are connected ({names}); the run waits for "
                    f"{least}, {patience:g} s at most",
                )
            announced = max(announced, connected)
            return connected >= least

        return cls(grid, gathered(engine, enough, patience))

    def prepare(self, recipe: Recipe, loaded: LearningProblem | None = None) -> Prepared:
        return prepare_remote(recipe, self.members)

    def engine(self, prepared: Prepared, folder: Path, listener: Listener) -> Engine:
        ids = tuple(prepared.site.data)
        engine = flower_engine(prepared.recipe, self.grid, listener, ids, folder)
        engine.await_clients([member.client for member in self.members], ARRIVAL_S)
        return engine


Backend = LocalBackend | DeviceBackend  # where clients run


def computing_threads(prepared: Prepared) -> int:
    """Return the number of threads that a run on this machine computes with."""
    return prepared.threads or prepared.problem.threads or torch.get_num_threads()


def choose_threads(prepared: Prepared) -> int:
    """Return the number of threads of each client on this machine: OMP_NUM_THREADS if that is set,
    one for models so small that one is best, otherwise all, which clients at once share.
    """
    most = torch.get_num_threads()
    if prepared.problem.threads or any(name in os.environ for name in THREAD_VARIABLES):
        return prepared.problem.threads or most
    return most // clients_at_once(prepared)


def clients_at_once(prepared: Prepared) -> int:
    """Return how many clients of a round should compute at once, with a thread each or more. One,
    if the model is not on a CPU, or random while it trains (see `AtOnce`), if clients are stacked,
    or if steps are so short that Python, which runs one thread at a time, takes most of them. Each
    but the first may need as much memory as this process has needed until now.
    """
    problem, recipe = prepared.problem, prepared.recipe
    several = min(torch.get_num_threads(), len(recipe.active(problem.federation, 0)))
    if several == 1 or problem.device.type != "cpu" or _stacks(prepared) or not _long(prepared):
        return 1
    free, peak = free_memory(), peak_memory()
    return several if free is None or peak is None else min(several, 1 + int(free // peak))


class SharedData:
    """Base and data of the last prepared row, kept for the next one if it has the same."""

    def __init__(self) -> None:
        self._held: tuple[Recipe, LearningProblem] | None = None

    def prepared(self, recipe: Recipe, backend: Backend) -> Prepared:
        """Return a row, releasing the last one's data before others are loaded. Raises Refused."""
        if self._held is not None and not share_data(self._held[0], recipe):
            self._held = None
        prepared = backend.prepare(recipe, None if self._held is None else self._held[1])
        self.keep(prepared)
        return prepared

    def keep(self, prepared: Prepared) -> None:
        """Keep this row's base and data for the next one."""
        self._held = prepared.recipe, prepared.problem


class CommonThreads:
    """The number of threads for all rows of a command, so that they do not differ by rounding. A
    row that has begun keeps its number, because sums of floating-point numbers depend on it: with
    another one it would not end bit-equal to an uninterrupted run. New rows take the number of a
    begun one; otherwise it is chosen for the first row that needs one, see `choose_threads`.
    """

    def __init__(self, rows: Sequence[tuple[Recipe, Path]], backend: Backend) -> None:
        self._backend = backend
        self._kept = {folder: _kept_threads(folder) for _, folder in rows}
        self._common = next((number for number in self._kept.values() if number), None)

    def assign(self, prepared: Prepared, folder: Path | None = None) -> Prepared:
        """Return a row with its threads and clients at once, for the run in `folder`, if any."""
        if self._backend.devices:
            return replace(prepared, threads=prepared.recipe.threads)
        prepared = replace(prepared, threads=self._threads(prepared, folder))
        most = torch.get_num_threads() // computing_threads(prepared)
        return replace(prepared, at_once=max(min(clients_at_once(prepared), most), 1))

    def _threads(self, prepared: Prepared, folder: Path | None) -> int | None:
        if prepared.recipe.threads or prepared.problem.threads:
            return prepared.recipe.threads
        kept = None if folder is None else self._kept[folder]
        if kept is None and self._common is None:
            self._common = choose_threads(prepared)
        return self._common if kept is None else kept or None


def _kept_threads(folder: Path) -> int | None:
    """Return the threads of a folder's run; None: not begun, 0: a damaged checkpoint."""
    begun = list((folder / "checkpoints").glob("round-*/checkpoint.json"))
    begun.sort(key=lambda path: (len(path.parent.name), path.parent.name))
    if not begun:
        return None
    try:
        return int(read_json(begun[-1], finite=False)["progress"]["threads"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return 0


def _stacks(prepared: Prepared) -> bool:
    """Whether clients do a task of the method as one batch, see `ClientBatch`."""
    model, method = prepared.site.model(prepared.clients[0]), type(prepared.method)
    return (
        isinstance(model, Classifier)
        and model.stacks
        and model.gains(prepared.recipe.training.batch_size)
        and any(batched(getattr(method, name)) for name in dir(method))
    )


def _long(prepared: Prepared) -> bool:
    """Whether threads help with a gradient, which draws nothing global; measured once a base."""
    problem = prepared.problem
    if not isinstance(problem, Language):
        return _measured_long(prepared)
    if problem.long_steps is None:
        problem.long_steps = _measured_long(prepared)
    return problem.long_steps


def _measured_long(prepared: Prepared) -> bool:
    problem, training = prepared.problem, prepared.recipe.training
    client = prepared.site.client(prepared.clients[0], {})
    model = client.model.experts[0] if isinstance(client.model, PoolClassifier) else client.model
    wrt = [p for named in model.parameters_by_role.values() for p in named.values()]
    before, most = torch.get_rng_state(), training.micro_batch or training.batch_size
    with torch.random.fork_rng(devices=[]):
        # the first of all loads libraries; a few tokens suffice for a large base
        for number, rows in enumerate((1, 1, 2, 2, most)):
            batch = client.data.train.batch(0, rows)
            if number < 2 and isinstance(problem, Language):
                batch = shortened(batch, SHORT)
            begun = time.thread_time()
            try:
                model.gradient(batch, wrt)
            except CoterieError:  # a language model without what it needs from a pool
                return True
            seconds = time.thread_time() - begun
            if not torch.equal(torch.get_rng_state(), before):
                return False
            if number and seconds >= 4 * STEP_S:
                break
    return seconds >= STEP_S


def simulated_device(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """Answer as the simulated node, whose number is its position among the clients of the data."""
    return Device(Path(), index=int(node["partition-id"])).answer(text, body)


def flower_engine(
    recipe: Recipe,
    grid: "Grid",
    listener: Listener,
    clients: Sequence[ClientId] = (),
    folder: Path | None = None,
    threads: int | None = None,
    shared: bool = False,
) -> "Flower":
    """Return an engine on a grid whose federation has these clients, in their order. If `shared`,
    they write to the run's folder, too.
    """
    from coterie.engines.flower.engine import Flower

    return Flower(
        grid,
        run=uuid4().hex,
        recipe=recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"}),
        deadline=recipe.quorum.deadline,
        kept=lambda round: kept(round, recipe.checkpoint_every),
        threads=threads,
        folder=str(folder.resolve()) if folder is not None and shared else None,
        secure=recipe.secure,
        journal=None if folder is None else folder / JOURNAL,
        listener=listener,
        check=partial(check_member, recipe),
        positions={i: k for k, i in enumerate(clients)},
    )


def kept(round: int, every: int) -> int:
    """Return the oldest round that a server after `round` rounds may go back to: that of the older
    of its checkpoints. The one of `round` itself is not counted yet, as evaluation comes before it.
    """
    return max(((round - 1) // every - KEPT + 1) * every, 0)
