"""All clients in one process, on one backbone: the engine for simulation, and for debugging.

They do a task one after the other, or in one batch where the task allows that and their models are
small enough to stack. A failing client stops the run with a ClientError that names it; the cause is
chained.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.client.batch import ClientBatch
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State, batched, find_task
from coterie.core.tensors import nbytes
from coterie.engines.engine import Listener, LocalEngine, Write
from coterie.engines.states import States
from coterie.methods import Method
from coterie.models.layout import Layout


@dataclass
class InProcess(LocalEngine):
    """States are dicts of tensors that stay where they are, and nothing is copied, as long as
    the keeper has room for them.
    """

    site: Site
    method: Method
    listener: Listener = field(default_factory=Listener)
    kept: States = field(default_factory=States)
    _bytes: dict[Layout, int] = field(default_factory=dict)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        if (batch := self._batch(ask, round)) is None:
            return {
                i: self._one(ask.name, i, tensors, round, phase) for i, tensors in ask.to.items()
            }
        replies = batch.split(find_task(self.method, ask.name)(batch, batch.stack(ask.to)))
        for i, metrics in batch.measured.items():
            self.listener.measured(i, self.site.measured(metrics))
        for i, state in batch.states.items():
            self.site.end(state, self.method)
            self.kept.put(i, state)
        return {
            i: self.site.leaving(self.method, ask.name, i, ask.to[i], r, round, phase)
            for i, r in replies.items()
        }

    def _batch(self, ask: Ask, round: int) -> ClientBatch | None:
        """All that are asked as one batch; None where they must be asked one by one."""
        if not batched(ask.task) or self.method.local_epochs is not None:
            return None
        states = self.kept.together(list(ask.to), self._most)
        return (
            None
            if states is None
            else ClientBatch.of(self.site, states, round, self.method.local_steps)
        )

    def _one(self, task: str, client: ClientId, tensors: State, round: int, phase: int) -> State:
        state = self.kept.take(client)
        reply, metrics = self.site.answer(self.method, task, client, tensors, state, round, phase)
        self.kept.put(client, state)
        self.listener.measured(client, metrics)
        return reply

    def _most(self, client: ClientId) -> int:
        """Bytes of a client's state during a task, at most: its values, two moments of an
        optimiser, and as much for all else.
        """
        layout = self.site.layouts[client]
        if layout not in self._bytes:
            self._bytes[layout] = 4 * sum(
                nbytes(named) for named in self.site.model(client).parameters_by_role().values()
            )
        return self._bytes[layout]

    def keep(self, ask: Ask, round: int, write: Write) -> None:
        self.answer(ask, round, -1)
        for i, tensors in ask.to.items():
            write(self.site.client(i, dict(self.kept[i])), tensors)

    def states(self) -> Mapping[ClientId, State]:
        return self.kept

    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        self.kept.restore(states)

    def state_bytes(self) -> Mapping[ClientId, int]:
        return {i: self.kept.nbytes(i) for i in self.kept}
