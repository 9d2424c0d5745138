"""Checks of whole runs: states, engines, devices, resumption, and clients that are missing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import torch

from coterie.client.client import Client
from coterie.client.state import OWNED
from coterie.core import names
from coterie.core.errors import extra
from coterie.core.files import load
from coterie.core.protocol import Ask, ClientId, Replies
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, all_finite, under
from coterie.data.federation import CENTRALIZED
from coterie.data.splits import SPLITS
from coterie.engines.inprocess import ENGINES
from coterie.engines.messages import Request
from coterie.methods import Method
from coterie.runs.device.device import Device
from coterie.runs.device.states import Memory
from coterie.runs.folder.checkpoints import Checkpoint, Checkpoints
from coterie.runs.problems.prepare import Prepared
from coterie.testing.run import (
    BASE,
    Answer,
    Draw,
    NotApplicable,
    Run,
    World,
    clause,
    coming_and_going,
    everybody,
    of_some,
    once,
    require,
    require_same,
    require_same_run,
    require_same_states,
    some,
    whole,
)

_COUNTERS = {"cursor/train", "cursor/train-expert/0", "cursor/train-expert/1", "iteration", "began"}
_STATELESS = _COUNTERS | {f"embeddings/{split}" for split in SPLITS}


def longer(method: Method) -> Method:
    """Return the same method with enough rounds that every client misses one."""
    return replace(method, rounds=3) if method.rounds else method


@clause(
    "`round` returns a state of the form that `init` gave it; nothing in a state is NaN or infinite"
)
def state_keeps_its_form(method: Method, world: World) -> None:
    """Check names, shapes and dtypes of the server's state after a run."""
    run = once(whole, method, world)
    before, after = (
        {name: (t.shape, t.dtype) for name, t in state.items()}
        for state in (run.initial, run.server)
    )
    changed = sorted(n for n in before.keys() | after.keys() if before.get(n) != after.get(n))
    shown = ", ".join(f"{n!r} was {before.get(n)}, is {after.get(n)}" for n in changed[:3])
    require(not changed, f"the server's state has a different form than at the start: {shown}")
    require(all_finite(run.server), "the server's state has values that are not finite")
    for i, state in run.engine.states().items():
        require(all_finite(state), f"the state of client {i!r} has values that are not finite")


@clause("all random numbers come from `rng` at the server and the seeded global one in a task")
def two_runs_are_alike(method: Method, world: World) -> None:
    """Check that the same seed gives the same run, to the bit."""
    a, b = once(whole, method, world), whole(method, world)
    require_same_run(a, b, "two runs with the same seed")


@clause("everything needed later is in the states, and a message holds named tensors only")
def engines_are_alike(method: Method, world: World) -> None:
    """Check that a run whose messages and states pass through bytes is the same, to the bit."""
    world = world.one_by_one
    a, b = (Run(method, world, engine).rounds(method.rounds) for engine in ENGINES)
    require_same_run(a, b, f"the engines {' and '.join(ENGINES)}")
    scores = [run.engine.answer(Ask(method.score, run.models()), 2, -1) for run in (a, b)]
    for i in a.clients:
        require_same(scores[0][i], scores[1][i], f"score of {i!r} on both engines")


@clause("a task marked `batched` does for a batch of clients what it does for each of them")
def batch_is_as_one_by_one(method: Method, world: World) -> None:
    """Compare a run with batches of clients to one without batches."""
    if world.separate is None:
        raise NotApplicable("this kind is never computed in a batch")
    a, b = (Run(method, w).rounds(method.rounds) for w in (world, world.one_by_one))
    states = ((f"state of {i!r}", s, b.engine.states()[i]) for i, s in a.engine.states().items())
    for what, one, other in (("server's state", a.server, b.server), *states):
        require(one.keys() == other.keys(), f"in one batch, {what} has different tensors")
        for name in one:
            close = torch.allclose(one[name], other[name], rtol=1e-4, atol=1e-5)
            require(
                close, f"in one batch, {what}: {name!r} differs from that of one client at a time"
            )


