"""All clients in one process, on one backbone: the engine for simulation, and for debugging.

They do a task one after the other, or at once where the task has a batched form and their models are small enough to stack.
A failing client stops the run with a ClientError that names it; the cause is chained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.client import Site
from coterie.cohort import Cohort
from coterie.engines.engine import Here, Listener, Write
from coterie.methods import Method
from coterie.protocol import Ask, ClientId, Replies, State, find_together
from coterie.tensors import nbytes


@dataclass
class InProcess(Here):
    """States are dicts of tensors that stay where they are; nothing is copied."""

    site: Site
    method: Method
    listener: Listener = field(default_factory=Listener)
    _states: dict[ClientId, State] = field(default_factory=dict)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        if self.method.local_epochs is None and (together := find_together(self.method, ask.name)) is not None:
            states = {i: self._states.setdefault(i, {}) for i in ask.to}
            for state in states.values():
                self.site.begin(state, round, self.method)
            if (cohort := Cohort.of(self.site, states)) is not None:
                replies = together(cohort, ask.to)
                for i, metrics in cohort.measured.items():
                    self.listener.measured(i, metrics)
                for state in states.values():
                    self.site.end(state, self.method)
                return {i: self.site.leaving(self.method, ask.name, i, ask.to[i], r, round, phase) for i, r in replies.items()}
        return {i: self._one(ask.name, i, tensors, round, phase) for i, tensors in ask.to.items()}

    def _one(self, task: str, client: ClientId, tensors: State, round: int, phase: int) -> State:
        state = self._states.setdefault(client, {})
        reply, metrics = self.site.answer(self.method, task, client, tensors, state, round, phase)
        self.listener.measured(client, metrics)
        return reply

    def keep(self, ask: Ask, round: int, write: Write) -> None:
        self.answer(ask, round, -1)
        for i, tensors in ask.to.items():
            write(self.site.client(i, dict(self._states[i])), tensors)

    def states(self) -> Mapping[ClientId, State]:
        return self._states

    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        self._states = {i: dict(state) for i, state in states.items()}

    def state_bytes(self) -> Mapping[ClientId, int]:
        return {i: nbytes(state) for i, state in self._states.items()}
