"""The command that serves a run, as a web page or as an interface for programs: serve."""

import logging
import sys
import threading
from typing import Annotated, Any

import typer

from coterie.cli.base import (
    Base,
    Chat,
    Clients,
    Follow,
    Reset,
    Run,
    Trust,
    _personal,
    _stopping,
    app,
)
from coterie.core.errors import Refused
from coterie.core.extras import require
from coterie.core.printing import printable

# An environment variable, because the list of processes shows command lines.
TOKEN = "COTERIE_TOKEN"


@app.command()
def serve(
    context_of_command: typer.Context,
    run: Run,
    client: Clients = None,
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
    chat: Chat = False,
    follow: Follow = False,
    reset_weights: Reset = False,
    base: Base = None,
    trust_remote_code: Trust = False,
) -> None:
    """Serve a local web page: each client's next-word suggestions, with --chat a chat with them, or
    the answers of classifiers; or with --api an interface for programs (extra `serve`).
    """
    with _stopping("stopped."):
        given = {"token": token, "host": host, "rows": batch, "queue": queue, "context": context}
        given |= {"access_log": True} if access_log else {}
        if api and chat:
            raise Refused(
                "--chat is for the page", "Leave it out: --api answers chats wherever it can."
            )
        if api:
            which = (run, client, base, follow, reset_weights, sys.maxsize)
            _serve_api(which, port, {k: v for k, v in given.items() if v is not None})
            return
        source = context_of_command.get_parameter_source("token")
        if source is not None and source.name == "ENVIRONMENT":
            given["token"] = None
        if extra := [name for name, value in given.items() if value is not None]:
            raise Refused(
                f"--{extra[0].replace('rows', 'batch').replace('_', '-')} needs --api",
                "Give both, or neither.",
            )
        require("the page", "serve")
        from coterie.personal.ui import keyboard, page

        models, classifiers = _personal(run, client, base, follow, reset_weights)
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
    models, classifiers = _personal(*which)
    if classifiers:
        raise Refused(
            f"{which[0]} holds classifiers, which continue no text",
            "Leave out --api: their page classifies images and texts.",
        )
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
