"""Compare a method of one's own with FedAvg: python examples/own_method.py (a few seconds)."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

import coterie
from coterie.core.protocol import Replies
from coterie.core.tensors import Named, Tensors
from coterie.methods.fedavg import FedAvg


@dataclass(frozen=True)
class MyMethod(FedAvg):
    """FedAvg whose server goes only a part of the way: theta <- theta + step (mean_i theta_i -
    theta).

    The server's learning rate of FedOpt (Reddi et al., "Adaptive Federated Optimization", ICLR
    2021).
    """

    step: Annotated[float, Field(gt=0, le=2, description="of the way to the mean")] = 0.5

    def combine(self, replies: Replies, around: Named) -> Tensors:
        mean = super().combine(replies, around)
        return {name: around[name] + self.step * (mean[name] - around[name]) for name in mean}


def main() -> None:
    table = coterie.compare(
        ["local", "fedavg", "own_method:MyMethod"],
        "cobo-digits",
        seeds=2,
        method={"name": "fedavg", "rounds": 30},
        evaluate_every=0,
    )
    for row in table.rows:
        print(f"{row.method}: {row.metric} {row.mean:.1f} ± {row.std:.1f}")
    print(f"Best: {table.best.method}. Open {table.folder}/report.html.")


if __name__ == "__main__":
    main()
