"""Pretrained: the base model without training."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.core.protocol import ClientId, Round, State
from coterie.methods.base import Method
from coterie.models.layout import Layout


@dataclass(frozen=True)
class Pretrained(Method):
    """No rounds. Each client's new adapter changes nothing, since every B is zero."""

    dynamic_membership: ClassVar[bool] = True
    serves_unseen_clients: ClassVar[bool] = True

    rounds: Annotated[int, Field(ge=0, le=0)] = 0  # always 0

    by_examples = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(base, generalists=1, specialists=0, routing="equal", balance="none")

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return {}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        yield from ()
        return state
