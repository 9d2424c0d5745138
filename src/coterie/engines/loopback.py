"""One process whose messages and client states all pass through bytes: a distributed engine without
the network. Whatever a method or a client keeps outside its state is lost between two tasks, so
that a run that works here works on devices.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State
from coterie.core.tensors import from_bytes, nbytes, to_bytes
from coterie.engines.engine import Engine, Listener, Write
from coterie.engines.inprocess import InProcess
from coterie.methods import Method


@dataclass
class Loopback(Engine):
    """The engine; the clients' method is rebuilt from its hyperparameters for every task."""

    site: Site
    method: Method
    listener: Listener = field(default_factory=Listener)
    _states: dict[ClientId, bytes] = field(default_factory=dict)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        requests = {i: to_bytes(tensors) for i, tensors in ask.to.items()}
        replies = {
            i: self._on_device(ask.name, i, request, round, phase)
            for i, request in requests.items()
        }
        return {i: from_bytes(reply, f"reply of client {i!r}") for i, reply in replies.items()}

    def _on_device(
        self, task: str, client: ClientId, request: bytes, round: int, phase: int
    ) -> bytes:
        method = type(self.method)(**asdict(self.method))
        state = (
            from_bytes(self._states[client], f"state of client {client!r}")
            if client in self._states
            else {}
        )
        reply, metrics = self.site.answer(
            method, task, client, from_bytes(request), state, round, phase
        )
        self._states[client] = to_bytes(state)
        self.listener.measured(client, metrics)
        return to_bytes(reply)

    def keep(self, ask: Ask, round: int, write: Write) -> None:
        self.answer(ask, round, -1)
        for i, tensors in ask.to.items():
            write(self.site.clients(i, from_bytes(self._states[i])), tensors)

    def states(self) -> Mapping[ClientId, State]:
        return {i: from_bytes(state) for i, state in self._states.items()}

    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        self._states = {i: to_bytes(state) for i, state in states.items()}

    def state_bytes(self) -> Mapping[ClientId, int]:
        return {i: nbytes(state) for i, state in self.states().items()}


# the values of `engine` in a recipe that need nothing but this process
ENGINES: dict[str, type[InProcess] | type[Loopback]] = {
    "inprocess": InProcess,
    "loopback": Loopback,
}
