"""Engines of one process: all clients on one backbone, for simulation and debugging; and the same
with messages and states as bytes. Whatever a method or a client keeps outside its state is then
lost between two tasks, so that a run that works here works on devices.

Clients do a task one after another, several at once in threads, or in one batch if the task allows
that and their models are small enough to stack. A failing client stops the run with a ClientError
that names it; the cause is chained.
"""

import sys
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch

from coterie.client.batch import ClientBatch
from coterie.client.blueprint import Metrics
from coterie.client.site import Site
from coterie.core.protocol import Ask, ClientId, Replies, State, batched, find_task
from coterie.core.tensors import Tensors, from_bytes, nbytes, to_bytes
from coterie.core.threads import stopped_by
from coterie.engines.engine import Engine, Listener, Write
from coterie.engines.states import States
from coterie.methods import Method
from coterie.models.layout import Layout

# seconds after which a thread in Python lets another one on, instead of 0.005: what others wait for
# is mostly the start of their next product
SWITCH_S = 0.0005
Reply = tuple[Tensors, Metrics]
Answer = Callable[[Site, ClientId, State], Reply]


@dataclass
class AtOnce:
    """Threads in which several clients do a task. Random numbers are those of one client after
    another if tasks draw from their own generators. PyTorch's dropout draws from the global one,
    which threads share: a task that did so is undone, and left to the caller.
    """

    site: Site
    kept: States  # the clients' states
    most: int  # clients that compute at once
    _sites: list[Site] = field(default_factory=list)

    def answer(
        self, clients: Iterable[ClientId], answer: Answer
    ) -> Generator[tuple[ClientId, Reply | None]]:
        """Yield each client's reply, in order; None if the caller must ask it. At most `most` tasks
        are at work, or have a state in memory for which there is no room. If the iterator is closed
        early, as by an exception, they stop at their next batch. Raises ClientError of the first
        client, in order, whose task failed; then no others begin.
        """
        clients = list(clients)
        free, lock = self._free(clients), threading.Lock()
        stop, full = threading.Event(), threading.Event()  # `full`: no other task begins
        with torch.random.fork_rng(devices=[]), _pool(len(free), stop) as pool:
            before = torch.get_rng_state()

            def work(client: ClientId) -> Reply | None:
                with lock:
                    if full.is_set():
                        return None
                    site, state = free.pop(), self.kept.take(client)
                undo = {name: tensor.clone() for name, tensor in state.items()}
                try:
                    reply = answer(site, client, state)
                except BaseException:
                    full.set()
                    if torch.equal(torch.get_rng_state(), before):
                        raise
                with lock:
                    free.append(site)
                    if torch.equal(torch.get_rng_state(), before):
                        self.kept.put(client, state)
                        return reply
                full.set()
                state.clear()
                state |= undo
                return None

            futures = [pool.submit(work, client) for client in clients]
            try:
                for client, future in zip(clients, futures, strict=True):
                    if (reply := future.result()) is None:
                        wait(futures)  # the caller draws from the global generator, too
                    yield client, reply
            finally:
                stop.set()
                full.set()

    def _free(self, clients: Sequence[ClientId]) -> list[Site]:
        """Return a site for each thread, with models for these clients."""
        count = min(self.most, len(clients))
        self._sites = self._sites or [self.site]
        self._sites += [self.site.twin() for _ in range(count - len(self._sites))]
        for site in self._sites[:count]:  # here, since a new model may draw random numbers
            for client in clients:
                site.model(client)
        return self._sites[:count]


@contextmanager
def _pool(threads: int, stop: threading.Event) -> Iterator[ThreadPoolExecutor]:
    """Provide threads that compute as this one does, until `stop` is set."""
    inner, interval = torch.get_num_threads(), sys.getswitchinterval()

    def start() -> None:
        torch.set_num_threads(inner)
        stopped_by(stop)

    sys.setswitchinterval(min(SWITCH_S, interval))
    try:
        with ThreadPoolExecutor(threads, "client", start) as pool:
            yield pool
    finally:
        sys.setswitchinterval(interval)


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
        several = min(self.at_once, len(ask.to)) > 1 and ask.name not in self._drawing
        return several and self.site.model(next(iter(ask.to))).device.type == "cpu"

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
                nbytes(named) for named in self.site.model(client).parameters_by_role.values()
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


class Loopback(InProcess):
    """The engine; the clients' method is rebuilt from its hyperparameters for every task."""

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        sent = {i: to_bytes(tensors) for i, tensors in ask.to.items()}
        replies = {i: self._on_device(ask.name, i, s, round, phase) for i, s in sent.items()}
        return {i: from_bytes(reply, f"reply of client {i!r}") for i, reply in replies.items()}

    def _on_device(
        self, task: str, client: ClientId, request: bytes, round: int, phase: int
    ) -> bytes:
        method = type(self.method)(**asdict(self.method))
        state = from_bytes(to_bytes(self.kept.take(client)), f"state of client {client!r}")
        reply, metrics = self.site.answer(
            method, task, client, from_bytes(request), state, round, phase
        )
        self.kept.put(client, state)
        self.listener.measured(client, metrics)
        return to_bytes(reply)


# the values of `engine` in a recipe that need nothing but this process
ENGINES: dict[str, type[InProcess]] = {"inprocess": InProcess, "loopback": Loopback}
