"""CoMiGS-elastic against its formulas written out naively, and against its special cases: FedAvg,
Local and CoMiGS.
"""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from oracle import mixture as oracle
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from coterie.client.blueprint import Blueprint, initial_seed
from coterie.client.client import Client
from coterie.client.settings import AdamW, Training
from coterie.client.site import Site
from coterie.core.protocol import drive
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.data.federation import Federation
from coterie.engines import InProcess
from coterie.methods import Method
from coterie.methods.comigs_elastic import CoMiGSElastic
from coterie.methods.fedavg import FedAvg
from coterie.methods.local import Local
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

ADAMW = AdamW(lr=5e-3, schedule="cosine")
TRAINING = Training(batch_size=4, experts=ADAMW)
SHORT = {"rounds": 3, "local_steps": 2}
RANK, SEED = 2, 5
ROWS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


class World:
    """A method on three clients of tiny texts, in one process."""

    def __init__(self, method: Method, backbone: Backbone, federation: Federation) -> None:
        self.method, self.names = method, tuple(federation.clients)
        layouts = {i: method.layout(k, Layout(rank=RANK)) for k, i in enumerate(self.names)}
        self.site = Site(
            partial(LanguageModel, backbone),
            layouts,
            federation.clients,
            TRAINING,
            seed=SEED,
            total_iterations=method.total_iterations,
        )
        self.engine = InProcess(self.site, method)
        blueprint = Blueprint(partial(Adapter, backbone.architecture), layouts, SEED)
        self.server, self.done = method.init(blueprint, self.names), 0

    def rounds(self, count: int) -> "World":
        for _ in range(count):
            step = self.method.round(self.server, self.names, torch.Generator())
            self.server = drive(step, lambda ask, phase: self.engine.answer(ask, self.done, phase))
            self.done += 1
        return self

    def finish(self) -> "World":
        end = self.method.finish(self.server, self.names)
        self.server = drive(end, lambda ask, phase: self.engine.answer(ask, self.done, phase))
        return self

    def client(self, i: str) -> Client:
        return self.site.client(i, dict(self.engine.states().get(i, {})))


def naive_loss(base: Path, values: dict[str, Tensor], batch: Tensor, weights: Tensor) -> Tensor:
    """The mean cross-entropy of the base with merged attention weights W + gamma B A, and MLPs
    sum_j w_j MLP_j, each of whole merged weights: by plain autograd, generalists first.
    """
    whole = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    scale, merged = 16.0 / RANK**0.5, {}
    for i, layer in enumerate(whole.model.layers):
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            own = f"blocks.{i}.attention.{name}"
            merged[f"model.layers.{i}.self_attn.{name}.weight"] = (
                getattr(layer.self_attn, name).weight
                + scale * values[f"{own}.B"][0] @ values[f"{own}.A"][0]
            )
        layers = {name: (getattr(layer.mlp, theirs).weight, None) for name, theirs in ROWS.items()}
        experts = [
            {n: tuple(values[f"blocks.{i}.mlp.{role}.{n}.{m}"][j] for m in "AB") for n in ROWS}
            for role in ("generalist", "specialist")
            for j in range(2)
        ]

        def forward(x: Tensor, layers: dict = layers, experts: list = experts) -> Tensor:
            tokens = x.flatten(0, 1)
            each = weights.expand(len(tokens), 4)
            return oracle.mixture(tokens, layers, experts, each, scale, nn.functional.silu).view_as(
                x
            )

        layer.mlp.forward = forward
    logits = torch.func.functional_call(whole, merged, (batch[:, :-1],)).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


class Adam:
    """Loshchilov and Hutter, 2019, Algorithm 2, with a cosine from the peak to a tenth of it."""

    def __init__(self) -> None:
        self.t, self.m, self.v = 0, {}, {}  # type: ignore[var-annotated]

    def step(self, values: dict[str, Tensor], gradients: dict[str, Tensor], lr: float) -> None:
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.95 * self.v.get(name, 0) + 0.05 * g**2
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.95**self.t)
            values[name] = values[name] * (1 - lr * 0.01) - lr * m / (v.sqrt() + 1e-8)


