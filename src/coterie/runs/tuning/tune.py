"""Settings chosen on validation for several methods, with the same effort for each."""

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
from coterie.runs.tuning.search import Effort, Found, Search, halving, part_of
from coterie.runs.tuning.spaces import Grid, checked, fields_of, own_values, trains
from coterie.runs.tuning.trials import RunAt, Settings, TrialRuns

SEARCH = "search.json"  # what a folder is the search of
CHOSEN, RUNS, TUNED = "chosen", "runs", "tune"  # folders; the last one in that of a comparison


@dataclass(frozen=True)
class Plan:
    """What is to be tuned.

    Args:
        methods: Names, each once.
        recipe: The data, base and budget of all of them.
        given: Fields beside the learning rates, and their values, see `spaces.checked`.
        effort: Of each method.
    """

    methods: tuple[str, ...]
    recipe: Recipe
    given: Grid
    effort: Effort

    @cached_property
    def own(self) -> dict[str, Recipe]:
        """The recipe of each method before anything is chosen. Raises RecipeError."""
        return {name: self.recipe.with_method(name) for name in self.methods}

    @cached_property
    def trained(self) -> list[str]:
        """The methods that train something."""
        return [name for name, recipe in self.own.items() if trains(recipe)]

    @cached_property
    def rounds(self) -> int:
        """Of a whole run; where rounds are a field of the search, the fewest."""
        if ROUNDS in self.given:
            return int(min(self.given[ROUNDS]))
        return self.own[self.trained[0]].build_method().rounds

    def search(self, method: str, trials: TrialRuns[str]) -> Search:
        """Return the search for a method."""
        recipe = self.own[method]
        fields = fields_of(recipe, self.given)
        return halving(
            fields,
            self.effort,
            self.rounds,
            own_values(recipe, fields),
            partial(trials.surely, method) if ROUNDS not in self.given else None,
            partial(trials.allowed, method),
        )

    def chosen(self, method: str, settings: Settings) -> Recipe:
        """Return the recipe of a method with other settings."""
        return recipes.changed(self.own[method], settings) if settings else self.own[method]

    def to_json(self) -> dict[str, Any]:
        """Return what tells it from other searches, as JSON."""
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
    *,
    fields: Grid | None = None,
    effort: Effort | None = None,
    resume: bool = False,
    changed: bool = False,
    reporter: Callback | None = None,
) -> Tuning:
    """Choose the settings of each method by validation alone; runs that are done already are not
    done again.

    Args:
        methods: Names.
        recipe: The data, base and budget of all of them.
        folder: Gets `tune.json`, `tune.html`, `chosen/<method>.yaml`, and `runs/`.
        fields: Beside the learning rates: values by dotted keys of the recipe.
        effort: What a method's search may cost.
        resume: Continue the search in `folder`.
        changed: Continue its unfinished runs even if base, data or clients have changed.
        reporter: Called at the events of each run; default: none.

    Raises:
        Refused: Something is wrong with the recipe, the fields, the base, the data or the folder;
            nothing was started.
        CoterieError: It failed while running and can be resumed.
    """
    events = reporter or Callback()
    recipe = runs.without_auto(recipe, None, events, LocalBackend())
    plan = planned(methods, recipe, fields or {}, effort or Effort())
    runs.check_beside_data(recipe, folder)
    _claim(folder, plan, resume or changed)
    events.preparing()
    for name in plan.trained:
        LocalBackend().prepare(plan.own[name])  # what is wrong is refused before anything starts
    with alone(folder):
        write_json(folder / SEARCH, plan.to_json())
        seeds = [recipe.seed + k for k in range(plan.effort.seeds)]

        def run(method: str, settings: Settings, seed: int) -> RunAt:
            row = plan.chosen(method, settings).model_copy(update={"seed": seed})
            return row, folder_of(row, folder / RUNS)

        trial_runs = TrialRuns(run, seeds, events, changed=changed, within=folder)
        searches = {name: plan.search(name, trial_runs) for name in plan.trained}
        searched = trial_runs.search(searches)
        return _write(folder, plan, trial_runs, searched)


def planned(methods: Sequence[str], recipe: Recipe, fields: Grid, effort: Effort) -> Plan:
    """Return what is to be tuned. Raises Refused where that will not do."""
    if not methods:
        raise Refused("no methods to tune", "Name at least one: see `coterie methods`.")
    plan = Plan(tuple(dict.fromkeys(methods)), recipe, {}, effort)
    if not plan.trained:
        raise Refused(
            f"there is nothing to tune: {', '.join(plan.methods)} train nothing",
            "Name a method that trains: see `coterie methods`.",
        )
    rows = [plan.own[name] for name in plan.trained]
    return replace(plan, given=checked(rows, fields))


def _claim(folder: Path, plan: Plan, resume: bool) -> None:
    """Refuse a folder that holds another search, or none to resume. Raises Refused."""
    known = (folder / SEARCH).exists()
    if known and not resume:
        raise Refused(
            f"{folder} already holds a search",
            "Resume it with --resume, or choose another --out.",
        )
    if resume and not known:
        raise Refused(
            f"there is no search to resume in {folder}",
            "Check --out; or start from the beginning: the same command without --resume.",
        )
    if known:
        before, now = read_json(folder / SEARCH), plan.to_json()
        if other := [key for key in now if before.get(key) != now[key]]:
            raise Refused(
                f"{folder} holds a different search: it has other {' and '.join(other)}",
                "Repeat the command that began it, or choose another --out.",
            )


