"""FedLEASE against its algorithm as a naive loop over models with ordinary routers, in which the
places of a client's own expert are experts with the same values.
"""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from sklearn.cluster import AgglomerativeClustering
from sklearn.metrics import silhouette_score
from text_runs import LR, NAMES, PLAIN, ROWS, Small
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.aggregation.clustering import cluster, silhouette
from coterie.data.federation import Federation
from coterie.methods.fedlease import FedLEASE
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

Values = dict[str, Tensor]  # attention LoRAs and one expert of a client, by name, and its router


@pytest.fixture(scope="module")
def backbone(tiny_base: Path) -> Backbone:
    return Backbone.load(tiny_base)


def layout(others: int) -> Layout:
    """Return M - 1 experts of others, and M places of the client's own."""
    return Layout(
        others, others + 1, rank=2, mlp_rank=2, top_k=others + 1, balance="none", alpha=16.0
    )


def trained(
    backbone: Backbone, run: Small, i: str, drawn: int, own: Values, others: list[Values]
) -> Values:
    """Return a client's values after two plain gradient steps; others' experts stay."""
    model = LanguageModel(backbone, layout(len(others)))
    parameters, own = dict(model.adapter.named_parameters()), dict(own)
    split = run.site.data[i].train
    for step in range(2):
        for name, p in parameters.items():
            if "generalist" in name:
                place = name.replace("generalist", "specialist")
                p.data = torch.cat([expert[place] for expert in others])
            else:
                p.data = own[name].expand(p.shape).clone() if "specialist" in name else own[name]
        batch = split.batch(drawn + step * ROWS, ROWS)
        names = [n for n in parameters if "generalist" not in n]
        gradients = torch.autograd.grad(
            cross_entropy(*model.predicted(batch)), [parameters[n] for n in names]
        )
        for name, gradient in zip(names, gradients, strict=True):
            total = gradient.sum(dim=0, keepdim=True) if "specialist" in name else gradient
            own[name] = own[name] - LR * total
    return own


def values_of(run: Small, i: str, start: bool = False) -> Values:
    """Return a client's own tensors by name."""
    client = run.client(i)
    if start:
        client.load({name: run.server[name] for name in ("generalist", "specialist", "router")})
    named = client.model.adapter.named_parameters()  # type: ignore[attr-defined]
    return {n: t.detach().clone() for n, t in named if "mlp.generalist" not in n}


def distance(one: Values, two: Values) -> float:
    """Return the mean over matrices B of one minus the cosine."""
    names = [n for n in one if n.endswith("specialist.up.B") or n.endswith("specialist.down.B")]
    cosines = [float((one[n] * two[n]).sum() / one[n].norm() / two[n].norm()) for n in names]
    assert len(cosines) >= 2
    return 1 - sum(cosines) / len(cosines)


def mean(values: list[Values], part: str) -> Values:
    return {n: sum(v[n] for v in values) / len(values) for n in values[0] if part in n}  # type: ignore[misc]


