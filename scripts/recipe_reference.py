"""Write docs/recipes.md and the pages in docs/recipes/: every field of a recipe, from the code that
validates it.

python scripts/recipe_reference.py [--check]
"""

import ast
import dataclasses
import functools
import inspect
import io
import json
import re
import sys
import textwrap
import tokenize
import typing
from collections.abc import Callable
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from coterie.aggregation.means import Mean
from coterie.aggregation.privacy import Adaptive, Privacy
from coterie.aggregation.robust import (
    Attack,
    ClippedMean,
    GeometricMedian,
    Krum,
    Median,
    MultiKrum,
    TrimmedMean,
)
from coterie.client.settings import SGD, AdamW, Training
from coterie.data import (
    AgNews,
    Folders,
    Hub,
    HubClients,
    Multilingual,
    Stdlib,
    Synthetic,
    Table,
    Team,
    Topics,
)
from coterie.data.canaries import Audit
from coterie.data.hub import HubClient
from coterie.data.images import Cifar10, Cifar100, Digits, Emnist, Mnist
from coterie.data.labelled import Clinc150, DBpedia14, YahooAnswers
from coterie.data.partition import Partitioner
from coterie.methods import METHODS
from coterie.models.common import Pretraining
from coterie.runs import recipes
from coterie.runs.recipes.dotted import AUTOMATIC
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import (
    ClassifierSection,
    CommonSection,
    LanguageSection,
    Participation,
    Quorum,
    TextClassifierSection,
)

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = "*Written by `scripts/recipe_reference.py` from the code; do not edit by hand.*"
HEAD = f"""# Recipes

A recipe is a YAML file with the sections `data`, `model`, `method` and `training`. `coterie
recipes` lists the shipped ones; they lie in `src/coterie/runs/recipes/`. Any field is changed on
the command line by `--set section.field=value`, values being YAML. All mistakes of a recipe are
named at once, before any work.

{WRITTEN}

Editors complete and check recipes by [recipe.schema.json](recipes/recipe.schema.json), with a
first line `# yaml-language-server: $schema=PATH/recipe.schema.json`.

## An example

`coterie recipes quickstart` prints this recipe:

```yaml
"""
# fields that choose among sections, whose docstrings say what they are, and sections of their own
UNTOLD = ("kind", "rule", "optimiser", "data", "model", "method", "training", "experts", "routers")
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def row(name: str, default: object, description: str) -> str:
    shown = (
        "required"
        if default in (PydanticUndefined, dataclasses.MISSING)
        else f"`{_plain(default)}`"
    )
    return f"| `{name}` | {shown} | {description.replace('|', chr(92) + '|')} |"


def _plain(value: object) -> object:
    if isinstance(value, BaseModel):
        return ", ".join(f"{k}: {_plain(v)}" for k, v in value) or "{}"
    return (
        {None: "null", True: "true", False: "false"}.get(value, value)
        if isinstance(value, bool | None)
        else value
    )


def table(rows: list[str]) -> str:
    return "\n".join(["| field | default | meaning |", "| --- | --- | --- |", *rows])


def descriptions(section: type[BaseModel]) -> dict[str, str]:
    """Return what each field of a section is for: the description in its type, or else the comment
    behind its value or above it. Raises ValueError for a field with neither.
    """
    comments = _all_comments(section)
    told = {name: info.description for name, info in section.model_fields.items()}
    texts = {name: text or comments.get(name, "") for name, text in told.items()}
    if silent := [name for name, text in texts.items() if not text and name not in UNTOLD]:
        raise ValueError(f"{section.__name__}: no comment says what {silent} are for")
    return {name: text for name, text in texts.items() if text}


def _all_comments(section: type) -> dict[str, str]:
    """Return the comments of the fields of a class of coterie's and of what it is derived from."""
    comments: dict[str, str] = {}
    for part in reversed(section.__mro__):
        if part.__module__.startswith("pydantic") or part.__module__ == "builtins":
            continue
        comments |= _comments(part)
    return comments


@functools.cache
def _comments(part: type) -> dict[str, str]:
    """Return the comments of the fields of which a class itself has the annotation."""
    source = textwrap.dedent(inspect.getsource(part))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    by_line = {t.start[0]: t for t in tokens if t.type == tokenize.COMMENT}
    comments = {}
    for field in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        lines = [field.end_lineno] if field.end_lineno in by_line else []
        above = field.lineno - 1
        while field.end_lineno not in by_line and above in by_line and _alone(by_line[above]):
            lines, above = [above, *lines], above - 1
        comments[field.target.id] = " ".join(by_line[n].string.lstrip("# ") for n in lines if n)
    return comments


def _alone(comment: tokenize.TokenInfo) -> bool:
    """Whether a comment has its line for itself."""
    return comment.line.lstrip().startswith("#")


