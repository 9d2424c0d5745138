"""The client: what it remembers, what it takes over, what it refuses."""

from functools import partial
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from coterie.client.settings import SGD, AdamW, Optimiser, Training
from coterie.client.site import Site
from coterie.core.errors import ClientError, TensorError
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.data.federation import Federation
from coterie.methods.local import Local
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


def make(backbone: Backbone, federation: Federation, **training: object) -> Site:
    layouts = dict.fromkeys(federation.clients, Layout(rank=2, specialists=2))
    return Site(
        partial(LanguageModel, backbone),
        layouts,
        federation.clients,
        Training(**({"batch_size": 4} | training)),
        5,
        10,
    )  # type: ignore[arg-type]


def test_a_run_over_three_sittings_is_one_run(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """The state is all there is to remember: a client rebuilt from it goes on as if nothing had
    happened.
    """
    site = make(backbone, tiny_federation)
    whole, parts = {}, {}
    client = site.client("ann", whole)
    for _ in range(6):
        client.step(GENERALIST, SPECIALIST, on=client.train)
        client.step(ROUTER, on=client.valid)
    for _ in range(3):
        client = site.client("ann", parts)
        for _ in range(2):
            client.step(GENERALIST, SPECIALIST, on=client.train)
            client.step(ROUTER, on=client.valid)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[k], parts[k]) for k in whole)
    assert client.iteration == 6


