"""Rules that withstand a few clients who send arbitrary values, by mistake or on purpose; and
simulated attackers to test them, which only recipes with `attack` have.

A rule breaks at the least number of such attackers among n clients that can move its result
arbitrarily far; with fewer, it stays near what the others sent. No rule hides what a client sent,
and of very different honest clients, rare contributions are lost like an attack.
"""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Tag
from torch import Tensor

from coterie.aggregation.collaboration import CHUNK
from coterie.aggregation.means import Combining, Mean, ordered, uniform_mean, weighted_mean
from coterie.core import devices, unions
from coterie.core.errors import RecipeError
from coterie.core.names import normal
from coterie.core.protocol import ClientId, Replies
from coterie.core.tensors import Named, Tensors, axpy, weighted_sum
from coterie.core.tensors import norm as length


class _Trimming(Combining, ABC):
    """The mean of each coordinate without the smallest and largest values."""

    @property
    def fewest(self) -> int:
        return 3

    @abstractmethod
    def cut(self, n: int) -> int:
        """How many of n values are cut at each end, at most (n - 1) / 2."""

    def combine(self, replies: Replies, around: Named) -> Tensors:
        models = list(ordered(replies).values())
        k = self.cut(len(models))
        combined: Tensors = {}
        for name, first in models[0].items():
            pieces = (torch.split(model[name].flatten(), CHUNK) for model in models)
            ordered_parts = [torch.stack(p).sort(dim=0).values for p in zip(*pieces, strict=True)]
            means = [part[k : len(models) - k].mean(dim=0) for part in ordered_parts]
            combined[name] = torch.cat(means).view(first.shape)
        return combined


class Median(_Trimming):
    """The median of each coordinate (Yin et al. 2018); of an even number of clients the mean of the
    two in the middle.

    It withstands fewer than half of the clients, and breaks at n/2.
    """

    rule: Literal["median"] = "median"  # the median of each coordinate

    def cut(self, n: int) -> int:
        return (n - 1) // 2


