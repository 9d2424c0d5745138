"""Flower's nodes without Flower's machinery: real messages, through Flower's own encoding, to
real ClientApps in this process.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import flwr.app as flower_app
from figures import as_json
from flwr.app import Error, Message, RecordDict
from flwr.common.serde import message_to_proto

from coterie.core.callback import Callback
from coterie.core.result import Json
from coterie.deploy import apps
from coterie.engines.engine import Listener
from coterie.engines.flower.apps import Handle, LocalGrid, LocalNode, delivered
from coterie.engines.messages import Reply, Request
from coterie.runs.backends import Backend, DeviceBackend, simulated_device
from coterie.runs.execution import Execution
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import execute_all

Spoil = Callable[
    [Message, Message], Message | None
]  # (request, reply) -> what arrives; None: nothing ever does


def on_device(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """What a real device's node does, by its configuration."""
    return apps.device(node).answer(text, body)


@dataclass
class Node(LocalNode):
    """One node that may fail.

    Args:
        spoil: What becomes of its replies.
        alive: Whether it can be reached.
    """

    spoil: Spoil | None = None
    alive: bool = True
    requests: list[Request] = field(default_factory=list)

    def reply(self, arrived: Message) -> Message | None:
        if not self.alive:  # the SuperLink finds that out after a while
            return Message(Error(5, "Node unavailable"), reply_to=arrived)
        found = super().reply(arrived)
        assert found is not None
        return found if self.spoil is None else self.spoil(arrived, found)


class Nodes(LocalGrid):
    """A grid of nodes that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.before: Callable[[Nodes, Request, int], None] = lambda grid, request, node: None

    def add(
        self, config: Mapping[str, Any], handle: Handle = on_device, spoil: Spoil | None = None
    ) -> int:
        """A new node; its id."""
        return self.put(Node(dict(config), handle, spoil))

    def restart(self, id: int) -> int:
        """A node goes away, and comes back as another one."""
        self.nodes[id].alive = False
        return self.add(self.nodes[id].config, self.nodes[id].handle, self.nodes[id].spoil)

    def of(self, client: str) -> Node:
        """The living node of a client, by its configuration."""
        return next(n for n in self.nodes.values() if n.alive and n.config.get("client") == client)

    def get_node_ids(self) -> Iterable[int]:
        return [id for id, node in self.nodes.items() if node.alive]

    def on_message(self, message: Message, node: Node) -> None:
        assert message.metadata.ttl > 0
        arrived = delivered(message)
        assert message_to_proto(arrived).content == message_to_proto(message).content
        request = Request.model_validate_json(str(message.content["text"]["text"]))
        node.requests.append(request)
        self.before(self, request, message.metadata.dst_node_id)


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
) -> DeviceBackend:
    """The place of devices on a grid."""
    return DeviceBackend.connect(grid, recipe, clients, 5.0, listener or Notes())


def simulated_nodes(count: int) -> Nodes:
    """A grid as Flower's simulation has it."""
    grid = Nodes()
    for k in range(count):
        grid.add({"partition-id": k, "num-partitions": count}, simulated_device)
    return grid


def execution(backend: Backend, recipe: Recipe, folder: Path) -> Execution:
    """A run on devices, about to start."""
    folder.mkdir(parents=True, exist_ok=True)
    started = Execution(backend.prepare(recipe), folder, Callback(), "", backend)
    RecordedInputs(folder).begin(Inputs.of(started.state.prepared))
    return started


def finished(recipe: Recipe, folder: Path, backend: Backend) -> Json:
    """The result of a run, from where it stands to its end."""
    return as_json(execute_all([(recipe, folder)], Callback(), backend=backend))[-1]
