"""The two programs that Flower starts: `server` beside a SuperLink for every run, `client` on a
device for every message. `[tool.flwr.app]` of pyproject.toml has their names and configuration
keys.
"""

import os
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.errors import CoterieError, Refused
from coterie.core.foreign import json_of
from coterie.core.printing import printable
from coterie.core.threads import wait_briefly
from coterie.deploy import resident
from coterie.engines.flower.apps import client_app, server_app

if TYPE_CHECKING:
    from coterie.engines.flower.engine import Grid
    from coterie.runs.device.device import Device
    from coterie.runs.recipes.recipe import Recipe


def answer(node: Mapping[str, Any], text: str, body: bytes) -> tuple[str, bytes]:
    """Return a device's reply to a request, as JSON and tensors.

    `node` is the node's configuration: `client`, `data`, `base`, `home` and `secure`, see `Device`;
    `limits`, the path of a file; `resident: true` if a process serves the folder `home`; in
    Flower's simulation `partition-id`.
    """
    if node.get("resident"):
        return resident.ask(Path(str(node["home"])), text, body)
    return device(node).answer(text, body)


def device(node: Mapping[str, Any]) -> "Device":
    """Return the device of a node's configuration. Raises Refused for an invalid file of limits."""
    from coterie.core import names
    from coterie.runs.device import limits
    from coterie.runs.device.device import Device

    client, data, base = (
        None if node.get(key) is None else str(node[key]) for key in ("client", "data", "base")
    )
    home = Path(str(node["home"])) if "home" in node else default_home()
    if client is None and "partition-id" in node:
        return Device(home, index=int(node["partition-id"]))
    return Device(
        home,
        client and names.normal(client),
        None if data is None else Path(data),
        base,
        secure=bool(node.get("secure")),
        limits=limits.read(Path(str(node["limits"]))) if "limits" in node else limits.Limits(),
    )


def serve(grid: "Grid", config: Mapping[str, Any]) -> None:
    """Run a recipe on the devices of Flower's grid. Raises Refused, before any device is asked, if
    the recipe, the folder or a tracker is invalid; CoterieError if the run failed.

    `config` has `recipe`, a name, a path on this machine, or a complete recipe as JSON; `set`,
    KEY=VALUE texts with ; between them; `seed`, -1 for the recipe's; `out`, a folder on this
    machine; `resume` and `changed`, see `run`; `clients`, the number to wait for, at most
    `patience` seconds; `track`, trackers of this machine with ; between them.
    """
    from rich.console import Console

    from coterie.core.callback import Callbacks
    from coterie.reports.html import write_report
    from coterie.reports.progress import Terminal
    from coterie.reports.trackers import tracked
    from coterie.runs import run
    from coterie.runs.backends import DeviceBackend

    try:
        recipe = _recipe(config)
        folder = Path(str(config["out"]) or f"runs/{recipe.name}-{datetime.now():%Y%m%d-%H%M%S}")
        console = Console(force_terminal=False, width=160)
        with (
            tracked(_parts(config.get("track", "")), folder) as trackers,
            Terminal(console, 1 + len(recipe.compare_with)) as terminal,
        ):
            reporter = Callbacks([terminal, *trackers])
            clients, patience = int(config["clients"]), float(config["patience"])
            warnings = run.JoinWarnings(reporter)
            backend = DeviceBackend.connect(grid, recipe, clients, patience, warnings)
            resume, changed = bool(config["resume"]), bool(config.get("changed", False))
            results = run.run(
                recipe, folder, resume=resume, changed=changed, reporter=reporter, backend=backend
            )
            write_report(folder, results, recipe.description)
        last, where = results[-1], f"everything is in {folder.resolve()}"
        print(f"{last.metric.name} {last.mean:.2f}; {where}", flush=True)
    except CoterieError as error:
        print(f"coterie: {printable(str(error), lines=True)}", file=sys.stderr, flush=True)
        raise


def _recipe(config: Mapping[str, Any]) -> "Recipe":
    """Return the recipe of a run's configuration. Raises Refused."""
    from coterie.runs.recipes import recipe as recipes

    name, seed = str(config["recipe"]), int(config["seed"])
    overrides = _parts(config["set"]) + ([f"seed={seed}"] if seed >= 0 else []) + ["engine=flower"]
    if not name.lstrip().startswith("{"):
        return recipes.load(name, overrides)
    try:
        section = json_of(name, finite=False)
    except ValueError as error:
        raise Refused(
            f"recipe: not JSON ({error})",
            "Give a shipped name, a path on the server's machine, or a complete recipe as JSON.",
        ) from None
    given = recipes.validate(section, "of the run's configuration")
    return recipes.changed(given, {"engine": "flower"} | ({"seed": seed} if seed >= 0 else {}))


def _parts(value: object) -> list[str]:
    """Split a value at semicolons: Flower's configuration has no lists."""
    return [part for part in str(value).split(";") if part.strip()]


def default_home() -> Path:
    """Return $COTERIE_HOME, else $XDG_DATA_HOME/coterie, else ~/.local/share/coterie."""
    if home := os.environ.get("COTERIE_HOME"):
        return Path(home)
    data = os.environ.get("XDG_DATA_HOME")
    return (Path(data) if data else Path.home() / ".local/share") / "coterie"


wait_briefly()  # Flower starts these programs, so no command line of coterie has called this.
client = client_app(answer)
server = server_app(serve)
