"""Flower's two programs, a device's and a server's, and its messages with requests and replies; its
simulation in a thread, on its own Ray cluster or the one that RAY_ADDRESS names; and a grid whose
nodes are in this process, for tests. Nothing here needs torch: the program of a device hands
requests on.
"""

import logging
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.serverapp import Grid, ServerApp
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from coterie.core.errors import ClientError, TensorError, extra
from coterie.engines.messages import Reply, Request, failed, parsed

# (node's configuration, request, tensors) -> (reply, tensors)
Handle = Callable[[Mapping[str, Any], str, bytes], tuple[str, bytes]]
Main = Callable[[Grid, Mapping[str, Any]], None]  # (grid, run's configuration)
QUERY = "query.coterie"  # the one kind of message; the action is in the request

_TEXT, _TENSORS, _METRICS, _STYPE = "text", "tensors", "metrics", "safetensors"


def packed(text: str, body: bytes, metrics: Mapping[str, Any] = {}) -> RecordDict:
    """Return the content of a message; of `metrics`, numbers and lists of numbers."""
    array = Array(dtype="uint8", shape=(len(body),), stype=_STYPE, data=body)
    flat = {
        name: value
        for name, value in metrics.items()
        if not isinstance(value, list) or all(isinstance(entry, float) for entry in value)
    }
    content = RecordDict(
        {_TEXT: ConfigRecord({_TEXT: text}), _TENSORS: ArrayRecord({_TENSORS: array})}
    )
    if flat:
        content[_METRICS] = MetricRecord(flat)
    return content


def unpacked(content: RecordDict, most: int | None = None) -> tuple[str, bytes]:
    """Return text and tensors of `packed`. Metrics are for programs between, and never read.
    Raises TensorError for other records or too many bytes.
    """
    text, arrays = content.get(_TEXT), content.get(_TENSORS)
    if (
        set(content) - set(content.metric_records) != {_TEXT, _TENSORS}
        or not isinstance(text, ConfigRecord)
        or not isinstance(arrays, ArrayRecord)
        or (set(text), set(arrays)) != ({_TEXT}, {_TENSORS})
        or not isinstance(text[_TEXT], str)
        or arrays[_TENSORS].stype != _STYPE
    ):
        records = f"records {sorted(content)[:5]}"
        problem = f"a message with {records}, expected a text and an array of safetensors"
        raise TensorError(problem, "It did not come from coterie.")
    body = arrays[_TENSORS].data
    if most is not None and len(body) > most:
        problem = f"a message with {len(body):,} bytes of tensors, expected at most {most:,}"
        raise TensorError(problem)
    return str(text[_TEXT]), body


def client_app(handle: Handle, mods: Sequence[Mod] = ()) -> ClientApp:
    """Return the program of a device, around it Flower's `mods`, the first outermost. It always
    answers, since a SuperNode would wait forever.
    """
    app = ClientApp(mods=[*mods])

    @app.query("coterie")
    def answer(message: Message, context: Context) -> Message:
        try:
            text, body = unpacked(message.content)
            if parsed(Request, text).masked:
                problem = "asked without masks for a reply that must be masked"
                raise TensorError(problem, "Install the same version of coterie everywhere.")
            text, body = handle(dict(context.node_config), text, body)
        except Exception as error:
            text, body = failed(f"{type(error).__name__}: {error}").model_dump_json(), b""
        metrics = {}
        with suppress(TensorError):  # the server refuses it, and says why
            metrics = parsed(Reply, text).metrics
        return Message(packed(text, body, metrics), reply_to=message)

    @app.train()
    def answer_masked(message: Message, context: Context) -> Message:
        from coterie.engines.flower.secagg_device import masked

        return masked(handle, message, context)

    return app


def server_app(main: Main) -> ServerApp:
    """Return the program of a server."""
    app = ServerApp()

    @app.main()
    def run(grid: Grid, context: Context) -> None:
        main(grid, dict(context.run_config))

    return app


ANSWER_S = 10.0  # seconds for a Ray cluster to answer


# grid and end of a simulation by its arguments; at most one: Ray is started once in a process
_going_on: dict[tuple[int, int, Handle, int], tuple[Grid, Callable[[], None]]] = {}


