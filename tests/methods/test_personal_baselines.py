"""Methods of personal models that others compare with, each against its algorithm as a naive loop
on digits, with the network written out.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from digit_runs import HIDDEN, LR, Batches, Run, grad, loss
from torch import Tensor
from torch.nn.functional import mse_loss

from coterie.client.client import Client
from coterie.core.errors import ModelError, RecipeError
from coterie.core.protocol import ClientId
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.data.examples import Examples
from coterie.data.federation import Federation
from coterie.data.images import Digits
from coterie.methods import Method
from coterie.methods.apfl import ALPHA, APFL
from coterie.methods.fedala import FedALA
from coterie.methods.fedavg import FedAvg
from coterie.methods.fedbabu import FedBABU
from coterie.methods.fedbn import FedBN
from coterie.methods.feddpa import FedDPA
from coterie.methods.fedfomo import FedFomo
from coterie.methods.fedper import FedPer
from coterie.methods.fedproto import FedProto
from coterie.methods.fedrep import FedRep
from coterie.methods.lgfedavg import LGFedAvg
from coterie.methods.local import Local
from coterie.methods.perfedavg import PerFedAvg
from coterie.methods.pfedme import PFedMe
from coterie.methods.templates import first_phase
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape

BODY = HIDDEN * 64 + HIDDEN  # values before those of the last layer
BATCH_NORM = NetworkShape("cnn", (1, 8, 8), 10, width=2, norm="batch")


@pytest.fixture(scope="module")
def federation() -> Federation:
    """Three clients, of whom two have the same labels."""
    return Digits(
        partition="permuted-clusters", cluster_sizes=(2, 1), per_client=12, test_examples=12
    ).load()


def mean(values: Mapping[ClientId, Tensor]) -> Tensor:
    return torch.stack(list(values.values())).mean(dim=0)


def start(run: Run, i: ClientId) -> Tensor:
    """A client's initial network, (d,)."""
    return flat(run.site.client(i, {}))


def model(run: Run, i: ClientId) -> Tensor:
    """A client's network now, (d,)."""
    return flat(run.client(i))


def flat(client: Client) -> Tensor:
    assert isinstance(client.model, Classifier)
    return torch.cat([p.detach().flatten() for p in client.model.network.parameters()])


def close(run: Run, expected: Mapping[ClientId, Tensor]) -> None:
    for i, values in expected.items():
        torch.testing.assert_close(model(run, i), values, rtol=1e-4, atol=1e-6)


Steps = Callable[[Tensor, Batches], Tensor]


def partly_shared(run: Run, shared: slice, local: Steps, rounds: int) -> dict[ClientId, Tensor]:
    """What rounds of local training make of networks of which one part is averaged."""
    x = {i: start(run, i) for i in run.ids}
    batches = {i: Batches(run.federation.clients[i]) for i in run.ids}
    together = x[run.ids[0]][shared].clone()
    for _ in range(rounds):
        for i in run.ids:
            x[i][shared] = together
            x[i] = local(x[i], batches[i])
        together = mean({i: values[shared] for i, values in x.items()})
    return x


def both(x: Tensor, batches: Batches) -> Tensor:
    for _ in range(3):
        x = x - LR * grad(x, batches.next())
    return x


def head_then_body(x: Tensor, batches: Batches) -> Tensor:
    for step in range(3):
        g, trained = grad(x, batches.next()), slice(BODY, None) if step < 2 else slice(BODY)
        x = x.clone()
        x[trained] -= LR * g[trained]
    return x


