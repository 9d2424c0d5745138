"""A device: Flower's program for it, supervised."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from coterie.core import names
from coterie.core.errors import Refused
from coterie.deploy.keys import Link, free_port, there
from coterie.deploy.process import (
    AGAIN_S,
    Program,
    check_unused,
    last_lines,
    local_program,
    toml,
    watched,
)
from coterie.deploy.resident import private
from coterie.runs.device import limits


@dataclass(frozen=True)
class Node:
    """A client's device."""

    link: Link  # to the server
    home: Path  # the folder for state, logs and results
    client: str | None = None  # None: the only client of its data
    data: Path | None = None
    base: str | None = None  # path or Hub id of the base model
    key: Path | None = None  # the file of its private key; None: no keys
    resident: bool = True  # whether a process keeps the base loaded between messages
    secure: bool = False  # whether trained values are sent by secure aggregation only
    limits: Path | None = None  # the owner's file of limits, see `coterie.runs.device.limits`

    def check(self) -> None:
        """Raise Refused for settings that cannot work."""
        self.link.check()
        if self.client is not None and (mistake := names.mistake(self.client)):
            remedy = "Give the name that this client has in the server's data or keys."
            raise Refused(f"--client {self.client!r}: {mistake}", remedy)
        if self.limits is not None:
            limits.read(self.limits).check_installed()
        if self.key is not None:
            there(
                self.key, "the device's private key", "Copy it from the server's keys (clients/ID)."
            )
        elif self.link.ca is not None:
            raise Refused("a device needs its private key", "Give --key, or use --insecure.")
        if self.data is not None and not self.data.exists():
            problem = f"--data: {self.data} does not exist"
            raise Refused(problem, "Name the folder with this client's data.")

    @property
    def configuration(self) -> dict[str, Any]:
        """The configuration of the node for the programs that Flower starts."""
        places = {"home": self.home, "data": self.data, "limits": self.limits}
        settings = {key: path and str(path.resolve()) for key, path in places.items()} | {
            "client": self.client,
            "base": self.base,
            "resident": self.resident or None,
            "secure": self.secure or None,
        }
        return {key: value for key, value in settings.items() if value is not None}

    def supernode(self) -> list[str]:
        """Return the command line of its SuperNode."""
        config = " ".join(line.replace(" = ", "=", 1) for line in toml(self.configuration))
        options = {"--host": "127.0.0.1", "--port": str(free_port()), "--node-config": config}
        if self.key is not None:
            options["--auth-supernode-private-key"] = str(self.key)
        return [*local_program("flower-supernode"), *self.link.flags, *chain(*options.items())]


@contextmanager
def device(node: Node) -> Iterator["Supervisor"]:
    """Run a SuperNode and, if requested, its resident process; restart them whenever they end."""
    node.check()
    private(node.home)
    check_unused(node.home)
    supervisor = Supervisor(node)
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
    processes: dict[str, Program] = field(default_factory=dict)

    def look(self) -> list[str]:
        """Start the programs that do not run; return their names."""
        running, home = self.processes, self.node.home
        programs = ["resident"] * self.node.resident + ["supernode"]
        ended = [name for name in programs if name not in running or running[name].ended()]
        for name in ended:
            if name in running:
                running[name].stop()  # what it had started itself
            configuration = json.dumps(self.node.configuration)
            resident = [sys.executable, "-m", "coterie", "resident", configuration]
            command = resident if name == "resident" else self.node.supernode()
            running[name] = Program(command, home, home / f"{name}.log")
        return ended

    def watch(self) -> Iterator[str]:
        """Look again and again, whatever happens; yield messages for the user."""
        return watched(lambda: map(self._why, self.look()), AGAIN_S, "The device keeps running")

    def _why(self, name: str) -> str:
        log = self.node.home / f"{name}.log"
        reasons = [line for line in last_lines(log) if line.startswith(("[code", "coterie: "))]
        reason = reasons[-1] if reasons else ""
        if reason.startswith("[code: 2004]"):
            reason += (
                " The server does not know its key, or still counts its previous process as "
                "connected, for a minute at most."
            )
        return f"The {name} ended and is started again. {reason or f'Its log is {log}.'}"
