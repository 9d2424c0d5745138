"""Options, errors and signals of all commands. Heavy libraries are imported by the commands that
need them, so that `--help` is quick.
"""

import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.core.errors import CoterieError
from coterie.core.names import normal
from coterie.core.printing import printable
from coterie.core.threads import wait_briefly
from coterie.core.version import __version__

if TYPE_CHECKING:
    from coterie.runs.recipe import Recipe


def _normal(given: Any) -> Any:
    """Names as they are known, however the keyboard or another machine has put accents on
    letters.
    """
    if given is None:
        return None
    return normal(given) if isinstance(given, str) else [normal(name) for name in given]


app = typer.Typer(
    name="coterie",
    help="Train personal models together without sharing data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
TRUST = "COTERIE_TRUST_REMOTE_CODE"  # see coterie.models.architecture
STOPPING_S = 15.0  # seconds for what is being stopped
RESUMABLE = (
    "stopped. What was done until the last checkpoint is kept: the same command with --resume "
    "goes on."
)
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field of the recipe, e.g. method.rounds=5. Repeatable.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Seed of the run (splits of the data have their own: data.seed)."
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder of the run; default: a new one under runs/.")
]
Run = Annotated[
    Path, typer.Argument(help="The folder of a run, or of one client in it.", show_default=False)
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client",
        metavar="ID",
        callback=_normal,
        help="A client of the run. Repeatable; default: all.",
    ),
]
Client = Annotated[
    str | None,
    typer.Option("--client", metavar="ID", callback=_normal, help="A client of the run."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="BASE", help="Where the base model is now, if not where the run found it."
    ),
]


def _trust(said: bool) -> bool:
    """Let bases bring code, in this process and those that it starts."""
    if said:
        os.environ[TRUST] = "1"
    return said


Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_trust,
        help="Run code that a base brings along, which may do anything that you may.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in --out, or with the latest of this recipe under runs/.",
    ),
]
Changed = Annotated[
    bool,
    typer.Option(
        "--resume-changed",
        help="Like --resume, though base, data or clients have changed, or metrics were lost: "
        "you mean it.",
    ),
]


def _version(show: bool) -> None:
    if show:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    pass


def _load(recipe: str, overrides: list[str] | None, seed: int | None) -> "Recipe":
    from coterie.runs import recipe as recipes

    return recipes.load(
        recipe, [*(overrides or ()), *((f"seed={seed}",) if seed is not None else ())]
    )


def _folder(name: str, resume: bool) -> Path:
    """Return a new folder under runs/, or the latest one of that name."""
    from coterie.runs.folder import latest_folder, new_folder

    return latest_folder(name) if resume else new_folder(name)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


def _stop_at_signals() -> None:
    """Have SIGINT and SIGTERM stop the command: once, for what is being stopped must not be left
    half done by another one.

    Where it has not ended after `STOPPING_S`, a signal stops it again.
    """
    stopped = -STOPPING_S

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if (now := time.monotonic()) - stopped >= STOPPING_S:
            stopped = now
            raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) != signal.SIG_IGN:  # as in the background of a script
            signal.signal(number, stop)


@contextmanager
def _stopping(note: str = RESUMABLE) -> Iterator[None]:
    """Turn errors into one message and an exit code, and signals into a stop, of which `note`
    says what is left.
    """
    _stop_at_signals()
    try:
        yield
    except CoterieError as error:
        print(f"coterie: {printable(str(error), lines=True)}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except BrokenPipeError:  # whoever read what is printed has gone
        raise
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(
            f"coterie: {printable(f'{where}{error.strerror or error}', lines=True)}",
            file=sys.stderr,
        )
        raise typer.Exit(1) from None
    except KeyboardInterrupt as stop:
        for number in (
            signal.SIGINT,
            signal.SIGTERM,
        ):  # nothing is left to be stopped, and Python on its way out would die of another one
            signal.signal(number, signal.SIG_IGN)
        print(f"coterie: {note}", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):  # names of files need not be text
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    wait_briefly()
    app()
