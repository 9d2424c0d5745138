"""Language methods that others compare with, each against its algorithm as a naive loop in which
gradients are autograd's and means are written out.
"""

from pathlib import Path

import pytest
from text_runs import NAMES, PLAIN, Naive, Small

from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.methods.fedalt import FedALT
from coterie.models.backbone import Backbone


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
    """In the second round ben is away, so that in the third he gets the mean of all that sent."""
    run = Small(FedALT(rounds=4, local_steps=2, balance="none"), backbone, tiny_federation, PLAIN)
    clients = {i: Naive(run, i) for i in NAMES}
    sent: dict[str, Tensors] = {}
    for present in (NAMES, ("ann", "cleo"), NAMES, NAMES):
        attention = {i: naive.named("attention") for i, naive in clients.items() if i in sent}
        for i in present:
            others = [tensors for j, tensors in sent.items() if j != i]
            if others:
                row = {n.replace("specialist", "generalist"): t for n, t in mean(others).items()}
                clients[i].load(row | mean(list(attention.values())))
        for i in present:
            clients[i].steps(2, ("attention", "specialist", "router"))
        sent = {i: clients[i].named("specialist") for i in present}
        run.round(present)
        close(run, clients)


def test_fedalt_needs_others(backbone: Backbone, tiny_federation: Federation) -> None:
    """One client alone keeps the generalist that changes nothing."""
    run = Small(FedALT(rounds=2, local_steps=1), backbone, tiny_federation)
    run.round(("ann",))
    run.round(("ann",))
    rest = run.client("ann").model.adapter.named_parameters()  # type: ignore[attr-defined]
    assert all(not t.any() for n, t in rest if "generalist" in n and n.endswith("B"))
