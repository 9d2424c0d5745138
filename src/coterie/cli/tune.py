"""The command that chooses settings: tune."""

from typing import Annotated

import typer

from coterie.cli.base import Changed, Out, Resume, Seed, Set, Track, Trust, _load, _stopping, app
from coterie.core.errors import Refused

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


@app.command()
def tune(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods (`coterie methods`).", show_default=False)
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A shipped recipe or a YAML file: the data, base and budget of all methods.",
            show_default=False,
        ),
    ] = None,
    field: Fields = None,
    trials: Trials = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Runs of each setting, with consecutive seeds.")
    ] = 1,
    set_: Set = None,
    seed: Seed = None,
    out: Out = None,
    resume: Resume = False,
    resume_changed: Changed = False,
    track: Track = None,
    trust_remote_code: Trust = False,
) -> None:
    """Choose settings on validation data: learning rates, rounds and any field, with the same
    effort for every method. For instance: coterie tune cobo local --recipe cobo-digits
    """
    with _stopping():
        names, source = _methods_and_recipe(methods or [], recipe)
        loaded = _load(source, set_, seed)
        from rich.console import Console

        from coterie import api
        from coterie.reports import tuning as reports
        from coterie.runs.tuning import spaces
        from coterie.runs.tuning.tune import chosen_run

        tuned = api.tune(
            names or [loaded.method["name"]],
            loaded,
            fields=spaces.parse(field or ()),
            trials=trials,
            seeds=seeds,
            out=out,
            resume=resume,
            resume_changed=resume_changed,
            track=track or (),
            progress=True,
        )
        console, folder = Console(), tuned.folder
        console.print()
        console.print(reports.terminal(tuned))
        for note in (*reports.READING, tuned.effort, *tuned.notes):
            console.print(f"- {note}", markup=False, highlight=False)
        first = next(row for row in tuned.rows if row.valid is not None)
        kept = chosen_run(tuned, first.method)
        console.print(
            f"Open {folder}/tune.html for pictures of the search. The runs of what was chosen are "
            f"there with their models, e.g. {kept}; to run it again, say with other seeds: "
            f"`coterie run {tuned.path(first.method)}`.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def _methods_and_recipe(names: list[str], recipe: str | None) -> tuple[list[str], str]:
    """Return the methods and the recipe. Without --recipe the first name is the recipe's. Raises
    Refused.
    """
    if recipe is not None and not names:
        raise Refused("no methods to tune", "Name at least one: see `coterie methods`.")
    if recipe is not None:
        return names, recipe
    if not names:
        raise Refused(
            "no methods to tune, and no recipe",
            "For instance: coterie tune cobo local --recipe cobo-digits",
        )
    first, *others = names
    from coterie.methods import METHODS

    if first in METHODS:
        raise Refused(
            "--recipe: missing", f"For instance: coterie tune {' '.join(names)} --recipe quickstart"
        )
    return others, first
