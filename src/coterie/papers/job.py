"""What is asked for of a table or figure: which runs its cells are made of."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from coterie.core.errors import Refused
from coterie.papers import tables
from coterie.papers.tables import SCALES, Reproduction, Scale, Settings
from coterie.runs import recipe as recipes
from coterie.runs.recipe import Recipe

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
        asked_rows = [r for r in rows if r in (self.rows or rows)]
        asked_columns = [c for c in columns if c in (self.columns or columns)]
        asked = ((r, c) for c in asked_columns for r in asked_rows)
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


def _check_known(what: str, asked: Sequence[str], known: Sequence[str]) -> None:
    if unknown := [a for a in asked if a not in known]:
        raise Refused(
            f"no {what} {', '.join(map(repr, unknown))} at this scale",
            f"Choose among: {', '.join(known)}.",
        )
