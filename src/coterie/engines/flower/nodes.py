"""Messages to the nodes of a Flower grid, their replies, and the client of each node."""

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from coterie.core.errors import Refused, TensorError
from coterie.core.names import folded
from coterie.core.printing import printable
from coterie.core.protocol import Ask, ClientId
from coterie.core.tensors import to_bytes
from coterie.engines.engine import Listener
from coterie.engines.flower import POSTED
from coterie.engines.flower.apps import QUERY, packed, unpacked
from coterie.engines.messages import Member, Reply, Request, parsed

SLACK = 4096  # bytes that a reply may have beside the values of its tensors
_LATE_S = 60.0  # seconds that Flower keeps a message beyond its deadline
QUICK_S, SLOW_S = 0.02, 0.5  # seconds between looks for replies: right after one came, and at most


@dataclass(frozen=True)
class Transport:
    """The transport of messages to the nodes of a grid."""

    grid: Grid  # Flower's, of one run
    traffic: list[int]  # bytes to devices and from them, counted up
    undecodable: list[str] = field(default_factory=list)  # problems of replies, see `arrived`

    def nodes(self) -> set[int]:
        """Return the nodes that are connected now."""
        return set(self.grid.get_node_ids())

    def collected(self, sent: dict[str, int], seconds: float) -> dict[int, Message]:
        """Wait until all messages are answered, or for `seconds`; return the reply of each node."""
        end, pause = time.monotonic() + seconds, QUICK_S
        replies: dict[int, Message] = {}
        while sent:
            arrived = self.arrived(sent)
            replies |= {sent.pop(id): message for id, message in arrived.items()}
            if time.monotonic() >= end:
                break
            pause = QUICK_S if arrived else min(pause * 1.5, SLOW_S)
            if sent:
                time.sleep(max(0.0, min(pause, end - time.monotonic())))
        return replies

    def send(
        self, requests: Mapping[int, Request], bodies: Mapping[int, bytes], seconds: float
    ) -> dict[str, int]:
        """Send requests with their tensors; return the node of each accepted message."""
        messages = {}
        for node, request in requests.items():
            content = packed(request.model_dump_json(), bodies.get(node, b""))
            messages[node] = Message(content, node, QUERY)
        return self.post(messages, seconds)

    def post(self, messages: Mapping[int, Message], seconds: float) -> dict[str, int]:
        """Send messages to nodes; return the node of each accepted message."""
        sent: dict[str, int] = {}
        for node, message in messages.items():
            message.metadata.ttl = seconds + _LATE_S
            self.traffic[0] += _size(message.content)
            sent |= dict.fromkeys(self.grid.push_messages([message]), node)
        if sent and (file := os.environ.get(POSTED)):
            Path(file).touch()
        return sent

    def arrived(self, sent: Collection[str]) -> dict[str, Message]:
        """Return the replies that have arrived, by the ids of the messages. What Flower cannot
        decode is lost, the first time with what arrived beside it: then each is taken alone.
        """
        pulled: list[Message] = []
        for ids in [[id] for id in sent] if self.undecodable else [list(sent)] if sent else []:
            try:
                pulled += self.grid.pull_messages(ids)
            except httpx.HTTPError:  # of the SuperLink
                raise
            except Exception as error:  # whatever a foreign node managed to send
                self.undecodable.append(f"{type(error).__name__}: {error}")
        replies = {message.metadata.reply_to_message_id: message for message in pulled}
        known = {id: message for id, message in replies.items() if id in sent}
        self.traffic[1] += sum(_size(m.content) for m in known.values() if m.has_content())
        return known


def read_reply(message: Message, most: int) -> tuple[Reply, bytes]:
    """Return a reply and its tensors. Raises TensorError for lost nodes and foreign messages."""
    if message.has_error():
        reason = message.error.reason or "no reason"
        problem = f"Flower reports: {reason} (code {message.error.code})"
        raise TensorError(problem, "Look at the log of its SuperNode.")
    try:
        text, body = unpacked(message.content, most)
    except TensorError:
        raise
    except Exception as error:  # whatever a foreign node managed to send
        remedy = "It did not come from coterie."
        raise TensorError(f"unreadable: {type(error).__name__}: {error}"[:2000], remedy) from None
    return parsed(Reply, text), body


def bodies_of(
    ask: Ask, clients: Iterable[ClientId], nodes: Mapping[ClientId, int]
) -> dict[int, bytes]:
    """Return the tensors of an Ask as bytes, by node; shared tensors are encoded once."""
    encoded: dict[int, bytes] = {}
    for i in clients:
        if id(ask.to[i]) not in encoded:
            encoded[id(ask.to[i])] = to_bytes(ask.to[i]) if ask.to[i] else b""
    return {nodes[i]: encoded[id(ask.to[i])] for i in clients}


