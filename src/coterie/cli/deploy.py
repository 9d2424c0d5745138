"""Commands for machines of their own: keys, server, client, submit, deploy."""

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.base import (
    Base,
    Changed,
    Clients,
    Out,
    Seed,
    Set,
    Trust,
    _folder,
    _load,
    _normal,
    _stopping,
    app,
)
from coterie.core.errors import Refused
from coterie.core.printing import printable

Server = Annotated[
    str, typer.Option("--server", metavar="HOST:PORT", help="Where the server listens.")
]
Authority = Annotated[
    Path | None, typer.Option("--ca", help="The certificate of the server's authority (ca.crt).")
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Without encryption and keys: only for trying things out."),
]
Home = Annotated[Path | None, typer.Option("--home", help="Folder for everything that is kept.")]


@app.command()
def keys(
    folder: Annotated[
        Path,
        typer.Argument(
            help="Where they go; of those that are there, none is made again.", show_default=False
        ),
    ],
    host: Annotated[
        list[str] | None,
        typer.Option("--host", help="By which devices reach the server. Repeatable."),
    ] = None,
    client: Clients = None,
) -> None:
    """Make a certificate for a server and a key for each client's device (extra `flower`)."""
    with _stopping("stopped."):
        from coterie.deploy import keys as making

        making.make(folder, host or [], client or [])
        print(
            f"The server needs {folder}; a device {folder}/{making.CA} and its own "
            f"{folder}/{making.CLIENTS}/ID, and nothing else of it."
        )
        for id in client or ():
            if (path := making.private(folder, id)).name != id:
                print(f"  {printable(id)}: {path}")


@app.command()
def server(
    keys: Annotated[
        Path | None, typer.Option("--keys", help="The folder that `coterie keys` made.")
    ] = None,
    host: Annotated[
        str, typer.Option("--host", help="Address to listen at; 0.0.0.0: all of this machine's.")
    ] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="For devices.")] = 9500,
    runs_port: Annotated[
        int | None,
        typer.Option(
            "--runs-port",
            min=1,
            max=65535,
            help="For `coterie submit`, on this machine only; default: the next one.",
        ),
    ] = None,
    largest: Annotated[
        int,
        typer.Option(
            "--largest", min=1, metavar="MIB", help="What a device may send at once, in MiB."
        ),
    ] = 256,
    home: Home = None,
    trust_remote_code: Trust = False,
    insecure: Insecure = False,
) -> None:
    """Start a server that devices connect to: Flower's SuperLink (extra `flower`). Runs are
    given to it by `coterie submit`.
    """
    with _stopping("stopped."):
        from coterie.deploy import server as superlink

        if (keys is None) != insecure:
            raise Refused(
                "give either --keys or --insecure",
                "Keys are made by: coterie keys DIR --host HOST --client ID ...",
            )
        folder = home or Path("coterie-server")
        with superlink.server(
            keys, folder, host, port, runs_port or port + 1, largest << 20
        ) as serving:
            print(
                f"Devices come to "
                f"{host}:{port}{' WITHOUT encryption and keys' if insecure else ''}. Its log is "
                f"{folder}/{superlink.LOG}."
            )
            link = serving.runs
            print(
                f"Give it a run: coterie submit quickstart --server "
                f"{link.address}{f' --ca {link.ca}' if link.ca else ' --insecure'}"
            )
            print("Ctrl-C stops it.", flush=True)
            for line in serving.watch():
                print(line, flush=True)


