"""DDOME against a naive Algorithm 1, its extremes, what its messages hold, and its relatives
FedMix and average ensembles.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from coterie.aggregation.means import Mean
from coterie.client.blueprint import Blueprint
from coterie.client.settings import SGD, Training
from coterie.client.site import Site
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, State, drive
from coterie.core.tensors import Tensors
from coterie.data.federation import ClientData, Federation
from coterie.engines.inprocess import InProcess
from coterie.methods.base import Method
from coterie.methods.ddome import DDOME
from coterie.methods.ensemble import Ensemble
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedmix import FedMix
from coterie.models.common import CommonExpert
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape
from coterie.runs.problems.classification import Classification
from coterie.runs.recipes.sections import ClassifierSection

SHAPE = NetworkShape("mlp", (1, 4, 4), 10, (6,))
LR, GATE_LR, BATCH = 0.1, 0.05, 4


class Counted(CommonExpert):
    """A common expert that knows how many examples it has embedded."""

    seen = 0

    def embed(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return super().embed(x)


@dataclass
class Run:
    """A method on a federation, all of whose messages are kept."""

    method: Method
    federation: Federation
    momentum: float = 0.0
    asks: list[Ask] = field(default_factory=list)
    replies: list[Replies] = field(default_factory=list)
    round: int = 0

    def __post_init__(self) -> None:
        self.common = Counted(SHAPE, SHAPE.initial(3))
        section = ClassifierSection(kind="classifier", gate_width=5, statistics="shared")
        problem = Classification(SHAPE, self.common, section, torch.device("cpu"), self.federation)
        data = self.federation.everyone
        layouts = {i: self.method.layout(0, Layout()) for i in data}
        training = Training(
            batch_size=BATCH,
            experts=SGD(optimiser="sgd", lr=LR, momentum=self.momentum, dampening=0),
            routers=SGD(optimiser="sgd", lr=GATE_LR),
            stateless=True,
        )
        self.site = Site(
            problem.build,
            layouts,
            data,
            training,
            seed=7,
            total_iterations=self.method.total_iterations,
        )
        self.engine = InProcess(self.site, self.method)
        self.blueprint = Blueprint(problem.trainable, layouts, 7, None, self.federation.anchors)
        self.clients = tuple(self.federation.clients)
        self.server = self.method.init(self.blueprint, self.clients)

    def answer(self, ask: Ask, phase: int) -> Replies:
        self.asks.append(ask)
        self.replies.append(self.engine.answer(ask, self.round, phase))
        return self.replies[-1]

    def rounds(self, count: int, there: Sequence[ClientId] = ()) -> "Run":
        clients = there or self.clients
        for _ in range(count):
            state = self.method.members(self.server, clients)
            self.server = drive(self.method.round(state, clients, torch.Generator()), self.answer)
            self.round += 1
        return self

    def adapted(self, *clients: ClientId) -> Mapping[ClientId, Tensors]:
        return drive(self.method.adapt(self.server, clients), self.answer)

    def scores(self, tensors: Mapping[ClientId, Tensors]) -> Replies:
        return self.engine.answer(Ask(self.method.score, tensors), self.round, -1)


def network(vector: Tensor, inputs: int, hidden: int, outputs: int) -> list[Tensor]:
    """A two-layer perceptron of one vector: its four parameters, which can be differentiated by."""
    sizes = [(hidden, inputs), (hidden,), (outputs, hidden), (outputs,)]
    pieces = torch.split(vector.clone(), [int(np.prod(size)) for size in sizes])
    return [
        piece.view(size).clone().requires_grad_() for piece, size in zip(pieces, sizes, strict=True)
    ]


def forward(weights: list[Tensor], x: Tensor) -> Tensor:
    return (x @ weights[0].T + weights[1]).relu() @ weights[2].T + weights[3]


def flat(weights: list[Tensor]) -> Tensor:
    return torch.cat([w.detach().flatten() for w in weights])


def descend(loss: Tensor, weights: list[Tensor], lr: float) -> None:
    for w, g in zip(weights, torch.autograd.grad(loss, weights, retain_graph=True), strict=True):
        w.data -= lr * g


def algorithm_1(
    state: State, federation: Federation, method: DDOME, there: Sequence[Sequence[ClientId]]
) -> State:
    """Algorithm 1 of the paper, client by client, from its text; the decisions are the
    specification's. `there` are the clients of each round.
    """
    common = SHAPE.build()
    common.load_state_dict(SHAPE.initial(3))
    cursor = dict.fromkeys(federation.clients, 0)
    state = dict(state)
    for turn, here in enumerate(there):
        warm = turn < (method.warmup or 0)
        gates, experts, counts = [], {m: [] for m in range(method.pool)}, []
        for i in here:
            split = federation.clients[i].train
            inputs = split.take(np.arange(split.windows))
            embedded = common.features(inputs.x).detach()
            gate = network(state["gate"], 6, 5, method.pool)
            anchor = method.anchors and i in federation.anchors
            if anchor:
                own = [federation.anchors.index(i)]
            else:
                totals = forward(gate, embedded).softmax(dim=1).sum(dim=0)
                own = sorted(totals.argsort(descending=True)[: method.top_k].tolist())
            mine = {m: network(state[f"expert/{m}"], 16, 6, 10) for m in own}
            for _ in range(method.local_steps):
                batch = split.batch(cursor[i], BATCH)
                cursor[i] += BATCH
                e, x = common.features(batch.x).detach(), batch.x.flatten(1)
                if anchor:
                    descend(
                        cross_entropy(forward(gate, e), torch.full((BATCH,), own[0])), gate, GATE_LR
                    )
                    descend(cross_entropy(forward(mine[own[0]], x), batch.y), mine[own[0]], LR)
                else:
                    p = forward(gate, e)[:, own].softmax(dim=1)
                    loss = cross_entropy(
                        sum(p[:, k, None] * forward(mine[m], x) for k, m in enumerate(own)), batch.y
                    )
                    grads = torch.autograd.grad(loss, gate + [w for m in own for w in mine[m]])
                    gate_lr = 0 if warm else GATE_LR
                    for w, g, lr in zip(
                        gate + [w for m in own for w in mine[m]],
                        grads,
                        [gate_lr] * 4 + [LR] * 4 * len(own),
                        strict=True,
                    ):
                        w.data -= lr * g
            gates += [flat(gate)] * (anchor or not warm)
            counts += [split.windows] * (anchor or not warm)
            for m in own:
                experts[m].append((split.windows, flat(mine[m])))
        total = sum(n * g for n, g in zip(counts, gates, strict=True))
        state["gate"] = total / sum(counts) if counts else state["gate"]
        for m, found in experts.items():
            if found:
                state[f"expert/{m}"] = sum(n * w for n, w in found) / sum(n for n, _ in found)
    return state


def uneven(federation: Federation) -> Federation:
    """The same clients, of whom the second has fewer examples."""
    ben = federation.clients["ben"]
    fewer = ClientData("ben", replace(ben.train, rows=ben.train.rows[:13]), ben.valid, ben.test)
    return replace(federation, clients=dict(federation.clients) | {"ben": fewer})


def newcomer(federation: Federation) -> Federation:
    """Cleo is never seen in training."""
    clients = dict(federation.clients)
    cleo = clients.pop("cleo")
    return replace(federation, clients=clients, clusters=None, unseen={"aligned": {"cleo": cleo}})


@pytest.mark.parametrize("anchors", [True, False])
@pytest.mark.parametrize("top_k", [1, 2])
def test_it_is_algorithm_1(tiny_pictures: Federation, anchors: bool, top_k: int) -> None:
    federation, method = (
        uneven(tiny_pictures),
        DDOME(rounds=3, local_steps=3, pool=4, top_k=top_k, anchors=anchors),
    )
    run = Run(method, federation)
    expected = algorithm_1(run.server, federation, method, [run.clients] * 3)
    run.rounds(3)
    for name in expected:
        torch.testing.assert_close(run.server[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("anchors", [True, False])
def test_it_is_algorithm_1_of_those_who_are_there(tiny_pictures: Federation, anchors: bool) -> None:
    """An anchor that is away leaves its expert to those whom the gate gives it to."""
    federation = replace(uneven(tiny_pictures), anchors=("ann", "cleo"))
    method = DDOME(rounds=3, local_steps=3, pool=3, top_k=2, anchors=anchors)
    there = [("ann", "ben"), ("ben", "cleo"), ("ann", "ben", "cleo")]
    run = Run(method, federation)
    expected = algorithm_1(run.server, federation, method, there)
    for here in there:
        run.rounds(1, here)
    for name in expected:
        torch.testing.assert_close(run.server[name], expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("warmup", [1, 2, 5])
def test_in_the_warmup_normal_clients_leave_the_gate_to_anchors(
    tiny_pictures: Federation, warmup: int
) -> None:
    """Also in rounds without an anchor, in which the gate stays as it is."""
    federation = replace(uneven(tiny_pictures), anchors=("ann",))
    method = DDOME(rounds=4, local_steps=3, pool=3, top_k=2, warmup=warmup)
    there = [("ann", "ben"), ("ben", "cleo"), ("ann", "ben", "cleo"), ("cleo",)]
    run = Run(method, federation)
    expected = algorithm_1(run.server, federation, method, there)
    for here in there:
        run.rounds(1, here)
    for name in expected.keys() - {"warmup"}:
        torch.testing.assert_close(run.server[name], expected[name], rtol=1e-4, atol=1e-6)
    assert int(run.server["warmup"]) == max(warmup - 4, 0)


def test_a_warmup_without_anchors_is_refused(tiny_pictures: Federation) -> None:
    alone = replace(tiny_pictures, anchors=())
    for method, federation in (
        (DDOME(rounds=1, pool=3, warmup=1), alone),
        (DDOME(rounds=1, pool=3, warmup=1, anchors=False), tiny_pictures),
    ):
        run = Run(method, federation)
        with pytest.raises(RecipeError, match=r"method.warmup: needs anchors"):
            method.check(run.blueprint, run.clients, run.site.training)


def test_a_limit_of_load_spreads_normal_clients_over_the_experts(
    tiny_pictures: Federation,
) -> None:
    def held(load: float | None) -> list[int]:
        run = Run(DDOME(rounds=1, local_steps=1, pool=3, top_k=1, anchors=False, load=load), alike)
        before = dict(run.server)
        run.rounds(1)
        return [m for m in range(3) if not run.server[f"expert/{m}"].equal(before[f"expert/{m}"])]

    ann = tiny_pictures.clients["ann"]  # three clients who want the same expert
    clients = {i: replace(ann, id=i) for i in ("ann", "ben", "cleo")}
    alike = replace(tiny_pictures, clients=clients, anchors=(), clusters=None)
    assert len(held(None)) == 1
    assert held(1) == [0, 1, 2]
    assert len(held(2)) == 2


def test_with_one_expert_for_all_it_is_fedavg(tiny_pictures: Federation) -> None:
    """M = K = 1, no anchors: the mixture is the expert, whatever the gate says."""
    federation = uneven(tiny_pictures)
    ddome = Run(
        DDOME(rounds=3, local_steps=3, pool=1, top_k=1, anchors=False), federation, momentum=0.9
    )
    fedavg = Run(
        FedAvg(rounds=3, local_steps=3, aggregation=Mean(weighting="samples")),
        federation,
        momentum=0.9,
    )
    names = list(fedavg.server)
    ddome.server["expert/0"] = torch.cat([fedavg.server[name].flatten() for name in names])
    ddome.rounds(3), fedavg.rounds(3)
    torch.testing.assert_close(
        ddome.server["expert/0"],
        torch.cat([fedavg.server[n].flatten() for n in names]),
        rtol=1e-4,
        atol=1e-6,
    )


def test_a_client_gets_k_experts_and_an_anchor_its_own(tiny_pictures: Federation) -> None:
    run = Run(DDOME(rounds=2, local_steps=1, pool=5, top_k=2), tiny_pictures).rounds(2)
    for scoring, training in zip(run.asks[::2], run.asks[1::2], strict=True):
        assert set(scoring.to) == {"ben", "cleo"}
        assert all(set(message) == {"gate"} for message in scoring.to.values())
        assert set(training.to["ann"]) == {"gate", "expert/0", "anchor"}
        for i in ("ben", "cleo"):
            assert len(training.to[i]) == 3
            assert sum(name.startswith("expert/") for name in training.to[i]) == 2
    for scored, trained in zip(run.replies[::2], run.replies[1::2], strict=True):
        assert all(
            set(reply) == {"scores"} and reply["scores"].shape == (5,) for reply in scored.values()
        )
        for i, reply in trained.items():
            sent = (
                {name for name in run.asks[1].to[i] if name != "anchor"}
                if i == "ann"
                else reply.keys() - {"samples"}
            )
            assert reply.keys() == sent | {"samples"}


def test_an_expert_that_nobody_has_stays_bit_by_bit(tiny_pictures: Federation) -> None:
    run = Run(DDOME(rounds=1, local_steps=2, pool=6, top_k=1), tiny_pictures)
    before = dict(run.server)
    run.rounds(1)
    touched = {name for message in run.asks[1].to.values() for name in message}
    for name, tensor in before.items():
        assert torch.equal(tensor, run.server[name]) == (name not in touched), name


def test_the_embeddings_are_computed_once(tiny_pictures: Federation) -> None:
    run = Run(DDOME(rounds=4, local_steps=2, pool=3), newcomer(tiny_pictures))
    run.site.model("ann")
    run.common.seen = 0  # it looked at something to know its own width
    run.rounds(4)
    train = sum(data.train.windows for data in run.federation.clients.values())
    assert run.common.seen == train
    for _ in range(2):
        run.scores(run.adapted("cleo"))
    cleo = run.federation.everyone["cleo"]
    assert run.common.seen == train + cleo.valid.windows + cleo.test.windows


def test_permuting_the_experts_permutes_everything(tiny_pictures: Federation) -> None:
    order = [2, 0, 3, 1]  # expert m of the second run is expert order[m] of the first
    runs = [
        Run(DDOME(rounds=3, local_steps=2, pool=4, anchors=False), tiny_pictures) for _ in range(2)
    ]

    def permuted(server: State) -> State:
        gate = server["gate"].clone()
        weights, biases = gate[-24:-4].view(4, 5), gate[-4:]  # the gate's last layer: 4 x 5, and 4
        gate[-24:-4], gate[-4:] = weights[order].flatten(), biases[order]
        return {f"expert/{m}": server[f"expert/{order[m]}"] for m in range(4)} | {"gate": gate}

    runs[1].server = permuted(runs[0].server)
    for run in runs:
        run.rounds(3)
    expected = permuted(runs[0].server)
    for name in expected:
        torch.testing.assert_close(runs[1].server[name], expected[name], rtol=1e-4, atol=1e-6)
    a, b = (run.scores(run.adapted("ann", "ben")) for run in runs)
    for i in ("ann", "ben"):
        torch.testing.assert_close(a[i]["test"], b[i]["test"])
        assert torch.equal(a[i]["choices"][:, :, order], b[i]["choices"])


def test_a_new_client_sends_scores_alone_and_needs_no_labels(tiny_pictures: Federation) -> None:
    federation = newcomer(tiny_pictures)
    run = Run(DDOME(rounds=2, local_steps=2, pool=4), federation).rounds(2)
    run.asks.clear(), run.replies.clear()
    found = run.adapted("cleo")["cleo"]
    assert [set(ask.to["cleo"]) for ask in run.asks] == [{"gate"}]
    assert [{name: t.shape for name, t in reply["cleo"].items()} for reply in run.replies] == [
        {"scores": (4,)}
    ]
    assert found.keys() == {"gate", *(name for name in found if name.startswith("expert/"))}
    assert len(found) == 3
    cleo = federation.unseen["aligned"]["cleo"]
    blind = replace(cleo.test, labels=np.zeros_like(cleo.test.labels))
    unlabelled = replace(
        federation, unseen={"aligned": {"cleo": ClientData("cleo", cleo.train, cleo.valid, blind)}}
    )
    again = Run(run.method, unlabelled).rounds(2).adapted("cleo")["cleo"]
    assert again.keys() == found.keys()
    assert all(torch.equal(again[name], found[name]) for name in found)


def test_a_sample_is_classified_by_the_best_of_the_experts_that_came(
    tiny_pictures: Federation,
) -> None:
    run = Run(DDOME(rounds=2, local_steps=3, pool=4), newcomer(tiny_pictures)).rounds(2)
    tensors = run.adapted("cleo")
    score = run.scores(tensors)["cleo"]
    test = run.federation.everyone["cleo"].test
    batch = test.take(np.arange(test.windows))
    numbers = sorted(
        int(name.removeprefix("expert/")) for name in tensors["cleo"] if name != "gate"
    )
    common = SHAPE.build()
    common.load_state_dict(SHAPE.initial(3))
    logits = forward(network(tensors["cleo"]["gate"], 6, 5, 4), common.features(batch.x).detach())
    right, given = 0, torch.zeros(10, 4)
    for x, y, scores in zip(batch.x.flatten(1), batch.y, logits, strict=True):
        best = max(numbers, key=lambda m: scores[m].item())
        given[y, best] += 1
        right += int(forward(network(run.server[f"expert/{best}"], 16, 6, 10), x).argmax() == y)
    assert score["test"][2] == right
    assert torch.equal(score["choices"][0].float(), given)


def test_all_are_anchors(tiny_pictures: Federation) -> None:
    """Nobody chooses, and the gate learns whose data are whose."""
    split, clients = tiny_pictures.clients["ann"].train, {}
    for q, i in enumerate(tiny_pictures.clients):  # zeros, ones and sixes
        own = replace(split, rows=np.flatnonzero(split.labels == [0, 1, 6][q])[:20])
        clients[i] = ClientData(i, own, own.reordered("valid"), own.reordered("test"))
    run = Run(
        DDOME(rounds=60, local_steps=4, pool=3), Federation(clients, "", anchors=tuple(clients))
    )
    run.rounds(60)
    assert all(not ask.to for ask in run.asks[::2])
    for m, q in enumerate(clients):
        ask = Ask(run.method.score_experts, {q: {"gate": run.server["gate"]}})  # type: ignore[attr-defined]
        scores = run.engine.answer(ask, run.round, 0)[q]["scores"]
        assert int(scores.argmax()) == m
        assert scores.sum() == pytest.approx(20)


def test_a_client_with_one_example(tiny_pictures: Federation) -> None:
    ben = tiny_pictures.clients["ben"]
    single = ClientData("ben", *(replace(split, rows=split.rows[:1]) for split in ben.splits))
    run = Run(
        DDOME(rounds=2, local_steps=2, pool=3),
        replace(tiny_pictures, clients=dict(tiny_pictures.clients) | {"ben": single}),
    )
    run.rounds(2)
    assert run.replies[1]["ben"]["samples"] == 1
    assert all(torch.isfinite(t).all() for t in run.server.values())


def test_more_anchors_than_experts_are_refused(tiny_pictures: Federation) -> None:
    federation = replace(tiny_pictures, anchors=("ann", "ben", "cleo"))
    run = Run(DDOME(rounds=1, pool=3), federation)
    with pytest.raises(RecipeError, match="2 experts for 3 anchors"):
        DDOME(rounds=1, pool=2).check(run.blueprint, run.clients, run.site.training)


@pytest.mark.parametrize("mixture", ["logits", "probabilities", "scores"])
def test_a_gate_that_is_sure_leaves_gradients_finite(
    tiny_pictures: Federation, mixture: str
) -> None:
    run = Run(DDOME(rounds=1, local_steps=1, pool=2, anchors=False, mixture=mixture), tiny_pictures)  # type: ignore[arg-type]
    run.server["gate"][-2:] = torch.tensor([0.0, -300.0])  # its last biases
    run.rounds(1)
    assert all(torch.isfinite(tensor).all() for tensor in run.server.values())


def test_epochs_of_unlike_clients_end_their_schedules_together(tiny_pictures: Federation) -> None:
    run = Run(FedAvg(rounds=4, local_epochs=1), uneven(tiny_pictures))
    sites = {i: run.site.client(i, {}) for i in ("ann", "ben")}
    assert {i: run.method.steps(client) for i, client in sites.items()} == {"ann": 5, "ben": 4}
    run.rounds(4)
    assert {i: int(run.engine.states()[i]["iteration"]) for i in sites} == {"ann": 20, "ben": 16}


def test_running_statistics_travel_with_their_expert(tiny_pictures: Federation) -> None:
    """An expert that was trained on data with another mean brings its statistics to who never
    trained.
    """
    shape = NetworkShape("cnn", (1, 4, 4), 10, norm="batch", width=2)
    section = ClassifierSection(kind="classifier", network="cnn", width=2, gate_width=5)
    federation = newcomer(tiny_pictures)
    problem = Classification(
        shape, CommonExpert(SHAPE, SHAPE.initial(3)), section, torch.device("cpu"), federation
    )
    method = DDOME(rounds=1, local_steps=3, pool=1, top_k=1)
    layouts = {i: method.layout(0, Layout()) for i in federation.everyone}
    site = Site(problem.build, layouts, federation.everyone, Training(batch_size=BATCH), 7, 3)
    engine, blueprint = (
        InProcess(site, method),
        Blueprint(problem.trainable, layouts, 7, None, federation.anchors),
    )
    server = method.init(blueprint, ("ann", "ben"))
    parameters = sum(p.numel() for p in shape.build().parameters())
    statistics = server["expert/0"][parameters:]
    assert len(statistics) == 2 * (2 + 4)
    assert set(statistics.tolist()) == {0.0, 1.0}
    server = drive(
        method.round(server, ("ann", "ben"), torch.Generator()),
        lambda ask, phase: engine.answer(ask, 0, phase),
    )
    found = drive(method.adapt(server, ("cleo",)), lambda ask, phase: engine.answer(ask, 0, phase))[
        "cleo"
    ]
    client = site.client("cleo", {})
    client.load(found)
    assert torch.equal(
        torch.cat([b.flatten() for b in client.model.buffers.values()]),
        server["expert/0"][parameters:],
    )
    assert not torch.equal(server["expert/0"][parameters:], statistics)


def test_fedmix_trains_all_experts_jointly(tiny_pictures: Federation) -> None:
    """It is DDOME with M = K and no anchors, asked without scores first."""
    fedmix = Run(FedMix(rounds=2, local_steps=3, experts=2), tiny_pictures)
    ddome = Run(DDOME(rounds=2, local_steps=3, pool=2, top_k=2, anchors=False), tiny_pictures)
    fedmix.rounds(2), ddome.rounds(2)
    assert len(fedmix.asks) == 2
    assert all(torch.equal(t, ddome.server[name]) for name, t in fedmix.server.items())


def test_an_ensemble_is_fedavg_several_times_and_averages_probabilities(
    tiny_pictures: Federation,
) -> None:
    run = Run(
        Ensemble(rounds=2, local_steps=3, models=2, initial="random"), tiny_pictures, momentum=0.9
    )
    first = run.server["expert/0"]
    run.rounds(2)
    assert not torch.equal(first, run.server["expert/0"])
    assert not torch.equal(run.server["expert/0"], run.server["expert/1"])
    expected = {}
    for name in ("expert/0", "expert/1"):
        x = Run(run.method, tiny_pictures).server[name]
        cursor = 0
        for _ in range(2):
            means = []
            for data in tiny_pictures.clients.values():
                weights, speed = network(x, 16, 6, 10), [torch.zeros(())] * 4
                split = data.train.reordered(f"train-{name}")
                for step in range(3):
                    batch = split.batch(cursor + BATCH * step, BATCH)
                    loss = cross_entropy(forward(weights, batch.x.flatten(1)), batch.y)
                    speed = [
                        0.9 * v + g
                        for v, g in zip(speed, torch.autograd.grad(loss, weights), strict=True)
                    ]
                    for w, v in zip(weights, speed, strict=True):
                        w.data -= LR * v
                means.append(flat(weights))
            x, cursor = torch.stack(means).mean(dim=0), cursor + 3 * BATCH
        expected[name] = x
        torch.testing.assert_close(run.server[name], x, rtol=1e-4, atol=1e-6)
    test = tiny_pictures.clients["ann"].test
    batch = test.take(np.arange(test.windows))
    probabilities = torch.stack(
        [
            forward(network(x, 16, 6, 10), batch.x.flatten(1)).softmax(dim=1)
            for x in expected.values()
        ]
    ).mean(dim=0)
    score = run.scores(run.adapted("ann"))["ann"]["test"]
    assert score[2] == (probabilities.argmax(dim=1) == batch.y).sum()
    nll = nn.functional.nll_loss(probabilities.log(), batch.y, reduction="sum")
    torch.testing.assert_close(score[0].float(), nll.detach(), rtol=1e-4, atol=1e-4)
