"""Clients at once against clients one by one: models, running statistics, the server's state,
and what is measured.
"""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from coterie.client.batch import ClientBatch, PerClientTensors, stacked
from coterie.client.blueprint import Blueprint, Metrics
from coterie.client.settings import SGD, AdamW, Training
from coterie.client.site import Site
from coterie.core.errors import ClientError, TensorError
from coterie.core.protocol import ClientId, State, drive
from coterie.core.roles import EXPERT, GENERALIST
from coterie.data.federation import Federation
from coterie.data.images import Digits
from coterie.engines.engine import Listener
from coterie.engines.inprocess import InProcess
from coterie.methods import Method
from coterie.methods.cobo import CoBo
from coterie.methods.fc import FC
from coterie.methods.fedavg import FedAvg
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

DIGITS = (1, 8, 8)
COBO = CoBo(rounds=3, local_steps=2, rho=0.1, gamma=0.05, pairs="all")
MOMENTUM = SGD(optimiser="sgd", lr=0.05, momentum=0.9)


class AtOnce(Classifier):
    """A network that claims to gain by it, however large it is."""

    def gains(self, examples: int) -> bool:
        return True


class OneByOne(Classifier):
    """A network that claims not to stack."""

    stacks = False


class Heard(Listener):
    """All that was measured, in order."""

    def __init__(self) -> None:
        self.metrics: list[tuple[ClientId, Metrics]] = []

    def measured(self, client: ClientId, metrics: Metrics) -> None:
        self.metrics.append((client, metrics))


class Run:
    """Rounds of a method."""

    def __init__(
        self,
        method: Method,
        federation: Federation,
        shape: NetworkShape,
        kind: type[Classifier],
        training: Training | None = None,
        shared: bool = False,
    ) -> None:
        self.method, self.ids = method, tuple(federation.clients)
        layouts = dict.fromkeys(self.ids, Layout())
        training = training or Training(batch_size=6, experts=MOMENTUM)
        self.site = Site(
            lambda layout: kind(shape, statistics=shared),
            layouts,
            federation.clients,
            training,
            3,
            method.total_iterations,
        )
        self.heard = Heard()
        self.engine = InProcess(self.site, method, self.heard)
        self.state: State = method.init(
            Blueprint(lambda layout: Classifier(shape, statistics=shared), layouts, 3), self.ids
        )
        self.round = 0

    def go(self, rounds: int) -> "Run":
        for _ in range(rounds):
            rng = torch.Generator().manual_seed(self.round)
            answer = lambda ask, phase: self.engine.answer(ask, self.round, phase)  # noqa: E731
            self.state = drive(self.method.round(self.state, self.ids, rng), answer)
            self.round += 1
        return self

    @property
    def states(self) -> Mapping[ClientId, State]:
        return self.engine.states()

    def batch(self) -> ClientBatch | None:
        states = {i: dict(self.states[i]) for i in self.ids}
        return ClientBatch.of(self.site, states, 0, 0, self.site.total_iterations)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Digits(
        partition="permuted-clusters", clusters=2, clients_per_cluster=2, per_client=12
    ).load()


def assert_near(found: State, expected: State) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, rtol=1e-3, atol=2e-4, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_same(a: Run, b: Run) -> None:
    """All that a run has, up to rounding."""
    assert_near(a.state, b.state)
    assert a.states.keys() == b.states.keys()
    for i, state in b.states.items():
        assert_near(a.states[i], state)
    by_client = [
        sorted(run.heard.metrics, key=lambda heard: heard[0]) for run in (a, b)
    ]  # each client's are in order still
    for (i, found), (j, expected) in zip(*by_client, strict=True):
        assert (i, found.keys()) == (j, expected.keys())
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("network", "norm"),
    [
        ("cnn", "batch"),
        ("cnn", "group"),
        ("cnn", "none"),
        ("resnet9", "batch"),
        ("resnet9", "none"),
        ("mlp", "none"),
    ],
)
@pytest.mark.parametrize(
    ("method", "shared"),
    [(COBO, False), (FedAvg(rounds=3, local_steps=2), True), (FC(rounds=3, cluster_size=2), False)],
)
def test_clients_at_once_are_clients_one_by_one(
    federation: Federation, method: Method, shared: bool, network, norm
) -> None:
    shape = NetworkShape(network, DIGITS, 10, hidden=(5,), width=2, norm=norm)
    at_once, single = (
        Run(method, federation, shape, kind, shared=shared) for kind in (AtOnce, OneByOne)
    )
    before = dict(single.state)
    assert_same(at_once.go(3), single.go(3))
    assert at_once.batch() is not None
    assert single.batch() is None
    assert any(not torch.equal(before[name], value) for name, value in single.state.items())
    if norm == "batch" and network != "mlp":
        buffers = [state["buffers"] for state in at_once.states.values()]
        assert shared or not any(torch.equal(buffers[0], other) for other in buffers[1:])


