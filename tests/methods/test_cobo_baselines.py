"""What CoBo is compared with, each method against its algorithm as a naive loop, and what must
hold whatever the data are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from digit_runs import CNN, LR, MLP, ROWS, Batches, Run, grad, loss
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.aggregation.clustering import threshold_clustering
from coterie.core.errors import RecipeError
from coterie.core.protocol import ClientId
from coterie.core.roles import GENERALIST
from coterie.data.federation import Federation
from coterie.data.images import Digits
from coterie.methods import Method
from coterie.methods.ditto import Ditto
from coterie.methods.fc import FC
from coterie.methods.fdlora import FDLoRA
from coterie.methods.fedavg import FedAvg
from coterie.methods.finetunedfedavg import FinetunedFedAvg
from coterie.methods.ifca import IFCA
from coterie.methods.local import Local
from coterie.methods.oracle import Oracle
from coterie.methods.pcl import PCL
from coterie.models.classifier import Classifier
from coterie.models.networks import NetworkShape


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Five clients in clusters of three and two."""
    return Digits(
        partition="permuted-clusters", cluster_sizes=(3, 2), per_client=10, test_examples=12
    ).load()


@pytest.mark.parametrize(("share", "rounds", "first"), [(0.55, 100, 55), (0.7, 90, 63)])
def test_a_share_of_the_rounds_is_exact(share: float, rounds: int, first: int) -> None:
    """As floats 0.55 * 100 is more than 55, and 0.7 * 90 less than 63."""
    method, rng = FinetunedFedAvg(start=share, rounds=rounds), torch.Generator()
    done = ((t, {"round": torch.tensor(t), "mean/w": torch.zeros(2)}) for t in (first - 1, first))
    names = {t: next(method.round(state, ["ann"], rng)).name for t, state in done}
    assert names == {first - 1: "local_round", first: "finetune"}
    assert FDLoRA(alone=share, rounds=rounds).rounds_alone == first


class Steps:
    """Gradient descent along the moving average of gradients."""

    def __init__(self, beta: float) -> None:
        self.beta, self.average = beta, 0.0

    def __call__(self, x: Tensor, gradient: Tensor) -> Tensor:
        self.average = self.beta * self.average + (1 - self.beta) * gradient
        return x - LR * (self.average if self.beta else gradient)


class Naive:
    """What all naive loops start from."""

    def __init__(self, run: Run, momentum: float) -> None:
        self.ids, self.momentum = sorted(run.ids), momentum
        self.data = run.federation.clients
        self.x0 = run.blueprint.flat()
        self.x = {i: self.x0.clone() for i in self.ids}
        self.batches = {i: Batches(self.data[i]) for i in self.ids}
        self.steps = {i: Steps(momentum) for i in self.ids}

    def train(self, i: ClientId, x: Tensor, times: int) -> Tensor:
        for _ in range(times):
            x = self.steps[i](x, grad(x, self.batches[i].next()))
        self.x[i] = x
        return x


def mean(values: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(values)).mean(dim=0)


