"""FedAMoLE against its algorithm as a naive loop on a Llama of transformers, in which every expert
is a whole MLP, tokens choose one by one, and of all choices of clients the best is taken.
"""

import json
import math
import random
from collections.abc import Mapping
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from text_runs import LR, NAMES, PLAIN, ROWS, Small
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu
from transformers import AutoModelForCausalLM

import coterie
from coterie.aggregation.clustering import affinities, best_choices
from coterie.core.errors import RecipeError, Refused
from coterie.data.federation import Federation
from coterie.export.frame import Source
from coterie.methods.fedamole import FedAMoLE
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

Values = dict[str, Tensor]  # by the adapter's names, or by `<expert>/<layer>` of a pool's expert
GAMMA, RANK, WEIGHT = 16 / math.sqrt(2), 2, 0.5
BLOCKS, EXPERTS, PLACES = 2, 4, 3
LAYERS = [f"{layer}.{matrix}" for layer in ("gate", "up", "down") for matrix in "AB"]


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


class NaiveMLP(nn.Module):
    """The mixture of one block, of one client at a time."""

    values: Values  # of the shared expert, and its router's
    experts: list[Values]  # that the client holds

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base

    def expert(self, x: Tensor, values: Values) -> Tensor:
        W = {
            n: getattr(self.base, f"{n}_proj").weight + GAMMA * values[f"{n}.B"] @ values[f"{n}.A"]
            for n in ("gate", "up", "down")
        }
        return (silu(x @ W["gate"].T) * (x @ W["up"].T)) @ W["down"].T

    def forward(self, x: Tensor) -> Tensor:
        self.inputs = x.flatten(0, -2)
        shared, *others = [self.expert(self.inputs, v) for v in (self.values, *self.experts)]
        token = self.inputs @ self.values["router.weight"].T
        logits = torch.stack(
            [
                (self.inputs @ v["gate.A"].T * token).sum(dim=1) / math.sqrt(RANK)
                for v in self.experts
            ]
        )
        self.P, uses = logits.softmax(dim=0).mean(dim=1), torch.zeros(len(self.experts))
        rows = []
        for t, row in enumerate(logits.T):
            best = sorted(range(len(row)), key=lambda j: -float(row[j].detach()))[:2]
            uses[best] += 1
            weights = row[best].softmax(dim=0)
            mixed = sum(w * others[j][t] for w, j in zip(weights, best, strict=True))
            rows.append((shared[t] + mixed) / 2)
        self.balance = (1 + PLACES) * (uses / len(rows) * self.P).sum()
        return torch.stack(rows).view_as(x)


