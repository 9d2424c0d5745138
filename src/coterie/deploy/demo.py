"""A server, devices and a run, all of them on this machine."""

import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.core import names
from coterie.core.printing import printable
from coterie.deploy.command import submit
from coterie.deploy.link import free_port
from coterie.deploy.server import server
from coterie.deploy.supernode import Node, device

if TYPE_CHECKING:
    from coterie.runs.recipes.recipe import Recipe


def demo(
    recipe: "Recipe",
    clients: Sequence[str],
    out: Path,
    say: Callable[[str], None],
    resident: bool = True,
) -> None:
    """Start a server and real devices on this machine, encrypted and with keys, run a resolved
    recipe on them, and stop everything.

    Args:
        recipe: With its data on this machine.
        clients: The clients of the data.
        out: The run's folder; each device has `devices/<id>` in it, see `names.encoded`.
        say: Called with a line for each step.
        resident: Whether each device has a process that keeps the base model loaded.

    Raises:
        Refused: See `server` and `submit`.
        ClientError: See `server` and `submit`.
    """
    from coterie.deploy import keys

    folder = out.resolve()
    with ExitStack() as stack:
        key_folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="coterie-")))
        keys.make(key_folder, [], clients)
        port, runs_port = free_port(), free_port()
        superlink = stack.enter_context(
            server(key_folder, folder / "server", "127.0.0.1", port, runs_port)
        )
        say("A SuperLink is up, with TLS.")
        for line in superlink.look():
            say(printable(line))
        for client in clients:
            home, key = folder / "devices" / names.encoded(client), keys.private(key_folder, client)
            data = _data(recipe, client, home)
            node = Node(superlink.devices, home, client, data, key=key, resident=resident)
            stack.enter_context(device(node))
        say(
            f"{len(clients)} SuperNodes are starting"
            f"{', each with a process that keeps the base model loaded' * resident}."
        )
        config = {"recipe": recipe.model_dump_json(), "out": str(folder), "clients": len(clients)}
        submit(superlink.runs, folder / "server", config, say)
    say("Everything has stopped.")


def _data(recipe: "Recipe", client: str, home: Path) -> Path | None:
    """Return the path of a device's data; of folders of clients, with the client's alone."""
    path: Path | None = getattr(recipe.data, "path", None)
    if getattr(recipe.data, "kind", None) != "folders" or path is None:
        return path or getattr(recipe.data, "root", None)
    (home / "data").mkdir(parents=True, exist_ok=True)
    client_folder = next(folder for folder in path.iterdir() if names.normal(folder.name) == client)
    (home / "data" / client_folder.name).symlink_to(client_folder.resolve())
    return home / "data"
