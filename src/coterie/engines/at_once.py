"""Clients that compute at the same time, each in its own thread. PyTorch runs other threads while
it computes. Tasks only read what they share: data, and the weights of the base. Each thread has its
own models, each client its state and reply. So results equal those of one client after another,
with as many threads within PyTorch, to the bit.
"""

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.client.interfaces import Metrics
from coterie.client.site import Site
from coterie.core.protocol import ClientId, State
from coterie.core.tensors import Tensors
from coterie.core.threads import stopped_by
from coterie.engines.states import States

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
        todo = deque(clients)
        sites, stop = self._free(todo), threading.Event()
        with torch.random.fork_rng(devices=[]), _pool(len(sites), stop) as pool:
            before = torch.get_rng_state()
            exchange = _Exchange(pool, self.kept, answer, before, sites, todo.copy())
            try:
                for client in todo:
                    work = exchange.ended(client)
                    if work is not None and work.error is not None:
                        raise work.error
                    yield client, None if work is None else work.reply
            finally:
                stop.set()

    def _free(self, clients: deque[ClientId]) -> list[Site]:
        """Return a site for each thread, with models for these clients."""
        count = min(self.most, len(clients))
        self._sites = self._sites or [self.site]
        self._sites += [self.site.twin() for _ in range(count - len(self._sites))]
        for site in self._sites[:count]:  # here, since a new model may draw random numbers
            for client in clients:
                site.model(client)
        return self._sites[:count]


@dataclass
class _Work:
    """A client's task: its reply or error, and the state before it."""

    client: ClientId
    site: Site
    state: State
    reply: Reply | None = None
    error: BaseException | None = None
    drew: bool = False

    def __post_init__(self) -> None:
        self._undo = {name: tensor.clone() for name, tensor in self.state.items()}

    def do(self, answer: Answer, before: Tensor) -> None:
        """Do the task, and note whether anything drew from the global generator meanwhile."""
        try:
            self.reply = answer(self.site, self.client, self.state)
        except BaseException as error:  # raised where the client's turn is
            self.error = error
        self.drew = not torch.equal(torch.get_rng_state(), before)

    def undo(self) -> None:
        """Restore the state from before the task."""
        self.state.clear()
        self.state |= self._undo


@dataclass
class _Exchange:
    """The tasks of one exchange: pending, running and done."""

    pool: ThreadPoolExecutor
    kept: States
    answer: Answer
    before: Tensor
    free: list[Site]
    todo: deque[ClientId]
    running: dict[Future[None], _Work] = field(default_factory=dict)
    done: dict[ClientId, _Work] = field(default_factory=dict)

    def ended(self, client: ClientId) -> _Work | None:
        """Return a client's task when it is done; None if it was undone or never begun."""
        while client not in self.done:
            self._begin()
            if not self.running:
                return None
            for future in wait(self.running, return_when=FIRST_COMPLETED).done:
                self._end(self.running.pop(future))
        return self.done.pop(client)

    def _begin(self) -> None:
        while self.free and self.todo:
            client = self.todo.popleft()
            work = _Work(client, self.free.pop(), self.kept.take(client))
            self.running[self.pool.submit(work.do, self.answer, self.before)] = work

    def _end(self, work: _Work) -> None:
        if work.drew or work.error is not None:
            self.todo.clear()
        if work.drew:
            work.undo()
            return
        self.free.append(work.site)
        if work.error is None:
            self.kept.put(work.client, work.state)
        self.done[work.client] = work


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
