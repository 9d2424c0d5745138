"""A run of a paper's table or figure: measured beside published, and which statements hold."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from coterie.core import metrics
from coterie.core.callback import Callback
from coterie.core.errors import CheckpointError
from coterie.core.files import write_atomically, write_json
from coterie.core.isolation import isolated
from coterie.core.result import Evaluation, MetricInfo, Result
from coterie.core.result import rows as comparison
from coterie.papers.checks import _verdicts
from coterie.papers.figures import seed_figures
from coterie.papers.job import Job, effort, orders, tuned, unlike
from coterie.papers.page import markdown, write_page
from coterie.papers.reproduced import Cell, Reproduced, spoken_of_row
from coterie.papers.tables import Settings, Shown
from coterie.reports.parts import computed_with
from coterie.runs.folder.candidates import UNFIT, confirm
from coterie.runs.tuning.search import SearchResult
from coterie.runs.tuning.trials import RunAt, TrialRuns, execute_missing

CellId = tuple[str, str]  # a row and a column
_GATE_ERROR = MetricInfo("gate error", "%", True)
_AFTER_LOCAL = "each client's model right after its last local iteration"
_UNSEEN = "of clients never trained with, the model that each got without labels"


@isolated()
def reproduce(job: Job, reporter: Callback | None = None) -> Reproduced:
    """Run a table or figure; finished runs in the folder are reused, and unfinished ones resumed.
    Raises Refused as `Job`, or if a base or data cannot be used, before anything starts;
    CoterieError if a run failed, which the same call resumes.
    """
    reproduction, folder = job.reproduction, job.folder
    trial_runs, searched = search(job, reporter or Callback())
    choices = {
        cell: {}
        if search_result.chosen is None
        else trial_runs.settings(cell, search_result.chosen.trial)
        for cell, search_result in searched.items()
    }
    runs = {(r, c): [job.run(r, c, choices[r, c], n) for n in job.numbers] for r, c in job.cells}
    every = [run for cell in runs.values() for run in cell]
    for _, path in every:
        confirm(path)
    titles = {at: f"{of.name}, {at.parent.name}, seed {of.seed}" for of, at in every}
    execute_missing(every, reporter or Callback(), titles, job.changed)
    cells = _cells(job, choices, runs)
    statements = [verdict for s in reproduction.statements for verdict in _verdicts(s, cells)]
    tried = effort(job, searched) if job.effort is None else tuned(job, job.effort, searched)
    first = Result.read(folder / cells[0].folders[0])  # runs may have been made elsewhere
    reproduced = Reproduced(
        name=job.name,
        title=reproduction.title,
        scale=job.scale,
        seeds=job.numbers,
        overrides=list(job.overrides),
        part=[
            f"--{what} {','.join(names)}"
            for what, names in (("columns", job.columns), ("rows", job.rows))
            if names
        ]
        + ([] if job.effort is None else [f"--tune --trials {job.effort.trials}"]),
        shows=reproduction.shows,
        scored="; ".join(dict.fromkeys(_UNSEEN if cell.groups else _AFTER_LOCAL for cell in cells)),
        columns={c: reproduction.columns[c].title for _, c in job.cells},
        metrics={cell.column: cell.metric for cell in cells},
        rows={r: reproduction.rows[r].title for r, _ in job.cells},
        cells=cells,
        statements=statements,
        order=orders(cells),
        notes=[
            *reproduction.notes,
            reproduction.split,
            *tried,
            *unlike(cells),
            *_machines(job, cells),
        ],
        unjudged=sum(len(s.columns) for s in reproduction.statements) - len(statements),
        hours=_hours(trial_runs, searched, runs),
        versions=first.versions,
        machine=first.machine,
    )
    # columns of one table may run at the same time, in processes of their own
    with FileLock(folder / ".lock"):
        write_json(Path(f"{job.stem}.json"), reproduced.to_json())
        write_atomically(Path(f"{job.stem}.md"), markdown(reproduced).encode())
        write_page(Path(f"{job.stem}.html"), reproduced, reproduction.pictures, folder)
    return reproduced


def _machines(job: Job, cells: Sequence[Cell]) -> list[str]:
    """Say which cells have runs that were not computed with what the first one was."""
    titles: dict[str, dict[str, None]] = {}
    for cell, at in ((of, at) for of in cells for at in of.folders):
        run = Result.read(job.folder / at)
        where = computed_with(run.machine, run.versions)
        titles.setdefault(where, {})[f"{cell.title} ({cell.column})"] = None
    return [f"Computed with {at[2:]}: {', '.join(of)}." for at, of in [*titles.items()][1:] if at]


def _hours(
    trial_runs: TrialRuns[CellId],
    searched: Mapping[CellId, SearchResult],
    runs: Mapping[CellId, Sequence[RunAt]],
) -> float:
    """Return the hours that all runs of a table took, those of searches too."""
    folders = {path for of_cell in runs.values() for _, path in of_cell}
    for cell, search in searched.items():
        for judged in search.judged:
            folders.update(path for _, path in trial_runs.runs_of(cell, judged.trial))
    return sum(Result.read(at).wall_s for at in folders if not (at / UNFIT).exists()) / 3600


def search(job: Job, reporter: Callback) -> tuple[TrialRuns[CellId], dict[CellId, SearchResult]]:
    """Return the result of each cell's search, at the first seed: of a plain sweep or, with the
    job's effort, of successive halving. Finished runs are reused.
    """
    known = job.reproduction
    trial_runs = TrialRuns[CellId](
        lambda cell, settings, seed: job.run(*cell, settings, seed),
        job.numbers[:1],
        reporter,
        prefix=lambda cell: f"{known.columns[cell[1]].title}, {known.rows[cell[0]].title}",
        changed=job.changed,
        deciding=1 if job.effort is None else None,  # see `search.sweep`
    )
    searches = {cell: job.search(cell, partial(trial_runs.allowed, cell)) for cell in job.cells}
    return trial_runs, trial_runs.search(searches)


def _cells(
    job: Job, choices: Mapping[CellId, Settings], runs: Mapping[CellId, Sequence[RunAt]]
) -> list[Cell]:
    """Return the cells, compared with Local in their column, and with the paper."""
    results = {cell: [Result.read(path) for _, path in of_cell] for cell, of_cell in runs.items()}
    alone = {
        column: of_cell_results
        for (row, column), of_cell_results in results.items()
        if job.reproduction.rows[row].method == comparison.ALONE
    }
    return [
        _cell(job, cell, choices[cell], runs[cell], of_cell_results, alone.get(cell[1], ()))
        for cell, of_cell_results in results.items()
    ]


def _cell(
    job: Job,
    cell: CellId,
    choice: Settings,
    runs: Sequence[RunAt],
    results: Sequence[Result],
    alone: Sequence[Result],
) -> Cell:
    row, column = cell
    number = job.reproduction.published.get(row, {}).get(column)
    mean, std = number if isinstance(number, tuple) else (number, None)
    recipe = runs[0][0]
    shows, paths = job.reproduction.shows, [path for _, path in runs]
    spoken, fused = spoken_of_row(job.reproduction, row), job.reproduction.rows[row].fused
    seeds = seed_figures(_FIGURES[shows], results, alone, paths, spoken, fused)
    if shows == "gate_error":  # which is of no single client
        seeds = [replace(seed, clients={}) for seed in seeds]
    return Cell.of(
        replace(comparison.row(recipe.method["name"], results, alone), **_shown(results, shows)),
        row=row,
        title=job.reproduction.rows[row].title,
        column=column,
        published=mean,
        published_std=std,
        published_improved=job.reproduction.published_improved.get(row, {}).get(column),
        valid=metrics.mean(result.valid for result in results),
        choice=dict(choice),
        settings=recipe.method,
        folders=[path.relative_to(job.folder).as_posix() for path in paths],
        evaluations=[_brief(e) for e in results[0].evaluations],
        seeds=seeds,
    )


def _brief(evaluated: Evaluation) -> Evaluation:
    """Return an evaluation without matrices, and without clients if there are groups of them."""
    clients = {} if evaluated.groups else evaluated.clients
    return replace(evaluated, weights=None, choices=None, clients=clients)


def _shown(results: Sequence[Result], figure: Shown) -> dict[str, Any]:
    """Return a row's metric and values as in the table; no gate accuracy without a gate."""
    metric = _GATE_ERROR if figure == "gate_error" else results[0].metric
    values = [_FIGURES[figure](result) for result in results]
    if None in values:
        problem = f"{results[0]!r} does not contain what this table shows"
        raise CheckpointError(problem, Result.remedy)
    known = [value for value in values if value is not None]
    return {
        "metric": metric,
        "mean": metrics.mean(known),
        "std": metrics.deviation(known),
        "per_seed": known,
    }


_FIGURES: Mapping[Shown, Callable[[Result], float | None]] = {
    "mean": lambda result: result.mean,
    "best": lambda result: result.best,
    "best_of_last_ten": lambda result: result.best_of_last_ten,
    "gate_error": lambda result: 100 - (result.gate_accuracy or 0),
}
