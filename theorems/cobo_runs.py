"""The runs of CoBo on quadratics in clusters that its Theorem I is held against, see `cobo`."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from theorems.cobo_problem import Array, Clusters, CoBo, _square
from theorems.cobo_search import ROUNDING

HORIZONS = tuple(125 * 2**k for k in range(6))  # T
SIZE = 3  # c of the runs with noise
SEEDS = 12  # runs that an expectation is a mean of
SIGMA = 1.0  # sigma of (A2)


@dataclass(frozen=True)
class Setting:
    """Two clusters of three clients, centres (1, 0) and (-1, 0), common start 0, L = 1; a_i evenly
    between (1 - M) / (1 + M) and 1.

    Args:
        M: The largest M_ij.
        penalty: rho c / (sqrt 3 L), at least 1.
        batch: b.
    """

    M: float
    penalty: float = 1.0
    batch: float = np.inf

    @property
    def name(self) -> str:
        penalty = "" if self.penalty == 1 else f", {self.penalty:g} $rho$"
        return f"{self.M:g}{penalty}" + ("" if np.isinf(self.batch) else f", $b = {self.batch:g}$")

    @property
    def a(self) -> Array:
        return np.tile(np.linspace(1, (1 - self.M) / (1 + self.M), SIZE), 2)

    @property
    def rho_c(self) -> float:
        return float(self.penalty * np.sqrt(3))

    @property
    def start_gap(self) -> float:
        """F_0, with f_ij* = 0."""
        return float(self.a.mean() / 2)

    def eta(self, horizon: int) -> float:
        """Return the step size of Theorem I for T = horizon."""
        return float(min(2 / SIGMA * np.sqrt(self.start_gap / horizon), 1 / (2 * self.rho_c)))


SETTINGS = (
    Setting(0.0),
    Setting(0.1),
    Setting(0.19),
    Setting(0.1, penalty=2),
    Setting(0.1, batch=1),
    Setting(0.1, batch=16),
    Setting(0.1, batch=256),
)


@dataclass(frozen=True)
class Run:
    """What was measured of a setting over T rounds: means over t, clients or their pairs,
    clusters and seeds.
    """

    setting: Setting
    horizon: int
    consensus: float  # of ||x_i - x_j||^2 after the rounds, the left side of (9)
    midpoints: float  # of ||grad f_ij(z_ij)||^2 before them
    clients: float  # of ||grad f_i(x_i)||^2
    wrong: float  # of |w_ij - w*_ij|

    @property
    def root(self) -> float:
        return float(np.sqrt(SIGMA**2 * self.setting.start_gap / self.horizon))

    @property
    def printed(self) -> float:
        """The right side of (9)."""
        return 6 * self.setting.M**2 / self.setting.rho_c**2 * self.root

    @property
    def amended(self) -> tuple[float, float]:
        """Bounds for W = W* and M < 1/4 on the consensus distance and on the gradient norms at
        midpoints that keep the noise of g_i - g_j.

        Let D_t, G_t and F_t be the means over the cluster's pairs of E ||x_i - x_j||^2, E ||grad
        f_ij(z_ij)||^2 and E f_ij(z_ij) - f_ij* at round t, rho c >= sqrt 3 L and eta rho c <= 1/2.
        As in Lemma 4, and then as in Lemma 3,
            D_t+1 <= (1 - eta rho c / 2) D_t + 12 M^2 eta / (rho c) G_t + 2 eta^2 sigma^2 (1 - 1/c),
            G_t <= 2 / eta (F_t - F_t+1) + 2/3 (rho c)^2 D_t + L eta sigma^2 (1 + 1/c) / 2.
        The bounds are the means of both over t, from D_0 = 0.
        """
        M, rho_c, c, noise = (
            self.setting.M,
            self.setting.rho_c,
            SIZE,
            self.setting.eta(self.horizon) * SIGMA**2,
        )
        descent = (
            2 * self.setting.start_gap / (self.setting.eta(self.horizon) * self.horizon)
            + noise * (1 + 1 / c) / 2
        )
        midpoints = (descent + 8 / 3 * rho_c * noise * (1 - 1 / c)) / (1 - 16 * M**2)
        return 24 * M**2 / rho_c**2 * midpoints + 4 * noise / rho_c * (1 - 1 / c), midpoints


def measure(
    settings: tuple[Setting, ...],
    horizon: int,
    rng: np.random.Generator,
    sigma: float = SIGMA,
    seeds: int = SEEDS,
) -> list[Run]:
    """Each setting over `horizon` rounds, with the step size that Theorem I gives for sigma =
    SIGMA.
    """

    def each(value: Callable[[Setting], float]) -> Array:
        return np.repeat([value(setting) for setting in settings], seeds)

    a = np.repeat([setting.a for setting in settings], seeds, 0)  # [settings x seeds, n]
    f = Clusters(a, np.repeat([[1.0, 0.0], [-1.0, 0.0]], SIZE, 0))
    # This gamma takes the weights between the clusters to 0 at once: their gradients' product at
    # the start is at most -a_min^2.
    gamma = (1 + ROUNDING) / float(a.min()) ** 2
    method = CoBo(
        each(lambda s: s.eta(horizon)),
        each(lambda s: s.rho_c / SIZE),
        gamma,
        sigma,
        each(lambda s: s.batch),
    )
    totals = np.zeros((4, len(a)))
    states = method.run(f, np.zeros((*a.shape, 2)), horizon, rng)
    X, _ = next(states)
    n = a.shape[-1]
    pairs, others = (f.oracle + np.eye(n)) / (n * SIZE), n * (n - 1)
    for following, W in states:
        joint = f.midpoint_gradients(X)
        joint = (joint + np.swapaxes(joint, -2, -3)) / 2
        distance = _square(following[..., :, None, :] - following[..., None, :, :])
        totals += [
            (distance * pairs).sum((-1, -2)),
            (_square(joint) * pairs).sum((-1, -2)),
            _square(f.gradients(X)).mean(-1),
            np.abs(W - f.oracle).sum((-1, -2)) / others,
        ]
        X = following
    means = totals.reshape(4, len(settings), seeds).mean(-1) / horizon
    return [Run(setting, horizon, *map(float, means[:, k])) for k, setting in enumerate(settings)]
