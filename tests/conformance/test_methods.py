"""What holds for every method, on every engine, on every kind of model that it can train."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch

from coterie.aggregation.lowrank import own_factors
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.interfaces import Model, Trainable
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.client.state import OWNED
from coterie.core.protocol import Ask, ClientId, Replies, drive
from coterie.core.roles import GATE
from coterie.core.tensors import Tensors, all_finite
from coterie.data.federation import POOL, ClientData, Federation
from coterie.data.splits import SPLITS
from coterie.engines import ENGINES, Engine
from coterie.methods import Method
from coterie.methods.fdlora import FDLoRA
from coterie.methods.templates import Ranked
from coterie.models.adapter import Adapter, Layout
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier, NetworkShape
from coterie.models.common import CommonExpert
from coterie.models.language import LanguageModel
from coterie.runs.checkpoints import Checkpoint, Checkpoints
from coterie.runs.classification import Examples
from coterie.runs.recipe import Recipe
from coterie.runs.sections import ClassifierSection

from .cases import ALL, NETWORKS, PICTURES, method_of

Answer = Callable[[Ask, int], Replies]
Draw = Callable[
    [Sequence[ClientId], int], Sequence[ClientId]
]  # (clients, round) -> those that take part in it
BASE = Layout(rank=2)
EMBEDDED = {f"embeddings/{split}" for split in SPLITS}


@dataclass(frozen=True)
class World:
    """A federation, and the models that its clients can have."""

    federation: Federation
    build: Callable[[Layout], Model]
    trainable: Callable[[Layout], Trainable]

    def among(self, clients: Mapping[ClientId, ClientData]) -> "World":
        """The same world with these clients, in this order."""
        anchors = tuple(q for q in self.federation.anchors if q in clients)
        return replace(self, federation=Federation(clients, "", self.federation.clusters, anchors))

    @property
    def alone(self) -> "World":
        return self.among({"ann": self.federation.clients["ann"]})


class OneByOne(Classifier):
    """A classifier whose clients are never asked many at once."""

    stacks = False


def classifiers(kind: type[Classifier], federation: Federation) -> World:
    shape = NetworkShape("mlp", (1, 4, 4), 10, (6,))
    section = ClassifierSection(kind="classifier", gate_width=5)
    found = Examples(
        shape, CommonExpert(shape, shape.initial(3)), section, torch.device("cpu"), federation
    )

    def build(layout: Layout) -> Model:
        return kind(shape) if type(layout) is Layout else found.build(layout)

    return World(federation, build, build)


def one_by_one(world: World) -> World:
    """The same world where no clients are asked at once: that would change the rounding, see
    `test_many_clients_at_once_...`.
    """
    return (
        classifiers(OneByOne, world.federation)
        if isinstance(world.build(BASE), Classifier)
        else world
    )


@pytest.fixture(scope="module")
def language(tiny_base: Path, tiny_federation: Federation) -> World:
    backbone = Backbone.load(tiny_base)
    return World(
        tiny_federation, partial(LanguageModel, backbone), partial(Adapter, backbone.architecture)
    )


@pytest.fixture(scope="module")
def pictures(tiny_pictures: Federation) -> World:
    return classifiers(Classifier, tiny_pictures)


@pytest.fixture(
    params=[
        *(("language", name) for name in ALL if name not in NETWORKS),
        *(("pictures", name) for name in PICTURES + NETWORKS),
    ],
    ids=" ".join,
)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """The kind of model, and the method."""
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def world(case: tuple[str, str], request: pytest.FixtureRequest) -> World:
    found: World = request.getfixturevalue(case[0])
    return found


@pytest.fixture
def method(case: tuple[str, str]) -> Method:
    return method_of(case[1])


class Run:
    """A method on a federation, round by round, without files."""

    def __init__(self, method: Method, world: World, engine: str = "inprocess") -> None:
        federation = world.federation
        self.method, self.clients, data = (
            method,
            tuple(federation.clients),
            dict(federation.clients),
        )
        layouts = {
            i: method.layout(position, BASE)
            for position, i in enumerate(sorted(federation.clients))
        }
        if method.pooled:
            data[POOL] = federation.pooled()
            layouts[POOL] = method.layout(0, BASE)
        training = Training(batch_size=4, micro_batch=None)
        self.site = Site(
            world.build, layouts, data, training, seed=7, total_iterations=method.total_iterations
        )
        self.engine: Engine = ENGINES[engine](self.site, method)
        self.server = method.init(
            Blueprint(world.trainable, layouts, 7, federation.clusters, federation.anchors),
            self.clients,
        )
        self.initial = dict(self.server)
        self.asks: list[Ask] = []
        self.round = 0

    def answer(self, ask: Ask, phase: int) -> Replies:
        self.asks.append(ask)
        return self.engine.answer(ask, self.round, phase)

    def rounds(
        self,
        count: int,
        answer: Answer | None = None,
        order: Sequence[ClientId] | None = None,
        draw: Draw = lambda clients, round: clients,
    ) -> "Run":
        """So many rounds, in each of which those of the clients take part that `draw` says, and
        what comes after the last one.
        """
        there = order or self.clients
        for _ in range(count):
            rng = torch.Generator().manual_seed(self.round)
            self.server = drive(
                self.method.round(self.server, draw(there, self.round), rng), answer or self.answer
            )
            if self.round + 1 == self.method.rounds:
                self.server = drive(self.method.finish(self.server, there), answer or self.answer)
            self.round += 1
        return self

    def client(self, i: ClientId) -> Client:
        return self.site.client(i, dict(self.engine.states()[i]))

    def models(self) -> Mapping[ClientId, Tensors]:
        """What clients need to have a model: nothing, unless they keep none."""
        if not self.method.forgetful:
            return {i: {} for i in self.clients}
        return drive(
            self.method.adapt(self.server, self.clients),
            lambda ask, phase: self.engine.answer(ask, self.round, phase),
        )


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def assert_same_run(a: Run, b: Run) -> None:
    assert_same(a.server, b.server)
    assert a.engine.states().keys() == b.engine.states().keys()
    for i, state in a.engine.states().items():
        assert_same(state, b.engine.states()[i])


def test_the_state_keeps_its_form_and_stays_finite(method: Method, world: World) -> None:
    run = Run(method, world).rounds(method.rounds)
    forms = [
        {name: (t.shape, t.dtype) for name, t in state.items()}
        for state in (run.initial, run.server)
    ]
    assert forms[0] == forms[1]
    assert all_finite(run.server)
    assert all(all_finite(state) for state in run.engine.states().values())


def test_two_runs_are_alike_bit_for_bit(method: Method, world: World) -> None:
    assert_same_run(*(Run(method, world).rounds(method.rounds) for _ in range(2)))


def test_engines_are_alike_bit_for_bit(method: Method, world: World) -> None:
    a, b = (Run(method, one_by_one(world), engine).rounds(method.rounds) for engine in ENGINES)
    assert_same_run(a, b)
    scores = [run.engine.answer(Ask(method.score, run.models()), 2, -1) for run in (a, b)]
    for i in a.clients:
        assert_same(scores[0][i], scores[1][i])


@pytest.mark.parametrize("name", PICTURES)
def test_many_clients_at_once_are_as_one_by_one(tiny_pictures: Federation, name: str) -> None:
    method = method_of(name)
    a, b = (
        Run(method, classifiers(kind, tiny_pictures)).rounds(method.rounds)
        for kind in (Classifier, OneByOne)
    )
    for one, other in (
        (a.server, b.server),
        *((state, b.engine.states()[i]) for i, state in a.engine.states().items()),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_training_changes_the_clients(method: Method, world: World) -> None:
    if not method.rounds:
        pytest.skip("a method without rounds trains nothing")
    run = Run(method, world).rounds(method.rounds)
    trained = [POOL] if method.pooled else run.clients
    for i in trained:
        if method.local_epochs is None:
            assert run.client(i).iteration == method.total_iterations
        if method.forgetful:
            assert run.engine.states()[i].keys() <= {
                "cursor/train",
                "cursor/train-expert/0",
                "cursor/train-expert/1",
                "iteration",
                "began",
                *EMBEDDED,
            }
            continue
        before = run.site.client(i, {}).read(*OWNED)
        changed = [
            name
            for name, t in run.client(i).read(*OWNED).items()
            if not torch.equal(t, before[name])
        ]
        assert any(name.endswith(("B", "weight")) for name in changed)
    if method.forgetful:
        assert any(not torch.equal(t, run.initial[name]) for name, t in run.server.items())


def test_no_tensor_but_shared_ones_is_ever_in_a_message(method: Method, world: World) -> None:
    run = Run(method, world)
    if method.forgetful or GATE in run.initial:
        pytest.skip(
            "what the messages of pools hold: tests/methods/test_ddome.py and test_comigs_pool.py"
        )
    seen: list[Tensors] = []

    def answer(ask: Ask, phase: int) -> Replies:
        replies = run.answer(ask, phase)
        seen.extend([*ask.to.values(), *replies.values()])
        return replies

    run.rounds(method.rounds, answer)
    for i in run.engine.states():
        shared = run.client(i).read(*method.shared)
        everything = sum(t.numel() for t in shared.values())  # all of them as one vector
        for message in seen:
            for (
                name,
                tensor,
            ) in (
                message.items()
            ):  # several models in one message have a prefix each; a figure is not a tensor
                named = any(name.replace("/", ".").endswith(own) for own in shared)
                assert named or tensor.numel() <= 2 or tensor.shape == (everything,), name


def test_clients_that_fail_are_left_out(method: Method, world: World) -> None:
    run = Run(method, world)

    def without(lost: Sequence[ClientId]) -> Answer:
        return lambda ask, phase: {
            i: reply for i, reply in run.answer(ask, phase).items() if i not in lost
        }

    run.rounds(min(1, method.rounds), without(["ben"]))
    before = dict(run.server)
    run.rounds(min(1, method.rounds), without([*run.clients, POOL]))
    stands = {
        name: t for name, t in run.server.items() if name != "round"
    }  # nobody answered: only a counter of rounds went on
    assert_same({name: before[name] for name in stands}, stands)
    assert all_finite(run.server)


def resumed(
    method: Method, world: World, folder: Path, draw: Draw = lambda clients, round: clients
) -> Run:
    """A run that goes on from a checkpoint of its first round, to its end."""
    first = Run(method, world).rounds(min(1, method.rounds), draw=draw)
    Checkpoints(folder, {}).save(Checkpoint(first.round, first.server, first.engine.states(), {}))
    found = Checkpoints(folder, {}).latest()
    assert found is not None
    second = Run(method, world)
    second.server, second.round = found.server, found.round
    second.engine.restore(found.clients)
    return second.rounds(method.rounds - found.round, draw=draw)


def test_resumed_after_a_round_it_ends_the_same(
    method: Method, world: World, tmp_path: Path
) -> None:
    whole = Run(method, world).rounds(method.rounds)
    assert_same_run(whole, resumed(method, world, tmp_path))


def some(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Half of the clients, rounded up: others in each round, and the one at the end never before
    the third.
    """
    if len(clients) < 3:
        return clients
    return [i for i in clients if i != sorted(clients)[2 - round % 3]]


