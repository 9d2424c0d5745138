"""All clients in one process, one after the other, on one backbone: the engine for simulation, and for debugging.

A failing client stops the run with a ClientError that names it; the cause is chained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.client import Site
from coterie.engines.engine import Observe, unobserved
from coterie.methods import Method
from coterie.protocol import Ask, ClientId, Replies, State


@dataclass
class InProcess:
    """States are dicts of tensors that stay where they are; nothing is copied."""

    site: Site
    method: Method
    observe: Observe = unobserved
    _states: dict[ClientId, State] = field(default_factory=dict)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        return {i: self._one(ask.name, i, tensors, round, phase) for i, tensors in ask.to.items()}

    def _one(self, task: str, client: ClientId, tensors: State, round: int, phase: int) -> State:
        state = self._states.setdefault(client, {})
        reply, metrics = self.site.answer(self.method, task, client, tensors, state, round, phase)
        self.observe(client, metrics)
        return reply

    def states(self) -> Mapping[ClientId, State]:
        return self._states

    def restore(self, states: Mapping[ClientId, State]) -> None:
        self._states = {i: dict(state) for i, state in states.items()}