@pytest.mark.parametrize(
    ("method", "shared", "local"),
    [
        (FedPer(rounds=3, local_steps=3), slice(BODY), both),
        (FedRep(rounds=3, local_steps=3, head_share=0.6), slice(BODY), head_then_body),
        (LGFedAvg(rounds=3, local_steps=3), slice(BODY, None), both),
    ],
)
def test_methods_that_share_a_part(
    method: Method, shared: slice, local: Steps, federation: Federation
) -> None:
    run = Run(method, federation).rounds(3)
    expected = partly_shared(run, shared, local, 3)
    close(run, expected)
    apart = slice(BODY, None) if shared.stop else slice(BODY)
    assert len({tuple(x[apart].tolist()) for x in expected.values()}) == 3
    for _, sent, replies in run.messages:
        sizes = {t.numel() for m in (*sent.values(), *replies.values()) for t in m.values()}
        assert sizes == ({HIDDEN * 64, HIDDEN} if shared.stop else {HIDDEN * 10, 10})


def test_fedbabu_trains_bodies_under_one_fixed_head_then_both_alone(federation: Federation) -> None:
    run = Run(FedBABU(rounds=3, local_steps=2, start=0.6), federation).rounds(3)
    sent = next(iter(run.messages[0][1].values()))  # as the server starts
    x_0 = torch.cat([t.flatten() for t in run.method.loadable(None, sent).values()])
    x = dict.fromkeys(run.ids, x_0)
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    for t in range(3):
        for i in run.ids:
            for _ in range(2):
                g = grad(x[i], batches[i].next())
                if t < 2:
                    g[BODY:] = 0
                x[i] = x[i] - LR * g
        if t < 2:
            x = dict.fromkeys(run.ids, mean(x))
    close(run, x)
    assert all("head" not in name for reply in run.messages[0][2].values() for name in reply)


def test_fedbn_averages_all_but_the_normalisation(federation: Federation) -> None:
    run = Run(FedBN(rounds=2, local_steps=2), federation, shape=BATCH_NORM).rounds(2)
    networks = {i: run.client(i).read(GENERALIST, SPECIALIST) for i in run.ids}
    _, sent, replies = run.messages[-1]
    names = set(next(iter(replies.values())))
    norms = {name for name in networks[run.ids[0]] if name not in names}
    assert len(norms) == 4  # weight and bias after each of two convolutions
    for name in names:
        expected = mean({i: reply[name] for i, reply in replies.items()})
        torch.testing.assert_close(run.state[name], expected)
    for name in norms:
        assert not torch.equal(networks[run.ids[0]][name], networks[run.ids[1]][name])
    running = {i: run.client(i).state["buffers"] for i in run.ids}
    assert not torch.equal(running[run.ids[0]], running[run.ids[1]])
    assert all(name not in state for state in sent.values() for name in norms)


def test_fedbn_needs_a_normalisation() -> None:
    with pytest.raises(ModelError, match="no normalisation"):
        Classifier(NetworkShape("cnn", (1, 8, 8), 10, width=2, norm="none"), local_part="norms")


@pytest.mark.parametrize("adaptive", [True, False])
def test_apfl_is_its_algorithm_1(adaptive: bool, federation: Federation) -> None:
    run = Run(APFL(rounds=3, local_steps=3, alpha=0.3, adaptive=adaptive), federation).rounds(3)
    w = start(run, run.ids[0])
    v, alpha = dict.fromkeys(run.ids, w), dict.fromkeys(run.ids, 0.3)
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    expected = {}
    for _ in range(3):
        own = dict.fromkeys(run.ids, w)
        for i in run.ids:
            for _ in range(3):
                batch = batches[i].next()
                mixed = alpha[i] * v[i] + (1 - alpha[i]) * own[i]
                g, share = grad(mixed, batch), alpha[i]
                if adaptive:  # eq. 10
                    alpha[i] = min(1, max(0, alpha[i] - LR * float((v[i] - own[i]) @ g)))
                at_w = grad(own[i], batch)
                v[i] = v[i] - LR * share * g
                own[i] = own[i] - LR * at_w
            expected[i] = alpha[i] * v[i] + (1 - alpha[i]) * own[i]
        w = mean(own)
    close(run, expected)
    torch.testing.assert_close(run.state[GENERALIST], w, rtol=1e-4, atol=1e-6)
    for i in run.ids:
        assert float(run.client(i).state[ALPHA]) == pytest.approx(alpha[i], rel=1e-4)
        assert (alpha[i] != 0.3) == adaptive


