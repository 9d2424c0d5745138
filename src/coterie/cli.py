"""The command line. Heavy libraries are imported by the commands that need them, so that `--help` is quick."""

import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie import __version__
from coterie.errors import CoterieError, Refused

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.recipe import Recipe

app = typer.Typer(
    name="coterie",
    help="Train personal models together without sharing data.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Set = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field of the recipe, e.g. method.rounds=5. Repeatable.")
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Seed of the run (splits of the data have their own: data.seed).")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; default: a new one under runs/.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out, or with the latest of this recipe under runs/.")]


def _version(show: bool) -> None:
    if show:
        print(f"coterie {__version__}")
        raise typer.Exit


@app.callback()
def _main(version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False) -> None:
    pass


@app.command()
def run(
    recipe: Annotated[str, typer.Argument(help="A shipped recipe (`coterie recipes`) or a YAML file.")],
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """Run a recipe: train, score, and keep every client's personal model."""
    with _stopping():
        from rich.console import Console

        from coterie import run as runs

        loaded = _load(recipe, set_, seed)
        folder = out or _folder(loaded.name, resume)
        console = Console()
        from coterie.reports.terminal import Terminal

        with Terminal(console, len(loaded.compare_with) + 1) as terminal:
            results = runs.run(loaded, folder, resume=resume, reporter=terminal)
        _show(console, [runs.row(result["method"], [result]) for result in results], loaded.name)
        console.print(
            f"Everything is in {folder}: open {folder}/report.html, or `tensorboard --logdir {folder}`.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


@app.command()
def compare(
    methods: Annotated[list[str], typer.Argument(help="Methods (`coterie methods`).")],
    recipe: Annotated[str, typer.Option("--recipe", help="A shipped recipe or a YAML file: the data, base and budget of all rows.")],
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs per method, with consecutive seeds.")] = 3,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
) -> None:
    """One table: methods on the same data, base and budget, mean and deviation over seeds."""
    with _stopping():
        from rich.console import Console

        from coterie import run as runs
        from coterie.reports.terminal import Terminal

        loaded = _load(recipe, set_, seed)
        folder = out or _folder(f"compare-{loaded.name}", resume)
        console = Console()
        with Terminal(console, len(set(methods)) * seeds) as terminal:
            comparison = runs.compare(methods, loaded, folder, seeds=seeds, resume=resume, reporter=terminal)
        _show(console, comparison["rows"], f"{loaded.name}, {seeds} seeds")
        console.print(f"Everything is in {folder}; the table is {folder}/comparison.json.", markup=False, highlight=False, soft_wrap=True)


@app.command("methods")
def list_methods() -> None:
    """The methods, one line each, with where they come from."""
    from coterie.methods import METHODS

    for name, entry in METHODS.items():
        print(f"{name:<14} {entry.paper}")


@app.command("recipes")
def list_recipes() -> None:
    """The shipped recipes, one line each."""
    from coterie import recipes

    for name in recipes.names():
        section = recipes.read(recipes.find(name))
        print(f"{name:<14} {section.get('description', '')}" + (f" [{section['paper']}]" if section.get("paper") else ""))


def _load(recipe: str, overrides: list[str] | None, seed: int | None) -> "Recipe":
    from coterie import recipe as recipes

    return recipes.load(recipe, [*(overrides or ()), *((f"seed={seed}",) if seed is not None else ())])


def _folder(name: str, resume: bool) -> Path:
    """A new folder under runs/, or the latest one of that name."""
    if not resume:
        return Path("runs") / f"{name}-{datetime.now():%Y%m%d-%H%M%S}"
    found = sorted(Path("runs").glob(f"{name}-*-*"))
    if not found:
        raise Refused(f"there is no run of {name} under runs/ to resume", "Name its folder by --out, or start it without --resume.")
    return found[-1]


def _show(console: "Console", rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from coterie.methods import METHODS
    from coterie.reports.terminal import tables

    console.print(f"\n{title}", style="bold", highlight=False)
    for table in tables(rows, {name: entry.title for name, entry in METHODS.items()}):
        console.print(table)
    console.print(
        "Lower is better. Each client's model right after its last local iteration; synced: after one more synchronisation.",
        highlight=False,
    )


class _Terminated(KeyboardInterrupt):
    """SIGTERM, treated like Ctrl-C."""


@contextmanager
def _stopping() -> Iterator[None]:
    """Turn errors into one message and an exit code, and signals into a stop that can be resumed."""

    def terminate(number: int, frame: FrameType | None) -> None:
        raise _Terminated

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    except CoterieError as error:
        print(f"coterie: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt as stop:
        print("coterie: stopped. What was done until the last checkpoint is kept: the same command with --resume goes on.", file=sys.stderr)
        raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


def main() -> None:
    app()
