"""A server: Flower's SuperLink, supervised, and the proxy through which devices connect; and a
server, devices and a run all on one machine.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core import names
from coterie.core.errors import ClientError, Refused
from coterie.core.foreign import json_of, read_bytes
from coterie.core.printing import printable
from coterie.deploy import keys as key_files
from coterie.deploy import process as programs
from coterie.deploy.connection import Limits
from coterie.deploy.keys import LAST_PORT, Link, free_port, listening, there
from coterie.deploy.proxy import Proxy, open_proxy
from coterie.deploy.resident import private
from coterie.deploy.supernode import Node, device

LOG, DATABASE, NODES = "superlink.log", "flwr.db", "nodes.json"
_LOOK_S = 2.0  # seconds between looks at what runs
LARGEST = 256 << 20  # bytes that a device may send at once
_AGAIN_MOST_S = 60.0  # most seconds before a SuperLink that keeps ending is restarted


@dataclass
class Server:
    """A running server."""

    devices: Link  # how devices on this machine reach it; others by its name, at the same port
    runs: Link  # for submitting runs, from this machine only
    keys: Path | None  # the folder of keys
    home: Path  # the folder of its database, logs and runs
    process: programs.Program  # the SuperLink
    nodes: dict[str, tuple[str, str]]  # client and number of the node, by public key
    command: Sequence[str] = ()  # starts the SuperLink
    proxy: Proxy | None = None
    starts: int = 1  # of the SuperLink
    _refused: dict[str, float] = field(default_factory=dict)  # keys, and until when they are
    _starting: bool = False
    _ends: int = 0  # of the SuperLink, one soon after the other
    _started: float = field(default_factory=time.monotonic)

    def look(self) -> Iterator[str]:
        """Register devices with new keys, remove those whose keys were deleted; yield messages."""
        if self.keys is None:
            return
        try:
            files, problems = key_files.public_keys(self.keys)
        except Refused as error:
            yield f"{error.problem}. {error.remedy}"
            return
        yield from (f"{path} was refused. {problem}" for path, problem in problems.items())
        for key, path in files.items():
            if key not in self.nodes and time.monotonic() >= self._refused.get(key, 0.0):
                yield self._register(key, path)
        unclear = {key_files.owner(path) for path in problems}  # whose file is there all the same
        clients = {key: client for key, (client, _) in self.nodes.items() if key not in files}
        removed = [key for key, client in clients.items() if client not in unclear]
        self._open(removed)
        for key in removed:
            yield self._unregister(key)

    def _register(self, key: str, path: Path) -> str:
        client = key_files.owner(path)
        try:
            self.nodes[key] = (client, programs.register(path, self.home))
        except ClientError as error:
            self._refused[key] = time.monotonic() + programs.TELL_AGAIN_S
            return f"{path} was refused. {error.problem}"
        self._write()
        return f"The device of {client} is registered."

    def _unregister(self, key: str) -> str:
        client, node = self.nodes[key]
        try:
            programs.flwr(["supernode", "unregister", node, programs.NAME], self.home)
        except ClientError as error:
            return f"The device of {client} could not be removed. {error.problem}"
        del self.nodes[key]
        self._write()
        return f"The device of {client} is removed: its public key no longer exists."

    def _open(self, removed: Sequence[str] = ()) -> None:
        """Give the proxy the keys of the known devices, without those in `removed`."""
        if self.proxy is None or self.keys is None:
            return
        known = [key_files.public_key(key) for key in self.nodes if key not in removed]
        self.proxy.keys = {key_files.shown(key): key for key in known}

    def _write(self) -> None:
        new = self.home / f"{NODES}.new"
        new.write_text(json.dumps(self.nodes))
        new.replace(self.home / NODES)

    def stop(self) -> None:
        """End the SuperLink, and the programs that it has started."""
        self.process.stop()

    def watch(self) -> Iterator[str]:
        """Look again and again, and restart the SuperLink whenever it ends; yield messages."""
        return programs.watched(self.check, _LOOK_S, "The server keeps running")

    def check(self) -> Iterator[str]:
        """Check everything once, and yield messages."""
        while self.proxy is not None and self.proxy.problems:
            yield self.proxy.problems.popleft()
        if self.process.ended():
            yield from self._start_again()
        elif not self._starting or listening(self.runs.address):
            self._starting = False
            yield from self.look()

    def _start_again(self) -> Iterator[str]:
        """Restart the SuperLink if it is time to."""
        now = time.monotonic()
        if now - self._started > 2 * _AGAIN_MOST_S:
            self._ends = 0
        if now - self._started < min(programs.AGAIN_S * self._ends, _AGAIN_MOST_S):
            return
        self._started, self._ends, self._starting = now, self._ends + 1, True
        self.starts += 1
        self.process.stop()  # what it had started itself
        self.process = programs.Program(self.command, self.home, self.home / LOG)
        yield (
            f"The SuperLink ended and is started again; {self.home / LOG} says why. A run that "
            f"was in progress has ended: submit it again, with --resume and its --out."
        )


@contextmanager
def server(
    keys: Path | None, home: Path, host: str, port: int, runs_port: int, largest: int = LARGEST
) -> Iterator[Server]:
    """Run a SuperLink with files in `home`, with the devices registered whose keys are known by the
    folder that `keys.make` made; None: neither encryption nor keys. It listens to this machine, for
    runs at `runs_port`; devices connect by `open_proxy` to `host` (0.0.0.0 for all addresses) and
    `port`, and may send `largest` bytes at once: Flower cuts tensors into parts of 5 MiB, but for
    those of secure aggregation. Raises Refused if keys are missing, a port is taken, or `home`
    cannot be used, ClientError if it did not start.
    """
    tls = [keys and keys / name for name in (key_files.CERTIFICATE, key_files.KEY, key_files.CA)]
    remedy = "Make the keys first: coterie keys DIR --host HOST --client ID ..."
    for path in filter(None, tls):
        there(path, "a key of the server", remedy)
    certificate, key, ca = tls
    reached = "127.0.0.1" if host == "0.0.0.0" else host
    devices, runs = Link(f"{reached}:{port}", ca), Link(f"127.0.0.1:{runs_port}", ca)
    if port == runs_port or runs_port > LAST_PORT:
        problem = f"port {runs_port} cannot be used for runs"
        raise Refused(problem, "Give different values to --port and --runs-port.")
    private(home)
    programs.check_unused(home)
    for link, number, option in ((devices, port, "--port"), (runs, runs_port, "--runs-port")):
        if listening(link.address):
            problem = f"port {number} is in use"
            raise Refused(problem, f"Choose another {option}.{programs.holder(number)}")
    command, log = _superlink(tls, home, runs_port), home / LOG
    superlink = Server(devices, runs, keys, home, programs.Program(command, home, log), {}, command)
    with ExitStack() as stack:
        stack.callback(superlink.stop)
        superlink.nodes = {} if keys is None else _nodes(home)
        programs.wait_for(lambda: listening(runs.address), superlink.process, log)
        programs.configure(runs, home)
        try:
            behind, limits = ("127.0.0.1", runs_port), Limits(body=largest)
            ours, posted = (host, port), programs.posted(home)
            proxy = open_proxy(ours, behind, certificate, key, ca, limits, posted)
            superlink.proxy = stack.enter_context(proxy)
        except OSError as error:
            problem = f"cannot listen on {host}:{port}: {error.strerror}"
            raise Refused(problem, "Choose another --host or --port.") from None
        superlink._open()
        yield superlink


def _metrics(server: Server) -> str:
    """Return a server's figures in the text format of Prometheus."""
    figures = {
        "coterie_superlink_up": ("gauge", int(listening(server.runs.address))),
        "coterie_superlink_starts_total": ("counter", server.starts),
        "coterie_registered_devices": ("gauge", len(server.nodes)),
    }
    return "".join(f"# TYPE {name} {kind}\n{name} {n}\n" for name, (kind, n) in figures.items())