def longer(method: Method) -> Method:
    """The same method for so many rounds that everybody misses one."""
    return replace(method, rounds=3) if method.rounds else method


def test_a_client_that_takes_no_part_keeps_everything(method: Method, world: World) -> None:
    method = longer(method)
    run = Run(method, one_by_one(world))
    if method.pooled:
        pytest.skip("it trains on all data, whoever is drawn")
    for round in range(
        max(method.rounds - 1, 0)
    ):  # after the last round some methods ask everybody
        (absent,) = set(run.clients) - set(some(run.clients, round))
        before = {i: dict(state) for i, state in run.engine.states().items() if i == absent}
        server = {name: tensor for name, tensor in run.server.items() if absent in name.split("/")}
        run.rounds(1, draw=some)
        for i, state in before.items():
            assert_same(state, run.engine.states()[i])
        assert_same(server, {name: run.server[name] for name in server})
        assert absent in before or round == 0


def test_half_of_the_clients_a_round_on_all_engines_and_resumed(
    method: Method, world: World, tmp_path: Path
) -> None:
    method, world = longer(method), one_by_one(world)
    whole, other = (
        Run(method, world, engine).rounds(method.rounds, draw=some) for engine in ENGINES
    )
    assert_same_run(whole, other)
    assert all_finite(whole.server)
    assert_same_run(whole, resumed(method, world, tmp_path, some))


