"""A device: Flower's program for it, supervised."""

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.core import names
from coterie.core.errors import CoterieError, Refused
from coterie.deploy.command import _toml
from coterie.deploy.link import Link, _there, free_port
from coterie.deploy.process import (
    _AGAIN_S,
    Program,
    _last_lines,
    _RateLimit,
    check_unused,
    local_program,
)
from coterie.deploy.resident import private
from coterie.runs.device import limits


@dataclass(frozen=True)
class Node:
    """A client's device.

    Args:
        link: To the server.
        home: Folder for state, logs and results.
        client: Its client id; None: the only client of its data.
        data: Path of its data.
        base: Path or Hub id of the base model.
        key: The file of its private key; None: no keys.
        resident: Whether a process keeps the base loaded between messages.
        secure: Whether trained values are sent by secure aggregation only.
        limits: The owner's file of limits, see `coterie.runs.device.limits`; None: without.
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
        """Raise Refused for settings that cannot work."""
        self.link.check()
        if self.client is not None and (mistake := names.mistake(self.client)):
            raise Refused(
                f"--client {self.client!r}: {mistake}",
                "Give the name that this client has in the server's data or keys.",
            )
        if self.limits is not None:
            limits.read(self.limits).check_installed()
        if self.key is not None:
            _there(
                self.key, "the device's private key", "Copy it from the server's keys (clients/ID)."
            )
        elif self.link.ca is not None:
            raise Refused("a device needs its private key", "Give --key, or use --insecure.")
        if self.data is not None and not self.data.exists():
            raise Refused(
                f"--data: {self.data} does not exist", "Name the folder with this client's data."
            )

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration of the node for the programs that Flower starts."""
        places = {"home": self.home, "data": self.data, "limits": self.limits}
        settings = {key: path and str(path.resolve()) for key, path in places.items()} | {
            "client": self.client,
            "base": self.base,
        }
        switches = {"resident": self.resident, "secure": self.secure}
        return {k: v for k, v in settings.items() if v is not None} | {
            k: True for k, on in switches.items() if on
        }

    def resident_command(self) -> list[str]:
        """Return the command line of its resident process."""
        return [sys.executable, "-m", "coterie", "resident", json.dumps(self.configuration)]

    def supernode(self) -> list[str]:
        """Return the command line of its SuperNode."""
        config = " ".join(line.replace(" = ", "=", 1) for line in _toml(self.configuration))
        port = free_port()
        keys = ["--auth-supernode-private-key", str(self.key)] if self.key is not None else []
        return [
            *local_program("flower-supernode"),
            *self.link.flags,
            *keys,
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--node-config",
            config,
        ]


@contextmanager
def device(node: Node) -> Iterator["Supervisor"]:
    """Run a SuperNode and, if requested, its resident process; restart them whenever they end."""
    node.check()
    private(node.home)
    check_unused(node.home)
    supervisor = Supervisor(node, {})
    try:
        supervisor.look()
        yield supervisor
    finally:
        for process in supervisor.processes.values():
            process.stop()


@dataclass
class Supervisor:
    """A supervisor that starts the programs of a device, and restarts each that ends."""

    node: Node
    processes: dict[str, Program]

    def look(self) -> list[str]:
        """Start the programs that do not run; return their names."""
        ended = [
            name
            for name in self._names
            if name not in self.processes or self.processes[name].ended()
        ]
        for name in ended:
            if name in self.processes:
                self.processes[name].stop()  # what it had started itself
            command = self.node.resident_command() if name == "resident" else self.node.supernode()
            self.processes[name] = Program(command, self.node.home, self.node.home / f"{name}.log")
        return ended

    @property
    def _names(self) -> list[str]:
        return ["resident", "supernode"] if self.node.resident else ["supernode"]

    def watch(self) -> Iterator[str]:
        """Look again and again, whatever happens; yield messages for the user."""
        new_messages = _RateLimit()
        while True:
            time.sleep(_AGAIN_S)
            yield from new_messages.new(self._outlived())

    def _outlived(self) -> Iterator[str]:
        """Check everything once; errors become messages."""
        try:
            yield from map(self._why, self.look())
        except (OSError, CoterieError) as error:
            yield f"The device keeps running, but: {error}"

    def _why(self, name: str) -> str:
        log = self.node.home / f"{name}.log"
        reason = next(
            (
                line
                for line in reversed(_last_lines(log))
                if line.startswith(("[code", "coterie: "))
            ),
            "",
        )
        if reason.startswith("[code: 2004]"):
            reason += (
                " The server does not know its key, or still counts its previous process as "
                "connected, for a "
                "minute at most."
            )
        return f"The {name} ended and is started again. {reason or f'Its log is {log}.'}"
