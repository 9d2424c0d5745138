"""Flower's nodes without Flower's machinery: real messages, through Flower's own encoding, to
real ClientApps in this process.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flwr.app as flower_app
from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from coterie.deploy import apps
from coterie.engines import Listener
from coterie.engines.flower.apps import client_app
from coterie.engines.messages import Reply, Request
from coterie.reports import Callback
from coterie.runs.backends import OnDevices, Place, simulated_device
from coterie.runs.execution import Execution
from coterie.runs.files import Json
from coterie.runs.inputs import Inputs, Kept
from coterie.runs.recipe import Recipe
from coterie.runs.run import execute_all

Handle = Callable[[Mapping[str, Any], str, bytes], tuple[str, bytes]]
Spoil = Callable[
    [Message, Message], Message | None
]  # (request, reply) -> what arrives; None: nothing ever does


def delivered(message: Message) -> Message:
    """A message as it comes out at the other end: the objects that it is made of one by one, its
    envelope by protobuf.
    """
    contents = {id: found.deflate() for id, found in get_all_nested_objects(message).items()}
    arrived = inflate_object_from_contents(message.object_id, contents)
    envelope = message_from_proto(message_to_proto(message))
    assert isinstance(arrived, Message)
    assert message_to_proto(arrived).content == message_to_proto(message).content
    arrived.metadata.__dict__.update(envelope.metadata.__dict__)
    return arrived


def on_device(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """What a real device's node does, by its configuration."""
    return apps.device(node).answer(text, body)


@dataclass
class Node:
    """One node.

    Args:
        config: Its own configuration.
        handle: What it does.
        spoil: What becomes of its replies.
        alive: Whether it can be reached.
    """

    config: dict[str, Any]
    handle: Handle
    spoil: Spoil | None = None
    alive: bool = True
    requests: list[Request] = field(default_factory=list)


class Nodes(Grid):
    """A grid of nodes that answer at once."""

    def __init__(self) -> None:
        self.nodes: dict[int, Node] = {}
        self.waiting: dict[str, Message] = {}  # replies by the id of what they answer
        self.before: Callable[[Nodes, Request, int], None] = lambda grid, request, node: None
        self.sent = 0
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = (
            1  # of whoever makes a message
        )

    def add(
        self, config: Mapping[str, Any], handle: Handle = on_device, spoil: Spoil | None = None
    ) -> int:
        """A new node; its id."""
        id = 1000 + 7 * len(self.nodes)
        self.nodes[id] = Node(dict(config), handle, spoil)
        return id

    def restart(self, id: int) -> int:
        """A node goes away, and comes back as another one."""
        self.nodes[id].alive = False
        return self.add(self.nodes[id].config, self.nodes[id].handle, self.nodes[id].spoil)

    def of(self, client: str) -> Node:
        """The living node of a client, by its configuration."""
        return next(n for n in self.nodes.values() if n.alive and n.config.get("client") == client)

    @property
    def run(self) -> Any:
        raise AssertionError("nobody asks")

    def set_run(self, run: Any) -> None:
        raise AssertionError("nobody asks")

    def create_message(self, *arguments: Any, **named: Any) -> Message:
        raise AssertionError("deprecated")

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        raise AssertionError("cannot be watched while it waits")

    def get_node_ids(self) -> Iterable[int]:
        return [id for id, node in self.nodes.items() if node.alive]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        found = []
        for message in messages:
            assert message.metadata.ttl > 0
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            node = self.nodes.get(message.metadata.dst_node_id)
            if node is None:
                continue  # as the SuperLink: no id
            found.append(message.metadata.message_id)
            request = Request.model_validate_json(str(message.content["text"]["text"]))
            node.requests.append(request)
            self.before(self, request, message.metadata.dst_node_id)
            self._answer(message, node)
        return found

    def _answer(self, message: Message, node: Node) -> None:
        arrived = delivered(message)
        if not node.alive:  # the SuperLink finds that out after a while
            self._return(Message(Error(5, "Node unavailable"), reply_to=arrived), message)
            return
        context = Context(1, message.metadata.dst_node_id, dict(node.config), RecordDict(), {})
        reply: Message | None = client_app(node.handle)(arrived, context)
        assert reply is not None
        if node.spoil is not None:
            reply = node.spoil(arrived, reply)
        if reply is not None:
            self._return(reply, message)

    def _return(self, reply: Message, message: Message) -> None:
        reply.metadata.__dict__["_message_id"] = f"reply-{self.sent}"
        self.waiting[message.metadata.message_id] = delivered(reply)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        return [
            self.waiting.pop(id) for id in list(message_ids)[::-1] if id in self.waiting
        ]  # not in the order asked


def content(text: str, body: bytes) -> RecordDict:
    """The content of a message of coterie's."""
    array = flower_app.Array(dtype="uint8", shape=(len(body),), stype="safetensors", data=body)
    return RecordDict(
        {
            "text": flower_app.ConfigRecord({"text": text}),
            "tensors": flower_app.ArrayRecord({"tensors": array}),
        }
    )


def parts(message: Message) -> tuple[Reply, bytes]:
    """What a message of coterie's says."""
    return Reply.model_validate_json(str(message.content["text"]["text"])), message.content[
        "tensors"
    ]["tensors"].data


def altered(change: Callable[[Reply, bytes], tuple[Reply | str, bytes]], task: str = "") -> Spoil:
    """Replies to a task (or to all) come as something else."""

    def spoil(request: Message, reply: Message) -> Message:
        said, body = parts(reply)
        if said.member is not None or (task and said.task != task):
            return reply
        text, body = change(said, body)
        return Message(
            content(text if isinstance(text, str) else text.model_dump_json(), body),
            reply_to=request,
        )

    return spoil


def silent(task: str = "") -> Spoil:
    """Replies to a task (or to all but hellos) never arrive."""

    def spoil(request: Message, reply: Message) -> Message | None:
        said, _ = parts(reply)
        return reply if said.member is not None or (task and said.task != task) else None

    return spoil


@dataclass
class Notes(Listener, Callback):
    """Writes down what it is told."""

    losses: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)

    def lost(self, client: str, task: str, reason: str) -> None:
        self.losses.append((client, task, reason))

    def noted(self, client: str, note: str) -> None:
        self.notes.append((client, note))


def devices(
    grid: Nodes, recipe: Recipe, clients: int, listener: Listener | None = None
) -> OnDevices:
    """The place of devices on a grid."""
    return OnDevices.found(grid, recipe, clients, 5.0, listener or Notes())


def simulated_nodes(count: int) -> Nodes:
    """A grid as Flower's simulation has it."""
    grid = Nodes()
    for k in range(count):
        grid.add({"partition-id": k, "num-partitions": count}, simulated_device)
    return grid


def execution(place: Place, recipe: Recipe, folder: Path) -> Execution:
    """A run on devices, about to start."""
    folder.mkdir(parents=True, exist_ok=True)
    started = Execution(place.prepare(recipe), folder, Callback(), "", place)
    Kept(folder).begin(Inputs.of(started.prepared))
    return started


def finished(recipe: Recipe, folder: Path, place: Place) -> Json:
    """The result of a run, from where it stands to its end."""
    return execute_all([(recipe, folder)], Callback(), place=place)[-1]