def fields_of(model: type[BaseModel], prefix: str = "", skip: tuple[str, ...] = ()) -> str:
    named = ((name, info) for name, info in model.model_fields.items() if name not in skip)
    texts = descriptions(model)
    return table([row(prefix + name, info.default, texts.get(name, "")) for name, info in named])


def fields_of_method(method: type, skip: tuple[str, ...]) -> str:
    hints, comments = typing.get_type_hints(method, include_extras=True), _all_comments(method)
    rows = []
    for field in dataclasses.fields(method):
        if field.name not in skip:
            found = [
                m.description
                for m in typing.get_args(hints[field.name])
                if isinstance(m, FieldInfo)
            ]
            text = (found[0] if found else None) or comments.get(field.name, "")
            rows.append(row(f"method.{field.name}", field.default, text))
    return table(rows)


def kind_of(section: type[BaseModel], field: str = "kind") -> str:
    """The value that a recipe names the section by."""
    return str(typing.get_args(section.model_fields[field].annotation)[0])


def about(section: type[BaseModel]) -> str:
    """What the section's docstring begins with."""
    return inspect.cleandoc(section.__doc__ or "").split("\n\n")[0]


def models() -> list[str]:
    parts = [
        "Which fields there are depends on `model.kind`: texts need `language`, the default, "
        "images `classifier`, and labelled texts"
        " `text-classifier`.",
    ]
    for section in (LanguageSection, ClassifierSection, TextClassifierSection):
        parts += [
            f"## `model.kind: {kind_of(section)}`",
            about(section),
            fields_of(section, "model.", skip=("kind",)),
        ]
    for name, common in (
        ("model.common", CommonSection),
        ("model.common.pretraining", Pretraining),
    ):
        parts += [f"## `{name}`, of classifiers", about(common), fields_of(common, f"{name}.")]
    return parts


def optimisers() -> list[str]:
    parts = [
        "`training.experts` (the lower level; of an image classifier, everything; with schedule "
        "`cosine` where the section is left out) and"
        " `training.routers` (the upper level) each name an `optimiser`, `adamw` if none, and "
        "have its fields:"
    ]
    for optimiser in (AdamW, SGD):
        parts += [
            f"## `optimiser: {kind_of(optimiser, 'optimiser')}`",
            about(optimiser),
            fields_of(optimiser, skip=("optimiser",)),
        ]
    return parts


def rules() -> list[str]:
    parts = [
        "How a method that averages what clients send makes one of many: a `rule`, `mean` if "
        "none, and its fields. Each method's default is"
        " among its [fields](method.md). What rules withstand is also in "
        "[privacy.md](../privacy.md#clients-that-lie-robust-rules).",
    ]
    for rule in (Mean, Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, ClippedMean):
        own = (
            fields_of(rule, "method.aggregation.", skip=("rule",))
            if len(rule.model_fields) > 1
            else "No fields."
        )
        parts += [f"## `rule: {kind_of(rule, 'rule')}`", inspect.cleandoc(rule.__doc__ or ""), own]
    return parts


def trust() -> list[str]:
    """The sections on clients that fail, that lie, and that share no more than they must."""
    parts = []
    for name, section in (
        ("privacy", Privacy),
        ("privacy.adaptive", Adaptive),
        ("audit", Audit),
        ("attack", Attack),
    ):
        parts += [f"## `{name}`", about(section), fields_of(section, f"{name}.")]
    return parts


def data() -> list[str]:
    parts = ["Which fields there are depends on `data.kind`."]
    for kind in (
        Stdlib,
        AgNews,
        Multilingual,
        Topics,
        Folders,
        Hub,
        HubClients,
        Table,
        Synthetic,
        Team,
    ):
        parts += [
            f"## `data.kind: {kind_of(kind)}`",
            about(kind),
            fields_of(kind, "data.", skip=("kind",)),
        ]
        if kind is HubClients:
            parts += ["Each of `data.clients` has:", fields_of(HubClient)]
    for examples in (Digits, Cifar100, Cifar10, Mnist, Emnist, Clinc150, DBpedia14, YahooAnswers):
        parts += [f"## `data.kind: {kind_of(examples)}`", about(examples)]
        if examples is not Digits:
            parts += [fields_of(examples, "data.", skip=("kind", *Partitioner.model_fields))]
    partitions = inspect.cleandoc((Partitioner.__doc__ or "").split("Partitions:")[1]).split(
        "\n\n"
    )[0]
    entries = re.sub(r"\n +", " ", textwrap.dedent(partitions)).splitlines()
    named = [
        f"- `{name}`: {text}" for name, _, text in (entry.partition(": ") for entry in entries)
    ]
    shared = "## Images and labelled texts, of whichever kind"
    return [
        *parts,
        shared,
        fields_of(Partitioner, "data."),
        "Of `data.partition`:",
        "\n".join(named),
    ]