def gradient(
    base: Path, values: dict[str, Tensor], wrt: list[str], batch: Tensor, weights: list[float]
) -> dict[str, Tensor]:
    """The gradient of the naive loss by some of the tensors."""
    leaves = {name: t.clone().requires_grad_() for name, t in values.items()}
    loss = naive_loss(base, leaves, batch, torch.tensor(weights))
    return dict(zip(wrt, torch.autograd.grad(loss, [leaves[n] for n in wrt]), strict=True))


def test_rounds_are_the_formula_written_out(
    backbone: Backbone, tiny_base: Path, tiny_federation: Federation
) -> None:
    """FedAvg's generalists descend on generalists alone and are averaged; the personal model, from
    what the client sent after a third of the run, with specialists that are copies, descends on the
    mixture, and goes to the mean as far as two windows of validation say.
    """
    pulls, a = (0.0, 0.4, 1.0), 0.3
    method = CoMiGSElastic(**SHORT, start=1 / 3, pulls=pulls, weight=a)
    world = World(method, backbone, tiny_federation)
    model = LanguageModel(backbone, world.site.layouts["ann"])
    roles = {r: list(model.parameters_by_role()[r]) for r in (GENERALIST, SPECIALIST)}
    both = roles[GENERALIST] + roles[SPECIALIST]
    alone, mixed = [0.5, 0.5, 0.0, 0.0], [(1 - a) / 2] * 2 + [a / 2] * 2
    mean = model.initial(GENERALIST, initial_seed(SEED, GENERALIST, ""))
    u = {i: model.initial(SPECIALIST, initial_seed(SEED, SPECIALIST, i)) for i in world.names}
    adam = {i: {"w": Adam(), "u": Adam()} for i in world.names}
    v: dict[str, dict[str, Tensor]] = {}
    sent: dict[str, dict[str, Tensor]] = {}
    for t in range(3):
        for i in world.names:
            data, w = world.site.data[i], dict(mean)
            if t == 1:
                v[i], adam[i]["v"] = dict(sent[i]), deepcopy(adam[i]["w"])
                u[i] = {n: v[i][n.replace("specialist", "generalist")] for n in u[i]}
            elif t == 2:
                points = [{n: (1 - b) * v[i][n] + b * w[n] for n in w} for b in pulls]
                batch, weights = data.valid.batch(2 * 2, 2), torch.tensor(mixed)
                with torch.no_grad():
                    scores = [naive_loss(tiny_base, p | u[i], batch, weights) for p in points]
                best = min(range(3), key=lambda k: float(scores[k]))
                v[i] = points[best]
            for k in range(2 * t, 2 * t + 2):
                batch, lr = data.train.batch(4 * k, 4), ADAMW.lr_at(k, 6)
                first = gradient(tiny_base, w | u[i], roles[GENERALIST], batch, alone)
                adam[i]["w"].step(w, first, lr)
                if t == 0:
                    continue
                second = gradient(tiny_base, v[i] | u[i], both, batch, mixed)
                adam[i]["v"].step(v[i], {n: second[n] for n in roles[GENERALIST]}, lr)
                adam[i]["u"].step(u[i], {n: second[n] for n in roles[SPECIALIST]}, lr)
            sent[i] = w
        mean = {n: sum(s[n] for s in sent.values()) / len(sent) for n in mean}
    world.rounds(3)
    for n, wanted in mean.items():
        torch.testing.assert_close(world.server[n], wanted, rtol=1e-3, atol=2e-4, msg=n)
    for i in world.names:
        found = world.client(i).read(GENERALIST, SPECIALIST)
        for n, wanted in (v[i] | u[i]).items():
            torch.testing.assert_close(found[n], wanted, rtol=1e-3, atol=2e-4, msg=n)


def assert_same_models(a: World, b: World) -> None:
    for i in a.names:
        batch = a.site.data[i].test.batch(0, 4)[:, :-1]
        torch.testing.assert_close(
            a.client(i).model(batch), b.client(i).model(batch), rtol=1e-3, atol=1e-4
        )


