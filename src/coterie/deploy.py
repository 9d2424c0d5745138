"""Flower's own programs, started and watched over: a server, a device, the submission of a run, and all of them on one machine to try it.

Everything is encrypted, and devices are known by their keys, unless somebody asks for `insecure`. Flower's names are in `engines.flower`;
here are only the command lines of its programs.
"""

import ctypes
import http.client
import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from coterie import limits, names
from coterie.engines.resident import private
from coterie.errors import ClientError, CoterieError, Refused, extra
from coterie.printing import printable

if TYPE_CHECKING:
    from coterie.front import Front
    from coterie.recipe import Recipe

NAME = "coterie"  # of the connection in the configuration of Flower's command line
LOG, DATABASE, NODES = "superlink.log", "flwr.db", "nodes.json"
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
changed = false
clients = 2
patience = 600.0
"""
_QUIET = {  # nothing is sent to anybody, nothing is installed, and new messages are looked for ten times a second
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
_ANSWER_S = 10.0  # seconds for a server to show that it is there
_UP_S = 60.0  # seconds for a program to come up
_LOOK_S = 2.0  # seconds between looks at what runs
_AGAIN_S = 5.0  # seconds before a program that ended is started again
LARGEST = 256 << 20  # bytes that a device may send at once
_AGAIN_MOST_S = 60.0  # seconds before one that ends again and again is
_COMMAND_S = 120.0  # seconds for a command of Flower's
_TAIL = 1 << 16  # bytes of a log that are looked at
_LAST_PORT = (1 << 16) - 1
_TELL_AGAIN_S = 600.0  # seconds until the same thing is told again
_MARK = "COTERIE_PROGRAM"
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"ERROR +:")
_CHATTER = re.compile(r"INFO +:|Using SuperLink|Successfully installed|$")  # of Flower's, between the lines of a run


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

    def answers(self, api: str) -> bool:
        """Whether a server is there.

        Args:
            api: What is wanted of it: `fleet`, by devices, or `control`, by whoever submits runs.

        Raises:
            Refused: It is another one than this link describes, or takes no runs here.
        """
        connection, host = self._connection(), self.address.rpartition(":")[0]
        try:
            connection.request("POST", f"/v1/{api}/hello", b"")
            status = connection.getresponse().status
        except ssl.SSLCertVerificationError as error:
            remedy = f"Is it the ca.crt of this server's keys, and were they made with --host {host}?"
            raise Refused(f"{self.address} has no certificate that {self.ca} vouches for: {error.verify_message}", remedy) from None
        except ssl.SSLError:
            raise Refused(
                f"{self.address} speaks no TLS", "Is it the right port? A server that runs with --insecure wants that here."
            ) from None
        except (http.client.HTTPException, ConnectionResetError):
            if self.ca is None:
                raise Refused(f"{self.address} wants TLS, or is no server", "Give --ca (and, for a device, --key).") from None
            return False
        except OSError:
            return False
        finally:
            connection.close()
        if status == http.HTTPStatus.FORBIDDEN:
            raise Refused(
                f"{self.address} is for devices", "Runs go to the server's --runs-port, from its own machine or through a tunnel."
            )
        return status != http.HTTPStatus.SERVICE_UNAVAILABLE

    def _connection(self) -> http.client.HTTPConnection:
        host, _, port = self.address.rpartition(":")
        if self.ca is None:
            return http.client.HTTPConnection(host, int(port), timeout=_ANSWER_S)
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except ssl.SSLError:
            raise Refused(f"{self.ca} is no certificate", "Copy ca.crt from the server's keys.") from None
        return http.client.HTTPSConnection(host, int(port), timeout=_ANSWER_S, context=context)


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
        raise Refused(f"{name} is not installed", extra("flower"))
    return found


class Program(subprocess.Popen[bytes]):
    """A program in a group of its own that ends when we do, its output going to a file.

    Flower's programs start others, in groups of their own. All of them have the program's mark in their environment.
    """

    def __init__(self, arguments: Sequence[str], home: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._mark = uuid4().hex
        with open(log, "ab") as out:
            super().__init__(
                arguments,
                env=environment(home) | {_MARK: self._mark},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                preexec_fn=_with_us,  # it makes one system call, and takes no lock that another thread may hold
            )

    def stop(self, patience: float = 10.0) -> None:
        """End it and all that it has started: as they please, and after so many seconds at once."""
        try:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGTERM)
            end = time.monotonic() + patience
            while (self.poll() is None or self._family()) and time.monotonic() < end:
                time.sleep(0.1)
        finally:  # somebody may have lost patience
            self._end()

    def _end(self) -> None:
        """End it and all that it has started at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        while family := self._family():
            for process in family:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            time.sleep(0.02)
        self.wait()

    def _family(self) -> list[int]:
        """The processes with its mark. Where the system does not tell (not on Linux) they end by themselves when their parent is gone."""
        mark, found = f"{_MARK}={self._mark}".encode(), []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes():
                    found.append(int(path.parent.name))
        return found


