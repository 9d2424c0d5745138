"""Which experts each token uses, their weights, and the balance of load."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from coterie.core.roles import Role
from coterie.models.layout import Layout


@dataclass(frozen=True)
class Routing:
    """One routing decision for T tokens among n experts, at least fp32."""

    # (T, n) softmax over the k selected logits; 0 for experts that a token does not use
    weights: Tensor
    probabilities: Tensor  # (T, n) softmax over all n logits
    selected: Tensor | None  # (T, k) the experts that each token uses; None: all
    embeddings: Tensor | None = None  # (T, 1 + S, r) P x and A_j x of a `ProjectedRouter`

    @classmethod
    def of(cls, logits: Tensor, weights: Tensor, selected: Tensor | None) -> "Routing":
        """Return the decision for (T, n) logits, given the result of `top_k_weights`."""
        return cls(weights, weights if selected is None else logits.softmax(dim=-1), selected)

    def users(self) -> Tensor:
        """Return the number of tokens with each expert in their top-k, (n,): T f_j."""
        if self.selected is None:
            like = self.probabilities
            return torch.full_like(like[0], len(like), requires_grad=False)
        return torch.zeros_like(self.probabilities).scatter_(1, self.selected, 1.0).sum(dim=0)

    def at(self, places: Tensor) -> "Routing":
        """Return the decision for some tokens, (t,) int64."""
        return self._mapped(lambda values: values.index_select(0, places))

    def part(self, number: int, parts: int) -> "Routing":
        """Return the decision for one of `parts` equal, consecutive parts of the tokens."""
        return self._mapped(lambda values: values.chunk(parts)[number])

    def _mapped(self, part: Callable[[Tensor], Tensor]) -> "Routing":
        optional = (None if t is None else part(t) for t in (self.selected, self.embeddings))
        return Routing(part(self.weights), part(self.probabilities), *optional)


def top_k_weights(
    logits: Tensor, active: int, unused: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Return the softmax over the k = `active` largest of (..., n) logits, (..., n), 0 elsewhere,
    and the selected experts, (..., k) int64, or None if it is all n.

    `unused`, (..., k), marks selected logits that do not count, if some tokens use fewer experts.
    """
    if active == logits.shape[-1] and unused is None:
        return logits.softmax(dim=-1), None
    top, selected = logits.topk(active, dim=-1)
    if unused is not None:
        top = top.masked_fill(unused, -math.inf)
    return torch.zeros_like(logits).scatter(-1, selected, top.softmax(dim=-1)), selected


class Router(nn.Module):
    """One linear layer d_model -> n on the MLP's own input; logits and softmax at least in fp32.
    If it is `biased`, logits have a constant `bias`, (n,).
    """

    def __init__(self, width: int, experts: int, active: int, biased: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))
        self.bias = nn.Parameter(torch.zeros(experts)) if biased else None
        self.roles = {"weight": Role.ROUTER, "bias": Role.ROUTER}
        self.active = active
        self.held = 0  # experts that a server sent, where it chooses
        self.comparing = False

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Routing:
        """Return the decision for T tokens, (T, d_model)."""
        precise = torch.promote_types(x.dtype, torch.float32)
        bias = None if self.bias is None else self.bias.to(precise)
        return self.decide(nn.functional.linear(x.to(precise), self.weight.to(precise), bias))

    def decide(self, logits: Tensor) -> Routing:
        """Return the decision for (T, n) logits."""
        return Routing.of(logits, *top_k_weights(logits, self.active))


class RepeatedRouter(Router):
    """A router that knows M of at most n experts: the first M - 1, and the last, which has M places
    of its own (FedLEASE). A token goes to M of these 2 M - 1 places. Its user sets `held`, M - 1.
    """

    def __init__(self, width: int, experts: int, active: int, biased: bool = False) -> None:
        super().__init__(width, 2 * experts - 1, active, biased)
        self.first = experts - 1  # the row of the last expert's first place

    def rows(self, values: Tensor) -> Tensor:
        """Return the places in use, (2 M - 1, ...), of all."""
        return torch.cat([values[: self.held], values[self.first : self.first + self.held + 1]])

    def decide(self, logits: Tensor) -> Routing:
        weights, _ = top_k_weights(self.rows(logits.T).T, self.held + 1)
        last = weights[:, self.held :].sum(dim=-1, keepdim=True)
        unknown = logits.new_zeros(len(logits), self.first - self.held)
        weights = torch.cat([weights[:, : self.held], unknown, last], dim=-1)
        return Routing(weights, weights, None)


