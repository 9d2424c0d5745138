"""DDOME with a shared model against its parts alone and a naive mixture; what it does not read."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

import coterie
from coterie.adapt.new_client import adapt
from coterie.client.site import CENTRE, WEIGHTS, ClientOfParts
from coterie.core.errors import RecipeError
from coterie.core.protocol import drive
from coterie.core.roles import GATE
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, under
from coterie.data.federation import ClientData
from coterie.methods import Method
from coterie.methods.pool_choice import ChosenPool
from coterie.methods.pools import SCORES, chosen_experts
from coterie.methods.section import build_method
from coterie.models.artifact import read_mixture
from coterie.personal.classifier import ClassifierMixture
from coterie.runs.problems.prepare import prepare
from coterie.testing import World
from coterie.testing.run import Run, pictures

POOL = {"name": "ddome", "pool": 3, "coverage": 0.8}


def shared(**fields: Any) -> Method:
    settings = {"rounds": 3, "local_steps": 2, "parts": [POOL, "fedavg"]}
    return build_method({"name": "ddome-shared"} | settings | fields)


def test_each_part_is_that_method_alone_bit_for_bit() -> None:
    method = shared()
    world = pictures().one_by_one
    together = Run(method, world)
    alone = {name: Run(part, world) for name, part in method.methods.items()}
    for _ in range(method.rounds):
        together.rounds(1)
        for name, run in alone.items():
            server, states = under(name, together.server), together.engine.states()
            run.rounds(1)
            assert_same(server, run.server)
            for i in run.clients:
                assert_same(under(name, states[i]), run.engine.states()[i])


def assert_same(one: Tensors, other: Tensors) -> None:
    for name, tensor in other.items():
        if not name.startswith("embeddings/"):  # which are scored in between
            assert torch.equal(one[name], tensor), name


@pytest.mark.parametrize(
    ("scores", "share", "experts"),
    [
        ([0.7, 0.1, 0.2], 0.7, [0]),
        ([0.7, 0.1, 0.2], 0.75, [0, 2]),
        ([0.7, 0.1, 0.2], 1.0, [0, 1, 2]),
        ([0.25, 0.25, 0.5], 0.7, [0, 2]),
        ([1e-9, 5.0, 0.0], 0.9, [1]),
    ],
)
def test_coverage_takes_as_few_experts_as_have_the_share_of_the_scores(
    scores: list[float], share: float, experts: list[int]
) -> None:
    replies = {"ann": {SCORES: torch.tensor(scores, dtype=torch.float64)}}
    assert chosen_experts(replies, 2, coverage=share) == {"ann": experts}


def naive_shares(p: Tensor, prior: float) -> Tensor:
    """Class frequencies by plain EM, from (n, classes) probabilities, under an even prior."""
    shares = torch.full((p.shape[1],), 1 / p.shape[1], dtype=torch.float64)
    for _ in range(5000):
        posterior = p * shares / (p * shares).sum(dim=1, keepdim=True)
        shares = (posterior.sum(dim=0) + prior / p.shape[1]) / (len(p) + prior)
    return shares


def networks(site: Any, state: Tensors, i: str, split: str) -> list[Tensor]:
    """(n, classes) probabilities of a split by DDOME's experts for a client, and by FedAvg's
    model: Algorithm 1's choice, with K by the mass of the gate, written out for one sample.
    """
    pooled, plain = under("ddome", state), under("fedavg", state)
    one = site.part("ddome").client(i, {})
    one.load({"gate": pooled["gate"]})
    scores = {
        name: one.model._logits(one.embeddings(getattr(one.data, name))).softmax(dim=1).double()
        for name in (split, "train" if split == "valid" else "test")
    }
    mass = scores["train" if split == "valid" else "test"].sum(dim=0)
    falling, chosen = sorted(range(len(mass)), key=lambda m: -float(mass[m].detach())), list[int]()
    while not chosen or float(mass[chosen].sum()) < 0.8 * float(mass.sum()):
        chosen.append(falling[len(chosen)])
    rows = []
    for n, batch in enumerate(getattr(one.data, split).scoring(1)):
        best = max(chosen, key=lambda m: float(scores[split][n, m]))
        one.load({f"expert/{best}": pooled[f"expert/{best}"]})
        rows.append(one.model.experts[0].network(batch.x)[0].softmax(dim=0).double())
    two = site.part("fedavg").client(i, {})
    two.load(plain)
    batch = getattr(two.data, split)
    x = batch.take(np.arange(batch.windows)).x
    return [torch.stack(rows).detach(), two.model.network(x).softmax(dim=1).double().detach()]


def adjusted(p: Tensor, shares: Tensor) -> Tensor:
    return p * shares / (p * shares).sum(dim=1, keepdim=True)


def test_scores_and_weights_are_those_of_a_naive_mixture() -> None:
    method, world = shared(), pictures()
    run = Run(method, world).rounds(method.rounds)
    grid = [(k / 20, 1 - k / 20) for k in range(21)]
    evidence = dict.fromkeys(grid, 0.0)
    even = torch.tensor([0.5, 0.5]).double()
    for i in run.clients:
        train = training_networks(run, i)
        shares = naive_shares(sum(w * p for w, p in zip(even, train, strict=True)), 1.0)
        valid = world.federation.clients[i].valid
        labels = valid.take(np.arange(valid.windows)).y
        parts = [adjusted(p, shares) for p in networks(run.site, run.server, i, "valid")]
        right = [p[torch.arange(len(p)), labels] for p in parts]
        for a, b in grid:
            evidence[a, b] += float((a * right[0] + b * right[1]).log().sum())
    top = max(evidence.values())
    posterior = {mixture: math.exp(of - top) for mixture, of in evidence.items()}
    total = sum(posterior.values())
    centre = [sum(m[k] * of for m, of in posterior.items()) / total for k in (0, 1)]
    torch.testing.assert_close(run.server[CENTRE].tolist(), centre, rtol=0, atol=0.02)

    models, weights = run.models(), run.server[CENTRE]
    for i in run.clients:
        reply, _ = run.site.answer(method, "score", i, dict(models[i]), {}, run.round, -1)
        parts = networks(run.site, run.server, i, "test")
        shares = naive_shares(sum(w * p for w, p in zip(weights, parts, strict=True)), 1.0)
        mixed = sum(w * adjusted(p, shares) for w, p in zip(weights, parts, strict=True))
        test = world.federation.clients[i].test
        labels = test.take(np.arange(test.windows)).y
        nll = -mixed[torch.arange(len(labels)), labels].log().sum()
        correct = (mixed.argmax(dim=1) == labels).sum()
        expected = torch.stack([nll, torch.tensor(len(labels)), correct]).double()
        torch.testing.assert_close(reply["test"], expected, rtol=1e-3, atol=1e-3)
        assert torch.equal(reply[WEIGHTS], weights)


def training_networks(run: Run, i: str) -> list[Tensor]:
    """As `networks`, of all training data."""
    data: Any = run.site.data[i]
    as_valid = ClientData(i, data.train, replace(data.train, name="valid"), data.test)
    site = replace(run.site, data={**run.site.data, i: as_valid}, models={}, _parts={}, _known={})
    return networks(site, run.server, i, "valid")


def relabelled(world: World) -> World:
    """The same clients, with other labels of their validation and test data."""

    def other(split: Any) -> Any:
        return replace(split, labels=(split.labels + 3) % 10)

    clients = {
        i: ClientData(i, data.train, other(data.valid), other(data.test))
        for i, data in world.federation.clients.items()
    }
    return world.among(clients)


def test_a_client_without_labels_is_served_without_reading_any_and_one_with_fits_to_them() -> None:
    for labelled in (False, True):
        method = shared(labelled=labelled)
        run = Run(method, pictures()).rounds(method.rounds)
        models, downloads = run.models(), []
        for world in (pictures(), relabelled(pictures())):
            site = replace(run.site, data=world.federation.clients, models={}, _parts={})
            replies = {}
            for i in run.clients:
                reply, _ = site.answer(method, "score", i, dict(models[i]), {}, run.round, -1)
                replies[i] = reply
            downloads.append(replies)
        one, other = downloads
        for i in run.clients:
            same = torch.equal(one[i][WEIGHTS], other[i][WEIGHTS])
            assert same != labelled
            assert not torch.equal(one[i]["test"], other[i]["test"])


def test_clients_that_trained_choose_experts_by_their_training_data() -> None:
    """For the weights that fit all, which must not depend on their test data."""
    device = {"name": "ddome", "pool": 5, "top_k": 1, "choice": "device"}
    method = build_method(device | {"aggregation": {"weighting": "uniform"}})
    assert isinstance(method, ChosenPool)
    run, chosen = Run(method, pictures()), {True: list[Any](), False: list[Any]()}
    gate = torch.randn(run.server[GATE].shape, generator=torch.Generator().manual_seed(0))
    for trained, of in chosen.items():
        adaptation = method.adapt(run.server | {GATE: gate}, run.clients, trained=trained)
        for i, download in drive(adaptation, lambda ask, phase: {}).items():
            client = run.site.client(i, {})
            task = method.score_experts if trained else method.score_experts_unlabelled
            of.append(numbers_of_experts(method.loadable(client, dict(download))))
            assert of[-1] == [int(task(client, {GATE: gate})[SCORES].argmax())]
    assert chosen[True] != chosen[False]


def test_frequencies_can_be_left_out() -> None:
    method = shared(frequencies=None)
    run = Run(method, pictures()).rounds(method.rounds)
    models = run.models()
    client = run.client("ann")
    assert isinstance(client, ClientOfParts)
    assert method.loadable(client, models["ann"]) is models["ann"]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="parts: local has no model for new clients"):
        shared(parts=[POOL, "local"])
    with pytest.raises(ValueError, match="coverage"):
        shared(parts=[POOL | {"coverage": 1.5}, "fedavg"])
    recipe = coterie.Recipe.load("ddome-digits").with_method("fedavg")
    parts = {"name": "ddome-shared", "parts": [{"name": "ddome", "coverage": 0.8}, "fedsr"]}
    with pytest.raises(RecipeError, match=r"method.frequencies.*no constants; use null"):
        prepare(recipe.model_copy(update={"method": parts}))


@pytest.mark.parametrize("choice", ["server", "device"])
def test_a_newcomer_ends_with_a_personal_model_that_scores_as_the_run_said(
    choice: str, tmp_path: Path
) -> None:
    mean = {"weighting": "uniform"}
    pool = {"name": "ddome", "coverage": 0.8, "choice": choice, "aggregation": mean}
    coterie.run(
        "ddome-digits",
        out=tmp_path / "run",
        data={"clients": 8, "anchors": 5, "unseen": {"aligned": 2, "random": 2}, "public": 100},
        method={
            "name": "ddome-shared",
            "parts": [pool, "fedavg"],
            "rounds": 6,
            "local_epochs": 1,
        },
        participation={"anchors": 5, "clients": 5},
        compare_with=[],
    )
    run = tmp_path / "run"
    clients = json.loads((run / "result.json").read_text())["clients"]
    unseen = prepare(coterie.Recipe.load(run / "recipe.yaml")).problem.federation.unseen
    (i, data), *_ = unseen["random"].items()
    batch = data.test.take(np.arange(data.test.windows))
    model = coterie.load(run, i)
    assert isinstance(model, ClassifierMixture)
    accuracy = 100 * float((model(batch.x).argmax(dim=1) == batch.y).double().mean())
    assert abs(accuracy - clients[i]["test"]) < 1e-6
    weights = dict(read_mixture(run / "clients" / i).weights)
    assert math.isclose(sum(weights.values()), 1)
    assert {name: of["weight"] for name, of in clients[i]["parts"].items()} == weights

    folder = tmp_path / "pictures"  # the same images as those that the run scored
    folder.mkdir()
    for n, x in enumerate(batch.x[:, 0] * 0.376 + 0.3053):
        Image.fromarray((x.clamp(0, 1) * 255).byte().numpy()).save(folder / f"{n:03}.png")
    adapted = adapt(run, folder, "newcomer")
    assert isinstance(adapted.model, ClassifierMixture)
    assert dict(read_mixture(adapted.folder).weights) == weights
    again = 100 * float((adapted.model(batch.x).argmax(dim=1) == batch.y).double().mean())
    assert abs(again - accuracy) < 3  # pixels are rounded in a file
    mass = sorted(adapted.scores, reverse=True)
    k = len(adapted.model.parts["ddome"].experts)
    assert sum(mass[: k - 1]) < 0.8 <= sum(mass[:k])
    assert len(adapted.experts) == (k if choice == "server" else 5)


def test_nothing_of_a_round_in_which_nobody_answers_is_lost() -> None:
    method = shared()
    run = Run(method, pictures()).rounds(method.rounds)
    after = drive(method.finish(run.server, run.clients), lambda ask, phase: {})
    assert torch.equal(after[CENTRE], run.server[CENTRE])