@pytest.mark.parametrize(("alpha", "as_"), [(1.0, Local), (0.0, FedAvg)])
def test_apfl_lies_between_local_and_fedavg(alpha: float, as_: Any, federation: Federation) -> None:
    run = Run(APFL(rounds=2, local_steps=2, alpha=alpha, adaptive=False), federation).rounds(2)
    other = Run(as_(rounds=2, local_steps=2), federation).rounds(2)
    close(run, {i: model(other, i) for i in run.ids})


@pytest.mark.parametrize("beta", [1.0, 2.0])
def test_pfedme_is_its_algorithm_1(beta: float, federation: Federation) -> None:
    method = PFedMe(rounds=3, local_steps=4, inner_steps=2, prox=1.5, local_lr=0.1, server_lr=beta)
    run = Run(method, federation).rounds(3)
    w, expected = start(run, run.ids[0]), {}
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    for _ in range(3):
        own = dict.fromkeys(run.ids, w)
        for i in run.ids:
            theta = w
            for _ in range(2):
                batch = batches[i].next()
                for _ in range(2):
                    theta = theta - LR * (grad(theta, batch) + 1.5 * (theta - own[i]))
                own[i] = own[i] - 0.1 * 1.5 * (own[i] - theta)
            batches[i].next()  # drawn for a step that does not follow
            expected[i] = theta
        w = (1 - beta) * w + beta * mean(own)
    close(run, expected)
    torch.testing.assert_close(run.state[GENERALIST], w, rtol=1e-4, atol=1e-6)


def test_pfedme_learns_in_rounds_shorter_than_its_inner_steps(federation: Federation) -> None:
    """Each round has a step of w_i, which would never move otherwise."""
    short, long = (
        Run(PFedMe(rounds=3, local_steps=2, inner_steps=k, prox=1.5), federation) for k in (2, 5)
    )
    before = start(long, long.ids[0])
    short.rounds(3)
    close(long.rounds(3), {i: model(short, i) for i in short.ids})
    assert not torch.equal(long.state[GENERALIST], before)


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_per_fedavg_is_its_algorithm_1(variant: Any, federation: Federation) -> None:
    method = PerFedAvg(rounds=2, local_steps=2, inner_lr=0.05, variant=variant, adapt_steps=2)
    run = Run(method, federation).rounds(2)
    w = start(run, run.ids[0])
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    for _ in range(2):
        own = dict.fromkeys(run.ids, w)
        for i in run.ids:
            for _ in range(2):
                u = own[i] - 0.05 * grad(own[i], batches[i].next())
                g = grad(u, batches[i].next())
                if variant == "hessian-free":
                    g = g - 0.05 * hessian_product(own[i], batches[i].next(), g)
                own[i] = own[i] - LR * g
        w = mean(own)
    flat = torch.cat([run.state[name].flatten() for name in run.state])
    torch.testing.assert_close(flat, w, rtol=1e-3, atol=1e-5)
    adapted = w
    first = Batches(federation.clients[run.ids[0]])
    for _ in range(2):
        adapted = adapted - 0.05 * grad(adapted, first.next())
    client = run.client(run.ids[0])
    own_model = method.loadable(client, method.personal(run.state, run.ids)[run.ids[0]])
    values = torch.cat([t.flatten() for t in own_model.values()])
    torch.testing.assert_close(values, adapted, rtol=1e-3, atol=1e-5)


def hessian_product(x: Tensor, batch: Examples, v: Tensor) -> Tensor:
    """The Hessian of the loss at x times v, exact."""
    product: Tensor = torch.autograd.functional.hvp(lambda at: loss(at, batch), x, v)[1]
    return product