def _with_us() -> None:
    """In a new process: end when the one that started it ends, however that comes about (Linux; elsewhere only when it is stopped)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


@contextmanager
def running(arguments: Sequence[str], home: Path, log: Path) -> Iterator[Program]:
    """A program for as long as the block lasts."""
    process = Program(arguments, home, log)
    try:
        yield process
    finally:
        process.stop()


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


class _Told:
    """What was said lately: each thing is said once in ten minutes, for some happen every few seconds."""

    def __init__(self) -> None:
        self._when: dict[str, float] = {}

    def new(self, lines: Iterable[str]) -> Iterator[str]:
        """Those of the lines that were not said lately, as they can be printed."""
        for line in lines:
            now = time.monotonic()
            if now - self._when.get(line, -_TELL_AGAIN_S) >= _TELL_AGAIN_S:
                self._when = {said: when for said, when in self._when.items() if now - when < _TELL_AGAIN_S} | {line: now}
                yield printable(line)


@dataclass
class Server:
    """A server that runs.

    Args:
        devices: How devices on this machine reach it; others by its name, at the same port.
        runs: How runs are given to it, from this machine alone.
        keys: The folder with its keys; None: without.
        home: For its database, logs and runs.
        process: The SuperLink.
        nodes: Devices that it knows: client and number of the node, by their public keys.
        command: That starts the SuperLink.
        front: Through which devices come.
    """

    devices: Link
    runs: Link
    keys: Path | None
    home: Path
    process: Program
    nodes: dict[str, tuple[str, str]]
    command: Sequence[str] = ()
    front: "Front | None" = None
    _refused: dict[str, float] = field(default_factory=dict)  # keys, and until when they are
    _starting: bool = False
    _ends: int = 0  # of the SuperLink, one soon after the other
    _started: float = field(default_factory=time.monotonic)

    def look(self) -> Iterator[str]:
        """Make devices known whose public keys have come, and forget those whose keys have gone; yields what is to be told."""
        if self.keys is None:
            return
        from coterie import keys

        try:
            found, wrong = keys.public_keys(self.keys)
        except Refused as error:
            yield f"{error.problem}. {error.remedy}"
            return
        yield from (f"{path} was refused. {problem}" for path, problem in wrong.items())
        for key, path in found.items():
            if key not in self.nodes and time.monotonic() >= self._refused.get(key, 0.0):
                yield self._register(key, path)
        unclear = {keys.owner(path) for path in wrong}  # whose file is there all the same
        gone = [key for key, (client, _) in self.nodes.items() if key not in found and client not in unclear]
        self._open(gone)
        for key in gone:
            yield self._unregister(key)

    def _register(self, key: str, path: Path) -> str:
        """Make a device known; returns what is to be told."""
        from coterie import keys

        client = keys.owner(path)
        try:
            self.nodes[key] = (client, register(path, self.home))
        except ClientError as error:
            self._refused[key] = time.monotonic() + _TELL_AGAIN_S
            return f"{path} was refused. {error.problem}"
        self._write()
        return f"The device of {client} is known now."

    def _unregister(self, key: str) -> str:
        """Forget a device; returns what is to be told."""
        client, node = self.nodes[key]
        try:
            flwr(["supernode", "unregister", node, NAME], self.home)
        except ClientError as error:
            return f"The device of {client} could not be shut out. {error.problem}"
        del self.nodes[key]
        self._write()
        return f"The device of {client} is shut out: its public key has gone."

    def _open(self, gone: Sequence[str] = ()) -> None:
        """Have the front take for devices those that are known, but for these."""
        if self.front is None or self.keys is None:
            return
        from coterie import keys

        known = [keys.public_key(key) for key in self.nodes if key not in gone]
        self.front.keys = {keys.shown(key): key for key in known}

    def _write(self) -> None:
        new = self.home / f"{NODES}.new"
        new.write_text(json.dumps(self.nodes))
        new.replace(self.home / NODES)

    def stop(self) -> None:
        """End the SuperLink, and all that it has started."""
        self.process.stop()

    def watch(self) -> Iterator[str]:
        """Look again and again, and start the SuperLink again whenever it ends, whatever happens; yields what is to be told."""
        told = _Told()
        while True:
            yield from told.new(self._outlived())
            time.sleep(_LOOK_S)

    def _outlived(self) -> Iterator[str]:
        """One look, of which nothing that can go wrong ends the server."""
        try:
            yield from self._front_problems()
            if self.process.poll() is not None:
                yield from self._start_again()
            elif not self._starting or listening(self.runs.address):
                self._starting = False
                yield from self.look()
        except (OSError, CoterieError) as error:
            yield f"The server goes on, but: {error}"

    def _front_problems(self) -> Iterator[str]:
        while self.front is not None and self.front.problems:
            yield self.front.problems.popleft()

    def _start_again(self) -> Iterator[str]:
        """Start the SuperLink again if it is time to."""
        now = time.monotonic()
        if now - self._started > 2 * _AGAIN_MOST_S:
            self._ends = 0
        if now - self._started < min(_AGAIN_S * self._ends, _AGAIN_MOST_S):
            return
        self._started, self._ends, self._starting = now, self._ends + 1, True
        self.process.stop()  # what it had started itself
        self.process = Program(self.command, self.home, self.home / LOG)
        yield (
            f"The SuperLink ended and is started again; why is in {self.home / LOG}. A run that was going on has ended: "
            "submit it again, with --resume and its --out."
        )


@contextmanager
def server(keys: Path | None, home: Path, host: str, port: int, runs_port: int, largest: int = LARGEST) -> Iterator[Server]:
    """A SuperLink, with the devices registered whose keys are known. It listens to this machine; devices come by `front`.

    Args:
        keys: The folder that `keys.make` made; None: neither encryption nor keys.
        home: For its database, logs and runs.
        host: That devices come to; 0.0.0.0 for all of this machine's addresses.
        port: Likewise.
        runs_port: For whoever submits runs, on this machine.
        largest: Bytes that a device may send at once. Flower cuts tensors into parts of 5 MiB, but for those of secure aggregation.

    Raises:
        Refused: Keys are missing, a port is taken, or `home` cannot be had.
        ClientError: It did not come up.
    """
    from coterie.front import Limits, front
    from coterie.keys import CA, CERTIFICATE, KEY

    ca, certificate, key = (None, None, None) if keys is None else (keys / CA, keys / CERTIFICATE, keys / KEY)
    for path in (ca, certificate, key):
        if path is not None:
            _there(path, "a key of the server", "Make the keys first: coterie keys DIR --host HOST --client ID ...")
    devices, runs = (
        Link(f"{'127.0.0.1' if where == '0.0.0.0' else where}:{p}", ca) for where, p in ((host, port), ("127.0.0.1", runs_port))
    )
    if port == runs_port or runs_port > _LAST_PORT:
        raise Refused(f"port {runs_port} cannot be the one for runs", "Give --port and --runs-port, and not the same.")
    for link, option in ((devices, "--port"), (runs, "--runs-port")):
        if listening(link.address):
            raise Refused(f"port {link.address.rpartition(':')[2]} is taken", f"Choose another {option}.")
    private(home)
    command, log = _superlink(ca, certificate, key, home, runs_port), home / LOG
    found = Server(devices, runs, keys, home, Program(command, home, log), {}, command)
    with ExitStack() as stack:
        stack.callback(found.stop)
        found.nodes = {} if keys is None else _nodes(home)
        _wait_for(lambda: listening(runs.address), found.process, log)
        configure(runs, home)
        try:
            limits = Limits(body=largest)
            found.front = stack.enter_context(front((host, port), ("127.0.0.1", runs_port), certificate, key, ca, limits))
        except OSError as error:
            raise Refused(f"cannot listen at {host}:{port}: {error.strerror}", "Choose another --host or --port.") from None
        found._open()
        yield found


def _nodes(home: Path) -> dict[str, tuple[str, str]]:
    """The devices that a server knew when it ended. Raises Refused where that cannot be told."""
    from coterie import keys

    path = home / NODES
    if not path.exists() or not (home / DATABASE).exists():
        return {}
    try:
        found = {str(key): (str(client), str(node)) for key, (client, node) in json.loads(path.read_text()).items()}
        for key in found:
            keys.public_key(key)
    except (OSError, ValueError, AttributeError, TypeError, Refused) as error:
        remedy = f"Delete it and {home / DATABASE}: the devices, whose keys are there, become known again."
        raise Refused(f"{path} is damaged: {error}", remedy) from None
    return found


def _superlink(ca: Path | None, certificate: Path | None, key: Path | None, home: Path, port: int) -> list[str]:
    """The command line of a SuperLink."""
    listen = [program("flower-superlink"), "--host", "127.0.0.1", "--port", str(port), "--database", str(home / DATABASE)]
    if ca is None:
        return [*listen, "--insecure"]
    files = ("--ssl-ca-certfile", ca), ("--ssl-certfile", certificate), ("--ssl-keyfile", key)
    return listen + [part for flag, path in files for part in (flag, str(path))] + ["--enable-supernode-auth"]


def _wait_for(ready: Callable[[], bool], process: Program, log: Path) -> None:
    """Wait until a program is ready. Raises ClientError with the end of its log if it ends before, or takes too long."""
    end = time.monotonic() + _UP_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            raise _ended(log)
        time.sleep(0.2)


def _last_lines(log: Path) -> list[str]:
    """The last lines of a log, as they can be printed."""
    with open(log, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        text = file.read(_TAIL).decode(errors="replace")
    return [printable(line) for line in _COLOUR.sub("", text).splitlines()[-15:]]


def _ended(log: Path) -> ClientError:
    tail = "\n".join(_last_lines(log))
    return ClientError(f"{log.stem} does not run; its log ends:\n{tail}", f"The whole log is {log}.")


def _toml(values: Mapping[str, Any]) -> list[str]:
    """Assignments of texts, numbers and switches, as TOML wants them: JSON, but without escapes for halves of surrogate pairs."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def configure(link: Link, home: Path) -> None:
    """Tell Flower's command line how the server is reached."""
    section = {"address": link.address} | ({"insecure": True} if link.ca is None else {"root-certificates": str(link.ca.resolve())})
    lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", *_toml(section)]
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    (home / "flwr" / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def flwr(arguments: Sequence[str], home: Path) -> str:
    """What a command of Flower's command line prints. Raises ClientError with its output if it fails."""
    command, what = [program("flwr"), *arguments], f"flwr {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(
            command, env=environment(home), capture_output=True, text=True, errors="replace", check=False, timeout=_COMMAND_S
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"{what} did not end within {_COMMAND_S:g} s") from None
    if done.returncode:
        raise ClientError(f"{what} failed:\n{printable((done.stdout + done.stderr).strip()[-3000:], lines=True)}")
    return done.stdout


