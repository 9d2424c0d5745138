"""Run a recipe, or several methods on one, into a folder."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from coterie.core.callback import Callback
from coterie.core.errors import CoterieError, Divergence, RecipeError, Refused
from coterie.core.files import write_atomically, write_json
from coterie.core.protocol import ClientId
from coterie.core.result import RESULT, ROUTING, Comparison, Result
from coterie.core.result import rows as comparing
from coterie.core.threads import computing
from coterie.engines.engine import Listener
from coterie.methods import METHODS
from coterie.runs.backends import (
    Backend,
    CommonThreads,
    LocalBackend,
    SharedData,
    computing_threads,
)
from coterie.runs.budget import advice, planned
from coterie.runs.estimate import RunEstimator
from coterie.runs.execution import Execution, ScoreTexts
from coterie.runs.folder.candidates import adopt, folder_of, same_recipe
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.lock import alone, check_apart
from coterie.runs.folder.metrics import check_metrics
from coterie.runs.folder.names import RECIPE
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

OVER = 1.05  # of the time that one has: a round that would end later is not begun


@dataclass
class JoinWarnings(Listener):
    """Says who is there while a server waits for clients, and warns of each that is refused."""

    reporter: Callback

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        self.reporter.warning(0, client, reason)

    def noted(self, client: ClientId, note: str) -> None:
        self.reporter.noted([note])


def run(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    changed: bool = False,
    reporter: Callback | None = None,
    backend: Backend | None = None,
    score_texts: ScoreTexts | None = None,
) -> list[Result]:
    """Run a recipe into a folder, see `coterie.run`, and the methods of its `compare_with` into
    `baselines/<name>/` there. Return the results, the recipe's own method last.
    """
    check_new(folder, resume or changed, RECIPE, "run")
    reporter, backend, begun = reporter or Callback(), backend or LocalBackend(), time.monotonic()
    recipe = without_auto(recipe, folder if resume or changed else None, reporter, backend)
    rows = [(recipe.with_method(name), folder / "baselines" / name) for name in recipe.compare_with]
    rows.append((recipe, folder))
    if resume or changed:
        _check_begun(folder, rows)
    until = None if recipe.time is None or backend.devices else begun + OVER * recipe.time
    return execute_all(
        rows,
        reporter,
        backend=backend,
        changed=changed,
        within=folder,
        score_texts=score_texts,
        until=until,
    )


def without_auto(
    recipe: Recipe, folder: Path | None, reporter: Callback, backend: Backend
) -> Recipe:
    """Return a recipe with `auto` resolved, and report the choices. Raises Refused."""
    recipe, choices = planned(recipe, folder, devices=backend.devices)
    for line in choices:
        reporter.chosen(line)
    return recipe


def execute_all(
    rows: Sequence[tuple[Recipe, Path]],
    reporter: Callback,
    titles: Mapping[Path, str] = {},
    backend: Backend | None = None,
    changed: bool = False,
    within: Path | None = None,
    unfit: Callable[[Path, CoterieError], object] | None = None,
    ended: Callable[[Path], object] | None = None,
    whole: bool = True,
    score_texts: ScoreTexts | None = None,
    until: float | None = None,
) -> list[Result]:
    """Run or resume every row, a recipe and its folder; return the results of those that have one.

    All are prepared before the first one starts, so that mistakes are refused at once. Rows with
    the same base and data share them. Otherwise a later row reloads its own when it starts, so that
    memory never holds those of all rows.

    `titles` are what the reporter calls rows, by folder; by default their methods. With `changed`,
    unfinished rows continue with changed base, data, clients or metrics. `within`, the folder of
    all, is locked; by default each row's own. `unfit` is called with folder and error of a row
    without a result, as its method refuses it or it diverged; by default that is raised. `ended` is
    called with the folder of each row that has ended; by `until`, of `time.monotonic`, all should
    have. A row trains others as its parts, unless rows are not the `whole` of what is run.
    """
    backend = backend or LocalBackend()
    if not backend.devices:
        for recipe, folder in rows:
            check_beside_data(recipe, within or folder)
    given = rows
    parts = {
        at: [row for row in rows if recipe.trains(row[0])] if within and whole else []
        for recipe, at in rows
    }
    trained = {folder for of in parts.values() for _, folder in of}
    rows = sorted(rows, key=lambda row: not parts[row[1]])
    reporter.preparing()
    threads, foresight, data = CommonThreads(rows, backend), RunEstimator(), SharedData()
    first, refused, results = list[Prepared](), set[Path](), dict[Path, Result]()
    for recipe, folder in rows:
        try:
            prepared = data.prepared(recipe, backend)
        except RecipeError as error:
            (unfit or _raised)(folder, error)
            refused.add(folder)
            continue
        first = first or [prepared]
        # of another recipe `_executed` says more
        if not changed and RecordedInputs(folder).begun() and same_recipe(recipe, folder):
            RecordedInputs(folder).check(Inputs.of(prepared))
        if (reporter.shows_estimate or until) and not backend.devices and recipe.engine != "flower":
            # what is estimated computes as what is run: as many clients at once
            planned = threads.assign(prepared, folder)
            with computing(computing_threads(planned)):
                foresight.add(planned, (folder / RESULT).exists(), folder in trained)
        del prepared
    if not first:
        return []  # all are refused
    costs = foresight.costs()
    _announce(reporter, first[0], [recipe for recipe, _ in given], costs)
    data.keep(*first)
    with ExitStack() as stack:
        if within is not None:
            stack.enter_context(alone(within))
        _check_free(rows)
        for recipe, folder in rows:
            if folder in refused:
                continue
            # what is done after this row's last round, and in the rows after it
            left = sum(last for _, last in costs[:1]) + sum(seconds for seconds, _ in costs[1:])
            costs = costs[1:]
            title = titles.get(folder) or METHODS[recipe.method["name"]].title
            with alone(folder):
                prepared = first.pop() if first else data.prepared(recipe, backend)
                prepared = threads.assign(prepared, folder)
                ends = None if until is None else until - left
                execution = Execution(
                    prepared, folder, reporter, title, backend, parts[folder], score_texts, ends
                )
                try:
                    results[folder] = _executed(execution, changed)
                except Divergence as error:
                    (unfit or _raised)(folder, error)
                del prepared, execution
                if ended is not None:
                    ended(folder)
    return [results[folder] for _, folder in given if folder in results]


def _announce(
    reporter: Callback,
    first: Prepared,
    recipes: Sequence[Recipe],
    costs: Sequence[tuple[float, float]],
) -> None:
    """Report what people should know before training, and the seconds of each row."""
    limits = [recipe.limit for recipe in recipes]
    seconds, last = (sum(cost[k] for cost in costs) for k in (0, 1))
    notes = [*first.problem.federation.notes, *limits, advice(recipes[-1], seconds, last)]
    reporter.noted(list(dict.fromkeys(note for note in notes if note)))
    reporter.expects([cost[0] for cost in costs])


def _check_free(rows: Sequence[tuple[Recipe, Path]]) -> None:
    for _, folder in rows:
        with alone(folder):
            pass


def _raised(folder: Path, error: CoterieError) -> None:
    raise error


def check_beside_data(recipe: Recipe, folder: Path) -> None:
    """Refuse a folder for results in, or around, the data of a recipe. Raises Refused."""
    places = (getattr(recipe.data, name, None) for name in ("path", "root", "dataset"))
    root = next(filter(None, places), None)
    if root is None and hasattr(recipe.data, "root"):
        root = os.environ.get("COTERIE_DATA")
    if root:
        check_apart(folder, Path(root))


def _check_begun(folder: Path, rows: Sequence[tuple[Recipe, Path]]) -> None:
    """Refuse to resume a run that has not begun. Raises Refused."""
    begun = ((path / RECIPE).exists() or RecordedInputs(path).begun() for _, path in rows)
    if not (folder / "lock").exists() and not any(begun):
        raise Refused(
            f"there is no run to resume in {folder}"
            f"{'' if folder.is_dir() else ', which does not exist'}",
            "Check --out; or start from the beginning: the same command without --resume.",
        )


def _executed(execution: Execution, changed: bool) -> Result:
    """Return the result of a row, started or resumed."""
    folder, kept = execution.folder, RecordedInputs(execution.folder)
    execution.restore()
    execution.checkpoints.tidy()
    inputs = Inputs.of(execution.state.prepared)
    if changed and kept.begun():
        kept.accept(inputs)
    elif kept.begun():
        kept.check(inputs)
        progress = execution.state.progress
        check_metrics(folder, progress["position"], progress.get("metrics"))
    else:
        kept.begin(inputs)
    if not execution.recipe.samples:
        (folder / ROUTING).unlink(missing_ok=True)
    if kept.done():
        execution.engine.close()
        execution.reporter.known(execution.title)
        return Result.read(folder)
    write_atomically(folder / RECIPE, recipes.dump(execution.recipe).encode())
    return execution.execute()


def check_new(
    folder: Path, resume: bool, file: str = Comparison.file, what: str = "comparison"
) -> None:
    """Refuse a folder that holds such a file, unless it is to be resumed. Raises Refused."""
    if (folder / file).exists() and not resume:
        problem = f"{folder} already holds a {what}"
        raise Refused(problem, "Resume it with --resume, or choose another --out.")


def compare(
    methods: Sequence[str],
    recipe: Recipe,
    folder: Path,
    *,
    seeds: int = 3,
    resume: bool = False,
    changed: bool = False,
    reporter: Callback | None = None,
    chosen: Mapping[str, Recipe] | None = None,
    effort: str | None = None,
    searched: Path | None = None,
    rivals: bool = False,
    score_texts: ScoreTexts | None = None,
) -> Comparison:
    """Compare methods, see `coterie.compare`. `chosen` has the recipes of tuned methods, `effort` a
    sentence about the cost. Runs of the comparison that are in `searched`, the folder of the
    search, are not repeated. Of `rivals`, those that cannot run are left out, and the notes say so.
    """
    if not methods:
        raise Refused("no methods to compare", "Name at least one: see `coterie methods`.")
    check_new(folder, resume or changed)
    if recipe.time is not None:
        raise Refused("time: only `coterie run` ends in a given time", "Leave it out.")
    reporter = reporter or Callback()
    recipe = without_auto(recipe, folder if resume or changed else None, reporter, LocalBackend())
    recipes_of = {name: (chosen or {}).get(name) or recipe.with_method(name) for name in methods}
    numbers = [recipe.seed + k for k in range(seeds)]
    rows = [
        (row.model_copy(update={"seed": number}), folder / name / f"seed-{number}")
        for name, row in recipes_of.items()
        for number in numbers
    ]
    if resume or changed:
        _check_begun(folder, rows)
    if searched is not None:
        with alone(folder):
            for row, path in rows:
                adopt(row, folder_of(row, searched), path)
    titles = {
        path: METHODS[row.method["name"]].title + (f", seed {row.seed}" if seeds > 1 else "")
        for row, path in rows
    }
    left_out: dict[str, str] = {}  # rows without a result, by their methods

    def unfit(path: Path, error: CoterieError) -> None:
        if (name := path.parent.name) == recipe.method["name"]:
            raise error
        why = "; ".join(error.mistakes) if isinstance(error, RecipeError) else error.problem
        left_out[name] = f"{METHODS[name].title} is left out: {why}"
        reporter.unfit(titles[path], why)

    results = execute_all(
        rows,
        reporter,
        titles,
        changed=changed,
        within=folder,
        unfit=unfit if rivals else None,
        score_texts=score_texts,
    )
    table = comparing.rows([of for of in results if of.method not in left_out])
    comparison = Comparison(
        recipe=recipe.name,
        own=recipe.method["name"],
        seeds=numbers,
        metric=results[0].metric,
        scored=comparing.reading(table[0]),
        rows=tuple(table),
        notes=[
            *filter(None, [effort]),
            *left_out.values(),
            *comparing.comparability(table, recipe.method["name"]),
        ],
        versions=results[0].versions,
        machine=results[0].machine,
        folder=folder,
    )
    write_json(folder / Comparison.file, comparison.to_json())
    return comparison
