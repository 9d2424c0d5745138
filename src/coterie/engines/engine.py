"""The interface of engines: `answer`, and storage of the clients' states between tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from coterie.client.blueprint import Metrics
from coterie.client.client import Client
from coterie.client.site import ClientOfParts
from coterie.core.protocol import Ask, ClientId, Replies, State
from coterie.core.tensors import Tensors
from coterie.engines.messages import Member

# writes a client's personal model, which needs these tensors besides
Write = Callable[[Client | ClientOfParts, Tensors], None]


class Listener:
    """The base class of listeners to events between server and clients; its methods do nothing."""

    def measured(self, client: ClientId, metrics: Metrics) -> None:
        """Receive a client's measurements with its reply."""

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        """Receive the reason why a client did not answer."""

    def noted(self, client: ClientId, note: str) -> None:
        """Receive a client's note that stops nothing, for example that it starts afresh."""


class Engine(ABC):
    """The base class of engines, which carry Asks to clients and replies back. Its defaults are
    those of an engine whose clients are all in this process.
    """

    # whether clients are on devices of their own, where their states and models stay
    distant: ClassVar[bool] = False
    spoilt = False  # whether one client spoilt the last sum, and later ones can leave it out

    @abstractmethod
    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        """Have the clients in `ask.to` do the task; return the unchecked replies in that order."""

    @abstractmethod
    def keep(self, ask: Ask, round: int, write: Write) -> None:
        """Have the clients in `ask.to` add its tensors to their models, and these written."""

    def members(self) -> Sequence[Member]:
        """Return the clients that joined since the last call; none if all came at the start."""
        return ()

    def present(self) -> Set[ClientId] | None:
        """Return the clients that can be reached now; None if all can."""
        return None

    @abstractmethod
    def states(self) -> Mapping[ClientId, State]:
        """Return the clients' states for a checkpoint, unchanged; none if devices keep them."""

    def memo(self) -> dict[str, Any]:
        """Return what else the engine needs to resume a run, JSON values."""
        return {}

    @abstractmethod
    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        """Restore the clients' states and the memo from a checkpoint."""

    def begun(self, round: int) -> Sequence[int]:
        """Return the rounds since `round` with masked exchanges, which clients answer once."""
        return ()

    @abstractmethod
    def state_bytes(self) -> Mapping[ClientId, int]:
        """Return the known sizes of the clients' states."""

    def close(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove the run's temporary files; nothing is asked after that."""
