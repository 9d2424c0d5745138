"""The fields of a search for settings and their values, and the runs of its trials."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from coterie.core.callback import Callback
from coterie.core.errors import CoterieError, RecipeError
from coterie.core.files import read_json, write_json
from coterie.core.foreign import yaml_of
from coterie.core.metrics import sort_key
from coterie.core.result import ROUNDS, Result, Tried
from coterie.core.result.tuning import written
from coterie.core.roles import GATE
from coterie.methods import METHODS
from coterie.models.layout import Layout
from coterie.runs.folder.candidates import UNFIT, confirm, has_ended, lighten, mark
from coterie.runs.folder.inputs import RecordedInputs
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.run import execute_all
from coterie.runs.tuning.search import (
    LOST,
    Candidate,
    Field,
    Judged,
    Score,
    Search,
    SearchResult,
    Trial,
    part_of,
    together,
)

EXPERTS, ROUTERS = "training.experts.lr", "training.routers.lr"
RATES = (EXPERTS, ROUTERS)
FACTORS = (0.25, 0.5, 1.0, 2.0)  # of the recipe's own learning rate
_SECTIONS = ("method.", "model.", "training.", "privacy.")
# fields that change what is scored, so that scores could not be compared
_SCORED = {"method.name", "model.kind", "model.base", "model.context", "model.length"}
Grid = Mapping[str, Sequence[Any]]  # values by dotted keys of a recipe


def parse(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Return fields and values of texts `KEY=V1,V2,...` in YAML. Raises RecipeError with all
    mistakes.
    """
    grid: dict[str, list[Any]] = {}
    mistakes = []
    for text in texts:
        key, sign, written = (part.strip() for part in text.partition("="))
        try:
            values = yaml_of(f"[{written}]")
        except ValueError as error:
            reason = str(error).splitlines()[0]
            mistakes.append(f"{text!r}: the values are not valid YAML ({reason})")
            continue
        if not sign or not key or not values:
            mistakes.append(
                f"{text!r} is not of the form KEY=V1,V2,..., for instance "
                f"training.experts.lr=0.01,0.02,0.04"
            )
        elif key in grid:
            mistakes.append(f"{key}: given twice; give all its values at once")
        else:
            grid[key] = values
    if mistakes:
        raise RecipeError("--field", mistakes)
    return grid


def trains(recipe: Recipe) -> bool:
    """Whether a recipe's method trains anything, so that there is something to choose."""
    return recipe.build_method().total_iterations > 0


def learning_rates(recipe: Recipe) -> dict[str, tuple[float, ...]]:
    """Return grids of the learning rates of a recipe's method, of experts and of routers or a gate
    if they learn, around the recipe's own.
    """
    method = recipe.build_method()
    layout = method.layout(0, Layout())
    rates = {EXPERTS: recipe.training.experts.lr}
    if layout.routed or GATE in method.shared:
        rates[ROUTERS] = recipe.training.routers.lr
    return {key: around(lr) for key, lr in rates.items()}


def around(lr: float) -> tuple[float, ...]:
    """Return a grid of learning rates around one."""
    return tuple(float(f"{lr * factor:.4g}") for factor in FACTORS)


def has(recipe: Recipe, key: str) -> bool:
    """Whether a recipe's method uses a field."""
    entry = METHODS[recipe.method["name"]]
    if key.startswith("method."):
        name = key.removeprefix("method.").partition(".")[0]
        return name not in entry.fixed and name in {
            f.name for f in dataclasses.fields(entry.method)
        }
    return not key.startswith("training.routers.") or ROUTERS in learning_rates(recipe)


def fields_of(recipe: Recipe, given: Grid) -> list[Field]:
    """Return the search space of a recipe: its learning rates, and given fields that it has."""
    if not trains(recipe):
        return []
    fields = {key: values for key, values in given.items() if has(recipe, key)}
    grids = {**learning_rates(recipe), **fields}
    return [Field(key, tuple(values)) for key, values in grids.items()]


def own_values(recipe: Recipe, fields: Sequence[Field]) -> Candidate:
    """Return the recipe's own candidate."""
    return {field.key: value_of(recipe, field.key) for field in fields}


def value_of(recipe: Recipe, key: str) -> Any:
    """Return the value of a field, or its default."""
    section, *path = key.split(".")
    value: Any = recipe.build_method() if section == "method" else getattr(recipe, section)
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else getattr(value, part, None)
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value


def checked(rows: Sequence[Recipe], given: Grid) -> dict[str, tuple[Any, ...]]:
    """Return given fields with values validated by `rows`, the recipe of each method. Raises
    RecipeError with all unknown fields, invalid values, and fields that change what is scored.
    """
    mistakes: dict[str, None] = {}
    grid = {}
    for key, values in given.items():
        if not key.startswith(_SECTIONS) or key in _SCORED:
            reason = "as scores would not be comparable; fields of method, training and model can"
            mistakes[f"{key}: cannot be searched, {reason}"] = None
            continue
        typed: list[Any] = []
        for recipe in [row for row in rows if has(row, key)] or rows[:1]:
            try:
                read = [value_of(recipes.changed(recipe, {key: v}), key) for v in values]
            except RecipeError as error:
                mistakes |= dict.fromkeys(error.mistakes)
                continue
            pairs = zip(read, values, strict=True)
            typed = [new if isinstance(new, int | float | str) else value for new, value in pairs]
        if not typed and not mistakes:
            mistakes[f"{key}: no method has this field, or the method's name fixes it"] = None
        grid[key] = tuple(typed)
    if mistakes:
        raise RecipeError("--field", list(mistakes))
    return grid


