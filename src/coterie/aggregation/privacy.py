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

from coterie.aggregation.noise import Source, check_installed, grid, on_grid, protected
from coterie.errors import Refused, extra
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
    """Differential privacy of the tensors that clients share, of whole clients or of single examples; nothing else is covered."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Annotated[
        Literal["client", "example"],
        Field(description="what is protected: client, all data of one; example, each window or image of a client, by DP-SGD on the client"),
    ] = "client"
    where: Annotated[
        Literal["central", "local"] | None,
        Field(
            description="of unit client: central: the server, which is trusted, clips and adds noise; local: each client, before anything "
            "leaves it; of unit example: null, each client clips and adds noise in every step",
            validate_default=True,
        ),
    ] = None
    clip: Annotated[
        float,
        Field(gt=0, description="C, the norm that an update is clipped to, or an example's gradient; all shared tensors as one vector"),
    ]
    noise: Annotated[
        float, Field(ge=0, description="z, the noise multiplier: the standard deviation of the noise is z C; 0: none, and no privacy")
    ]
    delta: Annotated[
        float | None,
        Field(
            gt=0,
            lt=1,
            description="null: 1 / N^1.1 with N clients, which says little for few of them, or with N examples of the largest client; "
            "better well below 1 / N",
        ),
    ] = None
    adaptive: Annotated[Adaptive | None, Field(description="C as a quantile of the norms, from `clip`; null: C stays; central only")] = None

    @field_validator("where")
    @classmethod
    def _check_where(cls, where: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("unit") == "example" and where is not None:
            raise ValueError("with unit: example each client clips and adds noise in every step; leave it out")
        if info.data.get("unit") == "client" and where is None:
            raise ValueError("with unit: client choose central or local")
        return where

    @field_validator("adaptive")
    @classmethod
    def _check_adaptive(cls, adaptive: Adaptive | None, info: ValidationInfo) -> Adaptive | None:
        if adaptive is None:
            return None
        if info.data.get("unit") == "example":
            raise ValueError("a norm that follows a quantile is of whole updates; with unit: example use null")
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

    def delta_of(self, units: int) -> float:
        """Delta for so many clients, or examples. Raises Refused for one without `delta`: 1 / N^1.1 would be 1."""
        if self.delta is None and units < 2:
            raise Refused(f"privacy.delta: there is no default for a single {self.unit}", "Give one, for instance --set privacy.delta=1e-5")
        return self.delta or units**-1.1


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


def local(reply: Named, sent: Named, privacy: Privacy, source: Source) -> Tensors:
    """A reply as it may leave a client that trusts nobody: clipped, and N(0, (z C)^2) on every coordinate, see `noise.protected`.

    It hides which update was made among all of norm C at most. Any two of them are up to 2C apart, and neither the mean nor the other
    clients help: one reply is a Gaussian mechanism of noise multiplier z / 2, and so `Accountant` counts it. The server must not be able
    to draw the same noise: the key of the source has to be the client's secret. Without noise the reply is only clipped.

    Raises:
        TensorError: As `clipped`; or a value is not a number.
    """
    if not privacy.noise:
        return clipped(reply, sent, privacy.clip)[0]
    update, origin = _update(reply, sent)
    return dict(reply) | _moved(origin, protected(update, privacy.clip, privacy.noise * privacy.clip, source))


def central(
    replies: Replies, to: Mapping[ClientId, Named], privacy: Privacy, clip: float, source: Source
) -> tuple[dict[ClientId, Tensors], float]:
    """Replies whose uniform mean is differentially private: all of them have moved by the same, the noisy mean of the clipped updates.

    The sum of the n clipped updates, as integers on a grid, gets N(0, (z C)^2), the mean so N(0, (z C / n)^2), however many of those that
    were asked have replied. Nothing is made of a single update, so that no rounding of a later sum can tell of one. Without noise each
    reply is only clipped.

    Args:
        replies: What the clients sent back, all of the same form.
        to: What each had got.
        privacy: z, and how C adapts.
        clip: C of this exchange.
        source: Of the noise; its key has to be the server's secret.

    Returns:
        The replies in their order, and C of the next exchange.

    Raises:
        TensorError: As `clipped`; or the updates are not of one form, or a value is not a number.
    """
    deviation = privacy.update_noise * clip
    if deviation and replies:
        found, within = _noisy_mean(replies, to, clip, deviation, source)
    else:
        cut = {i: clipped(reply, to[i], clip) for i, reply in replies.items()}
        found, within = {i: reply for i, (reply, _) in cut.items()}, sum(not beyond for _, beyond in cut.values())
    return found, _next_clip(within, len(replies), privacy.adaptive, clip, source)


def _noisy_mean(
    replies: Replies, to: Mapping[ClientId, Named], clip: float, deviation: float, source: Source
) -> tuple[dict[ClientId, Tensors], int]:
    """Replies that have all moved by the noisy mean, and how many updates were within C."""
    step, within = grid(clip, deviation), 0
    first: Named = {}
    total = np.zeros((), np.int64)
    for i, reply in replies.items():
        update, origin = _update(reply, to[i])
        first = first or origin
        check_alike(first, origin, f"update of client {i!r}, to be summed")
        total = total + on_grid(update, clip, step)
        within += float(np.linalg.norm(update)) <= clip
    mean = (total + source.gaussian(total.size, deviation / step)) * (step / len(replies))
    moved = {id(to[i]): _moved({name: to[i][name] for name in first}, mean) for i in replies}  # most often all were sent the same
    return {i: dict(reply) | moved[id(to[i])] for i, reply in replies.items()}, within


def _update(reply: Named, sent: Named) -> tuple[np.ndarray, Tensors]:
    """The update, reply - sent, (d,) float64 in the order of the names, and what was sent of it. Raises TensorError as `clipped`."""
    trained = {name: reply[name] for name in sorted(reply) if reply[name].is_floating_point()}
    origin = {name: sent[name] for name in trained if name in sent}
    check_alike(origin, trained, "update to be clipped")
    if not trained:
        return np.empty(0), {}
    after, before = (torch.cat([t.detach().flatten().cpu() for t in named.values()]).double() for named in (trained, origin))
    return (after - before).numpy(), origin


def _moved(origin: Named, update: np.ndarray) -> Tensors:
    """Tensors plus an update, (d,) in the order of their names, rounded to their own precision."""
    found, vector, start = {}, torch.from_numpy(update), 0
    for name in sorted(origin):
        form = origin[name]
        part = vector[start : start + form.numel()].view(form.shape)
        found[name] = (form.detach().cpu().double() + part).to(form.device, form.dtype)
        start += form.numel()
    return found


def _next_clip(within: int, replies: int, adaptive: Adaptive | None, clip: float, source: Source) -> float:
    """C exp(-eta_C (b - gamma)), b being the share of updates within C as a noisy count tells it."""
    if adaptive is None or not replies:
        return clip
    step = grid(1.0, adaptive.noise)  # at most 1/2, so that the count, less half the replies as in the paper, is on the grid
    noise = step * int(source.gaussian(1, adaptive.noise / step)[0])
    return clip * math.exp(-adaptive.lr * ((within + noise) / replies - adaptive.quantile))


@dataclass
class Ledger:
    """What Gaussian mechanisms of unlike noise have spent together, for one client, or for all of them.

    Args:
        entries: The state, which is JSON: (count, rate, multiplier) each. The rate is the share of those that could have taken part which
            was drawn, without replacement; 1 where nobody was drawn. The multiplier is the noise's standard deviation over the
            sensitivity: z for neighbours by adding or removing, z / 2 for neighbours by replacement. All must be for the same neighbours.

    Raises:
        Refused: The library that counts is not installed.
    """

    entries: list[tuple[int, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gdp, self.rdp = library()
        self.entries = [(count, rate, multiplier) for count, rate, multiplier in self.entries]

    def spend(self, multiplier: float, rate: float = 1.0, count: int = 1) -> None:
        """Count so many uses of a mechanism."""
        counts = {(known, noise): before for before, known, noise in self.entries}
        counts[rate, multiplier] = counts.get((rate, multiplier), 0) + count
        self.entries = [(count, rate, multiplier) for (rate, multiplier), count in counts.items()]

    @property
    def mu(self) -> float:
        """Of the one Gaussian mechanism, of sensitivity mu and noise 1, that all are together, had nobody been drawn: sqrt(sum 1 / z^2)."""
        if not all(multiplier for _, _, multiplier in self.entries):
            return math.inf
        return math.sqrt(sum(count / multiplier**2 for count, _, multiplier in self.entries))

    def epsilon(self, delta: float) -> float:
        """The smallest epsilon that is known for a delta; infinite beyond 500."""
        if not self.entries:
            return 0.0
        if math.isinf(self.mu):
            return math.inf
        drawn = any(rate < 1 for _, rate, _ in self.entries)
        found = min(self._of_all(delta), self._of_drawn(delta)) if drawn else self._of_all(delta)
        return max(found, 0.0) if found <= MOST else math.inf

    def _of_all(self, delta: float) -> float:
        """As if nobody had been drawn: exact (Balle and Wang, 2018; Dong, Roth and Su, 2022, on composition)."""
        if self.gdp.delta_eps_mu(eps=0.0, mu=self.mu) <= delta:
            return 0.0
        if self.gdp.delta_eps_mu(eps=MOST, mu=self.mu) > delta:
            return math.inf
        return float(self.gdp.eps_from_mu(mu=self.mu, delta=delta))

    def _of_drawn(self, delta: float) -> float:
        """What is gained by drawing: Rényi divergences, which add up."""
        spent = sum(count * np.array([rdp_of_drawn(rate, noise, order) for order in ORDERS]) for count, rate, noise in self.entries)
        epsilon, _ = self.rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
        return float(epsilon)


@dataclass
class Accountant:
    """How much privacy a run has spent.

    Central: one guarantee for every client, against whoever sees all models that the server sends. If all clients are asked in every
    exchange, it is a composition of Gaussian mechanisms, exactly, for neighbours by adding or removing one client. If a number of them is
    drawn, without replacement, neighbours are by replacing one client, as the number stays, and epsilon is a Rényi bound; it holds against
    those who do not know who was drawn, and cannot find out. Who was asked and did not answer makes no difference.

    Local: the guarantee of a client against everybody, for neighbours by replacement, over all exchanges that were counted. For a client
    that took part in fewer, keep an Accountant of its own and count those.

    Args:
        privacy: The recipe's section.
        clients: N, all clients of the federation.
        runs: The state, which is JSON: exchanges as (count, rate), the rate being the share of the clients that was drawn.
        experiment: Whether noise and draws are repeated from the run's seed, as in a simulation: whoever has that is not covered.

    Raises:
        Refused: A library that counts or draws noise is not installed, or there is no delta.
    """

    privacy: Privacy
    clients: int
    runs: list[tuple[int, float]] = field(default_factory=list)
    experiment: bool = False

    def __post_init__(self) -> None:
        library()
        check_installed()
        self.delta = self.privacy.delta_of(self.clients)
        self.runs = [(count, rate) for count, rate in self.runs]

    def spend(self, participants: int, population: int) -> None:
        """Count one training exchange.

        Args:
            participants: How many clients were drawn, whether they could be reached, and replied, or not.
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
        return Ledger([(count, rate, self.multiplier) for count, rate in self.runs]).epsilon(delta)

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
            "experiment": self.experiment,
            "assumes": self._assumed(),
            "covers": f"the shared tensors {_SEEN[str(self.privacy.where)]}; {_BESIDE}",
        }

    def _assumed(self) -> str:
        """What must be so for epsilon to hold."""
        if self.experiment:
            return "an experiment: whoever has the recipe's seed can draw the same noise, and the same clients, and is not covered"
        if self.privacy.where == "local":
            return "each device keeps the key of its noise to itself"
        drawn = "; the observer does not know who was drawn when, as the server and the files of its run do" if self.drawn else ""
        return f"the server keeps the key of its noise to itself{drawn}"

    def _sampling(self) -> str:
        if self.privacy.where == "local":
            return "for a client that took part in all of them; neighbours: a client's update is replaced by any other (sensitivity 2C)"
        if self.drawn:
            return "clients drawn uniformly without replacement; neighbours: one client is replaced by any other (sensitivity 2C)"
        return "all clients in each; neighbours: one client is added or removed, with their number public (sensitivity C)"


def epsilon_of(squared: float, renyi: np.ndarray, delta: float) -> float:
    """The smallest epsilon that is known of a composition of mechanisms; infinite beyond 500.

    Args:
        squared: The sum of mu^2 over its Gaussian mechanisms.
        renyi: The sum of the Rényi divergences of all others, (orders,) over `ORDERS`; empty: there are none.
        delta: Of the guarantee.

    Raises:
        Refused: The library that counts is not installed.
    """
    if not squared and not renyi.any():
        return 0.0
    if not renyi.any():
        return Ledger([(1, 1.0, squared**-0.5)]).epsilon(delta)
    _, rdp = library()
    epsilon, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=renyi + squared * ORDERS / 2, delta=delta)
    return max(float(epsilon), 0.0) if epsilon <= MOST else math.inf


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


def library() -> tuple[ModuleType, ModuleType]:
    """What opacus knows of Gaussian and of Rényi differential privacy. Raises Refused without it."""
    try:
        from opacus.accountants.analysis import gdp, rdp
    except ImportError:
        raise Refused("privacy: without opacus nobody counts what is spent", extra("privacy")) from None
    return gdp, rdp