class NaiveModel:
    """The base with whole weights in place of updates."""

    def __init__(self, base: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model.requires_grad_(False)
        self.mlps = [NaiveMLP(layer.mlp) for layer in self.model.model.layers]
        for layer, mlp in zip(self.model.model.layers, self.mlps, strict=True):
            layer.mlp = mlp

    def logits(self, ids: Tensor, shared: Values, experts: list[list[Values]]) -> Tensor:
        weights = dict(self.model.named_parameters())
        changed = {}
        for b, mlp in enumerate(self.mlps):
            start = f"blocks.{b}.mlp."
            mine = {n.removeprefix(start): t for n, t in shared.items() if n.startswith(start)}
            mlp.values = {n.removeprefix("generalist."): t.squeeze(0) for n, t in mine.items()}
            mlp.experts = experts[b]
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                A, B = (shared[f"blocks.{b}.attention.{name}.{m}"][0] for m in "AB")
                path = f"model.layers.{b}.self_attn.{name}.weight"
                changed[path] = weights[path] + GAMMA * B @ A
        return torch.func.functional_call(self.model, changed, (ids,)).logits

    def train(self, batch: Tensor, shared: Values, experts: list[list[Values]]) -> None:
        """Take one plain gradient step, in place."""
        every = [shared, *(v for block in experts for v in block)]
        for values in every:
            values.update({n: t.detach().requires_grad_() for n, t in values.items()})
        logits = self.logits(batch[:, :-1], shared, experts)
        loss = cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss = loss + WEIGHT * sum(mlp.balance for mlp in self.mlps) / BLOCKS
        flat = [t for values in every for t in values.values()]
        gradients = iter(torch.autograd.grad(loss, flat))
        for values in every:
            values.update({n: t.detach() - LR * next(gradients) for n, t in values.items()})


def unpacked(flat: Tensor, like: Mapping[str, Tensor]) -> Values:
    parts = torch.split(flat, [t.numel() for t in like.values()])
    return {n: p.view_as(t).clone() for (n, t), p in zip(like.items(), parts, strict=True)}


def best_of_all(scores: Tensor) -> np.ndarray:
    """The best of all ways in which each expert chooses two clients, which hold two or three."""
    pairs = [np.array(row) for row in ((1, 1, 0), (1, 0, 1), (0, 1, 1))]
    ways = [np.stack(way) for way in product(pairs, repeat=EXPERTS)]
    possible = [w for w in ways if w.sum(axis=0).min() >= 2 and w.sum(axis=0).max() <= PLACES]
    probabilities = scores.softmax(dim=1).numpy()
    return max(possible, key=lambda way: float((probabilities * way).sum()))


def mean(values: list[Values]) -> Values:
    return {n: sum(v[n] for v in values) / len(values) for n in values[0]}  # type: ignore[misc]


def test_experts_choose_clients_and_are_averaged_over_them(
    tiny_base: Path, backbone: Backbone, tiny_federation: Federation
) -> None:
    method = FedAMoLE(
        rounds=3, local_steps=2, experts=EXPERTS, most_experts=PLACES, balance_weight=WEIGHT,
        embedded=5,
    )  # fmt: skip
    run, naive = Small(method, backbone, tiny_federation, PLAIN), NaiveModel(tiny_base)
    adapter = dict(run.blueprint.trainable(method.layout(0, Layout(rank=RANK))).named_parameters())
    shapes = {role: {n: t for n, t in adapter.items() if role in n} for role in ("router",)}
    shapes["generalist"] = {
        n: t for n, t in adapter.items() if "specialist" not in n and "router" not in n
    }
    like = {n: adapter[f"blocks.0.mlp.specialist.{n}"][0] for n in LAYERS}
    shared = unpacked(run.server["generalist"], shapes["generalist"])
    shared |= unpacked(run.server["router"], shapes["router"])
    pool = [
        [unpacked(run.server[f"expert/{m * BLOCKS + b}"], like) for m in range(EXPERTS)]
        for b in range(BLOCKS)
    ]
    assert not torch.equal(pool[0][0]["up.A"], pool[0][1]["up.A"])
    scores, counts = torch.rand(BLOCKS, EXPERTS, 3, generator=torch.Generator()), set()
    for done in range(3):
        held = [best_of_all(block) for block in scores]  # (experts, clients) each
        replies, sums = [], torch.zeros(BLOCKS, EXPERTS, RANK, dtype=torch.float64)
        tokens = torch.zeros(BLOCKS, 3, RANK, dtype=torch.float64)
        for k, i in enumerate(NAMES):
            mine = dict(shared)
            numbers = [[m for m in range(EXPERTS) if held[b][m, k]] for b in range(BLOCKS)]
            counts |= {len(block) for block in numbers}
            experts = [[dict(pool[b][m]) for m in numbers[b]] for b in range(BLOCKS)]
            split = run.site.data[i].train
            for step in range(2):
                drawn = (2 * done + step) * ROWS
                naive.train(torch.as_tensor(split.batch(drawn, ROWS)), mine, experts)
            replies.append((mine, numbers, experts))
            rows = np.linspace(0, split.windows - 1, 5).astype(np.int64)
            with torch.no_grad():
                naive.logits(torch.as_tensor(split.take(rows))[:, :-1], mine, experts)
            for b, mlp in enumerate(naive.mlps):
                tokens[b, k] = (mlp.inputs @ mine[f"blocks.{b}.mlp.router.weight"].T).mean(dim=0)
                for m, values in zip(numbers[b], experts[b], strict=True):
                    sums[b, m] += (mlp.inputs @ values["gate.A"].T).mean(dim=0)
        run.round()
        shared = mean([mine for mine, _, _ in replies])
        for b, m in product(range(BLOCKS), range(EXPERTS)):
            of = [e[b][n[b].index(m)] for _, n, e in replies if m in n[b]]
            pool[b][m] = mean(of)
        near(run.server["generalist"], [shared[n] for n in shapes["generalist"]])
        near(run.server["router"], [shared[n] for n in shapes["router"]])
        for b, m in product(range(BLOCKS), range(EXPERTS)):
            near(run.server[f"expert/{m * BLOCKS + b}"], list(pool[b][m].values()))
        embedded = sums / torch.from_numpy(np.stack(held)).sum(dim=2)[..., None]
        scores = torch.einsum("bmr,bkr->bmk", embedded, tokens) / math.sqrt(RANK)
        for b, k in product(range(BLOCKS), range(3)):
            ours = run.server[f"{NAMES[k]}/held"][:, b].numpy()
            np.testing.assert_array_equal(ours, best_of_all(scores[b])[:, k] > 0)
    assert counts == {2, 3}


def near(ours: Tensor, theirs: list[Tensor]) -> None:
    naive = torch.cat([t.flatten() for t in theirs])
    assert (ours - naive).norm() <= 1e-4 * naive.norm() + 1e-7


def test_a_kept_model_has_only_the_experts_of_its_client(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """It predicts what the client's own does, though one block has fewer experts than the other."""
    method = FedAMoLE(rounds=2, local_steps=3, experts=EXPERTS, most_experts=PLACES)
    run = Small(method, backbone, tiny_federation)
    run.round()
    ids, held = torch.arange(1, 9)[None], set()
    for i in NAMES:
        model = run.client(i).model
        assert isinstance(model, LanguageModel)
        layout, tensors = model.settled()
        held.add(layout.held)
        kept = LanguageModel(backbone, layout)
        kept.adapter.load_state_dict(tensors)
        torch.testing.assert_close(kept(ids), model(ids))
        assert kept.routing(ids).sum(dim=-1).allclose(torch.ones(()))
    assert any(len(set(counts)) > 1 for counts in held)


@pytest.mark.parametrize("seed", range(4))
def test_choices_are_the_best_of_all(seed: int) -> None:
    scores = torch.randn(EXPERTS, 3, generator=torch.Generator().manual_seed(seed)).softmax(dim=1)
    ours = best_choices(scores, 2, PLACES, 2).numpy()
    np.testing.assert_array_equal(ours, best_of_all(scores.log()))
    crowded = best_choices(scores, 2, 1)  # room for three of eight
    assert crowded.sum(dim=0).tolist() == [1, 1, 1]


def test_an_expert_s_embedding_is_the_mean_over_those_that_hold_it() -> None:
    """Of four experts in two blocks one, two, three and no clients hold them."""
    torch.manual_seed(0)
    held = [torch.tensor([[k < n] * BLOCKS for n in (1, 2, 3, 0)]) for k in range(3)]
    embeddings = [torch.randn(BLOCKS, 1 + PLACES, RANK).double() for _ in held]
    ours = affinities(held, embeddings)
    for b, m, i in product(range(BLOCKS), range(EXPERTS), range(3)):
        rows = []
        for mask, means in zip(held, embeddings, strict=True):
            numbers = mask[:, b].nonzero()[:, 0].tolist()
            rows += [means[b, 1 + numbers.index(m)].numpy()] if m in numbers else []
        expert = np.mean(rows, axis=0) if rows else np.zeros(RANK)
        expected = expert @ embeddings[i][b, 0].numpy() / math.sqrt(RANK)
        assert float(ours[b, m, i]) == pytest.approx(float(expected))
    endless = affinities(held, [embeddings[0] * 1e308, *embeddings[1:]])  # one client lies
    assert bool(endless.isfinite().all())


def test_too_few_experts_are_refused(backbone: Backbone, tiny_federation: Federation) -> None:
    run = Small(FedAMoLE(experts=2), backbone, tiny_federation)
    with pytest.raises(RecipeError, match=r"method\.experts: 2 that choose 2 of 3.*at least 3"):
        run.method.check(run.blueprint, NAMES, PLAIN)


def test_a_run_is_loaded_and_what_cannot_hold_its_router_says_so(
    tiny_base: Path, tmp_path: Path
) -> None:
    for name, words in (("ann", "the tea is hot"), ("ben", "a train on the bridge")):
        draw, folder = random.Random(name), tmp_path / "clients" / name
        folder.mkdir(parents=True)
        texts = (" ".join(draw.choices(words.split(), k=12)) for _ in range(80))
        (folder / "text.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    method = {"name": "fedamole", "rounds": 1, "local_steps": 2, "experts": 3}
    settings = {"model.base": str(tiny_base), "data.path": str(tmp_path / "clients")}
    settings |= {"method": method, "compare_with": [], "model.context": 16, "words": None}
    run = coterie.run("folders", out=tmp_path / "run", **settings).folder
    model = coterie.load(run, "ann")
    assert model.layout.projected
    assert len(model.generate("the tea is", max_new_tokens=4)) > 0
    assert len(model.next_words("the tea ", k=2)) == 2
    with pytest.raises(Refused, match="ann: no format holds a router of projections"):
        Source(run, "ann").load()
    together, ids = coterie.load_many(run), torch.arange(1, 9).repeat(2, 1)
    both = together(ids, ["ben", "ann"]).logits
    for row, i in enumerate(("ben", "ann")):
        alone = together.models[i]
        torch.testing.assert_close(both[row], alone(ids[:1]).logits[0])
        torch.testing.assert_close(both[row], alone.language(ids[:1])[0], rtol=1e-4, atol=1e-4)
    words = together.next_words("the tea ", k=2)
    assert len(words["ann"][0].experts) == len(model.experts)
