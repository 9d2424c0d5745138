"""All clients in one process, on one backbone: the engine for simulation and debugging. They do a
task one after another, several at once in threads, or in one batch if the task allows that and
their models are small enough to stack. A failing client stops the run with a ClientError that names
it; the cause is chained.
"""

from collections.abc import Generator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from coterie.client.batch import ClientBatch
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State, batched, find_task
from coterie.core.tensors import nbytes
from coterie.engines.at_once import AtOnce, Reply
from coterie.engines.engine import Engine, Listener, Write
from coterie.engines.states import States
from coterie.methods import Method
from coterie.models.layout import Layout


@dataclass
class InProcess(Engine):
    """States stay where they are, without copies, as long as there is room for them."""

    site: Site
    method: Method
    # receives events in the order in which clients are asked
    listener: Listener = field(default_factory=Listener)
    kept: States = field(default_factory=States)  # the clients' states
    at_once: int = 1  # clients that compute at once on a CPU, see `AtOnce`
    _drawing: set[str] = field(default_factory=set)  # tasks that use the global generator
    _bytes: dict[Layout, int] = field(default_factory=dict)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        if (batch := self._batch(ask, round)) is None:
            one_by_one: dict[ClientId, State] = {}
            with closing(self._each(ask, round, phase)) as answers:
                for i, (reply, metrics) in answers:
                    one_by_one[i] = reply
                    self.listener.measured(i, metrics)
            return one_by_one
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
        """Return all clients asked as one batch; None if they must be asked one by one."""
        if not batched(ask.task) or self.method.local_epochs is not None:
            return None
        states = self.kept.together(list(ask.to), self._most)
        rows = self.site.training.batch_size
        steps = {self.method.steps_of(self.site.data[i].train.windows, rows) for i in ask.to}
        if states is None or len(steps) != 1:
            return None
        (round_steps,) = steps
        total = self.method.rounds * round_steps
        return ClientBatch.of(self.site, states, round, round_steps, total)

    def _each(self, ask: Ask, round: int, phase: int) -> Generator[tuple[ClientId, Reply]]:
        """Yield the reply of each client, with measurements, in the order asked."""

        def threaded(site: Site, client: ClientId, state: State) -> Reply:
            tensors = ask.to[client]
            return site.answer(self.method, ask.name, client, tensors, state, round, phase, False)

        if not self._apart(ask):
            for i in ask.to:
                yield i, self._one(ask, i, round, phase)
            return
        with closing(self._threads.answer(ask.to, threaded)) as answers:
            for i, answered in answers:
                if answered is None:
                    self._drawing.add(ask.name)
                yield i, self._one(ask, i, round, phase) if answered is None else answered

    def _apart(self, ask: Ask) -> bool:
        """Return whether clients do the task in threads: on a CPU."""
        return (
            min(self.at_once, len(ask.to)) > 1
            and ask.name not in self._drawing
            and self.site.model(next(iter(ask.to))).device.type == "cpu"
        )

    @cached_property
    def _threads(self) -> AtOnce:
        return AtOnce(self.site, self.kept, self.at_once)

    def _one(self, ask: Ask, client: ClientId, round: int, phase: int) -> Reply:
        state = self.kept.take(client)
        reply = self.site.answer(self.method, ask.name, client, ask.to[client], state, round, phase)
        self.kept.put(client, state)
        return reply

    def _most(self, client: ClientId) -> int:
        """Return the most bytes of a client's state during a task: four times its values."""
        layout = self.site.layouts[client]
        if layout not in self._bytes:
            self._bytes[layout] = 4 * sum(
                nbytes(named) for named in self.site.model(client).parameters_by_role().values()
            )
        return self._bytes[layout]

    def keep(self, ask: Ask, round: int, write: Write) -> None:
        self.answer(ask, round, -1)
        for i, tensors in ask.to.items():
            write(self.site.clients(i, dict(self.kept[i])), tensors)

    def states(self) -> Mapping[ClientId, State]:
        return self.kept

    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        self.kept.restore(states)

    def state_bytes(self) -> Mapping[ClientId, int]:
        return {i: self.kept.nbytes(i) for i in self.kept}

    def close(self) -> None:
        self.kept.close()
