"""The check of a run on devices of Flower's, where Flower is installed."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from coterie.core import names
from coterie.core.files import load
from coterie.core.tensors import all_finite
from coterie.engines.messages import Request
from coterie.methods import Method
from coterie.runs.device.device import Device
from coterie.runs.device.states import Memory
from coterie.runs.problems.prepare import Prepared
from coterie.testing.contract import NotApplicable, clause, require, require_same
from coterie.testing.run import Run, some
from coterie.testing.training import longer
from coterie.testing.worlds import BASE, World


@dataclass(frozen=True)
class _Simulated(Device):
    """A device of a simulation whose run is made in code rather than named by a recipe."""

    of: Any = None

    def _prepared(self, request: Request) -> Prepared:
        prepared: Prepared = replace(self.of, site=replace(self.of.site))
        return prepared


@clause("a run on devices, each with its own state, equals that of one process to the bit")
def devices_are_alike(method: Method, world: World) -> None:
    """Check a run with partial participation over Flower's messages, without Flower's runtime."""
    if find_spec("flwr") is None:
        raise NotApplicable("Flower is not installed: pip install 'coterie[flower]'")
    from coterie.engines.flower.engine import Flower
    from coterie.engines.flower.localgrid import LocalGrid, LocalNode

    method, world = longer(method), world.one_by_one
    one = Run(method, world).rounds(method.rounds, draw=some)
    other = Run(method, world)
    recipe: Any = SimpleNamespace(secure=False)
    problem: Any = SimpleNamespace(threads=1, base=BASE, federation=world.federation)
    prepared = Prepared(recipe, method, problem, replace(other.site, models={}), other.clients)

    def handle(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
        return _Simulated(Path(), index=int(node["partition-id"]), of=prepared).answer(text, body)

    grid, count = LocalGrid(), len(other.site.data)
    for k in range(count):
        grid.put(LocalNode({"partition-id": k, "num-partitions": count}, handle))
    with TemporaryDirectory() as folder:
        other.engine = Flower(grid, "run", {}, deadline=60, folder=folder)
        joined = {member.client for member in other.engine.members()}
        require(joined == set(other.site.data), f"only {sorted(joined)} said who they are")
        other.rounds(method.rounds, draw=some)
        require_same(one.server, other.server, "one process and devices, server's state")
        require(all_finite(other.server), "on devices the server's state is not finite")
        for client, state in one.engine.states().items():
            turns = Memory(Path(folder) / "states" / names.encoded(client)).turns()
            stored, _ = load(max(turns.items())[1])
            require_same(dict(state), stored, f"one process and devices, state of {client!r}")