@clause("a client does `steps` local iterations a round, and what it trains stays in its state")
def training_changes_the_clients(method: Method, world: World) -> None:
    """Check that iterations are counted, and that clients (or the server, for them) changed."""
    if not method.rounds:
        raise NotApplicable("a method without rounds trains nothing")
    run = once(whole, method, world)
    for i in [CENTRALIZED] if method.centralized else run.clients:
        client = run.client(i)
        due = method.rounds * method.steps(client)
        problem = f"client {i!r} did {client.iteration} local iterations instead of {due}"
        require(client.iteration == due, problem)
        if method.stateless:
            state = run.engine.states()[i]
            parts = [under(name, state) for name, of in method.methods.items() if of.stateless]
            remembered = {key for of in parts or [state] for key in of} - _STATELESS
            require(
                not remembered, f"client {i!r} kept {sorted(remembered)[:5]}, though `stateless`"
            )
            continue
        before = run.site.clients(i, {}).read(*OWNED)
        after = run.client(i).read(*OWNED)
        changed = [name for name, t in after.items() if not torch.equal(t, before[name])]
        moved = any(name.endswith(("B", "weight")) for name in changed)
        require(moved, f"no weight of client {i!r} changed in {method.rounds} rounds")
    if method.stateless:
        moved = any(not torch.equal(t, run.initial[name]) for name, t in run.server.items())
        require(
            moved,
            f"clients keep nothing, and nothing of the server's changed in {method.rounds} rounds",
        )


@clause("only tensors of a role in `shared` leave or reach a client")
def only_shared_tensors_travel(method: Method, world: World) -> None:
    """Check the names and sizes of all tensors in all messages."""
    run = Run(method, world)
    if method.stateless or numbers_of_experts(run.initial):
        raise NotApplicable("a pool's experts travel under their numbers; engines check them")
    seen: list[Tensors] = []

    def answer(ask: Ask, phase: int) -> Replies:
        replies = run.answer(ask, phase)
        seen.extend([*ask.to.values(), *replies.values()])
        return replies

    run.rounds(method.rounds, answer)  # the engine itself refuses what leaves, see `Site.leaving`
    for i in run.engine.states():
        shared = run.client(i).read(*method.shared)
        everything = sum(t.numel() for t in shared.values())  # all of them as one vector
        shared_names = tuple(name.replace("/", ".") for name in shared)
        for message in seen:
            for name, tensor in message.items():
                # several models in one message have a prefix each; a figure is not a tensor
                named = name.replace("/", ".").endswith(shared_names)
                figure = tensor.numel() <= 2 or tensor.shape == (everything,)
                roles = ", ".join(method.shared) or "nothing"
                require(named or figure, f"{name!r} was in a message, and {roles} is shared")


