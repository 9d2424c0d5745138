"""Descriptions of a recipe's mistakes in the recipe's terms."""

import dataclasses
import difflib
import math
import reprlib
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from coterie.methods import METHODS

SHOWN = 200  # characters of a value in a message
_DEEPEST = 50  # sections within sections
# others' names for what is not quite the same here
_ELSEWHERE = {
    "max_new_tokens": "which is of generation: coterie generate RUN --max-new-tokens N",
    **dict.fromkeys(("num_rounds", "global_rounds"), "did you mean method.rounds?"),
    **dict.fromkeys(
        ("epochs", "num_epochs", "num_train_epochs", "local_ep"),
        "did you mean method.local_epochs, of each round?",
    ),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit", "bits"), "did you mean model.quantise?"),
    **dict.fromkeys(("max_length", "max_seq_length", "block_size"), "did you mean model.context?"),
    "gradient_accumulation_steps": "did you mean training.micro_batch, rows per pass?",
    "per_device_train_batch_size": "did you mean training.batch_size?",
}


class Mistakes(ValueError):
    """Mistakes that already name their fields, one per line."""


def impossible(value: Any, where: str = "", depth: int = 0) -> Iterator[str]:
    """Yield values that no field can have: infinite, beyond 64 bits, surrogates, endless."""
    if depth > _DEEPEST:
        yield f"{where}: sections nested more than {_DEEPEST} deep"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from impossible(str(key), where, depth)
            yield from impossible(inner, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from impossible(inner, where, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: must be a finite number, found {value}"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{where}: must be below 2^63, found a number of {value.bit_length()} bits"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield f"{where}: not valid text (half of a surrogate pair)"


def readable(error: ErrorDetails, recipe: type[BaseModel], prefix: tuple[str, ...] = ()) -> str:
    """Return pydantic's error in the section at `prefix` in the terms of a recipe."""
    location = _without_kinds([str(part) for part in (*prefix, *error["loc"])])
    where = ".".join(part for part in location if "[" not in part)
    if isinstance(cause := error.get("ctx", {}).get("error"), Mistakes):
        return str(cause)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: unknown key" + _suggest(location, recipe)
    if error["type"] == "union_tag_invalid":
        tag, others = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        return f"{where}.kind: unknown kind {tag!r}; choose one of {others}"
    if error["type"] in ("union_tag_not_found", "missing"):
        return f"{where}{'' if error['type'] == 'missing' else '.kind'}: missing"
    message = error["msg"].removeprefix("Value error, ")
    text = reprlib.repr(error["input"]) if len(given := repr(error["input"])) > SHOWN else given
    return f"{where}: {message[0].lower()}{message[1:]}, found {text}"


def _without_kinds(location: list[str]) -> list[str]:
    """Return a field's location without the kinds that pydantic inserts."""
    several = {"data", "model", "experts", "routers", "aggregation"}
    return [
        part
        for k, part in enumerate(location)
        if k == 0 or location[k - 1] not in several or part in several or k == len(location) - 1
    ]


def _suggest(location: list[str], recipe: type[BaseModel]) -> str:
    """Return the known key that an unknown one resembles."""
    known = _keys(recipe) | {
        f.name for entry in METHODS.values() for f in dataclasses.fields(entry.method)
    }
    if location[-1] in _ELSEWHERE:
        return f", {_ELSEWHERE[location[-1]]}"
    if location[-1] in known:
        return " here: it belongs to another section, method or kind of data"
    close = difflib.get_close_matches(location[-1], known, n=1)
    return f", did you mean {close[0]}?" if close else "; see docs/recipes.md for all keys"


def _keys(model: type[BaseModel]) -> set[str]:
    keys = set(model.model_fields)
    for info in model.model_fields.values():
        for nested in _models(info.annotation):
            keys |= _keys(nested)
    return keys


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]
