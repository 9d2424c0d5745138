"""What an engine is: `answer`, and the keeping of the clients' states between tasks."""

from collections.abc import Callable, Mapping
from typing import Protocol

from coterie.client import Metrics
from coterie.protocol import Ask, ClientId, Replies, State

Observe = Callable[[ClientId, Metrics], None]  # called as each client's reply arrives, with what it measured


class Engine(Protocol):
    """Carries Asks to clients and replies back."""

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        """Have every client in `ask.to` do the task. Replies come in the order asked, without the clients that failed."""
        ...

    def states(self) -> Mapping[ClientId, State]:
        """The clients' states, for a checkpoint. Not to be changed."""
        ...

    def restore(self, states: Mapping[ClientId, State]) -> None:
        """Take over the clients' states from a checkpoint."""
        ...


def unobserved(client: ClientId, metrics: Metrics) -> None:
    """An `Observe` that looks away."""