def _flwr_json(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """The same as JSON. With that, a command that fails says so in its output and exits with 0. Raises ClientError likewise."""
    said = flwr([*arguments, "--format", "json"], home)
    try:
        found: dict[str, Any] = json.loads(said)
    except ValueError:
        raise ClientError(f"flwr {' '.join(arguments[:2])} answered no JSON:\n{printable(said[-3000:], lines=True)}") from None
    if not found.get("success", True):
        problem = printable(str(found.get("error-message", found)), lines=True)
        raise ClientError(f"flwr {' '.join(arguments[:2])} failed:\n{problem}")
    return found


def register(key: Path, home: Path) -> str:
    """Make a device's public key known to the server; the number of its node. Raises ClientError: it is no key, or had a node before."""
    return str(_flwr_json(["supernode", "register", str(key), NAME], home)["node-id"])


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
        secure: Whether it lets nothing that was trained leave but by secure aggregation.
        limits: The owner's file of limits, see `coterie.limits`; None: without.
    """

    link: Link
    home: Path
    client: str | None = None
    data: Path | None = None
    base: str | None = None
    key: Path | None = None
    resident: bool = True
    secure: bool = False
    limits: Path | None = None

    def check(self) -> None:
        """Refuse what cannot work. Raises Refused."""
        self.link.check()
        if self.client is not None and (mistake := names.mistake(self.client)):
            raise Refused(f"--client {self.client!r}: {mistake}", "Give the name by which the server's data or keys know this client.")
        if self.limits is not None:
            limits.read(self.limits).check_installed()
        if self.key is not None:
            _there(self.key, "the device's private key", "Copy it from the server's keys (clients/ID).")
        elif self.link.ca is not None:
            raise Refused("a device needs its private key", "Give --key, or ask for --insecure.")
        if self.data is not None and not self.data.exists():
            raise Refused(f"--data: {self.data} does not exist", "Name the folder with this client's data.")

    @property
    def configuration(self) -> dict[str, Any]:
        """What the programs that Flower starts are told of the node."""
        places = {"home": self.home, "data": self.data, "limits": self.limits}
        found = {key: path and str(path.resolve()) for key, path in places.items()} | {"client": self.client, "base": self.base}
        switches = {"resident": self.resident, "secure": self.secure}
        return {k: v for k, v in found.items() if v is not None} | {k: True for k, on in switches.items() if on}

    def supernode(self) -> list[str]:
        """The command line of its SuperNode."""
        config = " ".join(line.replace(" = ", "=", 1) for line in _toml(self.configuration))
        port = free_port()
        keys = ["--auth-supernode-private-key", str(self.key)] if self.key is not None else []
        return [program("flower-supernode"), *self.link.flags, *keys, "--host", "127.0.0.1", "--port", str(port), "--node-config", config]


@contextmanager
def device(node: Node) -> Iterator["Supervisor"]:
    """A SuperNode and, if wanted, its resident process, started again whenever they end."""
    node.check()
    private(node.home)
    supervisor = Supervisor(node, {})
    try:
        supervisor.look()
        yield supervisor
    finally:
        for process in supervisor.processes.values():
            process.stop()


@dataclass
class Supervisor:
    """Starts the programs of a device, and again whenever one has ended."""

    node: Node
    processes: dict[str, Program]

    def look(self) -> list[str]:
        """Start what does not run; returns what that was."""
        ended = [name for name in self._names if name not in self.processes or self.processes[name].poll() is not None]
        for name in ended:
            if name in self.processes:
                self.processes[name].stop()  # what it had started itself
            own = [sys.executable, "-m", "coterie", "resident", json.dumps(self.node.configuration)]
            command = own if name == "resident" else self.node.supernode()
            self.processes[name] = Program(command, self.node.home, self.node.home / f"{name}.log")
        return ended

    @property
    def _names(self) -> list[str]:
        return ["resident", "supernode"] if self.node.resident else ["supernode"]

    def watch(self) -> Iterator[str]:
        """Look again and again, whatever happens; yields what is to be told."""
        told = _Told()
        while True:
            time.sleep(_AGAIN_S)
            yield from told.new(self._outlived())

    def _outlived(self) -> Iterator[str]:
        """One look, of which nothing that can go wrong ends the device."""
        try:
            yield from map(self._why, self.look())
        except (OSError, CoterieError) as error:
            yield f"The device goes on, but: {error}"

    def _why(self, name: str) -> str:
        log = self.node.home / f"{name}.log"
        reason = next((line for line in reversed(_last_lines(log)) if line.startswith(("[code", "coterie: "))), "")
        if reason.startswith("[code: 2004]"):
            reason += " The server does not know its key, or takes its predecessor for alive, for a minute at most."
        return f"The {name} ended and is started again. {reason or f'Its log is {log}.'}"


def submit(link: Link, home: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Have a server run a recipe on its devices, and wait for its end.

    Args:
        link: To the server.
        home: For Flower's files.
        config: Keys of `[tool.flwr.app.config]`.
        say: Is told line by line what the run prints.

    Returns:
        The run's id.

    Raises:
        Refused: The server is not there.
        ClientError: Flower refused the run, it failed, or the server went away.
    """
    link.check()
    if not link.answers("control"):
        raise Refused(f"nobody answers at {link.address}", "Is `coterie server` running? It takes runs from its own machine only.")
    configure(link, home)
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder)
        (app / "pyproject.toml").write_text(APP)
        (app / "run.toml").write_text("\n".join(_toml(config)), encoding="utf-8")
        run = str(_flwr_json(["run", str(app), NAME, "--run-config", str(app / "run.toml")], home)["run-id"])
    say(
        f"The server has it as run {run}, in the folder {config['out']} there. To stop it: FLWR_HOME={home / 'flwr'} flwr stop {run} {NAME}"
    )
    try:
        _follow(run, home, say)
        _finish(run, home)
    except ClientError:
        if listening(link.address):
            raise
        raise ClientError(
            "the server went away", "Start it again, then the run: the same command with --resume, and --out with the run's folder."
        ) from None
    return run


