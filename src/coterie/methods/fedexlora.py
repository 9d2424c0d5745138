"""FedEx-LoRA: means of both factors, and what their product lacks in the frozen weights.

Singhal et al., "FedEx-LoRA: Exact Aggregation for Federated and Efficient Fine-Tuning of Foundation
Models", ACL 2025 (arXiv:2410.09432), Section 3.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.aggregation import uniform_mean
from coterie.aggregation.lowrank import TOKENS, added, factors
from coterie.client.client import Client
from coterie.core.protocol import Replies, State
from coterie.core.tensors import Tensors
from coterie.methods.flora import FLoRA
from coterie.methods.templates import Rank


@dataclass(frozen=True)
class FedExLoRA(FLoRA):
    """A and B are averaged each by itself, and the weights get the residual, mean_i gamma B_i A_i -
    gamma mean(B) mean(A), so that all clients go on from the mean of their models, exactly.

    The server's state holds the sum of all residuals as `<module>/W`, the mean factors, and
    `ranks/<client>`, (modules,).
    """

    per_client: ClassVar[tuple[str, ...]] = ()
    server_steps: ClassVar[bool] = False

    # r of the MLP LoRAs; null: twice model.rank, the budget of CoMiGS-1G1S
    ranks: Rank | None = None

    def merge(self, replies: Replies, state: State) -> Tensors:
        sums = added(replies, state, dict.fromkeys(sorted(replies), 1 / len(replies)))
        mean = uniform_mean(replies)
        del mean[TOKENS]
        for name in sums:
            A, B = factors(name.removesuffix("/W"), mean)
            sums[name] = sums[name] - B[0] @ A[0]
        return sums | mean

    def begin(self, client: Client) -> None:
        """Go on with the mean factors and the client's optimiser."""
