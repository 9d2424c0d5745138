"""A client of which a method trains several models at once, the method's parts."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from coterie.client.client import Client
from coterie.client.interfaces import Metrics
from coterie.client.settings import Training
from coterie.core.protocol import ClientId, State
from coterie.core.roles import Role
from coterie.core.tensors import Tensors, prefixed, under

CENTRE = "centre"  # of the prior of a client's weights, (P,) float64, sent and in its state
WEIGHTS = "weights"  # of the parts' predictions, (P,) float64 in the client's state


@dataclass
class ClientOfParts:
    """One client during one task: an ordinary `Client` for each part, one at a time.

    Args:
        id: The client's stable name.
        state: Its stored tensors: each part's as `<part>/<name>`, and what concerns all of them.
        clients: By part, in the method's order: makes the part's client on the part's state. The
            client of each part draws the random numbers of that method alone.
    """

    id: ClientId
    state: State
    clients: Mapping[str, Callable[[State], Client]]
    _metrics: Metrics = field(default_factory=dict)

    @property
    def shares(self) -> torch.Tensor:
        """The weights of the parts' predictions, (P,) float64: even before they were fitted."""
        even = torch.full((len(self.clients),), 1 / len(self.clients), dtype=torch.float64)
        return self.state.get(WEIGHTS, even)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part's predictions, by the part."""
        return dict(zip(self.clients, self.shares.tolist(), strict=True))

    @contextmanager
    def part(self, name: str) -> Iterator[Client]:
        """Provide the client of one part; its state and measurements are kept afterwards."""
        client = self.clients[name](under(name, self.state))
        try:
            yield client
        finally:
            for key in [key for key in self.state if key.startswith(f"{name}/")]:
                del self.state[key]
            self.state |= prefixed(name, client.state)
        tokens = client.tokens + int(str(self._metrics.get("tokens", 0)))
        self._metrics |= {f"{key}/{name}": value for key, value in client.metrics().items()}
        self._metrics.pop(f"tokens/{name}", None)
        if tokens:
            self._metrics["tokens"] = tokens

    @property
    def training(self) -> Training:
        return self._first.training

    @property
    def windows(self) -> int:
        """Rows of training data."""
        return self._first.windows

    @property
    def iteration(self) -> int:
        """The local iterations of each part so far."""
        return self._first.iteration

    @property
    def _first(self) -> Client:
        name, client = next(iter(self.clients.items()))
        return client(under(name, self.state))

    def read(self, *roles: Role) -> Tensors:
        """Return copies of all parts' tensors of these roles, `<part>/<name>`."""
        read = Tensors()
        for name in self.clients:
            with self.part(name) as client:
                read |= prefixed(name, client.read(*roles))
        return read

    def metrics(self) -> Metrics:
        """Return the measurements of all parts, see `Client.metrics`, as `<name>/<part>`."""
        return self._metrics
