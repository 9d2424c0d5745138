"""What a server and a device outlive: a SuperLink that dies, files that hold no key, a full
disk; and signals that come twice.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from terminals import MINUTE, demonstration, left, terminals, texts, until, written

from coterie.core.errors import ClientError, Refused
from coterie.deploy import keys, process, supernode
from coterie.deploy import server as superlink
from coterie.deploy.keys import Link
from coterie.deploy.resident import private
from coterie.deploy.server import Server
from coterie.deploy.supernode import Node

# Answers every request with 200, as a SuperLink would some of them.
STUB = """
import http.server, ssl, sys
class Answer(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
context.load_cert_chain(sys.argv[2], sys.argv[3])
with http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Answer) as server:
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()
"""


def registering(arguments: Sequence[str], home: Path) -> str:
    """In the place of Flower's commands."""
    return json.dumps({"success": True, "node-id": f"node of {Path(arguments[2]).stem}"})


@contextmanager
def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, list[str]]]:
    """A server whose SuperLink is a stub, and what it tells."""
    monkeypatch.setattr(
        superlink,
        "_superlink",
        lambda tls, home, port: [sys.executable, "-c", STUB, str(port), *map(str, tls[:2])],
    )
    monkeypatch.setattr(superlink, "_LOOK_S", 0.1)
    monkeypatch.setattr(process, "AGAIN_S", 0.2)
    monkeypatch.setattr(supernode, "AGAIN_S", 0.2)
    said: list[str] = []
    stop = threading.Event()

    def watch() -> None:
        for line in found.watch():
            said.append(line)
            if stop.is_set():
                return

    with superlink.server(
        folder / "keys", folder / "home", "127.0.0.1", keys.free_port(), keys.free_port()
    ) as found:
        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        yield found, said
        stop.set()
        assert found.proxy is not None
        found.proxy.problems.append("end")
        watching.join(10)


def test_a_superlink_that_dies_is_started_again_and_devices_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "flwr", registering)
    keys.make(tmp_path / "keys", [], ["ann"])
    with serving(tmp_path, monkeypatch) as (found, said):
        until(lambda: "The device of ann is registered." in said, "ann")
        for _ in range(2):
            first = found.process
            os.kill(first.pid, signal.SIGKILL)
            until(
                lambda first=first: found.process is not first and found.devices.answers("fleet"),
                "another one answers",
                20,
            )
        assert [line for line in said if "ended and is started again" in line] == [
            f"The SuperLink ended and is started again; {tmp_path}/home/superlink.log says why. "
            f"A run that was in progress has ended: "
            "submit it again, with --resume and its --out."
        ]
        assert list((tmp_path / "home").glob("nodes.json"))
    assert not left(tmp_path / "home")