def test_fedala_mixes_value_by_value(federation: Federation) -> None:
    method = FedALA(rounds=3, local_steps=2, layers=1, share=0.5, weights_lr=3.0)
    run = Run(method, federation).rounds(3)
    theta = start(run, run.ids[0])
    x, weights = dict.fromkeys(run.ids, theta), dict.fromkeys(run.ids, torch.ones(HIDDEN * 10 + 10))
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    others = {i: Batches(federation.clients[i], "ala") for i in run.ids}
    epochs = []
    for t in range(3):
        for i in run.ids:
            own = x[i][BODY:]
            mixed = theta.clone()
            losses: list[float] = []
            while t and (not losses or (t == 1 and not converged(losses))):
                for _ in range(2):  # half of 12 examples, in batches of 4
                    mixed[BODY:] = own + (theta[BODY:] - own) * weights[i]
                    batch = others[i].next()
                    g = grad(mixed, batch)[BODY:]
                    moved = weights[i] - 3.0 * g * (theta[BODY:] - own)
                    losses.append(float(loss(mixed, batch))) if _ else None
                    weights[i] = moved.clamp(0, 1)
            epochs.append(len(losses))
            mixed[BODY:] = own + (theta[BODY:] - own) * weights[i] if t else theta[BODY:]
            for _ in range(2):
                mixed = mixed - LR * grad(mixed, batches[i].next())
            x[i] = mixed
        theta = mean(x)
    close(run, x)
    assert any(bool((w < 1).any()) for w in weights.values())
    assert max(epochs) > 10
    assert epochs[-1] == 1


def converged(losses: list[float]) -> bool:
    last = torch.tensor(losses[-10:], dtype=torch.float64)
    return len(losses) > 10 and float(last.std(correction=0)) < 0.1


def test_fedfomo_takes_what_lowers_the_own_validation_loss(federation: Federation) -> None:
    run = Run(FedFomo(rounds=3, local_steps=3, received=3, explore=0.0), federation)
    x = {i: start(run, i) for i in run.ids}
    before: dict[ClientId, Tensor] = {}
    sums = {i: [float(i == j) for j in run.ids] for i in run.ids}
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    for t in range(3):
        run.rounds(1)
        new = {}
        for i in run.ids:
            valid = federation.clients[i].valid
            everything = valid.batch(0, valid.windows)
            theta = x[i]
            if t:
                raw = {
                    j: float(loss(before[i], everything) - loss(x[j], everything))
                    / float((x[j] - before[i]).norm())
                    for j in run.ids
                }
                # what a model was worth adds up as it is, also where it was worth less than nothing
                sums[i] = [s + raw[j] for s, j in zip(sums[i], run.ids, strict=True)]
                assert run.state[f"{i}/gains"].tolist() == pytest.approx(
                    sums[i], rel=1e-3, abs=1e-4
                )
                gains = {j: max(0.0, gain) for j, gain in raw.items()}
                total = sum(gains.values()) or 1.0
                theta = before[i] + sum(gains[j] / total * (x[j] - before[i]) for j in run.ids)
                weights = run.method.collaboration(run.state, run.ids)
                assert weights is not None
                row = torch.tensor([gains[j] / total for j in run.ids], dtype=torch.float64)
                if not row.any():
                    row[run.ids.index(i)] = 1
                torch.testing.assert_close(weights[run.ids.index(i)], row, rtol=1e-3, atol=1e-4)
            before[i] = theta
            for _ in range(3):
                theta = theta - LR * grad(theta, batches[i].next())
            new[i] = theta
        x = new
    close(run, x)


@pytest.mark.parametrize("method", [FedRep(local_steps=1), FedDPA(local_steps=1)])
def test_a_round_of_one_iteration_has_no_place_for_two_phases(method: Method) -> None:
    with pytest.raises(RecipeError, match="two phases need 2 iterations a round or more"):
        method.check(SimpleNamespace(fewest=None), ["a", "b"], None)
    replace(method, local_steps=2).check(SimpleNamespace(fewest=None), ["a", "b"], None)


