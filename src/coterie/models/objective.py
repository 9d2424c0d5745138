"""The training objective's sums: cross-entropy and load balancing over the parts of a batch."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import cast

import torch
from torch import Tensor

from coterie.models.layout import Layout
from coterie.models.routing import Routing, balance_loss


class Totals:
    """Sums over the micro-batches of one gradient.

    Args:
        layout: Says which load-balancing loss.
        tokens: Predicted tokens of the whole batch that count.
        routed: Tokens that are routed; None: as many.
    """

    def __init__(self, layout: Layout, tokens: int, routed: int | None = None) -> None:
        self.layout, self.tokens = layout, tokens
        self.routed = tokens if routed is None else routed
        self.nll: Tensor | float = 0.0
        self.weights: Tensor | float = 0.0
        self.users: Tensor | float = 0.0
        self.probabilities: Tensor | float = 0.0

    def add(self, nll: Tensor, record: Sequence[Routing], load: Tensor | None) -> Tensor | None:
        """Note one micro-batch, and return its share of the load-balancing loss if that has a
        gradient.
        """
        self.nll = self.nll + nll.detach()
        if not record:
            return None
        with torch.no_grad():
            users = torch.stack([decision.users() for decision in record])
            self.users = self.users + users
            self.weights = self.weights + torch.stack(
                [decision.weights.sum(dim=0) for decision in record]
            )
        with nullcontext() if self.layout.balance_has_gradient else torch.no_grad():
            probabilities = torch.stack([decision.probabilities.sum(dim=0) for decision in record])
        self.probabilities = self.probabilities + probabilities.detach()
        if not self.layout.balance_has_gradient:
            return None
        if load is None:  # the whole batch in one, or k = n: then f is 1 in any part of it
            load = users / users.sum(dim=-1, keepdim=True) * self.layout.active
        return balance_loss(self.layout.balance_coefficients, load, probabilities / self.routed)

    def statistics(self) -> dict[str, Tensor]:
        nll = cast(Tensor, self.nll)
        statistics = {"loss": nll / self.tokens, "balance": torch.zeros_like(nll)}
        if isinstance(self.weights, Tensor):
            statistics["router"] = self.weights / self.routed
            if self.layout.balance_coefficients:
                users, probabilities = (
                    cast(Tensor, self.users) / self.routed,
                    cast(Tensor, self.probabilities) / self.routed,
                )
                statistics["balance"] = balance_loss(
                    self.layout.balance_coefficients, users, probabilities
                )
        return statistics


def balance_by_row(layout: Layout, records: Sequence[Sequence[Routing]]) -> Tensor:
    """Return the sum over rows of the load-balancing loss of each row's own tokens.

    Args:
        layout: Says which loss.
        records: Of each row, the decisions of its tokens, block by block.
    """
    terms = []
    for decisions in records:
        users = torch.stack([decision.users() for decision in decisions])
        probabilities = torch.stack([decision.probabilities.mean(dim=0) for decision in decisions])
        load = users / users.sum(dim=-1, keepdim=True) * layout.active
        terms.append(balance_loss(layout.balance_coefficients, load, probabilities))
    return torch.stack(terms).sum()
