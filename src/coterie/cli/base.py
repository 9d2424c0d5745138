"""Options, error messages and signals of all commands. Commands import heavy libraries only when
they need them, so that `--help` is fast.
"""

import io
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from coterie.core.errors import CoterieError, Refused
from coterie.core.importing import check_docstrings, uncollected
from coterie.core.names import normal
from coterie.core.printing import printable
from coterie.core.threads import wait_briefly
from coterie.core.version import __version__

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.personal import PersonalClassifier, PersonalModel
    from coterie.runs.recipes.recipe import Recipe


def _normal(given: Any) -> Any:
    """Normalise names to Unicode form C, so that accented letters compare equal."""
    if given is None:
        return None
    return normal(given) if isinstance(given, str) else [normal(name) for name in given]


# click's, of which newer releases of typer hold a copy
_exceptions = sys.modules[typer.BadParameter.__module__]


class _Commands(TyperGroup):
    """The group of all commands; its error for `--set a=1 b=2` explains the right form."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for command in self.commands.values():  # the terminal wraps lines, at its own width
            command.help = re.sub(r"(?<=\S)\n(?=\S)", " ", command.help or "")

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _exceptions.UsageError as error:
            command = error.ctx.command if error.ctx else self
            options = [name for option in command.params for name in option.opts]
            stray = re.findall(r"[\w.-]+=[^ )]*", error.message)
            if stray and "--set" in options and "unexpected extra" in error.message:
                settings = " ".join(f"--set {setting}" for setting in stray)
                error.message += f". Repeat --set for each field: ... {settings}"
            raise


app = typer.Typer(
    name="coterie",
    cls=_Commands,
    help="Train personal models together without sharing data.",
    no_args_is_help=True,
    suggest_commands=not hasattr(_exceptions, "NoSuchCommand"),  # click 8.4 suggests too
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
LogFormat = Literal["text", "json"]
TRUST = "COTERIE_TRUST_REMOTE_CODE"  # see coterie.models.architecture
_NARROWEST = 20  # columns of a terminal in which anything can be shown
STOPPING_S = 15.0  # seconds that stopping may take
RESUMABLE = (
    "stopped. Everything up to the last checkpoint is kept. To continue, repeat the "
    "command with --resume."
)
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a field of the recipe, e.g. method.rounds=5. Repeat --set for each field.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", min=0, help="Seed of the run. Data splits use data.seed instead."),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Folder for the run. Default: a new one under runs/.")
]
Run = Annotated[
    Path, typer.Argument(help="Folder of a run, or of one client in a run.", show_default=False)
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client",
        metavar="ID",
        callback=_normal,
        help="A client of the run. Repeatable. Default: all.",
    ),
]
Client = Annotated[
    str | None,
    typer.Option("--client", metavar="ID", callback=_normal, help="A client of the run."),
]
Base = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="BASE",
        help="Path or Hub id of the base model, if it has moved since the run.",
    ),
]


def _trust(allowed: bool) -> bool:
    """Allow base models to run their own code, in this process and in those that it starts."""
    if allowed:
        os.environ[TRUST] = "1"
    return allowed


Follow = Annotated[
    bool,
    typer.Option(
        "--follow",
        help="Let the weights of a mixture of models follow what is written, from where they were.",
    ),
]
Reset = Annotated[
    bool, typer.Option("--reset-weights", help="The same, from the first weights on.")
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat", help="Answer a message, by the base's chat template or that of the run."
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        callback=_trust,
        help="Allow a base model to run its own Python code. It can do anything that you can.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue the run in --out, or the latest run of this recipe under runs/."
    ),
]
Changed = Annotated[
    bool,
    typer.Option(
        "--resume-changed",
        help="Like --resume, and accept that the base, data or clients have changed, or that "
        "metrics were lost.",
    ),
]
Track = Annotated[
    list[str] | None,
    typer.Option(
        "--track",
        metavar="PROGRAM",
        help="Also send the figures to wandb or mlflow (extras of these names). Repeatable.",
    ),
]


def _version(show: bool) -> None:
    if show:
        print(f"coterie {__version__}")
        raise typer.Exit


class _Json(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and figures that a record has."""

    def format(self, record: logging.LogRecord) -> str:
        plain = vars(logging.makeLogRecord({}))
        about = {"time": record.created, "level": record.levelname, "logger": record.name}
        figures = {name: value for name, value in vars(record).items() if name not in plain}
        figures.pop("message", None)
        return json.dumps(about | {"message": record.getMessage()} | figures, default=str)


def _log(form: LogFormat) -> LogFormat:
    """Write what the package logs under `coterie` to the standard error."""
    handler, log = logging.StreamHandler(), logging.getLogger("coterie")
    handler.setFormatter(_Json() if form == "json" else logging.Formatter("coterie: %(message)s"))
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
    # what servers and devices say is what their commands print
    events, printed = logging.getLogger("coterie.deploy"), logging.StreamHandler(sys.stdout)
    events.handlers, events.propagate = ([], True) if form == "json" else ([printed], False)
    return form