def same(found: Mapping[ClientId, Tensor], expected: Mapping[ClientId, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for i in found:
        torch.testing.assert_close(
            found[i], expected[i], rtol=1e-4, atol=2e-5, msg=lambda text, i=i: f"{i}: {text}"
        )


def apart(found: Mapping[ClientId, Tensor], other: Mapping[ClientId, Tensor]) -> float:
    return max(float((found[i] - other[i]).abs().max()) for i in found)


momenta = pytest.mark.parametrize("momentum", [0.0, 0.9])


@momenta
def test_finetuned_fedavg_is_fedavg_then_local_training(
    federation: Federation, momentum: float
) -> None:
    run = Run(FinetunedFedAvg(rounds=5, local_steps=2, start=0.5), federation, momentum).rounds(5)
    naive = Naive(run, momentum)
    w = naive.x0
    for _ in range(3):  # rounds 0, 1 and 2 are before 2.5
        w = mean([naive.train(i, w, 2) for i in naive.ids])
    for i in naive.ids:
        naive.train(i, w, 4)
    same(run.models, naive.x)


@momenta
@pytest.mark.parametrize("prox", [0.5, 2.0])
def test_ditto_is_a_personal_model_held_near_fedavg_on_the_same_batches(
    federation: Federation, momentum: float, prox: float
) -> None:
    run = Run(Ditto(rounds=3, local_steps=2, prox=prox), federation, momentum).rounds(3)
    naive = Naive(run, momentum)
    w, personal = naive.x0, {i: Steps(momentum) for i in naive.ids}
    for _ in range(3):
        sent = []
        for i in naive.ids:
            own = w
            for _ in range(2):
                batch, v = naive.batches[i].next(), naive.x[i]
                own = naive.steps[i](own, grad(own, batch))
                naive.x[i] = personal[i](v, grad(v, batch) + prox * (v - w))
            sent.append(own)
        w = mean(sent)
    same(run.models, naive.x)
    torch.testing.assert_close(run.state[GENERALIST], w, rtol=1e-4, atol=2e-5)


@momenta
def test_ifca_trains_the_centre_of_least_loss_and_averages_members(
    federation: Federation, momentum: float
) -> None:
    run = Run(IFCA(rounds=6, local_steps=2, centres=3), federation, momentum).rounds(6)
    naive = Naive(run, momentum)
    centres = [run.blueprint.flat(start=k) for k in range(3)]
    judging = {i: Batches(naive.data[i], "choice") for i in naive.ids}
    chosen: dict[ClientId, int] = {}
    history = []
    for _ in range(6):
        members: list[list[Tensor]] = [[], [], []]
        for i in naive.ids:
            batch = judging[i].next()
            k = min(range(3), key=lambda k, batch=batch: float(loss(centres[k], batch)))
            if chosen.get(i, k) != k:
                naive.steps[i] = Steps(momentum)
            chosen[i] = k
            members[k].append(naive.train(i, centres[k], 2))
        centres = [
            mean(found) if found else centre for found, centre in zip(members, centres, strict=True)
        ]
        history.append(dict(chosen))
    assert any(a != b for a, b in pairwise(history)), "no client ever changed its mind"
    assert len(set(chosen.values())) > 1
    same(run.models, naive.x)
    for k, centre in enumerate(centres):
        torch.testing.assert_close(run.state[f"centre/{k}"], centre, rtol=1e-4, atol=2e-5)
    weights = run.method.collaboration(run.state, run.ids)
    size = {k: list(chosen.values()).count(k) for k in range(3)}
    expected = [
        [1 / size[chosen[i]] if chosen[i] == chosen[j] else 0.0 for j in run.ids] for i in run.ids
    ]
    assert weights is not None
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64))


def test_ifca_compares_centres_by_the_statistics_of_the_common_batch(
    federation: Federation,
) -> None:
    """Running statistics are of a client's own model: with them the centre that it had would win
    against any other.
    """
    run = Run(IFCA(rounds=4, local_steps=2, centres=3), federation, shape=CNN).rounds(3)
    centres = {k: run.state[f"centre/{k}"] for k in range(3)}
    judging, expected = {i: Batches(run.site.data[i], "choice") for i in run.ids}, {}
    for i, batches in judging.items():
        for _ in range(4):
            batch = batches.next()
        losses = []
        for k in range(3):
            model = Classifier(CNN)
            offset = 0
            for parameter in model.parameters_by_role[GENERALIST].values():
                parameter.data.copy_(
                    centres[k][offset : offset + parameter.numel()].view_as(parameter)
                )
                offset += parameter.numel()
            model.network.train()
            losses.append(cross_entropy(model.network(batch.x), batch.y).item())
        expected[i] = losses.index(min(losses))
    for state in run.engine.states().values():
        state["buffers"] += 3.0  # whatever they are
    buffers = {i: run.engine.states()[i]["buffers"].clone() for i in run.ids}
    client = run.client(run.ids[0])
    client.comparable_loss(client.draw(client.independent_stream("elsewhere")))
    assert torch.equal(client.state["buffers"], buffers[run.ids[0]])
    run.rounds(1)
    assert {i: int(run.state[f"choice/{i}"]) for i in run.ids} == expected


