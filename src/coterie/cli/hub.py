"""Commands that take models elsewhere: serve, export, push and pull."""

import logging
import shlex
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli import base as common
from coterie.core.errors import Refused
from coterie.core.importing import require
from coterie.core.printing import printable

# An environment variable, because the list of processes shows command lines.
TOKEN = "COTERIE_TOKEN"


@common.app.command()
def serve(
    context_of_command: typer.Context,
    run: common.Run,
    client: common.Clients = None,
    port: Annotated[
        int,
        typer.Option(
            min=1024,
            max=65535,
            help="Port of the page or interface. Only this machine can open it.",
        ),
    ] = 7860,
    api: Annotated[
        bool,
        typer.Option(
            "--api",
            help="Instead of a page: OpenAI's completions and chat completions, over HTTP. The "
            "model's name is the client's.",
        ),
    ] = False,
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN,
            show_envvar=True,
            help="With --api: what callers must send as API key. Default: a new one, which is "
            "printed.",
        ),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(
            help="With --api: the address to listen on. Default: 127.0.0.1, which only this "
            "machine can reach. Nothing is encrypted."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1024,
            help="With --api: number of texts that are written at once. Default: 16.",
        ),
    ] = None,
    queue: Annotated[
        int | None,
        typer.Option(min=0, help="With --api: number of texts that may wait. Default: 64."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="With --api: most tokens of a prompt and its answer. Default: the base's "
            "context, at most 4096.",
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log",
            help="With --api: log each request's method, path, status and seconds, never a text.",
        ),
    ] = False,
    chat: common.Chat = False,
    follow: common.Follow = False,
    reset_weights: common.Reset = False,
    base: common.Base = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Serve a local web page: each client's next-word suggestions, with --chat a chat with them, or
    the answers of classifiers; or with --api an interface for programs (extra `serve`).
    """
    with common._stopping("stopped."):
        given = {"token": token, "host": host, "rows": batch, "queue": queue, "context": context}
        given |= {"access_log": True} if access_log else {}
        if api and chat:
            problem = "--chat is for the page"
            raise Refused(problem, "Leave it out: --api answers chats wherever it can.")
        if api:
            which = (run, client, base, follow, reset_weights, sys.maxsize)
            _serve_api(which, port, {k: v for k, v in given.items() if v is not None})
            return
        source = context_of_command.get_parameter_source("token")
        if source is not None and source.name == "ENVIRONMENT":
            given["token"] = None
        if extra := [name for name, value in given.items() if value is not None]:
            problem = f"--{extra[0].replace('rows', 'batch').replace('_', '-')} needs --api"
            raise Refused(problem, "Give both, or neither.")
        require("the page", "serve")
        from coterie.personal.ui import keyboard, page

        models, classifiers = common._personal(run, client, base, follow, reset_weights)
        if chat and not models:
            raise Refused(f"{run} holds classifiers, which do not chat", "Leave --chat out.")
        examples = keyboard.own_examples(run, list(models), chat) if models else ()
        with page.served(models or classifiers, port, chat, examples, _report) as link:
            print(f"Open {link} (only this machine can). Ctrl-C stops it.", flush=True)
            threading.Event().wait()


def _serve_api(which: Any, port: int, given: dict[str, Any]) -> None:
    """Serve OpenAI's protocol, with the models that `_personal` loads, until a signal arrives."""
    require("--api", "serve")
    from coterie.personal.api import server

    settings = server.Settings(port, **given)
    models, classifiers = common._personal(*which)
    if classifiers:
        problem = f"{which[0]} holds classifiers, which continue no text"
        raise Refused(problem, "Leave out --api: their page classifies images and texts.")
    with server.served(models, settings, _report) as address:
        print(f"{len(models)} model{'s' * (len(models) != 1)} at {address}. Ctrl-C stops it.")
        print(f"  models: {', '.join(map(printable, models))}")
        if not settings.is_local:
            print("  Others in the network can reach it, and nothing is encrypted.")
        key = "" if "token" in given else f" OPENAI_API_KEY={settings.token}"
        print(f"  export OPENAI_BASE_URL={address}{key}", flush=True)
        threading.Event().wait()


