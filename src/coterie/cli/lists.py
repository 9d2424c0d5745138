"""Commands that show what there is, methods, recipes and the data of a run; and reproduce."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.base import Changed, Client, Set, Trust, _line, _load, _stopping, app
from coterie.cli.train import Trials
from coterie.core.errors import Refused
from coterie.core.importing import require, uncollected


@app.command()
def data(
    source: Annotated[
        str,
        typer.Argument(
            help="A recipe, a folder with one folder per client, or a table that names clients."
        ),
    ],
    set_: Set = None,
    client: Client = None,
    examples: Annotated[int, typer.Option(min=0, help="Training rows shown of each client.")] = 1,
    files: Annotated[
        bool, typer.Option("--files", help="Name the splits of each file or row.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
    trust_remote_code: Trust = False,
) -> None:
    """Look at the data of a recipe as a run would read them, without training: sizes, what is not
    read, what clients share, odd characters, and examples as the model sees them.
    """
    with _stopping("stopped."):
        from coterie.runs.problems import data_summary

        recipe = _load(source, set_, None)
        with uncollected():
            summary = data_summary.summary_of(recipe, examples, files, client)
        if as_json:
            print(json.dumps(asdict(summary), ensure_ascii=False, indent=1))
            return
        from rich.console import Console

        from coterie.reports.data import print_data

        print_data(Console(), summary)


@app.command("methods")
def list_methods() -> None:
    """List the methods by what they are for, with the paper of each."""
    from coterie.methods import METHODS

    margin = max(map(len, METHODS)) + 2
    for group, entries in groupby(METHODS.items(), lambda item: item[1].group):
        print(f"{group}:")
        _list({name: entry.paper for name, entry in entries}, margin)
        print()
    print("Which one to take, by data, clients, bytes and privacy: docs/which-method.md")


@app.command("recipes")
def list_recipes(
    name: Annotated[
        str | None, typer.Argument(help="A shipped recipe to print as YAML.", show_default=False)
    ] = None,
) -> None:
    """List the shipped recipes, or print one as YAML: coterie recipes quickstart > mine.yaml."""
    from coterie.runs import recipes

    if name is not None:
        with _stopping("stopped."):
            print(recipes.find(name).read_text(encoding="utf-8"), end="")
        return
    names = recipes.names()
    _list({name: _about(name) for name in names}, max(map(len, names)) + 2)


def _about(name: str) -> str:
    """Return a one-line description of a recipe, or why it cannot be read."""
    from coterie.core.errors import Refused
    from coterie.runs import recipes

    try:
        section = recipes.read(recipes.find(name))
    except Refused as error:
        return str(error).splitlines()[0]
    paper = section.get("paper")
    return f"{section.get('description', '')}" + (f" [{paper}]" if paper else "")


def _list(items: Mapping[str, str], margin: int) -> None:
    """Print names with their descriptions, wrapped at 80 columns, which begin at `margin`."""
    for name, text in items.items():
        lines = wrap(text, 80 - margin, break_on_hyphens=False) or [""]
        print(f"{name:<{margin}}{lines[0]}".rstrip())
        for line in lines[1:]:
            print(" " * margin + line)


if TYPE_CHECKING:
    from coterie.runs.tuning.search import Effort


@app.command()
def reproduce(
    name: Annotated[
        str | None,
        typer.Argument(
            help="A table, figure or theorem, e.g. comigs/table2. Without it: list all."
        ),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(
            help="small: the embedded base, on two cores. smollm2: SmolLM2-135M in place of it. "
            "paper: the paper's base models and sizes."
        ),
    ] = "small",
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Runs per cell. Default: as many as in the paper.")
    ] = None,
    columns: Annotated[str, typer.Option(metavar="A,B", help="Only these columns.")] = "",
    rows: Annotated[str, typer.Option(metavar="A,B", help="Only these rows.")] = "",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search the settings of every row with the same effort, as `coterie tune` does, "
            "in place of the fixed set that the table's file names.",
        ),
    ] = False,
    trials: Trials = None,
    set_: Set = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the runs. Default: runs/reproduce-PAPER-SCALE.")
    ] = None,
    resume_changed: Changed = False,
    trust_remote_code: Trust = False,
) -> None:
    """Reproduce a table, figure or theorem of a paper. Shows measured beside published values, and
    which of the paper's statements hold. Finished runs are reused.
    """
    with _stopping():
        from rich.console import Console

        from coterie.papers import tables, theorems

        console = Console()
        if name is None:
            for known in tables.names():
                print(f"{known:<21} {tables.load(known).title}")
            for known in theorems.NAMES if theorems.checkout() else ():
                print(f"{known:<21} a theorem, as an experiment with checked claims")
            return
        if name not in tables.names() and name not in theorems.NAMES:
            problem = f"{name}: there is no such table, figure or theorem"
            raise Refused(problem, "Run `coterie reproduce` to list all.")
        if scale not in tables.SCALES:
            problem = f"--scale {scale}: there is no such scale"
            raise Refused(problem, f"Choose among: {', '.join(tables.SCALES)}.")
        package = theorems.load(name) if name in theorems.NAMES else None
        require("coterie reproduce", "scipy")
        folder = out or Path("runs") / f"reproduce-{name.partition('/')[0]}-{scale}"
        if package:
            if seeds or columns or rows or set_ or tune or scale != "small":
                raise Refused(
                    f"{name} is a theorem: it has no scales, seeds, columns, rows, recipes or "
                    f"settings",
                    "Leave those options out.",
                )
            stem = folder / name.replace("/", "-")
            package.show(console, package.THEOREMS[name](0), stem)
            print(f"The picture is in {stem}.html.")
            return
        from coterie.papers import reproduce as reproduction
        from coterie.papers.job import Job
        from coterie.papers.page import notes, statements_of, terminal
        from coterie.reports.progress import SearchTerminal, Terminal
        from coterie.reports.tables import verdicts

        chosen = _parts(columns)
        effort = _effort(tune, trials)
        job = Job(
            name, scale, folder, seeds, chosen, _parts(rows), set_ or (), resume_changed, effort
        )
        if tune:
            with SearchTerminal(console) as search_display:
                reproduction.search(job, search_display)
        with Terminal(console, job.most) as reporter:
            result = reproduction.reproduce(job, reporter)
        changed = f", with {', '.join(result.overrides)}" if result.overrides else ""
        heading = f"\n{result.title}, scale {scale}, seeds {result.seeds}{changed}"
        _line(console, heading, style="bold")
        for table in terminal(result, console.width):
            console.print(table)
        if result.statements:
            console.print("what the paper says", style="italic")
            verdicts(console, statements_of(result))
        for note in notes(result):
            _line(console, f"- {note}")
        print(f"Everything is in {folder}: open {job.stem}.html, or read {job.stem}.md.")


def _effort(tune: bool, trials: int | None) -> "Effort | None":
    from coterie.runs.tuning.search import Effort

    if not tune and trials is not None:
        raise Refused("--trials is of a search", "Give --tune too, or leave it out.")
    if not tune:
        return None
    return Effort() if trials is None else Effort(trials)


def _parts(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)
