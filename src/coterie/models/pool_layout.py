"""The size of a server's pool and of a client's share of it, and what its gate learns from."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.models.layout import Balance, Layout

Mixture = Literal["logits", "probabilities", "scores", "mean"]
ABSENT = -1  # the number of an expert in a place where there is none


@dataclass(frozen=True)
class PoolLayout(Layout):
    """The size of a pool, the number of experts that a client has, and how their outputs become
    one.

    Args:
        specialists: None: a member of the pool is a whole network.
        pool: M, experts at the server.
        chosen: K, places at a client.
        mixture: What a client trains: "logits", sum_i p_i f_i(x) of the experts' logits with p
            renormalised over those it has; "probabilities", the same of their softmax; "scores", of
            logits with p as the gate gives it over all M; "mean", equal weights of probabilities,
            without a gate.
        answer: How a sample is classified: "best", by the expert with the highest score among those
            the client has; or by the "mixture".
        start: Whether experts start at random, each from values of its own, all from the common
            expert's, or from those where they fit.

    Raises:
        ModelError: A value is out of its range.
    """

    specialists: int = 0
    routing: Literal["learned", "equal"] = "equal"
    balance: Balance = "none"
    pool: int = 5
    chosen: int = 2
    mixture: Mixture = "logits"
    answer: Literal["best", "mixture"] = "best"
    start: Literal["random", "common", "auto"] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen <= self.pool:
            raise ModelError(
                f"{self.chosen} experts at a client of a pool of {self.pool}",
                "Choose at least one, at most all of them.",
            )

    @property
    def gated(self) -> bool:
        """Whether a gate says what each expert counts."""
        return self.mixture != "mean"


@dataclass(frozen=True)
class GateTarget:
    """A batch that teaches the gate to recognise an anchor's data.

    Args:
        embedding: (B, e).
        expert: The number of the expert that all of it should go to.
    """

    embedding: Tensor
    expert: int

    def __len__(self) -> int:
        return len(self.embedding)

    def split(self, rows: int) -> "list[GateTarget]":
        """In order, at most `rows` examples each."""
        return [
            GateTarget(embedding, self.expert) for embedding in torch.split(self.embedding, rows)
        ]
