"""Settings of several methods, chosen on validation with the same effort for each."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from coterie.core.callback import Callback
from coterie.core.errors import CoterieError, Refused
from coterie.core.files import read_json, write_atomically, write_json
from coterie.core.names import encoded
from coterie.core.result import ROUNDS, TUNING, Result, TunedRow, Tuning
from coterie.core.result.tuning import written
from coterie.methods import METHODS
from coterie.runs import run as runs
from coterie.runs.backends import LocalBackend
from coterie.runs.folder.candidates import folder_of
from coterie.runs.folder.lock import alone
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.tuning.search import Effort, Search, SearchResult, halving, part_of
from coterie.runs.tuning.trials import (
    Grid,
    RunAt,
    Settings,
    TrialRuns,
    checked,
    fields_of,
    own_values,
    trains,
)

SEARCH = "search.json"  # what a folder is the search of
CHOSEN, RUNS, TUNED = "chosen", "runs", "tune"  # folders; the last one in that of a comparison


@dataclass(frozen=True)
class Plan:
    """What to tune, see `tune`; each method occurs once, and the fields are `checked`."""

    methods: tuple[str, ...]
    recipe: Recipe
    given: Grid
    effort: Effort

    @cached_property
    def recipes(self) -> dict[str, Recipe]:
        """The recipe of each method before the search. Raises RecipeError."""
        return {name: self.recipe.with_method(name) for name in self.methods}

    @cached_property
    def trained(self) -> list[str]:
        """The methods that train something."""
        return [name for name, recipe in self.recipes.items() if trains(recipe)]

    @cached_property
    def rounds(self) -> int:
        """Rounds of a whole run; the fewest, if rounds are searched."""
        if ROUNDS in self.given:
            return int(min(self.given[ROUNDS]))
        return self.recipes[self.trained[0]].build_method().rounds

    def search(self, method: str, trials: TrialRuns[str]) -> Search:
        """Return the search for a method."""
        recipe = self.recipes[method]
        fields = fields_of(recipe, self.given)
        surely = partial(trials.surely, method) if ROUNDS not in self.given else None
        values, allowed = own_values(recipe, fields), partial(trials.allowed, method)
        return halving(fields, self.effort, self.rounds, values, surely, allowed)

    def chosen(self, method: str, settings: Settings) -> Recipe:
        """Return the recipe of a method with other settings."""
        return recipes.changed(self.recipes[method], settings) if settings else self.recipes[method]

    def to_json(self) -> dict[str, Any]:
        """Return what distinguishes this search from others, as JSON."""
        return {
            "methods": list(self.methods),
            "recipe": self.recipe.model_dump(mode="json"),
            "fields": {key: list(values) for key, values in self.given.items()},
            "effort": asdict(self.effort),
        }


def tune(
    methods: Sequence[str],
    recipe: Recipe,
    folder: Path,
    fields: Grid,
    effort: Effort,
    resume: bool,
    changed: bool,
    reporter: Callback,
) -> Tuning:
    """Choose the settings of each method by validation alone, see `coterie.tune`. The folder gets
    `tune.json`, `chosen/<method>.yaml` and `runs/`.
    """
    backend = LocalBackend()
    recipe = runs.without_auto(recipe, None, reporter, backend)
    plan = planned(methods, recipe, fields, effort)
    runs.check_beside_data(recipe, folder)
    _claim(folder, plan, resume or changed)
    reporter.preparing()
    for name in plan.trained:
        backend.prepare(plan.recipes[name])  # what is wrong is refused before anything starts
    with alone(folder):
        write_json(folder / SEARCH, plan.to_json())
        seeds = [recipe.seed + k for k in range(plan.effort.seeds)]

        def run(method: str, settings: Settings, seed: int) -> RunAt:
            row = plan.chosen(method, settings).model_copy(update={"seed": seed})
            return row, folder_of(row, folder / RUNS)

        trial_runs = TrialRuns(run, seeds, reporter, changed=changed, within=folder)
        searched = trial_runs.search({name: plan.search(name, trial_runs) for name in plan.trained})
        return _write(folder, plan, trial_runs, searched)


def planned(methods: Sequence[str], recipe: Recipe, fields: Grid, effort: Effort) -> Plan:
    """Return what to tune. Raises Refused if that is impossible."""
    if not methods:
        raise Refused("no methods to tune", "Name at least one: see `coterie methods`.")
    plan = Plan(tuple(dict.fromkeys(methods)), recipe, {}, effort)
    if not plan.trained:
        problem = f"there is nothing to tune: {', '.join(plan.methods)} train nothing"
        raise Refused(problem, "Name a method that trains: see `coterie methods`.")
    return replace(plan, given=checked([plan.recipes[name] for name in plan.trained], fields))


def _claim(folder: Path, plan: Plan, resume: bool) -> None:
    """Refuse a folder that holds another search, or none to resume. Raises Refused."""
    if not (folder / SEARCH).exists():
        if resume:
            remedy = "Check --out; or start from the beginning: the same command without --resume."
            raise Refused(f"there is no search to resume in {folder}", remedy)
        return
    runs.check_new(folder, resume, SEARCH, "search")
    before, now = read_json(folder / SEARCH), plan.to_json()
    if other := [key for key in now if before.get(key) != now[key]]:
        problem = f"{folder} holds a different search: it has other {' and '.join(other)}"
        raise Refused(problem, "Repeat the command that began it, or choose another --out.")


def _write(
    folder: Path, plan: Plan, trial_runs: TrialRuns[str], searched: Mapping[str, SearchResult]
) -> Tuning:
    """Write the result of the searches, and return it."""
    rows = []
    for name in plan.methods:
        row, recipe = _row(plan, name, trial_runs, searched.get(name, SearchResult(None)))
        about = f"# {METHODS[name].title}: {_note_of(row)}\n"
        write_atomically(folder / row.recipe, (about + recipes.dump(recipe)).encode())
        rows.append(row)
    name, search = next(iter(searched.items()))
    result = _results(trial_runs, name, search)[0]
    metric = f"validation {result.metric.name.removeprefix('test ')}"
    tuning = Tuning(
        recipe=plan.recipe.name,
        metric=replace(result.metric, name=metric),
        seeds=list(trial_runs.seeds),
        effort=stated(plan.effort, plan.rounds, "Every method that trains"),
        rows=tuple(rows),
        notes=_notes(plan, rows),
        versions=result.versions,
        machine=result.machine,
        folder=folder,
    )
    write_json(folder / TUNING, tuning.to_json())
    return tuning


def _results(trial_runs: TrialRuns[str], name: str, searched: SearchResult) -> list[Result]:
    """Return the results of a method's chosen settings. Raises CoterieError if no run finished."""
    assert searched.chosen is not None
    results = trial_runs.results(name, searched.chosen.trial)
    if not results:
        problem = trial_runs.tried(name, searched.chosen).problem
        remedy = (
            "Give smaller values, for instance --field training.experts.lr=..., with another --out."
        )
        raise CoterieError(f"{name}: no candidate finished; the last problem: {problem}", remedy)
    return results


