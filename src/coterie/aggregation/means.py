"""Means of the clients' tensors, and the interface of all aggregation rules. Sums run in the order
of the client ids, so that results do not depend on the order of clients or of arrival, to the bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict

from coterie.core.errors import RecipeError
from coterie.core.protocol import ClientId, Replies, remark
from coterie.core.tensors import Named, Tensors, check_alike, weighted_sum

SAMPLES = "samples"  # how many training examples a client has, in its reply
MOST_SAMPLES = 1 << 40  # that a server believes


def uniform_mean(replies: Replies) -> Tensors:
    """1/N sum_i theta_i, name by name; exactly the tensors of a single client. Raises TensorError:
    clients' tensors differ in names, shapes or dtypes.
    """
    return weighted_mean(replies, dict.fromkeys(replies, 1.0))


def weighted_mean(replies: Replies, weights: Mapping[ClientId, float]) -> Tensors:
    """sum_i w_i theta_i / sum_i w_i over the clients that replied, name by name.

    Args:
        replies: Tensors by client.
        weights: Non-negative weights, at least for the clients that replied.

    Raises:
        TensorError: The clients' tensors differ in names, shapes or dtypes.
        ValueError: No replies, or weights that are negative or sum to zero.
    """
    total = sum(weights[i] for i in sorted(replies))
    if any(weights[i] < 0 for i in replies) or not total > 0:
        raise ValueError(
            f"weights {dict(weights)} of {len(replies)} replies: they must be >= 0 with a "
            f"positive sum"
        )
    return weighted_sum((weights[i] / total, replies[i]) for i in sorted(replies))


class Combining(BaseModel, ABC):
    """A rule by which a server combines the clients' tensors into one set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def counts(self) -> bool:
        """Whether replies must have the number of samples as the scalar `samples`; else ignored."""
        return False

    @property
    def needs_only_mean(self) -> bool:
        """Whether only the sum of the clients' tensors and their number are needed."""
        return False

    @property
    def fewest(self) -> int:
        """The least number of clients of which the rule does what it is for; 0: any."""
        return 0

    def check(self, clients: int) -> None:
        """Refuse a number of clients that the rule does not support. Raises RecipeError."""
        if clients < self.fewest:
            mistake = (
                f"method.aggregation.rule: {self.name} of {clients} clients that are averaged "
                f"together, where {self.fewest} are needed"
            )
            raise RecipeError(
                "method", [f"{mistake}; use another rule, or more clients in each round"]
            )

    @property
    def name(self) -> str:
        """The name of the rule in recipes."""
        return str(getattr(self, "rule", type(self).__name__))

    @abstractmethod
    def combine(self, replies: Replies, around: Named) -> Tensors:
        """Combine replies of at least one client into one set of tensors, without `samples`;
        exactly those of a single client. All of a client's tensors are one vector. Updates are
        relative to what was sent, `around`, or to zero where a name is missing. Raises TensorError
        if the clients' tensors differ in names, shapes or dtypes, ValueError without replies.
        """


class Mean(Combining):
    """The mean: sum_i w_i theta_i / sum_i w_i (McMahan et al. 2017). A single client can move it
    anywhere: its breakdown point is 0.
    """

    rule: Literal["mean"] = "mean"  # the mean
    # weights of clients: equal, or by the number of training samples that they report
    weighting: Literal["uniform", "samples"] = "uniform"

    @property
    def counts(self) -> bool:
        return self.weighting == "samples"

    @property
    def needs_only_mean(self) -> bool:
        return self.weighting == "uniform"

    def combine(self, replies: Replies, around: Named) -> Tensors:
        weights = {i: float(reply[SAMPLES]) for i, reply in replies.items()} if self.counts else {}
        if not any(weights.values()):  # clients that all report no samples have equal weights
            weights = dict.fromkeys(replies, 1.0)
        return weighted_mean(ordered(replies), weights)


def ordered(replies: Replies) -> dict[ClientId, Tensors]:
    """Return the clients' tensors without `samples`, in the order of their ids. Raises ValueError
    without replies, TensorError: clients' tensors differ in names, shapes or dtypes.
    """
    models = {
        i: {name: tensor for name, tensor in replies[i].items() if name != SAMPLES}
        for i in sorted(replies)
    }
    if not models:
        raise ValueError("no replies: there is nothing to combine")
    for i, tensors in models.items():
        check_alike(next(iter(models.values())), tensors, f"tensors of client {i!r}")
    return models


def by_holders(rule: Combining, replies: Replies, around: Named) -> Tensors:
    """Apply a rule to each tensor of the clients that sent it, as clients have different members of
    a pool. Tensors that the same clients sent are one vector to the rule. Those of fewer clients
    than the rule needs keep their values, with a remark. Returns {} without replies. Raises
    TensorError: clients' tensors differ in shapes or dtypes.
    """
    groups: dict[tuple[ClientId, ...], list[str]] = {}
    names_sent = dict.fromkeys(name for reply in replies.values() for name in reply)
    names_sent.pop(SAMPLES, None)
    for name in names_sent:
        groups.setdefault(tuple(i for i in replies if name in replies[i]), []).append(name)
    combined: Tensors = {}
    for holders, names in groups.items():
        held = {
            i: {name: replies[i][name] for name in (*names, SAMPLES) if name in replies[i]}
            for i in holders
        }
        if len(holders) >= rule.fewest:
            combined |= rule.combine(held, around)
            continue
        remark(
            f"what {len(holders)} clients sent is left out, {names[0]} and more: "
            f"{rule.name} needs {rule.fewest}"
        )
        first = ordered(held)[holders[0]]
        for name, tensor in first.items():
            combined[name] = around[name] if name in around else torch.zeros_like(tensor)
    return combined