def test_accumulated_gradients_give_the_same_step(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    states = []
    for micro_batch in (None, 1, 3):
        state: dict = {}
        client = make(backbone, tiny_federation, micro_batch=micro_batch).client("ann", state)
        for _ in range(3):
            client.step(GENERALIST, SPECIALIST, ROUTER, on=client.train)
        states.append(state)
    for role in (GENERALIST, SPECIALIST, ROUTER):
        for other in states[1:]:
            torch.testing.assert_close(
                other[f"parameters/{role}"], states[0][f"parameters/{role}"], atol=2e-4, rtol=1e-3
            )


def test_flat_adamw_is_adamw_of_each_tensor(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    site = make(
        backbone, tiny_federation, experts=AdamW(lr=1e-2, schedule="cosine", weight_decay=0.1)
    )
    client = site.client("ann", {})
    reference = {n: torch.nn.Parameter(t) for n, t in client.read(GENERALIST).items()}
    adamw = torch.optim.AdamW(reference.values(), betas=(0.9, 0.95), weight_decay=0.1)
    own = client.model.parameters_by_role[GENERALIST]
    for k in range(4):
        gradients, _ = client.model.gradient(client.train.batch(4 * k, 4), list(own.values()))
        for parameter, gradient in zip(reference.values(), gradients, strict=True):
            parameter.grad = gradient
        adamw.param_groups[0]["lr"] = AdamW(lr=1e-2, schedule="cosine").lr_at(k, 10)
        adamw.step()
        client.step(GENERALIST, on=client.train)
        torch.testing.assert_close(
            client.read(GENERALIST),
            {n: p.detach() for n, p in reference.items()},
            atol=1e-6,
            rtol=1e-5,
        )


def test_the_cosine_goes_from_the_peak_to_a_tenth() -> None:
    schedule = AdamW(lr=2e-3, schedule="cosine")
    assert schedule.lr_at(0, 200) == pytest.approx(2e-3)
    assert schedule.lr_at(100, 200) == pytest.approx(1.1e-3)
    assert schedule.lr_at(200, 200) == schedule.lr_at(999, 200) == pytest.approx(2e-4)
    assert AdamW(lr=2e-3).lr_at(123, 200) == 2e-3


def test_the_rate_rises_to_the_peak_and_falls_from_there() -> None:
    schedule = AdamW(lr=2e-3, schedule="cosine", warmup_steps=50)
    assert [schedule.lr_at(at, 250) for at in (0, 24, 49, 50)] == pytest.approx(
        [4e-5, 1e-3, 2e-3, 2e-3]
    )
    assert schedule.lr_at(150, 250) == pytest.approx(1.1e-3)
    assert schedule.lr_at(250, 250) == pytest.approx(2e-4)
    assert AdamW(lr=2e-3, warmup_steps=4).lr_at(9, 10) == 2e-3


@pytest.mark.parametrize(
    "kind", [AdamW(max_grad_norm=0.5), SGD(optimiser="sgd", max_grad_norm=0.5)]
)
def test_gradients_are_clipped_client_by_client_as_pytorch_does(kind: Optimiser) -> None:
    start, gradients = torch.randn(3, 7), torch.randn(3, 7) * torch.tensor([[0.01], [1.0], [9.0]])
    together = start.clone()
    kind.step(together, gradients, 0.1, {}, "o")
    unclipped = kind.model_copy(update={"max_grad_norm": None})
    for row, gradient, flat in zip(start.clone(), gradients, together, strict=True):
        parameter = torch.nn.Parameter(row.clone())
        parameter.grad = gradient.clone()
        torch.nn.utils.clip_grad_norm_([parameter], 0.5)
        unclipped.step(row, parameter.grad, 0.1, {}, "o")
        torch.testing.assert_close(flat, row, rtol=1e-5, atol=1e-7)


def test_shared_tensors_start_alike_and_local_ones_do_not(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    site = make(backbone, tiny_federation)
    values = [
        {r: site.client(i, {}).read(r) for r in (GENERALIST, SPECIALIST, ROUTER)}
        for i in ("ann", "ben")
    ]
    assert all(
        torch.equal(values[0][GENERALIST][n], values[1][GENERALIST][n])
        for n in values[0][GENERALIST]
    )
    for role in (SPECIALIST, ROUTER):
        drawn = [n for n in values[0][role] if not n.endswith("B")]
        assert all(not torch.equal(values[0][role][n], values[1][role][n]) for n in drawn)


def test_what_is_borrowed_is_given_back(backbone: Backbone, tiny_federation: Federation) -> None:
    client = make(backbone, tiny_federation).client("ann", {})
    before = client.read(GENERALIST)
    with client.borrowing({n: torch.ones_like(t) for n, t in before.items()}):
        assert all(torch.equal(t, torch.ones_like(t)) for t in client.read(GENERALIST).values())
    assert all(torch.equal(before[n], t) for n, t in client.read(GENERALIST).items())


@pytest.mark.parametrize("damage", ["foreign", "shape", "dtype", "nan"])
def test_bad_tensors_are_refused_and_nothing_is_changed(
    backbone: Backbone, tiny_federation: Federation, damage: str
) -> None:
    client = make(backbone, tiny_federation).client("ann", {})
    good = client.read(GENERALIST)
    name = list(good)[-1]
    bad = {n: t + 1 for n, t in good.items()} | {
        "foreign": {"blocks.9.secret": torch.ones(1)},
        "shape": {name: torch.ones(1)},
        "dtype": {name: good[name].double()},
        "nan": {name: good[name] * torch.nan},
    }[damage]
    with pytest.raises(TensorError, match="client 'ann'"):
        client.load(bad)
    assert all(torch.equal(good[n], t) for n, t in client.read(GENERALIST).items())


def test_a_state_of_another_recipe_is_refused(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    with pytest.raises(TensorError, match=r"another recipe"):
        make(backbone, tiny_federation).client("ann", {"parameters/generalist": torch.zeros(3)})


def test_a_failing_client_is_named_with_its_task(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    site = make(backbone, tiny_federation, experts=AdamW(lr=1e30))
    with pytest.raises(
        ClientError,
        match=r"'ben', task local_round, round 3: .*not finite.*\n.*lower training.experts.lr",
    ):
        site.answer(Local(rounds=3, local_steps=4), "local_round", "ben", {}, {}, 2, 0)


def test_random_streams_are_the_clients_own_and_put_back(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    layouts = dict.fromkeys(tiny_federation.clients, Layout(rank=2, dropout=0.5))
    site = Site(
        partial(LanguageModel, backbone),
        layouts,
        tiny_federation.clients,
        Training(batch_size=4),
        5,
        10,
    )
    torch.manual_seed(1)
    expected, found = torch.rand(1), []
    for noise in (1, 2):
        torch.manual_seed(noise)
        state: dict = {}
        site.answer(Local(rounds=1, local_steps=2), "local_round", "ann", {}, state, 0, 0)
        found.append(state)
        if noise == 1:
            assert torch.equal(torch.rand(1), expected)
    assert torch.equal(found[0]["parameters/generalist"], found[1]["parameters/generalist"])


def test_betas_are_checked() -> None:
    with pytest.raises(ValidationError, match="betas"):
        AdamW(betas=(0.9, 1.0))