def test_what_is_no_key_is_told_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the device whose key has become unreadable is not shut out: Flower would never take
    that key again.
    """
    monkeypatch.setattr(process, "flwr", registering)
    keys.make(tmp_path / "keys", [], ["ann", "ben"])
    folder = tmp_path / "keys/clients"
    with serving(tmp_path, monkeypatch) as (found, said):
        until(lambda: "The device of ben is registered." in said, "ben")
        ready = (
            tmp_path / "ready"
        )  # each file comes whole and at once: of half a file the server would tell something else
        ready.mkdir()
        (ready / "dangling.pub").symlink_to(tmp_path / "nothing")
        (ready / "loop.pub").symlink_to(folder / "loop.pub")
        (ready / "folder.pub").mkdir()
        (ready / "huge.pub").write_bytes(b"ecdsa-sha2-nistp384 " + b"A" * 10_000_000)
        (ready / "bytes.pub").write_bytes(b"\xff\xfe\0")
        (ready / "text.pub").write_text("no key")
        (ready / "\x1b[2Jevil\n.pub").write_text("no key")
        os.mkfifo(ready / "pipe.pub")
        rsa = ["ssh-keygen", "-q", "-t", "rsa", "-b", "2048", "-N", "", "-f", str(ready / "rsa")]
        subprocess.run(rsa, check=True)
        ben = (folder / "ben.pub").read_text()
        (ready / "ben.pub").symlink_to(tmp_path / "away")
        for path in ready.iterdir():
            path.replace(folder / path.name)
        keys.make(tmp_path / "keys", [], ["cleo"])
        until(lambda: "The device of cleo is registered." in said, "cleo, in spite of all that")
        assert {client for client, _ in found.nodes.values()} == {"ann", "ben", "cleo"}
        assert found.proxy is not None
        assert len(found.proxy.keys or ()) == 3
        until(lambda: sum(" was refused. " in line for line in said) == 10, "ten refusals")
        refusals = "\n".join(said)
        for name, why in {
            "dangling": "a broken link",
            "loop": "a broken link",
            "folder": "It is not a file.",
            "huge": "more than 16,384 bytes",
            "bytes": "no public key",
            "text": "no public key",
            "pipe": "It is not a file.",
            "rsa": "a kind of key that Flower does not accept",
            "ben": "a broken link",
            r"\x1b[2Jevil ↵ ": "no public key",
        }.items():
            assert f"{name}.pub was refused. " in refusals
            assert why in refusals.partition(f"{name}.pub was refused. ")[2].splitlines()[0]
        assert "\x1b" not in refusals
        (tmp_path / "away").write_text(ben)  # as it was
        time.sleep(0.5)
        assert {client for client, _ in found.nodes.values()} == {"ann", "ben", "cleo"}
        assert not any("removed" in line for line in said)


def test_a_key_that_is_being_made_is_no_key_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server looks at any time, also while half of a file is written."""
    keys.make(tmp_path, [], [])
    write, seen = Path.write_bytes, []

    def by_halves(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        seen.append(keys.public_keys(tmp_path))
        return write(path, content)

    monkeypatch.setattr(Path, "write_bytes", by_halves)
    keys.make(tmp_path, [], ["ann"])
    assert seen == [({}, {})]
    assert [path.name for path in keys.public_keys(tmp_path)[0].values()] == ["ann.pub"]


@pytest.mark.skipif(os.geteuid() == 0, reason="nothing is unreadable to root")
def test_a_key_that_nobody_may_read_is_told(tmp_path: Path) -> None:
    keys.make(tmp_path, [], ["ann"])
    (tmp_path / "clients/ann.pub").chmod(0)
    found, wrong = keys.public_keys(tmp_path)
    assert not found
    assert "cannot be read" in wrong[tmp_path / "clients/ann.pub"]


def test_a_folder_of_keys_that_is_away_shuts_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "flwr", registering)
    keys.make(tmp_path / "keys", [], ["ann"])
    with serving(tmp_path, monkeypatch) as (found, said):
        until(lambda: found.nodes, "ann")
        (tmp_path / "keys/clients").rename(tmp_path / "away")
        until(lambda: any("cannot read" in line for line in said), "that it is away")
        (tmp_path / "away").rename(tmp_path / "keys/clients")
        time.sleep(0.5)
        assert len(found.nodes) == 1
        assert not any("removed" in line for line in said)


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "flwr", registering)
    keys.make(tmp_path / "keys", [], ["ann"])
    write, full = Server._write, threading.Event()

    def maybe(server: Server) -> None:
        if full.is_set():
            raise OSError(28, "No space left on device")
        write(server)

    monkeypatch.setattr(Server, "_write", maybe)
    full.set()
    with serving(tmp_path, monkeypatch) as (found, said):
        until(lambda: said, "that it is full")
        assert said == ["The server keeps running, but: [Errno 28] No space left on device"]
        assert found.devices.answers("fleet")


def test_a_device_that_cannot_be_shut_out_now_is_shut_out_later_and_is_a_stranger_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = threading.Event()

    def flower(arguments: Sequence[str], home: Path) -> str:
        if arguments[1] == "unregister" and failing.is_set():
            raise ClientError("flwr supernode unregister failed")
        return registering(arguments, home)

    monkeypatch.setattr(process, "flwr", flower)
    keys.make(tmp_path / "keys", [], ["ann"])
    failing.set()
    with serving(tmp_path, monkeypatch) as (found, said):
        assert found.proxy is not None
        until(lambda: found.nodes and found.proxy and found.proxy.keys, "ann")
        (tmp_path / "keys/clients/ann.pub").unlink()
        until(lambda: any("could not be removed" in line for line in said), "that it failed")
        assert found.proxy.keys == {}
        assert found.nodes
        failing.clear()
        until(
            lambda: "The device of ann is removed: its public key no longer exists." in said,
            "that it worked",
        )
        assert not found.nodes


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"a": ["b", "c"]}'])
def test_a_damaged_list_of_devices_is_refused_and_the_remedy_named(
    tmp_path: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make(tmp_path / "keys", [], ["ann"])
    private(tmp_path / "home")
    (tmp_path / "home" / superlink.NODES).write_text(content)
    (tmp_path / "home" / superlink.DATABASE).write_text("")
    with (
        pytest.raises(Refused, match=r"nodes\.json is damaged") as refused,
        serving(tmp_path, monkeypatch),
    ):
        pass
    assert "flwr.db" in refused.value.remedy
    assert not left(tmp_path / "home")


def test_a_device_outlives_a_program_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Node, "supernode", lambda node: ["sh", "-c", "exit 1"])
    monkeypatch.setattr(process, "AGAIN_S", 0.05)
    monkeypatch.setattr(supernode, "AGAIN_S", 0.05)
    said: list[str] = []
    with supernode.device(Node(Link("127.0.0.1:9", None), tmp_path, resident=False)) as supervisor:
        look, calls = supervisor.look, [0]

        def sometimes() -> list[str]:
            calls[0] += 1
            if calls[0] == 2:
                raise OSError(11, "Resource temporarily unavailable")
            if calls[0] == 8:
                # of the thread: left alone it would start the real program again and again, beside
                # the tests that follow
                raise SystemExit
            return look()

        # Of this supervisor alone: those of other tests still watch in their threads.
        monkeypatch.setattr(supervisor, "look", sometimes)

        def watch() -> None:
            with suppress(SystemExit):
                said.extend(supervisor.watch())

        watching = threading.Thread(target=watch, daemon=True)
        watching.start()
        watching.join(3 * MINUTE)
        assert not watching.is_alive()
    assert "The device keeps running, but: [Errno 11] Resource temporarily unavailable" in said


