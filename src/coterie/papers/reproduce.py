"""A table or figure of a paper, run: measured beside published, and which of the paper's
statements hold.
"""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from statistics import mode
from typing import Any

import torch

from coterie.core import metrics
from coterie.core.errors import Refused
from coterie.core.files import read_json, write_atomically, write_json
from coterie.core.version import __version__
from coterie.papers import tables
from coterie.papers.checks import _verdicts
from coterie.papers.page import markdown, write_page
from coterie.papers.tables import SCALES, Figure, Reproduction, Scale, Settings
from coterie.reports import Callback, comparison
from coterie.runs import recipe as recipes
from coterie.runs.inputs import RESULT, Kept
from coterie.runs.recipe import Recipe
from coterie.runs.run import execute_all

Json = dict[str, Any]
Cell = tuple[str, str]  # a row and a column
_GATE_ERROR = {"name": "gate error", "unit": "%", "lower_is_better": True}
_OWN = "each client's model right after its last local iteration"
_UNSEEN = "clients never trained with are scored, each by the model that it got without labels"
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


def _digest(recipe: Recipe) -> str:
    method = asdict(
        recipe.build_method()
    )  # defaults too: where one changes, so does what is measured
    section = recipe.model_dump(mode="json", exclude=_BESIDE) | {"method": method}
    text = json.dumps(section, sort_keys=True, default=lambda rule: rule.model_dump(mode="json"))
    return blake2b(text.encode(), digest_size=4).hexdigest()


@dataclass(frozen=True)
class Job:
    """What is asked for: a table or figure at a scale, or a part of it.

    Args:
        name: `<paper>/<table or figure>`.
        scale: "small" or "paper".
        folder: Of all of the paper's runs at this scale; gets `<name>.json`, `.md` and `.html`.
        seeds: Runs per cell; None: as many as the paper averages over.
        columns: Only these; () for all.
        rows: Only these; () for all.
        overrides: `key=value` texts for every recipe.
        changed: Whether unfinished runs go on though base, data or clients have changed, see `run`.

    Raises:
        Refused: There is no such table, scale, column or row, or a recipe, as it is set, will not
            do.
    """

    name: str
    scale: Scale
    folder: Path
    seeds: int | None = None
    columns: Sequence[str] = ()
    rows: Sequence[str] = ()
    overrides: Sequence[str] = ()
    changed: bool = False

    @cached_property
    def reproduction(self) -> Reproduction:
        return tables.load(self.name)

    @cached_property
    def numbers(self) -> list[int]:
        """The seeds."""
        return list(range(self.seeds or self.reproduction.seeds))

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """Row and column of every cell, column by column."""
        columns = [
            c for c, column in self.reproduction.columns.items() if self.scale in column.recipes
        ]
        rows = list(self.reproduction.rows)
        if not columns:
            other = " or ".join(
                s
                for s in SCALES
                if any(s in column.recipes for column in self.reproduction.columns.values())
            )
            raise Refused(f"{self.name} has no scale {self.scale}", f"Use --scale {other}.")
        _check_known("column", self.columns, columns)
        _check_known("row", self.rows, rows)
        asked = (
            (r, c)
            for c in columns
            if c in (self.columns or columns)
            for r in rows
            if r in (self.rows or rows)
        )
        return [(r, c) for r, c in asked if c in (self.reproduction.rows[r].columns or columns)]

    @cached_property
    def _bases(self) -> dict[str, Recipe]:
        """The recipe of each column, before a row sets anything."""
        found = {}
        for c in dict.fromkeys(c for _, c in self.cells):
            column = self.reproduction.columns[c]
            common = {
                **self.reproduction.set,
                **self.reproduction.scales.get(self.scale, {}),
                **column.set,
                **column.at.get(self.scale, {}),
            }
            found[c] = recipes.load(
                column.recipes[self.scale], [*recipes.overrides(common), *self.overrides]
            )
        return found

    def sweep(self, row: str, column: str) -> Mapping[str, Sequence[Any]]:
        """Return what is chosen on validation for a cell: keys of a recipe, and the values that are
        tried.
        """
        if not self._trains(row, column):  # nothing to choose
            return {}
        own = self.reproduction.rows[row]
        return {
            **self.reproduction.columns[column].tune.get(self.scale, {}),
            **own.sweep.get(self.scale, {}),
        }

    def _trains(self, row: str, column: str) -> bool:
        return (
            self._bases[column]
            .with_method(self.reproduction.rows[row].method)
            .build_method()
            .total_iterations
            > 0
        )

    def tried(self, row: str, column: str) -> int:
        """How many settings of a cell compete on validation: 1 where the recipe's are taken as
        they are, 0 where nothing is trained.
        """
        return int(self._trains(row, column)) + sum(
            len(values) - 1 for values in self.sweep(row, column).values()
        )

    def run(self, row: str, column: str, choice: Settings, seed: int) -> tuple[Recipe, Path]:
        """One run of a cell and its folder. Cells of all tables that are the same run share one."""
        own, base = self.reproduction.rows[row], self._bases[column]
        settings = {**own.set, **self.reproduction.columns[column].rows.get(row, {}), **choice}
        recipe = recipes.changed(base.with_method(own.method), settings).model_copy(
            update={"seed": seed}
        )
        return (
            recipe,
            self.folder / recipe.name / f"{own.method}-{_digest(recipe)}" / f"seed-{seed}",
        )

    @property
    def most(self) -> int:
        """How many runs there are at most, with those that are done already."""
        tried = sum(
            max(1, sum(len(values) for values in self.sweep(r, c).values())) for r, c in self.cells
        )
        return tried + len(self.cells) * (len(self.numbers) - 1)


