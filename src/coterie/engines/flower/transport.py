"""Messages to the nodes of a Flower grid, and their replies."""

import os
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from coterie.core.errors import TensorError
from coterie.core.protocol import Ask, ClientId
from coterie.core.tensors import to_bytes
from coterie.engines.flower import POSTED
from coterie.engines.flower.apps import QUERY, packed, unpacked
from coterie.engines.messages import Reply, Request, parsed

SLACK = 4096  # bytes that a reply may have beside the values of its tensors
_LATE_S = 60.0  # seconds that Flower keeps a message beyond its deadline
# seconds between looks for replies: right after one came, and at most
QUICK_S, SLOW_S = 0.02, 0.5


@dataclass(frozen=True)
class Transport:
    """The transport of messages to the nodes of a grid."""

    grid: Grid  # Flower's, of one run
    traffic: list[int]  # bytes to devices and from them, counted up

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
        contents = {
            node: packed(request.model_dump_json(), bodies.get(node, b""))
            for node, request in requests.items()
        }
        return self.post(
            {node: Message(content, node, QUERY) for node, content in contents.items()}, seconds
        )

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
        """Return the replies that have arrived, by the ids of the messages."""
        pulled = list(self.grid.pull_messages(list(sent))) if sent else []
        replies = {
            id: message
            for message in pulled
            if (id := message.metadata.reply_to_message_id) in sent
        }
        self.traffic[1] += sum(
            _size(message.content) for message in replies.values() if message.has_content()
        )
        return replies


def read_reply(message: Message, most: int) -> tuple[Reply, bytes]:
    """Return a reply and its tensors. Raises TensorError for lost nodes, failed programs and other
    messages.
    """
    if message.has_error():
        reason = message.error.reason or "no reason"
        raise TensorError(
            f"Flower reports: {reason} (code {message.error.code})",
            "Look at the log of its SuperNode.",
        )
    try:
        text, body = unpacked(message.content, most)
    except TensorError:
        raise
    except Exception as error:  # whatever a foreign node managed to send
        raise TensorError(
            f"unreadable: {type(error).__name__}: {error}"[:2000], "It did not come from coterie."
        ) from None
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
    """Return the bytes of a message's values."""
    arrays = sum(
        len(array.data) for record in content.array_records.values() for array in record.values()
    )
    values = [value for record in content.config_records.values() for value in record.values()]
    parts = [part for value in values for part in (value if isinstance(value, list) else [value])]
    return arrays + sum(len(part) if isinstance(part, str | bytes) else 8 for part in parts)
