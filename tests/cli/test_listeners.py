"""Every port and socket that the project opens, held against the table "Listeners" of
docs/security.md: each cell is a promise, and is tried.
"""

import base64
import http.client
import re
import select
import socket
import ssl
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from flood import closed, flood

import coterie

ROOT = Path(__file__).parents[2]
SOURCE = Path(coterie.__file__).parent
TOKEN = "a-token-of-tests"
KIB = 1 << 10


@dataclass(frozen=True)
class Door:
    """A started listener.

    Args:
        port: On this machine.
        request: Method and path of what is asked.
        known: Headers of a caller who is answered.
        ca: The authority's certificate, where the port uses TLS.
        home: The folder of a socket.
        log: The file that its program writes.
    """

    port: int = 0
    request: str = "GET /"
    known: dict[str, str] = field(default_factory=dict)
    ca: Path | None = None
    home: Path | None = None
    log: Path | None = None

    def connected(self) -> socket.socket:
        plain = socket.create_connection(("127.0.0.1", self.port), 20)
        if self.ca is None:
            return plain
        context = ssl.create_default_context(cafile=str(self.ca))
        return context.wrap_socket(plain, server_hostname="127.0.0.1")

    def head(self, headers: dict[str, str]) -> bytes:
        named = {"Host": f"127.0.0.1:{self.port}", "Content-Length": "0"} | headers
        return "\r\n".join(
            [f"{self.request} HTTP/1.1", *(f"{k}: {v}" for k, v in named.items())]
        ).encode()

    def answer(self, headers: dict[str, str]) -> bytes:
        """The beginning of the answer to a request; empty where there is none."""
        with self.connected() as connection:
            try:
                connection.sendall(self.head(headers) + b"\r\n\r\n")
                return connection.recv(64 * KIB)
            except ConnectionError:
                return b""

    def status(self, **headers: str) -> int:
        """The status of the answer to a request with these headers alone; 0 without an answer."""
        answer = self.answer({k.replace("_", "-"): v for k, v in headers.items()})
        return int(answer.split()[1]) if answer else 0


# How each listener is started.


def written(folder: Path, base: Path) -> Path:
    from random_models import write_models

    from coterie.models.layout import Layout

    return write_models(folder, base, {"ann": Layout(rank=2)})


def page_door(link: str) -> Door:
    address = urlsplit(link)
    connection = http.client.HTTPConnection("127.0.0.1", address.port, timeout=20)
    connection.request("GET", f"/?{address.query}")
    cookie = connection.getresponse().headers["Set-Cookie"].partition(";")[0]
    return Door(address.port, "GET /page.json", {"Cookie": cookie})


@contextmanager
def keyboard(folder: Path, base: Path) -> Iterator[Door]:
    pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
    from coterie.personal.ui.page import served

    with served(coterie.load_all(written(folder, base)), 0) as link:
        yield page_door(link)


@contextmanager
def classifiers(folder: Path, base: Path) -> Iterator[Door]:
    pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
    from coterie.models.text import TextShape
    from coterie.personal.ui.page import served

    with served({"ann": SimpleNamespace(shape=TextShape(str(base), 3, 12))}, 0) as link:
        yield page_door(link)


@contextmanager
def interface(folder: Path, base: Path) -> Iterator[Door]:
    pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
    from coterie.personal.api import server

    models, settings = coterie.load_all(written(folder, base)), server.Settings(0, token=TOKEN)
    with server.served(models, settings, print) as address:
        known = {"Authorization": f"Bearer {TOKEN}"}
        yield Door(urlsplit(address).port, "GET /v1/models", known)


@contextmanager
def superlink(folder: Path, base: Path) -> Iterator[tuple[Door, Door]]:
    """The proxy, which knows one key, and the SuperLink behind it."""
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    from coterie.deploy import keys
    from coterie.deploy.keys import free_port
    from coterie.deploy.server import server

    keys.make(folder / "keys", [], ["ann"])
    key = load_ssh_private_key((folder / "keys/clients/ann").read_bytes(), None)
    with server(
        folder / "keys", folder / "server", "127.0.0.1", free_port(), free_port()
    ) as running:
        assert running.proxy is not None
        running.proxy.keys = {keys.shown(key.public_key()): key.public_key()}
        ports = [int(link.address.rpartition(":")[2]) for link in (running.devices, running.runs)]
        ca, log = folder / "keys" / keys.CA, folder / "server/superlink.log"
        yield (
            Door(ports[0], "POST /v1/fleet/hello", signed(key, keys), ca),
            Door(ports[1], "POST /v1/control/hello", {}, ca, log=log),
        )


