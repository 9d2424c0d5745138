"""FLoRA: clients' LoRAs are stacked, which adds up their products, and merged into the weights.

Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank
Adaptations", NeurIPS 2024 (arXiv:2409.05976), Algorithm 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from coterie.aggregation.lowrank import added, factors, shares_of
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.core.protocol import ClientId, Replies, State
from coterie.core.roles import BACKBONE, GENERALIST, Role
from coterie.core.tensors import Tensors
from coterie.methods.flexlora import FlexLoRA
from coterie.models.layout import Layout


@dataclass(frozen=True)
class FLoRA(FlexLoRA):
    """Every round each client trains a new LoRA on the weights so far, and the sum of all
    gamma_i B_i A_i, weighted by the clients' data, joins them.

    The server's state holds that sum as `<module>/W`; of the factors, whose values nobody uses, the
    form; and `ranks/<client>`, (modules,).
    """

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, BACKBONE)
    server_steps: ClassVar[bool] = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), frozen_sum=True)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        state, sums = super().init(model, clients), Tensors()
        for module in model.loras():
            A, B = factors(module, state)
            sums[f"{module}/W"] = torch.zeros(B.shape[1], A.shape[2])
        return state | sums

    def merge(self, replies: Replies, state: State) -> Tensors:
        return added(replies, state, shares_of(replies))

    def begin(self, client: Client) -> None:
        super().begin(client)
        for lora in client.loras.values():
            bound = 1 / math.sqrt(lora.A.shape[2])
            lora.A.data.copy_(torch.empty(lora.A.shape).uniform_(-bound, bound))
            lora.B.data.zero_()
