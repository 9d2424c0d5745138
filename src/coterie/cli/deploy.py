"""Commands for a server and devices on separate machines: keys, server, client, submit, deploy."""

import re
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli import base as common
from coterie.core.errors import Refused
from coterie.core.printing import printable

Server = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="Address of the server.")
]
Authority = Annotated[
    Path | None,
    typer.Option(
        "--ca", help="Certificate of the authority that signed the server's certificate (ca.crt)."
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="No encryption and no keys. For trying things out only.")
]
Home = Annotated[Path | None, typer.Option("--home", help="Folder for state, logs and results.")]


@common.app.command()
def keys(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder for the keys. Existing keys are kept.", show_default=False),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name or IP address under which devices reach the server. Repeatable."
        ),
    ] = None,
    client: common.Clients = None,
) -> None:
    """Make a certificate for a server and a key for each client's device (extra `flower`)."""
    with common._stopping("stopped."):
        from coterie.deploy import keys as key_files
        from coterie.deploy.keys import unknown

        key_files.make(folder, host or [], client or [])
        for sentence in filter(None, map(unknown, host or ())):
            print(f"Note:{sentence}", file=sys.stderr)
        print(
            f"The server needs all of {folder}. A device needs only {folder}/{key_files.CA} and "
            f"its own key, {folder}/{key_files.CLIENTS}/ID."
        )
        for id in client or ():
            if (path := key_files.private(folder, id)).name != id:
                print(f"  {printable(id)}: {path}")


@common.app.command()
def server(
    keys: Annotated[Path | None, typer.Option(help="Folder that `coterie keys` created.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on. 0.0.0.0: all addresses of this machine.")
    ] = "0.0.0.0",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port for devices.")] = 9500,
    runs_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port for `coterie submit`, open to this machine only. Default: --port plus 1.",
        ),
    ] = None,
    largest: Annotated[
        int,
        typer.Option(min=1, metavar="MIB", help="Largest message that a device may send, in MiB."),
    ] = 256,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of this machine for GET /health and GET /metrics (Prometheus). Default: "
            "neither.",
        ),
    ] = None,
    home: Home = None,
    trust_remote_code: common.Trust = False,
    insecure: Insecure = False,
) -> None:
    """Start a server that devices connect to (Flower's SuperLink; extra `flower`). `coterie submit`
    gives it runs.
    """
    with common._stopping("stopped."):
        from coterie.deploy import server as superlink

        if (keys is None) != insecure:
            problem = "give either --keys or --insecure"
            raise Refused(problem, "Keys are made by: coterie keys DIR --host HOST --client ID ...")
        folder = home or Path("coterie-server")
        with superlink.server(
            keys, folder, host, port, runs_port or port + 1, largest << 20
        ) as serving:
            print(
                f"Devices connect to "
                f"{host}:{port}{' WITHOUT encryption and keys' if insecure else ''}. The log is "
                f"{folder}/{superlink.LOG}."
            )
            link = serving.runs
            print(
                f"To start a run: coterie submit quickstart --server "
                f"{link.address}{f' --ca {link.ca}' if link.ca else ' --insecure'}"
            )
            print("Ctrl-C stops it.", flush=True)
            with nullcontext() if health_port is None else superlink.health(serving, health_port):
                for line in serving.watch():
                    common._event(line)


