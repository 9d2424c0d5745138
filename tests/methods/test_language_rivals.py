"""Language methods that others compare with, each against its algorithm as a naive loop in which
gradients are autograd's and means are written out.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from text_runs import LR, NAMES, PLAIN, ROWS, Naive, Small
from torch.nn.functional import cosine_similarity, cross_entropy

from coterie.core.protocol import derive_seed
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.methods.fedalt import FedALT
from coterie.methods.feddpa import FedDPA
from coterie.methods.fedexlora import FedExLoRA
from coterie.methods.flora import FLoRA
from coterie.methods.sdflora import SDFLoRA
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


def mean(values: list[Tensors]) -> Tensors:
    return {name: sum(v[name] for v in values) / len(values) for name in values[0]}  # type: ignore[misc]


def close(run: Small, clients: dict[str, Naive]) -> None:
    """Require that the clients' models are those of the naive loop."""
    for i, naive in clients.items():
        adapter = run.client(i).model.adapter  # type: ignore[attr-defined]
        for name, tensor in adapter.named_parameters():
            expected = naive.parameters[name]
            off = (tensor - expected).norm()
            assert off <= 1e-4 * expected.norm() + 1e-7, f"round {run.done}, {i}, {name}: {off}"


def test_fedalt_trains_beside_the_mean_of_the_others(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """In the second round ben is away, so that in the third he gets the mean of all that sent. All
    replies of the fourth and fifth are lost: the mean stays, and what each has in it.
    """
    run = Small(FedALT(rounds=9, local_steps=2, balance="none"), backbone, tiny_federation, PLAIN)
    clients = {i: Naive(run, i) for i in NAMES}
    sent: dict[str, Tensors] = {}
    attention: dict[str, Tensors] = {}
    for number, present in enumerate((NAMES, ("ann", "cleo"), *[NAMES] * 4)):
        for i in present:
            others = [tensors for j, tensors in sent.items() if j != i]
            if others:
                row = {n.replace("specialist", "generalist"): t for n, t in mean(others).items()}
                clients[i].load(row | mean(list(attention.values())))
        for i in present:
            clients[i].steps(2, ("attention", "specialist", "router"))
        before = run.server
        run.round(present)
        if number in (3, 4):
            run.server = before
        else:
            sent = {i: clients[i].named("specialist") for i in present}
            attention = {i: clients[i].named("attention") for i in present}
        close(run, clients)


def test_fedalt_needs_others(backbone: Backbone, tiny_federation: Federation) -> None:
    """One client alone keeps the generalist that changes nothing."""
    run = Small(FedALT(rounds=2, local_steps=1), backbone, tiny_federation)
    run.round(("ann",))
    run.round(("ann",))
    rest = run.client("ann").model.adapter.named_parameters()  # type: ignore[attr-defined]
    assert all(not t.any() for n, t in rest if "generalist" in n and n.endswith("B"))


def weights_of(naive: Naive) -> Tensors:
    """The product of each LoRA."""
    return {
        path: lora.gamma * (lora.B @ lora.A).detach()[0]
        for path, lora in naive.model.adapter.loras().items()
    }


def test_fedex_clients_go_on_from_the_mean_of_their_models(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """The naive loop adds to the weights what the mean of the products has beyond the product of
    the means.
    """
    run = Small(FedExLoRA(rounds=3, local_steps=2), backbone, tiny_federation, PLAIN)
    clients, moved = {i: Naive(run, i) for i in NAMES}, 0.0
    for _ in range(3):
        for naive in clients.values():
            naive.steps(2, (".A", ".B"))
        run.round()
        close(run, clients)
        products = mean([weights_of(naive) for naive in clients.values()])
        factors = mean([naive.named(".A") | naive.named(".B") for naive in clients.values()])
        for naive in clients.values():
            naive.load(factors)
            residual = {n: t - weights_of(naive)[n] for n, t in products.items()}
            naive.load({f"{n}.W": naive.parameters[f"{n}.W"] + t for n, t in residual.items()})
            moved = max(moved, *(float(t.abs().max()) for t in residual.values()))
    assert moved > 1e-5  # the residual is more than rounding


def test_flora_adds_the_sum_of_all_products_to_the_weights(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """Clients start each round from new factors; ranks and numbers of tokens differ."""
    method = FLoRA(rounds=3, local_steps=2, ranks=(4, 2, 3))
    run = Small(method, backbone, tiny_federation, PLAIN)
    clients = {i: Naive(run, i) for i in NAMES}
    tokens = {i: len(naive.data.train) for i, naive in clients.items()}
    for done in range(3):
        for i, naive in clients.items():
            torch.manual_seed(derive_seed(5, done, 0, i))
            for lora in naive.model.adapter.loras().values():
                bound = lora.A.shape[2] ** -0.5
                lora.A.data = torch.empty(lora.A.shape).uniform_(-bound, bound)
                lora.B.data = torch.zeros(lora.B.shape)
            naive.steps(2, (".A", ".B"))
        run.round()
        close(run, clients)
        for path in weights_of(clients["ann"]):
            stacked = sum(tokens[i] * weights_of(clients[i])[path] for i in NAMES)
            for naive in clients.values():
                name = f"{path}.W"
                naive.load({name: naive.parameters[name] + stacked / sum(tokens.values())})


def test_a_frozen_sum_becomes_ranks_of_a_kept_model(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """A personal model without a frozen sum predicts what the client's own did."""
    run = Small(FedExLoRA(rounds=2, local_steps=2), backbone, tiny_federation)
    run.round()
    run.round()
    model = run.client("ann").model
    assert isinstance(model, LanguageModel)
    layout, tensors = model.settled()
    kept = LanguageModel(backbone, layout)
    kept.adapter.load_state_dict(tensors)
    ids = torch.arange(1, 9)[None]
    torch.testing.assert_close(kept(ids), model(ids), rtol=1e-4, atol=1e-5)
    assert float(run.client("ann").loras["blocks.0.mlp.generalist.up"].W.detach().abs().max()) > 0  # type: ignore[union-attr]
    assert not layout.frozen_sum


def test_sdflora_averages_the_first_ranks_and_leaves_the_last_ones(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """Shared products are averaged by tokens and truncated, by an SVD of the whole matrix; factors
    may have other signs.
    """
    method = SDFLoRA(rounds=3, local_steps=2, ranks=(4, 2, 3), local_rank=2)
    run = Small(method, backbone, tiny_federation, PLAIN)
    clients = {i: Naive(run, i) for i in NAMES}
    tokens = {i: len(naive.data.train) for i, naive in clients.items()}
    for _ in range(3):
        for naive in clients.values():
            naive.steps(2, (".A", ".B"))
        run.round()
        for i, naive in clients.items():
            for path, lora in run.client(i).loras.items():
                expected = naive.model.adapter.loras()[path]
                torch.testing.assert_close(lora.A[:, -2:], expected.A[:, -2:])
                torch.testing.assert_close(
                    lora.B @ lora.A, expected.B @ expected.A, rtol=1e-4, atol=1e-7
                )
        for path in weights_of(clients["ann"]):
            parts = {i: naive.model.adapter.loras()[path] for i, naive in clients.items()}
            shared = {i: p.gamma * p.B[0, :, :-2] @ p.A[0, :-2] for i, p in parts.items()}
            mean = sum(tokens[i] * t for i, t in shared.items()) / sum(tokens.values())
            U, S, Vh = torch.linalg.svd(mean.detach().double(), full_matrices=False)
            for p in parts.values():
                rank = p.A.shape[1] - 2
                A, B = Vh[:rank].float(), (U * S)[:, :rank].float() / p.gamma
                p.A.data = torch.cat([A[None], p.A.data[:, -2:]], 1)
                p.B.data = torch.cat([B[None], p.B.data[..., -2:]], 2)


def descended(
    backbone: Backbone, layout: Layout, values: Tensors, trained: str, batch: torch.Tensor
) -> Tensors:
    """Return the values after a plain gradient step of some, in a model without a router."""
    model = LanguageModel(backbone, layout)
    parameters = dict(model.adapter.named_parameters())
    for name, p in parameters.items():
        p.data = values[name].clone()
    names = [n for n in parameters if any(part in n for part in trained.split())]
    loss = cross_entropy(*model.predicted(batch))
    gradients = torch.autograd.grad(loss, [parameters[n] for n in names])
    steps = zip(names, gradients, strict=True)
    return values | {n: values[n] - LR * gradient for n, gradient in steps}


@pytest.mark.parametrize("order", ["after", "in turn"])
def test_feddpa_trains_a_local_adapter_beside_the_frozen_global_one(
    backbone: Backbone, tiny_federation: Federation, order: str
) -> None:
    """The global one is trained alone. In use both are weighed by the similarity of a client's
    validation data to its training data.
    """
    plain = Layout(1, 0, rank=2, mlp_rank=2, routing="equal", balance="none")
    both = Layout(1, 1, rank=2, mlp_rank=2, routing="equal", balance="none")
    share = 0.0 if order == "after" else 0.5
    method = FedDPA(
        rounds=4, local_steps=4, start=0.5 if share == 0 else 1, local_share=share, instances=3
    )
    run = Small(method, backbone, tiny_federation, PLAIN)
    values: dict[str, Tensors] = {}
    for i in NAMES:
        named = run.client(i).model.adapter.named_parameters()  # type: ignore[attr-defined]
        values[i] = {n: t.detach().clone() for n, t in named if "router" not in n}
    drawn = 0
    for done in range(4):
        alone = share == 0 and done >= 2
        if not alone or done == 2:
            shared = mean([{n: t for n, t in values[i].items() if "spec" not in n} for i in NAMES])
            values = {i: v | shared for i, v in values.items()}
        for step in range(4):
            local = alone or step < 4 * share
            layout, trained = (both, "specialist") if local else (plain, "attention generalist")
            for i in NAMES:
                batch = run.site.data[i].train.batch(drawn, ROWS)
                values[i] = descended(backbone, layout, values[i], trained, batch)
            drawn += ROWS
        run.round()
        for i in NAMES:
            model = run.client(i).model
            assert isinstance(model, LanguageModel)
            for name, tensor in model.adapter.named_parameters():
                if "router" in name:
                    continue
                expected = values[i][name]
                off = (tensor - expected).norm()
                # without a router sums run in another order, and rounding grows with the steps
                assert off <= 5e-3 * expected.norm() + 1e-7, f"round {done}, {i}, {name}: {off}"
            weights = model.routing(torch.arange(1, 9)[None])
            alpha = similarity(run, i) if alone or share else 0.0
            assert 0 <= alpha < 0.5
            torch.testing.assert_close(weights[..., 1], torch.full_like(weights[..., 1], alpha))
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_feddpa_gives_who_has_not_trained_yet_the_global_adapter_alone(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(FedDPA(rounds=1, local_steps=2), backbone, tiny_federation, PLAIN)

    def local_weight() -> float:
        client = run.client(NAMES[0])
        download = run.method.download(run.server, NAMES)[NAMES[0]]
        assert isinstance(client.model, LanguageModel)
        with client.borrowing(run.method.loadable(client, dict(download))):
            return float(client.model.routing(torch.arange(1, 9)[None])[..., 1].max())

    assert local_weight() == 0
    run.round()
    assert local_weight() > 0


def similarity(run: Small, i: str) -> float:
    """Return half the mean cosine of validation windows and of three training windows."""
    data, means = run.site.data[i], []
    model = run.client(i).model
    assert isinstance(model, LanguageModel)
    last = data.train.windows - 1
    train = [data.train.take(np.array([row])) for row in (0, last // 2, last)]
    for ids in (*train, *data.valid.scoring(1)):
        with model.backbone.using(None):
            hidden = model.backbone.hidden(ids[:, : model.backbone.context_limit])
        means.append(hidden.float().mean(dim=1)[0])
    cosines = [cosine_similarity(a, b, dim=0) for a in means[:3] for b in means[3:]]
    return 0.5 * float(sum(cosines)) / len(cosines)
