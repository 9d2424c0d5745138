"""The Python API: run a recipe, compare methods, estimate costs, and read the results."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Unpack

from coterie import personal
from coterie.core.callback import Callback, Callbacks
from coterie.core.errors import Refused
from coterie.core.isolation import isolated
from coterie.core.result import Comparison, Result, Row, Tuning
from coterie.core.result import rows as comparing
from coterie.data.by_client import in_memory
from coterie.methods import Method, name_of
from coterie.personal import evaluation
from coterie.personal.loading import Personal, Settings
from coterie.reports.html import write_comparison, write_report
from coterie.reports.trackers import tracked
from coterie.runs import run as runs
from coterie.runs.budget import planned
from coterie.runs.estimate import Estimate, estimates
from coterie.runs.folder.lock import latest_folder, new_folder
from coterie.runs.recipes.recipe import Recipe, resolve
from coterie.runs.recipes.rivals import rivals_of
from coterie.runs.tuning import tune as tuning
from coterie.runs.tuning.search import Effort


@dataclass(frozen=True)
class Run:
    """A run, finished or not: its results, report and personal models, read from its folder on
    first use.

    Examples:
        >>> import coterie
        >>> short = {"method": {"rounds": 1}, "compare_with": ["local"]}
        >>> run = coterie.run("cobo-digits", out="digits", **short)
        >>> run.result.method, list(run.baselines)
        ('cobo', ['local'])
        >>> run.report.name, (run.folder / "metrics.jsonl").exists()
        ('report.html', True)
        >>> coterie.Run("digits").clients[:2]
        ('c0-0', 'c0-1')
        >>> model = run.load("c0-0")

    Args:
        folder: The run's folder, `out` of `coterie.run` or `--out` of the command line.
    """

    folder: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder).absolute())

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe with all fields. Raises Refused if the folder has none."""
        return resolve(self.folder)

    @cached_property
    def result(self) -> Result:
        """The result of its own method. Raises CheckpointError if the run has not ended."""
        return Result.read(self.folder)

    @cached_property
    def baselines(self) -> dict[str, Result]:
        """The results of the methods in `compare_with`, by name. Raises CheckpointError."""
        return {
            name: Result.read(self.folder / "baselines" / name) for name in self.recipe.compare_with
        }

    @property
    def rows(self) -> tuple[Row, ...]:
        """The table of the run: one row per method, the recipe's own last."""
        return tuple(comparing.rows([*self.baselines.values(), self.result]))

    @property
    def report(self) -> Path:
        """Path of the report, `report.html`."""
        return self.folder / "report.html"

    @property
    def clients(self) -> tuple[str, ...]:
        """The clients that have a personal model. Raises CheckpointError if there are none."""
        return tuple(personal.clients_of(self.folder))

    def load(self, client: str | None = None, **settings: Unpack[Settings]) -> Personal:
        """Load the personal model of a client, see `coterie.load`."""
        return personal.load(self.folder, client, **settings)

    def load_all(
        self, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
    ) -> dict[str, Personal]:
        """Load the personal models of several clients, by default all, see `coterie.load_all`."""
        return personal.load_all(self.folder, clients, **settings)

    def load_many(
        self, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
    ) -> personal.ManyModels:
        """Load several clients' language models for batched inference, see `coterie.load_many`."""
        return personal.load_many(self.folder, clients, **settings)


@isolated()
def run(
    recipe: Recipe | str | Path,
    *,
    out: Path | str | None = None,
    resume: bool | None = None,
    resume_changed: bool = False,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    progress: bool | None = None,
    **changes: Any,
) -> Run:
    """Run a recipe and the methods of its `compare_with`: train and evaluate a personal model for
    every client.

    Examples:
        >>> import coterie
        >>> short = {"method": {"rounds": 1}, "compare_with": []}
        >>> run = coterie.run("cobo-digits", out="digits", seed=3, **short)
        >>> run.result.seed, len(run.result.clients)
        (3, 8)

    Args:
        recipe: A shipped name (`coterie recipes`), the path of a YAML file, or a `Recipe`.
        out: Folder for the run; default: a new one under runs/.
        resume: Continue the run in `out`, or the latest run of this recipe under runs/; default:
            what is in `out` already, so that a cell of a notebook can be run again. False refuses
            it.
        resume_changed: Like `resume`, and accept that base, data or clients have changed, or that
            metrics were lost.
        callbacks: Called at the events of the run, see `Callback`.
        track: Programs that get the figures besides: `wandb`, `mlflow`.
        progress: Whether to show progress in the terminal or the notebook; default: in notebooks.
        changes: Other values for fields of the recipe, see `Recipe.load`.

    Raises:
        Refused: The recipe, base, data or folder is invalid; nothing was started.
        CoterieError: The run failed and can be resumed.
    """
    chosen = _recipe(recipe, changes)
    folder, resume = _folder(out, chosen.name, resume, resume_changed)
    with _events(callbacks, progress, len(chosen.compare_with) + 1, track, folder) as events:
        results = runs.run(
            chosen,
            folder,
            resume=resume,
            changed=resume_changed,
            reporter=events,
            score_texts=evaluation.of_run,
        )
        write_report(folder, results, chosen.description)
    return Run(folder)


