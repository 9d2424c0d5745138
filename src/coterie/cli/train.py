"""Commands that train: run, compare, tune."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli import base as common
from coterie.core.errors import Refused
from coterie.core.importing import available, uncollected
from coterie.core.printing import printable

if TYPE_CHECKING:
    from rich.console import Console

    from coterie.core.result import Row
    from coterie.runs.recipes.recipe import Recipe


Methods = Annotated[
    list[str] | None, typer.Argument(help="Methods (`coterie methods`).", show_default=False)
]
Of = Annotated[
    str | None,
    typer.Option(
        help="A shipped recipe or a YAML file: the data, base and budget of all methods.",
        show_default=False,
    ),
]
Fields = Annotated[
    list[str] | None,
    typer.Option(
        "--field",
        metavar="KEY=V1,V2",
        help="Search this field of the recipe too, beside the learning rates: the values to begin "
        "with. Methods that do not have it do without. Repeatable.",
    ),
]
Trials = Annotated[
    int | None,
    typer.Option(
        "--trials",
        min=1,
        help="How many settings to try for each method: all of them in short runs, the better "
        "half again in longer ones, and so on. Default: 8.",
    ),
]


@common.app.command()
def run(
    recipe: Annotated[
        str,
        typer.Argument(
            help="A shipped recipe (`coterie recipes`), a YAML file, a folder with one folder per "
            "client, or a table that names clients."
        ),
    ],
    set_: common.Set = None,
    seed: common.Seed = None,
    out: common.Out = None,
    resume: common.Resume = False,
    resume_changed: common.Changed = False,
    track: common.Track = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time",
            metavar="30m",
            help="End in this time on this machine: rounds, iterations, batches and windows are "
            "chosen by it. The field `time` of the recipe.",
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Train nothing; estimate clients, tokens, parameters, bytes, time and memory.",
        ),
    ] = False,
    trust_remote_code: common.Trust = False,
) -> None:
    """Run a recipe: train and evaluate a personal model for every client."""
    with common._stopping("stopped." if dry_run else common.RESUMABLE):
        # before the heavy imports, so that mistakes show at once
        given = [*(set_ or ()), *((f"time={time}",) if time else ())]
        loaded = common._load(recipe, given, seed)
        if dry_run:
            _dry_run(loaded)
            return
        from rich.console import Console

        from coterie.reports.tables import mixture_tables

        with uncollected():
            from coterie import api

        folder = out or common._folder(loaded.name, resume or resume_changed)
        console = Console()
        done = api.run(
            loaded,
            out=folder,
            resume=resume,
            resume_changed=resume_changed,
            track=track or (),
            progress=True,
        )
        for table in mixture_tables([*done.baselines.values(), done.result]):
            console.print(table)
        _show(console, done.rows, loaded.name, loaded.method["name"])
        print(
            f"Everything is in {folder}: open {folder}/report.html"
            + (f", or `tensorboard --logdir {folder}`." if available("tensorboard") else ".")
        )


def _dry_run(recipe: "Recipe") -> None:
    """Print the estimated cost of a recipe, one line per method, without writing anything."""
    from rich.console import Console

    from coterie.reports.tables import clock, estimate_table
    from coterie.runs.budget import advice, planned
    from coterie.runs.estimate import estimates

    console, seconds, once = Console(), list[float](), 0.0
    recipe, lines = planned(recipe)
    for line in filter(None, [*lines, recipe.limit]):
        print(line)
    for prepared, estimate in estimates(recipe):
        estimate_table(console, prepared, estimate, first=not seconds)
        seconds.append(estimate.seconds)
        once += estimate.once
    if len(seconds) > 1:
        print(f"All {len(seconds)} methods: about {clock(sum(seconds))}.")
    if hint := advice(recipe, sum(seconds), once):
        print(hint)
    print("Estimates from a few steps on this machine.\nNothing was written.")


@common.app.command()
def compare(
    methods: Methods = None,
    recipe: Of = None,
    rivals: Annotated[
        bool,
        typer.Option(
            "--rivals",
            help="Take the methods that one compares with on such data: coterie compare --rivals "
            "RECIPE.",
        ),
    ] = False,
    seeds: Annotated[
        int, typer.Option(min=1, help="Number of runs per method, with consecutive seeds.")
    ] = 3,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="First choose the settings of each method on validation data, with the same "
            "effort, as `coterie tune` does.",
        ),
    ] = False,
    field: Fields = None,
    trials: Trials = None,
    set_: common.Set = None,
    seed: common.Seed = None,
    out: common.Out = None,
    resume: common.Resume = False,
    resume_changed: common.Changed = False,
    track: common.Track = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Compare methods on the same data, base and budget: mean and standard deviation over seeds."""
    with common._stopping():
        if rivals and methods and recipe is None:
            *methods, recipe = methods  # more rows, then the recipe
        names, recipe = _methods_and_recipe(methods or [], recipe, "compare", rivals)
        loaded = common._load(recipe, set_, seed)
        from rich.console import Console

        from coterie import api
        from coterie.runs.tuning.trials import parse

        comparison = api.compare(
            names,
            loaded,
            seeds=seeds,
            rivals=rivals,
            tune=tune,
            fields=parse(field) if field else None,
            trials=trials,
            out=out,
            resume=resume,
            resume_changed=resume_changed,
            track=track or (),
            progress=True,
        )
        folder, console = out or comparison.folder, Console()
        title = f"{loaded.name}, {seeds} seed{'s' * (seeds > 1)}"
        _show(console, comparison.rows, title, loaded.method["name"], comparison.notes)
        print(f"Everything is in {folder}; open {folder}/report.html.")