@contextmanager
def health(server: Server, port: int) -> Iterator[int]:
    """Answer GET /health (503 while the SuperLink does not listen) and GET /metrics on a port of
    this machine while the block runs; yield the port. They name no client. Raises Refused if the
    port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            status, kind = HTTPStatus.OK, "text/plain; version=0.0.4; charset=utf-8"
            if self.path == "/metrics":
                text = _metrics(server)
            elif self.path == "/health":
                up, kind = listening(server.runs.address), "application/json"
                status = HTTPStatus.OK if up else HTTPStatus.SERVICE_UNAVAILABLE
                text = json.dumps({"status": "ok" if up else "the SuperLink is starting"})
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Log nothing: probes come every few seconds."""

    try:
        listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError:
        problem = f"port {port} is in use"
        raise Refused(problem, f"Choose another --health-port.{programs.holder(port)}") from None
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    try:
        yield int(listener.server_address[1])
    finally:
        listener.shutdown()
        listener.server_close()


def _nodes(home: Path) -> dict[str, tuple[str, str]]:
    """Return the devices that a server knew when it ended. Raises Refused for a damaged file."""
    path = home / NODES
    if not path.exists() or not (home / DATABASE).exists():
        return {}
    try:
        entries = json_of(read_bytes(path)).items()
        nodes = {str(key): (str(client), str(node)) for key, (client, node) in entries}
        for key in nodes:
            key_files.public_key(key)
    except (OSError, ValueError, AttributeError, TypeError, Refused) as error:
        raise Refused(
            f"{path} is damaged: {error}",
            f"Delete it and {home / DATABASE}: devices whose keys are there become known again.",
        ) from None
    return nodes