def signed(key, keys) -> dict[str, str]:
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.now(UTC).isoformat()
    shown = {
        "flwr-public-key": keys.shown(key.public_key()),
        "flwr-signature": key.sign(now.encode(), ec.ECDSA(hashes.SHA256())),
    }
    encoded = {name: base64.b64encode(value).decode() for name, value in shown.items()}
    return encoded | {"flwr-timestamp": now}


@contextmanager
def supernode(folder: Path, base: Path) -> Iterator[Door]:
    import psutil

    from coterie.deploy.keys import Link
    from coterie.deploy.supernode import Node, device

    home = folder / "device"
    with device(Node(Link("127.0.0.1:9", None), home, resident=False)) as supervisor:
        program = psutil.Process(supervisor.processes["supernode"].pid)
        for _ in range(600):
            tree = [program, *program.children(recursive=True)]
            ports = {
                c.laddr.port for p in tree for c in p.net_connections() if c.status == "LISTEN"
            }
            if ports:
                break
            time.sleep(0.1)
        (port,) = ports
        yield Door(port, "POST /v1/runtime/hello", log=home / "supernode.log")


@contextmanager
def llama(folder: Path, base: Path) -> Iterator[Door]:
    for package in ("gguf", "xllamacpp"):
        pytest.importorskip(package, reason=f"no {package} (pip install -e '.[gguf]')")
    from byte_pairs import byte_pairs
    from random_models import write_base
    from transformers import LlamaConfig

    from coterie.export import Source, export
    from coterie.export.gguf import LlamaServer

    config = LlamaConfig(
        vocab_size=272,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    run = written(folder, write_base(folder / "base", config, byte_pairs()))
    (found,) = export(Source(run), "gguf", folder / "out")
    server = LlamaServer(found.folder / found.shared[0], 24, lambda text, **_: {"input_ids": [5]})
    with server.running([]):
        known = {"Authorization": f"Bearer {server._key}"}
        yield Door(urlsplit(server.server.listening_address).port, "GET /props", known)


RESIDENT = """
import sys
from pathlib import Path
from coterie.deploy import resident
answer = lambda text, body: (text, body)
resident.serve(Path(sys.argv[1]), answer, lambda: print("ready", flush=True))
"""


@contextmanager
def resident(folder: Path, base: Path) -> Iterator[Door]:
    home = folder / "device"
    command = [sys.executable, "-c", RESIDENT, str(home)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Door(home=home)
        process.kill()


STARTS = {
    "keyboard": keyboard,
    "page of classifiers": classifiers,
    "interface for programs": interface,
    "proxy": superlink,
    "SuperLink": superlink,
    "SuperNode": supernode,
    "llama.cpp": llama,
    "resident process": resident,
}
# Where in the source a port or socket may be opened, and by which row of the table.
OPENED = {
    "deploy/keys.py": (),  # a free port is looked for, and let go
    "deploy/proxy.py": ("proxy",),
    "deploy/resident.py": ("resident process",),
    "deploy/server.py": ("SuperLink",),
    "deploy/supernode.py": ("SuperNode",),
    "export/gguf.py": ("llama.cpp",),
    "personal/api/guard.py": ("keyboard", "page of classifiers", "interface for programs"),
}
OPENING = re.compile(
    r"create_server|start_server|\.bind\(\(|\.listen\(|\bListener\(address|HTTPServer|uvicorn\.run|"
    r"uvicorn\.Server\(|\.launch\(|local_program\(\"|xllamacpp\.Server\(|run_simple|app\.run\("
)


@pytest.fixture(scope="module")
def doors(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """Started when first asked for, and once."""
    with ExitStack() as stack:
        started: dict[object, object] = {}

        def door(name: str) -> Door:
            start = STARTS[name]
            if start not in started:
                folder = tmp_path_factory.mktemp("door")
                started[start] = stack.enter_context(start(folder, tiny_base))
            opened = started[start]
            return opened if isinstance(opened, Door) else opened[name == "SuperLink"]

        yield door


# What each cell promises, by column and text. None: nothing is promised.


def listening_addresses(port: int) -> set[str]:
    tables = [Path(f"/proc/net/{name}").read_text().splitlines() for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables for line in table]
    return {
        line[1].partition(":")[0]
        for line in lines
        if line[3] == "0A" and line[1].endswith(f":{port:04X}")
    }


def from_this_machine(door: Door) -> None:
    assert listening_addresses(door.port) == {"0100007F"}


def from_this_account(door: Door) -> None:
    assert stat.S_IMODE(door.home.stat().st_mode) == stat.S_IRWXU
    (path,) = (path for path in door.home.iterdir() if path.is_socket())
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR


def from_the_network(door: Door) -> None:
    from inspect import signature

    from coterie.cli.deploy import server

    assert signature(server).parameters["host"].default == "0.0.0.0"


def own_host(door: Door) -> None:
    for host in (
        "evil.example",
        f"evil.example:{door.port}",
        f"127.0.0.1.evil.example:{door.port}",
    ):
        assert door.status(**door.known, Host=host) in (400, 403)
    refused = door.status(**door.known, Host="evil.example")
    assert door.status(**door.known) != refused
    assert door.status(**door.known, Host=f"localhost:{door.port}") != refused


def own_pages(door: Door) -> None:
    own_host(door)
    for origin in ("http://evil.example", "http://127.0.0.1:1", "null"):
        assert door.status(**door.known, Origin=origin) == 403
    assert door.status(**door.known, Origin=f"http://127.0.0.1:{door.port}") == 200


def no_pages(door: Door) -> None:
    for origin in ("http://evil.example", f"https://127.0.0.1:{door.port}", "null"):
        assert door.status(**door.known, Origin=origin) == 403
    assert door.status(**door.known) != 403


def who_has_the_secret(door: Door) -> None:
    assert door.status(**door.known) == 200
    assert door.status() == 401
    for name, value in door.known.items():
        assert door.status(**{name: f"{value}x"}) == 401
        assert door.status(**{name: value[:-1]}) == 401


def who_has_the_key_of_the_socket(door: Door) -> None:
    from coterie.deploy.resident import SOCKET, ask

    assert ask(door.home, "text", b"body") == ("text", b"body")
    with pytest.raises(AuthenticationError):
        Client(str(door.home / SOCKET), "AF_UNIX", authkey=b"another")


def devices(door: Door) -> None:
    """More than a few bytes; who is a stranger may ask only little."""
    large = {"Content-Length": "5000"}
    assert door.status(**large) == 413
    with door.connected() as connection:
        connection.sendall(door.head(door.known | large) + b"\r\n\r\n" + b"x" * 5000)
        assert connection.recv(64 * KIB).split()[1] != b"413"


def uses_tls(door: Door) -> None:
    assert door.status(**door.known) > 0
    assert not Door(door.port, door.request).answer(door.known).startswith(b"HTTP")


def uses_none(door: Door) -> None:
    assert door.ca is None
    assert door.status(**door.known) > 0


def connections(door: Door, most: int, alike: int) -> None:
    """So many remain of those that strangers open; and who may is answered meanwhile."""
    for addresses, left in ((1, alike), (most // alike + 2, most)):
        with ExitStack() as stack:
            silent = [
                stack.enter_context(
                    socket.create_connection(
                        ("127.0.0.1", door.port), 20, (f"127.0.4.{1 + k % addresses}", 0)
                    )
                )
                for k in range(left + 10)
            ]
            for connection in silent:
                connection.setblocking(False)
            until = time.monotonic() + 5
            while sum(map(closed, silent)) < 10 and time.monotonic() < until:
                time.sleep(0.05)
            assert sum(not closed(connection) for connection in silent) == left
            assert closed(silent[0])
    with flood(door.port, 512):
        for _ in range(3):  # a busy machine may be late once, and who may asks again
            assert any(door.status(**door.known) not in (0, 401) for _ in range(3))


def head(door: Door, size: int, seconds: int) -> None:
    """For its time, see below."""
    with door.connected() as large:
        large.sendall(door.head({"X-Large": "x" * size}))
        assert large.recv(64 * KIB).split()[1:2] in ([b"400"], [b"403"], [])


def body_unread(door: Door) -> None:
    begun = time.monotonic()
    assert door.status(Content_Length=str(10**12)) == 401
    assert time.monotonic() - begun < 5


def small_body(door: Door, most: int) -> None:
    assert door.status(Content_Length=str(most + 1)) == 413


def policy(script: str, door: Door) -> None:
    for headers in (door.known, {}, {"Host": "evil.example"}):
        answer = door.answer(headers).partition(b"\r\n\r\n")[0].decode().lower()
        assert f"default-src {script}" in answer
        assert "frame-ancestors 'none'" in answer
        assert "unsafe-inline" not in answer.partition("script-src")[2]
        for line in ("x-content-type-options: nosniff", "referrer-policy: no-referrer"):
            assert line in answer


def logs_nothing(door: Door, capfd: pytest.CaptureFixture) -> None:
    capfd.readouterr()
    for headers in (door.known, {}, {"Host": "evil.example"}, {"Upgrade": "websocket"}):
        door.status(**headers)
    with door.connected() as connection:
        connection.sendall(b"\x00no http\r\n\r\n")
        connection.recv(KIB)
    assert capfd.readouterr() == ("", "")


def logs_requests(door: Door) -> None:
    door.status()
    time.sleep(0.5)
    assert "127.0.0.1" in door.log.read_text()


PROMISES: dict[str, dict[str, Callable[[Door], None]]] = {
    "reached from": {
        "this machine": from_this_machine,
        "this account": from_this_account,
        "the network": from_the_network,
    },
    "asked as, and by": {
        "own Host, own Origin": own_pages,
        "own Host": own_host,
        "no Origin": no_pages,
    },
    "answers": {
        "who has the token": who_has_the_secret,
        "who has the key": who_has_the_secret,
        "who can read the key": who_has_the_key_of_the_socket,
        "devices by their keys": devices,
    },
    "TLS": {"yes": uses_tls, "no": uses_none},
    "connections of strangers: all, one address": {
        "512, 64": partial(connections, most=512, alike=64),
        "256, 64": partial(connections, most=256, alike=64),
    },
    "request's head": {
        "32 KiB, 10 s": partial(head, size=32 * KIB, seconds=10),
        "16 KiB, 10 s": partial(head, size=16 * KIB, seconds=10),
    },
    "a stranger's body": {
        "unread": body_unread,
        "4 KiB": partial(small_body, most=4 * KIB),
    },
    "lets pages load": {
        "its own": partial(policy, "'self'"),
        "nothing": partial(policy, "'none'"),
    },
    "logs": {"nothing": logs_nothing, "requests": logs_requests},
}
NOTHING = "-"  # is promised


def table() -> dict[str, dict[str, str]]:
    """The cells by listener and column."""
    text = (ROOT / "docs/security.md").read_text("utf-8").partition("\n## Listeners\n")[2]
    lines = [line for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    columns, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(columns[2:], row[2:], strict=True)) for row in rows}


CELLS = [
    (name, column)
    for name, cells in table().items()
    for column, text in cells.items()
    if text != NOTHING
]


@pytest.mark.parametrize(("name", "column"), CELLS, ids=[f"{n}-{c}" for n, c in CELLS])
def test_a_listener_keeps_what_its_row_promises(
    name: str, column: str, doors: Callable[[str], Door], capfd: pytest.CaptureFixture
) -> None:
    text = table()[name][column]
    check = PROMISES[column][text]
    door = doors(name)
    check(door, capfd) if check is logs_nothing else check(door)


def test_every_listener_has_a_row() -> None:
    """Whoever opens a port in another file has to say what it promises."""
    opening = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if OPENING.search(path.read_text("utf-8"))
    }
    assert opening == set(OPENED)
    rows = [row for rows in OPENED.values() for row in rows]
    assert sorted(rows) == sorted(table()) == sorted(STARTS)
    assert all(set(cells) == set(PROMISES) for cells in table().values())


def test_who_says_half_a_head_is_cut_off_in_the_time_that_rows_promise(
    doors: Callable[[str], Door],
) -> None:
    column, waiting = "request's head", dict[socket.socket, tuple[float, int]]()
    with ExitStack() as stack:
        for name, cells in table().items():
            if cells[column] == NOTHING:
                continue
            door, seconds = doors(name), PROMISES[column][cells[column]].keywords["seconds"]
            half = stack.enter_context(door.connected())
            half.sendall(door.head(door.known))
            waiting[half] = time.monotonic(), seconds
        assert waiting
        while waiting:
            ended, _, _ = select.select([*waiting], [], [], 20)
            assert ended
            for half in ended:
                begun, seconds = waiting.pop(half)
                assert half.recv(64 * KIB) == b""
                assert seconds - 0.5 < time.monotonic() - begun < seconds + 5
