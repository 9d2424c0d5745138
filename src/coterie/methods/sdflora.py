"""SDFLoRA: each LoRA is a shared module and a local one, whose products add up.

Shen et al., "SDFLoRA: Selective Decoupled Federated LoRA for Privacy-preserving Fine-tuning with
Heterogeneous Clients", 2026 (arXiv:2601.11219), Section 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated

from pydantic import Field

from coterie.aggregation import lowrank
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import ClientId, State
from coterie.core.tensors import Tensors
from coterie.methods.flexlora import FlexLoRA
from coterie.methods.templates import Rank, value_of
from coterie.models.layout import Layout


@dataclass(frozen=True)
class SDFLoRA(FlexLoRA):
    """Of each LoRA, the first ranks are the shared module, which FlexLoRA's server averages and
    brings back to its rank by an SVD; the last `local_rank` are the local one and never leave.
    """

    # r_i of the shared module in the MLPs, one number or one per client; null: model.rank
    ranks: Rank | tuple[Rank, ...] | None = None
    local_rank: Annotated[int, Field(ge=1)] = 8  # rank of the local module

    def layout(self, position: int, base: Layout) -> Layout:
        rank = value_of(self.ranks, position) or base.rank
        whole = super().layout(position, base)
        return replace(whole, rank=base.rank + self.local_rank, mlp_rank=rank + self.local_rank)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        state = super().init(model, clients)
        ranks = {n: t - self.local_rank for n, t in state.items() if n.startswith("ranks/")}
        theta = {name: tensor for name, tensor in state.items() if name not in ranks}
        shared = [rank - self.local_rank for rank in lowrank.ranks(theta)]
        return lowrank.truncated(theta, shared) | ranks

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        if not download:
            return {}
        whole = lowrank.with_tails(download, lowrank.read_factors(client.loras))
        return lowrank.own_factors(client.loras, whole)