def _superlink(tls: Sequence[Path | None], home: Path, port: int) -> list[str]:
    options: dict[str, Any] = {"--host": "127.0.0.1", "--port": port, "--database": home / DATABASE}
    if None not in tls:
        options |= zip(("--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certfile"), tls, strict=True)
    switch = "--insecure" if None in tls else "--enable-supernode-auth"
    return [*programs.local_program("flower-superlink"), *map(str, chain(*options.items())), switch]


if TYPE_CHECKING:
    from coterie.runs.recipes.recipe import Recipe


def demo(
    recipe: "Recipe",
    clients: Sequence[str],
    out: Path,
    say: Callable[[str], None],
    resident: bool = True,
) -> None:
    """Start a server and real devices on this machine, encrypted and with keys, run a resolved
    recipe with its data on them, and stop everything. Each device has `devices/<id>` in the run's
    folder, and if `resident` a process that keeps the base model loaded. `say` is called with a
    line for each step. Raises Refused and ClientError as `server` and `submit`.
    """
    from coterie.deploy import keys

    folder = out.resolve()
    with ExitStack() as stack:
        key_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        keys.make(key_folder, [], clients)
        port, runs_port = free_port(), free_port()
        superlink = stack.enter_context(
            server(key_folder, folder / "server", "127.0.0.1", port, runs_port)
        )
        say("A SuperLink is up, with TLS.")
        for line in superlink.look():
            say(printable(line))
        for client in clients:
            home, key = folder / "devices" / names.encoded(client), keys.private(key_folder, client)
            data = _data(recipe, client, home)
            node = Node(superlink.devices, home, client, data, key=key, resident=resident)
            stack.enter_context(device(node))
        say(
            f"{len(clients)} SuperNodes are starting"
            f"{', each with a process that keeps the base model loaded' * resident}."
        )
        config = {"recipe": recipe.model_dump_json(), "out": str(folder), "clients": len(clients)}
        programs.submit(superlink.runs, folder / "server", config, say)
    say("Everything has stopped.")


def _data(recipe: "Recipe", client: str, home: Path) -> Path | None:
    """Return the path of a device's data; of folders of clients, with the client's alone."""
    path: Path | None = getattr(recipe.data, "path", None)
    if getattr(recipe.data, "kind", None) != "folders" or path is None:
        return path or getattr(recipe.data, "root", None)
    (home / "data").mkdir(parents=True, exist_ok=True)
    client_folder = next(folder for folder in path.iterdir() if names.normal(folder.name) == client)
    (home / "data" / client_folder.name).symlink_to(client_folder.resolve())
    return home / "data"