# Folders of their own.


def test_homes_are_their_owners_alone_and_those_that_are_there_become_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "flwr", registering)
    monkeypatch.setattr(Node, "supernode", lambda node: ["sleep", "60"])
    keys.make(tmp_path / "keys", [], [])
    for name in ("home", "device"):
        (tmp_path / name).mkdir(mode=0o777)
        (tmp_path / name).chmod(0o777)
    with serving(tmp_path, monkeypatch):
        assert (tmp_path / "home").stat().st_mode & 0o7777 == 0o700
    for home in (tmp_path / "device", tmp_path / "new"):
        with supernode.device(Node(Link("127.0.0.1:9", None), home, resident=False)):
            assert home.stat().st_mode & 0o7777 == 0o700


def test_a_folder_for_everybody_is_left_as_it_is_and_refused(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with pytest.raises(Refused, match="is shared by all users of this machine"):
        private(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o1777
    (tmp_path / "file").write_text("")
    with pytest.raises(Refused, match="--home"):
        private(tmp_path / "file")


# Signals that come twice.

STOPS = """
import signal, time
# what a shell starts in the background ignores it
signal.signal(signal.SIGINT, signal.default_int_handler)
from coterie.cli import base

@base.app.command()
def wait():
    with base._stopping("stopped."):
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            print("stopping", flush=True)
            for _ in range(10):
                time.sleep(0.1)
            print("all done", flush=True)

base.app(["wait"])
"""


@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_does_not_disturb_what_is_being_stopped(
    first: int, second: int, code: int
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", STOPS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(first)
        assert process.stdout.readline() == "stopping\n"
        for _ in range(3):
            process.send_signal(second)
            time.sleep(0.1)
        assert process.stdout.readline() == "all done\n"
        said = process.stderr.read()
    assert said == "coterie: stopped.\n"
    assert process.returncode == code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGTERM, 130), (signal.SIGTERM, signal.SIGINT, 143)],
)
def test_a_run_that_is_told_twice_to_stop_stops_once(
    tmp_path: Path, first: int, second: int, code: int
) -> None:
    recipe, data = written(tmp_path, method__rounds=10_000), texts(tmp_path / "texts", "ann", "ben")
    with terminals(tmp_path) as terminal:
        running = terminal("here", "run", str(recipe), "--set", f"data.path={data}", "--out", "run")
        running.says("round ")
        for number in (first, second, first, second):
            running.process.send_signal(number)
            time.sleep(0.03)
        assert running.ends(MINUTE) == code
        assert running.text.rstrip().endswith("To continue, repeat the command with --resume.")
        assert "Traceback" not in running.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGTERM, 130), (signal.SIGTERM, signal.SIGINT, 143)],
)
def test_a_server_a_device_and_a_demonstration_that_are_told_twice(
    tmp_path: Path, first: int, second: int, code: int
) -> None:
    keys.make(tmp_path / "keys", [], ["ann"])
    data, recipe = texts(tmp_path / "texts", "ann", "ben"), written(tmp_path, method__rounds=100)
    port, runs = keys.free_port(), keys.free_port()
    with terminals(tmp_path) as terminal:
        known = ("--ca", str(tmp_path / "keys/ca.crt"), "--key", str(tmp_path / "keys/clients/ann"))
        ports = ("--port", str(port), "--runs-port", str(runs))
        programs = {
            "Ctrl-C stops it.": terminal(
                "server", "server", "--keys", str(tmp_path / "keys"), "--host", "127.0.0.1", *ports
            ),
            "asks 127.0.0.1": terminal(
                "ann",
                "client",
                "--server",
                f"127.0.0.1:{port}",
                "--client",
                "ann",
                "--home",
                "h",
                *known,
            ),
            "round 1/100": terminal("demo", *demonstration(recipe, data)),
        }
        for what, program in programs.items():
            program.says(what)
        for program in programs.values():
            for number in (first, second, first):
                program.process.send_signal(number)
                time.sleep(0.05)
        for program in programs.values():
            assert program.ends(MINUTE) == code, program.text
            assert "Traceback" not in program.text
        assert not left(tmp_path)


def test_a_program_is_ended_though_whoever_waits_for_it_loses_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    program = process.Program([sys.executable, "-c", stubborn], tmp_path, tmp_path / "log")
    until(lambda: "up" in (tmp_path / "log").read_text(), "it ignores signals")

    sleep, lost, whoever_waits = time.sleep, [True], threading.current_thread()

    def impatient(seconds: float) -> None:
        if lost and threading.current_thread() is whoever_waits:
            lost.clear()
            raise KeyboardInterrupt
        sleep(seconds)

    monkeypatch.setattr(process.time, "sleep", impatient)
    with pytest.raises(KeyboardInterrupt):
        program.stop()
    monkeypatch.undo()
    assert program.poll() is not None
    assert not left(tmp_path)
