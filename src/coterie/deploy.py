"""Flower's own programs, started and watched over: a server, a device, the submission of a run, and all of them on one machine to try it.

Everything is encrypted, and devices are known by their keys, unless somebody asks for `insecure`. Flower's names are in `engines.flower`;
here are only the command lines of its programs.
"""

import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.errors import ClientError, Refused

if TYPE_CHECKING:
    from coterie.recipe import Recipe

NAME = "coterie"  # of the connection in the configuration of Flower's command line
APP = """[project]
name = "coterie"
version = "0.1.0"

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.apps:server"
clientapp = "coterie.apps:client"

[tool.flwr.app.config]
recipe = "quickstart"
set = ""
seed = -1
out = ""
resume = false
clients = 2
patience = 600.0
"""
_QUIET = {  # nothing is sent to anybody, nothing is installed, and new messages are looked for ten times a second
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
_UP_S = 60.0  # seconds for a program to come up
_AGAIN_S = 5.0  # seconds before a program that ended is started again
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Link:
    """How a server is reached.

    Args:
        address: `host:port`.
        ca: The certificate of its authority; None: without encryption.
    """

    address: str
    ca: Path | None

    @property
    def flags(self) -> list[str]:
        return ["--superlink", self.address, *(("--root-certificates", str(self.ca)) if self.ca else ("--insecure",))]

    def check(self) -> None:
        """Refuse an address or a certificate that cannot be. Raises Refused."""
        host, sign, port = self.address.rpartition(":")
        if not sign or not host or not port.isdigit():
            raise Refused(f"{self.address!r} is not the address of a server", "It is HOST:PORT, for instance example.org:9500.")
        if self.ca is not None:
            _there(self.ca, "the certificate of the server's authority", "Copy ca.crt from the server's keys, or ask for --insecure.")


def _there(path: Path, what: str, remedy: str) -> None:
    if not path.is_file():
        raise Refused(f"{path}: {what} is not there", remedy)


def environment(home: Path) -> dict[str, str]:
    """The environment of Flower's programs, whose own files are below `home`, and which find each other."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    own = {"FLWR_HOME": str((home / "flwr").resolve()), "PATH": path}
    return os.environ | own | {k: os.environ.get(k, v) for k, v in _QUIET.items()}


def program(name: str) -> str:
    """The path of one of Flower's programs. Raises Refused where Flower is not installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.is_file() else shutil.which(name)
    if found is None:
        raise Refused(f"{name} is not installed", "Install the extra: pip install 'coterie[flower]'.")
    return found


def start(arguments: Sequence[str], home: Path, log: Path) -> "subprocess.Popen[bytes]":
    """Start a program in a group of its own that ends when we do, its output going to a file."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with open(log, "ab") as out:
        return subprocess.Popen(
            arguments,
            env=environment(home),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=_with_us,  # noqa: PLW1509 - it makes one system call, and no other thread of ours holds a lock
        )


def _with_us() -> None:
    """In a new process: end when the one that started it ends, however that comes about (Linux; elsewhere only when it is stopped)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop(process: "subprocess.Popen[bytes]", patience: float = 10.0) -> None:
    """End a program and all that it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@contextmanager
def running(arguments: Sequence[str], home: Path, log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A program for as long as the block lasts."""
    process = start(arguments, home, log)
    try:
        yield process
    finally:
        stop(process)


def listening(address: str) -> bool:
    """Whether somebody listens at host:port."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2):
            return True
    except OSError:
        return False


def free_port() -> int:
    """A port of this machine that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(keys: Path | None, home: Path, host: str, port: int) -> Iterator[Link]:
    """A SuperLink, with the devices registered whose keys are known.

    Args:
        keys: The folder that `keys.make` made; None: neither encryption nor keys.
        home: For its database, logs and runs.
        host: That it listens at; 0.0.0.0 for all of this machine's addresses.
        port: Likewise.

    Yields:
        How this machine reaches it.

    Raises:
        Refused: Keys are missing, or the port is taken.
        ClientError: It did not come up.
    """
    from coterie.keys import CA, CERTIFICATE, CLIENTS, KEY

    here = Link(f"{'127.0.0.1' if host == '0.0.0.0' else host}:{port}", None if keys is None else keys / CA)
    if listening(here.address):
        raise Refused(f"port {port} is taken", "Choose another --port.")
    arguments = [program("flower-superlink"), "--host", host, "--port", str(port), "--database", str(home / "flwr.db")]
    if keys is None:
        arguments.append("--insecure")
    else:
        for name in (CA, CERTIFICATE, KEY):
            _there(keys / name, "a key of the server", "Make the keys first: coterie keys DIR --host HOST --client ID ...")
        files = ("--ssl-ca-certfile", CA), ("--ssl-certfile", CERTIFICATE), ("--ssl-keyfile", KEY)
        arguments += [part for flag, name in files for part in (flag, str(keys / name))] + ["--enable-supernode-auth"]
    home.mkdir(parents=True, exist_ok=True)
    log = home / "superlink.log"
    with running(arguments, home, log) as process:
        _wait_for(lambda: listening(here.address), process, log)
        for key in sorted((keys / CLIENTS).glob("*.pub")) if keys is not None else ():
            register(key, here, home)
        yield here


def _wait_for(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", log: Path) -> None:
    """Wait until a program is ready. Raises ClientError with the end of its log if it ends before, or takes too long."""
    end = time.monotonic() + _UP_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
            raise ClientError(f"{log.stem} did not come up; its log ends:\n{tail}", f"The whole log is {log}.")
        time.sleep(0.2)


def configure(link: Link, home: Path) -> None:
    """Tell Flower's command line how the server is reached."""
    section = {"address": link.address} | ({"insecure": True} if link.ca is None else {"root-certificates": str(link.ca.resolve())})
    lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", *(f"{k} = {json.dumps(v)}" for k, v in section.items())]
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    (home / "flwr" / "config.toml").write_text("\n".join(lines) + "\n")


def flwr(arguments: Sequence[str], home: Path) -> str:
    """What a command of Flower's command line prints. Raises ClientError with its output if it fails."""
    done = subprocess.run([program("flwr"), *arguments], env=environment(home), capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClientError(f"flwr {' '.join(arguments[:2])} failed:\n{(done.stdout + done.stderr).strip()[-3000:]}", "")
    return done.stdout


def register(key: Path, link: Link, home: Path) -> None:
    """Make a device's public key known to the server. One that is known already stays so."""
    configure(link, home)
    try:
        flwr(["supernode", "register", str(key), NAME], home)
    except ClientError as error:
        if "already" not in error.problem:
            raise


@dataclass(frozen=True)
class Node:
    """A client's device.

    Args:
        link: To the server.
        home: Where it keeps everything.
        client: Who it is; None: the only client of its data.
        data: Where its data are.
        base: Where the base model is.
        key: Its private key; None: without.
        resident: Whether a process keeps the base loaded between messages.
    """

    link: Link
    home: Path
    client: str | None = None
    data: Path | None = None
    base: str | None = None
    key: Path | None = None
    resident: bool = True

    def check(self) -> None:
        """Refuse what cannot work. Raises Refused."""
        self.link.check()
        if self.key is not None:
            _there(self.key, "the device's private key", "Copy it from the server's keys (clients/ID).")
        elif self.link.ca is not None:
            raise Refused("a device needs its private key", "Give --key, or ask for --insecure.")
        if self.data is not None and not self.data.exists():
            raise Refused(f"--data: {self.data} does not exist", "Name the folder with this client's data.")

    @property
    def configuration(self) -> dict[str, Any]:
        """What the programs that Flower starts are told of the node."""
        found = {"home": str(self.home.resolve()), "client": self.client, "data": self.data and str(self.data.resolve()), "base": self.base}
        return {k: v for k, v in found.items() if v is not None} | ({"resident": True} if self.resident else {})

    def supernode(self) -> list[str]:
        """The command line of its SuperNode."""
        config = " ".join(f"{key}={json.dumps(value)}" for key, value in self.configuration.items())
        port = free_port()
        keys = ["--auth-supernode-private-key", str(self.key)] if self.key is not None else []
        return [program("flower-supernode"), *self.link.flags, *keys, "--host", "127.0.0.1", "--port", str(port), "--node-config", config]


@contextmanager
def device(node: Node) -> Iterator["Supervisor"]:
    """A SuperNode and, if wanted, its resident process, started again whenever they end."""
    node.check()
    node.home.mkdir(parents=True, exist_ok=True, mode=0o700)
    supervisor = Supervisor(node, {})
    try:
        supervisor.look()
        yield supervisor
    finally:
        for process in supervisor.processes.values():
            stop(process)


@dataclass
class Supervisor:
    """Starts the programs of a device, and again whenever one has ended."""

    node: Node
    processes: dict[str, "subprocess.Popen[bytes]"]

    def look(self) -> list[str]:
        """Start what does not run; returns what that was."""
        ended = [name for name in self._names if name not in self.processes or self.processes[name].poll() is not None]
        for name in ended:
            own = [sys.executable, "-m", "coterie", "resident", json.dumps(self.node.configuration)]
            self.processes[name] = start(
                own if name == "resident" else self.node.supernode(), self.node.home, self.node.home / f"{name}.log"
            )
        return ended

    @property
    def _names(self) -> list[str]:
        return ["resident", "supernode"] if self.node.resident else ["supernode"]

    def watch(self) -> Iterator[list[str]]:
        """Look again and again; yields what had to be started."""
        while True:
            time.sleep(_AGAIN_S)
            if started := self.look():
                yield started


def submit(link: Link, home: Path, config: Mapping[str, Any], follow: bool = True) -> str:
    """Have a server run a recipe on its devices.

    Args:
        link: To the server.
        home: For Flower's files.
        config: Keys of `[tool.flwr.app.config]`.
        follow: Show what the run prints, until it ends.

    Returns:
        The run's id.

    Raises:
        Refused: The server is not there.
        ClientError: Flower refused the run, or it failed.
    """
    link.check()
    if not listening(link.address):
        raise Refused(f"nobody answers at {link.address}", "Start the server: coterie server ...; is the port open?")
    configure(link, home)
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder)
        (app / "pyproject.toml").write_text(APP)
        (app / "run.toml").write_text("\n".join(f"{key} = {json.dumps(value)}" for key, value in config.items()))
        told = json.loads(flwr(["run", str(app), NAME, "--run-config", str(app / "run.toml"), "--format", "json"], home))
    run = str(told["run-id"])
    if follow:
        subprocess.run([program("flwr"), "log", run, NAME, "--stream"], env=environment(home), check=False)
        finish(run, home)
    return run


def status(run: str, home: Path) -> str:
    """Where a run stands: `running`, `finished:completed`, `finished:failed`, ..."""
    found = json.loads(flwr(["list", NAME, "--run-id", run, "--format", "json"], home))
    return str(found["runs"][0]["status"])


def finish(run: str, home: Path) -> None:
    """Wait until a run has ended. Raises ClientError if it failed."""
    while not (found := status(run, home)).startswith("finished"):
        time.sleep(1.0)
    if found != "finished:completed":
        remedy = f"What it said: FLWR_HOME={home / 'flwr'} flwr log {run} {NAME} --show"
        raise ClientError(f"the run ended as {found.removeprefix('finished:')}", remedy)


def demo(recipe: "Recipe", clients: Sequence[str], out: Path, say: Callable[[str], None]) -> None:
    """A server and real devices on this machine, encrypted and with keys; a recipe runs on them, and nothing is left running.

    Args:
        recipe: Resolved.
        clients: Of its data, all of which are on this machine.
        out: The run's folder; what devices keep goes to `devices/<id>` in it.
        say: Is told in a line what happens.

    Raises:
        Refused: As `server` and `submit`.
        ClientError: Likewise.
    """
    from coterie import keys

    folder = out.resolve()
    place = getattr(recipe.data, "path", None) or getattr(recipe.data, "root", None)
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        keys.make(own, [], clients)
        link = stack.enter_context(server(own, folder / "server", "127.0.0.1", free_port()))
        say(f"A SuperLink listens at {link.address}, with TLS. It knows {len(clients)} devices by their keys.")
        for client in clients:
            key = own / keys.CLIENTS / client
            stack.enter_context(device(Node(link, folder / "devices" / client, client, place, key=key)))
        say(f"{len(clients)} SuperNodes are coming up, each with a process that keeps the base model loaded.")
        config = {"recipe": recipe.model_dump_json(), "out": str(folder), "clients": len(clients)}
        submit(link, folder / "server", config)
    say("Everything is stopped.")
