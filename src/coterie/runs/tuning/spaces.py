"""The fields of a recipe that a search covers, and their initial values."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from coterie.core.errors import RecipeError
from coterie.core.foreign import yaml_of
from coterie.core.roles import GATE
from coterie.methods import METHODS
from coterie.models.layout import Layout
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.tuning.search import Candidate, Field

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
            typed = [
                new if isinstance(new, int | float | str) else value
                for new, value in zip(read, values, strict=True)
            ]
        if not typed and not mistakes:
            mistakes[f"{key}: no method has this field, or the method's name fixes it"] = None
        grid[key] = tuple(typed)
    if mistakes:
        raise RecipeError("--field", list(mistakes))
    return grid