SURE = 2.0  # standard errors
# Fields of a method that count iterations, tau and s of CoMiGS. A run of fewer rounds has them in
# proportion: a quarter of the iterations may end before routers learn for the first time, and all
# their learning rates would score alike.
_PERIODS = ("method.router_every", "method.router_steps")
K = TypeVar("K")
Settings = Mapping[str, Any]  # dotted keys of a recipe
RunAt = tuple[Recipe, Path]  # a run: what, and where


def execute_missing(
    runs: Sequence[RunAt], reporter: Callback, titles: Mapping[Path, str], changed: bool = False
) -> None:
    """Execute the runs that are not done yet, each once, see `execute_all`; those without a result
    are retried. Raises CheckpointError for a damaged result, and CoterieError.
    """
    if missing := missing_of(runs, again=True):
        execute_all(missing, reporter, titles, changed=changed)


def missing_of(runs: Sequence[RunAt], again: bool = False) -> list[RunAt]:
    """Return the runs that are not done, each once; `again`: also those without a result."""
    return [
        (recipe, path)
        for path, recipe in {path: recipe for recipe, path in runs}.items()
        if not RecordedInputs(path).done() and (again or not (path / UNFIT).exists())
    ]


def score_of(result: Result) -> Score:
    """Return a run's validation metric, and loss for ties; `LOST` if missing or not finite."""
    known = result.clients.keys() | (result.training or {}).keys()
    score = (sort_key(result.valid, result.metric), result.valid_loss or 0.0)
    whole = known >= (result.lost or {}).keys() and all(map(math.isfinite, score))
    return score if whole else LOST


def surely(ones: Sequence[Result], others: Sequence[Result]) -> bool:
    """Whether validation scores are better than others by more than `SURE` standard errors of their
    mean difference, paired by client and seed.
    """
    if not ones or len(ones) != len(others):
        return bool(ones)
    metric = ones[0].metric
    gains: list[float] = []
    for one, other in zip(ones, others, strict=True):
        before, now = other.headline, one.headline
        gains += [
            sort_key(before[i].valid, metric) - sort_key(now[i].valid, metric)
            for i in before.keys() & now.keys()
        ]
    if not all(map(math.isfinite, gains)) or len(gains) < 2:
        return sum(gains) > 0
    return fmean(gains) > SURE * stdev(gains) / math.sqrt(len(gains))