@isolated()
def compare(
    methods: Sequence[str | type[Method]],
    recipe: Recipe | str | Path,
    *,
    seeds: int = 3,
    rivals: bool = False,
    tune: bool = False,
    fields: Mapping[str, Sequence[Any]] | None = None,
    trials: int | None = None,
    out: Path | str | None = None,
    resume: bool | None = None,
    resume_changed: bool = False,
    callbacks: Sequence[Callback] = (),
    track: Sequence[str] = (),
    progress: bool | None = None,
    **changes: Any,
) -> Comparison:
    """Compare methods on the same data, base and budget: mean and deviation over seeds.

    With `tune`, each method first has its settings chosen on validation, all with the same effort,
    see `coterie.tune`; the notes of the result say what that was.

    Examples:
        >>> import coterie
        >>> short = {"name": "fedavg", "rounds": 1}
        >>> table = coterie.compare(
        ...     ["local", "fedavg"], "cobo-digits", method=short, seeds=2, out="table"
        ... )
        >>> table["fedavg"].improved is not None, table.folder.name
        (True, 'table')

    Args:
        methods: Names of methods (`coterie methods`), or your own as `module:Class` or as the class
            itself.
        recipe: A shipped name, the path of a YAML file, or a `Recipe`: the data, base and budget of
            all rows.
        seeds: Runs per method, with consecutive seeds.
        rivals: Whether to compare also with the methods that one compares with on such data. Those
            that cannot run with the recipe, or diverge, are left out, and the notes say why.
        tune: Whether the settings of each method are chosen first, in `tune/` of the folder.
        fields: Fields to search, as in `coterie.tune`; only with `tune`.
        trials: Candidates of the first rung, as in `coterie.tune`; only with `tune`.
        out: Folder for the comparison; default: a new one under runs/.
        resume: Continue the comparison in `out`, or the latest of this recipe under runs/; default
            as in `run`.
        resume_changed: As in `run`.
        callbacks: As in `run`.
        track: As in `coterie.run`; the runs of a search are tracked too.
        progress: As in `run`.
        changes: As in `run`.

    Raises:
        Refused: See `run`.
        CoterieError: See `run`.
    """
    given = [methods] if isinstance(methods, str | type) else methods
    chosen = _recipe(recipe, changes)
    also = rivals_of(chosen) if rivals else ()
    names = list(dict.fromkeys([*also, *map(name_of, given)]))
    if not tune and (fields is not None or trials is not None):
        problem = "fields and trials need a search, and tune is not set"
        raise Refused(problem, "Give tune=True (--tune) too, or leave them out.")
    folder, going = _folder(out, f"compare-{chosen.name}", resume, resume_changed)
    extra = dict[str, Any]()
    if tune:
        runs.check_new(folder, going)
        searched, effort = folder / tuning.TUNED, _effort(trials, 1)
        with _events(callbacks, progress, None, track, folder) as events:
            tuned = tuning.tune(
                names, chosen, searched, fields or {}, effort, going, resume_changed, events
            )
        extra = {
            "chosen": {row.method: Recipe.load(tuned.path(row.method)) for row in tuned.rows},
            "effort": tuning.effort_of(tuned),
            "searched": searched / tuning.RUNS,
        }
        going = going and (folder / "lock").exists()  # otherwise only the search has begun
    with _events(callbacks, progress, len(set(names)) * seeds, track, folder) as events:
        comparison = runs.compare(
            names,
            chosen,
            folder,
            seeds=seeds,
            resume=going,
            changed=going and resume_changed,
            reporter=events,
            rivals=rivals,
            score_texts=evaluation.of_run,
            **extra,
        )
        write_comparison(folder, comparison, chosen.description)
    return comparison