def methods() -> list[str]:
    """The fields of every method, of those that have the same ones once."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, entry in METHODS.items():
        groups.setdefault(
            tuple((f.name, repr(f.default)) for f in dataclasses.fields(entry.method)), []
        ).append(name)
    parts: list[str] = []
    for names in groups.values():
        fixed = [
            f"`{o}` fixes {', '.join(f'{k}={v}' for k, v in METHODS[o].fixed.items())}"
            for o in names
            if METHODS[o].fixed
        ]
        parts += [
            "## " + ", ".join(f"`{o}`" for o in names),
            *(["; ".join(fixed) + "."] if fixed else []),
        ]
        parts += [fields_of_method(METHODS[names[0]].method, ())]
    return parts


def training() -> list[str]:
    return [fields_of(Training, "training.", skip=("experts", "routers")), *optimisers()]


def who_takes_part() -> list[str]:
    parts = []
    for name, section in (("participation", Participation), ("quorum", Quorum)):
        parts += [f"## `{name}`", about(section), fields_of(section, f"{name}.")]
    return parts


# Title, what is on the page, and what writes it.
SECTIONS: dict[str, tuple[str, str, Callable[[], list[str]]]] = {
    "data": ("The section `data`", "which texts or images, and who holds what", data),
    "model": ("The section `model`", "the base, its adapters, and classifiers", models),
    "method": ("The section `method`", "the fields of every method", methods),
    "training": ("The section `training`", "batches, steps and optimisers", training),
    "aggregation": ("`method.aggregation`", "means, and rules that withstand liars", rules),
    "participation": ("Who takes part", "`participation` and `quorum`", who_takes_part),
    "privacy": ("Privacy and attacks", "`privacy`, `audit` and `attack`", trust),
}


def index() -> str:
    """Return the first page: an example, the sections, and the fields beside the sections."""
    listed = [f"| [{o}](recipes/{o}.md) | {said} |" for o, (_, said, _) in SECTIONS.items()]
    parts = [
        HEAD + (recipes.FOLDER / "quickstart.yaml").read_text() + "```",
        "## The sections",
        "\n".join(["| page | fields of |", "| --- | --- |", *listed]),
        "## The recipe itself",
        fields_of(Recipe, skip=("data", "model", "method", "training", "participation", "quorum")),
    ]
    return "\n\n".join(parts) + "\n"


def schema() -> str:
    """Return the JSON schema by which editors complete and check recipes: the fields of `Recipe`,
    where some may be `auto`, the time may have a unit, and the file's name stands for `name`.
    """
    whole = Recipe.model_json_schema()
    whole["required"] = [name for name in whole.get("required", ()) if name != "name"]
    for section in _sections(BaseModel):
        part = whole if section is Recipe else whole["$defs"].get(section.__name__, {})
        for name, about in part.get("properties", {}).items():
            if (text := descriptions(section).get(name)) is not None:
                part["properties"][name] = dict(sorted({**about, "description": text}.items()))
    automatic = {key.rpartition(".")[2] for key in AUTOMATIC} | {"time"}
    for part in (whole, *whole["$defs"].values()):
        for name in automatic & part.get("properties", {}).keys():
            also = {"pattern": "^[0-9.]+[smh]$"} if name == "time" else {"enum": ["auto"]}
            about = part["properties"][name]
            part["properties"][name] = {"anyOf": [about, {"type": "string"} | also]}
    return json.dumps({"$schema": DIALECT, **whole}, indent=1) + "\n"


def _sections(base: type[BaseModel]) -> list[type[BaseModel]]:
    """Return all classes below a class."""
    return [part for kind in base.__subclasses__() for part in (kind, *_sections(kind))]


def pages() -> dict[Path, str]:
    """Return every page, and the schema, by its file."""
    found = {DOCS / "recipes.md": index(), DOCS / "recipes/recipe.schema.json": schema()}
    for name, (title, _, write) in SECTIONS.items():
        head = [f"# {title}", f"[All sections](../recipes.md). {WRITTEN}"]
        found[DOCS / "recipes" / f"{name}.md"] = "\n\n".join([*head, *write()]) + "\n"
    return found


def out_of_date() -> list[Path]:
    """Return the pages that are not what the code says, and those that nothing writes."""
    found = pages()
    wrong = [path for path, text in found.items() if not path.exists() or path.read_text() != text]
    return wrong + [path for path in (DOCS / "recipes").glob("*.md") if path not in found]


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        wrong = [str(path) for path in out_of_date()]
        sys.exit(f"{', '.join(wrong)}: out of date, run {sys.argv[0]}" if wrong else 0)
    for path, text in pages().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
