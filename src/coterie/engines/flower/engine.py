"""Clients on the nodes of a Flower grid: its simulation, or a SuperLink with SuperNodes. A client
that spoils masked sums is searched for by halves, from one exchange to the next.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from flwr.app import Message
from flwr.serverapp import Grid

from coterie.aggregation import secure
from coterie.core.errors import CheckpointError, ClientError, TensorError
from coterie.core.files import write_json
from coterie.core.foreign import json_of, read_bytes
from coterie.core.printing import printable
from coterie.core.protocol import Ask, ClientId, Replies, State, trains
from coterie.core.tensors import MOST_OF_ONE, from_bytes, nbytes
from coterie.engines.engine import Engine, Listener, Write
from coterie.engines.flower.nodes import (
    SLACK,
    SLOW_S,
    Nodes,
    Transport,
    bodies_of,
    described,
    read_reply,
)
from coterie.engines.messages import Member, Reply, Request, check_answers


@dataclass
class Suspects:
    """Clients of which one spoilt all sums that were spoilt so far."""

    names: list[str] = field(default_factory=list)  # sorted; empty: no sum was spoilt
    turn: int = 0  # exchanges since the last spoilt one
    patience: int = 2  # exchanges after a spoilt one that leave out suspects

    def learn(self, spoilt: Collection[str]) -> None:
        """Record the clients in a spoilt sum."""
        before, self.turn = self.names, 0
        self.names = sorted(set(before) & set(spoilt) or spoilt)
        if self.names == before:
            self.patience *= 2

    def left_out(self, clients: Sequence[str]) -> list[str]:
        """Return clients to leave out of an exchange: the culprit, or half of the suspects, with
        others if these are few; none if too few would stay or be left out.
        """
        here = [name for name in self.names if name in clients]
        if len(self.names) == 1:
            return here if len(clients) > secure.FEWEST else []
        if not here or self.turn >= self.patience or len(clients) < 2 * secure.FEWEST:
            return []
        half, others = (len(here) + 1) // 2, sorted(set(clients) - set(here))
        filled = _rotated(others, self.turn)[: max(0, secure.FEWEST - half)]
        return _rotated(here, self.turn * half)[:half] + filled

    def __str__(self) -> str:
        if len(self.names) == 1:
            return (
                "left out: it was in every sum that was out of range, and each other client was "
                "left out of one of them"
            )
        return (
            f"left out of this exchange: one of {', '.join(self.names)} spoilt a sum, and until "
            f"it is found, half of them are left out in turn"
        )


def _rotated(names: list[str], by: int) -> list[str]:
    start = by % max(len(names), 1)
    return names[start:] + names[:start]


__all__ = ["Flower", "Grid", "gathered"]
_PER_TENSOR = 512  # bytes that a reply may have for a tensor, beside its values


@dataclass
class Flower(Engine):
    """Clients on the nodes of a grid. A client has the id that its node gives when first asked."""

    distant: ClassVar[bool] = True

    grid: Grid
    run: str  # under which devices keep their states; kept when resumed
    recipe: Mapping[str, Any]  # resolved, JSON values
    deadline: float  # seconds for the replies of one exchange
    # from done rounds to the round from which to resume
    kept: Callable[[int], int] = lambda round: 0
    threads: int | None = None  # of devices; None: each device's choice
    folder: str | None = None  # in which all devices of a simulation keep everything
    secure: bool = False  # whether the server sees only the sum of updates
    journal: Path | None = None  # records each masked exchange before it begins
    listener: Listener = field(default_factory=Listener)
    check: Callable[[Member], None] = lambda member: None  # raises Refused for impossible reports
    # bytes to devices and from them, of all kinds
    traffic: list[int] = field(default_factory=lambda: [0, 0])
    # in the federation; later clients follow
    positions: dict[ClientId, int] = field(default_factory=dict)
    # round and exchange of the last reply of each client
    turns: dict[ClientId, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._transport = Transport(self.grid, self.traffic)
        self._nodes = Nodes(self._transport, self._hello, self.check, self.listener, self.positions)
        self._state_bytes: dict[ClientId, int] = {}
        self._asked_last: tuple[int, int, str] | None = None
        self._number = 0
        self._suspects, self.spoilt = Suspects(), False

    def members(self) -> list[Member]:
        return self._nodes.members()

    def await_clients(self, clients: Collection[ClientId], patience: float) -> None:
        """Wait up to `patience` seconds for these clients to identify themselves."""
        self._nodes.await_clients(clients, patience)

    def present(self) -> set[ClientId]:
        return self._nodes.present()

    def _hello(self) -> Request:
        return Request(action="hello", run=self.run, recipe=dict(self.recipe), folder=self.folder)

    def answer(self, ask: Ask, round: int, phase: int) -> Replies:
        if self.secure and trains(ask.task):
            return self._summed(ask, round, phase)
        return self._answers("task", ask, round, phase)

    def keep(self, ask: Ask, round: int, write: Write) -> None:
        self._answers("keep", ask, round, -1)

    def _answers(self, action: Any, ask: Ask, round: int, phase: int) -> Replies:
        clients, nodes = self._reachable(ask, round, phase), self._nodes.by_client
        requests = {i: self._request(action, ask.name, i, round, phase) for i in clients}
        sent = self._transport.send(
            {nodes[i]: requests[i] for i in clients}, bodies_of(ask, clients, nodes), self.deadline
        )
        answered = self._transport.collected(sent, self.deadline)
        replies: dict[ClientId, State] = {}
        for i in clients:
            try:
                reply, replies[i] = self._believed(ask, i, requests[i], answered.get(nodes[i]))
            except TensorError as error:
                self.listener.lost(i, ask.name, described(error))
                continue
            self._heard(i, reply, round)
        return replies

    def _reachable(self, ask: Ask, round: int, phase: int) -> list[ClientId]:
        """Return the clients to ask in an exchange, and number it; report the others as lost."""
        self._count(round, phase, ask.name)
        here = self.present()
        for i in ask.to.keys() - here:
            self.listener.lost(i, ask.name, "its device is not connected")
        return [i for i in ask.to if i in here]

    def _heard(self, client: ClientId, reply: Reply, round: int) -> None:
        self.turns[client], self._state_bytes[client] = (round, self._number), reply.state_bytes
        if reply.note:
            self.listener.noted(client, printable(reply.note))
        self.listener.measured(client, dict(reply.metrics))

    def _summed(self, ask: Ask, round: int, phase: int) -> Replies:
        """Do an exchange of which only the sum is seen; every client in it gets the mean as its
        reply. Raises TensorError before asking: clients' tensors differ and have no sum.
        """
        from coterie.engines.flower.secagg_server import summed  # of Flower's older interface

        clients, nodes = self._trusted(ask, round, phase), self._nodes.by_client
        for i in clients:
            secure.check_form(ask.to[clients[0]], ask.to[i], ask.reply_spec(ask.to[i]))
        self._begin(round)
        size = sum(tensor.numel() for tensor in ask.to[clients[0]].values()) if clients else 0
        requests = {
            nodes[i]: self._request("task", ask.name, i, round, phase, masked=True) for i in clients
        }
        bodies = bodies_of(ask, clients, nodes)

        def carry(messages: Mapping[int, Message]) -> dict[int, Message]:
            sent = self._transport.post(messages, self.deadline)
            return self._transport.collected(sent, self.deadline)

        total = summed(carry, requests, bodies, size)
        if spoilt := [i for i in clients if nodes[i] in total.spoilt]:
            self._suspects.learn(spoilt)
        self.spoilt = bool(spoilt and self._suspects.left_out(sorted(self.present())))
        held = [i for i in clients if nodes[i] in total.replies]
        for i in clients:
            if i in held:
                self._heard(i, total.replies[nodes[i]], round)
            if nodes[i] in total.problems:
                self.listener.lost(i, ask.name, printable(total.problems[nodes[i]], lines=True))
        if total.mean is None:
            return {}
        return dict.fromkeys(held, secure.moved([ask.to[i] for i in held], total.mean))

    def _trusted(self, ask: Ask, round: int, phase: int) -> list[ClientId]:
        """Return the clients to ask in a masked exchange; report the suspects as lost."""
        here = self._reachable(ask, round, phase)
        left_out = self._suspects.left_out(here)
        for i in left_out:
            self.listener.lost(i, ask.name, str(self._suspects))
        self._suspects.turn += 1
        return [i for i in here if i not in left_out]

    def _begin(self, round: int) -> None:
        """Record a masked exchange in the journal before any is asked. Raises SaveError."""
        if self.journal is not None:
            run, begun = self._journal()
            known = [then for then in begun if run == self.run and then >= self.kept(round)]
            write_json(self.journal, {"run": self.run, "begun": [*known, round]})

    def _journal(self) -> tuple[str, list[int]]:
        """Return the journal's run and rounds of exchanges. Raises CheckpointError."""
        if self.journal is None or not self.journal.exists():
            return self.run, []
        try:
            journal = json_of(read_bytes(self.journal))
            return str(journal["run"]), [int(round) for round in journal["begun"]]
        except (OSError, ValueError, TypeError, KeyError):
            problem = f"{self.journal} is damaged"
            raise CheckpointError(problem, "Start a new run with another --out.") from None

    def begun(self, round: int) -> list[int]:
        """Return the rounds since `round` with masked exchanges, which devices answer once."""
        run, begun = self._journal()
        # Without a checkpoint the devices still know this run by the name in the journal.
        if not self.turns:
            self.run = run
        return [then for then in begun if run == self.run and then >= round]

    def _count(self, round: int, phase: int, task: str) -> None:
        """Count the exchanges of a round; a repeated request keeps its number."""
        if self._asked_last != (round, phase, task):
            goes_on = self._asked_last is not None and self._asked_last[0] == round
            self._number = self._number + 1 if goes_on else 0
            self._asked_last = (round, phase, task)

    def _believed(
        self, ask: Ask, client: ClientId, request: Request, answered: Message | None
    ) -> tuple[Reply, State]:
        """Return a client's reply. Raises TensorError: missing, a problem, or not asked for."""
        if answered is None:
            raise TensorError(f"no reply within {self.deadline:g} s")
        form = ask.reply_spec(ask.to[client])
        reply, body = read_reply(answered, nbytes(form) + _PER_TENSOR * len(form) + SLACK)
        if reply.problem:
            raise TensorError(reply.problem, reply.remedy)
        check_answers(reply, request)
        try:
            what = f"reply of client {client!r}"
            return reply, from_bytes(body, what, MOST_OF_ONE) if body else {}
        except TensorError:
            raise
        except Exception as error:  # for instance a dtype that PyTorch does not know
            problem = f"unreadable tensors: {type(error).__name__}: {error}"
            raise TensorError(problem[:2000]) from None

    def _request(
        self, action: Any, task: str, client: ClientId, round: int, phase: int, masked: bool = False
    ) -> Request:
        return Request(
            action=action,
            run=self.run,
            recipe=dict(self.recipe),
            client=client,
            task=task,
            round=round,
            phase=phase,
            number=self._number,
            position=self.positions.get(client, 0),
            expects=self.turns.get(client),
            rounds_kept=self.kept(round),
            threads=self.threads,
            folder=self.folder,
            masked=masked,
        )

    def states(self) -> Mapping[ClientId, State]:
        return {}

    def memo(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "turns": self.turns,
            "last": self._asked_last,
            "number": self._number,
            "traffic": self.traffic,
            "suspects": self._suspects.names,
        }

    def restore(self, states: Mapping[ClientId, State], memo: Mapping[str, Any] = {}) -> None:
        """Restore the counters; devices keep their own states."""
        self.run, self.traffic[:] = memo.get("run", self.run), memo.get("traffic", self.traffic)
        self.turns = {client: (turn[0], turn[1]) for client, turn in memo.get("turns", {}).items()}
        self._suspects.names = list(memo.get("suspects", ()))
        # Numbers go on, so that devices do not take an evaluation before the checkpoint for a
        # later one.
        if (last := memo.get("last")) is not None:
            self._asked_last, self._number = (last[0], last[1], last[2]), memo["number"]

    def state_bytes(self) -> Mapping[ClientId, int]:
        return self._state_bytes


def gathered(
    engine: Flower, enough: Callable[[Sequence[Member]], bool], patience: float
) -> list[Member]:
    """Wait until enough clients are identified. Raises ClientError after `patience` seconds."""
    known: dict[ClientId, Member] = {}
    end = time.monotonic() + patience
    while True:
        # By client: a device that was restarted counts once.
        known |= {member.client: member for member in engine.members()}
        if enough(members := list(known.values())):
            return members
        if time.monotonic() > end:
            raise ClientError(
                f"{len(members)} clients connected within {patience:g} s: "
                f"{', '.join(m.client for m in members) or 'none'}",
                "Check that the SuperNodes run and use this SuperLink's address. Then start again, "
                "perhaps with a smaller --clients.",
            )
        time.sleep(SLOW_S)
