"""What a device and a server refuse before anything starts, and that imports stay light."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import cast

import pytest
from terminals import left, until
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.deploy import keys, server, supernode
from coterie.deploy import process as processes
from coterie.deploy.keys import Link, free_port
from coterie.deploy.supernode import Node, Supervisor

REPOSITORY = Path(__file__).parents[2]


def refused(*arguments: str) -> str:
    """What the command line says to arguments that it refuses."""
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 2, done.output
    return done.output


@pytest.mark.parametrize("address", ["localhost", ":9500", "localhost:", "localhost:http", ""])
def test_an_address_is_a_host_and_a_port(address: str) -> None:
    with pytest.raises(Refused, match="HOST:PORT"):
        Link(address, None).check()


def test_what_a_device_needs(tmp_path: Path) -> None:
    keys.make(tmp_path, [], ["ann"])
    link, key = Link("127.0.0.1:9", tmp_path / "ca.crt"), tmp_path / "clients/ann"
    Node(link, tmp_path / "home", key=key, data=tmp_path).check()
    for node, problem in (
        (
            Node(Link(link.address, tmp_path / "other.crt"), tmp_path, key=key),
            r"other\.crt.*authority",
        ),
        (Node(link, tmp_path), "needs its private key"),
        (Node(link, tmp_path, key=tmp_path / "bob"), "bob.*private key does not exist"),
        (
            Node(link, tmp_path, key=key, data=tmp_path / "nothing"),
            "--data.*nothing does not exist",
        ),
    ):
        with pytest.raises(Refused, match=problem):
            node.check()


def test_nobody_may_be_there_and_that_is_no_mistake(tmp_path: Path) -> None:
    keys.make(tmp_path, [], [])
    for ca in (None, tmp_path / "ca.crt"):
        assert not Link(f"127.0.0.1:{free_port()}", ca).answers("fleet")


def test_the_configuration_of_a_node_survives_flowers_parser(tmp_path: Path) -> None:
    from flwr.common.config import parse_config_args

    home = tmp_path / "a b='c'"
    node = Node(Link("127.0.0.1:9", None), home, "ann", tmp_path)
    command = node.supernode()
    assert parse_config_args([command[command.index("--node-config") + 1]]) == {
        "home": str(home),
        "client": "ann",
        "data": str(tmp_path),
        "resident": True,
    }


def test_the_project_is_the_app_that_is_submitted() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["flwr"]["app"]
    assert {key: project[key] for key in ("publisher", "components", "config")} == tomllib.loads(
        processes.APP.read_text()
    )["tool"]["flwr"]["app"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["server"], "--keys"),
        (["server", "--keys", "nowhere"], "coterie keys"),
        (["server", "--keys", "nowhere", "--insecure"], "--insecure"),
        (["client", "--server", "localhost:9"], "--ca and --key"),
        (["client", "--server", "localhost:9", "--ca", "pyproject.toml"], "authority"),
        (["client", "--server", "localhost:9", "--ca", "a", "--insecure"], "--insecure"),
        (["client", "--server", "localhost", "--insecure"], "HOST:PORT"),
        (["client", "--server", "localhost:9", "--insecure", "--data", "nowhere"], "--data"),
        (
            ["client", "--server", "localhost:9", "--insecure", "--limits", "nowhere.yaml"],
            "limits nowhere.yaml: cannot be read (No such file",
        ),
        (["submit", "quickstart", "--server", "localhost:9"], "--ca or --insecure"),
        (["submit", "quickstart", "--server", "localhost:9", "--insecure", "--resume"], "--out"),
        (
            ["submit", "quickstart", "--server", "localhost:9", "--insecure", "--track", "neptune"],
            "--track neptune: there is no such tracker",
        ),
        (
            [
                "submit",
                "quickstart",
                "--server",
                "localhost:9",
                "--insecure",
                "--set",
                "method.rounds=x",
            ],
            "method.rounds",
        ),
        (
            ["submit", "quickstart", "--server", "localhost:9", "--insecure"],
            "no server answers at localhost:9",
        ),
        (["deploy"], "--demo"),
        (["deploy", "--demo", "--recipe", "nothing"], "nothing"),
    ],
)
def test_the_command_line_says_which_option_is_wrong(
    arguments: list[str], named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert named in refused(*arguments)
    assert not list(tmp_path.iterdir())


def test_ports_that_are_taken_are_refused(tmp_path: Path) -> None:
    keys.make(tmp_path / "keys", [], ["ann"])
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port, free = str(taken.getsockname()[1]), str(free_port())
        common = [
            "server",
            "--keys",
            str(tmp_path / "keys"),
            "--host",
            "127.0.0.1",
            "--home",
            str(tmp_path / "home"),
        ]
        assert f"port {port} is in use\n  Choose another --port." in refused(
            *common, "--port", port, "--runs-port", free
        )
        assert "Choose another --runs-port." in refused(
            *common, "--port", free, "--runs-port", port
        )
    assert "--port and --runs-port" in refused(*common, "--port", free, "--runs-port", free)
    assert "--runs-port" in refused(*common, "--port", "65535")


@pytest.mark.parametrize(
    ("code", "without"),
    [
        (
            "from coterie.cli.base import app; app(['--help'], standalone_mode=False)",
            ("torch", "flwr", "cryptography"),
        ),
        ("import coterie.deploy.apps", ("torch", "transformers")),
        ("import coterie.deploy.server", ("torch", "flwr")),
    ],
)
def test_heavy_libraries_wait_until_they_are_needed(code: str, without: tuple[str, ...]) -> None:
    told = (
        f"{code}\nimport sys; print('loaded', *(name for name in {without!r} if name in "
        f"sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert re.search(r"^loaded\n\Z", done.stdout, re.MULTILINE), done.stdout[-500:]


def test_what_a_program_starts_in_groups_of_their_own_ends_with_it(tmp_path: Path) -> None:
    """Flower's programs start others like that, and some do not end when they are asked to."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', "
        "flush=True); time.sleep(600)"
    )
    parent = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}], "
        f"start_new_session=True); time.sleep(600)"
    )
    for dies_before in (False, True):
        log = tmp_path / f"{dies_before}.log"
        program = processes.Program([sys.executable, "-c", parent], tmp_path, log)
        until(lambda log=log: "up" in log.read_text(), "the grandchild")
        assert len(left(tmp_path)) == 2
        if dies_before:
            program.kill()
        program.stop(patience=0.5)
        assert not left(tmp_path)


