"""Rival methods against their formulas written out naively, and the tables of regret."""

import math
import sys
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from script_modules import ROOT, module_at
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import AdamW, Training
from coterie.client.site import Site
from coterie.core.protocol import drive
from coterie.core.roles import GENERALIST
from coterie.data.federation import Federation
from coterie.engines.inprocess import InProcess
from coterie.methods.fedavg import FedAvg
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

KEY = "parameters/generalist"
TRAINING = Training(batch_size=4, experts=AdamW(lr=5e-3))


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield module_at("benchmarks/never_worse.py")
        for name in ("common", "federations", "rivals", "never_worse_page"):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def rivals(script: ModuleType) -> ModuleType:
    return sys.modules["rivals"]


@pytest.fixture(scope="module")
def site(tiny_base: Path, tiny_federation: Federation) -> Site:
    backbone = Backbone.load(tiny_base)
    layout = FedAvg().layout(0, Layout(rank=2))
    clients = tiny_federation.clients
    return Site(
        partial(LanguageModel, backbone), dict.fromkeys(clients, layout), clients, TRAINING, 5, 6
    )


def a_client(site: Site, seed: int = 0) -> tuple[Client, Tensor, Tensor]:
    """A client, and two models that differ from the base and from one another."""
    client = site.client(next(iter(site.data)), {}, round_steps=2)
    draw = torch.Generator().manual_seed(seed)
    size = client.flat().shape
    return client, *(0.2 * torch.randn(size, generator=draw) for _ in range(2))


def naive(client: Client, values: Tensor, rows: Tensor) -> Tensor:
    """The probability of each token by a model of its own, on the base."""
    model = deepcopy(client.model)
    assert isinstance(model, LanguageModel)
    sizes = [p.numel() for p in model.parameters_by_role[GENERALIST].values()]
    parts = zip(model.parameters_by_role[GENERALIST].values(), values.split(sizes), strict=True)
    for parameter, part in parts:
        parameter.data = part.view_as(parameter)
    with torch.no_grad():
        return model(rows[:, :-1]).softmax(-1).gather(-1, rows[:, 1:, None]).flatten().double()


def test_mappers_gradients_are_those_of_the_mixtures_loss(rivals: ModuleType, site: Site) -> None:
    client, v, w = a_client(site)
    client.load({GENERALIST: v})
    batch, share = client.train.batch(0, 4), 0.3
    computed = rivals.joint_gradients(client, w, share, batch)

    def loss(of: Tensor, other: Tensor) -> float:
        mixture = share * naive(client, of, batch) + (1 - share) * naive(client, other, batch)
        return float(-mixture.log().mean())

    draw = torch.Generator().manual_seed(1)
    for k, gradient in enumerate(computed):
        towards = torch.randn(v.shape, generator=draw)
        towards /= towards.norm()
        step = 1e-2 * towards
        ends = [loss(v + s * step, w) if k == 0 else loss(v, w + s * step) for s in (1, -1)]
        assert float(gradient @ towards) == pytest.approx((ends[0] - ends[1]) / 2e-2, rel=0.02)


def test_mapper_sends_the_shared_model_alone_and_keeps_its_local_one(
    rivals: ModuleType, site: Site
) -> None:
    method, names = rivals.Mapper(rounds=3, local_steps=2), tuple(site.data)
    engine = InProcess(site, method)
    blueprint = Blueprint(
        partial(Adapter, site.model(names[0]).backbone.architecture), site.layouts, 5
    )
    state = method.init(blueprint, names)
    for done in range(3):
        step = method.round(state, names, torch.Generator())
        state = drive(step, lambda ask, phase, done=done: engine.answer(ask, done, phase))
    kept = engine.states()
    shared = torch.stack([kept[i]["mapper/shared"] for i in names]).mean(0)
    flat = torch.cat([t.flatten() for t in state.values()])
    torch.testing.assert_close(flat, shared)
    assert all(0 < float(kept[i]["mapper/weight"]) < 1 for i in names)
    assert all(not torch.equal(kept[i][KEY], kept[i]["mapper/shared"]) for i in names)
    client = site.client(names[0], dict(kept[names[0]]))
    of = {KEY: client.state[KEY]}
    more = {name: client.state[name] for name in rivals.PARTS}
    rows = client.test.take(np.arange(client.test.windows))
    share = float(more["mapper/weight"])
    expected = share * naive(client, of[KEY], rows) + (1 - share) * naive(
        client, more["mapper/shared"], rows
    )
    computed = rivals.text_losses(client, client.test, of, more)[: len(expected)]
    np.testing.assert_allclose(computed, expected.log(), rtol=1e-4)