def _row(
    plan: Plan, name: str, trial_runs: TrialRuns[str], searched: SearchResult
) -> tuple[TunedRow, Recipe]:
    """Return the chosen settings of a method, and its recipe."""
    path, chosen = f"{CHOSEN}/{encoded(name)}.yaml", searched.chosen
    if chosen is None:
        recipe = plan.recipes[name]
        rounds = recipe.build_method().rounds
        return TunedRow(method=name, recipe=path, chosen={}, rounds=rounds), recipe
    _results(trial_runs, name, searched)
    recipe = plan.chosen(name, trial_runs.settings(name, chosen.trial))
    tried = [trial_runs.tried(name, judged) for judged in searched.judged]
    best, trial = tried[searched.judged.index(chosen)], chosen.trial
    others = [j for j in searched.judged if j.trial != trial and j.trial.share == trial.share]
    row = TunedRow(
        method=name,
        recipe=path,
        chosen=best.settings,
        rounds=best.rounds,
        valid=best.valid,
        candidates=sum(candidate.rung == 0 for candidate in tried),
        runs=len(tried) * len(trial_runs.seeds),
        iterations=sum(candidate.iterations for candidate in tried),
        alike=sum(not trial_runs.surely(name, chosen, other) for other in others),
        at_edge=searched.at_edge,
        tried=tuple(tried),
    )
    return row, recipe


def _note_of(row: TunedRow) -> str:
    if row.valid is None:
        return "trains nothing, so that nothing was chosen"
    values = written({key: value for key, value in row.chosen.items() if key != ROUNDS})
    return f"{values}, {row.rounds} rounds, chosen on validation by coterie tune"


def stated(effort: Effort, rounds: int, who: str) -> str:
    """Return a sentence about the cost of a search."""
    first, *others = [part_of(rounds, share) for share in effort.shares(rounds)]
    stages = [f"{_counted(effort.count(0), 'setting')} in runs of {_counted(first, 'round')}"]
    for k, part in enumerate(others):
        count = effort.count(k + 1)
        best = f"{count} of them" if count > 1 else "one"
        stages.append(f"the best {best} in runs of {_counted(part, 'round')}")
    *before, last = stages
    tried = f"{', '.join(before)}, and {last}" if before else last
    runs = "once" if effort.seeds == 1 else f"with {effort.seeds} seeds"
    return (
        f"{who} had the same effort: it tried {tried}; where the best value was the smallest or "
        f"largest of its range, up to {effort.extensions} more beyond it. Each was run {runs}, and "
        f"judged on validation data alone."
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}s" if count > 1 else f"one {what}"


def _notes(plan: Plan, rows: Sequence[TunedRow]) -> list[str]:
    """Return notes on methods with few candidates, and on trials without a score."""
    notes = [
        f"{row.method}: only {_counted(row.candidates, 'setting')}, as its fields have no more "
        f"values."
        for row in rows
        if row.valid is not None and row.candidates < plan.effort.count(0)
    ]
    for row in rows:
        if lost := [trial for trial in row.tried if trial.problem]:
            count = f"{len(lost)} of {len(row.tried)} trials lost"
            notes.append(f"{row.method}: {count}; the first {lost[0].problem}.")
    return notes


def chosen_run(tuning: Tuning, method: str) -> Path:
    """Return the folder of the run that was chosen for a method, of the first seed."""
    path = tuning.path(method)
    return folder_of(recipes.load(str(path)), path.parent.parent / RUNS)


def effort_of(tuning: Tuning) -> str:
    """Describe the search, the result of each row, and which values lie at an edge of a grid."""
    parts = []
    for row in tuning.rows:
        if row.chosen:
            edge = " (at the end of its range)" if row.at_edge else ""
            parts.append(f"{row.method}: {written(row.chosen)}, {row.rounds} rounds{edge}")
    return f"{tuning.effort} Chosen: {'; '.join(parts)}."
