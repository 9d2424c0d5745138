"""What a killed process started ends with it; what is left all the same is named."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from terminals import Site, Terminal, demonstration, left, terminals, texts, until, written

from coterie.core.errors import Refused
from coterie.deploy import guard, process, server, supernode
from coterie.deploy.keys import Link, free_port
from coterie.deploy.supernode import Node

# A SuperLink starts others in groups of their own too, and waits for connections when it is told
# to end.
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
if len(sys.argv) > 1:
    subprocess.Popen([sys.executable, __file__, *sys.argv[2:]], start_new_session=True)
else:
    print("up", flush=True)
time.sleep(600)
"""
STARTS = """
import sys, time
from pathlib import Path
from coterie.deploy.process import Program
home = Path(sys.argv[1])
for name in "ab":
    script = str(home / "stubborn.py")
    Program([sys.executable, script, "child", "grandchild"], home, home / f"{name}.log")
time.sleep(600)
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process with two programs, each with a child and a grandchild that ignore signals."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    with subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)]) as starter:
        for name in "ab":
            log = tmp_path / f"{name}.log"
            until(lambda log=log: log.exists() and "up" in log.read_text(), "the grandchild")
        assert len(left(tmp_path)) == 7
        yield starter
        starter.kill()
    for number in left(tmp_path):
        os.kill(number, signal.SIGKILL)


def guard_of(starter: "subprocess.Popen[bytes]") -> psutil.Process:
    (found,) = (
        child
        for child in psutil.Process(starter.pid).children()
        if guard.__file__ in child.cmdline()
    )
    return found


def test_all_that_a_killed_process_started_ends(
    tmp_path: Path, started: "subprocess.Popen[bytes]"
) -> None:
    watching = guard_of(started)
    started.kill()
    until(lambda: not left(tmp_path), "all end", 20)
    until(lambda: not watching.is_running(), "so does the guard", 20)


def test_a_guard_outlives_signals_to_a_whole_group(
    tmp_path: Path, started: "subprocess.Popen[bytes]"
) -> None:
    watching = guard_of(started)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        watching.send_signal(number)
    started.terminate()
    until(lambda: not left(tmp_path), "all end", 20)


def test_what_is_left_over_is_named_at_the_next_start(
    tmp_path: Path, started: "subprocess.Popen[bytes]", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_ENDING_S", 0.5)
    guard_of(started).kill()
    started.kill()
    until(lambda: len(left(tmp_path)) == 4, "the programs themselves end", 20)
    node = Node(Link("127.0.0.1:9", None), tmp_path, resident=False)
    for start in (
        lambda: server.server(None, tmp_path, "127.0.0.1", free_port(), free_port()),
        lambda: supernode.device(node),
    ):
        with pytest.raises(Refused, match="is used by other programs") as refused, start():
            pass
        for number in left(tmp_path):
            assert f"process {number} since 20" in refused.value.problem
            assert str(number) in refused.value.remedy.partition("kill -9 ")[2].split()
        assert "stubborn.py" in refused.value.problem


def test_a_new_start_waits_for_what_is_being_ended(
    tmp_path: Path, started: "subprocess.Popen[bytes]"
) -> None:
    started.kill()
    process.check_unused(tmp_path)
    assert not left(tmp_path)


def test_whoever_holds_a_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert process.holder(port).startswith(f" It is held by process {os.getpid()} since 20")
    assert process.holder(port) == ""


def test_a_program_whose_executor_was_killed_counts_as_ended(tmp_path: Path) -> None:
    """Flower does not start it again: no task would ever be done."""
    (tmp_path / "flower-superexec").write_text("import time; time.sleep(600)")
    (tmp_path / "parent.py").write_text(
        "import subprocess, sys, time\n"
        "name = __file__.replace('parent.py', 'flower-superexec')\n"
        "subprocess.Popen([sys.executable, name]).wait()\n"
        "time.sleep(600)"
    )
    command = [sys.executable, str(tmp_path / "parent.py")]
    program = process.Program(command, tmp_path, tmp_path / "log")
    until(lambda: left(tmp_path, "flower-superexec"), "both run", 20)
    assert not program.ended()
    (number,) = left(tmp_path, "flower-superexec")
    os.kill(number, signal.SIGKILL)
    until(program.ended, "that is noticed", 20)
    assert program.ended(), "until it is started again"
    assert program.poll() is None
    program.stop()


def killed(terminal: Terminal, folder: Path, *words: str) -> None:
    assert left(folder, *words)
    terminal.process.kill()
    until(lambda: not left(folder, *words), "nothing is left", 20)


@pytest.mark.slow
def test_a_demonstration_that_is_killed_leaves_nothing_running(tmp_path: Path) -> None:
    data, recipe = texts(tmp_path / "texts", "ann", "ben"), written(tmp_path, method__rounds=1000)
    with terminals(tmp_path) as terminal:
        demo = terminal("demo", *demonstration(recipe, data))
        demo.says("round 1/1000")
        killed(demo, tmp_path)


@pytest.mark.slow
def test_a_submission_a_device_and_a_server_that_are_killed_leave_nothing_running(
    tmp_path: Path,
) -> None:
    with terminals(tmp_path) as terminal:
        site = Site(tmp_path, terminal, "ann", "ben")
        serving, device = site.server("ann", "ben"), site.client("ann")
        submission = site.submit(written(tmp_path), 2)
        submission.says("The server calls it run")
        until(lambda: left(tmp_path / "server", "flwr log"), "it follows the run")
        killed(submission, tmp_path / "server", "flwr log")
        until(lambda: left(tmp_path / "ann", "flower-superexec"), "the device is up")
        killed(device, tmp_path / "ann")
        killed(serving, tmp_path / "server")