def test_knn_per_weighs_all_pairs_as_written_out(rivals: ModuleType, site: Site) -> None:
    client, v, _ = a_client(site)
    keys, values = rivals.represented(client, client.train, {KEY: v})
    queries, targets = rivals.represented(client, client.test, {KEY: v})
    distances, numbers = rivals.nearest(queries, keys, 5)
    hits = values[numbers] == targets[:, None]
    said = rivals.neighbours_say(distances, hits, 3, 0.7)
    for t in range(0, len(targets), 7):
        pairs = sorted(
            (float((queries[t] - keys[s]).square().sum()), int(values[s])) for s in range(len(keys))
        )[:3]
        weights = [math.exp(-d / 0.7) for d, _ in pairs]
        hit = sum(w for w, (_, token) in zip(weights, pairs, strict=True) if token == targets[t])
        assert said[t] == pytest.approx(hit / sum(weights), abs=2e-3)


def test_knn_per_is_no_worse_than_the_shared_model_on_validation(
    rivals: ModuleType, site: Site
) -> None:
    client, v, _ = a_client(site)
    texts = rivals.knn_mixture(client, {KEY: v})
    alone = rivals.likelihoods(client, client.valid, {KEY: v})
    assert texts["valid"].mean() >= alone.mean() - 1e-9
    assert len(texts["test"]) == len(rivals.likelihoods(client, client.test, {KEY: v}))


def test_mixed_parameters_weigh_updates_and_are_either_model_at_the_ends(
    rivals: ModuleType, site: Site
) -> None:
    client, v, w = a_client(site)
    adapters = []
    for values in (v, w):
        with client.at(values, GENERALIST):
            adapters.append(client.read(GENERALIST))
    model, rows = client.model, client.test.take(np.arange(3))
    for share, values in ((1.0, v), (0.0, w)):
        one = rivals.stacked(model, *adapters, share)
        probabilities = one(rows[:, :-1]).softmax(-1).gather(-1, rows[:, 1:, None]).flatten()
        torch.testing.assert_close(
            probabilities.detach().double(), naive(client, values, rows), rtol=1e-4, atol=1e-7
        )
    block = rivals.stacked(model, *adapters, 0.3).adapter.blocks[0]
    x = torch.randn(7, model.backbone.architecture.d_model)
    frozen, outputs = model.backbone.mlps[0], []
    linear, updates = model.backbone.attentions[0].q_proj.base, []
    for values in (v, w):
        with client.at(values, GENERALIST):
            part = deepcopy(model.adapter.blocks[0])
        outputs.append(part.mlp(x, frozen))
        updates.append(part.attention["q_proj"](x, linear))
    for mixed, parts in (
        (block.mlp(x, frozen), outputs),
        (block.attention["q_proj"](x, linear), updates),
    ):
        torch.testing.assert_close(mixed, 0.3 * parts[0] + 0.7 * parts[1], rtol=1e-4, atol=1e-5)


def line(row: str, seed: int, **clients: float) -> dict[str, Any]:
    tests = {i: [0.0, loss] for i, loss in clients.items()}
    return {"federation": "f", "row": row, "seed": seed, "clients": tests}


def test_regret_is_against_the_best_other_row_on_the_mean_over_seeds(script: Any) -> None:
    lines = [
        line("local", 0, a=1.0, b=2.0),
        line("local", 1, a=1.2, b=2.0),
        line("fedavg", 0, a=1.2, b=1.0),
        line("fedavg", 1, a=1.4, b=1.0),
        line("mixture", 0, a=1.2, b=0.9),
        line("mixture", 1, a=1.1, b=0.9),
        line("other", 0, a=1.1, b=0.8),  # without the second seed it is compared on the first
    ]
    of = script.Table(lines, ("local", "fedavg", "mixture", "other"), ("local", "fedavg", "other"))
    regrets = of.regrets("f", "mixture", of.references)
    assert regrets["a"] == pytest.approx(100 * math.expm1(0.1))
    assert regrets["b"] == pytest.approx(100 * math.expm1(0.1))
    assert of.regrets("f", "mixture", ["local", "fedavg"]) == pytest.approx(
        {"a": 100 * math.expm1(0.05), "b": 100 * math.expm1(-0.1)}
    )
    assert of.mean("f", "fedavg") == pytest.approx(
        (math.exp(1.2) + math.exp(1.4) + 2 * math.exp(1.0)) / 4
    )
    assert "| local | 1 of 1 | 1 of 2 | 1 |" in of.against("mixture")
    assert "f/a" in of.summary()