def _report(line: str) -> None:
    logging.getLogger("coterie").error("%s", printable(line))


FORMATS = ("peft", "mixtral", "gguf", "onnx", "web")


@common.app.command()
def export(
    run: common.Run,
    out: Annotated[
        Path | None, typer.Option(help="A new folder. Default: one in exports/.")
    ] = None,
    client: common.Client = None,
    everyone: Annotated[
        bool, typer.Option("--all", help="All clients of the run, over one base.")
    ] = False,
    format: Annotated[
        str, typer.Option(metavar="FORMAT", autocompletion=lambda: FORMATS, help=", ".join(FORMATS))
    ] = "peft",
    part: Annotated[
        str | None,
        typer.Option(
            metavar="PART",
            help="Of peft: fold (all experts in one, by the mean weights of the client's "
            "validation text) or generalist. Default: fold.",
        ),
    ] = None,
    expert: Annotated[
        str | None,
        typer.Option(
            help="With --part generalist: G, G2, S1 ... Default: the first generalist, or the "
            "only expert."
        ),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="Of what is written: f32 or f16; of gguf's base q8_0 and q4_0 "
            "too, and original, where model.base is a GGUF file; of clients' "
            "files of onnx and web int8.",
        ),
    ] = None,
    base_precision: Annotated[
        str | None,
        typer.Option(
            metavar="PRECISION",
            help="Of onnx and web: of the base, f32, int8, w8 or w4. Default: f32, of web int8.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Of web: a keyboard for answers to a message, by the base's chat template or "
            "that of the run.",
        ),
    ] = False,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The client's own text, a folder or a file, if the run's folder does not name it."
        ),
    ] = None,
    base: common.Base = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Write a client's model for other programs, run what was written, and print how it does."""
    with common._stopping("stopped. Nothing is kept."):
        from coterie.core.names import encoded
        from coterie.export import Source
        from coterie.export import export as written
        from coterie.runs.folder.lock import new_folder

        out = out or new_folder(f"{encoded(client) if client else run.name}-{format}", "exports")
        exported = written(
            Source(run, client, everyone, base, data),
            format,
            out,
            part=part,
            precision=precision,
            expert=expert,
            base_precision=base_precision,
            chat=chat,
            say=common._say,
        )
        for model in exported:
            print(f"{printable(model.client)}: {model.size}, in {model.folder}")
            for sentence in model.sentences:
                print(f"  {printable(sentence)}")
        for note in dict.fromkeys(note for model in exported for note in model.notes):
            print(printable(note))
        print(f"{out}/export.json says what is in the files, and how they were checked.")


@common.app.command()
def push(
    run: common.Run,
    repo: Annotated[
        str, typer.Option(metavar="NAME", help="Repository of the Hub: name or owner/name.")
    ],
    client: common.Client = None,
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
    license: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Licence for the card, e.g. cc-by-4.0. Default: none."),
    ] = None,
) -> None:
    """Publish the shared part of a run, or one client's personal model, on the Hugging Face Hub."""
    with common._stopping("stopped. Perhaps the repository was made; see it on the Hub."):
        from coterie.export import push as hub_push

        pushed = hub_push.push(
            run,
            repo,
            client=client,
            shared=shared,
            publish_personal=publish_personal,
            public=public,
            license=license,
            say=common._say,
        )
        seen = "private" if pushed.private else "public"
        print(f"{len(pushed.files)} files are in {printable(pushed.url)} ({seen}).")


@common.app.command()
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
    with common._stopping("stopped. Nothing is kept."):
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
            print(f"  coterie adapt {folder} --data MY_TEXTS --out mine")
