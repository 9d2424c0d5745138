"""Write docs/recipes.md: every field of a recipe, from the code that validates it.

python scripts/recipe_reference.py [--check]
"""

import dataclasses
import sys
import typing
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coterie import recipes
from coterie.client import AdamW, Training
from coterie.data import AgNews, Folders, Hub, HubClients, Multilingual, Stdlib, Synthetic, Topics
from coterie.data.hub import HubClient
from coterie.methods import METHODS
from coterie.recipe import ModelSection, Recipe

PAGE = Path(__file__).parents[1] / "docs/recipes.md"
HEAD = """# Recipes

A recipe is a YAML file with the sections `data`, `model`, `method` and `training`. `coterie recipes` lists the shipped ones; they lie in
`src/coterie/recipes/`. Any field is changed on the command line by `--set section.field=value`, values being YAML. All mistakes of a recipe
are named at once, before any work. Written by `scripts/recipe_reference.py`; do not edit by hand.

```yaml
"""


def row(name: str, default: object, description: str) -> str:
    shown = "required" if default in (PydanticUndefined, dataclasses.MISSING) else f"`{_plain(default)}`"
    return f"| `{name}` | {shown} | {description} |"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value) or "{}"
    return {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value


def table(rows: list[str]) -> str:
    return "\n".join(["| field | default | meaning |", "| --- | --- | --- |", *rows])


def fields_of(model: type[BaseModel], prefix: str = "", skip: tuple[str, ...] = ()) -> str:
    named = ((name, info) for name, info in model.model_fields.items() if name not in skip)
    return table([row(prefix + name, info.default, info.description or "") for name, info in named])


def fields_of_method(method: type, skip: tuple[str, ...]) -> str:
    hints = typing.get_type_hints(method, include_extras=True)
    rows = []
    for field in dataclasses.fields(method):
        if field.name not in skip:
            found = [m.description for m in typing.get_args(hints[field.name]) if isinstance(m, FieldInfo)]
            rows.append(row(f"method.{field.name}", field.default, found[0] or "" if found else ""))
    return table(rows)


def page() -> str:
    parts = [HEAD + (recipes.FOLDER / "quickstart.yaml").read_text() + "```"]
    parts += ["## The recipe itself", fields_of(Recipe, skip=("data", "model", "method", "training"))]
    parts += ["## `model`", fields_of(ModelSection, "model.")]
    parts += ["## `training`", fields_of(Training, "training.", skip=("experts", "routers"))]
    parts += [
        "`training.experts` (the lower level; schedule `cosine`) and `training.routers` (the upper level) have each:",
        fields_of(AdamW),
    ]
    parts += ["## `data`", "Which fields there are depends on `data.kind`."]
    for kind in (Stdlib, AgNews, Multilingual, Topics, Folders, Hub, HubClients, Synthetic):
        name = typing.get_args(kind.model_fields["kind"].annotation)[0]
        parts += [f"### `data.kind: {name}`", (kind.__doc__ or "").split("\n\n")[0], fields_of(kind, "data.", skip=("kind",))]
        if kind is HubClients:
            parts += ["Each of `data.clients` has:", fields_of(HubClient)]
    parts += ["## `method`"]
    for name in ("comigs", "fedavg", "pretrained"):
        entry = METHODS[name]
        same = [other for other, found in METHODS.items() if dataclasses.fields(found.method) == dataclasses.fields(entry.method)]
        fixed = [f"`{o}` fixes {', '.join(f'{k}={v}' for k, v in METHODS[o].fixed.items())}" for o in same if METHODS[o].fixed]
        parts += ["### " + ", ".join(f"`{o}`" for o in same), *(["; ".join(fixed) + "."] if fixed else [])]
        parts += [fields_of_method(entry.method, ())]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(f"{PAGE} is out of date: run {sys.argv[0]}" if PAGE.read_text() != page() else 0)
    PAGE.write_text(page())
