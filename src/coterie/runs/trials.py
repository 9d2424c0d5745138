"""What a candidate of a search is worth: the validation scores of its runs, each in a folder of its
own that is named by what is run.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Generic, TypeVar

from coterie.core.errors import CoterieError, RecipeError
from coterie.core.files import read_json, write_json
from coterie.core.metrics import sort_key
from coterie.core.names import encoded
from coterie.core.result import ROUNDS, Result, Tried
from coterie.methods import METHODS
from coterie.reports import Callback
from coterie.reports.tuning import written
from coterie.runs.inputs import RecordedInputs
from coterie.runs.recipe import Recipe
from coterie.runs.run import execute_all
from coterie.runs.search import LOST, Judged, Score, Trial, part_of

UNFIT = "unfit.json"  # in the folder of a run that has no result: why
SURE = 2.0  # standard errors
K = TypeVar("K")
Settings = Mapping[str, Any]  # dotted keys of a recipe
RunAt = tuple[Recipe, Path]  # a run: what, and where
_BESIDE = {
    "name",
    "description",
    "paper",
    "seed",
    "compare_with",
    "samples",
    "memory",
    "threads",
    "curve_every",
    "curve_windows",
}  # what does not change what a run measures


def digest(recipe: Recipe) -> str:
    """Return what tells runs apart that measure something else: of all fields that matter, also
    those that have their defaults.
    """
    method = asdict(
        recipe.build_method()
    )  # defaults too: where one changes, so does what is measured
    section = recipe.model_dump(mode="json", exclude=_BESIDE) | {"method": method}
    text = json.dumps(section, sort_keys=True, default=lambda rule: rule.model_dump(mode="json"))
    return blake2b(text.encode(), digest_size=4).hexdigest()


def folder_of(recipe: Recipe, root: Path) -> Path:
    """Return the folder of a run among others: by its method, its digest and its seed."""
    return root / f"{encoded(recipe.method['name'])}-{digest(recipe)}" / f"seed-{recipe.seed}"


def execute_missing(
    runs: Sequence[RunAt],
    reporter: Callback,
    titles: Mapping[Path, str],
    changed: bool = False,
    within: Path | None = None,
    unfit: Callable[[Path, CoterieError], object] | None = None,
) -> None:
    """Execute the runs that are not done yet, each once; `changed`, `within` and `unfit` are those
    of `execute_all`. Those that had no result before are tried again only where nobody hears of it
    by `unfit`.

    Raises:
        CheckpointError: The result of one that is done is damaged.
        CoterieError: A run failed.
    """
    if missing := missing_of(runs, again=unfit is None):
        names = [titles[path] for _, path in missing]
        execute_all(missing, reporter, names, changed=changed, within=within, unfit=unfit)


def missing_of(runs: Sequence[RunAt], again: bool = False) -> list[RunAt]:
    """Return the runs that are not done yet, each once; with `again` also those that came to none.
    Raises CheckpointError where the result of one that is done is damaged.
    """
    return [
        (recipe, path)
        for path, recipe in {path: recipe for recipe, path in runs}.items()
        if not RecordedInputs(path).done() and (again or not (path / UNFIT).exists())
    ]


def score_of(result: Result) -> Score:
    """Return what a run is worth, by validation alone: the metric, and of equal ones the loss.

    One whose scores are not finite, or in which not everybody could be scored, has lost.
    """
    known = result.clients.keys() | (result.training or {}).keys()
    score = (sort_key(result.valid, result.metric), result.valid_loss or 0.0)
    whole = known >= (result.lost or {}).keys() and all(map(math.isfinite, score))
    return score if whole else LOST


def surely(ones: Sequence[Result], others: Sequence[Result]) -> bool:
    """Whether validation scores are better than others by more than `SURE` standard errors of
    their mean difference, paired by client and seed.
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
    """Scores trials by runs; what is done already is not done again.

    Args:
        run: Gives the recipe and the folder of a run by whose it is, its settings and its seed.
        seeds: Of each trial's runs.
        reporter: Is told of what happens.
        prefix: What the reporter calls somebody's runs; default: by the method.
        changed: See `execute_all`.
        within: Likewise.
    """

    run: Callable[[K, Settings, int], RunAt]
    seeds: Sequence[int]
    reporter: Callback = field(default_factory=Callback)
    prefix: Callable[[K], str] | None = None
    changed: bool = False
    within: Path | None = None

    def settings(self, key: K, trial: Trial) -> Settings:
        """Return what a trial sets: its candidate, and fewer rounds if it has but a share."""
        if trial.share == 1:
            return trial.candidate
        recipe, _ = self.run(key, trial.candidate, self.seeds[0])
        rounds = part_of(recipe.build_method().rounds, trial.share)
        return {**trial.candidate, ROUNDS: rounds}

    def runs_of(self, key: K, trial: Trial) -> list[RunAt]:
        """Return the runs of a trial, one for each seed."""
        settings = self.settings(key, trial)
        return [self.run(key, settings, seed) for seed in self.seeds]

    def evaluate(self, batch: Sequence[tuple[K, Trial]]) -> list[Score]:
        """Return the scores of trials, see `search.together`: means over seeds, and `LOST` where a
        run diverged or its method refuses the settings.
        """
        titles: dict[Path, str] = {}
        runs: list[RunAt] = []
        for key, trial in batch:
            own = self.runs_of(key, trial)
            titles |= {path: self._title(key, trial, recipe) for recipe, path in own}
            runs += own

        def unfit(folder: Path, error: CoterieError) -> None:
            _note(folder, error)
            self.reporter.unfit(titles[folder], _why(error))

        if missing := missing_of(runs):
            rounds = sorted({recipe.build_method().rounds for recipe, _ in missing})
            self.reporter.searching(len(missing), rounds)
            execute_missing(runs, self.reporter, titles, self.changed, self.within, unfit)
        return [self._score(key, trial) for key, trial in batch]

    def _title(self, key: K, trial: Trial, recipe: Recipe) -> str:
        """Return what the reporter calls a run."""
        who = self.prefix(key) if self.prefix else METHODS[recipe.method["name"]].title
        settings = {k: v for k, v in trial.candidate.items() if k != ROUNDS}
        parts = [f"{recipe.build_method().rounds} rounds", written(settings)]
        parts += [f"seed {recipe.seed}"] if len(self.seeds) > 1 else []
        return f"{who}, {', '.join(part for part in parts if part)}"

    def surely(self, key: K, one: Judged, other: Judged) -> bool:
        """Whether one trial is better than another by more than `SURE` standard errors of the
        differences, paired by client and seed.
        """
        return surely(self.results(key, one.trial), self.results(key, other.trial))

    def allowed(self, key: K, trial: Trial) -> bool:
        """Whether the recipe takes the settings of a trial."""
        try:
            self.runs_of(key, trial)
        except RecipeError:
            return False
        return True

    def results(self, key: K, trial: Trial) -> list[Result]:
        """Return the results of a trial that is done, of the seeds that have one."""
        folders = (path for _, path in self.runs_of(key, trial))
        return [Result.read(path) for path in folders if not (path / UNFIT).exists()]

    def _score(self, key: K, trial: Trial) -> Score:
        scores = [score_of(result) for result in self.results(key, trial)]
        if len(scores) < len(self.seeds) or LOST in scores:
            return LOST
        return tuple(sum(own) / len(own) for own in zip(*scores, strict=True))

    def tried(self, key: K, judged: Judged) -> Tried:
        """Return a judged trial as tables have it."""
        trial, results = judged.trial, self.results(key, judged.trial)
        runs = self.runs_of(key, trial)
        method = runs[0][0].build_method()
        problems = [read_json(path / UNFIT) for _, path in runs if (path / UNFIT).exists()]
        if judged.score == LOST and not problems:
            problems = [{"problem": "not everybody's score was finite", "trained": False}]
        known = [result.valid for result in results]
        losses = [result.valid_loss for result in results if result.valid_loss is not None]
        ended = sum(result.evaluations[-1].iteration for result in results)
        begun = sum(method.total_iterations for found in problems if found["trained"])
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


def _note(folder: Path, error: CoterieError) -> None:
    """Write down why a run has no result, so that it is not tried again. Raises SaveError."""
    trained = not isinstance(error, RecipeError)
    write_json(folder / UNFIT, {"problem": _why(error), "trained": trained})


def _why(error: CoterieError) -> str:
    """Say in one line why a run has no result."""
    how = "refused" if isinstance(error, RecipeError) else "diverged"
    return f"{how}: {' '.join(error.problem.split())}"
