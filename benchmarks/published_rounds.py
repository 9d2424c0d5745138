"""One aggregation of published code and of ours from the same tensors.

    python benchmarks/published_rounds.py flora FOLDER

FOLDER is a checkout of the published code, of which nothing is copied: ATP-1010/FederatedLLM for
flora, lei-wang-link/FedLEASE for fedlease, without its pictures. Prints the largest difference of
updates, relative to the largest update.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

from coterie.aggregation.lowrank import TOKENS, added, shares_of
from coterie.core.tensor_names import of_client, of_expert
from coterie.core.tensors import Tensors
from coterie.methods.fedlease import CLUSTER, FedLEASE

RANKS, ROWS, IN, OUT = (4, 2, 3), (30, 50, 20), 12, 10


def module(path: Path) -> Any:
    """Return a file of the published code as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def replies() -> dict[str, Tensors]:
    """Return trained factors of clients of unlike ranks, with the scale 1."""
    torch.manual_seed(0)
    return {
        str(k): {
            "m/A": torch.randn(1, rank, IN),
            "m/B": torch.randn(1, OUT, rank),
            TOKENS: torch.tensor(rows),
        }
        for k, (rank, rows) in enumerate(zip(RANKS, ROWS, strict=True))
    }


def flora(folder: Path) -> float:
    """Compare the sum of products with the product of the published code's stacks."""
    sent = replies()
    ours = added(sent, {"m/W": torch.zeros(OUT, IN)}, shares_of(sent))["m/W"]
    with tempfile.TemporaryDirectory() as output:
        for k, reply in sent.items():
            place = Path(output, "0", f"local_output_{k}")
            place.mkdir(parents=True)
            named = {"lora_A": reply["m/A"][0], "lora_B": reply["m/B"][0]}
            torch.save(named, place / "pytorch_model.bin")
        published = module(folder / "fed_utils" / "model_aggregation.py")
        rows = dict(enumerate(ROWS))
        published.FedAvg(
            None, list(rows), output, rows, 0, True, max(RANKS), True, list(RANKS), False, False
        )
        stacks = torch.load(Path(output, "0", "adapter_model.bin"))
    theirs = stacks["lora_B"] @ stacks["lora_A"]
    return float((ours - theirs).abs().max() / theirs.abs().max())


def fedlease(folder: Path) -> float:
    """Compare the clusters of five clients by the B of two projections in four layers, and the
    means of their experts and routers.
    """
    for name in ("matplotlib", "matplotlib.pyplot"):  # it draws its clusters
        sys.modules[name] = MagicMock()
    torch.manual_seed(0)
    A, B = torch.randn(5, 4, 2, 3, IN), torch.randn(2, 4, 2, OUT, 3)
    B = B[[0, 1, 0, 1, 0]] + torch.randn(5, 4, 2, OUT, 3)
    routers, names = torch.randn(5, 5, IN), ("query", "value")
    method, published = FedLEASE(experts=3), module(folder / "utils.py")
    published.visualize_clustering = MagicMock()
    with tempfile.TemporaryDirectory() as output:
        place = Path(output, "lora_params")
        place.mkdir()
        for i in range(5):
            for k, name in enumerate(names):
                np.save(place / f"{name}_lora_B_client_{i}_0.npy", B[i, :, k].numpy())
        members = [SimpleNamespace(client_id=i) for i in range(5)]
        groups, _ = published.compute_lora_client_map(members, 0, output, max_clusters=3)
    flat = torch.cat([A.flatten(3), B.flatten(3)], 3).flatten(1)  # A and B in turn
    sent = {str(i): {"specialist": flat[i], "router": routers[i].flatten()} for i in range(5)}
    state: Tensors = {"sizes": torch.tensor([3 * IN, OUT * 3] * 8)}
    state |= method.place(sent, state)
    ours = {c: [i for i in range(5) if state[of_client(str(i), CLUSTER)] == c] for c in groups}
    assert sorted(ours.values()) == sorted(groups.values()), (ours, groups)
    after = method.merged(sent, state)
    trained = []
    for i in range(5):
        places = [(layer, k) for layer in range(4) for k in range(2)]
        named = {f"{layer}.{names[k]}.lora_route": routers[i] for layer, k in places}
        for c in groups:  # only those of its own cluster count
            named |= {f"{n}.{names[k]}.lora_A{c}": A[i, n, k] for n, k in places}
            named |= {f"{n}.{names[k]}.lora_B{c}": B[i, n, k] for n, k in places}
        trained.append(named)
    server = module(folder / "server.py").Server(5, "cpu")
    means = server.aggregation(True, trained, groups)
    off = 0.0
    for c, group in groups.items():
        mine = next(k for k, row in ours.items() if row == group)
        theirs = means[group[0]]
        parts = [
            theirs[f"{n}.{name}.lora_{m}{c}"] for n in range(4) for name in names for m in "AB"
        ]
        expert = torch.cat([part.flatten() for part in parts])
        off = max(off, float((after[of_expert(mine)] - expert).abs().max() / expert.abs().max()))
        router = theirs["0.query.lora_route"].flatten()
        off = max(off, float((after[f"router/{mine}"] - router).abs().max() / router.abs().max()))
    return off


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    print(f"{name}: {({'flora': flora, 'fedlease': fedlease})[name](Path(folder)):.1e}")
