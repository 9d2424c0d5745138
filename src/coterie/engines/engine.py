"""The interface of engines: `answer`, and storage of the clients' states between tasks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, ClassVar

from coterie.client.client import Client
from coterie.client.interfaces import Metrics
from coterie.core.protocol import Ask, ClientId, Replies, State
from coterie.core.tensors import Tensors
from coterie.engines.messages import Member

# writes a client's personal model, which needs these tensors besides
Write = Callable[[Client, Tensors], None]


class Listener:
    """The base class of listeners to events between server and clients; it ignores all events."""

    def measured(self, client: ClientId, metrics: Metrics) -> None:
        """Hear that a client's reply arrived, with what its task measured."""

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        """Hear that a client did not answer."""

    def noted(self, client: ClientId, note: str) -> None:
        """Hear that a client said something that stops nothing: that it starts afresh, say."""


class Engine(ABC):
    """The base class of engines: an engine carries Asks to clients and replies back. What is given
    here is that of one whose clients are all in this process.
    """

    # whether clients are on devices of their own, where their states and models stay
    distant: ClassVar[bool] = False
    spoilt = False  # whether one client spoilt the last sum, and later ones can leave it out

    @abstractmethod
    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        """Have every client in `ask.to` do the task. Replies come in the order asked, without
        the clients that failed; unchecked.
        """

    @abstractmethod
    def keep(self, ask: Ask, round: int, write: Write) -> None:
        """Have every client in `ask.to` make its tensors part of its personal model, and that
        model written; devices write their own.
        """

    def members(self) -> Sequence[Member]:
        """Return the clients that have joined since the last call; none if all came at the
        start.
        """
        return ()

    def present(self) -> Set[ClientId] | None:
        """Return the clients that can be reached now; None if all can."""
        return None

    @abstractmethod
    def states(self) -> Mapping[ClientId, State]:
        """Return the clients' states, for a checkpoint; none if devices keep them. Callers must not
        change them.
        """

    def memo(self) -> dict[str, Any]:
        """Return what else the engine needs when a run is resumed; JSON values."""
        return {}

    @abstractmethod
    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        """Take over the clients' states and the memo from a checkpoint."""

    def begun(self, round: int) -> Sequence[int]:
        """Return the rounds of exchanges that began since `round` and cannot be repeated: clients
        answer a masked exchange only once.
        """
        return ()

    @abstractmethod
    def state_bytes(self) -> Mapping[ClientId, int]:
        """Return the size of each client's state, as far as it is known."""

    def close(self) -> None:  # noqa: B027 - most have nothing to remove
        """Remove what lies on the disk only as long as the run goes on. Nothing is asked after
        that.
        """