def simulated(clients: int, threads: int, handle: Handle, accelerators: int = 0) -> Grid:
    """Return a simulation's grid of nodes, the i-th with `partition-id` i and the picklable
    `handle`: the last one if the arguments are the same. As many programs run at once as there are
    cores, and accelerators, for each. It ends with the process, or when another one starts. Raises
    ClientError.
    """
    about = (clients, threads, handle, accelerators)
    if about not in _going_on:
        for _, stop in _going_on.values():
            stop()
        _going_on.clear()
        _going_on[about] = _simulation(*about)
    return _going_on[about][0]


def _simulation(
    clients: int, threads: int, handle: Handle, accelerators: int
) -> tuple[Grid, Callable[[], None]]:
    """Start a simulation in a separate thread. Raises ClientError."""
    for name, value in {
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # as later releases do; otherwise Ray warns
    }.items():
        os.environ.setdefault(name, value)
    from flwr.simulation import run_simulation

    logging.getLogger("flwr").setLevel(logging.ERROR)
    grids: queue.Queue[Grid | BaseException] = queue.Queue()
    done = threading.Event()

    def main(grid: Grid, config: Mapping[str, Any]) -> None:
        grids.put(grid)
        done.wait()

    def simulate() -> None:
        resources: dict[str, Any] = {
            "client_resources": {"num_cpus": threads, "num_gpus": accelerators}
        }
        try:
            _connect(threads, accelerators)
            server = server_app(main)
            client = client_app(handle)
            run_simulation(server, client, num_supernodes=clients, backend_config=resources)
            grids.put(RuntimeError("it ended"))  # nobody looks, if it ended because we wanted it to
        except BaseException as error:
            grids.put(error)

    thread = threading.Thread(target=simulate, name="flower-simulation", daemon=True)
    thread.start()

    def stop() -> None:
        done.set()
        thread.join(timeout=30)

    # Flower's simulation works in a thread pool, which Python waits for before it calls what
    # `atexit` knows: it would wait for good.
    threading._register_atexit(stop)  # type: ignore[attr-defined]
    grid_or_error = grids.get()
    if isinstance(grid_or_error, ClientError):
        raise grid_or_error
    if isinstance(grid_or_error, BaseException):
        problem = f"Flower's simulation could not be started: {grid_or_error}"
        raise ClientError(problem, f"Is the extra complete? {extra('simulation')}")
    return grid_or_error, stop


def _connect(threads: int, accelerators: int) -> None:
    """Start Ray, or connect to RAY_ADDRESS, in a thread, as Ray would take the main one's SIGTERM.
    Raises ClientError: no cluster or suitable machine, for which Flower would wait endlessly.
    """
    import ray

    address = os.environ.get("RAY_ADDRESS", "")
    host, _, port = address.rpartition("/")[2].rpartition(":")
    if port.isdigit():  # neither "auto" nor "local"
        try:
            socket.create_connection((host, int(port)), ANSWER_S).close()
        except (OSError, OverflowError) as error:
            raise ClientError(
                f"RAY_ADDRESS is {address}, where no Ray cluster answers: {error}",
                "Start it there (ray start --head), or unset RAY_ADDRESS for this machine alone.",
            ) from None
    if not ray.is_initialized():
        known = os.pathsep.join(filter(None, [*sys.path, os.environ.get("PYTHONPATH")]))
        runtime_env = {"env_vars": {"PYTHONPATH": known}}
        ray.init(include_dashboard=False, logging_level=logging.ERROR, runtime_env=runtime_env)
    machines = [node["Resources"] for node in ray.nodes()]  # type: ignore[no-untyped-call]
    if not any(
        has.get("CPU", 0) >= threads and has.get("GPU", 0) >= accelerators for has in machines
    ):
        need = f"{threads} cores" + (f" and {accelerators} GPU" if accelerators else "")
        raise ClientError(
            f"no machine of Ray's has {need}, which a client needs",
            "Start Ray with more (ray start --num-cpus N --num-gpus N), or give the recipe fewer "
            "threads.",
        )


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

    def _refused(self, *_: Any, **__: Any) -> Any:
        """Refuse what the engine never asks: it watches while it waits."""
        raise NotImplementedError

    run = property(_refused)
    set_run = create_message = send_and_receive = _refused

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
