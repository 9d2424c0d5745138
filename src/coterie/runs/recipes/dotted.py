"""Settings of a recipe by dotted keys: `method.rounds=5`."""

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from coterie.core.errors import RecipeError
from coterie.core.foreign import yaml_of
from coterie.methods import METHODS, name_of
from coterie.runs.recipes.mistakes import SHOWN

AUTO = "auto"  # the value of a field that the run chooses, see `coterie.runs.problems.auto`
LR, CONTEXT, BATCH, MICRO_BATCH, STEPS, ROWS = AUTOMATIC = (
    "training.experts.lr",
    "model.context",
    "training.batch_size",
    "training.micro_batch",
    "method.local_steps",
    "evaluate_rows",
)


def seconds(value: Any) -> Any:
    """Return a time with a unit, such as 30m, in seconds; other values as they are."""
    units = {"s": 1, "m": 60, "h": 3600}
    if isinstance(value, str) and value[-1:] in units:
        with suppress(ValueError):
            return float(value[:-1]) * units[value[-1]]
    return value


_OPTIMISER, _RATE = "training.experts.optimiser", "training.experts.lr"
# others' names, of fields that alone can be meant
FAMILIAR = {
    "model.r": "model.rank",
    **dict.fromkeys(("model.lora_r", "lora_r", "lora_rank"), "model.rank"),
    **dict.fromkeys(("model.lora_alpha", "lora_alpha"), "model.alpha"),
    **dict.fromkeys(("model.lora_dropout", "lora_dropout"), "model.dropout"),
    **dict.fromkeys(("model.quantize", "quantize"), "model.quantise"),
    **dict.fromkeys(("training.lr", "training.learning_rate", "learning_rate", "lr"), _RATE),
    **dict.fromkeys(("training.optimizer", "training.optimiser", "optimizer"), _OPTIMISER),
    "training.experts.optimizer": _OPTIMISER,
    "training.routers.optimizer": "training.routers.optimiser",
}


def with_our_names(section: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields, of which those with others' names have ours. Raises RecipeError for both."""
    renamed = _copied(section)
    for theirs, ours in FAMILIAR.items():
        above, _, name = theirs.rpartition(".")
        holder = _section_at(renamed, above)
        if name not in holder:
            continue
        value = holder.pop(name)
        if ours.rpartition(".")[2] in _section_at(renamed, ours.rpartition(".")[0]):
            raise RecipeError("recipe", [f"{theirs}: the same as {ours}, which is given too"])
        assign(renamed, ours, value, theirs)
    return renamed


def _section_at(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = value_at(section, key) if key else section
    return value if isinstance(value, dict) else {}


def _copied(section: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copied(v) if isinstance(v, Mapping) else v for k, v in section.items()}


def without_auto(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe's fields without those that are `auto`, which its field `auto` then names."""
    values, named = _copied(recipe), list(recipe.get("auto") or ())
    for key in AUTOMATIC:
        above, _, last = key.rpartition(".")
        if (section := _section_at(values, above)).get(last) == AUTO:
            del section[last]
            named.append(key)
    return values | {"auto": list(dict.fromkeys(named))} if named else values


def value_at(section: Mapping[str, Any], key: str, missing: Any = None) -> Any:
    """Return the value of a dotted key, or `missing`."""
    value: Any = section
    for part in key.split("."):
        value = value.get(part, missing) if isinstance(value, Mapping) else missing
    return value


def flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys; `method` may be a name or a class."""
    values: dict[str, Any] = {}
    # a method's name comes first, as it drops the fields that the method does not have
    for key, value in sorted(changes.items(), key=lambda change: change[0] != "name"):
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{prefix}{key}.")
        elif not prefix and key == "method" and isinstance(value, str | type):
            values["method.name"] = name_of(value)
        else:
            values[f"{prefix}{key}"] = _plain(value)
    return values


def _plain(value: Any) -> Any:
    """Return a value in YAML's terms: a path as text, a method's class as its name."""
    if isinstance(value, Path):
        return str(value)
    return name_of(value) if isinstance(value, type) else value


def apply(section: dict[str, Any], override: str) -> str | None:
    """Set one `a.b.c=value`, the value being YAML; return the mistake, if any."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip().split(".")[-1]:
        return f"{override!r} is not of the form key=value, for instance method.rounds=5"
    shown = override if len(override) < SHOWN else f"{override[:SHOWN]}..."
    try:
        value = yaml_of(text)
    except ValueError as error:
        return f"{shown!r}: the value is not valid YAML ({str(error).splitlines()[0]})"
    return assign(section, key.strip(), value, override)


def assign(section: dict[str, Any], key: str, value: Any, shown: str) -> str | None:
    """Set the value of a dotted key; return the mistake, if any. A new method's name, also as
    `method` itself, drops the fields that it does not have.
    """
    key = "method.name" if key == "method" and isinstance(value, str) else FAMILIAR.get(key, key)
    if section.get("auto"):
        section["auto"] = [f for f in section["auto"] if not f"{f}.".startswith(f"{key}.")]
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return f"{shown!r}: {part} is a value, not a section"
    if last == "name" and path == ["method"] and isinstance(value, str) and value in METHODS:
        keep = {f.name for f in dataclasses.fields(METHODS[value].method)}
        for old in section.keys() - (keep - METHODS[value].fixed.keys()):
            del section[old]
    section[last] = value
    return None