@clause(
    "clients that fail are missing from the replies: the round continues with the others, or none"
)
def failing_clients_are_left_out(method: Method, world: World) -> None:
    """Check a round where one client's replies are lost, and one where all are."""
    run = Run(method, world)

    def without(lost: Sequence[ClientId]) -> Answer:
        def answer(ask: Ask, phase: int) -> Replies:
            return {i: reply for i, reply in run.answer(ask, phase).items() if i not in lost}

        return answer

    run.rounds(min(1, method.rounds), without([run.clients[len(run.clients) // 2]]))
    before = dict(run.server)
    run.rounds(min(1, method.rounds), without([*run.clients, CENTRALIZED]))
    stands = [name for name in run.server if name != "round"]  # a counter of rounds goes on
    now = {name: run.server[name] for name in stands}
    what = "the server's state after a round in which nobody answered, and before it"
    require_same({name: t for name, t in before.items() if name != "round"}, now, what)
    require(all_finite(run.server), "without all clients' replies the state is not finite")


def resumed(method: Method, world: World, draw: Draw = everybody, there: Draw = everybody) -> Run:
    """Return a run that is resumed from a checkpoint after its first round, to its end."""
    first = Run(method, world).rounds(min(1, method.rounds), draw=draw, there=there)
    saved = Checkpoint(first.round, first.server, first.engine.states(), {})
    with TemporaryDirectory() as folder:
        Checkpoints(Path(folder), {}).save(saved)
        loaded = Checkpoints(Path(folder), {}).latest()
        require(loaded is not None, "there is no checkpoint after the first round")
        assert loaded is not None
        second = Run(method, world)
        second.server, second.round = loaded.server, loaded.round
        second.engine.restore(loaded.clients)
        return second.rounds(method.rounds - loaded.round, draw=draw, there=there)


@clause("a run can be resumed from a checkpoint of its states alone")
def resumed_run_ends_the_same(method: Method, world: World) -> None:
    """Check that a run that was resumed after its first round ends the same, to the bit."""
    run = once(whole, method, world)
    require_same_run(run, resumed(method, world), "a run and the same one resumed after a round")


@clause("a client that is not drawn keeps its state, and its part of the server's state")
def absent_client_keeps_everything(method: Method, world: World) -> None:
    """Compare a client's tensors before and after a round in which it takes no part."""
    method = longer(method)
    run = Run(method, world.one_by_one)
    if method.centralized:
        raise NotApplicable("it trains on all data, whoever is drawn")
    for round in range(max(method.rounds - 1, 0)):  # the last one may ask all
        (absent,) = set(run.clients) - set(some(run.clients, round))
        before = {i: dict(state) for i, state in run.engine.states().items() if i == absent}
        server = {name: t for name, t in run.server.items() if absent in name.split("/")}
        run.rounds(1, draw=some)
        after = {i: state for i, state in run.engine.states().items() if i in before}
        what = f"round {round + 1}, in which {absent!r} took no part, before and after it"
        require_same_states(before, after, what)
        lost = sorted(server.keys() - run.server.keys())
        require(not lost, f"{what}: the server's state lost {lost[:5]}")
        require_same(server, {name: run.server[name] for name in server}, f"{what}, server's state")
        require(absent in before or round == 0, f"client {absent!r} has no state after a round")


@clause("any subset of the clients may be drawn for a round, on every engine and after resuming")
def some_clients_a_round(method: Method, world: World) -> None:
    """Check a run in which not all clients take part, on all engines, and resumed."""
    method, world = longer(method), world.one_by_one
    one = once(of_some, method, world)
    other = Run(method, world, "loopback").rounds(method.rounds, draw=some)
    _require_same_when_resumed(one, other, world, "some clients a round", draw=some)


def _require_same_when_resumed(
    one: Run, other: Run, world: World, what: str, draw: Draw = everybody, there: Draw = everybody
) -> None:
    """Require that a run is finite, and the same on another engine and resumed."""
    require_same_run(one, other, f"{what}, on {' and '.join(ENGINES)}")
    require(all_finite(one.server), f"with {what} the state is not finite")
    later = resumed(one.method, world, draw, there)
    require_same_run(one, later, f"{what}, and the same resumed")


@clause("where clients join and leave, `round` does with those that are there, on every engine")
def clients_come_and_go(method: Method, world: World) -> None:
    """Check a run that one client joins late and another leaves for a round, on all engines and
    resumed: absent clients get no request and keep their states.
    """
    if not method.dynamic_membership:
        raise NotApplicable("it needs all clients from the start, see `dynamic_membership`")
    method, world = longer(method), world.one_by_one
    one, other = (Run(method, world, engine) for engine in ENGINES)
    for run in (one, other):
        for _ in range(method.rounds):
            _round_of_those_there(run)
    what = "clients that come and go"
    _require_same_when_resumed(one, other, world, what, there=coming_and_going)


def _round_of_those_there(run: Run) -> None:
    """Run a round; require that absent clients get no request and keep their states."""
    present, what = coming_and_going(run.clients, run.round), f"round {run.round + 1}"
    before = {
        i: {name: tensor.clone() for name, tensor in state.items()}
        for i, state in run.engine.states().items()
        if i not in present
    }
    run.asks.clear()
    run.rounds(1, there=coming_and_going)
    strangers = {i for ask in run.asks for i in ask.to} - set(present)
    require(not strangers, f"{what} asks {sorted(strangers)}, who are not there")
    after = {i: run.engine.states()[i] for i in before}
    require_same_states(before, after, f"{what}, of those who are not there")
    run.method.download(run.server, run.clients)  # everybody is scored


@clause("schedules run over the rounds of the run, whether or not a client was drawn")
def schedules_run_over_the_rounds(method: Method, world: World) -> None:
    """Check the final learning rates of clients that missed a round."""
    method = longer(method)
    if not method.rounds or method.centralized or method.methods:
        raise NotApplicable("nobody trains, or everybody, or several methods do")
    run = once(of_some, method, world.one_by_one)
    for i in run.clients:
        client = run.client(i)
        took_part = sum(i in some(run.clients, round) for round in range(method.rounds))
        require(took_part == method.rounds - 1, f"client {i!r} was drawn {took_part} times")
        due = took_part * method.steps(client)
        problem = f"{client.iteration} local iterations of client {i!r}, expected {due}"
        require(client.iteration == due, problem)
        client.round, client.round_steps = method.rounds - 1, method.steps(client)
        last = client.round_steps if i in some(run.clients, method.rounds - 1) else 0
        due = (method.rounds - 1) * client.round_steps + last
        problem = f"the schedule of client {i!r} is at {client.position}, expected {due}"
        require(client.position == due, problem)


@clause("nothing depends on the order of the clients")
def order_changes_nothing(method: Method, world: World) -> None:
    """Check a run whose clients are in the reverse order."""
    world = world.one_by_one
    a = once(whole, method, world)
    reverse = world.among(dict(reversed(list(world.federation.clients.items()))))
    b = Run(method, reverse).rounds(method.rounds, order=tuple(reversed(a.clients)))
    if method.centralized:
        raise NotApplicable("the union of the data is laid out in the order of the clients")
    require_same_run(a, b, "clients in one order and in the reverse")


@clause("a single client is averaged with no other: it downloads its own values")
def one_client_alone(method: Method, world: World) -> None:
    """Check that with one client downloading changes nothing: it trains as if it were alone."""
    if method.server_steps or method.methods:
        raise NotApplicable("a step follows its aggregation, or it is several methods")
    if getattr(getattr(method, "aggregation", None), "fewest", 1) > 1:
        raise NotApplicable("its rule needs several clients")
    if method.stateless:
        raise NotApplicable("its clients keep nothing that could be compared")
    (id,) = world.alone.federation.clients
    run = Run(method, world.alone)
    for _ in range(method.rounds):
        run.rounds(1)
        client = run.client(CENTRALIZED if method.centralized else id)
        trained = client.read(*method.shared)
        down = method.download(run.server, [id])[id]
        with client.borrowing(method.loadable(client, down)):
            loaded = client.read(*method.shared)
        if down and type(method).loadable is not Method.loadable:
            _require_same_updates(client, loaded, trained)
        else:
            require_same(loaded, trained, "one client, with what it downloads and without it")


def _require_same_updates(client: Client, down: Tensors, trained: Tensors) -> None:
    """Compare updates B A, since factors may come back in another basis."""
    for module in [m for m in client.loras if f"{m}.B" in trained]:
        product = down[f"{module}.B"] @ down[f"{module}.A"]
        expected = trained[f"{module}.B"] @ trained[f"{module}.A"]
        close = torch.allclose(product, expected, rtol=1e-5, atol=1e-5)
        require(close, f"the update of {module} that one client downloads is not its own")


@dataclass(frozen=True)
class _Simulated(Device):
    """A device of a simulation whose run is made in code rather than named by a recipe."""

    of: Any = None

    def _prepared(self, request: Request) -> Prepared:
        return cast(Prepared, replace(self.of, site=replace(self.of.site)))


@clause("a run on devices, each with its own state, equals that of one process to the bit")
def devices_are_alike(method: Method, world: World) -> None:
    """Check a run with partial participation over Flower's messages, without Flower's runtime."""
    if find_spec("flwr") is None:
        raise NotApplicable(f"Flower is not installed: {extra('flower')}")
    from coterie.engines.flower.apps import LocalGrid, LocalNode
    from coterie.engines.flower.engine import Flower

    method, world = longer(method), world.one_by_one
    one, other = once(of_some, method, world), Run(method, world)
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
