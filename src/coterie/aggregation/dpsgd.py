"""Privacy of single examples: DP-SGD on the client, and the privacy that it spends.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1: each example takes
part in a step with the same probability, its gradient is clipped to a norm C, and the sum gets N(0,
(z C)^2) before it is used. Whatever optimisers, further steps, servers and other clients do with it
is post-processing.

That holds only if the gradient of one example depends on other examples only through values with
such noise. Specialists and routers are trained on the same data without noise: at a model that
contains them, one example would move the clipped gradients of all others, by up to 2 C each. Hence
the gradient of what is shared is taken at a model whose other parts have their initial values,
which no data have touched (`Client.step`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.aggregation.accountant import NOT_COVERED, ORDERS, epsilon_of, finite, library
from coterie.aggregation.noise import Source, grid, on_grid
from coterie.aggregation.privacy import EXPERIMENT, Privacy
from coterie.core.errors import Refused
from coterie.core.protocol import ClientId
from coterie.core.result import PrivacySpent
from coterie.core.roles import Role

_HIGHEST = 500  # the largest order that is tried: opacus sums as many terms
# up to which fractional orders are computed themselves; beyond, the next whole one bounds them
_EXACT = 100

_DEVICES = "each device keeps its noise, and which examples took part in a step, to itself"
_COVERS = (
    "what single examples of a client (windows of its text, images) add to the shared tensors "
    f"that it sends, whoever sees them, the server too; {NOT_COVERED}"
)


@dataclass
class Sanitizer:
    """The clipping and noise of the gradients that a client shares, during one task."""

    privacy: Privacy  # C and z
    roles: frozenset[Role]  # the shared roles
    source: Source  # Of samples and noise: whoever knows it can take both away; secret on devices.
    steps: int  # the most gradients that it makes, which are the ones counted

    def sample(self, windows: int, expected: int) -> npt.NDArray[np.int64]:
        """Draw a batch, which may be empty: each example independently, at the same `rate`."""
        return np.flatnonzero(self.source.uniform(windows) < rate_of(windows, expected))

    def gradient(self, parts: Iterable[Sequence[Tensor]], size: int, expected: float) -> Tensor:
        """Return the noisy sum of the clipped gradients of examples, over the expected number of
        examples in a batch, (d,) fp32 on the CPU, from gradients of some examples each, (B, ...)
        tensors with one example in each row. Raises Refused if more gradients were asked for than
        are counted, TensorError for a value that is not a number.
        """
        if self.steps < 1:
            problem = "privacy.unit: a task takes more steps than the privacy accounting counts"
            remedy = "Nothing was sent. This is an error in the method: report it to its author."
            raise Refused(problem, remedy)
        self.steps -= 1
        deviation = self.privacy.noise * self.privacy.clip
        step, total = grid(self.privacy.clip, deviation), np.zeros(size, dtype=np.int64)
        for part in parts:
            total += clipped_sum(part, self.privacy.clip, step)
        if deviation:
            total += self.source.gaussian(size, deviation / step)
        return torch.from_numpy(total * (step / expected)).float()


def clipped_sum(gradients: Sequence[Tensor], clip: float, step: float) -> npt.NDArray[np.int64]:
    """Return the sum, (d,), of the gradients of examples, each clipped to norm C (`clip`), in
    integer grid steps, so that rounding never increases a norm. Each row of the gradients, (B,
    ...), is of one example. Raises TensorError: a value is not a number.
    """
    rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).cpu().double().numpy()
    return sum(
        (on_grid(row, clip, step) for row in rows), start=np.zeros(rows.shape[1], dtype=np.int64)
    )


def rate_of(windows: int, expected: int) -> float:
    """Return the probability with which an example takes part in a step, `expected` on average."""
    return min(1.0, expected / windows)


@lru_cache(maxsize=4096)
def _rdp_of_step(rate: float, noise: float) -> npt.NDArray[np.float64]:
    if rate == 1:
        return np.asarray(ORDERS / (2 * noise**2))
    _, rdp = library()
    orders = np.where(ORDERS < _EXACT, ORDERS, np.ceil(ORDERS))
    known = orders <= _HIGHEST
    divergences = np.full(ORDERS.shape, math.inf)
    divergences[known] = rdp.compute_rdp(
        q=rate, noise_multiplier=noise, steps=1, orders=orders[known]
    )
    # sampling never hurts
    return np.where(np.isfinite(divergences), divergences, ORDERS / (2 * noise**2))


def rdp_of_steps(rate: float, noise: float, steps: int) -> npt.NDArray[np.float64]:
    """Return the Rényi divergences, at ORDERS, that steps at the rate of `rate_of`, with z > 0,
    spend of an example's privacy. They add up over steps, tasks and runs. Raises Refused: the
    accounting library is missing.

    Of the Gaussian mechanism on a Poisson sample (Mironov, Talwar and Zhang, "Rényi Differential
    Privacy of the Sampled Gaussian Mechanism", 2019, as opacus computes it), for neighbours by
    removing one example.
    """
    return _rdp_of_step(rate, noise) * steps if steps else np.zeros(ORDERS.shape)


@dataclass
class ExampleAccountant:
    """The privacy of its examples that each client has spent, over the steps of all training tasks
    that it was asked for: one epsilon each, since rates and numbers of steps differ. Clients that
    did not answer count. Raises Refused without a delta or the accounting library.
    """

    privacy: Privacy  # the recipe's section
    largest: int  # examples of the largest client, which gives delta if the recipe has none
    expected: int  # the mean number of examples in a batch
    # the state, JSON values: (client, its training examples, which are public, steps)
    runs: list[tuple[ClientId, int, int]] = field(default_factory=list)
    # whether all randomness follows from the recipe's seed, as in a simulation
    experiment: bool = False

    def __post_init__(self) -> None:
        library()
        self.delta = self.privacy.delta_of(self.largest)
        self.runs = [(client, windows, steps) for client, windows, steps in self.runs]

    def spend(self, windows: Mapping[ClientId, int], steps: Mapping[ClientId, int]) -> None:
        """Count a training exchange: the examples and steps of each client that was asked."""
        known = {(client, size): count for client, size, count in self.runs}
        for client, size in windows.items():
            known[client, size] = known.get((client, size), 0) + steps[client]
        self.runs = [(client, size, count) for (client, size), count in known.items()]

    def of_client(self, client: ClientId, delta: float) -> float:
        """Epsilon of one client's examples."""
        runs = [
            (rate_of(size, self.expected), steps)
            for known, size, steps in self.runs
            if known == client and steps
        ]
        if runs and not self.privacy.noise:
            return math.inf
        spent = sum(
            (rdp_of_steps(rate, self.privacy.noise, steps) for rate, steps in runs),
            start=np.zeros(ORDERS.shape),
        )
        return epsilon_of(0.0, spent, delta)

    def epsilon(self, delta: float) -> float:
        """Return the largest epsilon of all clients."""
        return max((self.of_client(client, delta) for client in self.clients), default=0.0)

    @property
    def clients(self) -> list[ClientId]:
        """The clients that have been asked."""
        return list(dict.fromkeys(client for client, _, _ in self.runs))

    def summary(self) -> PrivacySpent:
        """Return the entry of a result; an infinite epsilon is null."""
        epsilons = {client: self.of_client(client, self.delta) for client in self.clients}
        rates = [rate_of(size, self.expected) for _, size, _ in self.runs] or [1.0]
        low, high = (f"{rate:.3g}" for rate in (min(rates), max(rates)))
        span = low if low == high else f"{low} to {high}"
        most = max((steps for _, _, steps in self.runs), default=0)
        return PrivacySpent(
            epsilon=finite(max(epsilons.values(), default=0.0)),
            delta=self.delta,
            where="examples",
            noise=self.privacy.noise,
            clip=self.privacy.clip,
            sampling=f"at most {most} steps, each on every example of a client with probability "
            f"{span}; neighbours: what one example adds is there or not, with their number public "
            f"(sensitivity C); epsilon is that of the client with the largest one",
            experiment=self.experiment,
            assumes=EXPERIMENT.format("examples") if self.experiment else _DEVICES,
            covers=_COVERS,
            clients={i: finite(epsilon) for i, epsilon in epsilons.items()},
        )