@pytest.mark.parametrize(
    "optimiser", [AdamW(lr=1e-3), SGD(optimiser="sgd", lr=0.05, weight_decay=0.1)]
)
def test_with_any_optimiser(federation: Federation, optimiser: AdamW | SGD) -> None:
    training, shape = (
        Training(batch_size=6, experts=optimiser),
        NetworkShape("cnn", DIGITS, 10, width=2),
    )
    assert_same(
        *(Run(COBO, federation, shape, kind, training).go(2) for kind in (AtOnce, OneByOne))
    )


def test_midpoints_leave_running_statistics_alone(federation: Federation) -> None:
    run = Run(COBO, federation, NetworkShape("cnn", DIGITS, 10, width=2), AtOnce).go(1)
    batch = run.batch()
    assert batch is not None
    before = {i: state["buffers"].clone() for i, state in batch.states.items()}
    batch.gradients_at(
        PerClientTensors(
            {f"{i}/another": x for i, x in zip(batch.ids, batch.x.clone(), strict=True)}
        ),
        "midpoints",
    )
    assert all(torch.equal(state["buffers"], before[i]) for i, state in batch.states.items())
    some = batch.ids[1:3]
    batch.gradients_at(
        PerClientTensors({f"{i}/{i}": x for i, x in zip(some, batch.x[1:3].clone(), strict=True)}),
        "others",
    )  # at their own models
    assert [
        i for i, state in batch.states.items() if not torch.equal(state["buffers"], before[i])
    ] == some


def test_restored_states_go_on_as_if_nothing_had_happened(federation: Federation) -> None:
    shape = NetworkShape("cnn", DIGITS, 10, width=2)
    whole, parted = (Run(COBO, federation, shape, AtOnce).go(1) for _ in range(2))
    parted.engine.restore(
        {i: {name: t.clone() for name, t in state.items()} for i, state in parted.states.items()}
    )
    whole.go(2), parted.go(2)
    for name, value in whole.state.items():
        assert torch.equal(parted.state[name], value)


def test_batches_in_pieces_are_asked_for_one_by_one(federation: Federation) -> None:
    kinds = (
        NetworkShape("cnn", DIGITS, 10, width=2, norm="group"),
        NetworkShape("cnn", DIGITS, 10, width=2),
    )
    whole, pieces = (
        Training(batch_size=6, micro_batch=6, experts=MOMENTUM),
        Training(batch_size=6, micro_batch=5, experts=MOMENTUM),
    )
    assert Run(COBO, federation, kinds[0], AtOnce, whole).go(1).batch() is not None
    run = Run(COBO, federation, kinds[0], AtOnce, pieces).go(1)
    assert run.batch() is None
    with pytest.raises(ClientError, match="micro_batch 5 would split"):
        Run(COBO, federation, kinds[1], AtOnce, pieces).go(1)


def test_values_that_are_missing_or_foreign_are_refused(federation: Federation) -> None:
    shape = NetworkShape("cnn", DIGITS, 10, width=2)
    run = Run(FedAvg(rounds=1), federation, shape, AtOnce, shared=True).go(1)
    batch = run.batch()
    assert batch is not None
    values = batch.split(batch.read(GENERALIST))[batch.ids[0]]
    assert values.keys() == dict(run.site.client(batch.ids[0], {}).read(GENERALIST)).keys()
    statistic = next(name for name in values if name.endswith("running_var"))
    for wrong in (
        {name: t for name, t in values.items() if name != statistic},
        values | {"stranger": torch.zeros(1)},
        values | {statistic: torch.full_like(values[statistic], torch.nan)},
    ):
        with pytest.raises(TensorError, match=batch.ids[0]):
            batch.load(batch.stack(dict.fromkeys(batch.ids, wrong)))
    batch.load(
        batch.stack(
            {
                i: {} if i == batch.ids[0] else {name: t + 1 for name, t in values.items()}
                for i in batch.ids
            }
        )
    )
    moved = batch.split(batch.read(GENERALIST))
    assert torch.equal(moved[batch.ids[0]][statistic], values[statistic])
    assert torch.equal(moved[batch.ids[1]][statistic], values[statistic] + 1)
    with pytest.raises(TypeError, match="only values of generalist"):
        batch.read(GENERALIST, EXPERT)


def test_rows_of_one_matrix_are_that_matrix() -> None:
    matrix: Tensor = torch.rand(3, 4)
    a, b, c = matrix
    assert stacked([a, b, c]) is matrix
    for rows in ([a, c, b], [a, b], [a, b, c.clone()], [a[:3], b[:3], c[:3]]):
        found = stacked(rows)
        assert found is not matrix
        assert torch.equal(found, torch.stack(rows))