def _follow(run: str, home: Path, say: Callable[[str], None]) -> None:
    """Say what a run prints, until it ends or nothing more is heard of it."""
    arguments, env = [program("flwr"), "log", run, NAME, "--stream"], environment(home) | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace") as log:
        try:
            failed = False
            for line in log.stdout or ():
                plain = _COLOUR.sub("", line.rstrip())
                failed = failed or plain.startswith("coterie: ")
                if failed and _ERROR.match(plain):  # the same again, with the way that it took through Flower
                    return
                if not _CHATTER.match(plain):
                    say(printable(plain))
        finally:
            log.terminate()


def _status(run: str, home: Path) -> str:
    """Where a run stands: `running`, `finished:completed`, `finished:failed`, ..."""
    return str(_flwr_json(["list", NAME, "--run-id", run], home)["runs"][0]["status"])


def _finish(run: str, home: Path) -> None:
    """Wait until a run has ended. Raises ClientError if it failed."""
    while not (found := _status(run, home)).startswith("finished"):
        time.sleep(1.0)
    if found != "finished:completed":
        remedy = f"What it said: FLWR_HOME={home / 'flwr'} flwr log {run} {NAME} --show"
        raise ClientError(f"the run ended as {found.removeprefix('finished:')}", remedy)


def demo(recipe: "Recipe", clients: Sequence[str], out: Path, say: Callable[[str], None], resident: bool = True) -> None:
    """A server and real devices on this machine, encrypted and with keys; a recipe runs on them, and nothing is left running.

    Args:
        recipe: Resolved.
        clients: Of its data, all of which are on this machine.
        out: The run's folder; what devices keep goes to `devices/<id>` in it, see `names.encoded`.
        say: Is told in a line what happens.
        resident: Whether each device has a process that keeps the base model loaded.

    Raises:
        Refused: As `server` and `submit`.
        ClientError: Likewise.
    """
    from coterie import keys

    folder = out.resolve()
    with ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        keys.make(own, [], clients)
        port, runs_port = free_port(), free_port()
        found = stack.enter_context(server(own, folder / "server", "127.0.0.1", port, runs_port))
        say("A SuperLink is up, with TLS.")
        for line in found.look():
            say(printable(line))
        for client in clients:
            home, key = folder / "devices" / names.encoded(client), keys.private(own, client)
            node = Node(found.devices, home, client, _data(recipe, client, home), key=key, resident=resident)
            stack.enter_context(device(node))
        say(f"{len(clients)} SuperNodes are coming up{', each with a process that keeps the base model loaded' * resident}.")
        config = {"recipe": recipe.model_dump_json(), "out": str(folder), "clients": len(clients)}
        submit(found.runs, folder / "server", config, say)
    say("Everything is stopped.")


def _data(recipe: "Recipe", client: str, home: Path) -> Path | None:
    """Where a device of the demonstration finds its data; of folders of clients it has its own alone."""
    path: Path | None = getattr(recipe.data, "path", None)
    if recipe.data.kind != "folders" or path is None:
        return path or getattr(recipe.data, "root", None)
    (home / "data").mkdir(parents=True, exist_ok=True)
    own = next(folder for folder in path.iterdir() if names.normal(folder.name) == client)
    (home / "data" / own.name).symlink_to(own.resolve())
    return home / "data"