@isolated()
def tune(
    methods: Sequence[str | type[Method]],
    recipe: Recipe | str | Path,
    *,
    fields: Mapping[str, Sequence[Any]] | None = None,
    trials: int | None = None,
    seeds: int = 1,
    out: Path | str | None = None,
    resume: bool | None = None,
    resume_changed: bool = False,
    track: Sequence[str] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **changes: Any,
) -> Tuning:
    """Choose the settings of each method on validation data, with the same effort for all.

    What is searched: the learning rates that a method has, how many rounds, and the fields that are
    named; by successive halving, and beyond the edge of a grid whose best lies there.

    Examples:
        >>> import coterie
        >>> short = {"method": {"rounds": 4}}
        >>> found = coterie.tune(["cobo", "local"], "cobo-digits", trials=2, out="tuned", **short)
        >>> found["cobo"].candidates == found["local"].candidates == 2
        True
        >>> "training.experts.lr" in found["cobo"].chosen, found.path("cobo").name
        (True, 'cobo.yaml')

    Args:
        methods: As in `compare`.
        recipe: As in `compare`.
        fields: Values by dotted keys of the recipe, `{"method.rho": [0.01, 0.03]}`: searched for
            the methods that have them. `method.rounds` here fixes what else is chosen.
        trials: Settings that are tried for each method, most of them in short runs only; default:
            8.
        seeds: Runs of each setting, with consecutive seeds.
        out: Folder for the search; default: a new one under runs/.
        resume: Continue the search in `out`, or the latest one of this recipe under runs/; default
            as in `run`.
        resume_changed: As in `run`.
        track: As in `coterie.run`: every run of the search is tracked.
        callbacks: As in `run`.
        progress: As in `run`.
        changes: As in `run`.

    Raises:
        Refused: As `run`.
        CoterieError: As `run`.
    """
    given = [methods] if isinstance(methods, str | type) else methods
    names, chosen = [name_of(method) for method in given], _recipe(recipe, changes)
    folder, resume = _folder(out, f"tune-{chosen.name}", resume, resume_changed)
    effort = _effort(trials, seeds)
    with _events(callbacks, progress, None, track, folder) as events:
        tuned = tuning.tune(
            names, chosen, folder, fields or {}, effort, resume, resume_changed, events
        )
    return tuned


def _effort(trials: int | None, seeds: int) -> Effort:
    if min(seeds, 1 if trials is None else trials) < 1:
        raise Refused("a search needs at least one trial and one seed", "Give positive numbers.")
    return Effort(seeds=seeds) if trials is None else Effort(trials, seeds)


@isolated()
def dry_run(recipe: Recipe | str | Path, **changes: Any) -> dict[str, Estimate]:
    """Estimate the cost of a recipe and the methods of its `compare_with` on this machine, from a
    few measured steps, without writing anything. Arguments and refusals are those of `coterie.run`.

    Examples:
        >>> import coterie
        >>> estimate = coterie.dry_run("cobo-digits", compare_with=[])["cobo"]
        >>> estimate.seconds > 0, estimate.up > 0
        (True, True)
    """
    costs = estimates(planned(_recipe(recipe, changes))[0])
    return {prepared.recipe.method["name"]: estimate for prepared, estimate in costs}


def _recipe(recipe: Recipe | str | Path, changes: dict[str, Any]) -> Recipe:
    """Return the recipe of the arguments, a table in memory written to a file. Raises Refused."""
    if "data" in changes:
        changes = changes | {"data": in_memory(changes["data"])}
    if not isinstance(recipe, Recipe):
        return Recipe.load(recipe, **changes)
    return recipe.with_changes(**changes) if changes else recipe


def _folder(
    out: Path | str | None, name: str, resume: bool | None, changed: bool
) -> tuple[Path, bool]:
    """Return the folder of the arguments, absolute, as callbacks may change the current one, and
    whether to go on with what is in it. Raises Refused if there is nothing to resume.
    """
    if out is not None:
        folder = Path(out).absolute()
        begun = any((folder / part / "lock").exists() for part in ("", tuning.TUNED))
        begun = begun if resume is None else resume
        return folder, begun or changed
    going = bool(resume or changed)
    return (latest_folder(name) if going else new_folder(name)).absolute(), going


@contextmanager
def _events(
    callbacks: Sequence[Callback],
    progress: bool | None,
    rows: int | None,
    track: Sequence[str],
    folder: Path,
) -> Iterator[Callback]:
    """Provide the callbacks within the block, with trackers of the runs in a folder and, if shown,
    the progress of so many runs, or with None of a search.
    """
    with tracked(track, folder) as trackers:
        from rich.console import Console

        if not (Console().is_jupyter if progress is None else progress):
            yield Callbacks([*callbacks, *trackers])
            return
        from coterie.reports.progress import SearchTerminal, Terminal

        shown = SearchTerminal(Console()) if rows is None else Terminal(Console(), rows)
        with shown as terminal:
            yield Callbacks([terminal, *callbacks, *trackers])
