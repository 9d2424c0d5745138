"""The aggregation rules of the baselines against naive formulations, on matrices of hand size
and in short runs.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from text_runs import NAMES, Small
from torch import Tensor

from coterie.aggregation.lowrank import (
    factors,
    fused,
    fusion_weights,
    modules,
    nesterov,
    norm_weighted_mean,
    own_factors,
    product_norm,
    read_factors,
    svd_of_sum,
    tail_gradient,
)
from coterie.client.state import OWNED
from coterie.core.protocol import Ask, drive
from coterie.core.roles import BACKBONE, GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import Tensors, under
from coterie.data.federation import Federation
from coterie.methods.fdlora import FDLoRA
from coterie.methods.fedavgmoe import FedAvgMoE
from coterie.methods.fedsalora import FedSALoRA
from coterie.methods.ffalora import FFALoRA
from coterie.methods.flexlora import FlexLoRA, redistribute
from coterie.methods.hetlora import HetLoRA
from coterie.methods.localmoe import LocalMoE
from coterie.methods.pcl import PCL, collaboration_weights
from coterie.methods.pfedmoe import PFedMoE
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.layout import Layout


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


# HetLoRA


def test_hetlora_pads_weighs_by_norm_and_truncates_by_hand() -> None:
    """Two clients, ranks 1 and 2: ||B A||_F is 3 * 4 = 12 and 1 * 4 = 4, so the weights are 3/4
    and 1/4.
    """
    one = {"m/A": torch.tensor([[[4.0, 0.0]]]), "m/B": torch.tensor([[[3.0], [0.0]]])}
    two = {
        "m/A": torch.tensor([[[0.0, 4.0], [0.0, 0.0]]]),
        "m/B": torch.tensor([[[1.0, 7.0], [0.0, 7.0]]]),
    }
    state = {
        "m/A": torch.zeros(1, 3, 2),
        "m/B": torch.zeros(1, 2, 3),
        "ranks/a": torch.tensor([1]),
        "ranks/b": torch.tensor([2]),
    }
    mean = norm_weighted_mean({"a": one, "b": two}, state)
    torch.testing.assert_close(mean["m/A"], torch.tensor([[[3.0, 1.0], [0.0, 0.0], [0.0, 0.0]]]))
    torch.testing.assert_close(mean["m/B"], torch.tensor([[[2.5, 1.75, 0.0], [0.0, 1.75, 0.0]]]))
    down = HetLoRA().download(state | mean, ["a", "b"])
    assert [down[i]["m/A"].shape[1] for i in "ab"] == [1, 2]
    torch.testing.assert_close(down["b"]["m/B"], torch.tensor([[[2.5, 1.75], [0.0, 1.75]]]))


def test_updates_that_are_all_zero_count_alike() -> None:
    replies = {
        i: {"m/A": torch.full((1, 1, 2), value), "m/B": torch.zeros(1, 2, 1)}
        for i, value in (("a", 1.0), ("b", 3.0))
    }
    mean = norm_weighted_mean(replies, {"m/A": torch.zeros(1, 1, 2), "m/B": torch.zeros(1, 2, 1)})
    torch.testing.assert_close(mean["m/A"], torch.full((1, 1, 2), 2.0))


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
def test_the_norm_of_a_product_from_gram_matrices(
    seed: int, rank: int, outputs: int, inputs: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    A, B = torch.randn(2, rank, inputs, generator=g), torch.randn(2, outputs, rank, generator=g)
    assert product_norm(A, B) == pytest.approx(
        float((B.double() @ A.double()).norm()), rel=1e-5, abs=1e-5
    )


def test_hetlora_penalty_has_the_gradient_that_autograd_finds(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = HetLoRA(ranks=4, prune=0.5, regularisation=0.3)
    client = Small(method, backbone, tiny_federation).client("ann")
    for p in (p for lora in client.loras.values() for p in lora.parameters()):
        p.data.normal_()
    fewer = {m: lora.A.shape[1] // 2 for m, lora in client.loras.items()}
    ours = tail_gradient(client.loras, fewer, method.regularisation)
    leaves = {
        f"{m}.{k}": getattr(lora, k).detach().clone().requires_grad_()
        for m, lora in client.loras.items()
        for k in "AB"
    }
    penalty = sum(
        leaves[f"{m}.B"][..., r:].norm() * leaves[f"{m}.A"][:, r:].norm() for m, r in fewer.items()
    )
    (0.3 * penalty).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(ours[name], leaf.grad)


def test_hetlora_prunes_a_tail_that_shrank_and_never_revives_it(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """A strong penalty shrinks the tail: ranks fall round by round, what is cut stays zero, and
    messages become smaller.
    """
    run = Small(
        HetLoRA(rounds=4, local_steps=2, ranks=(4, 2, 3), prune=0.6, regularisation=50.0),
        backbone,
        tiny_federation,
    )
    ranks = [run.blueprint.ranks["ann"]]
    for _ in range(4):
        ranks.append(run.round()["ranks/ann"].tolist())
        client = run.client("ann")
        for module, rank in zip(modules(read_factors(client.loras)), ranks[-1], strict=True):
            A, B = factors(module, read_factors(client.loras))
            assert not A[:, rank:].any()
            assert not B[..., rank:].any()
    assert ranks[-1] < ranks[0]
    assert all(
        after <= before
        for a, b in itertools.pairwise(ranks)
        for before, after in zip(a, b, strict=True)
    )
    down = run.method.download(run.server, ["ann"])["ann"]
    assert [down[f"{m}/A"].shape[1] for m in modules(down)] == ranks[-1]


def test_hetlora_without_pruning_keeps_its_ranks(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(
        HetLoRA(rounds=2, local_steps=2, ranks=(4, 2, 3), prune=1.0, regularisation=50.0),
        backbone,
        tiny_federation,
    )
    run.round()
    assert run.round()["ranks/ann"].tolist() == run.blueprint.ranks["ann"]


def test_an_update_means_the_same_at_every_rank(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """The scale depends on the rank: what client cleo (rank 3) receives of a server's update of
    rank 2 is that very update.
    """
    run = Small(HetLoRA(ranks=(4, 2, 3)), backbone, tiny_federation)
    server = {
        k: torch.randn(v.shape, generator=torch.Generator().manual_seed(1))
        for k, v in run.server.items()
        if "ranks" not in k
    }
    for name, tensor in server.items():
        dim = 1 if name.endswith("A") else 2
        tensor.narrow(dim, 2, tensor.shape[dim] - 2).zero_()
    for i in NAMES:
        client = run.client(i)
        own = own_factors(client.loras, run.method.download(run.server | server, [i])[i])
        for module, lora in client.loras.items():
            A, B = factors(module, server)
            torch.testing.assert_close(
                lora.gamma * own[f"{module}.B"] @ own[f"{module}.A"], B @ A, rtol=1e-5, atol=1e-5
            )


def ones(**shapes: tuple[int, ...]) -> Tensors:
    return {f"m/{name}": torch.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "broken",
    [
        {"A": (1, 1, 2)},
        {"B": (1, 2, 1)},
        {"A": (1, 2, 1)},
        {"B": (1, 1, 2)},
        {"A": (0, 2, 2), "B": (0, 2, 2)},
    ],
)
def test_hetlora_leaves_out_whose_factors_do_not_fit_each_other(
    broken: dict[str, tuple[int, ...]],
) -> None:
    """A truncated reply may have smaller tensors; a client that made others of them smaller than
    its ranks must not stop the server.
    """
    good = {"A": (1, 2, 2), "B": (1, 2, 2)}
    state = ones(A=(1, 3, 2), B=(1, 2, 3)) | {f"ranks/{i}": torch.tensor([2]) for i in NAMES}
    replies = {
        "ann": ones(**good),
        "ben": ones(**(good | broken)),
        "cleo": ones(A=(1, 1, 2), B=(1, 2, 1)),
    }
    after = drive(HetLoRA().round(state, NAMES, torch.Generator()), lambda ask, phase: replies)
    alone = drive(
        HetLoRA().round(state, NAMES, torch.Generator()),
        lambda ask, phase: {i: replies[i] for i in ("ann", "cleo")},
    )
    for name in state:
        torch.testing.assert_close(after[name], alone[name])
    assert [int(after[f"ranks/{i}"]) for i in NAMES] == [2, 2, 1]


# FlexLoRA


def naive_flexlora(terms: list[tuple[float, Tensor, Tensor]], rank: int) -> Tensor:
    """The best approximation of sum_i w_i B_i A_i at `rank`, from the full product."""
    U, S, Vh = torch.linalg.svd(sum(w * (B @ A) for w, A, B in terms), full_matrices=False)  # type: ignore[arg-type]
    return (U[..., :rank] * S[..., None, :rank]) @ Vh[..., :rank, :]


@given(
    st.integers(0, 10**6),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 4),
)
def test_flexlora_factors_are_the_truncated_svd(
    seed: int, ranks: list[int], outputs: int, inputs: int, rank: int
) -> None:
    g = torch.Generator().manual_seed(seed)
    terms = [
        (
            0.2 + k,
            torch.randn(2, r, inputs, generator=g).double(),
            torch.randn(2, outputs, r, generator=g).double(),
        )
        for k, r in enumerate(ranks)
    ]
    A, B = svd_of_sum([(w, (A, B)) for w, A, B in terms], rank)
    assert A.shape == (2, rank, inputs)
    assert B.shape == (2, outputs, rank)
    torch.testing.assert_close(B @ A, naive_flexlora(terms, rank), rtol=1e-8, atol=1e-8)
    assert (B.amax(dim=1) >= -B.amin(dim=1)).all()  # of two signs, one that every device chooses


def test_flexlora_weighs_by_data_by_hand() -> None:
    """Client a holds 3 times the tokens of b: the mean of diag(4, 0) and diag(0, 4) is diag(3,
    1); rank 1 keeps diag(3, 0).
    """
    a = {
        "m/A": torch.tensor([[[1.0, 0.0]]]),
        "m/B": torch.tensor([[[4.0], [0.0]]]),
        "tokens": torch.tensor(300),
    }
    b = {
        "m/A": torch.tensor([[[0.0, 2.0]]]),
        "m/B": torch.tensor([[[0.0], [2.0]]]),
        "tokens": torch.tensor(100),
    }
    state = {
        "m/A": torch.zeros(1, 2, 2),
        "m/B": torch.zeros(1, 2, 2),
        "ranks/a": torch.tensor([1]),
        "ranks/b": torch.tensor([2]),
    }
    new = redistribute({"a": a, "b": b}, state)
    torch.testing.assert_close(new["m/B"] @ new["m/A"], torch.diag(torch.tensor([3.0, 1.0]))[None])
    down = FlexLoRA().download(state | new, ["a", "b"])
    torch.testing.assert_close(
        down["a"]["m/B"] @ down["a"]["m/A"], torch.diag(torch.tensor([3.0, 0.0]))[None]
    )
    torch.testing.assert_close(
        down["b"]["m/B"] @ down["b"]["m/A"], torch.diag(torch.tensor([3.0, 1.0]))[None]
    )


def test_flexlora_takes_all_alike_where_nobody_says_to_have_tokens() -> None:
    replies = {
        i: {"m/A": torch.eye(2)[None], "m/B": k * torch.eye(2)[None], "tokens": torch.tensor(0)}
        for k, i in enumerate(NAMES)
    }
    new = redistribute(replies, {"m/A": torch.zeros(1, 2, 2)})
    torch.testing.assert_close(new["m/B"] @ new["m/A"], torch.eye(2)[None])


# FFA-LoRA and FedSA-LoRA


def test_ffa_freezes_a_common_a_so_that_the_mean_update_is_the_update_of_the_mean(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(FFALoRA(rounds=2, local_steps=2), backbone, tiny_federation)
    start = run.client("ann").read(BACKBONE)
    assert start
    assert all(name.endswith(".A") for name in start)
    server = run.round()
    assert all(name.endswith(".B") for name in server)
    clients = {i: run.client(i).read(*OWNED) for i in NAMES}
    for name, A in start.items():
        assert all(torch.equal(clients[i][name], A) for i in NAMES)
        B = name.removesuffix("A") + "B"
        mean = sum(clients[i][B] @ clients[i][name] for i in NAMES) / 3
        torch.testing.assert_close(server[B] @ A, mean, rtol=1e-5, atol=1e-7)
    assert any(not torch.equal(clients["ann"][name], clients["ben"][name]) for name in server)


def test_fedsa_averages_the_as_and_keeps_the_bs_at_home(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(FedSALoRA(rounds=2, local_steps=2), backbone, tiny_federation)
    server = run.round()
    assert server
    assert all(name.endswith(".A") for name in server)
    clients = {i: run.client(i).read(*OWNED) for i in NAMES}
    for name in server:
        torch.testing.assert_close(server[name], sum(clients[i][name] for i in NAMES) / 3)
    local = run.client("ann").read(SPECIALIST)
    assert local
    assert all(name.endswith(".B") for name in local)
    run.round()
    assert any(
        not torch.equal(
            run.client("ann").read(SPECIALIST)[name], run.client("ben").read(SPECIALIST)[name]
        )
        for name in local
    )


# PCL


def test_pcl_weights_are_a_softmax_of_negative_perplexities() -> None:
    found = collaboration_weights({"a": 10.0, "b": 11.0, "c": 13.0})
    scores = [math.exp(-10), math.exp(-11), math.exp(-13)]
    assert list(found.values()) == pytest.approx([s / sum(scores) for s in scores])


def test_pcl_clients_go_on_from_their_own_mixtures() -> None:
    """Sent dictionaries, without an engine: ann finds ben's model much the best, ben and cleo
    cannot tell them apart.
    """
    method, init = PCL(), {"x": torch.zeros(2)}

    class Server:
        def read(self, *roles: object) -> Tensors:
            return init

    state = method.init(Server(), NAMES)  # type: ignore[arg-type]
    models = {i: {"x": torch.tensor([float(k), 1.0])} for k, i in enumerate(NAMES)}
    verdicts = {"ann": (50.0, 10.0, 60.0), "ben": (7.0, 7.0, 7.0), "cleo": (7.0, 7.0, 7.0)}

    def answer(ask: Ask, phase: int) -> Mapping[str, Tensors]:
        if phase == 0:
            return models
        assert all(
            {name.partition("/")[0] for name in message} == set(NAMES)
            for message in ask.to.values()
        )
        return {
            i: {j: torch.tensor(v) for j, v in zip(NAMES, verdicts[i], strict=True)} for i in NAMES
        }

    state = drive(method.round(state, NAMES, torch.Generator()), answer)
    torch.testing.assert_close(state["ann/x"], torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(state["ben/x"], torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(state["ben/weights"], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert float(state["ann/weights"][1]) == pytest.approx(1.0)
    assert method.download(state, NAMES)["ann"].keys() == {"x"}


def test_a_pcl_client_judges_every_model_on_its_own_validation_data(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(PCL(rounds=1, local_steps=3), backbone, tiny_federation)
    run.round()
    own = {i: run.client(i).read(GENERALIST) for i in NAMES}
    found = run.engine.answer(
        Ask(run.method.judge, {"ann": {f"{j}/{k}": v for j in NAMES for k, v in own[j].items()}}),
        0,
        1,
    )  # type: ignore[attr-defined]
    client = run.client("ann")
    for j in NAMES:
        client.load(own[j])
        nll, tokens = client.score(client.valid).tolist()
        assert float(found["ann"][j]) == pytest.approx(math.exp(nll / tokens))
    assert {k: v for k, v in found["ann"].items() if k not in NAMES} == {}


def test_a_model_that_somebody_broke_gets_no_weight_and_its_judges_still_answer(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(PCL(rounds=1, local_steps=1), backbone, tiny_federation)
    models = {i: dict(run.client(i).read(GENERALIST)) for i in NAMES}
    models["ben"] = {name: torch.full_like(tensor, 3e38) for name, tensor in models["ben"].items()}
    answers: list[Mapping[str, Tensors]] = []

    def answer(ask: Ask, phase: int) -> Mapping[str, Tensors]:
        answers.append(run.engine.answer(ask, 0, phase) if phase else models)
        for i, reply in answers[-1].items():
            ask.check(i, reply)
        return answers[-1]

    state = drive(run.method.round(run.server, NAMES, torch.Generator()), answer)
    assert all(
        float(verdict["ben"]) == torch.finfo(torch.float64).max for verdict in answers[1].values()
    )
    for i in NAMES:
        weights = state[f"{i}/weights"].tolist()
        assert weights[1] == 0
        assert sum(weights) == pytest.approx(1)


# FDLoRA


def test_the_outer_optimiser_is_nesterov_momentum() -> None:
    g = torch.Generator().manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(5, generator=g))
    theta, momentum = {"x": parameter.detach().clone()}, {"x": torch.zeros(5)}
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for _ in range(4):
        gradient = torch.randn(5, generator=g)
        parameter.grad = gradient.clone()
        sgd.step()
        theta, momentum = nesterov(theta, momentum, {"x": gradient}, 0.7, 0.9)
        torch.testing.assert_close(theta["x"], parameter.detach())


def test_fusion_finds_the_least_loss_without_gradients() -> None:
    found = fusion_weights(lambda w: (w[0] - 0.8) ** 2 + 2 * (w[1] - 0.3) ** 2, 80)
    assert found == pytest.approx((0.8, 0.3), abs=0.02)
    penalised = fusion_weights(
        lambda w: (w[0] - 0.8) ** 2 + 2 * (w[1] - 0.05) ** 2 + 0.4 * (abs(w[0]) + abs(w[1])), 200
    )
    assert penalised == pytest.approx(
        (0.6, 0.0), abs=0.02
    )  # soft thresholding by hand: 0.8 - 0.4 / 2, and 0.05 < 0.4 / 4


def test_fusion_is_never_worse_than_either_of_the_two() -> None:
    def rugged(w: object) -> float:
        x, y = w  # type: ignore[misc]
        return float(math.sin(7 * x) + math.cos(5 * y) + 0.1 * (x * x + y * y))

    best = rugged(fusion_weights(rugged, 10))
    assert best <= min(rugged(w) for w in ((1.0, 0.0), (0.0, 1.0), (1.0, 1.0)))


def test_fdlora_goes_through_its_three_stages() -> None:
    """Sent dictionaries, without an engine: T = 5, one round alone, H = 2; the outer steps are
    those of torch's SGD.
    """
    method = FDLoRA(rounds=5, alone=0.2, outer_lr=0.5, outer_momentum=0.9, sync_every=2)
    state = {"x": torch.zeros(2), "momentum/x": torch.zeros(2), "round": torch.tensor(0)}
    replies = {"a": {"x": torch.tensor([1.0, 0.0])}, "b": {"x": torch.tensor([3.0, 2.0])}}
    asked: list[list[tuple[str, bool | None]]] = []
    parameter = torch.nn.Parameter(torch.tensor([2.0, 1.0]))  # the mean after stage 1
    sgd = torch.optim.SGD([parameter], lr=0.5, momentum=0.9, nesterov=True)
    for _ in range(5):
        names: list[tuple[str, bool | None]] = []

        def answer(ask: Ask, phase: int, names: list = names) -> Mapping[str, Tensors]:
            flag = ask.to["a"].get("send", ask.to["a"].get("sync"))
            names.append((ask.name, None if flag is None else bool(flag)))
            return replies

        state = drive(method.round(state, ["a", "b"], torch.Generator()), answer)
        asked.append(names)
        if len(asked) > 1:
            parameter.grad = parameter.detach() - torch.tensor([2.0, 1.0])  # theta - mean theta_i
            sgd.step()
        torch.testing.assert_close(state["x"], parameter.detach())
    drive(method.finish(state, ["a", "b"]), answer)
    assert asked == [
        [("local_round", True)],
        [("federated_round", False)],
        [("federated_round", True)],
        [("federated_round", False)],
        [("federated_round", True), ("fuse", None)],
    ]


def test_fdlora_clients_end_with_the_fusion_of_their_two_loras(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    method = FDLoRA(
        rounds=3,
        local_steps=2,
        alone=0.34,
        sync_every=2,
        fusion_samples=4,
        fusion_steps=12,
        fusion_l1=0.01,
    )
    run = Small(method, backbone, tiny_federation)
    for _ in range(3):
        run.round()
    state = run.engine.states()["ann"]
    theta_s = method.download(run.server, ["ann"])["ann"]
    theta_p, client = under("personal", state), run.client("ann")
    own, samples = client.read(GENERALIST), client.valid.batch(0, 4)

    def objective(w: tuple[float, float]) -> float:
        with client.borrowing(fused(w, theta_p, theta_s)):
            return client.loss(samples) + 0.01 * (abs(w[0]) + abs(w[1]))

    weights = fusion_weights(objective, 12)  # type: ignore[arg-type]
    for name, tensor in fused(weights, theta_p, theta_s).items():
        torch.testing.assert_close(own[name], tensor)
    assert objective(weights) <= min(objective((1.0, 0.0)), objective((0.0, 1.0)))


# Mixtures


def test_pfedmoe_trains_experts_and_router_in_one_step_on_training_data(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(PFedMoE(rounds=1, local_steps=3), backbone, tiny_federation)
    before = run.client("ann").read(*OWNED)
    run.round()
    assert (
        run.count("ann", "optimiser/router/step")
        == run.count("ann", "optimiser/generalist/step")
        == run.count("ann", "optimiser/specialist/step")
        == 3
    )
    assert run.count("ann", "cursor/train") == 3 * 4
    assert run.count("ann", "cursor/valid") == 0
    after = run.client("ann").read(ROUTER, SPECIALIST)
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert not after.keys() & run.server.keys()


def test_fedavg_moe_averages_routers_too_and_local_moe_sends_nothing(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(FedAvgMoE(rounds=1, local_steps=2), backbone, tiny_federation)
    server = run.round()
    routers = {i: run.client(i).read(ROUTER) for i in NAMES}
    assert routers["ann"].keys() <= server.keys()
    for name in routers["ann"]:
        torch.testing.assert_close(server[name], sum(routers[i][name] for i in NAMES) / 3)
    alone = Small(LocalMoE(rounds=1, local_steps=2), backbone, tiny_federation)
    assert alone.round() == {}
    assert alone.count("ann", "optimiser/router/step") == 2


@pytest.mark.parametrize("method", [LocalMoE, FedAvgMoE])
def test_the_tr_rows_train_routers_in_turn_on_fresh_training_batches(
    method: type[LocalMoE] | type[FedAvgMoE], backbone: Backbone, tiny_federation: Federation
) -> None:
    run = Small(
        method(rounds=2, local_steps=3, updates="alternating", router_every=2, router_steps=2),
        backbone,
        tiny_federation,
    )
    run.round()
    # 6 local iterations, so that routers are trained after the 2nd, the 4th and the 6th
    run.round()
    assert run.count("ann", "optimiser/router/step") == 3 * 2
    assert run.count("ann", "cursor/train") == (6 + 3 * 2) * 4
    assert run.count("ann", "cursor/valid") == 0


def test_equal_budgets(backbone: Backbone) -> None:
    """Every row of Table 2 that trains has the parameters of 1G1S, but for the router; FFA-LoRA
    trains only the Bs.
    """
    from coterie.methods.section import build_method

    base = Layout(rank=4)
    sizes = {
        name: Adapter(
            backbone.architecture, build_method({"name": name}).layout(0, base)
        ).trainable_parameters
        for name in (
            "comigs-1g1s",
            "pfedmoe",
            "fedavg",
            "pcl",
            "fdlora",
            "fedsa-lora",
            "hetlora",
            "flexlora",
            "local-moe",
            "ffa-lora",
        )
    }
    router = 2 * 2 * 16  # blocks, experts, width
    for name in ("fedavg", "pcl", "fdlora", "fedsa-lora", "hetlora", "flexlora"):
        assert sizes[name] == sizes["comigs-1g1s"] - router, name
    assert sizes["pfedmoe"] == sizes["local-moe"] == sizes["comigs-1g1s"]
    assert sizes["ffa-lora"] < sizes["fedavg"]


def test_active_parameters_leave_out_experts_that_a_token_does_not_use(backbone: Backbone) -> None:
    four = Adapter(
        backbone.architecture, replace(Layout(rank=4), generalists=1, specialists=3, top_k=2)
    )
    two = Adapter(backbone.architecture, replace(Layout(rank=4), generalists=1, specialists=1))
    router = 2 * 2 * 16  # of the two more experts
    assert four.active_parameters == two.active_parameters + router
    assert two.active_parameters == two.trainable_parameters
