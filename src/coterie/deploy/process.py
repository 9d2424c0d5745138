"""Flower's programs as processes of this machine, which end with the one that started them, and its
command line, which registers devices, submits a run and follows its output.
"""

import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil

from coterie.core.errors import ClientError, CoterieError, Refused, extra
from coterie.core.foreign import read_bytes
from coterie.core.printing import printable
from coterie.deploy import guard
from coterie.deploy.keys import Link, listening, unknown
from coterie.engines.flower import POSTED

# No telemetry, no installations, and a look for new messages ten times a second.
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
}
_HERE = ("127.0.0.1", "localhost", "::1")
_UP_S = 60.0  # seconds for a program to come up
AGAIN_S = 5.0  # seconds before a program that ended is started again
_IN_USE = "COTERIE_HOME_IN_USE"  # in the environment of the programs that work in a folder
_EXECUTOR = "flower-superexec"  # a program of a SuperLink or SuperNode that starts its tasks
_TAIL = 1 << 16  # bytes at the end of a log that are read
TELL_AGAIN_S = 600.0  # seconds until the same message is passed again
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
_ENDING_S = 10.0  # seconds for ending programs to end
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def posted(home: Path) -> Path:
    """Return the file that a run below `home` touches once it has sent messages to devices."""
    return home.resolve() / "posted"


def environment(home: Path) -> dict[str, str]:
    """Return the environment of Flower's programs, which keep their files below `home`. A guard
    ends them once this process has ended.
    """
    # this machine's own traffic stays off proxies (gRPC's, Python's)
    names = ("no_proxy", "NO_PROXY", "no_grpc_proxy")
    given = dict.fromkeys(filter(None, map(os.environ.get, names)))
    variables = dict.fromkeys(names, ",".join([*given, *_HERE])) | {
        "FLWR_HOME": str((home / "flwr").resolve()),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
        POSTED: str(posted(home)),
        guard.MARK: _guarded(),
    }
    return _QUIET | os.environ | variables


def program(name: str) -> str:
    """Return the path of one of Flower's programs. Raises Refused if Flower is not installed."""
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.is_file() else shutil.which(name)
    if path is None:
        raise Refused(f"{name} is not installed", extra("flower"))
    return path


def local_program(name: str) -> list[str]:
    """Return the beginning of a command line that runs one of Flower's programs, with a port that
    answers only under this machine's names. Raises Refused without Flower.
    """
    wrapper = Path(__file__).with_name("local_program.py")
    return [sys.executable, "-P", str(wrapper), program(name)]