def test_each_of_two_phases_has_an_iteration() -> None:
    shares = [(first_phase(share, 10)) for share in (0, 0.01, 0.5, 0.99, 1)]
    assert shares == [0, 1, 5, 9, 10]
    assert first_phase(0.5, 2) == 1


def test_fedfomo_sends_the_own_model_and_those_that_helped() -> None:
    method, order = FedFomo(received=3, explore=0.0), ["a", "b", "c", "d"]
    chosen = method.choose("b", order, torch.tensor([0.1, 0.0, 0.3, 0.2]), torch.Generator())
    assert chosen == ["b", "c", "d"]
    drawn = {
        tuple(FedFomo(received=2, explore=1.0).choose("b", order, torch.zeros(4), generator))
        for generator in [torch.Generator().manual_seed(0)]
        for _ in range(40)
    }
    assert drawn == {("a", "b"), ("b", "c"), ("b", "d")}


def features(x: Tensor, batch: Examples) -> Tensor:
    parts = torch.split(x[:BODY], [HIDDEN * 64, HIDDEN])
    return torch.relu(batch.x.flatten(1) @ parts[0].view(HIDDEN, 64).T + parts[1])


def test_fedproto_pulls_features_to_the_mean_of_their_class(federation: Federation) -> None:
    run = Run(FedProto(rounds=3, local_steps=2, strength=0.7), federation)
    x = {
        i: torch.cat([t.flatten() for n, t in run.site.client(i, {}).read(SPECIALIST).items()])
        for i in run.ids
    }
    run.rounds(3)
    batches = {i: Batches(federation.clients[i]) for i in run.ids}
    prototypes: dict[int, Tensor] = {}
    for _ in range(3):
        sums = {k: torch.zeros(HIDDEN) for k in range(10)}
        counts = dict.fromkeys(range(10), 0)
        for i in run.ids:
            for _ in range(2):
                batch = batches[i].next()
                at = x[i].detach().requires_grad_()
                h = features(at, batch)
                total = loss(at, batch)
                for row, label in zip(h, batch.y.tolist(), strict=True):
                    if label in prototypes:
                        total = total + 0.7 * mse_loss(row, prototypes[label]) / len(batch)
                x[i] = (at - LR * torch.autograd.grad(total, at)[0]).detach()
            train = federation.clients[i].train
            everything = train.batch(0, train.windows)
            for row, label in zip(features(x[i], everything), everything.y.tolist(), strict=True):
                sums[label] += row
                counts[label] += 1
        prototypes = {k: sums[k] / counts[k] for k in counts if counts[k]}
    for i in run.ids:
        values = run.client(i).flat(SPECIALIST)
        torch.testing.assert_close(values, x[i], rtol=1e-4, atol=1e-6)
    for name in ("prototypes.sums", "prototypes.counts"):
        assert run.state[name].shape[0] == 10
    assert len(run.state) == 2  # no network leaves


def test_the_head_of_a_language_model_is_its_last_blocks(tiny_base: Path) -> None:
    architecture = Backbone.load(tiny_base).architecture
    layout = FedPer(head_blocks=1).layout(0, Layout(rank=2))
    local = Adapter(architecture, layout).parameters_by_role[SPECIALIST]
    shared = Adapter(architecture, layout).parameters_by_role[GENERALIST]
    last = f"blocks.{len(architecture.blocks) - 1}."
    assert local
    assert all(name.startswith(last) for name in local)
    assert shared
    assert not any(name.startswith(last) for name in shared)
    other = LGFedAvg(head_blocks=1).layout(0, Layout(rank=2))
    assert Adapter(architecture, other).parameters_by_role[GENERALIST].keys() == local.keys()
