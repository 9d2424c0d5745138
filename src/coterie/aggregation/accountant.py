"""Privacy accounting for whole clients: Renyi divergences, and epsilon from them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

import numpy as np

from coterie.aggregation.noise import check_installed
from coterie.aggregation.privacy import EXPERIMENT, Privacy
from coterie.core.importing import require
from coterie.core.result import PrivacySpent

# alpha of the Rényi divergences that are tried
ORDERS = np.union1d(1 + np.geomspace(1e-3, 1e4, 300), np.arange(2, 100))
MOST = 500.0  # a larger epsilon is reported as infinite: it protects nobody
_SEEN = {
    "central": "that the server sends, whoever sees them",
    "local": "that a client sends, whoever sees them, the server too",
}
_DRAWN = (
    "; the observer does not know who was drawn when, as the server and the files of its run do"
)
NOT_COVERED = (
    "not losses, scores, numbers of samples, who takes part, nor a personal model that its "
    "client gives away"
)


def epsilon_of_gaussians(uses: Sequence[tuple[int, float, float]], delta: float) -> float:
    """Return the smallest known epsilon of Gaussian mechanisms of the same notion of neighbours;
    infinite beyond 500. Raises Refused if the accounting library is missing.

    `uses` are (count, rate, multiplier) each. The rate is the share that was drawn, without
    replacement, of those that could have taken part; 1 if nobody was drawn. The multiplier is the
    noise's standard deviation over the sensitivity: z for neighbours by adding or removing, z / 2
    for neighbours by replacement.
    """
    if not uses:
        return 0.0
    if not all(multiplier for _, _, multiplier in uses):
        return math.inf
    gdp, rdp = library()
    # without drawing they are together one of sensitivity mu and noise 1, whose epsilon is exact
    # (Balle and Wang, 2018; Dong, Roth, Su, 2022)
    mu = math.sqrt(sum(count / multiplier**2 for count, _, multiplier in uses))
    epsilon = math.inf
    if gdp.delta_eps_mu(eps=0.0, mu=mu) <= delta:
        epsilon = 0.0
    elif gdp.delta_eps_mu(eps=MOST, mu=mu) <= delta:
        epsilon = float(gdp.eps_from_mu(mu=mu, delta=delta))
    if any(rate < 1 for _, rate, _ in uses):  # by Rényi divergences, which add up
        spent = sum(
            count * np.array([rdp_of_drawn(rate, noise, order) for order in ORDERS])
            for count, rate, noise in uses
        )
        drawn, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
        epsilon = min(epsilon, float(drawn))
    return max(epsilon, 0.0) if epsilon <= MOST else math.inf


@dataclass
class Accountant:
    """The privacy that a run has spent. Raises Refused if a library that counts or draws noise is
    not installed, or there is no delta.

    Central: one guarantee for every client, against whoever sees all models that the server sends.
    If all clients are asked in every exchange, it is a composition of Gaussian mechanisms, exactly,
    for neighbours by adding or removing one client. If a fixed number is drawn without replacement,
    neighbours are by replacing one client, and epsilon is a Rényi bound that holds against those
    who do not know who was drawn, and cannot find out. It does not matter who failed to answer.

    Local: the guarantee of a client against everybody, for neighbours by replacement, over all
    counted exchanges. For a client that took part in fewer, keep an Accountant of its own.
    """

    privacy: Privacy  # the recipe's section
    clients: int  # N, all clients of the federation
    # the state, JSON values: exchanges as (count, rate), with the share of clients drawn
    runs: list[tuple[int, float]] = field(default_factory=list)
    # whether noise and draws follow from the run's seed, as in a simulation: whoever knows it is
    # not covered
    experiment: bool = False

    def __post_init__(self) -> None:
        library()
        check_installed()
        self.delta = self.privacy.delta_of(self.clients)
        self.runs = [(count, rate) for count, rate in self.runs]

    def spend(self, participants: int, population: int) -> None:
        """Count a training exchange with so many clients, whether or not they replied, drawn from a
        population, each set of them being equally likely; a client that is always asked was not
        drawn. Raises ValueError for more participants than clients.
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
        """The number of exchanges counted."""
        return sum(count for count, _ in self.runs)

    @property
    def drawn(self) -> bool:
        """Whether some exchange was with only part of the clients."""
        return any(rate < 1 for _, rate in self.runs)

    @property
    def multiplier(self) -> float:
        """The standard deviation of the noise over the sensitivity, C or 2C: z or z / 2."""
        doubled = self.drawn or self.privacy.where == "local"
        return self.privacy.noise / 2 if doubled else self.privacy.noise

    def epsilon(self, delta: float) -> float:
        """Return the smallest known epsilon for a delta; infinite beyond 500."""
        uses = [(count, rate, self.multiplier) for count, rate in self.runs]
        return epsilon_of_gaussians(uses, delta)

    def summary(self) -> PrivacySpent:
        """Return the entry of a result; an infinite epsilon is null."""
        return PrivacySpent(
            epsilon=finite(self.epsilon(self.delta)),
            delta=self.delta,
            where=str(self.privacy.where),
            noise=self.privacy.noise,
            clip=self.privacy.clip,
            sampling=f"{self.exchanges} exchanges, {self._sampling()}",
            experiment=self.experiment,
            assumes=self._assumed(),
            covers=f"the shared tensors {_SEEN[str(self.privacy.where)]}; {NOT_COVERED}",
        )

    def _assumed(self) -> str:
        if self.experiment:
            return EXPERIMENT.format("clients")
        if self.privacy.where == "local":
            return "each device keeps the key of its noise to itself"
        return "the server keeps the key of its noise to itself" + _DRAWN * self.drawn

    def _sampling(self) -> str:
        if self.privacy.where == "local":
            return (
                "for a client that took part in all of them; neighbours: a client's update is "
                "replaced by any other (sensitivity 2C)"
            )
        if self.drawn:
            return (
                "clients drawn uniformly without replacement; neighbours: one client is replaced "
                "by any other (sensitivity 2C)"
            )
        return (
            "all clients in each; neighbours: one client is added or removed, with their number "
            "public (sensitivity C)"
        )


