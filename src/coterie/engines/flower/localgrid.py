"""A grid whose nodes are in this process, for tests: real messages, answered at once."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from flwr.app import Context, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from coterie.engines.flower.apps import Handle, client_app

__all__ = ["Handle", "LocalGrid", "LocalNode", "delivered"]


def delivered(message: Message) -> Message:
    """Return a message as received: its objects travel one by one, its envelope by protobuf."""
    contents = {id: part.deflate() for id, part in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    if not isinstance(arrived, Message):
        raise TypeError(f"a message arrived as {type(arrived).__name__}")
    arrived.metadata.__dict__.update(
        message_from_proto(message_to_proto(message)).metadata.__dict__
    )
    return arrived


@dataclass
class LocalNode:
    """A node of a local grid."""

    config: dict[str, Any]
    handle: Handle

    def reply(self, arrived: Message) -> Message | None:
        """Return the reply to a message; None: it never arrives."""
        context = Context(1, arrived.metadata.dst_node_id, dict(self.config), RecordDict(), {})
        return cast(Message | None, client_app(self.handle)(arrived, context))


@dataclass(eq=False)
class LocalGrid(Grid):
    """A grid of nodes that answer at once."""

    nodes: dict[int, Any] = field(default_factory=dict)
    # replies, by the id of the message that they answer
    waiting: dict[str, Message] = field(default_factory=dict)
    sent: int = 0

    def __post_init__(self) -> None:
        # the identity of the sender of every message
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def put(self, node: LocalNode) -> int:
        """Add a node; return its id."""
        id = 1000 + 7 * len(self.nodes)
        self.nodes[id] = node
        return id

    @property
    def run(self) -> Any:
        """Refuse: the engine never asks."""
        raise NotImplementedError

    def set_run(self, run: Any) -> None:
        """Refuse: the engine never asks."""
        raise NotImplementedError

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        """Refuse: Flower has deprecated it."""
        raise NotImplementedError

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """Refuse: the engine watches while it waits, which this does not allow."""
        raise NotImplementedError

    def get_node_ids(self) -> Iterable[int]:
        """Return the ids of the nodes that can be reached."""
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send messages, keep the replies until they are pulled, and return the messages' ids."""
        message_ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is None:
                continue  # as the SuperLink: no id
            message_ids.append(message.metadata.message_id)
            self.on_message(message, node)
            reply = node.reply(delivered(message))
            if reply is not None:
                reply.metadata.__dict__["_message_id"] = f"reply-{self.sent}"
                self.waiting[message.metadata.message_id] = delivered(reply)
        return message_ids

    def on_message(self, message: Message, node: Any) -> None:
        """Handle a message on its way to a node; for subclasses."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return replies, not in the order of the ids."""
        return [self.waiting.pop(id) for id in list(message_ids)[::-1] if id in self.waiting]
