"""A request for a table or figure: the runs of its cells, and notes for comparing its rows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import mode
from typing import Any

from coterie.core.errors import Refused
from coterie.core.result import ROUNDS
from coterie.core.result import rows as comparison
from coterie.core.result.tuning import name_of
from coterie.papers import tables
from coterie.papers.reproduced import Cell
from coterie.papers.tables import SCALES, Reproduction, Scale, Settings
from coterie.runs.folder.candidates import folder_of
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.tuning import search
from coterie.runs.tuning.search import Effort, Search, SearchResult, Trial
from coterie.runs.tuning.trials import RATES, around, fields_of, own_values
from coterie.runs.tuning.tune import stated


@dataclass(frozen=True)
class Job:
    """A request for a table or figure at a scale, or a part of it. Raises Refused if there is no
    such table, scale, column or row, or a recipe is invalid with its settings.
    """

    name: str  # <paper>/<table or figure>
    scale: Scale
    folder: Path  # of all of the paper's runs at this scale; gets <name>.json, .md and .html
    seeds: int | None = None  # runs per cell; None: as many as the paper averages over
    columns: Sequence[str] = ()  # the only ones; () for all
    rows: Sequence[str] = ()  # the only ones; () for all
    overrides: Sequence[str] = ()  # `key=value` texts for every recipe
    changed: bool = False  # resumes runs even if base, data or clients have changed
    # of a search for the settings of each row; None: the table's values are tried
    effort: Effort | None = None

    @cached_property
    def reproduction(self) -> Reproduction:
        return tables.load(self.name)

    @property
    def stem(self) -> Path:
        """The path of the result files, without their suffixes."""
        suffix = "" if self.effort is None else "-tuned"
        return self.folder / f"{self.name.replace('/', '-')}{suffix}"

    @cached_property
    def numbers(self) -> list[int]:
        """The seeds."""
        return list(range(self.seeds or self.reproduction.seeds))

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """Row and column of every cell, column by column."""
        known = self.reproduction
        columns = [c for c, column in known.columns.items() if self.scale in column.recipes]
        rows = list(known.rows)
        if not columns:
            scales = {scale for column in known.columns.values() for scale in column.recipes}
            other = " or ".join(scale for scale in SCALES if scale in scales)
            raise Refused(f"{self.name} has no scale {self.scale}", f"Use --scale {other}.")
        _check_known("column", self.columns, columns)
        _check_known("row", self.rows, rows)
        chosen = [c for c in columns if c in (self.columns or columns)]
        pairs = ((r, c) for c in chosen for r in rows)
        pairs = ((r, c) for r, c in pairs if c in (known.rows[r].columns or columns))
        there = [(r, c) for r, c in pairs if r in (known.columns[c].only or rows)]
        cells = [(r, c) for r, c in there if r in (self.rows or rows)]
        if not cells:
            problem = f"{self.name} has no row {', '.join(self.rows)} in these columns"
            raise Refused(problem, f"Rows there: {', '.join(dict.fromkeys(r for r, _ in there))}.")
        return cells

    @cached_property
    def _bases(self) -> dict[str, Recipe]:
        """The recipe of each column, before a row sets anything."""
        bases = {}
        for c in dict.fromkeys(c for _, c in self.cells):
            column = self.reproduction.columns[c]
            common = {
                **self.reproduction.common(self.scale, self.effort is not None),
                **column.set,
                **column.at.get(self.scale, {}),
            }
            bases[c] = recipes.load(
                column.recipes[self.scale], [*recipes.overrides(common), *self.overrides]
            )
        return bases

    def sweep(self, row: str, column: str) -> Mapping[str, Sequence[Any]]:
        """Return the values to try on validation for a cell, by keys of a recipe."""
        if not self._trains(row, column):  # nothing to choose
            return {}
        row_spec = self.reproduction.rows[row]
        return {
            **self.reproduction.columns[column].tune.get(self.scale, {}),
            **row_spec.sweep.get(self.scale, {}),
            **(row_spec.search.get(self.scale, {}) if self.effort is not None else {}),
        }

    def search(self, cell: tuple[str, str], allowed: Callable[[Trial], bool]) -> Search:
        """Return the search for a cell: the plain sweep of its values or, with an effort,
        successive halving from them, and from grids around the learning rates where it names none.
        The rounds are those of the table, unless that tries several.
        """
        swept = self.sweep(*cell)
        if self.effort is None or not self._trains(*cell):
            return search.sweep(swept, allowed)
        recipe, _ = self.run(*cell, {}, self.numbers[0])
        grids = {
            key: around(values[0]) if key in RATES and len(values) == 1 else values
            for key, values in swept.items()
        }
        fields = fields_of(recipe, grids)
        rounds, defaults = self.rounds(*cell), own_values(recipe, fields)
        return search.halving(fields, self.effort, rounds, defaults, allowed=allowed)

    def rounds(self, row: str, column: str) -> int:
        """Return the rounds of a cell; of several that are tried the fewest."""
        recipe, _ = self.run(row, column, {}, self.numbers[0])
        tried = self.sweep(row, column).get(ROUNDS, [recipe.build_method().rounds])
        return int(min(tried))

    def _trains(self, row: str, column: str) -> bool:
        recipe = self._bases[column].with_method(self.reproduction.rows[row].method)
        return recipe.build_method().total_iterations > 0

    def tried(self, row: str, column: str) -> int:
        """Return how many settings of a cell compete on validation, without those beyond the edges
        of its grids: 1 if the recipe's are taken as they are, 0 if nothing is trained.
        """
        return int(self._trains(row, column)) + sum(
            len(values) - 1 for values in self.sweep(row, column).values()
        )

    def run(self, row: str, column: str, choice: Settings, seed: int) -> tuple[Recipe, Path]:
        """Return a run of a cell and its folder, which equal runs of all tables share."""
        row_spec, base = self.reproduction.rows[row], self._bases[column]
        settings = {
            **row_spec.set,
            **row_spec.at.get(self.scale, {}),
            **self.reproduction.columns[column].rows.get(row, {}),
            **choice,
        }
        if seed >= self.reproduction.one_split:
            settings["data.seed"] = seed
        recipe = recipes.changed(base.with_method(row_spec.method), settings).model_copy(
            update={"seed": seed}
        )
        return recipe, folder_of(recipe, self.folder / recipe.name)

    @property
    def most(self) -> int:
        """The largest number of runs, done ones included, without a search with an effort."""
        if self.effort is not None:
            return len(self.cells) * len(self.numbers)
        tried = sum(
            max(1, sum(len(values) + search.EXTENSIONS for values in self.sweep(r, c).values()))
            for r, c in self.cells
        )
        return tried + len(self.cells) * (len(self.numbers) - 1)


def _check_known(what: str, names: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [a for a in names if a not in known]:
        problem = f"no {what} {', '.join(map(repr, unknown))} at this scale"
        raise Refused(problem, f"Choose among: {', '.join(known)}.")


def orders(cells: Sequence[Cell]) -> dict[str, float]:
    """Return Kendall's tau of the measured and the published order of rows, by column."""
    from scipy.stats import kendalltau

    orders_of = {}
    for c in dict.fromkeys(cell.column for cell in cells):
        pairs = [(of.mean, of.published) for of in cells if of.column == c and of.published]
        measured, published = {m for m, _ in pairs}, {p for _, p in pairs}
        # rows that are all alike have no order
        if len(pairs) > 2 and min(len(measured), len(published)) > 1:
            orders_of[c] = float(kendalltau(*zip(*pairs, strict=True)).statistic)
    return orders_of