@dataclass
class TrialRuns(Generic[K]):
    """Scores trials by runs that are not repeated once done. Of the runs that it begins, only those
    keep checkpoints and models that may still be chosen: the best so far of all rounds, and of
    fewer rounds; at the end, only the chosen one.
    """

    # returns recipe and folder of a run by its search's key, settings and seed
    run: Callable[[K, Settings, int], RunAt]
    seeds: Sequence[int]
    reporter: Callback = field(default_factory=Callback)
    # what the reporter calls the runs of a key; default: by the method
    prefix: Callable[[K], str] | None = None
    changed: bool = False  # see `execute_all`
    within: Path | None = None  # see `execute_all`
    deciding: int | None = None  # how many parts of a score the searches consider; None: all
    # the score of each search's best trials so far, and the folders of their runs
    _leading: dict[tuple[K, bool], tuple[Score, set[Path]]] = field(
        default_factory=dict, init=False
    )

    def search(self, searches: Mapping[K, Search]) -> dict[K, SearchResult]:
        """Carry out searches, see `search.together`. Chosen runs keep their models."""
        results = together(searches, self.evaluate)
        ends = {key: result.chosen.trial for key, result in results.items() if result.chosen}
        chosen = {path for key, trial in ends.items() for path in self._paths(key, trial)}
        for path in chosen:
            confirm(path)
        for path in self._kept() - chosen:
            lighten(path)
        return results

    def settings(self, key: K, trial: Trial) -> Settings:
        """Return a trial's settings: its candidate, and rounds and periods by its share."""
        if trial.share == 1:
            return trial.candidate
        recipe, _ = self.run(key, trial.candidate, self.seeds[0])
        names = [name for name in (ROUNDS, *_PERIODS) if has(recipe, name)]
        parts = {name: part_of(value_of(recipe, name), trial.share) for name in names}
        return {**trial.candidate, **parts}

    def runs_of(self, key: K, trial: Trial) -> list[RunAt]:
        """Return the runs of a trial, one for each seed."""
        return [self.run(key, self.settings(key, trial), seed) for seed in self.seeds]

    def evaluate(self, batch: Sequence[tuple[K, Trial]]) -> list[Score]:
        """Return the mean scores of trials over seeds; `LOST` if a run diverged or was refused."""
        titles: dict[Path, str] = {}
        runs, owners = list[RunAt](), dict[Path, list[tuple[K, Trial]]]()
        for key, trial in batch:
            for recipe, path in self.runs_of(key, trial):
                titles[path] = self._title(key, trial, recipe)
                runs.append((recipe, path))
                owners.setdefault(path, []).append((key, trial))

        def unfit(folder: Path, error: CoterieError) -> None:
            refused = isinstance(error, RecipeError)
            problem = f"{'refused' if refused else 'diverged'}: {' '.join(error.problem.split())}"
            # written down so that it is not tried again
            write_json(folder / UNFIT, {"problem": problem, "trained": not refused})
            self.reporter.unfit(titles[folder], problem)

        self._settle(batch)  # what was done before an interruption
        if missing := missing_of(runs):
            rounds = sorted({recipe.build_method().rounds for recipe, _ in missing})
            self.reporter.searching(len(missing), rounds)
            for _, path in missing:
                mark(path)
            execute_all(
                missing,
                self.reporter,
                titles,
                changed=self.changed,
                within=self.within,
                unfit=unfit,
                whole=False,  # what is trained is kept for later trials
                ended=lambda folder: self._settle(owners[folder]),
            )
        self._settle(batch)
        return [self._score(key, trial) for key, trial in batch]

    def _settle(self, trials: Iterable[tuple[K, Trial]]) -> None:
        """Remove the models of each trial whose runs have all ended, or of those that it beats.
        Equal ones stay: the search decides between them.
        """
        for key, trial in trials:
            paths = set(self._paths(key, trial))
            if not all(map(has_ended, paths)):
                continue
            score, group = self._score(key, trial)[: self.deciding], (key, trial.share == 1)
            best, leading = self._leading.get(group, (LOST, set[Path]()))
            if score == best < LOST:
                leading.update(paths)
                continue
            if score < best:
                self._leading[group] = score, paths
                paths = leading
            for path in paths - self._kept():
                lighten(path)

    def _kept(self) -> set[Path]:
        return {path for _, leading in self._leading.values() for path in leading}

    def _paths(self, key: K, trial: Trial) -> list[Path]:
        return [path for _, path in self.runs_of(key, trial)]

    def _title(self, key: K, trial: Trial, recipe: Recipe) -> str:
        """Return what the reporter calls a run."""
        who = self.prefix(key) if self.prefix else METHODS[recipe.method["name"]].title
        settings = {k: v for k, v in trial.candidate.items() if k != ROUNDS}
        rounds = recipe.build_method().rounds
        seed = f"seed {recipe.seed}" if len(self.seeds) > 1 else ""
        parts = [who, f"{rounds} {'round' if rounds == 1 else 'rounds'}", written(settings), seed]
        return ", ".join(filter(None, parts))

    def surely(self, key: K, one: Judged, other: Judged) -> bool:
        """Whether one trial is better than another, see `surely`."""
        return surely(self.results(key, one.trial), self.results(key, other.trial))

    def allowed(self, key: K, trial: Trial) -> bool:
        """Whether the recipe takes the settings of a trial."""
        try:
            self.runs_of(key, trial)
        except RecipeError:
            return False
        return True

    def results(self, key: K, trial: Trial) -> list[Result]:
        """Return the results of a trial that is done, for the seeds that have one."""
        folders = (path for _, path in self.runs_of(key, trial))
        return [Result.read(path) for path in folders if not (path / UNFIT).exists()]

    def _score(self, key: K, trial: Trial) -> Score:
        scores = [score_of(result) for result in self.results(key, trial)]
        if len(scores) < len(self.seeds) or LOST in scores:
            return LOST
        return tuple(sum(values) / len(values) for values in zip(*scores, strict=True))

    def tried(self, key: K, judged: Judged) -> Tried:
        """Return a judged trial in the form for tables."""
        trial, results = judged.trial, self.results(key, judged.trial)
        runs = self.runs_of(key, trial)
        method = runs[0][0].build_method()
        problems = [read_json(path / UNFIT) for _, path in runs if (path / UNFIT).exists()]
        if judged.score == LOST and not problems:
            problems = [{"problem": "the scores of some clients were not finite", "trained": False}]
        known = [result.valid for result in results]
        losses = [result.valid_loss for result in results if result.valid_loss is not None]
        ended = sum(result.evaluations[-1].iteration for result in results)
        begun = sum(method.total_iterations for problem in problems if problem["trained"])
        return Tried(
            settings=dict(trial.candidate),
            rounds=method.rounds,
            rung=judged.rung,
            valid=None if problems else sum(known) / len(known),
            valid_loss=None if problems or not losses else sum(losses) / len(losses),
            per_seed=() if problems else known,
            iterations=ended + begun,
            problem=problems[0]["problem"] if problems else None,
        )