def clustered(points: Sequence[Tensor], start: int, size: int, rounds: int) -> Tensor:
    """Threshold-Clustering of one centre, as the paper writes it."""
    v = points[start].double()
    for _ in range(rounds):
        distances = [float((z.double() - v).norm()) for z in points]
        radius = sorted(distances)[size - 1]
        v = mean(
            [
                z.double() if distance <= radius else v
                for z, distance in zip(points, distances, strict=True)
            ]
        )
    return v


@momenta
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"cluster_size": 3, "clustering_rounds": 1},
        {"cluster_size": (1, 2, 3, 4, 5), "exchange_mb": 1e-6},
    ],
)
def test_fc_steps_along_the_centre_of_the_gradients_near_its_own(
    federation: Federation, momentum: float, fields: dict[str, object]
) -> None:
    method = FC(rounds=3, local_steps=2, **fields)  # type: ignore[arg-type]
    run = Run(method, federation, momentum).rounds(3)
    naive = Naive(run, momentum)
    true = dict(zip(run.ids, (3, 3, 3, 2, 2), strict=True))
    sizes = true if method.cluster_size is None else method.cluster_size
    if not isinstance(sizes, dict):
        sizes = dict(zip(run.ids, sizes if isinstance(sizes, tuple) else (sizes,) * 5, strict=True))
    others = {i: Batches(naive.data[i], "others") for i in naive.ids}
    for _ in range(6):
        after = {}
        for i in naive.ids:
            points = [
                grad(naive.x[i], (naive.batches if i == j else others)[j].next()) for j in naive.ids
            ]
            v = clustered(points, naive.ids.index(i), sizes[i], method.clustering_rounds)
            after[i] = naive.steps[i](naive.x[i], v.float())
        naive.x = after
    same(run.models, naive.x)
    weights = method.collaboration(run.state, run.ids)
    torch.testing.assert_close(weights.sum(dim=1), torch.ones(5, dtype=torch.float64))


@momenta
def test_oracle_averages_inside_the_true_clusters(federation: Federation, momentum: float) -> None:
    run = Run(Oracle(rounds=3, local_steps=2), federation, momentum).rounds(3)
    naive = Naive(run, momentum)
    clusters = run.federation.clusters
    assert clusters is not None
    means = dict.fromkeys(clusters.values(), naive.x0)
    for _ in range(3):
        trained = {i: naive.train(i, means[clusters[i]], 2) for i in naive.ids}
        means = {k: mean([x for i, x in trained.items() if clusters[i] == k]) for k in means}
    same(run.models, naive.x)
    assert apart({"": means[0]}, {"": means[1]}) > 1e-3
    for i, down in run.method.download(run.state, run.ids).items():
        torch.testing.assert_close(
            torch.cat([t.flatten() for t in down.values()]),
            means[clusters[i]],
            rtol=1e-4,
            atol=2e-5,
        )


def test_pcl_weighs_classifiers_by_their_likelihood_on_validation_images(
    federation: Federation,
) -> None:
    run = Run(PCL(rounds=2, local_steps=3), federation).rounds(2)
    naive = Naive(run, 0.0)
    for _ in range(2):
        x = {i: naive.train(i, naive.x[i], 3) for i in naive.ids}
        last = x
        rows = {}
        for i in naive.ids:
            valid = next(naive.data[i].valid.scoring(100))
            rows[i] = torch.softmax(
                -torch.stack([loss(x[j], valid).double().exp() for j in naive.ids]), dim=0
            )
        naive.x = {
            i: sum(w * x[j] for w, j in zip(rows[i].float(), naive.ids, strict=True))
            for i in naive.ids
        }
    same(run.models, last)
    weights = run.method.collaboration(run.state, naive.ids)
    torch.testing.assert_close(
        weights, torch.stack([rows[i] for i in naive.ids]), rtol=1e-4, atol=1e-5
    )


# Closed forms and invariants.