def effort(job: Job, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Describe how many settings each row tried, and which rows went beyond them."""
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
    listed = "; ".join(
        f"{text} ({', '.join(titles)})" if len(alike) > 1 else text
        for text, titles in alike.items()
    )
    beyond = [
        f"{_cell_title(job, cell)} {count}"
        for cell, search in searched.items()
        if (count := sum(j.rung is None for j in search.judged))
    ]
    those = "(1: those of the recipe, which all rows share)"
    lines = [f"Settings that a row tried on validation at the first seed {those}: {listed}."]
    if beyond:
        text = "Beyond the edges of these grids, where the best lay there"
        lines.append(f"{text}: {', '.join(beyond)}.")
    return lines + _edges(job, searched)


def tuned(job: Job, effort: Effort, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Describe what each row's search tried, to show whether the rows had the same effort."""
    trained = [cell for cell, search in searched.items() if search.chosen is not None]
    rounds = dict.fromkeys(job.rounds(*cell) for cell in trained)
    fewer = [
        f"{_cell_title(job, cell)}: only {count} settings, as its fields have no more values."
        for cell in trained
        if (count := sum(j.rung == 0 for j in searched[cell].judged)) < effort.trials
    ]
    sentences = [stated(effort, n, "Every row that trains") for n in rounds]
    return [*sentences, *_edges(job, searched), *fewer]


def _edges(job: Job, searched: Mapping[tuple[str, str], SearchResult]) -> list[str]:
    """Name the fields in which a row's best lies at the end of all that was tried."""
    return [
        f"{_cell_title(job, cell)}: the best lies at the end of its range in "
        f"{', '.join(map(name_of, search.at_edge))}."
        for cell, search in searched.items()
        if search.at_edge
    ]


def _cell_title(job: Job, cell: tuple[str, str]) -> str:
    row, column = cell
    titles, columns = job.reproduction.rows, job.reproduction.columns
    return f"{titles[row].title} on {columns[column].title}"


def unlike(cells: Sequence[Cell]) -> list[str]:
    """Return how the budgets of the rows of a column differ, and in which columns if not in all."""
    differ: dict[str, list[str]] = {}
    columns = list(dict.fromkeys(cell.column for cell in cells))
    for c in columns:
        rows = [replace(cell, method=cell.row) for cell in cells if cell.column == c]
        titles = {cell.row: cell.title for cell in rows}
        # 1G1S where it is among them, otherwise the first
        ours = [row for row in titles if row.startswith(("comigs", "ddome"))]
        reference = "comigs-1g1s" if "comigs-1g1s" in ours else next(iter(ours), None)
        for sentence in comparison.comparability(rows, reference, titles):
            differ.setdefault(sentence, []).append(c)
    return [s if of == columns else f"{s[:-1]} ({', '.join(of)})." for s, of in differ.items()]
