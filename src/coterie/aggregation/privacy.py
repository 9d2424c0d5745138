"""Differential privacy of the shared tensors, by clients: clipping, Gaussian noise, and how much privacy a run has spent.

Federations are neighbours if they differ in what one client contributes. Either its contribution is zero in one of them (add or remove,
with the number of clients public: sensitivity C), or it is replaced by any other (sensitivity 2C, as two vectors of norm C are that far
apart). `Accountant` says which of the two its epsilon is for.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018 (clients as the unit, clipping of updates); Andrew
et al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021; Wang, Balle and Kasiviswanathan, "Subsampled Rényi
Differential Privacy and Analytical Moments Accountant", AISTATS 2019.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from coterie.errors import Refused
from coterie.protocol import ClientId, Replies
from coterie.tensors import Named, Tensors, axpy, check_alike
from coterie.tensors import norm as length

ORDERS = np.union1d(1 + np.geomspace(1e-3, 1e4, 300), np.arange(2, 100))  # alpha of the Rényi divergences that are tried
MOST = 500.0  # an epsilon beyond it is called infinite: it protects nobody
_SEEN = {"central": "that the server sends, whoever sees them", "local": "that a client sends, whoever sees them, the server too"}
_BESIDE = "not losses, scores, numbers of samples, who takes part, nor a personal model that its client gives away"


class Adaptive(BaseModel):
    """A norm C that follows a quantile of the norms of the updates (Andrew et al., 2021, Algorithm 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    quantile: Annotated[float, Field(gt=0, lt=1, description="gamma, the share of updates that C should leave as they are")] = 0.5
    lr: Annotated[float, Field(gt=0, description="eta_C, the step of the geometric update of C")] = 0.2
    noise: Annotated[
        float,
        Field(gt=0, description="sigma_b, the standard deviation of the noise on how many updates were within C; its authors: n / 20"),
    ]


class Privacy(BaseModel):
    """Differential privacy of the tensors that clients share, with a client as the unit; nothing else that leaves a client is covered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    where: Annotated[
        Literal["central", "local"],
        Field(description="central: the server, which is trusted, clips and adds noise; local: each client, before anything leaves it"),
    ]
    clip: Annotated[float, Field(gt=0, description="C, the norm that an update is clipped to, all shared tensors as one vector")]
    noise: Annotated[
        float, Field(ge=0, description="z, the noise multiplier: the standard deviation of the noise is z C; 0: none, and no privacy")
    ]
    delta: Annotated[
        float | None,
        Field(gt=0, lt=1, description="null: 1 / N^1.1 with N clients, which says little for few clients; better well below 1 / N"),
    ] = None
    adaptive: Annotated[Adaptive | None, Field(description="C as a quantile of the norms, from `clip`; null: C stays; central only")] = None

    @field_validator("adaptive")
    @classmethod
    def _check_adaptive(cls, adaptive: Adaptive | None, info: ValidationInfo) -> Adaptive | None:
        if adaptive is None:
            return None
        if info.data.get("where") == "local":
            raise ValueError("a client alone cannot know a quantile; use where: central, or null")
        if 2 * adaptive.noise <= info.data.get("noise", 0):
            raise ValueError(f"noise must be more than half of privacy.noise {info.data['noise']}: the count takes its part of the privacy")
        return adaptive

    @property
    def update_noise(self) -> float:
        """The multiplier of the noise on updates: z, or z_Delta where the count of those within C costs some (Andrew et al., Theorem 1)."""
        if self.adaptive is None or self.noise == 0:
            return self.noise
        return float((self.noise**-2 - (2 * self.adaptive.noise) ** -2) ** -0.5)

    def delta_of(self, clients: int) -> float:
        """Delta for so many clients. Raises Refused for one client without `delta`: 1 / N^1.1 would be 1."""
        if self.delta is None and clients < 2:
            raise Refused("privacy.delta: there is no default for a single client", "Give one, for instance --set privacy.delta=1e-5")
        return self.delta or clients**-1.1


def clipped(reply: Named, sent: Named, norm: float) -> tuple[Tensors, bool]:
    """The reply with its update, reply - sent, multiplied by min(1, C / |update|); integers are left alone.

    Args:
        reply: What a client sent back.
        sent: What it had got, with at least the floating tensors of the reply.
        norm: C, of all tensors of the update as one vector.

    Returns:
        The reply with a clipped update, and whether it was clipped. Within the norm it is exactly the reply.

    Raises:
        TensorError: A floating tensor of the reply was not sent in that form: it has no update that could be clipped.
    """
    trained = {name: t for name, t in reply.items() if t.is_floating_point()}
    origin = {name: sent[name].to(t.device) for name, t in trained.items() if name in sent}
    check_alike(origin, trained, "update to be clipped")
    update = axpy(-1.0, origin, trained)
    size = length(update)
    if size <= norm:
        return dict(reply), False
    return dict(reply) | axpy(norm / size, update, origin), True


def noised(named: Named, deviation: float, generator: torch.Generator) -> Tensors:
    """N(0, deviation^2) added to every coordinate, tensors in the order of their names; integers are left alone."""
    found = dict(named)
    for name in sorted(name for name, t in named.items() if t.is_floating_point()):
        t = named[name]
        noise = torch.randn(t.shape, generator=generator, dtype=t.dtype, device=generator.device)
        found[name] = t + deviation * noise.to(t.device)
    return found


def local(reply: Named, sent: Named, privacy: Privacy, generator: torch.Generator) -> Tensors:
    """A reply as it may leave a client that trusts nobody: clipped, and N(0, (z C)^2) on every coordinate.

    It hides which update was made among all of norm C at most. Any two of them are up to 2C apart, and neither the mean nor the other
    clients help: one reply is a Gaussian mechanism of noise multiplier z / 2, and so `Accountant` counts it. The server must not be able
    to draw the same noise: the seed of the generator has to be the client's secret.

    Raises:
        TensorError: As `clipped`.
    """
    return noised(clipped(reply, sent, privacy.clip)[0], privacy.noise * privacy.clip, generator)


def central(
    replies: Replies, to: Mapping[ClientId, Named], privacy: Privacy, clip: float, generator: torch.Generator
) -> tuple[dict[ClientId, Tensors], float]:
    """Replies whose uniform mean is differentially private, each of them alone is not.

    Each of the n is clipped and gets N(0, (z C)^2 / n), so that their mean has exactly N(0, (z C / n)^2), their sum N(0, (z C)^2), however
    many of those that were asked have replied. Noise is drawn in the order of the client ids.

    Args:
        replies: What the clients sent back.
        to: What each had got.
        privacy: z, and how C adapts.
        clip: C of this exchange.
        generator: Of the noise; its seed has to be the server's secret.

    Returns:
        The replies in their order, and C of the next exchange.

    Raises:
        TensorError: As `clipped`.
    """
    deviation, within, found = privacy.update_noise * clip / math.sqrt(max(len(replies), 1)), 0, {}
    for i in sorted(replies):
        reply, cut = clipped(replies[i], to[i], clip)
        found[i] = noised(reply, deviation, generator)
        within += not cut
    return {i: found[i] for i in replies}, _next_clip(within, len(replies), privacy.adaptive, clip, generator)


def _next_clip(within: int, replies: int, adaptive: Adaptive | None, clip: float, generator: torch.Generator) -> float:
    """C exp(-eta_C (b - gamma)), b being the share of updates within C as a noisy count tells it."""
    if adaptive is None or not replies:
        return clip
    noise = adaptive.noise * float(torch.randn((), generator=generator, dtype=torch.float64, device=generator.device))
    return clip * math.exp(-adaptive.lr * ((within + noise) / replies - adaptive.quantile))


@dataclass
class Accountant:
    """How much privacy a run has spent.

    Central: one guarantee for every client, against whoever sees all models that the server sends. If all clients are asked in every
    exchange, it is a composition of Gaussian mechanisms, exactly, for neighbours by adding or removing one client. If a number of them is
    drawn, without replacement, neighbours are by replacing one client, as the number stays, and epsilon is a Rényi bound; it holds against
    those who do not know who was drawn. Who was asked and did not answer makes no difference.

    Local: the guarantee of a client against everybody, for neighbours by replacement, over all exchanges that were counted. For a client
    that took part in fewer, keep an Accountant of its own and count those.

    Args:
        privacy: The recipe's section.
        clients: N, all clients of the federation.
        runs: The state, which is JSON: exchanges as (count, rate), the rate being the share of the clients that was drawn.

    Raises:
        Refused: The library that counts is not installed, or there is no delta.
    """

    privacy: Privacy
    clients: int
    runs: list[tuple[int, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gdp, self.rdp = _library()
        self.delta = self.privacy.delta_of(self.clients)
        self.runs = [(count, rate) for count, rate in self.runs]

    def spend(self, participants: int, population: int) -> None:
        """Count one training exchange.

        Args:
            participants: How many clients were asked, whether they replied or not.
            population: How many they were drawn from, each set of them being as likely as any other; who is always asked was not drawn.

        Raises:
            ValueError: There were more participants than clients.
        """
        if not 0 <= participants <= population:
            raise ValueError(f"{participants} participants of {population} clients")
        if not participants:
            return
        rate = 1.0 if self.privacy.where == "local" else participants / population
        counts = {known: count for count, known in self.runs}
        counts[rate] = counts.get(rate, 0) + 1
        self.runs = [(count, known) for known, count in counts.items()]

    @property
    def exchanges(self) -> int:
        """How many were counted."""
        return sum(count for count, _ in self.runs)

    @property
    def drawn(self) -> bool:
        """Whether some exchange was with a part of the clients only."""
        return any(rate < 1 for _, rate in self.runs)

    @property
    def multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity, which is C or 2C: z or z / 2."""
        return self.privacy.noise / 2 if self.drawn or self.privacy.where == "local" else self.privacy.noise

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that is known for a delta; infinite beyond 500."""
        if not self.runs:
            return 0.0
        if not self.multiplier:
            return math.inf
        found = min(self._of_all(delta), self._of_drawn(delta)) if self.drawn else self._of_all(delta)
        return max(found, 0.0) if found <= MOST else math.inf

    def _of_all(self, delta: float) -> float:
        """Of T Gaussian mechanisms, which are one with mu = sqrt(T) / z: exact (Balle and Wang, 2018), as if nobody had been drawn."""
        mu = math.sqrt(self.exchanges) / self.multiplier
        if self.gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
            return 0.0
        if self.gdp.delta_eps_mu(eps=MOST, mu=mu) > delta:
            return math.inf
        return float(self.gdp.eps_from_mu(mu=mu, delta=delta))

    def _of_drawn(self, delta: float) -> float:
        """What is gained by drawing clients: Rényi divergences, which add up over exchanges."""
        spent = sum(count * np.array([rdp_of_drawn(rate, self.multiplier, order) for order in ORDERS]) for count, rate in self.runs)
        epsilon, _ = self.rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
        return float(epsilon)

    def summary(self) -> dict[str, Any]:
        """What a result says of it; an epsilon that is infinite is null."""
        epsilon = self.epsilon(self.delta)
        return {
            "epsilon": epsilon if math.isfinite(epsilon) else None,
            "delta": self.delta,
            "where": self.privacy.where,
            "noise": self.privacy.noise,
            "clip": self.privacy.clip,
            "sampling": f"{self.exchanges} exchanges, {self._sampling()}",
            "covers": f"the shared tensors {_SEEN[self.privacy.where]}; {_BESIDE}",
        }

    def _sampling(self) -> str:
        if self.privacy.where == "local":
            return "for a client that took part in all of them; neighbours: a client's update is replaced by any other (sensitivity 2C)"
        if self.drawn:
            return "clients drawn uniformly without replacement; neighbours: one client is replaced by any other (sensitivity 2C)"
        return "all clients in each; neighbours: one client is added or removed, with their number public (sensitivity C)"


def rdp_of_drawn(rate: float, multiplier: float, order: float) -> float:
    """An upper bound of the Rényi divergence of one Gaussian mechanism on clients that are drawn without replacement.

    Wang et al. (2019), Theorem 9 with an unbounded divergence of infinite order; between whole orders, Corollary 10. Never more than
    without drawing, which joint quasi-convexity of the divergence forbids.

    Args:
        rate: m / N.
        multiplier: The noise's standard deviation over the sensitivity to the replacement of one client.
        order: alpha > 1.
    """
    plain = order / (2 * multiplier**2)
    if rate == 1:
        return plain
    low, high = math.floor(order), math.ceil(order)
    moment = _log_moment(rate, multiplier, high)
    if low < high:
        moment = (high - order) * _log_moment(rate, multiplier, low) + (order - low) * moment
    return min(moment / (order - 1), plain)


def _log_moment(rate: float, multiplier: float, order: int) -> float:
    """(alpha - 1) times the bound, for a whole alpha: log(1 + sum_{j=2}^alpha binom(alpha, j) rate^j c_j)."""
    from scipy.special import gammaln, logsumexp

    if order == 1:
        return 0.0
    j = np.arange(2, order + 1)
    c = math.log(2) + j * (j - 1) / (2 * multiplier**2)  # 2 exp((j - 1) eps(j))
    second = multiplier**-2  # eps(2)
    c[0] = min(c[0], math.log(4) + second + math.log(-math.expm1(-second)))  # 4 (exp(eps(2)) - 1)
    binomial = gammaln(order + 1) - gammaln(j + 1) - gammaln(order - j + 1)
    return float(logsumexp(np.append(binomial + j * math.log(rate) + c, 0.0)))


def _library() -> tuple[ModuleType, ModuleType]:
    """What opacus knows of Gaussian and of Rényi differential privacy. Raises Refused without it."""
    try:
        from opacus.accountants.analysis import gdp, rdp
    except ImportError:
        raise Refused("privacy: without opacus nobody counts what is spent", "Install it with: pip install 'coterie[privacy]'") from None
    return gdp, rdp