def finite(epsilon: float) -> float | None:
    """Return an epsilon as results state it: None if it is infinite."""
    return epsilon if math.isfinite(epsilon) else None


def epsilon_of(squared: float, renyi: np.ndarray, delta: float) -> float:
    """Return the smallest known epsilon of a composition of mechanisms; infinite beyond 500: of the
    sum of mu^2 over Gaussian ones, and the Rényi divergences of all others, (orders,) over
    `ORDERS`. Raises Refused without the accounting library.
    """
    if not squared and not renyi.any():
        return 0.0
    if not renyi.any():
        return epsilon_of_gaussians([(1, 1.0, squared**-0.5)], delta)
    _, rdp = library()
    epsilon, _ = rdp.get_privacy_spent(orders=ORDERS, rdp=renyi + squared * ORDERS / 2, delta=delta)
    return max(float(epsilon), 0.0) if epsilon <= MOST else math.inf


def rdp_of_drawn(rate: float, multiplier: float, order: float) -> float:
    """Return an upper bound of the Rényi divergence of order alpha > 1 of one Gaussian mechanism on
    m of N clients, drawn without replacement at the rate m / N. The multiplier is the noise's
    standard deviation over the sensitivity to replacing one client.

    Wang et al. (2019), Theorem 9 with an unbounded divergence of infinite order; between integer
    orders, Corollary 10; at most the divergence without drawing (joint quasi-convexity).
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
    """(alpha - 1) times the bound for an integer alpha: log(1 + sum_j binom(alpha, j) r^j c_j)."""
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
    """Return opacus' Gaussian and Rényi accounting. Raises Refused if it is not installed."""
    require("privacy: counting what is spent", "privacy", "opacus")
    from opacus.accountants.analysis import gdp, rdp

    return gdp, rdp