@common.app.command()
def tune(
    methods: Methods = None,
    recipe: Of = None,
    field: Fields = None,
    trials: Trials = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each setting, with consecutive seeds.")
    ] = 1,
    set_: common.Set = None,
    seed: common.Seed = None,
    out: common.Out = None,
    resume: common.Resume = False,
    resume_changed: common.Changed = False,
    track: common.Track = None,
    trust_remote_code: common.Trust = False,
) -> None:
    """Choose settings on validation data: learning rates, rounds and any field, with the same
    effort for every method. For instance: coterie tune cobo local --recipe cobo-digits
    """
    with common._stopping():
        names, source = _methods_and_recipe(methods or [], recipe, "tune")
        loaded = common._load(source, set_, seed)
        from rich.console import Console

        from coterie import api
        from coterie.reports import tuning as reports
        from coterie.runs.tuning.trials import parse
        from coterie.runs.tuning.tune import chosen_run

        tuned = api.tune(
            names or [loaded.method["name"]],
            loaded,
            fields=parse(field or ()),
            trials=trials,
            seeds=seeds,
            out=out,
            resume=resume,
            resume_changed=resume_changed,
            track=track or (),
            progress=True,
        )
        console, folder = Console(), out or tuned.folder
        console.print()
        console.print(reports.terminal(tuned, console.width))
        for note in (*reports.READING, tuned.effort, *tuned.notes):
            common._line(console, f"- {note}")
        first = next(row for row in tuned.rows if row.valid is not None)
        kept = chosen_run(tuned, first.method)
        print(
            f"Every trial is in {folder}/tune.json. The runs of what was chosen are there with "
            f"their models, e.g. {kept}; to run it again, say with other seeds: "
            f"`coterie run {tuned.path(first.method)}`."
        )


def _methods_and_recipe(
    names: list[str], recipe: str | None, to: str, more: bool = False
) -> tuple[list[str], str]:
    """Return the methods and the recipe. Without --recipe the first name is the recipe's, unless it
    is a method's. Raises Refused if none are named, and there are not `more`.
    """
    if recipe is not None and not names and not more:
        raise Refused(f"no methods to {to}", "Name at least one: see `coterie methods`.")
    if recipe is not None:
        return names, recipe
    if not names:
        problem = f"no methods to {to}, and no recipe"
        raise Refused(problem, f"For instance: coterie {to} cobo local --recipe cobo-digits")
    first, *others = names
    from coterie.methods import METHODS

    if first in METHODS:
        problem = "--recipe: missing"
        raise Refused(problem, f"For instance: coterie {to} {' '.join(names)} --recipe quickstart")
    return others, first


def _show(
    console: "Console",
    rows: "Sequence[Row]",
    title: str,
    own_method: str,
    notes: "Sequence[str] | None" = None,
) -> None:
    from coterie.core.metrics import direction
    from coterie.core.result.rows import comparability, reading
    from coterie.methods import METHODS
    from coterie.reports.tables import tables
    from coterie.reports.verdict import verdict

    *beside, scores = tables(
        rows, {row.method: METHODS[row.method].title for row in rows}, console.width
    )
    for table in beside:
        console.print(table)
    for note in comparability(rows, own_method) if notes is None else notes:
        common._line(console, f"- {note}")
    common._line(console, f"\n{printable(title)}", style="bold")
    console.print(scores)
    which = direction(rows[0].metric).capitalize()
    console.print(f"{which}, best in bold. {reading(rows[0])}", highlight=False)
    if sentence := verdict(rows, own_method):
        common._line(console, f"\n{sentence}")
