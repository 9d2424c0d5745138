"""Clients on the nodes of a grid of Flower's, under its simulation or on a SuperLink with
SuperNodes.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flwr.app import Message
from flwr.serverapp import Grid

from coterie.core.errors import CheckpointError, ClientError, Refused, TensorError
from coterie.core.names import folded
from coterie.core.printing import printable
from coterie.engines.flower.apps import QUERY
from coterie.engines.flower.packing import _bodies, _packed, _size, _unpacked
from coterie.engines.messages import Member, Reply, Request, parsed

if TYPE_CHECKING:
    from coterie.core.protocol import Ask, ClientId, Replies, State
    from coterie.engines.engine import Listener, Write

__all__ = ["Flower", "Grid", "gathered"]


HELLO_S = 120.0  # seconds for a node to say who it is
WELCOME_S = 20.0  # of them, those that a server waits for a node that it has not seen before
_SLACK, _PER_TENSOR = 4096, 512  # bytes that a reply may have beside the values of its tensors
_LATE_S = 60.0  # seconds that Flower keeps a message beyond its deadline
_QUICK_S, _SLOW_S = (
    0.02,
    0.5,
)  # seconds between looks for replies: right after one came, and at most


def _listener() -> "Listener":
    from coterie.engines.engine import Listener

    return Listener()


@dataclass
class Flower:
    """Clients on the nodes of a grid. A client is known by its own id, which its node says when it
    is asked for the first time.

    Args:
        grid: Flower's, of one run.
        run: The run's own name, under which devices keep their states; a run that is resumed has
            its former one.
        recipe: The resolved recipe, JSON values.
        deadline: Seconds for the replies of one exchange.
        kept: Gives, by the rounds done, the round that the server may go back to.
        positions: Of clients in the federation; whoever comes later is behind them.
        threads: With how many devices compute; None: as many as suit them.
        folder: Of a simulated run: where devices keep everything.
        secure: Whether of what is trained only the sum is seen.
        journal: Where it is written down that an exchange under masks begins, before it does; None:
            nowhere.
        check: Raises Refused for a client that cannot be what its device says.
    """

    distant: ClassVar[bool] = True

    grid: Grid
    run: str
    recipe: Mapping[str, Any]
    deadline: float
    kept: Callable[[int], int] = lambda round: 0
    threads: int | None = None
    folder: str | None = None
    secure: bool = False
    journal: Path | None = None
    listener: "Listener" = field(default_factory=_listener)
    check: Callable[[Member], None] = lambda member: None
    traffic: list[int] = field(
        default_factory=lambda: [0, 0]
    )  # bytes to devices and from them, whatever they hold
    positions: "dict[ClientId, int]" = field(default_factory=dict)
    turns: "dict[ClientId, tuple[int, int]]" = field(
        default_factory=dict
    )  # of the last reply of each client

    def __post_init__(self) -> None:
        self._nodes: dict[ClientId, int] = {}
        self._came: list[Member] = []  # since `members` was asked last
        self._greeted: dict[
            str, tuple[int, float]
        ] = {}  # hellos without an answer, and until when one is waited for
        self._strangers: dict[int, _RejectedNode] = {}
        self._state_bytes: dict[ClientId, int] = {}
        self._asked_last: tuple[int, int, str] | None = None
        self._number = 0

    def members(self) -> list[Member]:
        """Who has come since this was asked last. Nodes that are new get a moment to say who
        they are; what is later comes next time.
        """
        end = time.monotonic() + WELCOME_S
        fresh = self._meet()
        while fresh & self._greeted.keys() and time.monotonic() < end:
            time.sleep(_QUICK_S)
            fresh |= self._meet()
        came, self._came = self._came, []
        return came

    def await_clients(self, clients: "Collection[ClientId]", patience: float) -> None:
        """Give these clients so many seconds to say who they are; whoever does not is not there."""
        end = time.monotonic() + patience
        while not self._nodes.keys() >= set(clients) and time.monotonic() < end:
            self._meet()
            time.sleep(_QUICK_S)

    def present(self) -> "set[ClientId]":
        """Return the clients whose nodes are there now."""
        self._meet()
        alive = set(self.grid.get_node_ids())
        return {client for client, node in self._nodes.items() if node in alive}

    def _meet(self) -> set[str]:
        """Ask new nodes who they are, and hear those that have answered; nobody is waited for.
        The hellos to nodes never seen before.
        """
        alive, now = set(self.grid.get_node_ids()), time.monotonic()
        waiting = {node for node, _ in self._greeted.values()}
        new = [
            n
            for n in sorted(alive - waiting - set(self._nodes.values()))
            if n not in self._strangers or self._strangers[n].due(now, alive)
        ]
        hello = Request(action="hello", run=self.run, recipe=dict(self.recipe), folder=self.folder)
        sent = self._send(dict.fromkeys(new, hello), {}, HELLO_S)
        self._greeted |= {id: (node, now + HELLO_S) for id, node in sent.items()}
        arrived = self._arrived(self._greeted)
        for id in sorted(
            arrived, key=self._greeted.__getitem__
        ):  # by node: who is before whom must not depend on the network
            self._introduce(self._greeted.pop(id)[0], arrived[id], alive)
        for id, (node, end) in list(self._greeted.items()):
            if end <= time.monotonic():
                del self._greeted[id]
                self._introduce(node, None, alive)
        return {id for id, node in sent.items() if node not in self._strangers}

    def _introduce(self, node: int, answered: Message | None, alive: Collection[int]) -> None:
        """Take down who a node says that it is, if that is believed."""
        try:
            member = self._introduced(node, answered, alive)
        except TensorError as error:
            problem, before = _told(error), self._strangers.get(node)
            self._strangers[node] = _RejectedNode(
                problem,
                time.monotonic() + HELLO_S,
                error.holder if isinstance(error, _NameTaken) else None,
            )
            if before is None or before.problem != problem:  # it is asked again and again
                self.listener.lost(f"node {node}", "hello", problem)
            return
        self._nodes[member.client] = node
        self.positions.setdefault(member.client, len(self.positions))
        self._came.append(member)

    def _introduced(self, node: int, answered: Message | None, alive: Collection[int]) -> Member:
        """Who a node says that it is. Raises TensorError if it does not say, or is not believed."""
        if answered is None:
            raise TensorError(f"did not say within {HELLO_S:g} s who it is", "")
        reply, _ = self._read(answered, _SLACK)
        if reply.problem or reply.member is None:
            raise TensorError(reply.problem or "did not say who it is", reply.remedy)
        try:
            self.check(reply.member)
        except Refused as error:
            raise TensorError(error.problem, error.remedy) from None
        client = reply.member.client
        if other := next(
            (i for i in self._nodes if i != client and folded(i) == folded(client)), None
        ):
            raise TensorError(
                f"says that it is {client!r}, and there is {other!r}: names must differ by more "
                f"than capitals",
                "Rename one.",
            )
        held = self._nodes.get(client)
        if held is not None and held != node and held in alive:
            raise _NameTaken(client, held)
        return reply.member

    def answer(self, ask: "Ask", round: int, phase: int) -> "Replies":
        from coterie.core.protocol import trains

        secure = self.secure and trains(ask.task)
        return self._summed(ask, round, phase) if secure else self._asked("task", ask, round, phase)

    def keep(self, ask: "Ask", round: int, write: "Write") -> None:
        self._asked("keep", ask, round, -1)

    def _asked(self, action: Any, ask: "Ask", round: int, phase: int) -> "Replies":
        asked = self._reachable(ask, round, phase)
        requests = {i: self._request(action, ask.name, i, round, phase) for i in asked}
        answered = self._exchange(
            {self._nodes[i]: requests[i] for i in asked}, _bodies(ask, asked, self._nodes)
        )
        found: dict[ClientId, State] = {}
        for i in asked:
            try:
                reply, found[i] = self._believed(ask, i, requests[i], answered.get(self._nodes[i]))
            except TensorError as error:
                self.listener.lost(i, ask.name, _told(error))
                continue
            self._heard(i, reply, round)
        return found

    def _reachable(self, ask: "Ask", round: int, phase: int) -> "list[ClientId]":
        """Whom to ask in an exchange, which gets its number; the others are lost."""
        self._count(round, phase, ask.name)
        here = self.present()
        for i in ask.to.keys() - here:
            self.listener.lost(i, ask.name, "its device is not there")
        return [i for i in ask.to if i in here]

    def _heard(self, client: "ClientId", reply: Reply, round: int) -> None:
        """Take note of what a client said beside its tensors."""
        self.turns[client], self._state_bytes[client] = (round, self._number), reply.state_bytes
        if reply.note:
            self.listener.noted(client, printable(reply.note))
        self.listener.measured(client, dict(reply.metrics))

    def _summed(self, ask: "Ask", round: int, phase: int) -> "Replies":
        """Return an exchange of which only the sum is seen: the replies of all that are in it are
        their mean.

        Raises:
            TensorError: It has no sum: clients are sent unlike tensors, or others are expected
                back. Nobody was asked.
        """
        from coterie.aggregation import secure
        from coterie.engines.flower.secagg_server import summed

        asked = self._reachable(ask, round, phase)
        for i in asked:
            secure.check_form(ask.to[asked[0]], ask.to[i], ask.reply_spec(ask.to[i]))
        self._begin(round)
        size = sum(tensor.numel() for tensor in ask.to[asked[0]].values()) if asked else 0
        requests = {
            self._nodes[i]: self._request("task", ask.name, i, round, phase, masked=True)
            for i in asked
        }
        bodies = _bodies(ask, asked, self._nodes)
        found = summed(
            lambda messages: self._collected(self._post(messages, self.deadline)),
            requests,
            bodies,
            size,
        )
        held = [i for i in asked if self._nodes[i] in found.replies]
        for i in asked:
            if i in held:
                self._heard(i, found.replies[self._nodes[i]], round)
            else:
                self.listener.lost(
                    i, ask.name, printable(found.problems[self._nodes[i]], lines=True)
                )
        return (
            {}
            if found.mean is None
            else dict.fromkeys(held, secure.moved([ask.to[i] for i in held], found.mean))
        )

    def _begin(self, round: int) -> None:
        """Write down that an exchange under masks begins. Raises SaveError: then nobody is
        asked.
        """
        from coterie.core.files import write_atomically

        if self.journal is not None:
            known = [then for then in self._begun() if then >= self.kept(round)]
            write_atomically(
                self.journal, json.dumps({"run": self.run, "begun": [*known, round]}).encode()
            )

    def _begun(self) -> list[int]:
        """Return the rounds of the exchanges in the journal."""
        found = self._written()
        return list(found["begun"]) if found is not None and found["run"] == self.run else []

    def _written(self) -> dict[str, Any] | None:
        """Return what the journal says. Raises CheckpointError where it is damaged."""
        if self.journal is None or not self.journal.exists():
            return None
        try:
            found: dict[str, Any] = json.loads(self.journal.read_text())
            return {"run": str(found["run"]), "begun": [int(round) for round in found["begun"]]}
        except (ValueError, TypeError, KeyError):
            raise CheckpointError(
                f"{self.journal} is damaged", "Start the run afresh, with another --out."
            ) from None

    def begun(self, round: int) -> list[int]:
        """Return the rounds of exchanges under masks that had begun since `round`, in which devices
        do not answer again.
        """
        found = self._written()
        if (
            found is not None and not self.turns
        ):  # nothing was saved before: it is the same run for its devices all the same
            self.run = found["run"]
        return [then for then in self._begun() if then >= round]

    def _count(self, round: int, phase: int, task: str) -> None:
        """Count the exchanges of a round; what is asked again has its former number."""
        if self._asked_last != (round, phase, task):
            self._number = (
                self._number + 1
                if self._asked_last is not None and self._asked_last[0] == round
                else 0
            )
            self._asked_last = (round, phase, task)

    def _believed(
        self, ask: "Ask", client: "ClientId", request: Request, answered: Message | None
    ) -> "tuple[Reply, State]":
        """Return what a client answered. Raises TensorError if there is nothing, a problem, or
        something that it was not asked for.
        """
        from coterie.core.tensors import from_bytes, nbytes

        if answered is None:
            raise TensorError(f"no reply within {self.deadline:g} s", "")
        form = ask.reply_spec(ask.to[client])
        reply, body = self._read(answered, nbytes(form) + _PER_TENSOR * len(form) + _SLACK)
        if reply.problem:
            raise TensorError(reply.problem, reply.remedy)
        if (reply.client, reply.task, reply.round, reply.number) != (
            client,
            request.task,
            request.round,
            request.number,
        ):
            raise TensorError(
                f"a reply of {reply.client!r} to {reply.task}, round {reply.round + 1}, that "
                f"nobody asked for",
                "",
            )
        try:
            return reply, from_bytes(body, f"reply of client {client!r}") if body else {}
        except TensorError:
            raise
        except Exception as error:  # a dtype that PyTorch does not know, say
            raise TensorError(
                f"unreadable tensors: {type(error).__name__}: {error}"[:2000], ""
            ) from None

    def _request(
        self,
        action: Any,
        task: str,
        client: "ClientId",
        round: int,
        phase: int,
        masked: bool = False,
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

    def _exchange(
        self, requests: Mapping[int, Request], bodies: Mapping[int, bytes]
    ) -> dict[int, Message]:
        """Ask nodes, and wait until all have answered, or as long as the deadline lets. What
        each answered, by node.
        """
        return self._collected(self._send(requests, bodies, self.deadline))

    def _collected(self, sent: dict[str, int]) -> dict[int, Message]:
        """Wait until all messages are answered, or as long as the deadline lets. What each node
        answered.
        """
        end, pause = time.monotonic() + self.deadline, _QUICK_S
        found: dict[int, Message] = {}
        while sent:
            arrived = self._arrived(sent)
            found |= {sent.pop(id): message for id, message in arrived.items()}
            if time.monotonic() >= end:
                break
            pause = _QUICK_S if arrived else min(pause * 1.5, _SLOW_S)
            if sent:
                time.sleep(max(0.0, min(pause, end - time.monotonic())))
        return found

    def _send(
        self, requests: Mapping[int, Request], bodies: Mapping[int, bytes], seconds: float
    ) -> dict[str, int]:
        """Send requests, and their tensors, to nodes. The node of each message; of one that
        Flower does not take there is none.
        """
        packed = {
            node: _packed(request.model_dump_json(), bodies.get(node, b""))
            for node, request in requests.items()
        }
        return self._post(
            {node: Message(content, node, QUERY) for node, content in packed.items()}, seconds
        )

    def _post(self, messages: Mapping[int, Message], seconds: float) -> dict[str, int]:
        """Send messages to nodes. The node of each; of one that Flower does not take there is
        none.
        """
        sent: dict[str, int] = {}
        for node, message in messages.items():
            message.metadata.ttl = seconds + _LATE_S
            self.traffic[0] += _size(message.content)
            sent |= dict.fromkeys(self.grid.push_messages([message]), node)
        return sent

    def _arrived(self, sent: Collection[str]) -> dict[str, Message]:
        """Return what has arrived in answer to these messages, by their ids."""
        pulled = list(self.grid.pull_messages(list(sent))) if sent else []
        found = {
            id: message
            for message in pulled
            if (id := message.metadata.reply_to_message_id) in sent
        }
        self.traffic[1] += sum(
            _size(message.content) for message in found.values() if message.has_content()
        )
        return found

    def _read(self, message: Message, most: int) -> tuple[Reply, bytes]:
        """Return a reply and its tensors. Raises TensorError for a node that is lost, a program
        that died, and something that is no reply.
        """
        if message.has_error():
            reason = message.error.reason or "no reason"
            raise TensorError(
                f"Flower says: {reason} (code {message.error.code})",
                "Look at the log of its SuperNode.",
            )
        try:
            text, body = _unpacked(message.content, most)
        except TensorError:
            raise
        except Exception as error:  # whatever a foreign node managed to send
            raise TensorError(
                f"unreadable: {type(error).__name__}: {error}"[:2000], "It is not of coterie."
            ) from None
        return parsed(Reply, text), body

    def states(self) -> "Mapping[ClientId, State]":
        return {}

    def memo(self) -> dict[str, Any]:
        return {
            "run": self.run,
            "turns": self.turns,
            "last": self._asked_last,
            "number": self._number,
            "traffic": self.traffic,
        }

    def restore(self, states: "Mapping[ClientId, State]", memo: Mapping[str, Any] = {}) -> None:
        """Devices have their states, and go back with the server by themselves."""
        self.run, self.traffic = memo.get("run", self.run), list(memo.get("traffic", self.traffic))
        self.turns = {client: (turn[0], turn[1]) for client, turn in memo.get("turns", {}).items()}
        if (
            (last := memo.get("last")) is not None
        ):  # numbers go on, so that an evaluation before the checkpoint is not taken for the future
            self._asked_last, self._number = (last[0], last[1], last[2]), memo["number"]

    def state_bytes(self) -> "Mapping[ClientId, int]":
        return self._state_bytes


@dataclass(frozen=True)
class _RejectedNode:
    """A node that gave no valid name.

    Args:
        problem: Why.
        until: When it is asked again, on the clock of `time.monotonic`.
        holder: The node that has the name which it claims; it is asked again as soon as that one
            has gone.
    """

    problem: str
    until: float
    holder: int | None

    def due(self, now: float, alive: Collection[int]) -> bool:
        """Whether it may be asked again now."""
        return now >= self.until or (self.holder is not None and self.holder not in alive)


class _NameTaken(TensorError):
    """The error of a node that claims the name of another node."""

    def __init__(self, client: "ClientId", holder: int) -> None:
        self.holder = holder
        super().__init__(
            f"says that it is {client}; node {holder} is, and that one is there",
            "Two devices have one name.",
        )


def _told(error: TensorError) -> str:
    """Return what is told of an error, most of which a device may have written."""
    problem, remedy = printable(error.problem), printable(error.remedy)
    return f"{problem}\n  {remedy}" if remedy else problem


def gathered(
    engine: Flower, enough: Callable[[Sequence[Member]], bool], patience: float
) -> list[Member]:
    """Wait until enough clients have said who they are.

    Raises:
        ClientError: They did not within `patience` seconds.
    """
    known: dict[ClientId, Member] = {}
    end = time.monotonic() + patience
    while True:
        known |= {
            member.client: member for member in engine.members()
        }  # a device that was started again counts once
        if enough(found := list(known.values())):
            return found
        if time.monotonic() > end:
            raise ClientError(
                f"{len(found)} clients came within {patience:g} s: "
                f"{', '.join(m.client for m in found) or 'none'}",
                "Are the SuperNodes running and do they know this SuperLink? Then start again, "
                "or with a smaller --clients.",
            )
        time.sleep(_SLOW_S)