class ProjectedRouter(Router):
    """A router that compares projections of a token, P x and A_j x, by <A_j x, P x> / sqrt(r): P,
    (r, d_model), is its weight, and A_j the first factor of an expert's LoRA (FedAMoLE). The first
    expert has no logit, and half of the weight; of the others only the first `held` are present.
    With `comparing` a decision has what was compared.
    """

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Routing:
        """Return the decision for T tokens, (T, d_model); `keys` are the A_j, (S, r, d_model)."""
        assert keys is not None
        x, held = x.to(torch.promote_types(x.dtype, torch.float32)), keys[: self.held]
        token = nn.functional.linear(x, self.weight.to(x.dtype))
        experts = torch.einsum("td,jrd->tjr", x, held.to(x.dtype))
        logits = torch.einsum("tjr,tr->tj", experts, token) / math.sqrt(len(self.weight))
        weights, selected = top_k_weights(logits, min(self.active, self.held))
        if selected is None:
            selected = torch.arange(self.held, device=x.device).expand_as(logits)
        absent, share = len(keys) - self.held, 0.5 if self.held else 0.0
        compared = None
        if self.comparing:
            compared = pad(torch.cat([token[:, None], experts], dim=1), (0, 0, 0, absent))
        return Routing(
            pad(pad(share * weights, (1, 0), value=1 - share), (0, absent)),
            pad(logits.softmax(dim=-1), (1, absent)),
            pad(selected + 1, (1, 0)),
            compared,
        )


def by_experts(selected: Tensor) -> tuple[Tensor, list[tuple[list[int], int, int]]]:
    """Return an order of the tokens, given their (T, k) experts, in which equal sets of experts are
    consecutive, and each set with its first and end token. On a GPU this waits for the sets.
    """
    key, order = (1 << selected).sum(dim=-1).sort()
    ends = torch.unique_consecutive(key, return_counts=True)[1].cumsum(0)
    sets = selected[order[ends - 1]].sort(dim=-1).values.tolist()
    return order, list(zip(sets, [0, *ends[:-1].tolist()], ends.tolist(), strict=True))


def balance_loss(coefficients: Sequence[float], load: Tensor, probabilities: Tensor) -> Tensor:
    """Return sum_j a_j f_j P_j averaged over blocks (eq. 6 and the uniform loss before it), with a,
    (n,), of `Layout.balance_coefficients`, f, (blocks, n), the fraction of tokens that have expert
    j in their top-k, and P, (blocks, n), the mean softmax over all n.
    """
    return (load * probabilities).mean(dim=0) @ load.new_tensor(coefficients)


class Totals:
    """Sums over the micro-batches of a gradient, of `tokens` predictions and `routed` inputs."""

    def __init__(self, layout: Layout, tokens: int, routed: int) -> None:
        self.layout, self.tokens, self.routed = layout, tokens, routed
        self.nll: Tensor | float = 0.0
        self.weights: Tensor | float = 0.0
        self.users: Tensor | float = 0.0
        self.probabilities: Tensor | float = 0.0

    def add(self, nll: Tensor, record: Sequence[Routing], load: Tensor | None) -> Tensor | None:
        """Add a micro-batch; return its share of the load-balancing loss, if that is used."""
        self.nll = self.nll + nll.detach()
        if not record:
            return None
        with torch.no_grad():
            users = torch.stack([decision.users() for decision in record])
            self.users = self.users + users
            weights = torch.stack([decision.weights.sum(dim=0) for decision in record])
            self.weights = self.weights + weights
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
                statistics["balance"] = balance_loss(
                    self.layout.balance_coefficients,
                    cast(Tensor, self.users) / self.routed,
                    cast(Tensor, self.probabilities) / self.routed,
                )
        return statistics


def balance_by_row(layout: Layout, records: Sequence[Sequence[Routing]]) -> Tensor:
    """Return the load-balancing loss of each row's decisions, summed over rows, by block."""
    terms = []
    for decisions in records:
        users = torch.stack([decision.users() for decision in decisions])
        probabilities = torch.stack([decision.probabilities.mean(dim=0) for decision in decisions])
        load = users / users.sum(dim=-1, keepdim=True) * layout.active
        terms.append(balance_loss(layout.balance_coefficients, load, probabilities))
    return torch.stack(terms).sum()