class TrimmedMean(_Trimming):
    """The mean of each coordinate without the share beta of the smallest values, and that of the
    largest (Yin et al. 2018).

    The number that is cut at each end, k = beta n, is rounded up, to protect a few clients too, but
    one or two values are always left. It withstands k clients, and breaks at k + 1.
    """

    # the mean of each coordinate without its extremes
    rule: Literal["trimmed-mean"] = "trimmed-mean"
    # beta, the share of the clients cut at each end, rounded up
    trim: Annotated[float, Field(ge=0, lt=0.5)] = 0.2

    @property
    def fewest(self) -> int:
        return 3 if self.trim else 0

    def cut(self, n: int) -> int:
        # 0.1 * 30 is a little more than 3
        return min(math.ceil(self.trim * n - 1e-9), (n - 1) // 2)


class Krum(Combining):
    """The model of one client, whose n - f - 2 nearest others are nearest, by the sum of squared
    distances (Blanchard et al. 2017).

    It withstands f attackers among n >= 2f + 3 clients, and breaks at n/2 if they all send the
    same. What fewer send in a round is left out. Of equal scores, the first by id is chosen.
    """

    rule: Literal["krum"] = "krum"  # the one client with the nearest neighbours
    # f, attackers among the clients; there must be at least 2f + 3 of them
    attackers: Annotated[int, Field(ge=0)] = 1

    @property
    def fewest(self) -> int:
        return 2 * self.attackers + 3

    def check(self, clients: int) -> None:
        if clients < self.fewest:
            mistake = (
                f"method.aggregation.attackers: {self.attackers} among {clients} clients that "
                f"are averaged together"
            )
            most = f"at most {_most_attackers(clients)}" if clients >= 3 else "another rule"
            raise RecipeError("method", [f"{mistake}, where {self.fewest} are needed; use {most}"])

    def count(self, n: int, f: int) -> int:
        """Return how many of n clients, f of them attackers, are averaged."""
        return 1

    def combine(self, replies: Replies, around: Named) -> Tensors:
        models = ordered(replies)
        f = min(self.attackers, _most_attackers(len(models)))
        products = _products(list(models.values()), around)
        norms = products.diagonal()
        distances = (norms[:, None] + norms - 2 * products).clamp(min=0).fill_diagonal_(math.inf)
        # sums of squared distances to the nearest
        scores = distances.sort(dim=1).values[:, : max(len(models) - f - 2, 0)].sum(dim=1)
        best = scores.argsort(stable=True)[: self.count(len(models), f)].tolist()
        return uniform_mean({i: model for k, (i, model) in enumerate(models.items()) if k in best})


class MultiKrum(Krum):
    """The mean of the m clients that Krum scores best (Blanchard et al. 2017).

    It withstands f attackers among n >= 2f + 3 clients, and breaks at f + 1 if m is n - f. What
    fewer send in a round is left out, and m is at most n - f.
    """

    # the mean of the clients with the nearest neighbours
    rule: Literal["multi-krum"] = "multi-krum"  # type: ignore[assignment]
    # m, number of clients that are averaged; null: n - f
    keep: Annotated[int | None, Field(ge=1)] = None

    def check(self, clients: int) -> None:
        super().check(clients)
        if (self.keep or 0) > clients - self.attackers:
            mistake = (
                f"method.aggregation.keep: {self.keep} of {clients} clients, {self.attackers} of "
                f"which may be attackers"
            )
            raise RecipeError("method", [f"{mistake}; use at most {clients - self.attackers}"])

    def count(self, n: int, f: int) -> int:
        return min(self.keep or n, n - f)


class GeometricMedian(Combining):
    """The vector with the least sum of distances to all models, by the smoothed Weiszfeld algorithm
    (Pillutla et al. 2022, RFA).

    It withstands fewer than half of the clients, and breaks at n/2. Every iterate is a mean of the
    models, weighted by 1 / max(eps, distance), from the uniform one on, so that iterations need no
    more than inner products of updates.
    """

    # the vector with the least sum of distances
    rule: Literal["geometric-median"] = "geometric-median"
    iterations: Annotated[int, Field(ge=1)] = 100  # iterations of the Weiszfeld algorithm
    # nu, the distance below which all models have the same weight
    eps: Annotated[float, Field(gt=0)] = 1e-6

    @property
    def fewest(self) -> int:
        return 3

    def combine(self, replies: Replies, around: Named) -> Tensors:
        models = ordered(replies)
        products = _products(list(models.values()), around)
        weights = torch.full((len(models),), 1 / len(models), dtype=torch.float64)
        for _ in range(self.iterations):
            squared = products.diagonal() - 2 * products @ weights + weights @ products @ weights
            weights = 1 / squared.clamp(min=0).sqrt().clamp(min=self.eps)
            weights /= weights.sum()
        return weighted_mean(models, dict(zip(models, weights.tolist(), strict=True)))


class ClippedMean(Combining):
    """The mean of clipped updates: what was sent + 1/n sum_i u_i min(1, tau / |u_i|), u_i the
    update of client i (Sun et al. 2019).

    It is one iteration of centred clipping around what was sent (Karimireddy et al. 2021). A client
    moves it by tau / n at most: with a tau that is given, no number of attackers moves it further
    than tau in a round. With the median of a round's norms it withstands fewer than half of the
    clients, and breaks at n/2. One client alone is clipped too if tau is given.
    """

    rule: Literal["clipped-mean"] = "clipped-mean"  # the mean of updates of limited norm
    # tau, largest norm of an update; null: the median of the norms of a round
    norm: Annotated[float | None, Field(gt=0)] = None

    @property
    def fewest(self) -> int:
        return 0 if self.norm else 3

    def combine(self, replies: Replies, around: Named) -> Tensors:
        models = ordered(replies)
        squared = torch.zeros(len(models), dtype=torch.float64)
        for part in _updates(list(models.values()), around):
            squared += part.square().sum(dim=1).cpu()
        norms = squared.sqrt().tolist()
        limit = statistics.median(norms) if self.norm is None else self.norm
        shares = [min(1.0, limit / norm) if norm > 0 else 1.0 for norm in norms]
        mean = weighted_sum(
            (share / len(models), model)
            for share, model in zip(shares, models.values(), strict=True)
        )
        if rest := 1 - sum(shares) / len(models):
            for name in mean.keys() & around.keys():
                mean[name].add_(around[name].to(mean[name].device), alpha=rest)
        return mean


def _most_attackers(n: int) -> int:
    return max((n - 3) // 2, 0)


def _updates(models: Sequence[Named], around: Named) -> Iterator[Tensor]:
    """Yield the clients' updates in parts, (n, columns) float64, as large models are not copied."""
    for name in sorted(models[0]):  # a wire may bring tensors in another order
        like, *others = (model[name].flatten() for model in models)
        start = around[name].flatten().to(like.device) if name in around else torch.zeros_like(like)
        pieces = (torch.split(value, CHUNK) for value in (start, like, *others))
        for origin, *rows in zip(*pieces, strict=True):
            yield devices.exact(torch.stack(rows)) - devices.exact(origin)


def _products(models: Sequence[Named], around: Named) -> Tensor:
    """(n, n) float64: inner products of updates, which are as long as their distances."""
    products = torch.zeros(len(models), len(models), dtype=torch.float64)
    for part in _updates(models, around):
        products += (part @ part.T).cpu()
    return products


Rule = Annotated[
    Annotated[Mean, Tag("mean")]
    | Annotated[Median, Tag("median")]
    | Annotated[TrimmedMean, Tag("trimmed-mean")]
    | Annotated[Krum, Tag("krum")]
    | Annotated[MultiKrum, Tag("multi-krum")]
    | Annotated[GeometricMedian, Tag("geometric-median")]
    | Annotated[ClippedMean, Tag("clipped-mean")],
    unions.by("rule", Mean, Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, ClippedMean),
]


class Attack(BaseModel):
    """An attack on the aggregation: which clients attack, and what each sends instead of its update
    u. For experiments with `method.aggregation`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # sign-flip: -scale u; scaled: scale u; noise: a random direction with the norm of scale u; nan:
    # NaN
    kind: Literal["sign-flip", "scaled", "noise", "nan"]
    # attackers: a number (the first ones by id), or a list of ids
    clients: Annotated[int, Field(ge=0)] | tuple[str, ...] = 1
    scale: float = Field(10.0, gt=0)  # scale of the false update, relative to the true one

    def attackers(self, clients: Iterable[ClientId]) -> frozenset[ClientId]:
        """Return the attackers. Raises RecipeError: there are too few clients or an unknown id."""
        known, mistakes = sorted(clients), list[str]()
        if isinstance(self.clients, int):
            attackers = known[: self.clients]
            if self.clients > len(known):
                count = f"{self.clients} attackers among {len(known)} clients"
                mistakes = [f"{count}; use at most that many"]
        else:
            attackers, there = [normal(i) for i in self.clients], f"there are {', '.join(known)}"
            mistakes = [f"there is no client {i!r}; {there}" for i in attackers if i not in known]
        if mistakes:
            raise RecipeError("attack", [f"attack.clients: {mistake}" for mistake in mistakes])
        return frozenset(attackers)


def poisoned(
    reply: Named, sent: Named, is_update: bool, attack: Attack, generator: torch.Generator
) -> Tensors:
    """Return what an attacker sends in place of an honest reply, in its form; integers are kept.

    The false update of what `is_update` is added to what was sent; otherwise, and for names that
    were not sent, to zero. Raises TensorError for a tensor of another form than was sent.
    """
    honest = {name: t for name, t in reply.items() if t.is_floating_point()}
    if attack.kind == "nan":
        return dict(reply) | {name: torch.full_like(t, torch.nan) for name, t in honest.items()}
    origin = {
        name: sent[name].to(t.device) if is_update and name in sent else torch.zeros_like(t)
        for name, t in honest.items()
    }
    update = axpy(-1.0, origin, honest)
    if attack.kind == "noise":
        update = weighted_sum([(length(update), _direction(update, generator))])
    scale = -attack.scale if attack.kind == "sign-flip" else attack.scale
    return dict(reply) | axpy(scale, update, origin)


def _direction(like: Named, generator: torch.Generator) -> Tensors:
    """Return a uniformly random direction, of norm 1 over all names."""
    drawn = {
        name: torch.randn(
            like[name].shape, generator=generator, dtype=like[name].dtype, device=generator.device
        ).to(like[name].device)
        for name in sorted(like)
    }
    return weighted_sum([(1 / (length(drawn) or 1.0), drawn)])