def reproduce(job: Job, reporter: Callback | None = None) -> Json:
    """Run a table or figure; runs that are in the folder already are taken from there, and
    unfinished ones go on.

    Args:
        job: What to run.
        reporter: Is told of what happens.

    Returns:
        What is in the JSON file.

    Raises:
        Refused: As `Job`, or a base or data will not do; nothing was started.
        CoterieError: A run failed; the same call goes on with it.
    """
    reproduction, folder = job.reproduction, job.folder
    choices = _choose(job, reporter or Callback())
    runs = {
        (r, c): [job.run(r, c, choices[r, c], seed) for seed in job.numbers] for r, c in job.cells
    }
    _execute([run for cell in runs.values() for run in cell], reporter or Callback(), job.changed)
    cells = _cells(job, choices, runs)
    statements = [
        verdict for s in reproduction.statements for verdict in _verdicts(s, cells, folder)
    ]
    found: Json = {
        "name": job.name,
        "title": reproduction.title,
        "scale": job.scale,
        "seeds": job.numbers,
        "overrides": list(job.overrides),
        "part": [
            f"--{what} {','.join(names)}"
            for what, names in (("columns", job.columns), ("rows", job.rows))
            if names
        ],
        "shows": reproduction.shows,
        "scored": _UNSEEN if cells[0]["groups"] else _OWN,
        "columns": {c: reproduction.columns[c].title for _, c in job.cells},
        "metrics": {cell["column"]: cell["metric"] for cell in cells},
        "rows": {r: reproduction.rows[r].title for r, _ in job.cells},
        "cells": cells,
        "statements": statements,
        "order": _orders(cells),
        "notes": [*reproduction.notes, _effort(job), *_comparability(cells)],
        "unjudged": sum(len(s.columns) for s in reproduction.statements) - len(statements),
        "versions": {
            "coterie": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "machine": read_json(folder / cells[0]["folders"][0] / RESULT)["machine"],
    }
    stem = job.name.replace("/", "-")
    write_json(folder / f"{stem}.json", found)
    write_atomically(folder / f"{stem}.md", markdown(found).encode())
    write_page(folder / f"{stem}.html", found, reproduction.pictures, folder)
    return found


def _choose(job: Job, reporter: Callback) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each cell's sweep comes to: key after key, the value with the best mean on
    validation at the first seed.
    """
    sweeps = {cell: job.sweep(*cell) for cell in job.cells}
    choices = {
        cell: {key: values[0] for key, values in sweep.items()} for cell, sweep in sweeps.items()
    }
    for key in dict.fromkeys(key for sweep in sweeps.values() for key in sweep):
        tried = {
            (cell, value): job.run(*cell, choices[cell] | {key: value}, job.numbers[0])
            for cell, sweep in sweeps.items()
            for value in sweep.get(key, ())
        }
        _execute(list(tried.values()), reporter, job.changed)
        for cell, sweep in sweeps.items():
            if key in sweep:
                found = {value: read_json(tried[cell, value][1] / RESULT) for value in sweep[key]}
                ranked = {
                    value: metrics.sort_key(_valid(result), metrics.metric_of(result))
                    for value, result in found.items()
                }
                choices[cell][key] = min(ranked, key=ranked.__getitem__)
    return choices


def _execute(runs: Sequence[tuple[Recipe, Path]], reporter: Callback, changed: bool) -> None:
    """Those that are not done yet, each once. Raises CheckpointError, too, where the result of
    one that is done is damaged.
    """
    missing = [
        (recipe, path)
        for path, recipe in {path: recipe for recipe, path in runs}.items()
        if not Kept(path).done()
    ]
    titles = [f"{recipe.name}, {path.parent.name}, seed {recipe.seed}" for recipe, path in missing]
    execute_all(missing, reporter, titles, changed=changed)


def _valid(result: Json) -> float:
    return float(result["evaluations"][-1]["valid"])


def _cells(
    job: Job, choices: Mapping[Cell, Settings], runs: Mapping[Cell, Sequence[tuple[Recipe, Path]]]
) -> list[Json]:
    """Return what is known of each cell: the figures of its runs, held against those of Local in
    its column, and the paper's.
    """
    results = {cell: [read_json(path / RESULT) for _, path in own] for cell, own in runs.items()}
    alone = {
        column: found
        for (row, column), found in results.items()
        if job.reproduction.rows[row].method == comparison.ALONE
    }
    return [
        _cell(job, cell, choices[cell], runs[cell], found, alone.get(cell[1], ()))
        for cell, found in results.items()
    ]


def _cell(
    job: Job,
    cell: Cell,
    choice: Settings,
    runs: Sequence[tuple[Recipe, Path]],
    results: Sequence[Json],
    alone: Sequence[Json],
) -> Json:
    row, column = cell
    number = job.reproduction.published.get(row, {}).get(column)
    mean, std = number if isinstance(number, tuple) else (number, None)
    recipe = runs[0][0]
    return (
        comparison.row(recipe.method["name"], results, alone)
        | _shown(results, job.reproduction.shows)
        | {
            "row": row,
            "title": job.reproduction.rows[row].title,
            "column": column,
            "published": mean,
            "published_std": std,
            "published_improved": job.reproduction.published_improved.get(row, {}).get(column),
            "valid": metrics.mean(map(_valid, results)),
            "choice": dict(choice),
            "settings": recipe.method,
            "folders": [path.relative_to(job.folder).as_posix() for _, path in runs],
            "evaluations": [_brief(e) for e in results[0]["evaluations"]],
        }
    )


def _brief(evaluated: Json) -> Json:
    """Return an evaluation without matrices; and without clients where there are groups of them, as
    curves then are of groups.
    """
    left_out = {"weights", "choices"} | ({"clients"} if evaluated.get("groups") else set())
    return {key: value for key, value in evaluated.items() if key not in left_out}


def _shown(results: Sequence[Json], figure: Figure) -> Json:
    """Return what a table shows of a row: the metric and its values. A row without a gate is never
    right about one.
    """
    if figure == "gate_error":
        metric, values = (
            _GATE_ERROR,
            [100 - (metrics.gate_accuracy(result) or 0) for result in results],
        )
    else:
        metric, values = dict(metrics.metric_of(results[0])), [result[figure] for result in results]
    return {
        "metric": metric,
        "mean": metrics.mean(values),
        "std": metrics.deviation(values),
        "per_seed": values,
    }


def _check_known(what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [a for a in asked if a not in known]:
        raise Refused(
            f"no {what} {', '.join(map(repr, unknown))} at this scale",
            f"Choose among: {', '.join(known)}.",
        )


def _orders(cells: Sequence[Json]) -> dict[str, float]:
    """By column: Kendall's tau between the measured and the published order of the rows, 1 for the
    same order and -1 for the reverse.

    Which way is better does not matter to it.
    """
    from scipy.stats import kendalltau

    found = {}
    for c in dict.fromkeys(cell["column"] for cell in cells):
        pairs = [
            (cell["mean"], mean)
            for cell in cells
            if cell["column"] == c and (mean := cell["published"])
        ]
        measured, published = {m for m, _ in pairs}, {p for _, p in pairs}
        if (
            len(pairs) > 2 and min(len(measured), len(published)) > 1
        ):  # rows that are all alike have no order
            found[c] = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return found


def _effort(job: Job) -> str:
    """Say how many settings each row tried, so that a reader sees whether one was held down;
    columns that are alike together.
    """
    alike: dict[str, list[str]] = {}
    for c in dict.fromkeys(c for _, c in job.cells):
        counts = {
            job.reproduction.rows[r].title: count
            for r, column in job.cells
            if column == c and (count := job.tried(r, c))
        }
        usual = mode(counts.values()) if counts else 0
        others = [f"{title} {count}" for title, count in counts.items() if count != usual]
        text = ", ".join([*others, f"every {'other ' if others else ''}row {usual}"])
        alike.setdefault(text, []).append(job.reproduction.columns[c].title)
    found = "; ".join(
        f"{text} ({', '.join(titles)})" if len(alike) > 1 else text
        for text, titles in alike.items()
    )
    return (
        f"Settings that a row tried on validation at the first seed (1: those of the recipe, "
        f"which all rows share): {found}."
    )


def _comparability(cells: Sequence[Json]) -> list[str]:
    """Return what makes the rows of a column unlike in budget; a sentence that holds of several
    columns once.
    """
    found: dict[str, None] = {}
    for c in dict.fromkeys(cell["column"] for cell in cells):
        own = [cell | {"method": cell["row"]} for cell in cells if cell["column"] == c]
        titles = {cell["row"]: cell["title"] for cell in own}
        ours = [
            row for row in titles if row.startswith(("comigs", "ddome"))
        ]  # 1G1S where it is among them, otherwise the first
        reference = "comigs-1g1s" if "comigs-1g1s" in ours else next(iter(ours), None)
        found |= dict.fromkeys(comparison.comparability(own, reference, titles))
    return list(found)
