"""One aggregation of published code and of ours from the same tensors.

    python benchmarks/published_rounds.py flora FOLDER

FOLDER is a checkout of the published code, of which nothing is copied: ATP-1010/FederatedLLM for
flora, lei-wang-link/FedLEASE for fedlease, without its pictures, zyc140345/FedAMoLE for fedamole,
whose choice needs cvxpy and pyscipopt. Prints the largest difference of updates, relative to the
largest update; of fedamole, of values near 1.
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
from coterie.core.protocol import drive
from coterie.core.tensor_names import by_client, of_client, of_expert
from coterie.core.tensors import Tensors
from coterie.methods.fedamole import FedAMoLE
from coterie.methods.fedlease import CLUSTER, FedLEASE
from coterie.models.routing import ProjectedRouter

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


BLOCKS, EXPERTS, CLIENTS, RANK = 2, 6, 4, 3


def fedamole(folder: Path) -> float:
    """Compare the outputs of a router, the means of experts and router over their holders, and the
    clients that experts choose next, of four clients and six experts in each of two layers.
    """
    for name in ("evaluation", "model.loss", "model.common"):  # data, and a model from the Hub
        sys.modules[name] = MagicMock()
    sys.path.insert(0, str(folder))
    layer, node = importlib.import_module("model.mole.layer"), importlib.import_module("node")
    torch.manual_seed(0)
    experts = torch.randn(CLIENTS, BLOCKS, EXPERTS, RANK * (IN + OUT))
    routers, shared = torch.randn(CLIENTS, BLOCKS, RANK, IN), torch.randn(CLIENTS, 9)
    inputs = torch.randn(CLIENTS, BLOCKS, IN)  # means over tokens
    method = FedAMoLE(experts=EXPERTS, most_experts=5)
    ids = [str(k) for k in range(CLIENTS)]
    held = method.chosen(torch.rand(BLOCKS, EXPERTS, CLIENTS), ids)
    numbers = {i: [held[i][:, b].nonzero()[:, 0].tolist() for b in range(BLOCKS)] for i in ids}

    def factor(k: int, b: int, m: int) -> torch.Tensor:
        return experts[k, b, m, : RANK * IN].view(RANK, IN)

    def answer(ask: Any, _: int) -> dict[str, Tensors]:
        if ask.name == "local_round":
            return {
                i: {"generalist": shared[k], "router": routers[k].flatten()}
                | {
                    of_expert(m * BLOCKS + b): experts[k, b, m]
                    for b in range(BLOCKS)
                    for m in numbers[i][b]
                }
                for k, i in enumerate(ids)
            }
        sent = {i: torch.zeros(BLOCKS, 6, RANK).double() for i in ids}
        for k, i in enumerate(ids):
            for b in range(BLOCKS):
                A = [routers[k, b], *(factor(k, b, m) for m in numbers[i][b])]
                sent[i][b, : len(A)] = torch.stack(A).double() @ inputs[k, b].double()
        return {i: {"embeddings": t} for i, t in sent.items()}

    state = {of_expert(n): torch.zeros(0) for n in range(EXPERTS * BLOCKS)}
    state |= {"generalist": torch.zeros(9), "router": torch.zeros(0)}
    state |= {"embeddings": torch.zeros(BLOCKS, 6, RANK).double()} | by_client(held, "held")
    ours = drive(method.round(state, ids, torch.Generator()), answer)
    clients = []
    for k, i in enumerate(ids):
        client = SimpleNamespace(expert_ids={}, experts={}, token_proj={}, expert_embs={})
        client.token_embs, mine = {}, answer(SimpleNamespace(name="embed"), 0)[i]["embeddings"]
        for b in range(BLOCKS):
            name, theirs = f"m{b}", numbers[i][b]
            client.expert_ids[name] = [*theirs, EXPERTS]
            client.experts[name] = [{"expert": experts[k, b, m].clone()} for m in theirs]
            client.experts[name].append({"expert": shared[k].clone()})
            client.token_proj[name] = {"weight": routers[k, b].clone()}
            client.token_embs[name] = mine[b, :1]
            client.expert_embs[name] = torch.cat([mine[b, 1 : 1 + len(theirs)], mine[b, :1] * 0])
        clients.append(client)
    server = object.__new__(node.Server)
    options = {"do_profile": False, "static_arch": False, "random_dispatch": False}
    options |= {"homo_arch": False, "save_dispatch": False, "expert_num": EXPERTS}
    options |= {"client_num": CLIENTS, "lora_rank": RANK, "expert_choices": 2, "max_experts": 5}
    server.args, server.clients = SimpleNamespace(**options), clients
    server.lora_modules = [f"m{b}" for b in range(BLOCKS)]
    for kind in ("expert_ids", "experts", "token_proj", "expert_embs", "token_embs"):
        setattr(server, kind, {})
    server.expert_dispatch = {}
    server.aggregate()
    server.dispatch_experts(1)
    off = []
    for i, client in zip(ids, clients, strict=True):
        for b in range(BLOCKS):
            chosen = client.expert_ids[f"m{b}"][:-1]
            assert chosen == ours[f"{i}/held"][:, b].nonzero()[:, 0].tolist(), (i, b, chosen)
            for m, expert in zip(chosen, client.experts[f"m{b}"], strict=False):
                off.append(ours[of_expert(m * BLOCKS + b)] - expert["expert"])
            off.append(ours["generalist"] - client.experts[f"m{b}"][-1]["expert"])
            weight = ours["router"].view(BLOCKS, RANK, IN)[b]
            off.append(weight - client.token_proj[f"m{b}"]["weight"])
    return max(float(t.abs().max()) for t in [*off, _routed(layer, factor, routers[0, 0])])


def _routed(layer: Any, factor: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the difference of the sums of weighted experts, with B of zeros for the shared one."""
    names = [*map(str, range(EXPERTS)), "expert_shared"]
    A, B, module = {}, {}, torch.nn.Linear(IN, OUT)
    for m, name in enumerate(names):
        A[name] = torch.nn.Linear(IN, RANK, bias=False)
        B[name] = torch.nn.Linear(RANK, OUT, bias=False)
        A[name].weight.data = factor(0, 0, min(m, EXPERTS - 1))
        B[name].weight.data *= m < EXPERTS
    token = torch.nn.Linear(IN, RANK, bias=False)
    token.weight.data = weight
    same = {name: torch.nn.Identity() for name in names}
    adapted = SimpleNamespace(base_layer=module, lora_A=A, lora_B=B, token_proj=token)
    adapted.r, adapted.active_adapter = dict.fromkeys(names, RANK), names
    adapted.scaling, adapted.lora_dropout = dict.fromkeys(names, 1.0), same
    router = ProjectedRouter(IN, RANK, 2)
    router.held, router.weight.data = EXPERTS, weight
    x = torch.randn(1, 50, IN)
    with torch.no_grad():
        theirs = layer.MoLELinear("m", adapted).forward(x)[0] - module(x[0])
        keys = torch.stack([A[name].weight for name in names[:-1]])
        weights = router(x[0], keys).weights[:, 1:]
        outputs = torch.stack([B[name](A[name](x[0])) for name in names[:-1]], dim=1)
    return 2 * (weights[..., None] * outputs).sum(dim=1) - theirs


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    compare = {"flora": flora, "fedlease": fedlease, "fedamole": fedamole}[name]
    print(f"{name}: {compare(Path(folder)):.1e}")
