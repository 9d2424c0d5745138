"""A method on a federation, round by round, without files; and checks: functions of a method and a
world, with the clause of the contract that each checks.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch

from coterie.client.blueprint import Blueprint
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State, drive
from coterie.core.tensors import Named, Tensors
from coterie.data.federation import CENTRALIZED
from coterie.engines import ENGINES, Engine
from coterie.methods import Method
from coterie.testing.worlds import BASE, World

Check = Callable[[Method, World], None]
Answer = Callable[[Ask, int], Replies]
Draw = Callable[[Sequence[ClientId], int], Sequence[ClientId]]


def everybody(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Draw all clients."""
    return clients


def some(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Draw all clients but one, which changes by round and is not the last before the third."""
    if len(clients) < 3:
        return clients
    return [i for i in clients if i != sorted(clients)[2 - round % 3]]


def coming_and_going(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Return a round's members: the last client joins in the second, the first misses the third."""
    late, away = max(clients), min(clients)
    return [i for i in clients if not ((i == late and round < 1) or (i == away and round == 2))]


class Run:
    """A run of a method in a world, on one of the engines of this process.

    Attributes:
        server: The server's state.
        initial: The server's state before the first round.
        round: The completed rounds.
        asks: All requests.
    """

    def __init__(self, method: Method, world: World, engine: str = "inprocess") -> None:
        federation = world.federation
        self.method, self.clients = method, tuple(federation.clients)
        data, ids = dict(federation.clients), sorted(federation.clients)
        layouts = {i: method.layout(position, BASE) for position, i in enumerate(ids)}
        if method.centralized:
            data[CENTRALIZED] = federation.centralized()
            layouts[CENTRALIZED] = method.layout(0, BASE)
        training = Training(batch_size=4, micro_batch=None)
        total = method.total_iterations
        self.site = Site(world.build, layouts, data, training, seed=7, total_iterations=total)
        self.engine: Engine = ENGINES[engine](self.site, method)
        blueprint = Blueprint(world.trainable, layouts, 7, federation.clusters, federation.anchors)
        self.server = method.init(blueprint, self.clients)
        self.initial = dict(self.server)
        self.asks: list[Ask] = []
        self.round = 0

    def answer(self, ask: Ask, phase: int) -> Replies:
        """Run the clients' tasks."""
        self.asks.append(ask)
        return self.engine.answer(ask, self.round, phase)

    def rounds(
        self,
        count: int,
        answer: Answer | None = None,
        order: Sequence[ClientId] | None = None,
        draw: Draw = everybody,
        there: Draw = everybody,
    ) -> "Run":
        """Run some rounds, and the final exchanges after the last one.

        Args:
            count: The number of rounds.
            answer: A replacement of the engine.
            order: The clients, in another order.
            draw: (clients, round) -> those that take part in it.
            there: (clients, round) -> those that are members of the federation then.
        """
        clients, answer = order or self.clients, answer or self.answer
        for _ in range(count):
            rng = torch.Generator().manual_seed(self.round)
            members = there(clients, self.round)
            self.server = self.method.members(self.server, members)
            drawn = draw(members, self.round)
            self.server = drive(self.method.round(self.server, drawn, rng), answer)
            if self.round + 1 == self.method.rounds:
                self.server = drive(self.method.finish(self.server, members), answer)
            self.round += 1
        return self

    def client(self, i: ClientId) -> Any:
        """Return a client with its memory: a `Client` or `ClientOfParts`."""
        return self.site.clients(i, dict(self.engine.states()[i]))

    def models(self) -> Mapping[ClientId, Tensors]:
        """Return what clients need to have a model: nothing, unless they keep none."""
        if not self.method.stateless:
            return {i: {} for i in self.clients}
        adaptation = self.method.adapt(self.server, self.clients)
        return drive(adaptation, lambda ask, phase: self.engine.answer(ask, self.round, phase))


class NotApplicable(Exception):
    """Raised by a check that does not apply to a method, with the reason."""


def clause(text: str) -> Callable[[Check], Check]:
    """Turn a function that tests one clause of the contract into a check, which raises
    AssertionError with the problem and the clause, whatever the method's own code raised (that is
    chained), and NotApplicable if there is nothing to check.
    """

    def mark(function: Check) -> Check:
        @wraps(function)
        def check(method: Method, world: World) -> None:
            try:
                function(method, world)
            except NotApplicable:
                raise
            except Exception as error:
                required = isinstance(error, AssertionError)
                problem = str(error) if required else f"{type(error).__name__}: {error}"
                where = f"{type(method).__name__}, {world.name}, {function.__name__}"
                raise AssertionError(f"{where}: {problem}\n  The contract: {text}") from error

        return check

    return mark


def require(holds: bool, problem: str) -> None:
    """Raise AssertionError with the problem, unless something holds; under -O, too."""
    if not holds:
        raise AssertionError(problem)


def require_same(a: Named, b: Named, what: str) -> None:
    """Raise AssertionError unless two dicts of tensors are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has {sorted(a.keys() ^ b.keys())}")
    differing = [name for name in a if not torch.equal(a[name], b[name])]
    require(not differing, f"{what}: {differing[:5]} differ")


def require_same_states(a: Mapping[str, State], b: Mapping[str, State], what: str) -> None:
    """Raise AssertionError unless the clients' states are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has a state of {sorted(a.keys() ^ b.keys())}")
    for i, state in a.items():
        require_same(state, b[i], f"{what}, state of client {i!r}")


def require_same_run(a: Run, b: Run, what: str) -> None:
    """Raise AssertionError unless two runs have equal results, to the bit."""
    require_same(a.server, b.server, f"{what}, server's state")
    require_same_states(a.engine.states(), b.engine.states(), what)