def test_fedlease_trains_one_expert_a_cluster_beside_the_others(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """The two nearest of three clients are one cluster."""
    method = FedLEASE(rounds=4, local_steps=2, experts=3, alone=0.5)
    run = Small(method, backbone, tiny_federation, PLAIN)
    clients = dict.fromkeys(NAMES, values_of(run, "ann", start=True))
    start, drawn = clients["ann"], 0
    for _ in range(2):
        alone = {
            i: trained(
                backbone, run, i, drawn, {n: t for n, t in v.items() if "router" not in n}, []
            )
            for i, v in clients.items()
        }
        clients, drawn = alone, drawn + 2 * ROWS
        run.round()
    near = min(combinations(NAMES, 2), key=lambda pair: distance(*(clients[i] for i in pair)))
    groups = [near, tuple(i for i in NAMES if i not in near)]
    experts = [mean([clients[i] for i in group], "specialist") for group in groups]
    # one place of the one other cluster, two of its own; the others are for a third cluster
    routers = [{n: t[[0, 2, 3]] for n, t in start.items() if "router" in n}] * 2
    for _ in range(2):
        attention = mean(list(clients.values()), "attention")
        for k, group in enumerate(groups):
            for i in group:
                own = attention | experts[k] | routers[k]
                clients[i] = trained(backbone, run, i, drawn, own, [experts[1 - k]])
        drawn += 2 * ROWS
        run.round()
        routers = [mean([clients[i] for i in group], "router") for group in groups]
        experts = [mean([clients[i] for i in group], "specialist") for group in groups]
        for i, naive in clients.items():
            for name, tensor in values_of(run, i).items():
                ours = tensor[[0, 2, 3]] if "router" in name else tensor
                off = (ours - naive[name]).norm()
                assert off <= 1e-4 * naive[name].norm() + 1e-7, f"{i}, {name}: {off}"
    row = run.method.collaboration(run.server, NAMES)
    assert row is not None
    assert row[NAMES.index(near[0])].tolist() == [0.5 if i in near else 0.0 for i in NAMES]


def test_a_kept_model_has_an_ordinary_router(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """Before and after clustering it predicts what the client's own did."""
    method = FedLEASE(rounds=2, local_steps=3, experts=3, alone=0.5)
    run = Small(method, backbone, tiny_federation)
    for experts in (1, 3):
        run.round()
        model = run.client("ben").model
        assert isinstance(model, LanguageModel)
        kept_layout, tensors = model.settled()
        assert kept_layout.experts == experts
        kept = LanguageModel(backbone, kept_layout)
        kept.adapter.load_state_dict(tensors)
        ids = torch.arange(1, 9)[None]
        torch.testing.assert_close(kept(ids), model(ids), rtol=1e-4, atol=1e-5)


def test_who_comes_late_joins_the_nearest_cluster(
    backbone: Backbone, tiny_federation: Federation
) -> None:
    """Cleo trains alone in the second round, and no expert changes by it."""
    run = Small(FedLEASE(rounds=3, local_steps=2, alone=0.3), backbone, tiny_federation, PLAIN)
    run.round(("ann", "ben"))
    before = dict(run.server)
    run.round(("cleo",))
    assert [int(run.server[f"{i}/cluster"]) for i in ("ann", "ben")] == [0, 1]
    changed = {n for n, t in run.server.items() if not torch.equal(t, before[n])}
    assert changed == {"cleo/cluster", "round"}
    sizes = run.server["sizes"].tolist()
    own = torch.split(values_flat(run, "cleo"), sizes)[1::2]
    distances = []
    for c in range(2):
        theirs = torch.split(run.server[f"expert/{c}"], sizes)[1::2]
        cosines = [float(a @ b / a.norm() / b.norm()) for a, b in zip(own, theirs, strict=True)]
        distances.append(1 - sum(cosines) / len(cosines))
    assert int(run.server["cleo/cluster"]) == distances.index(min(distances))


def values_flat(run: Small, i: str) -> Tensor:
    return torch.cat([t.flatten() for n, t in values_of(run, i).items() if "specialist" in n])


@pytest.mark.parametrize("seed", range(5))
def test_clusters_are_those_of_scikit_learn(seed: int) -> None:
    torch.manual_seed(seed)
    points = torch.randn(9, 3, dtype=torch.float64) + 3 * torch.randn(4, 3).repeat(3, 1)[:9]
    distances = torch.cdist(points, points)
    best: tuple[float, set[frozenset[int]]] = (-1.0, set())
    for k in range(2, 7):
        linked = AgglomerativeClustering(k, metric="precomputed", linkage="average")
        labels = linked.fit_predict(distances.numpy())
        score = float(silhouette_score(distances.numpy(), labels, metric="precomputed"))
        ours = float(silhouette(distances, torch.from_numpy(labels)))
        assert ours == pytest.approx(score, abs=1e-9)
        if score > best[0]:
            best = score, sets(torch.from_numpy(labels))
    labels = cluster(distances, 6)
    assert sets(labels) == best[1]
    assert list(dict.fromkeys(labels.tolist())) == list(range(len(best[1])))


def sets(labels: Tensor) -> set[frozenset[int]]:
    return {frozenset((labels == k).nonzero()[:, 0].tolist()) for k in labels.unique()}


def test_fewer_clients_than_a_silhouette_needs() -> None:
    assert cluster(torch.zeros(1, 1, dtype=torch.float64), 4).tolist() == [0]
    assert cluster(torch.ones(2, 2, dtype=torch.float64), 4).tolist() == [0, 1]
    assert replace(FedLEASE(), experts=2).layout(0, Layout()).experts == 2