@common.app.command()
def client(
    server: Server,
    id: Annotated[
        str | None,
        typer.Option(
            "--client",
            metavar="ID",
            callback=common._normal,
            help="Client that this device is. Default: the only client in --data.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="This client's data. Replaces data.path or data.root of the recipe."),
    ] = None,
    base: common.Base = None,
    ca: Authority = None,
    key: Annotated[
        Path | None, typer.Option(help="This device's private key (clients/ID of `coterie keys`).")
    ] = None,
    home: Home = None,
    resident: Annotated[
        bool, typer.Option(help="Keep the base model loaded in a process between messages.")
    ] = True,
    secure: Annotated[
        bool, typer.Option("--secure", help="Send trained values by secure aggregation only.")
    ] = False,
    limits: Annotated[
        Path | None,
        typer.Option(help="YAML file with this device's limits, which no run can override."),
    ] = None,
    accept_account: Annotated[
        bool,
        typer.Option(
            "--accept-account",
            help="Go on although the account of what this device has sent is lost, damaged or an "
            "older copy. Epsilon over all runs is then no longer a bound.",
        ),
    ] = False,
    trust_remote_code: common.Trust = False,
    insecure: Insecure = False,
) -> None:
    """Make this machine a client's device (Flower's SuperNode; extra `flower`). A second process
    keeps the base model loaded.
    """
    with common._stopping("stopped. The client's state is kept."):
        from coterie.deploy import apps, supernode
        from coterie.deploy.keys import Link
        from coterie.runs.folder.lock import check_apart

        if (ca is None and key is None) != insecure:
            problem = "give --ca and --key, or --insecure alone"
            raise Refused(problem, "Make them on the server's machine: coterie keys.")
        folder = home or apps.default_home()
        if data is not None:
            check_apart(folder, data, "--home")
        node = supernode.Node(
            Link(server, ca), folder, id, data, base, key, resident, secure, limits
        )
        node.check()
        from coterie.runs.device import account

        if accept_account:
            print(account.accepted(folder))
        account.Account(folder / account.ACCOUNT).verify()
        if limits is not None:
            from coterie.runs.device import limits as device_limits

            print(account.described(folder, device_limits.read(limits)))
        if not node.link.answers("fleet"):
            from coterie.deploy.keys import unknown

            print(f"No server answers at {server} yet. This device keeps trying.{unknown(server)}")
        with supernode.device(node) as supervisor:
            who = printable(id or "a client")
            print(
                f"The device of {who} connects to {server}. Its files are in {folder}. Ctrl-C "
                f"stops it.",
                flush=True,
            )
            for line in supervisor.watch():
                common._event(line)


@common.app.command(hidden=True)
def resident(configuration: str) -> None:
    """Keep the base model loaded for a device. `coterie client` starts this process."""
    with common._stopping("stopped."):
        import json

        from coterie.deploy import apps
        from coterie.deploy import resident as resident_process

        device = apps.device(json.loads(configuration))
        resident_process.serve(device.home, device.answer, lambda: print("ready", flush=True))


@common.app.command()
def submit(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a YAML file.")],
    server: Server,
    set_: common.Set = None,
    seed: common.Seed = None,
    out: Annotated[
        str, typer.Option(help="Folder for the run on the server's machine. Default: a new one.")
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in --out from its last checkpoint.")
    ] = False,
    resume_changed: common.Changed = False,
    clients: Annotated[
        int, typer.Option(min=1, help="Number of connected clients to wait for before starting.")
    ] = 2,
    track: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PROGRAM",
            help="Also send the figures to wandb or mlflow, as they are set up on the server's "
            "machine. Repeatable.",
        ),
    ] = None,
    ca: Authority = None,
    home: Home = None,
    insecure: Insecure = False,
) -> None:
    """Start a run on a server and show its progress (extra `flower`). `flwr run` does the same."""
    with common._stopping("disconnected. The run continues on the server."):
        from coterie.deploy.keys import Link
        from coterie.deploy.process import submit as submit_run
        from coterie.reports import trackers

        if (ca is None) != insecure:
            problem = "give either --ca or --insecure"
            raise Refused(problem, "ca.crt is in the server's folder of keys.")
        if (resume or resume_changed) and not out:
            problem = "--resume needs the run's folder"
            raise Refused(problem, "Give --out, the run's folder on the server's machine.")
        loaded = common._load(recipe, set_, seed)
        folder = out or str(common._folder(loaded.name, False))
        config = {
            "recipe": loaded.model_dump_json(),
            "out": folder,
            "resume": resume,
            "changed": resume_changed,
            "clients": clients,
            "track": ";".join(trackers.check(track or ())),
        }
        link = Link(server, ca)
        submit_run(link, home or Path("coterie-server"), config, common._event)


@common.app.command("deploy")
def deploy_(
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="Start a server and devices on this machine, with encryption and keys."
        ),
    ] = False,
    recipe: Annotated[str, typer.Option(help="A shipped recipe or a YAML file.")] = "quickstart",
    clients: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of devices. Default: one for each client of the recipe's data."
        ),
    ] = None,
    set_: common.Set = None,
    seed: common.Seed = None,
    out: common.Out = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Try a deployment on this machine: a real server, real devices and a run. Everything is
    stopped at the end (extra `flower`).
    """
    with common._stopping("stopped. Nothing is left running."):
        if not demo:
            remedy = "Run: coterie deploy --demo. For separate machines see docs/deploy.md."
            raise Refused("deploy needs --demo", remedy)
        from coterie.deploy.server import demo as demonstration
        from coterie.runs.problems import loading

        loaded = common._load(recipe, set_, seed)
        folder = out or common._folder(f"deploy-{loaded.name}", False)
        if (folder / "recipe.yaml").exists():
            raise Refused(f"{folder} already holds a run", "Choose another --out.")
        ids = list(loading.load(loaded).federation.everyone)[:clients]
        demonstration(loaded, ids, folder, common._event)
        print(
            f"The server's results are in {folder}: open {folder}/report.html. Each device's "
            f"files are in {folder}/devices/ID."
        )


@common.app.command()
def new(
    kind: Annotated[str, typer.Argument(help="app: a Flower app.")],
    folder: Annotated[Path, typer.Argument(help="A new folder; its name is the app's.")],
) -> None:
    """Write the beginning of a Flower app with coterie's two programs: `flwr run FOLDER` runs it,
    `flwr build` packs it (extra `flower`).
    """
    with common._stopping("stopped."):
        from coterie.core.files import make_folder
        from coterie.deploy.process import app_files

        if kind != "app":
            raise Refused(f"new {kind}: there is no such beginning", "Say: coterie new app FOLDER")
        if folder.exists() or not re.fullmatch(r"[a-z][a-z0-9-]*", folder.name):
            problem = "exists already" if folder.exists() else "cannot be the name of a Flower app"
            raise Refused(f"{folder} {problem}", "Name a new folder by letters, digits and -.")
        for name, text in app_files(folder.name).items():
            make_folder((folder / name).parent)
            (folder / name).write_text(text, encoding="utf-8")
            print(folder / name)
        print("Its settings are in pyproject.toml. Server and devices need coterie installed.")