def test_schedules_run_over_the_rounds_of_the_run(method: Method, world: World) -> None:
    method = longer(method)
    if not method.rounds or method.pooled:
        pytest.skip("nobody trains, or everybody")
    run = Run(method, one_by_one(world)).rounds(method.rounds, draw=some)
    for i in run.clients:
        client = run.client(i)
        took_part = sum(i in some(run.clients, round) for round in range(method.rounds))
        assert took_part == method.rounds - 1
        if method.local_epochs is None:
            assert client.iteration == took_part * method.local_steps
        client.round, client.round_steps = method.rounds - 1, method.steps(client)
        last = client.round_steps if i in some(run.clients, method.rounds - 1) else 0
        assert client.position == (method.rounds - 1) * client.round_steps + last


def test_the_order_of_the_clients_changes_nothing(method: Method, world: World) -> None:
    world = one_by_one(world)
    a = Run(method, world).rounds(method.rounds)
    b = Run(method, world.among(dict(reversed(world.federation.clients.items())))).rounds(
        method.rounds, order=tuple(reversed(a.clients))
    )
    if method.pooled:
        pytest.skip("the union of the data is laid out in the order of the clients")
    assert_same_run(a, b)


def test_one_client_alone_averages_with_nobody(method: Method, world: World) -> None:
    """With one client the mean is that client's own tensors, so that downloading changes
    nothing: it trains as if it were alone.
    """
    if isinstance(method, FDLoRA):
        pytest.skip(
            "its server takes an outer step, and its clients end with a fusion: "
            "tests/methods/test_baselines.py"
        )
    if method.forgetful:
        pytest.skip(
            "its clients keep nothing that could be compared: tests/methods/test_ddome.py, one "
            "expert for all"
        )
    run = Run(method, world.alone)
    for _ in range(method.rounds):
        run.rounds(1)
        client = run.client(POOL if method.pooled else "ann")
        own = client.read(*method.shared)
        down = method.download(run.server, ["ann"])["ann"]
        if isinstance(
            method, Ranked
        ):  # factors may come back in another basis: the update is the same
            down, close = own_factors(client.loras, down), 1e-5
            for module in client.loras:
                torch.testing.assert_close(
                    down[f"{module}.B"] @ down[f"{module}.A"],
                    own[f"{module}.B"] @ own[f"{module}.A"],
                    rtol=close,
                    atol=close,
                )
        else:
            with client.borrowing(down):
                assert_same(client.read(*method.shared), own)


def test_fedavg_of_one_client_is_local(language: World) -> None:
    fedavg, local = (Run(method_of(name), language.alone).rounds(2) for name in ("fedavg", "local"))
    assert_same(fedavg.engine.states()["ann"], local.engine.states()["ann"])


def test_every_shipped_recipe_parses() -> None:
    from coterie.runs import recipes
    from coterie.runs.recipe import load

    assert {"quickstart", "folders", "agnews-ood", "agnews-id", "multilingual", "topics"} <= set(
        recipes.names()
    )
    for name in recipes.names():
        assert isinstance(load(name), Recipe)


def test_a_task_sees_only_its_own_client(language: World) -> None:
    """Training another client in between changes nothing for this one, though both take turns in
    one model.
    """
    method = method_of("comigs-1g1s")
    a, b = (Run(method, language) for _ in range(2))
    ask = Ask(method.local_round, {"ann": a.server})  # type: ignore[attr-defined]
    a.engine.answer(ask, 0, 0)
    b.engine.answer(Ask(method.local_round, {"ben": b.server}), 0, 0)  # type: ignore[attr-defined]
    b.engine.answer(ask, 0, 0)
    assert_same(a.engine.states()["ann"], b.engine.states()["ann"])