@app.command()
def client(
    server: Server,
    id: Annotated[
        str | None,
        typer.Option(
            "--client",
            metavar="ID",
            callback=_normal,
            help="Who this is; default: the only client of --data.",
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="This client's data: data.path or data.root of recipes, here."),
    ] = None,
    base: Base = None,
    ca: Authority = None,
    key: Annotated[
        Path | None,
        typer.Option("--key", help="This device's private key (clients/ID of `coterie keys`)."),
    ] = None,
    home: Home = None,
    resident: Annotated[
        bool, typer.Option(help="Keep the base model loaded in a process between messages.")
    ] = True,
    secure: Annotated[
        bool,
        typer.Option(
            "--secure", help="Let nothing that was trained leave but by secure aggregation."
        ),
    ] = False,
    limits: Annotated[
        Path | None,
        typer.Option("--limits", help="What this device allows, whatever a run says: a YAML file."),
    ] = None,
    trust_remote_code: Trust = False,
    insecure: Insecure = False,
) -> None:
    """Make this machine the device of a client: Flower's SuperNode, and a process that keeps the
    base model loaded (extra `flower`).
    """
    with _stopping("stopped. What this client has learned is kept."):
        from coterie.deploy import apps, supernode
        from coterie.deploy.link import Link
        from coterie.runs.folder import check_apart

        if (ca is None and key is None) != insecure:
            raise Refused(
                "give --ca and --key, or --insecure alone",
                "They are made where the server is: coterie keys.",
            )
        folder = home or apps.default_home()
        if data is not None:
            check_apart(folder, data, "--home")
        node = supernode.Node(
            Link(server, ca), folder, id, data, base, key, resident, secure, limits
        )
        node.check()
        if limits is not None:
            from coterie.runs import account
            from coterie.runs import limits as allowed

            print(account.described(folder, allowed.read(limits)))
        if not node.link.answers("fleet"):
            print(f"Nobody answers at {server} yet; this device asks again and again.")
        with supernode.device(node) as supervisor:
            who = printable(id or "a client")
            print(
                f"The device of {who} asks {server} for work. It keeps everything in {folder}. "
                f"Ctrl-C stops it.",
                flush=True,
            )
            for line in supervisor.watch():
                print(line, flush=True)


@app.command(hidden=True)
def resident(configuration: str) -> None:
    """Keep the base loaded for a device, in a process of its own; `coterie client` starts it."""
    with _stopping("stopped."):
        import json

        from coterie.deploy import apps
        from coterie.deploy import resident as serving

        node = json.loads(configuration)
        device = apps.device(node)
        serving.serve(device.home, device.answer, lambda: print("ready", flush=True))


@app.command()
def submit(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe or a YAML file.")],
    server: Server,
    set_: Set = None,
    seed: Seed = None,
    out: Annotated[
        str,
        typer.Option(
            "--out", help="Folder of the run, on the server's machine; default: a new one."
        ),
    ] = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --out from its last checkpoint.")
    ] = False,
    resume_changed: Changed = False,
    clients: Annotated[
        int, typer.Option("--clients", min=1, help="Start when so many have come.")
    ] = 2,
    ca: Authority = None,
    home: Home = None,
    insecure: Insecure = False,
) -> None:
    """Give a server a run, and show what happens; `flwr run` does the same (extra `flower`)."""
    with _stopping("left. The run goes on where the server is."):
        from coterie.deploy import submit as submitting
        from coterie.deploy.link import Link

        if (ca is None) != insecure:
            raise Refused("give either --ca or --insecure", "ca.crt is among the server's keys.")
        if (resume or resume_changed) and not out:
            raise Refused(
                "--resume needs the run's folder",
                "Give its --out, as it was on the server's machine.",
            )
        loaded = _load(recipe, set_, seed)
        folder = out or str(_folder(loaded.name, False))
        config = {
            "recipe": loaded.model_dump_json(),
            "out": folder,
            "resume": resume,
            "changed": resume_changed,
            "clients": clients,
        }
        submitting.submit(
            Link(server, ca),
            home or Path("coterie-server"),
            config,
            lambda line: print(line, flush=True),
        )


@app.command("deploy")
def deploy_(
    demo: Annotated[
        bool,
        typer.Option(
            "--demo", help="A server and devices on this machine, encrypted and with keys."
        ),
    ] = False,
    recipe: Annotated[
        str, typer.Option("--recipe", help="A shipped recipe or a YAML file.")
    ] = "quickstart",
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients", min=1, help="Devices; default: all clients of the recipe's data."
        ),
    ] = None,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    trust_remote_code: Trust = False,
) -> None:
    """Try it all on this machine: a real server, real devices and a run on them; nothing is left
    running (extra `flower`).
    """
    with _stopping("stopped; nothing is left running."):
        if not demo:
            raise Refused(
                "only the demonstration is one command",
                "coterie deploy --demo; for real machines see docs/deploy.md.",
            )
        from coterie.deploy import demo as demonstration
        from coterie.runs import loading

        loaded = _load(recipe, set_, seed)
        folder = out or _folder(f"deploy-{loaded.name}", False)
        if (folder / "recipe.yaml").exists():
            raise Refused(f"{folder} already holds a run", "Choose another --out.")
        ids = list(loading.load(loaded).federation.everyone)[:clients]
        demonstration.demo(loaded, ids, folder, lambda line: print(line, flush=True))
        print(
            f"The server's side is in {folder}: open {folder}/report.html. Each device keeps its "
            f"own: {folder}/devices/ID."
        )
