"""Submission of a run to a server, and its output."""

import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from coterie.core.errors import ClientError, Refused
from coterie.core.printing import printable
from coterie.deploy.command import NAME, _flwr_json, _toml, configure
from coterie.deploy.link import Link, listening
from coterie.deploy.process import _COLOUR, environment, program

APP = """[project]
name = "coterie"
version = "0.1.0"

[tool.flwr.app]
publisher = "coterie"

[tool.flwr.app.components]
serverapp = "coterie.deploy.apps:server"
clientapp = "coterie.deploy.apps:client"

[tool.flwr.app.config]
recipe = "quickstart"
set = ""
seed = -1
out = ""
resume = false
changed = false
clients = 2
patience = 600.0
track = ""
"""
_ERROR = re.compile(r"ERROR +:")
_CHATTER = re.compile(
    r"INFO +:|Using SuperLink|Successfully installed|$"
)  # of Flower's, between the lines of a run


def submit(link: Link, home: Path, config: Mapping[str, Any], say: Callable[[str], None]) -> str:
    """Have a server run a recipe on its devices, and wait for its end.

    Args:
        link: To the server.
        home: For Flower's files.
        config: Keys of `[tool.flwr.app.config]`.
        say: Called with each line that the run prints.

    Returns:
        The run's id.

    Raises:
        Refused: The server is not there.
        ClientError: Flower refused the run, it failed, or the connection to the server was lost.
    """
    link.check()
    if not link.answers("control"):
        raise Refused(
            f"no server answers at {link.address}",
            "Start `coterie server`. It accepts runs from its own machine only.",
        )
    configure(link, home)
    with tempfile.TemporaryDirectory() as folder:
        app = Path(folder)
        (app / "pyproject.toml").write_text(APP)
        (app / "run.toml").write_text("\n".join(_toml(config)), encoding="utf-8")
        run = str(
            _flwr_json(["run", str(app), NAME, "--run-config", str(app / "run.toml")], home)[
                "run-id"
            ]
        )
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
            "with the "
            "run's folder.",
        ) from None
    return run


def _follow(run: str, home: Path, say: Callable[[str], None]) -> None:
    """Pass on a run's output until it ends or the connection is lost."""
    arguments, env = (
        [program("flwr"), "log", run, NAME, "--stream"],
        environment(home) | {"PYTHONUNBUFFERED": "1"},
    )
    with subprocess.Popen(
        arguments,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as log:
        try:
            failed = False
            for line in log.stdout or ():
                plain = _COLOUR.sub("", line.rstrip())
                failed = failed or plain.startswith("coterie: ")
                if failed and _ERROR.match(plain):
                    return  # the same error again, with Flower's traceback
                if not _CHATTER.match(plain):
                    say(printable(plain))
        finally:
            log.terminate()


def _status(run: str, home: Path) -> str:
    """Return a run's status: `running`, `finished:completed`, `finished:failed`, ..."""
    return str(_flwr_json(["list", NAME, "--run-id", run], home)["runs"][0]["status"])


def _finish(run: str, home: Path) -> None:
    """Wait until a run has ended. Raises ClientError if it failed."""
    while not (status := _status(run, home)).startswith("finished"):
        time.sleep(1.0)
    if status != "finished:completed":
        remedy = f"Its output: FLWR_HOME={home / 'flwr'} flwr log {run} {NAME} --show"
        raise ClientError(f"the run ended as {status.removeprefix('finished:')}", remedy)