def test_without_a_personal_model_every_client_is_one_of_fedavg(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    ours = CoMiGSElastic(**SHORT, start=1)
    a = World(ours, backbone, tiny_federation).rounds(3).finish()
    b = World(FedAvg(**SHORT), backbone, tiny_federation).rounds(3)
    for n in b.server:
        torch.testing.assert_close(a.server[n], b.server[n], rtol=1e-4, atol=2e-5)
    assert_same_models(a, b)


def test_without_pull_and_specialists_the_personal_model_is_that_of_local(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    ours = CoMiGSElastic(**SHORT, start=0, pulls=(0.0,), weight=0)
    a = World(ours, backbone, tiny_federation).rounds(3)
    b = World(Local(**SHORT), backbone, tiny_federation).rounds(3)
    assert_same_models(a, b)


@pytest.mark.parametrize(("g", "s"), [(1, 1), (1, 2), (2, 2)])
def test_where_the_personal_model_begins_nothing_changes(
    g: int, s: int, backbone: Backbone, tiny_federation: Federation
) -> None:
    """It computes what the client's last FedAvg model does, whatever the others sent."""
    method = CoMiGSElastic(**SHORT, start=0.5, generalists=g, specialists=s, weight=0.3)
    world = World(method, backbone, tiny_federation).rounds(1)
    client = world.client("ann")
    batch = client.test.batch(0, 4)[:, :-1]
    with torch.no_grad():
        before = client.model(batch)
        client.round, mean = 1, torch.zeros_like(client.flat())
        method.begin(client, mean)
        torch.testing.assert_close(client.model(batch), before, rtol=1e-4, atol=1e-5)
        newcomer = World(method, backbone, tiny_federation).client("ben")
        newcomer.round = 1
        method.begin(newcomer, client.flat())
        client.load(method.mixing(client, 0.0))
        torch.testing.assert_close(newcomer.model(batch), client.model(batch), rtol=1e-4, atol=1e-5)


def test_what_is_shared_does_not_depend_on_the_personal_model(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    methods = (
        CoMiGSElastic(**SHORT, start=0),
        CoMiGSElastic(**SHORT, start=1),
        CoMiGSElastic(**SHORT, start=0.5, pulls=(1.0,), weight=0.9),
        CoMiGSElastic(**SHORT, start=0.5, specialists=1),
    )
    ends = [World(m, backbone, tiny_federation).rounds(3).server for m in methods]
    for name, wanted in ends[0].items():
        assert torch.equal(ends[1][name], wanted)
        assert torch.equal(ends[2][name], wanted)
        torch.testing.assert_close(ends[3][name], wanted, rtol=1e-4, atol=2e-5)


def losses(world: World, i: str) -> dict[str, float]:
    """The validation loss of each candidate of a client before it has chosen."""
    method, client = world.method, world.client(i)
    assert isinstance(method, CoMiGSElastic)
    alone = {GENERALIST: client.state["elastic/shared"], **method.mixing(client, 0.0)}
    pulled = {n: (t + world.server[n]) / 2 for n, t in client.read(GENERALIST).items()}
    return {
        "personal": float(method.losses(client, {}).mean()),
        "blend": float(
            method.losses(client, pulled | method.mixing(client, method.weight / 2)).mean()
        ),
        "fedavg": float(method.losses(client, alone).mean()),
    }


def end(world: World, i: str) -> float:
    client = world.client(i)
    nll, count, *_ = client.score_part(client.valid, 32).tolist()
    return float(nll / count)


@pytest.mark.parametrize("best", ["personal", "fedavg", "blend"])
def test_a_client_ends_with_the_candidate_of_least_validation_loss(
    best: str, backbone: Backbone, tiny_federation: Federation
) -> None:
    """All candidates but one are spoiled."""
    method = CoMiGSElastic(**SHORT, start=0, windows=32)
    world = World(method, backbone, tiny_federation).rounds(3)
    client = world.client("ann")
    noise = torch.randn(client.flat().shape, generator=torch.Generator().manual_seed(0))
    away = 0.0 if best == "personal" else 4.0
    own, mean = client.flat(), 4 * noise
    client.load({GENERALIST: own + away * noise})
    if best == "blend":
        mean = own - away * noise
    with client.borrowing({GENERALIST: mean}):
        world.server = client.read(GENERALIST)
    if best != "fedavg":
        client.state["elastic/shared"] += 4 * noise
    candidates = losses(world, "ann")
    assert min(candidates, key=candidates.__getitem__) == best
    world.finish()
    assert end(world, "ann") == pytest.approx(candidates[best], rel=1e-6)


@pytest.mark.parametrize(
    ("personal", "shared", "half", "winner", "factor"),
    [
        ((2.0, 2.2), (3.0, 3.2), (1.0, 1.3), "personal", 0.5),
        ((2.0, 2.2), (3.0, 3.2), (2.5, 2.5), "personal", 1.0),
        ((2.0, 2.2), (3.0, 3.2), (1.0, 2.1), "personal", 1.0),  # on one window alone
        ((2.0,), (3.0,), (1.0,), "personal", 1.0),  # how sure that is, one window does not tell
        ((3.0, 3.2), (2.0, 2.2), (1.0, 1.3), "fedavg", 0.5),
        ((3.0, 3.2), (2.0, 2.2), (2.5, 2.5), "fedavg", 1.0),
    ],
)
def test_half_of_what_was_learned_is_taken_if_it_is_surely_better(
    personal: tuple[float, ...],
    shared: tuple[float, ...],
    half: tuple[float, ...],
    winner: str,
    factor: float,
    backbone: Backbone,
    tiny_federation: Federation,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half-way from the best of the others to the base: every B is halved, and nothing else."""
    method = CoMiGSElastic(**SHORT, start=0)
    world = World(method, backbone, tiny_federation).rounds(3)
    client = world.client("ann")
    blend = tuple(9.0 for _ in personal)
    told = iter([torch.tensor(windows) for windows in (personal, shared, blend, half)])
    if winner == "fedavg":
        with client.borrowing({GENERALIST: client.state["elastic/shared"]}):
            wanted = client.read(GENERALIST)
    else:
        wanted = client.read(GENERALIST)
    wanted |= client.read(SPECIALIST)
    wanted = {n: t * (factor if n.endswith(".B") else 1) for n, t in wanted.items()}
    monkeypatch.setattr(CoMiGSElastic, "losses", lambda *_: next(told))
    method.choose(client, world.server)
    found = client.read(GENERALIST) | client.read(SPECIALIST)
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name
    assert next(told, None) is None


def test_losses_of_windows_have_the_mean_over_tokens(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = CoMiGSElastic(**SHORT, windows=5)
    client = World(method, backbone, tiny_federation).rounds(1).client("ann")
    nll, predictions, *_ = client.score_part(client.valid, 5).tolist()
    found = method.losses(client, {})
    assert found.shape == (5,)
    assert float(found.mean()) == pytest.approx(nll / predictions, rel=1e-6)


def test_the_pull_is_chosen_on_the_validation_windows_of_all_rounds_so_far(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = CoMiGSElastic(**SHORT, start=0, pulls=(0.0, 0.5, 1.0))
    client = World(method, backbone, tiny_federation).rounds(1).client("ann")
    sums = dict.fromkeys(method.pulls, 0.0)
    for client.round in (1, 2):
        batch = client.valid.batch(2 * client.round, 2)
        for b in method.pulls:
            with client.borrowing({GENERALIST: client.flat() * (1 - 2 * b)}):
                sums[b] += client.loss(batch)
        wanted = client.flat() * (1 - 2 * min(sums, key=sums.__getitem__))
        torch.testing.assert_close(method.pulled(client, -client.flat()), wanted)


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize(("g", "s"), [(1, 1), (1, 2), (2, 2)])
def test_shares_are_the_weights_of_the_experts(
    backbone: Backbone, tiny_federation: Federation, g: int, s: int, share: float
) -> None:
    method = CoMiGSElastic(**SHORT, generalists=g, specialists=s)
    client = World(method, backbone, tiny_federation).client("ann")
    client.load(method.mixing(client, share))
    assert isinstance(client.model, LanguageModel)
    weights = client.model.routing(client.test.batch(0, 2)[:, :-1])
    wanted = torch.tensor([(1 - share) / g] * g + [share / s] * s)
    torch.testing.assert_close(weights, wanted.expand_as(weights), rtol=1e-6, atol=1e-7)