def end(
    method: Method, federation: Federation, shape: NetworkShape = MLP, batch_size: int = ROWS
) -> Run:
    return Run(replace(method, rounds=3, local_steps=2), federation, 0.9, shape, batch_size).rounds(
        3
    )


def test_with_one_or_no_companion_methods_are_those_that_they_generalise(
    federation: Federation,
) -> None:
    together = replace(federation, clusters=dict.fromkeys(federation.clients, 4))
    apart_ = replace(federation, clusters={i: k for k, i in enumerate(federation.clients)})
    local, fedavg = end(Local(), federation).models, end(FedAvg(), federation).models
    assert apart(local, fedavg) > 1e-2
    same(end(Ditto(prox=0), federation).models, local)
    same(end(Oracle(), together).models, fedavg)
    same(end(Oracle(), apart_).models, local)
    same(end(FC(cluster_size=1), federation).models, local)
    same(end(FC(), apart_).models, local)
    same(end(IFCA(centres=1), federation).models, fedavg)
    same(end(FinetunedFedAvg(start=1), federation).models, fedavg)
    same(end(FinetunedFedAvg(start=0), federation).models, local)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("method", [Ditto(prox=0), FC(cluster_size=1)], ids=str)
def test_running_statistics_follow_the_batches_that_train(
    federation: Federation, method: Method, at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of a client alone: gradients at other points than its own model leave them
    as they are.
    """
    monkeypatch.setattr(Classifier, "stacks", at_once)
    local, found = (end(m, federation, shape=CNN) for m in (Local(), method))
    for i in local.ids:
        a, b = (run.engine.states()[i] for run in (local, found))
        for key in (
            "buffers",
            f"parameters/{GENERALIST}",
        ):  # at once they are rounded in another way
            torch.testing.assert_close(
                a[key], b[key], **({} if at_once else {"rtol": 0, "atol": 0})
            )


def test_fc_whose_radius_lets_all_in_averages_all_gradients_at_each_model(
    federation: Federation,
) -> None:
    run = Run(FC(rounds=1, cluster_size=99), federation).rounds(1)
    naive = Naive(run, 0.0)
    others = {i: Batches(naive.data[i], "others") for i in naive.ids}
    gradients = {
        i: mean(
            [grad(naive.x0, (naive.batches if i == j else others)[j].next()) for j in naive.ids]
        )
        for i in naive.ids
    }
    same(run.models, {i: naive.x0 - LR * gradients[i] for i in naive.ids})
    torch.testing.assert_close(
        run.method.collaboration(run.state, run.ids), torch.full((5, 5), 0.2, dtype=torch.float64)
    )


def test_the_larger_lambda_the_nearer_a_personal_model_is_to_the_global_one(
    federation: Federation,
) -> None:
    found = []
    for prox in (0.0, 0.5, 2.0, 1 / LR):
        run = Run(Ditto(rounds=8, local_steps=1, prox=prox), federation).rounds(8)
        found.append(apart(run.models, dict.fromkeys(run.ids, run.state[GENERALIST])))
    assert found == sorted(found, reverse=True)
    before = run.state[
        GENERALIST
    ]  # lambda = 1 / eta: v_i is one gradient step from w, wherever it was
    v = run.models
    batches = {i: run.site.data[i].train.batch(8 * ROWS, ROWS) for i in run.ids}
    run.rounds(1)
    same(run.models, {i: before - LR * grad(v[i], batches[i]) for i in run.ids})


@pytest.mark.parametrize(
    "method",
    [FinetunedFedAvg(), Ditto(), IFCA(), FC(), Oracle(), PCL()],
    ids=lambda m: type(m).__name__,
)
def test_names_of_clients_mean_nothing(federation: Federation, method: Method) -> None:
    clusters = federation.clusters or {}
    renamed = dict(zip(federation.clients, ("e", "c", "a", "d", "b"), strict=True))
    other = Federation(
        {renamed[i]: data for i, data in federation.clients.items()},
        "",
        {renamed[i]: k for i, k in clusters.items()},
    )
    a, b = (
        end(method, found, batch_size=10) for found in (federation, other)
    )  # all images: which batch is whose would follow names
    same(b.models, {renamed[i]: x for i, x in a.models.items()})
    if (weights := a.method.collaboration(a.state, a.ids)) is not None:
        torch.testing.assert_close(
            b.method.collaboration(b.state, b.ids), weights, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize(
    ("method", "field"),
    [(Oracle(), "method.name"), (IFCA(), "method.centres"), (FC(), "method.cluster_size")],
)
def test_unknown_clusters_are_refused_where_they_are_needed(
    federation: Federation, method: Method, field: str
) -> None:
    with pytest.raises(RecipeError, match=field):
        Run(method, replace(federation, clusters=None))


@pytest.mark.parametrize(
    "method", [IFCA(centres=2), FC(cluster_size=2)], ids=lambda m: type(m).__name__
)
def test_a_given_number_needs_no_true_clusters(federation: Federation, method: Method) -> None:
    Run(replace(method, rounds=1), replace(federation, clusters=None)).rounds(1)


def test_after_its_start_finetuned_fedavg_sends_the_last_mean_and_then_nothing(
    federation: Federation,
) -> None:
    run = Run(FinetunedFedAvg(rounds=6, local_steps=1, start=0.5), federation).rounds(6)
    sizes = [
        (sum(map(len, to.values())), sum(map(len, replies.values())))
        for _, to, replies in run.messages
    ]
    everything = 4 * len(run.ids)  # weights and biases of two layers
    assert sizes == [(everything, everything)] * 3 + [(everything, 0), (0, 0), (0, 0)]
    assert not any(run.method.download(run.state, run.ids).values())


def test_who_joins_late_starts_from_the_last_mean(federation: Federation) -> None:
    *early, late = federation.clients
    run = Run(FinetunedFedAvg(rounds=6, local_steps=1, start=0.5), federation)
    run.rounds(4, early).rounds(1)
    w = torch.cat(
        [run.state[f"mean/{name}"].flatten() for name in run.client(late).read(GENERALIST)]
    )
    torch.testing.assert_close(
        run.models[late],
        w - LR * grad(w, federation.clients[late].train.batch(0, ROWS)),
        rtol=1e-4,
        atol=2e-5,
    )


@pytest.mark.parametrize("method", [Oracle(), IFCA(), Ditto()], ids=lambda m: type(m).__name__)
def test_clients_may_come_and_go(federation: Federation, method: Method) -> None:
    first, *others = federation.clients
    run = Run(replace(method, rounds=4, local_steps=1), federation)
    run.state = method.init(run.blueprint, others)
    run.rounds(2, others).rounds(1).rounds(1, [first])
    assert int(run.client(first).iteration) == 2
    weights = method.collaboration(run.state, run.ids)
    assert weights is None or weights.shape == (5, 5)


def test_a_centre_that_nobody_chooses_stays(federation: Federation) -> None:
    run = Run(IFCA(rounds=1, centres=2), federation)
    run.state["centre/1"] = run.state["centre/1"] * 100  # sure of itself and wrong
    before = run.state["centre/1"].clone()
    run.rounds(1)
    assert {int(run.state[f"choice/{i}"]) for i in run.ids} == {0}
    assert torch.equal(run.state["centre/1"], before)


@given(st.integers(1, 7), st.integers(1, 9), st.integers(1, 12), st.integers(0, 10_000))
@settings(max_examples=60)
def test_threshold_clustering_by_inner_products_is_that_by_vectors(
    n: int, size: int, rounds: int, seed: int
) -> None:
    points = list(torch.randn(n, 5, generator=torch.Generator().manual_seed(seed)))
    start = seed % n
    weights = threshold_clustering(points, start, size, rounds)
    assert weights.min() >= 0
    assert float(weights.sum()) == pytest.approx(1)
    v = sum(w * z.double() for w, z in zip(weights, points, strict=True))
    torch.testing.assert_close(
        v, clustered(points, start, min(size, n), rounds), rtol=1e-5, atol=1e-6
    )
