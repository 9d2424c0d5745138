"""Commands that publish models on the Hub and fetch them: push, pull."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.base import Client, Run, _say, _stopping, app
from coterie.core.printing import printable


@app.command()
def push(
    run: Run,
    repo: Annotated[
        str, typer.Option(metavar="NAME", help="Repository of the Hub: name or owner/name.")
    ],
    client: Client = None,
    shared: Annotated[
        bool, typer.Option("--shared", help="The part that all clients of the run share.")
    ] = False,
    publish_personal: Annotated[
        bool,
        typer.Option(
            "--publish-personal",
            help="The client's owner wants the personal model to leave, with what it learned of "
            "the client's own data.",
        ),
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Everybody may read it. Default: a private repository.")
    ] = False,
) -> None:
    """Publish the shared part of a run, or one client's personal model, on the Hugging Face Hub."""
    with _stopping("stopped. Perhaps the repository was made; see it on the Hub."):
        from coterie.export import push as hub_push

        pushed = hub_push.push(
            run,
            repo,
            client=client,
            shared=shared,
            publish_personal=publish_personal,
            public=public,
            say=_say,
        )
        seen = "private" if pushed.private else "public"
        print(f"{len(pushed.files)} files are in {printable(pushed.url)} ({seen}).")


@app.command()
def pull(
    repo: Annotated[
        str, typer.Argument(help="Repository of the Hub: owner/name.", show_default=False)
    ],
    out: Annotated[Path, typer.Option(help="A new folder.")],
    revision: Annotated[
        str | None, typer.Option(help="A commit, branch or tag. Default: the newest commit.")
    ] = None,
    most_gb: Annotated[
        float, typer.Option(min=0, help="Most GiB that a file of tensors may have.")
    ] = 2.0,
) -> None:
    """Fetch a model that `coterie push` published, and verify it. It is data and runs no code."""
    with _stopping("stopped. Nothing is kept."):
        from coterie.export import pull as hub_pull

        pulled = hub_pull.pull(repo, out, revision=revision, most_bytes=int(most_gb * 2**30))
        what = "the shared part of a run" if pulled.shared else f"the model of {pulled.client}"
        base = f", on the base {pulled.base}" if pulled.base else ""
        print(
            f"{pulled.folder} holds {printable(what)}: {printable(pulled.method + base)}, commit "
            f"{pulled.revision[:12]}."
        )
        folder = shlex.quote(str(pulled.folder))
        if pulled.base is None:
            print(f"To use it:\n  coterie predict {folder} --data FILES")
            return
        print(f'To use it:\n  coterie generate {folder} --text "The weather is"')
        if pulled.shared:
            print(f"  coterie adapt {folder} --data MY_TEXTS --train --out mine")
