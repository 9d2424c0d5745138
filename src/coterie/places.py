"""Where a run's clients are: in this process, in a simulation on this machine, or on devices that a grid of Flower's reaches."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from uuid import uuid4

import torch

from coterie.device import Device
from coterie.engines import ENGINES, Engine, InProcess, Listener
from coterie.engines.states import States, half_of_memory
from coterie.engines.wire import Member
from coterie.prepared import Prepared, check_member, prepare, seen_from_afar
from coterie.protocol import ClientId
from coterie.recipe import Recipe
from coterie.records import KEPT

if TYPE_CHECKING:
    from coterie.engines.flower import Flower, Grid

JOURNAL = "begun.json"  # the file of a run in which exchanges under masks are written down before they begin
ARRIVAL_S = 60.0  # seconds for devices that were there a moment ago


class Place(Protocol):
    """Where clients are: what a server can prepare, and who carries its messages."""

    devices: ClassVar[bool]  # whether they are on machines of their own: what they must not know is then drawn from a secret

    def prepare(self, recipe: Recipe) -> Prepared:
        """All that can be checked before work starts. Raises Refused."""
        ...

    def engine(self, prepared: Prepared, folder: Path, listener: Listener) -> Engine:
        """The engine of one run. Raises ClientError where clients cannot be reached."""
        ...


@dataclass(frozen=True)
class OnThisMachine:
    """All clients on this machine: in this process, or under Flower's simulation.

    Args:
        carrier: The engine's name; None for the recipe's.
    """

    carrier: str | None = None
    devices: ClassVar[bool] = False

    def prepare(self, recipe: Recipe) -> Prepared:
        if self._carrier(recipe) == "flower":
            from coterie.engines import flower  # noqa: F401 - refused at once where it is not installed
        return prepare(recipe)

    def engine(self, prepared: Prepared, folder: Path, listener: Listener) -> Engine:
        if (name := self._carrier(prepared.recipe)) != "flower":
            kind, memory = ENGINES[name], prepared.recipe.memory
            if not issubclass(kind, InProcess):
                return kind(prepared.site, prepared.method, listener)
            most = half_of_memory(prepared.modality.device) if memory is None else memory * 2**30
            return kind(prepared.site, prepared.method, listener, States(folder, most))
        from coterie.engines.flower import gathered, simulated

        clients, threads = len(prepared.site.data), prepared.modality.threads or torch.get_num_threads()
        grid = simulated(clients, threads, simulated_device)
        engine = flower_engine(prepared.recipe, grid, listener, tuple(prepared.site.data), threads, folder, folder / JOURNAL)
        gathered(engine, lambda found: len(found) == clients, patience=600)
        return engine

    def _carrier(self, recipe: Recipe) -> str:
        return self.carrier or recipe.engine


def simulated_device(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """What a simulated node does: its number is its place among the clients of the recipe's data."""
    return Device(Path(), place=int(node["partition-id"])).answer(text, body)


@dataclass
class OnDevices:
    """Clients on devices of their own.

    Args:
        grid: Flower's.
        members: Those that have come.
    """

    grid: "Grid"
    members: Sequence[Member] = field(default_factory=list)
    devices: ClassVar[bool] = True

    @classmethod
    def found(cls, grid: "Grid", recipe: Recipe, least: int, patience: float, listener: Listener) -> "OnDevices":
        """The place with the clients that are there, as soon as there are enough. Raises ClientError if there are not in time."""
        from coterie.engines.flower import gathered

        return cls(grid, gathered(flower_engine(recipe, grid, listener), lambda found: len(found) >= least, patience))

    def prepare(self, recipe: Recipe) -> Prepared:
        return seen_from_afar(recipe, self.members)

    def engine(self, prepared: Prepared, folder: Path, listener: Listener) -> Engine:
        engine = flower_engine(prepared.recipe, self.grid, listener, tuple(prepared.site.data), journal=folder / JOURNAL)
        engine.await_clients([member.client for member in self.members], ARRIVAL_S)
        return engine


def flower_engine(
    recipe: Recipe,
    grid: "Grid",
    listener: Listener,
    clients: Sequence[ClientId] = (),
    threads: int | None = None,
    folder: Path | None = None,
    journal: Path | None = None,
) -> "Flower":
    """An engine on a grid, whose federation has these clients, in their order."""
    from coterie.engines.flower import Flower

    return Flower(
        grid,
        run=uuid4().hex,
        recipe=recipe.model_dump(mode="json", exclude={"compare_with", "description", "paper"}),
        deadline=recipe.quorum.deadline,
        kept=lambda round: kept(round, recipe.checkpoint_every),
        threads=threads,
        folder=None if folder is None else str(folder.resolve()),
        secure=recipe.secure,
        journal=journal,
        listener=listener,
        check=partial(check_member, recipe),
        positions={i: k for k, i in enumerate(clients)},
    )


def kept(round: int, every: int) -> int:
    """The oldest round that a server which has done `round` rounds may go back to: that of the older of its checkpoints.

    The evaluation after a round comes before its checkpoint, which is therefore not counted on yet.
    """
    return max(((round - 1) // every - KEPT + 1) * every, 0)
