"""Results as the JSON that a test writes down and looks into, and with their types."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from statistics import fmean
from typing import Any

from coterie.core.metrics import PERPLEXITY
from coterie.core.result import Comparison, Evaluation, Machine, Result, Routing, Row, Versions
from coterie.papers.figures import SeedFigures
from coterie.papers.reproduced import Cell, Reproduced
from coterie.papers.tables import FIGURES

_ROW = {field.name for field in fields(Row)}
METRIC = PERPLEXITY.about.to_json()


def as_json(found: Any) -> Any:
    """What a result, a row, or several of them are as JSON values."""
    if hasattr(found, "to_json"):
        return found.to_json()
    if isinstance(found, Mapping):
        return {key: as_json(value) for key, value in found.items()}
    return [as_json(value) for value in found] if isinstance(found, list | tuple) else found


def typed(found: Any) -> Any:
    """What a test wrote down with its types; what it left out, as nothing in it depends on that,
    is filled in.
    """
    if not isinstance(found, Mapping):
        return [typed(one) for one in found] if isinstance(found, list | tuple) else found
    for kind, known in KINDS:
        if known <= found.keys():
            return kind(as_json(found))
    return {key: typed(value) for key, value in found.items()}


def _result(found: dict) -> Result:
    common = {"method": "m", "recipe": "r", "seed": 0, "metric": METRIC}
    clients = {i: {"valid": own["test"]} | own for i, own in found["clients"].items()}
    for part in (found.get("evaluations", ()), (found.get("curve") or {}).get("points", ())):
        for entry in part:
            if "clients" in entry:
                entry.setdefault("test", fmean(own["test"] for own in entry["clients"].values()))
    return Result.from_json(common | found | {"clients": clients})


def _row(found: dict) -> Row:
    numbers = {
        field.name: 0
        for field in fields(Row)
        if field.type in ("int", "float", int, float) and field.name not in found
    }
    return Row.from_json({"metric": METRIC, "per_seed": [0.0], "clients": {}} | numbers | found)


def _cell(found: dict) -> Cell:
    evaluations = [Evaluation.from_json(own) for own in found.get("evaluations", ())]
    own = {field.name: None for field in fields(Cell) if field.name not in _ROW} | {"valid": 0.0}
    own |= {name: found[name] for name in own.keys() & found.keys()}
    own["seeds"] = _seeds(found)
    line = {"method": found["row"]} | {name: found[name] for name in _ROW & found.keys()}
    return Cell.of(_row(line), **own | {"evaluations": evaluations})


def _seeds(found: dict) -> list[SeedFigures]:
    """A cell's own, or a single one with its means."""
    if "seeds" in found:
        return [_seed(own) for own in found["seeds"]]
    known = {field.name for field in fields(SeedFigures)} & found.keys()
    figures = {name: found[name] for name in FIGURES if found.get(name) is not None}
    own = {"mean": 0.0, "clients": {}, "figures": figures} | {name: found[name] for name in known}
    return [SeedFigures(**own)]


def _seed(found: dict) -> SeedFigures:
    earlier = found.get("earlier")
    return SeedFigures(**found | {"earlier": None if earlier is None else _seed(earlier)})


def _reproduced(found: dict) -> Reproduced:
    cells = [_cell(own) for own in found["cells"]]
    parts = {
        "metrics": {cell.column: cell.metric for cell in cells},
        "cells": cells,
        "versions": Versions.from_json(found["versions"]),
        "machine": Machine.from_json(found["machine"]),
    }
    return Reproduced(**found | parts)


def _comparison(found: dict) -> Comparison:
    rows = [_row(row) for row in found["rows"]]
    common = {"recipe": "r", "own": "", "metric": rows[0].metric.to_json(), "scored": ""}
    return Comparison.from_json(common | found | {"rows": as_json(rows)})


KINDS: list[tuple[Callable[[dict], Any], set[str]]] = [
    (Routing.from_json, {"texts"}),
    (_reproduced, {"cells"}),
    (_comparison, {"rows"}),
    (_result, {"clients", "rounds"}),
    (_cell, {"row", "column"}),
    (_row, {"per_seed"}),
    (_row, {"trainable_parameters"}),
]
