"""Flower's command line: it registers devices, submits a run and follows its output."""

import json
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import ClientError, Refused
from coterie.core.foreign import read_bytes
from coterie.core.printing import printable
from coterie.deploy.link import Link, listening, unknown
from coterie.deploy.process import COLOUR, environment, program

NAME = "coterie"  # of the connection in the configuration of Flower's command line
_COMMAND_S = 120.0  # seconds for a command of Flower's
APP = Path(__file__).with_name("app.toml")  # the project that Flower is given
_ERROR = re.compile(r"ERROR +:")
# what Flower prints between the lines of a run
_CHATTER = re.compile(r"INFO +:|Using SuperLink|Successfully installed|$")


def toml(values: Mapping[str, Any]) -> list[str]:
    """Return assignments in TOML: JSON values without escapes for halves of surrogate pairs."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


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
    Flower's files.

    Raises:
        Refused: The server is not there.
        ClientError: Flower refused the run, it failed, or the connection to the server was lost.
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