def _write(
    folder: Path, plan: Plan, trial_runs: TrialRuns[str], searched: Mapping[str, Found]
) -> Tuning:
    """Write what was found, and return it."""
    rows = []
    for name in plan.methods:
        row, recipe = _row(plan, name, trial_runs, searched.get(name, Found(None)))
        about = f"# {METHODS[name].title}: {_said(row)}\n"
        write_atomically(folder / row.recipe, (about + recipes.dump(recipe)).encode())
        rows.append(row)
    result = next(
        r for name, search in searched.items() for r in _results(trial_runs, name, search)
    )
    tuning = Tuning(
        recipe=plan.recipe.name,
        metric=replace(
            result.metric, name=f"validation {result.metric.name.removeprefix('test ')}"
        ),
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


def _results(trial_runs: TrialRuns[str], name: str, searched: Found) -> list[Result]:
    """Return the results of what was chosen for a method.

    Raises:
        CoterieError: None of its candidates has any.
    """
    assert searched.chosen is not None
    results = trial_runs.results(name, searched.chosen.trial)
    if not results:
        problem = trial_runs.tried(name, searched.chosen).problem
        raise CoterieError(
            f"{name}: no candidate finished; the last problem: {problem}",
            "Give smaller values, for instance --field training.experts.lr=..., with another "
            "--out.",
        )
    return results


def _row(
    plan: Plan, name: str, trial_runs: TrialRuns[str], searched: Found
) -> tuple[TunedRow, Recipe]:
    """Return what was found for a method, and its recipe."""
    path = f"{CHOSEN}/{encoded(name)}.yaml"
    if searched.chosen is None:
        recipe = plan.own[name]
        rounds = recipe.build_method().rounds
        return TunedRow(method=name, recipe=path, chosen={}, rounds=rounds), recipe
    _results(trial_runs, name, searched)
    recipe = plan.chosen(name, trial_runs.settings(name, searched.chosen.trial))
    tried = [trial_runs.tried(name, judged) for judged in searched.judged]
    best = tried[searched.judged.index(searched.chosen)]
    row = TunedRow(
        method=name,
        recipe=path,
        chosen=best.settings,
        rounds=best.rounds,
        valid=best.valid,
        candidates=sum(candidate.rung == 0 for candidate in tried),
        runs=len(tried) * len(trial_runs.seeds),
        iterations=sum(candidate.iterations for candidate in tried),
        alike=sum(
            judged.trial != searched.chosen.trial
            and judged.trial.share == searched.chosen.trial.share
            and not trial_runs.surely(name, searched.chosen, judged)
            for judged in searched.judged
        ),
        at_edge=searched.at_edge,
        tried=tuple(tried),
    )
    return row, recipe


def _said(row: TunedRow) -> str:
    if row.valid is None:
        return "trains nothing, so that nothing was chosen"
    values = written({key: value for key, value in row.chosen.items() if key != ROUNDS})
    return f"{values}, {row.rounds} rounds, chosen on validation by coterie tune"


def stated(effort: Effort, rounds: int, who: str) -> str:
    """Say what a search cost, in a sentence."""
    first, *others = [part_of(rounds, share) for share in effort.shares(rounds)]
    stages = [f"{_settings(effort.count(0))} in runs of {_rounds(first)}"]
    stages += [
        f"the best {f'{count} of them' if count > 1 else 'one'} in runs of {_rounds(part)}"
        for k, part in enumerate(others)
        if (count := effort.count(k + 1))
    ]
    *before, last = stages
    tried = f"{', '.join(before)}, and {last}" if before else last
    runs = "once" if effort.seeds == 1 else f"with {effort.seeds} seeds"
    return (
        f"{who} had the same effort: it tried {tried}; where the best value was the smallest or "
        f"largest of its range, up to {effort.extensions} more beyond it. Each was run {runs}, and "
        f"judged on validation data alone."
    )


def _settings(count: int) -> str:
    return f"{count} settings" if count > 1 else "one setting"


def _rounds(count: int) -> str:
    return f"{count} rounds" if count > 1 else "one round"


def _notes(plan: Plan, rows: Sequence[TunedRow]) -> list[str]:
    """Return further notes for a reader, a sentence each."""
    notes = [
        f"{row.method}: only {_settings(row.candidates)}, as its fields have no more values."
        for row in rows
        if row.valid is not None and row.candidates < plan.effort.count(0)
    ]
    return notes + [note for row in rows if (note := _lost(row))]


def _lost(row: TunedRow) -> str:
    """Say how many trials of a row have no score; nothing where all have one."""
    lost = [trial for trial in row.tried if trial.problem]
    if not lost:
        return ""
    return (
        f"{row.method}: {len(lost)} of {len(row.tried)} trials lost; the first {lost[0].problem}."
    )


def chosen_recipes(tuning: Tuning) -> dict[str, Recipe]:
    """Return the recipes that were chosen, by method."""
    return {row.method: recipes.load(str(tuning.path(row.method))) for row in tuning.rows}


def chosen_run(tuning: Tuning, method: str) -> Path:
    """Return the folder of the run that was chosen for a method, of the first seed."""
    path = tuning.path(method)
    return folder_of(recipes.load(str(path)), path.parent.parent / RUNS)


def effort_of(tuning: Tuning) -> str:
    """Describe the search, the result of each row, and which values lie at an edge of a grid."""
    parts = []
    for row in tuning.rows:
        edge = " (at the end of its range)" if row.at_edge else ""
        values = written(row.chosen)
        parts.append(f"{row.method}: {values}, {row.rounds} rounds{edge}" if row.chosen else "")
    return f"{tuning.effort} Chosen: {'; '.join(part for part in parts if part)}."
