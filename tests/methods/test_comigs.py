"""CoMiGS against Algorithm 1, written out naively, and what its two levels may and may not
touch.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import AdamW, Training
from coterie.client.site import Site
from coterie.core.protocol import Ask, drive
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.engines.inprocess import InProcess
from coterie.methods.comigs import CoMiGS
from coterie.methods.comigs_alone import CoMiGSAlone
from coterie.methods.comigs_published import CoMiGSPublished
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

TRAINING = Training(batch_size=4, experts=AdamW(lr=5e-3, schedule="cosine"), routers=AdamW(lr=3e-3))
METHOD = CoMiGS(
    rounds=3,
    local_steps=2,
    router_every=3,
    router_steps=2,
    specialists=(1, 2, 1),
    balance="uniform",
    balance_weight=0.5,
)


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


@pytest.fixture
def site(backbone: Backbone, tiny_federation: Federation) -> Site:
    layouts = {i: METHOD.layout(k, Layout(rank=2)) for k, i in enumerate(tiny_federation.clients)}
    return Site(
        partial(LanguageModel, backbone),
        layouts,
        tiny_federation.clients,
        TRAINING,
        seed=5,
        total_iterations=METHOD.total_iterations,
    )


def theta_g(site: Site) -> Tensors:
    return Blueprint(
        partial(Adapter, backbone_of(site).architecture), site.layouts, site.seed
    ).read(GENERALIST)


def backbone_of(site: Site) -> Backbone:
    model = site.model("ann")
    assert isinstance(model, LanguageModel)
    return model.backbone


class NaiveAdamW:
    """Loshchilov and Hutter, 2019, Algorithm 2, one tensor at a time, in float64 scalars where
    it matters.
    """

    def __init__(self) -> None:
        self.t, self.m, self.v = 0, {}, {}  # type: ignore[var-annotated]

    def step(
        self, values: Mapping[str, Tensor], gradients: Mapping[str, Tensor], lr: float
    ) -> None:
        self.t += 1
        for name, g in gradients.items():
            self.m[name] = 0.9 * self.m.get(name, 0) + 0.1 * g
            self.v[name] = 0.95 * self.v.get(name, 0) + 0.05 * g**2
            m, v = self.m[name] / (1 - 0.9**self.t), self.v[name] / (1 - 0.95**self.t)
            values[name].mul_(1 - lr * 0.01).sub_(lr * m / (v.sqrt() + 1e-8))


def naive_algorithm_1(
    site: Site,
    leaking: bool = False,
    there: Sequence[Sequence[str]] = (("ann", "ben", "cleo"),) * 3,
) -> tuple[Tensors, dict[str, Tensors]]:
    """Algorithm 1 with explicit loops and dictionaries: no engine, no Client, no flat tensors.
    Models are whole ones, one per client.

    Where it is `leaking`, each backward pass adds to the gradients of all tensors, and a step
    clears those of its own roles alone. In each round only those who are `there` train and are
    averaged; all schedules go on.
    """
    from coterie.client.blueprint import initial_seed

    models = {i: LanguageModel(backbone_of(site), layout) for i, layout in site.layouts.items()}
    values, optimisers, drawn, iteration = {}, {}, {}, dict.fromkeys(models, 0)
    uncleared: dict[str, dict[str, Tensor]] = {i: {} for i in models}
    for i, model in models.items():
        named = {r: model.parameters_by_role[r] for r in (GENERALIST, SPECIALIST, ROUTER)}
        values[i] = {r: {n: p.data for n, p in named[r].items()} for r in named}
        for r in named:
            for n, t in model.initial(r, initial_seed(site.seed, r, i)).items():
                named[r][n].data.copy_(t)
        optimisers[i], drawn[i] = (
            {"experts": NaiveAdamW(), "router": NaiveAdamW()},
            {"train": 0, "valid": 0},
        )
    shared = {n: t.clone() for n, t in values["ann"][GENERALIST].items()}
    total = METHOD.rounds * METHOD.local_steps
    for t, here in enumerate(there):
        for i in here:
            model = models[i]
            for n, t_g in shared.items():
                values[i][GENERALIST][n].copy_(t_g)

            def step(
                kind: str,
                split: str,
                roles: tuple,
                lr: float,
                i: str = i,
                model: LanguageModel = model,
            ) -> None:
                batch = getattr(site.data[i], split).batch(drawn[i][split], 4)
                drawn[i][split] += 4
                parameters = {
                    n: p for r in values[i] for n, p in model.parameters_by_role[r].items()
                }
                gradients, _ = model.gradient(batch, list(parameters.values()))
                for n, g in zip(parameters, gradients, strict=True):
                    uncleared[i][n] = (uncleared[i][n] if leaking and n in uncleared[i] else 0) + g
                tensors = {n: t for r in roles for n, t in values[i][r].items()}
                optimisers[i][kind].step(tensors, {n: uncleared[i].pop(n) for n in tensors}, lr)

            for k in range(METHOD.local_steps):
                position = t * METHOD.local_steps + k
                cosine = 0.1 + 0.9 * (1 + math.cos(math.pi * position / total)) / 2
                step("experts", "train", (GENERALIST, SPECIALIST), 5e-3 * cosine)
                iteration[i] += 1
                if iteration[i] % METHOD.router_every == 0:
                    for _ in range(METHOD.router_steps):
                        step("router", "valid", (ROUTER,), 3e-3)
        shared = {
            n: torch.stack([values[i][GENERALIST][n] for i in here]).mean(dim=0) for n in shared
        }
    return shared, {i: {n: t for r in values[i] for n, t in values[i][r].items()} for i in models}


def test_algorithm_1(site: Site) -> None:
    engine = InProcess(site, METHOD)
    state, clients = theta_g(site), tuple(site.data)
    for t in range(METHOD.rounds):
        state = drive(
            METHOD.round(state, clients, torch.Generator()),
            lambda ask, phase, t=t: engine.answer(ask, t, phase),
        )
    shared, personal = naive_algorithm_1(site)
    torch.testing.assert_close(state, shared, atol=2e-5, rtol=1e-3)
    for i in clients:
        found = site.client(i, dict(engine.states()[i])).read(GENERALIST, SPECIALIST, ROUTER)
        torch.testing.assert_close(found, personal[i], atol=2e-5, rtol=1e-3)


def test_who_is_away_keeps_specialists_and_router_and_comes_back_to_the_generalist_of_now(
    site: Site,
) -> None:
    """Cleo joins in the second round, ann is away in it."""
    there = (("ann", "ben"), ("ben", "cleo"), ("ann", "ben", "cleo"))
    engine, state = InProcess(site, METHOD), theta_g(site)
    for t, here in enumerate(there):
        state = drive(
            METHOD.round(METHOD.members(state, here), here, torch.Generator()),
            lambda ask, phase, t=t: engine.answer(ask, t, phase),
        )
    shared, personal = naive_algorithm_1(site, there=there)
    torch.testing.assert_close(state, shared, atol=2e-5, rtol=1e-3)
    for i in site.data:
        found = site.client(i, dict(engine.states()[i])).read(GENERALIST, SPECIALIST, ROUTER)
        torch.testing.assert_close(found, personal[i], atol=2e-5, rtol=1e-3)


def test_what_was_published_is_algorithm_1_with_gradients_that_are_not_cleared(site: Site) -> None:
    method = CoMiGSPublished(**vars(METHOD))
    clean, (shared, personal) = naive_algorithm_1(site), naive_algorithm_1(site, leaking=True)
    engine = InProcess(site, method)
    state, clients = theta_g(site), tuple(site.data)
    for t in range(method.rounds):
        state = drive(
            method.round(state, clients, torch.Generator()),
            lambda ask, phase, t=t: engine.answer(ask, t, phase),
        )
    torch.testing.assert_close(state, shared, atol=2e-5, rtol=1e-3)
    for i in clients:
        found = site.client(i, dict(engine.states()[i])).read(GENERALIST, SPECIALIST, ROUTER)
        torch.testing.assert_close(found, personal[i], atol=2e-5, rtol=1e-3)
        for name, own in personal[i].items():  # both halves: experts and router
            if own.numel() and i == "ann":
                assert not torch.allclose(own, clean[1][i][name], atol=1e-4), name


def test_2s_alone_is_local_with_a_router(
    site: Site, backbone: Backbone, tiny_federation: Federation
) -> None:
    """Nothing is sent, and a client is trained as by 2S of which the server sends and averages
    nothing.
    """
    method = CoMiGSAlone(
        generalists=0, specialists=2, rounds=2, local_steps=3, router_every=2, router_steps=1
    )
    layouts = {i: method.layout(k, Layout(rank=2)) for k, i in enumerate(tiny_federation.clients)}
    site = Site(
        partial(LanguageModel, backbone),
        layouts,
        tiny_federation.clients,
        TRAINING,
        5,
        method.total_iterations,
    )
    engine, asks = InProcess(site, method), []
    for t in range(method.rounds):

        def answer(ask: Ask, phase: int, t: int = t) -> Mapping[str, Tensors]:
            asks.append((ask, engine.answer(ask, t, phase)))
            return asks[-1][1]

        assert drive(method.round({}, tuple(site.data), torch.Generator()), answer) == {}
    assert all(not any(ask.to.values()) and not any(replies.values()) for ask, replies in asks)
    alone = site.client("ben", {})
    alone.total_iterations = method.total_iterations
    for k in range(1, 7):
        alone.step(GENERALIST, SPECIALIST, on=alone.train)
        if k % 2 == 0:
            alone.step(ROUTER, on=alone.valid)
    torch.testing.assert_close(
        site.client("ben", dict(engine.states()["ben"])).read(GENERALIST, SPECIALIST, ROUTER),
        alone.read(GENERALIST, SPECIALIST, ROUTER),
    )


def test_the_server_averages_what_comes_back() -> None:
    """Tested by sending dictionaries: no engine, no model, no client."""
    round = METHOD.round({"x": torch.zeros(2)}, ("a", "b"), torch.Generator())
    ask = next(round)
    assert list(ask.to) == ["a", "b"]
    with pytest.raises(StopIteration) as end:
        round.send({"a": {"x": torch.tensor([1.0, 2.0])}, "b": {"x": torch.tensor([3.0, 6.0])}})
    assert torch.equal(end.value.value["x"], torch.tensor([2.0, 4.0]))


def trained(site: Site, steps: int = 3) -> Client:
    client = site.client("ben", {})
    for _ in range(steps):
        client.step(GENERALIST, SPECIALIST, on=client.train)
    return client


@pytest.mark.parametrize(
    ("moved", "still", "split"),
    [
        ((ROUTER,), (GENERALIST, SPECIALIST), "valid"),
        ((GENERALIST, SPECIALIST), (ROUTER,), "train"),
    ],
)
def test_a_level_leaves_no_trace_in_the_other(
    site: Site, moved: tuple, still: tuple, split: str
) -> None:
    """Values, gradients and optimiser moments of the roles that a step does not name stay bit
    for bit.
    """
    client = trained(site)
    client.step(ROUTER, on=client.valid)
    before, state = client.read(*still), {k: t.clone() for k, t in client.state.items()}
    changed = client.read(*moved)
    client.step(*moved, on=getattr(client, split))
    after = client.read(*still)
    assert all(torch.equal(before[n], after[n]) for n in before)
    assert all(
        p.grad is None for named in client.model.parameters_by_role.values() for p in named.values()
    )
    for role in still:
        for key in (
            f"optimiser/{role}/first",
            f"optimiser/{role}/second",
            f"optimiser/{role}/step",
        ):
            assert torch.equal(client.state[key], state[key])
    assert any(not torch.equal(changed[n], t) for n, t in client.read(*moved).items())


def test_routers_are_updated_every_tau_iterations_of_the_whole_run(site: Site) -> None:
    engine, state = InProcess(site, METHOD), theta_g(site)
    cursors = []
    for t in range(
        3
    ):  # 2 local iterations a round, tau = 3: after iterations 3 and 6, so in rounds 2 and 3
        engine.answer(Ask(METHOD.local_round, {"ann": state}), t, 0)
        cursors.append(int(engine.states()["ann"].get("cursor/valid", torch.zeros(()))))
    assert cursors == [0, 2 * 4, 4 * 4]


def test_tr_draws_router_batches_from_training_data(site: Site) -> None:
    method = CoMiGS(rounds=3, local_steps=2, router_every=3, router_steps=2, router_data="train")
    engine, state = InProcess(site, method), theta_g(site)
    for t in range(3):
        engine.answer(Ask(method.local_round, {"ann": state}), t, 0)
    found = engine.states()["ann"]
    assert int(found["cursor/train"]) == (6 + 4) * 4
    assert "cursor/valid" not in found
    assert int(found["optimiser/router/step"]) == 4


def test_an_attention_lora_is_always_shared(backbone: Backbone) -> None:
    layout = CoMiGS(generalists=0, specialists=2).layout(0, Layout())
    shared = Adapter(backbone.architecture, layout).parameters_by_role[GENERALIST]
    assert shared
    assert all("attention" in name for name in shared)


def test_a_single_expert_has_no_router_and_trains(
    site: Site, backbone: Backbone, tiny_federation: Federation
) -> None:
    method = CoMiGS(
        rounds=1, local_steps=2, router_every=1, router_steps=2, generalists=1, specialists=0
    )
    layouts = dict.fromkeys(tiny_federation.clients, method.layout(0, Layout(rank=2)))
    alone = Site(
        partial(LanguageModel, backbone),
        layouts,
        tiny_federation.clients,
        TRAINING,
        5,
        method.total_iterations,
    )
    engine = InProcess(alone, method)
    reply = engine.answer(Ask(method.local_round, {"ann": theta_g(alone)}), 0, 0)["ann"]
    assert "optimiser/router/first" not in engine.states()["ann"]
    assert any(t.abs().max() > 0 for name, t in reply.items() if name.endswith("B"))
