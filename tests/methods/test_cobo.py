"""CoBo against Algorithm 1 written with loops, and what must hold whatever the data are."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.client.blueprint import Blueprint
from coterie.client.settings import SGD, AdamW, Training
from coterie.client.site import Site
from coterie.core.errors import ClientError, RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, State, drive
from coterie.core.roles import GENERALIST
from coterie.data.federation import ClientData, Federation
from coterie.data.images import Digits
from coterie.engines.inprocess import ENGINES
from coterie.methods import Method
from coterie.methods.cobo import CoBo
from coterie.methods.local import Local
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

SHAPE = NetworkShape("mlp", (1, 8, 8), 10, (6,))
SLOW = SGD(optimiser="sgd", lr=0.2, momentum=0.9)
ALL = CoBo(rounds=4, rho=0.1, gamma=0.05, pairs="all")
SEED = 3


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Digits(
        partition="permuted-clusters", clusters=2, clients_per_cluster=2, per_client=11
    ).load()


class Run:
    """A method on a federation of digits, round by round."""

    def __init__(
        self,
        method: Method,
        federation: Federation,
        training: Training | None = None,
        shape: NetworkShape = SHAPE,
        together: bool = True,
        engine: str = "inprocess",
    ) -> None:
        self.method, self.ids = method, tuple(federation.clients)
        self.training = training or Training(batch_size=5, experts=SLOW)

        def build(layout: Layout) -> Classifier:
            return Together(shape) if together else OneByOne(shape)

        layouts = dict.fromkeys(self.ids, Layout())
        self.site = Site(
            build, layouts, federation.clients, self.training, SEED, method.total_iterations
        )
        self.engine = ENGINES[engine](self.site, method)
        self.blueprint = Blueprint(
            lambda layout: Classifier(shape), layouts, SEED, federation.clusters
        )
        self.state: State = method.init(self.blueprint, self.ids)
        self.round = 0

    def answer(self, ask: Ask, phase: int) -> Replies:
        return self.engine.answer(ask, self.round, phase)

    def go(
        self,
        rounds: int,
        members: Sequence[ClientId] = (),
        answer: Callable[[Ask, int], Replies] | None = None,
        active: Sequence[ClientId] = (),
    ) -> "Run":
        for _ in range(rounds):
            rng = torch.Generator().manual_seed(self.round)
            state = self.method.members(self.state, members or self.ids)
            self.state = drive(
                self.method.round(state, active or members or self.ids, rng), answer or self.answer
            )
            self.round += 1
        return self

    def model(self, i: ClientId) -> Tensor:
        return self.engine.states()[i][f"parameters/{GENERALIST}"]


class Together(Classifier):
    """As it is: small networks stack."""


class OneByOne(Classifier):
    """A network that claims not to stack."""

    stacks = False


def flat_gradient(values: Tensor, x: Tensor, y: Tensor, hidden: int = 6) -> Tensor:
    """Of the mean cross-entropy of the network in `SHAPE`, from its definition."""
    values = values.clone().requires_grad_()
    w1, b1, w2, b2 = torch.split(values, [hidden * 64, hidden, 10 * hidden, 10])
    logits = torch.relu(x.flatten(1) @ w1.view(hidden, 64).T + b1) @ w2.view(10, hidden).T + b2
    return torch.autograd.grad(nn.functional.cross_entropy(logits, y), values)[0]


def naive(
    method: CoBo,
    federation: Federation,
    x_0: Tensor,
    batch: int,
    eta: float,
    beta: float,
    there: Sequence[Sequence[ClientId]] = (),
) -> tuple[dict[str, Tensor], Tensor]:
    """Algorithm 1 over all pairs: loops over clients and pairs, X copied, nothing centred. SGD
    along a moving average of gradients.

    Where only some are `there` in a round, it is theirs alone. Who comes starts from the mean of
    those who were there and stay, with weights of 1; its optimiser goes on.
    """
    ids, drawn = sorted(federation.clients), {}
    before = ids
    x = {i: x_0.clone() for i in ids}
    m = {i: torch.zeros_like(x_0) for i in ids}
    w = {(i, j): 1.0 for i in ids for j in ids if i != j}

    def next_batch(i: str, purpose: str) -> tuple[Tensor, Tensor]:
        split = federation.clients[i].train
        split = split.reordered(f"train-{purpose}") if purpose else split
        start = drawn.get((i, purpose), 0)
        drawn[i, purpose] = start + batch
        found = split.batch(start, batch)
        return found.x, found.y

    for here in there or [ids] * method.rounds:
        stayed = [i for i in before if i in here]
        for i in set(here) - set(before):
            x[i] = torch.stack([x[j] for j in stayed]).mean(dim=0)
            w |= {pair: 1.0 for j in here for pair in ((i, j), (j, i)) if i != j}
        before = here
        for k, i in enumerate(here):
            for j in here[k + 1 :]:
                z = (x[i] + x[j]) / 2
                g_i, g_j = (
                    flat_gradient(z, *next_batch(i, "midpoints")),
                    flat_gradient(z, *next_batch(j, "midpoints")),
                )
                w[i, j] = w[j, i] = min(1.0, max(0.0, w[i, j] + method.gamma * float(g_i @ g_j)))
        new = dict(x)
        for i in here:
            m[i] = beta * m[i] + (1 - beta) * flat_gradient(x[i], *next_batch(i, ""))
            pull = sum((w[i, k] * (x[i] - x[k]) for k in here if k != i), torch.zeros_like(x_0))
            new[i] = x[i] - eta * (m[i] + method.rho * pull)
        x = new
    return x, torch.tensor([[w.get((i, j), 0.0) for j in ids] for i in ids], dtype=torch.float64)


@pytest.mark.parametrize("together", [True, False])
def test_it_is_algorithm_1(federation: Federation, together: bool) -> None:
    run = Run(ALL, federation, together=together)
    x, w = naive(ALL, federation, run.blueprint.flat(GENERALIST), 5, 0.2, 0.9)
    run.go(ALL.rounds)
    torch.testing.assert_close(run.state["weights"], w, rtol=1e-4, atol=1e-5)
    assert 0 < w.max() <= 1
    assert len(w.unique()) > 3  # weights have moved, each on its own
    for i in run.ids:
        torch.testing.assert_close(run.model(i), x[i], rtol=1e-4, atol=1e-5)
        assert torch.equal(run.model(i), run.state[f"{i}/{GENERALIST}"])


@pytest.mark.parametrize("together", [True, False])
def test_it_is_algorithm_1_of_those_who_are_there(federation: Federation, together: bool) -> None:
    run = Run(ALL, federation, together=together)
    a, b, c, d = run.ids
    there = [(a, b, c), (a, b, c, d), (b, c, d), (a, b, c, d)]
    x, w = naive(ALL, federation, run.blueprint.flat(GENERALIST), 5, 0.2, 0.9, there)
    for here in there:
        run.go(1, here)
    torch.testing.assert_close(run.state["weights"], w, rtol=1e-4, atol=1e-5)
    for i in run.ids:
        torch.testing.assert_close(run.model(i), x[i], rtol=1e-4, atol=1e-5)


@settings(max_examples=12)
@given(
    st.integers(2, 5),
    st.integers(1, 7),
    st.sampled_from([SLOW, SGD(optimiser="sgd", lr=0.1, weight_decay=0.1), AdamW(lr=1e-2)]),
    st.booleans(),
)
def test_clients_together_are_clients_one_by_one(
    n: int, batch: int, optimiser: SGD | AdamW, decoupled: bool
) -> None:
    data = Digits(partition="permuted-clusters", cluster_sizes=(n,), per_client=9).load()
    method = replace(
        ALL, rounds=2, local_steps=2, pull="decoupled" if decoupled else "gradient", rho=0.05
    )
    training = Training(batch_size=batch, experts=optimiser)
    a, b = (Run(method, data, training, together=together).go(2) for together in (True, False))
    torch.testing.assert_close(a.state["weights"], b.state["weights"], rtol=1e-4, atol=1e-5)
    for i in a.ids:
        assert a.engine.states()[i].keys() == b.engine.states()[i].keys()
        for key, values in a.engine.states()[i].items():
            torch.testing.assert_close(values, b.engine.states()[i][key], rtol=2e-3, atol=2e-5)


def test_a_small_exchange_changes_nothing(federation: Federation) -> None:
    a, b = (
        Run(replace(ALL, exchange_mb=mb), federation, together=False).go(3) for mb in (1024.0, 1e-6)
    )
    assert torch.equal(a.state["weights"], b.state["weights"])
    assert all(torch.equal(a.model(i), b.model(i)) for i in a.ids)


def test_without_gamma_the_weights_stay_and_nothing_is_compared(federation: Federation) -> None:
    run = Run(replace(ALL, gamma=0), federation)
    before, asked = run.state["weights"].clone(), []

    def answer(ask: Ask, phase: int) -> Replies:
        asked.append(ask.name)
        return run.answer(ask, phase)

    run.go(3, answer=answer)
    assert torch.equal(run.state["weights"], before)
    assert asked == ["descend"] * 3


def test_without_rho_it_is_local(federation: Federation) -> None:
    a = Run(replace(ALL, rho=0), federation).go(4)
    b = Run(Local(rounds=4, local_steps=1), federation, together=False).go(4)
    for i in a.ids:
        torch.testing.assert_close(a.model(i), b.model(i), rtol=1e-4, atol=1e-6)


def test_weights_fixed_to_the_truth_are_training_in_clusters(federation: Federation) -> None:
    method = replace(ALL, gamma=0)
    whole = Run(method, federation)
    ids = sorted(whole.ids)
    assert federation.clusters
    truth = torch.tensor(
        [
            [float(i != j and federation.clusters[i] == federation.clusters[j]) for j in ids]
            for i in ids
        ]
    )
    whole.state["weights"] = truth.double()
    whole.go(4)
    for cluster in (0, 1):
        members = {
            i: data for i, data in federation.clients.items() if federation.clusters[i] == cluster
        }
        alone = Run(method, Federation(members, "")).go(4)
        for i in members:
            torch.testing.assert_close(whole.model(i), alone.model(i), rtol=1e-4, atol=1e-5)


def test_identical_clients_stay_identical(federation: Federation) -> None:
    first, second = list(federation.clients.values())[:2]
    twins = {
        "a": first,
        "b": ClientData("b", first.train, first.valid, first.test),
        "c": second,
    }
    run = Run(ALL, Federation(twins, ""), together=False).go(4)
    assert torch.equal(run.model("a"), run.model("b"))
    assert not torch.equal(run.model("a"), run.model("c"))


@pytest.mark.parametrize("projection", ["box", "simplex"])
def test_weights_stay_where_they_belong(federation: Federation, projection: str) -> None:
    method = replace(ALL, projection=projection, gamma=2.0)
    run = Run(method, federation)
    for _ in range(4):
        run.go(1)
        w = run.state["weights"]
        assert w.min() >= 0
        if projection == "box":
            assert torch.equal(w, w.T)
            assert w.max() <= 1
            assert not w.diagonal().any()
        else:
            torch.testing.assert_close(w.sum(dim=1), torch.ones(4, dtype=torch.float64))


def test_a_midpoint_gradient_leaves_the_running_statistics_alone(federation: Federation) -> None:
    shape = NetworkShape("cnn", (1, 8, 8), 10, norm="batch", width=4)
    run = Run(replace(ALL, rounds=2), federation, Training(batch_size=5, experts=SLOW), shape).go(1)
    before = {i: state["buffers"].clone() for i, state in run.engine.states().items()}
    model = {i: run.model(i).clone() for i in run.ids}
    asked = Ask(run.method.midpoint_gradients, {i: {"other": run.model(i) * 0.9} for i in run.ids})  # type: ignore[attr-defined]
    replies = run.answer(asked, 5)
    for i, state in run.engine.states().items():
        assert torch.equal(state["buffers"], before[i])
        assert torch.equal(run.model(i), model[i])
        assert replies[i]["other"].abs().max() > 0
    run.go(1)  # a step of its own model does move them
    assert all(
        not torch.equal(state["buffers"], before[i]) for i, state in run.engine.states().items()
    )


def test_clients_join_with_the_mean_model_and_leave_with_theirs(federation: Federation) -> None:
    run = Run(ALL, federation)
    a, b, _, d = run.ids
    run.state = ALL.init(run.blueprint, (a, b))
    run.go(2, (a, b))
    mean = (run.state[f"{a}/{GENERALIST}"] + run.state[f"{b}/{GENERALIST}"]) / 2
    started = {}

    def answer(ask: Ask, phase: int) -> Replies:
        started.update(
            {i: found[GENERALIST].clone() for i, found in ask.to.items() if ask.name == "start"}
        )
        return run.answer(ask, phase)

    own = run.state["weights"][0, 1]
    run.method = replace(ALL, gamma=0)
    run.go(1, (a, b, d), answer)
    assert started.keys() == {d}
    torch.testing.assert_close(started[d], mean)
    assert run.state["weights"].tolist() == [[0, own, 1], [own, 0, 1], [1, 1, 0]]
    run.go(1, (b, d))
    assert run.state["weights"].tolist() == [[0, 1], [1, 0]]
    assert f"{a}/{GENERALIST}" not in run.state
    found = run.method.collaboration(run.state, run.ids)
    assert found is not None
    assert found.shape == (4, 4)
    assert not found[0].any()


def test_who_does_not_answer_keeps_model_and_weights(federation: Federation) -> None:
    run = Run(ALL, federation)
    lost = sorted(run.ids)[1]
    run.go(
        4,
        answer=lambda ask, phase: {
            i: reply for i, reply in run.answer(ask, phase).items() if i != lost
        },
    )
    torch.testing.assert_close(run.state[f"{lost}/{GENERALIST}"], run.blueprint.flat(GENERALIST))
    others = [k for k in range(4) if k != 1]
    assert torch.equal(run.state["weights"][1, others], torch.ones(3, dtype=torch.float64))
    assert (run.state["weights"][0, 2:] != 1).any()


def test_gradients_that_are_not_finite_leave_weights_as_they_are(federation: Federation) -> None:
    run = Run(ALL, federation)

    def answer(ask: Ask, phase: int) -> Replies:
        replies = run.answer(ask, phase)
        if ask.name == "midpoint_gradients":
            return {
                i: {j: g * float("nan") for j, g in found.items()} for i, found in replies.items()
            }
        return replies

    run.go(1, answer=answer)
    assert torch.equal(run.state["weights"], ALL.init(run.blueprint, run.ids)["weights"])


@pytest.mark.parametrize("together", [True, False])
def test_a_client_that_diverges_is_named(federation: Federation, together: bool) -> None:
    run = Run(
        replace(ALL, rho=0, gamma=0),
        federation,
        Training(batch_size=5, experts=SGD(optimiser="sgd", lr=1e30)),
        together=together,
    )
    with pytest.raises(ClientError, match=r"c0-0.*not finite"):
        run.go(3)


def test_a_pull_that_diverges_by_itself_is_refused(federation: Federation) -> None:
    run = Run(ALL, federation)
    ALL.check(run.blueprint, run.ids, run.training)
    with pytest.raises(RecipeError, match=r"method\.rho: 2\.5 x 0\.2 .* use a rho below 2\.5"):
        replace(ALL, rho=2.5).check(run.blueprint, run.ids, run.training)
    with pytest.raises(RecipeError, match=r"below 1$"):
        replace(ALL, rho=1.0, pull="decoupled", projection="simplex").check(
            run.blueprint, run.ids, run.training
        )


def test_as_many_pairs_are_compared_as_the_paper_says() -> None:
    order, rng = [f"c{k:02}" for k in range(20)], torch.Generator().manual_seed(0)

    def mean(method: CoBo, rounds: range) -> float:
        return sum(len(method.sample(t, order, rng)) for t in rounds) / len(rounds)

    every = 20 * 19 / 2
    assert mean(replace(ALL, pairs="all"), range(3)) == every
    assert mean(replace(ALL, pairs="constant"), range(400)) == pytest.approx(19, rel=0.05)
    assert mean(replace(ALL, pairs="time", pair_rate=50.0), range(40)) == every
    assert mean(replace(ALL, pairs="time", pair_rate=50.0), range(400, 600)) == pytest.approx(
        every * 50 / 500, rel=0.1
    )
    mixed = replace(ALL, pairs="mixed", rounds=1000, switch=0.1, pair_rate=1.0)
    assert mean(mixed, range(100)) == pytest.approx(19, rel=0.1)
    assert mean(mixed, range(100, 1000)) == pytest.approx(
        every * sum(1 / (t + 1) for t in range(100, 1000)) / 900, rel=0.3
    )
    mixed = replace(mixed, pair_rate=None)  # goes on where constant ended, and falls as 1 / t
    assert mean(mixed, range(100)) == pytest.approx(19, rel=0.1)
    assert mean(mixed, range(100, 120)) == pytest.approx(19 * 100 / 110, rel=0.1)
    assert mean(mixed, range(100, 1000)) == pytest.approx(
        sum(19 * 100 / (t + 1) for t in range(100, 1000)) / 900, rel=0.1
    )
    assert all(i < j for i, j in ALL.sample(0, order, rng))


def test_the_output_may_be_an_iterate_drawn_uniformly(federation: Federation) -> None:
    method = replace(ALL, output="uniform", rounds=12)
    run, seen = Run(method, federation), []
    for _ in range(12):
        run.go(1)
        seen.append({i: run.state[f"{i}/{GENERALIST}"].clone() for i in run.ids})
    kept: Mapping[ClientId, Mapping[str, Tensor]] = method.personal(run.state, run.ids)
    matching = [all(torch.equal(kept[i][GENERALIST], x[i]) for i in run.ids) for x in seen]
    assert matching.count(True) == 1
    assert ALL.personal(run.state | {}, ["c9-9"]) == {"c9-9": {}}


def test_engines_are_alike_bit_for_bit(federation: Federation) -> None:
    a, b = (Run(ALL, federation, together=False, engine=engine).go(3) for engine in ENGINES)
    assert all(torch.equal(a.state[name], b.state[name]) for name in a.state)
