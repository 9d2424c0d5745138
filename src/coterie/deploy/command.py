"""Flower's command line, and its connection to a server."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.core.errors import ClientError
from coterie.core.printing import printable
from coterie.deploy.link import Link
from coterie.deploy.process import environment, program

NAME = "coterie"  # of the connection in the configuration of Flower's command line
_COMMAND_S = 120.0  # seconds for a command of Flower's


def _toml(values: Mapping[str, Any]) -> list[str]:
    """Return assignments in TOML: JSON values without escapes for halves of surrogate pairs."""
    return [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]


def configure(link: Link, home: Path) -> None:
    """Write the server's address for Flower's command line."""
    section = {"address": link.address} | (
        {"insecure": True} if link.ca is None else {"root-certificates": str(link.ca.resolve())}
    )
    lines = ["[superlink]", f'default = "{NAME}"', "", f"[superlink.{NAME}]", *_toml(section)]
    (home / "flwr").mkdir(parents=True, exist_ok=True)
    (home / "flwr" / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")


def flwr(arguments: Sequence[str], home: Path) -> str:
    """Run a command of Flower's and return its output. Raises ClientError with it on failure."""
    command, what = [program("flwr"), *arguments], f"flwr {' '.join(arguments[:2])}"
    try:
        done = subprocess.run(
            command,
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
        raise ClientError(
            f"{what} failed:\n{printable((done.stdout + done.stderr).strip()[-3000:], lines=True)}"
        )
    return done.stdout


def _flwr_json(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """Return the JSON output of a command. With JSON, a failing command exits with 0 and reports
    the error in its output. Raises ClientError with it.
    """
    output = flwr([*arguments, "--format", "json"], home)
    try:
        answer: dict[str, Any] = json.loads(output)
    except ValueError:
        raise ClientError(
            f"flwr {' '.join(arguments[:2])} answered no JSON:\n"
            f"{printable(output[-3000:], lines=True)}"
        ) from None
    if not answer.get("success", True):
        problem = printable(str(answer.get("error-message", answer)), lines=True)
        raise ClientError(f"flwr {' '.join(arguments[:2])} failed:\n{problem}")
    return answer


def register(key: Path, home: Path) -> str:
    """Register a device's public key with the server; return the number of its node. Raises
    ClientError if it is not a key, or is registered already.
    """
    return str(_flwr_json(["supernode", "register", str(key), NAME], home)["node-id"])