def test_a_supervisor_starts_again_what_has_ended_and_says_why_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Node,
        "supernode",
        lambda node: ["sh", "-c", "echo '[code: 2004] Failed to activate SuperNode.'"],
    )
    monkeypatch.setattr(processes, "AGAIN_S", 0.05)
    monkeypatch.setattr(supernode, "AGAIN_S", 0.05)
    said: list[str] = []

    class Enough(Exception):
        """The end of what would go on for ever, also in the tests that follow."""

    def look(supervisor: Supervisor) -> list[str]:
        raise Enough

    def listen() -> None:
        with contextlib.suppress(Enough):
            said.extend(supervisor.watch())  # takes each line as it comes

    with supernode.device(Node(Link("127.0.0.1:9", None), tmp_path, resident=False)) as supervisor:
        listener = threading.Thread(target=listen, daemon=True)
        listener.start()
        until(
            lambda: (tmp_path / "supernode.log").read_text().count("2004") >= 4,
            "it was started again and again",
        )
        monkeypatch.setattr(Supervisor, "look", look)
        listener.join(60)
        assert not listener.is_alive()
    assert said == [
        "The supernode ended and is started again. [code: 2004] Failed to activate SuperNode."
        " The server does not know its key, or still counts its previous process as "
        "connected, for a minute at most."
    ]
    assert not left(tmp_path)


def test_a_server_knows_the_devices_whose_keys_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With what Flower's commands answer written down: a key that had a node once is refused for
    good.
    """
    seen: list[str] = []

    def flower(arguments: list[str], home: Path) -> str:
        action, what = arguments[1:3]
        if action == "unregister":
            seen.append(f"- {what}")
            return ""
        key = Path(what).read_text()
        if key in used:
            return json.dumps({"success": False, "error-message": "Public key already in use"})
        used[key] = f"node of {Path(what).stem}"
        seen.append(f"+ {used[key]}")
        return json.dumps({"success": True, "node-id": used[key]})

    used: dict[str, str] = {}
    monkeypatch.setattr(processes, "flwr", flower)
    keys.make(tmp_path, [], ["ann", "ben"])
    link, process = Link("127.0.0.1:9", None), cast("processes.Program", None)
    first = server.Server(link, link, tmp_path, tmp_path, process, {})
    assert list(first.look()) == [
        "The device of ann is registered.",
        "The device of ben is registered.",
    ]
    assert list(first.look()) == []
    (tmp_path / "clients/ann.pub").rename(tmp_path / "ann.pub")
    assert list(first.look()) == ["The device of ann is removed: its public key no longer exists."]
    (tmp_path / "ann.pub").rename(tmp_path / "clients/ann.pub")
    assert [line.partition(" was refused")[1] for line in first.look()] == [" was refused"]
    assert list(first.look()) == []
    second = server.Server(
        link, link, tmp_path, tmp_path, process, json.loads((tmp_path / server.NODES).read_text())
    )
    (tmp_path / "clients/ann.pub").unlink()
    assert list(second.look()) == []
    assert seen == ["+ node of ann", "+ node of ben", "- node of ann"]
    assert list(server.Server(link, link, None, tmp_path, process, {}).look()) == []


@pytest.mark.parametrize("failed", [False, True])
def test_what_a_run_prints_is_shown_without_flowers_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failed: bool
) -> None:
    problem = "coterie: runs/a already holds a run\n  Choose another --out.\n"
    lines = "Using SuperLink: coterie (127.0.0.1:9)\n"
    lines += (
        "\x1b[92mINFO \x1b[0m:      Starting\n  round 1/2  loss 3.1\n\n\x1b[93mWARNING \x1b[0m:  "
        " odd\n"
    )
    error = (
        "\x1b[91mERROR \x1b[0m:     ServerApp raised an exception\nTraceback (most recent call "
        "last):\n"
    )
    log = tmp_path / "flwr"
    log.write_text(f"#!/bin/sh\ncat <<'END'\n{lines}{problem if failed else ''}{error}END\n")
    log.chmod(0o755)
    monkeypatch.setattr(processes, "program", lambda name: str(log))
    said: list[str] = []
    processes._follow("1", tmp_path, said.append)
    last = (
        problem.splitlines()
        if failed
        else ["ERROR :     ServerApp raised an exception", "Traceback (most recent call last):"]
    )
    assert said == ["  round 1/2  loss 3.1", "WARNING :   odd", *last]