@cache
def _guarded() -> str:
    """Return the mark of all processes that this one starts. A guard ends them once this process
    has ended: it waits until the pipe is closed whose end is held here.
    """
    mark = uuid4().hex
    waiting, _ = os.pipe()
    subprocess.Popen(
        [sys.executable, "-P", guard.__file__, mark],
        stdin=waiting,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(waiting)
    return mark


class Program(subprocess.Popen[bytes]):
    """A program in a separate process group that ends with this process and logs to a file. All
    processes that it starts, in further groups, have its mark in their environment.
    """

    def __init__(self, arguments: Sequence[str], home: Path, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._mark, self._had_executor = f"{_guarded()}-{uuid4().hex}", False
        with open(log, "ab") as out:
            super().__init__(
                arguments,
                env=environment(home) | {guard.MARK: self._mark, _IN_USE: str(home.resolve())},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
                # it makes one system call, and takes no lock that another thread may hold
                preexec_fn=_with_us,
            )

    def ended(self) -> bool:
        """Whether it has ended, or its starter of tasks, which Flower does not restart."""
        started = guard.processes(guard.MARK, self._mark)
        has_executor = any(_EXECUTOR in _command_line(process) for process in started)
        self._had_executor |= has_executor
        return self.poll() is not None or (self._had_executor and not has_executor)

    def stop(self, patience: float = 10.0) -> None:
        """End it and what it started, with SIGTERM and, after `patience` seconds, SIGKILL."""
        try:
            guard.end(self._mark, patience)
        finally:  # the wait may have been interrupted
            guard.kill(self._mark)
            self.wait()


def _with_us() -> None:
    """In a new process: end with the one that started it, even if the guard is gone (Linux)."""
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def check_unused(home: Path) -> None:
    """Wait for programs that are ending; raise Refused, naming them, if some still use a folder."""
    deadline = time.monotonic() + _ENDING_S
    while programs := guard.processes(_IN_USE, str(home.resolve())):
        if time.monotonic() > deadline:
            numbers = " ".join(str(process.pid) for process in programs)
            raise Refused(
                f"{home} is used by other programs: {'; '.join(map(_described, programs))}",
                "Stop the coterie server or client that uses it, or choose another --home. If it "
                f"was killed, end what it left: kill -9 {numbers}",
            )
        time.sleep(0.1)


def holder(port: int) -> str:
    """Return a sentence that names the program listening on a port here; "" if it is unknown."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for one in process.net_connections("tcp"):
                if one.status == psutil.CONN_LISTEN and one.laddr.port == port:
                    return f" It is held by {_described(process)}."
    return ""


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _described(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        started = datetime.fromtimestamp(process.create_time())
        shown = printable(_command_line(process))[:200]
        return f"process {process.pid} since {started:%Y-%m-%d %H:%M:%S} ({shown})"
    return f"process {process.pid}"


def watched(look: Callable[[], Iterable[str]], pause: float, keeps_running: str) -> Iterator[str]:
    """Call `look` again and again, `pause` seconds apart; yield its messages, printable, and each
    once in ten minutes. An error becomes a message that begins with `keeps_running`.
    """
    when: dict[str, float] = {}
    while True:
        for message in _outlived(look, keeps_running):
            now = time.monotonic()
            when = {old: then for old, then in when.items() if now - then < TELL_AGAIN_S}
            if message not in when:
                when[message] = now
                yield printable(message)
        time.sleep(pause)


def _outlived(look: Callable[[], Iterable[str]], keeps_running: str) -> Iterator[str]:
    """Yield the messages of a look; an error becomes a message."""
    try:
        yield from look()
    except (OSError, CoterieError) as error:
        yield f"{keeps_running}, but: {error}"


def wait_for(ready: Callable[[], bool], process: Program, log: Path) -> None:
    """Wait until a program is ready. Raises ClientError with its log if it ends or is too slow."""
    end = time.monotonic() + _UP_S
    while not ready():
        if process.poll() is not None or time.monotonic() > end:
            tail = "\n".join(last_lines(log))
            problem = f"{log.stem} is not running; its log ends:\n{tail}"
            raise ClientError(problem, f"The whole log is {log}.")
        time.sleep(0.2)


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log, printable."""
    with open(log, "rb") as file:
        file.seek(max(os.fstat(file.fileno()).st_size - _TAIL, 0))
        text = file.read(_TAIL).decode(errors="replace")
    return [printable(line) for line in COLOUR.sub("", text).splitlines()[-15:]]


NAME = "coterie"  # of the connection in the configuration of Flower's command line
_COMMAND_S = 120.0  # seconds for a command of Flower's
APP = Path(__file__).with_name("app.toml")  # the project that Flower is given
_PUBLISHED = """version = "0.1.0"
description = "Personal models, trained together by coterie"
license = { file = "LICENSE" }
dependencies = ["flwr>=1.41,<1.43"] # and coterie, which server and devices have installed"""
_FORMAT = """publisher = "me" # your account at flower.ai
fab-format-version = 1
flwr-version-target = "1.41.0\""""
_ERROR = re.compile(r"ERROR +:")
# what Flower prints between the lines of a run
_CHATTER = re.compile(r"INFO +:|Using SuperLink|Successfully installed|$")


def toml(values: Mapping[str, Any]) -> list[str]:
    """Return assignments in TOML: JSON values without escapes for halves of surrogate pairs."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def app_files(name: str) -> dict[str, str]:
    """Return the files of a Flower app of this name that can be published (fab-format-version 1):
    coterie's programs, in a package of the app's own that its bundle holds.
    """
    package, about = name.replace("-", "_"), APP.read_text(encoding="utf-8")
    for before, after in {
        'name = "coterie"\nversion = "0.1.0"': f'name = "{name}"\n{_PUBLISHED}',
        'publisher = "coterie"': _FORMAT,
        "coterie.deploy.apps:server": f"{package}.server_app:app",
        "coterie.deploy.apps:client": f"{package}.client_app:app",
    }.items():
        about = about.replace(before, after, 1)
    program = '"""The program of {0}."""\n\nfrom coterie.deploy import apps\n\napp = apps.{1}\n'
    return {
        "pyproject.toml": about,
        "LICENSE": "All rights reserved, until you put the licence of your choice here.\n",
        f"{package}/__init__.py": f'"""The Flower app {name}."""\n',
        f"{package}/server_app.py": program.format("the server", "server"),
        f"{package}/client_app.py": program.format("each device", "client"),
    }


def configure(link: Link, home: Path) -> None:
    """Write the server's address for Flower's command line."""
    section = {"address": link.address} | (
        {"insecure": True} if link.ca is None else {"root-certificates": str(link.ca.resolve())}
    )
    lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", *toml(section)]
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    (home / "flwr" / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def flwr(arguments: Sequence[str], home: Path) -> str:
    """Run a command of Flower's and return its output. Raises ClientError with it on failure."""
    what = f"flwr {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(
            [program("flwr"), *arguments],
            env=environment(home),
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_COMMAND_S,
        )
    except subprocess.TimeoutExpired:
        raise ClientError(f"{what} did not end within {_COMMAND_S:g} s") from None
    if done.returncode:
        output = (done.stdout + done.stderr).strip()[-3000:]
        raise ClientError(f"{what} failed:\n{printable(output, lines=True)}")
    return done.stdout


def _flwr_json(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """Return the JSON output of a command. Raises ClientError: errors exit with 0 here."""
    output, what = flwr([*arguments, "--format", "json"], home), f"flwr {' '.join(arguments[:2])}"
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        problem = printable(output[-3000:], lines=True)
        raise ClientError(f"{what} answered no JSON:\n{problem}") from None
    if not answer.get("success", True):
        problem = printable(str(answer.get("error-message", answer)), lines=True)
        raise ClientError(f"{what} failed:\n{problem}")
    return answer


def register(key: Path, home: Path) -> str:
    """Register a public key; return its node's id. Raises ClientError: invalid or registered."""
    return str(_flwr_json(["supernode", "register", str(key), NAME], home)["node-id"])


def submit(link: Link, home: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> None:
    """Have a server run a recipe on its devices, with keys of `[tool.flwr.app.config]`, and wait
    for its end. `say` is called with each line of the run's output, `home` is the folder of
    Flower's files. Raises Refused if the server is not there, ClientError if Flower refused the
    run, it failed, or the connection to the server was lost.
    """
    link.check()
    if not link.answers("control"):
        raise Refused(
            f"no server answers at {link.address}.{unknown(link.address)}".rstrip("."),
            "Start `coterie server`. It accepts runs from its own machine only.",
        )
    configure(link, home)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "run.toml"
        settings.with_name("pyproject.toml").write_bytes(read_bytes(APP))
        settings.write_text("\n".join(toml(config)), encoding="utf-8")
        started = _flwr_json(["run", folder, NAME, "--run-config", str(settings)], home)
    run = str(started["run-id"])
    say(
        f"The server calls it run {run}; its folder there is {config['out']}. To stop it: "
        f"FLWR_HOME={home / 'flwr'} flwr stop {run} {NAME}"
    )
    try:
        _follow(run, home, say)
        _finish(run, home)
    except ClientError:
        if listening(link.address):
            raise
        raise ClientError(
            "the connection to the server was lost",
            "Start the server again, then the run: the same command with --resume, and --out "
            "with the run's folder.",
        ) from None


def _follow(run: str, home: Path, say: Callable[[str], None]) -> None:
    """Pass on a run's output until it ends or the connection is lost."""
    with subprocess.Popen(
        [program("flwr"), "log", run, NAME, "--stream"],
        env=environment(home) | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as log:
        try:
            failed = False
            for line in log.stdout or ():
                plain = COLOUR.sub("", line.rstrip())
                failed = failed or plain.startswith("coterie: ")
                if failed and _ERROR.match(plain):
                    return  # the same error again, with Flower's traceback
                if not _CHATTER.match(plain):
                    say(printable(plain))
        finally:
            log.terminate()


def _finish(run: str, home: Path) -> None:
    """Wait until a run has ended. Raises ClientError if it failed."""

    def status() -> str:  # `running`, `finished:completed`, `finished:failed`, ...
        return str(_flwr_json(["list", NAME, "--run-id", run], home)["runs"][0]["status"])

    while not (end := status()).startswith("finished"):
        time.sleep(1.0)
    if end != "finished:completed":
        remedy = f"Its output: FLWR_HOME={home / 'flwr'} flwr log {run} {NAME} --show"
        raise ClientError(f"the run ended as {end.removeprefix('finished:')}", remedy)