def _size(content: RecordDict) -> int:
    arrays = [array.data for of in content.array_records.values() for array in of.values()]
    values = [value for of in content.config_records.values() for value in of.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return sum(len(part) if isinstance(part, str | bytes) else 8 for part in (*arrays, *parts))


HELLO_S = 120.0  # seconds for a node to say who it is
WELCOME_S = 20.0  # of them, those that a server waits for a node that it has not seen before


@dataclass
class Nodes:
    """The nodes of a grid, and their clients."""

    transport: Transport  # sends messages to nodes
    hello: Callable[[], Request]  # the request that asks a node for its client
    check: Callable[[Member], None]  # raises Refused for impossible reports
    listener: Listener  # receives refused answers
    positions: dict[ClientId, int]  # in the federation; later clients follow
    by_client: dict[ClientId, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._came: list[Member] = []  # since `members` was asked last
        # nodes of unanswered hellos, with their deadlines
        self._greeted: dict[str, tuple[int, float]] = {}
        self._strangers: dict[int, _RejectedNode] = {}

    def members(self) -> list[Member]:
        """Return the clients that joined since the last call. New nodes get a moment to identify
        themselves; later answers count in the next call.
        """
        end = time.monotonic() + WELCOME_S
        fresh = self._meet()
        while fresh & self._greeted.keys() and time.monotonic() < end:
            time.sleep(QUICK_S)
            fresh |= self._meet()
        came, self._came = self._came, []
        return came

    def await_clients(self, clients: Collection[ClientId], patience: float) -> None:
        """Wait up to `patience` seconds for these clients; the others count as not connected."""
        end = time.monotonic() + patience
        while not self.by_client.keys() >= set(clients) and time.monotonic() < end:
            self._meet()
            time.sleep(QUICK_S)

    def present(self) -> set[ClientId]:
        """Return the clients whose nodes are connected."""
        self._meet()
        alive = self.transport.nodes()
        return {client for client, node in self.by_client.items() if node in alive}

    def _meet(self) -> set[str]:
        """Ask nodes for their clients and record answers, without waiting; return new hellos."""
        alive, now = self.transport.nodes(), time.monotonic()
        waiting = {node for node, _ in self._greeted.values()}
        new = [
            n
            for n in sorted(alive - waiting - set(self.by_client.values()))
            if n not in self._strangers or self._strangers[n].due(now, alive)
        ]
        sent = self.transport.send(dict.fromkeys(new, self.hello()), {}, HELLO_S)
        self._greeted |= {id: (node, now + HELLO_S) for id, node in sent.items()}
        arrived = self.transport.arrived(self._greeted)
        # By node: the order of clients must not depend on the network.
        for id in sorted(arrived, key=self._greeted.__getitem__):
            self._introduce(self._greeted.pop(id)[0], arrived[id], alive)
        for id, (node, end) in list(self._greeted.items()):
            if end <= time.monotonic():
                del self._greeted[id]
                self._introduce(node, None, alive)
        return {id for id, node in sent.items() if node not in self._strangers}

    def _introduce(self, node: int, answered: Message | None, alive: Collection[int]) -> None:
        """Record a node's client if its answer passes the checks."""
        try:
            member = self._introduced(node, answered, alive)
        except TensorError as error:
            problem, before = described(error), self._strangers.get(node)
            holder = error.holder if isinstance(error, _NameTaken) else None
            self._strangers[node] = _RejectedNode(problem, time.monotonic() + HELLO_S, holder)
            if before is None or before.problem != problem:  # it is asked again and again
                self.listener.lost(f"node {node}", "hello", problem)
            return
        self.by_client[member.client] = node
        self.positions.setdefault(member.client, len(self.positions))
        self._came.append(member)

    def _introduced(self, node: int, answered: Message | None, alive: Collection[int]) -> Member:
        """Return the client of a node. Raises TensorError if it has none, or fails a check."""
        if answered is None:
            raise TensorError(f"did not say within {HELLO_S:g} s which client it is")
        reply, _ = read_reply(answered, SLACK)
        if reply.problem or reply.member is None:
            raise TensorError(reply.problem or "did not say which client it is", reply.remedy)
        try:
            self.check(reply.member)
        except Refused as error:
            raise TensorError(error.problem, error.remedy) from None
        client = reply.member.client
        if other := next(
            (i for i in self.by_client if i != client and folded(i) == folded(client)), None
        ):
            raise TensorError(
                f"claims the name {client!r}, but there is a client {other!r}: names must differ "
                f"by more than capitals",
                "Rename one.",
            )
        held = self.by_client.get(client)
        if held is not None and held != node and held in alive:
            raise _NameTaken(client, held)
        return reply.member


@dataclass(frozen=True)
class _RejectedNode:
    """A node without a valid name."""

    problem: str
    until: float  # when it is asked again, on the clock of `time.monotonic`
    holder: int | None  # the node with the name that it claims; it is asked once that has left

    def due(self, now: float, alive: Collection[int]) -> bool:
        return now >= self.until or (self.holder is not None and self.holder not in alive)


class _NameTaken(TensorError):
    """A node claims the name of another one."""

    def __init__(self, client: ClientId, holder: int) -> None:
        self.holder = holder
        super().__init__(
            f"claims the name {client}, which node {holder} has, and that node is connected",
            "Two devices have the same name: rename one.",
        )


def described(error: TensorError) -> str:
    """Return an error as printable text, since a device may have written most of it."""
    problem, remedy = printable(error.problem), printable(error.remedy)
    return f"{problem}\n  {remedy}" if remedy else problem
