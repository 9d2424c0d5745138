"""One aggregation of published code and of ours from the same tensors.

    python benchmarks/published_rounds.py flora FOLDER

FOLDER is a checkout of the published code, of which nothing is copied: ATP-1010/FederatedLLM for
flora. Prints the largest difference of the updates of the weights, relative to the largest update.
"""

import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from coterie.aggregation.lowrank import TOKENS, added, shares_of
from coterie.core.tensors import Tensors

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


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    print(f"{name}: {({'flora': flora})[name](Path(folder)):.1e}")