def _event(line: str) -> None:
    """Log an event of a server or a device."""
    logging.getLogger("coterie.deploy").info("%s", line)


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
    log_format: Annotated[
        LogFormat,
        typer.Option(
            callback=_log, help="Of errors and logs, on the standard error: text or json."
        ),
    ] = "text",
) -> None:
    pass


def _load(recipe: str, overrides: list[str] | None, seed: int | None) -> "Recipe":
    with uncollected():
        from coterie.runs.recipes import recipe as recipes

    return recipes.load(
        recipe, [*(overrides or ()), *((f"seed={seed}",) if seed is not None else ())]
    )


def _line(console: "Console", text: str, style: str | None = None) -> None:
    """Print a line as it is, without rich's markup and colours."""
    console.print(text, style=style, markup=False, highlight=False)


def _say(line: str) -> None:
    print(f"  {printable(line)}", flush=True)


def _folder(name: str, resume: bool) -> Path:
    from coterie.runs.folder.lock import latest_folder, new_folder

    return latest_folder(name) if resume else new_folder(name)


def _error(line: str) -> None:
    logging.getLogger("coterie").error("%s", line)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


def _stop_at_signals() -> None:
    """Stop the command at SIGINT and SIGTERM. Further signals are ignored while it stops, so that
    they do not interrupt that.

    If the command has not ended after `STOPPING_S`, the next signal stops it again.
    """
    stopped = -STOPPING_S

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if (now := time.monotonic()) - stopped >= STOPPING_S:
            stopped = now
            raise _Terminated if number == signal.SIGTERM else KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        # a script's background jobs ignore SIGINT
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)


@contextmanager
def _stopping(note: str = RESUMABLE) -> Iterator[None]:
    """Turn an error into a message and an exit code, and a signal into a stop; print `note`."""
    _stop_at_signals()
    try:
        check_docstrings()
        yield
    except CoterieError as error:
        _error(printable(str(error), lines=True))
        raise typer.Exit(error.exit_code) from None
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _error(printable(f"{where}{error.strerror or error}", lines=True))
        raise typer.Exit(1) from None
    except KeyboardInterrupt as stop:
        # nothing is left to stop, and another signal would interrupt Python's exit
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        _error(note)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


class _Output(io.FileIO):
    """An output of this process. Once nobody reads it, or it is full, what is written is lost, and
    work goes on: a reader such as `head` must not end hours of training.
    """

    def __init__(self, file: int | str) -> None:
        super().__init__(file, "w", closefd=isinstance(file, str))
        self.error: OSError | None = None  # that nobody has caused by reading no further

    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = error
            return len(content)


def main() -> None:
    """Run the command line."""
    with suppress(ValueError):
        if 0 <= int(os.environ.get("COLUMNS", "")) < _NARROWEST:
            del os.environ["COLUMNS"]  # nothing could be shown
    output = _output("stdout")
    _output("stderr")
    wait_briefly()
    try:
        app()
    finally:
        sys.stdout.flush()
        if output.error is not None:
            print(f"coterie: standard output: {output.error.strerror}", file=sys.stderr)
            sys.exit(1)


def _output(name: str) -> _Output:
    """Have `sys.stdout` or `sys.stderr` end no work, also if it is closed; return where it goes."""
    stream = getattr(sys, name)
    output = _Output(os.devnull if stream is None else stream.fileno())
    # file names may not be valid text
    text = io.TextIOWrapper(
        io.BufferedWriter(output),
        getattr(stream, "encoding", "utf-8"),
        "backslashreplace",
        line_buffering=output.isatty() or name == "stderr",
    )
    setattr(sys, name, text)
    return output


def _personal(
    run: Path,
    clients: list[str] | None,
    base: str | None,
    follow: bool = False,
    reset: bool = False,
    writers: int = 1,
) -> tuple[dict[str, "PersonalModel"], dict[str, "PersonalClassifier"]]:
    """Return the language models and the classifiers of a run; one of the two is empty. Raises
    Refused if nobody's weights can follow what is written, or those of more than the `writers`.
    """
    from coterie import personal

    models = personal.load_all(run, clients, base=base, follow=follow or reset)
    language = {
        i: model for i, model in models.items() if isinstance(model, personal.PersonalModel)
    }
    following = [model.following for model in language.values() if model.following]
    if (follow or reset) and not 0 < len(following) <= writers:
        raise Refused(
            f"--follow: one writes, and {len(following)} models of {run} have weights to follow it",
            "Name one that mixes several parts by --client, or leave it out.",
        )
    for weights in following if reset else ():
        weights.reset()
    return language, {
        i: model for i, model in models.items() if isinstance(model, personal.PersonalClassifier)
    }
