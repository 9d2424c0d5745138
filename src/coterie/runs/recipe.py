"""Recipes: what a run is made of, validated before any work, all mistakes at once."""

import dataclasses
import difflib
import json
import math
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from coterie.aggregation.attacks import Attack
from coterie.aggregation.privacy import Privacy
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.names import normal
from coterie.core.own import is_own
from coterie.data import Data, kind_of
from coterie.data.canaries import Audit
from coterie.data.federation import Federation
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.section import Section
from coterie.methods import METHODS, Method, import_problem, name_of
from coterie.runs import recipes
from coterie.runs.sections import LanguageSection, ModelSection, Participation, Quorum, _Mistakes

_SHOWN, _DEEPEST = 200, 50  # characters of a value in a message; sections within sections


class Recipe(BaseModel):
    """Everything that determines a run but the machine: data, model, method, training and the rest
    of docs/recipes.md.

    Its fields are keyword arguments, its sections mappings as in YAML. All mistakes are refused at
    once, with a `RecipeError`.

    Example:
        >>> import coterie
        >>> recipe = coterie.Recipe(
        ...     name="mine",
        ...     data={"kind": "digits", "partition": "dirichlet", "clients": 4},
        ...     model={"kind": "classifier", "network": "mlp", "hidden": [16]},
        ...     method={"name": "fedavg", "rounds": 3, "local_steps": 2},
        ... )
        >>> shipped = coterie.Recipe.load("cobo-digits", method={"rounds": 3}, seed=7)
        >>> shipped.method["rounds"], shipped.method["rho"], shipped.seed
        (3, 0.03, 7)
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[
        str,
        Field(
            min_length=1, pattern=r"^[A-Za-z0-9._-]+$", description="default: the name of the file"
        ),
    ]
    description: Annotated[
        str, Field(description="one line for `coterie recipes` and the report")
    ] = ""
    paper: Annotated[str, Field(description="paper and table that it stands for")] = ""
    data: Data
    model: ModelSection = LanguageSection()
    method: dict[str, Any]
    training: Training = Training()
    engine: Annotated[
        Literal["inprocess", "loopback", "flower"],
        Field(
            description="who carries the messages; flower: Flower's simulation on this machine, "
            "or devices, see docs/deploy.md"
        ),
    ] = "inprocess"
    quorum: Annotated[
        Quorum, Field(description="when the server goes on without some of those that it asked")
    ] = Quorum()
    evaluate_every: Annotated[
        int, Field(ge=0, description="rounds between evaluations; 0: only after the last")
    ] = 0
    curve_every: Annotated[
        int | None,
        Field(
            ge=1,
            description="rounds between points of the curves, each of a part of the test sets, "
            "from before the first round on; they decide "
            "nothing, and are left out where clients are in processes of their own; null: curves "
            "are of the evaluations",
        ),
    ] = None
    curve_windows: Annotated[
        int, Field(ge=1, description="windows of text, or examples, of each client in such a point")
    ] = 8
    metrics_every: Annotated[
        int, Field(ge=1, description="rounds between lines of what training measured")
    ] = 1
    presence: Annotated[
        dict[str, tuple[Annotated[int, Field(ge=0)], int | None]],
        Field(
            description="clients that join late or leave early: the first round, and the first "
            "one without it or null"
        ),
    ] = {}
    privacy: Annotated[
        Privacy | None, Field(description="differential privacy of what clients share; null: none")
    ] = None
    secure: Annotated[
        bool,
        Field(
            description="the server learns only the sum of the updates (Flower's SecAgg+): needs "
            "engine flower and three clients"
        ),
    ] = False
    audit: Annotated[
        Audit | None,
        Field(
            description="plant canaries and keep what was sent, for `coterie audit`, with all "
            "data on this machine; null: neither"
        ),
    ] = None
    attack: Annotated[
        Attack | None,
        Field(description="clients that lie, to try method.aggregation; null: nobody does"),
    ] = None
    participation: Annotated[
        Participation, Field(description="who of those that are there takes part in a round")
    ] = Participation()
    checkpoint_every: Annotated[int, Field(ge=1, description="rounds between checkpoints")] = 1
    memory: Annotated[
        float | None,
        Field(
            ge=0,
            description="GiB of clients' states that stay in memory, with engine inprocess; the "
            "others lie in files of the run's folder; "
            "null: half of this machine's memory, or of its GPU's where the model is there",
        ),
    ] = None
    threads: Annotated[
        int | None,
        Field(
            ge=1,
            description="that compute on a CPU of this machine; results are the same to the bit "
            "only with as many; null: "
            "OMP_NUM_THREADS if that is set, else one or all cores by a short trial at the "
            "start; a run that is resumed keeps its number",
        ),
    ] = None
    compare_with: Annotated[
        tuple[str, ...],
        Field(description="methods that `coterie run` runs beside this one, for its table"),
    ] = ()
    samples: Annotated[
        bool, Field(description="keep beginnings of test texts, coloured by expert, in the report")
    ] = True
    seed: Annotated[int, Field(ge=0, description="of everything but the splits of the data")] = 0

    def __init__(self, /, **fields: Any) -> None:
        """Check the fields and take them. Raises RecipeError with all mistakes."""
        source = f"recipe {fields.get('name', '')}".rstrip()
        if impossible := list(_impossible(fields)):
            raise RecipeError(source, impossible)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError(
                source, [line for e in error.errors() for line in _readable(e).splitlines()]
            ) from None

    @classmethod
    def load(cls, recipe: str | Path, **changes: Any) -> "Recipe":
        """Return a shipped recipe, or one of a YAML file or a run's folder, with changes.

        Args:
            recipe: A shipped name (`coterie recipes`), the path of a YAML file, or a run's folder.
            changes: Values for its fields. A mapping changes fields of a section and leaves its
                others, as `--set` does; `method` may be a name or a class of `Method` alone.

        Raises:
            Refused: No such recipe, or not YAML.
            RecipeError: All of its mistakes.
        """
        kept = Path(recipe) / "recipe.yaml"
        path = (
            kept
            if str(recipe) not in recipes.names() and kept.is_file()
            else recipes.find(str(recipe))
        )
        return _with({"name": path.stem, **recipes.read(path)}, _flat(changes), str(recipe))

    def with_changes(self, **changes: Any) -> "Recipe":
        """Return the recipe with other values for some of its fields, given as to `load`. Raises
        RecipeError.
        """
        return _with(self.model_dump(mode="json"), _flat(changes), self.name)

    @field_validator("method", mode="before")
    @classmethod
    def _name_class(cls, section: Any) -> Any:
        if isinstance(section, Mapping) and isinstance(name := section.get("name"), type):
            return {**section, "name": name_of(name)}
        return section

    @field_validator("compare_with", mode="before")
    @classmethod
    def _name_classes(cls, methods: Any) -> Any:
        if isinstance(methods, list | tuple):
            return tuple(name_of(m) if isinstance(m, type) else m for m in methods)
        return methods

    @field_validator("method")
    @classmethod
    def _check_method(cls, section: dict[str, Any]) -> dict[str, Any]:
        try:
            build_method(section)
        except ValidationError as error:
            raise _Mistakes("\n".join(_readable(e, ("method",)) for e in error.errors())) from None
        except ValueError as error:
            raise _Mistakes(str(error)) from None
        return section

    @field_validator("presence")
    @classmethod
    def _in_normal_form(cls, presence: dict[str, Any]) -> dict[str, Any]:
        return {normal(client): rounds for client, rounds in presence.items()}

    @field_validator("compare_with")
    @classmethod
    def _check_compare_with(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if mistakes := [
            f"compare_with: {_unknown_method(name)}" for name in names if name not in METHODS
        ]:
            raise _Mistakes("\n".join(mistakes))
        return names

    @model_validator(mode="after")
    def _check_kinds(self) -> "Recipe":
        kinds = (
            (Images, "images", "classifier"),
            (LabelledTexts, "labelled texts", "text-classifier"),
            (Section, "texts", "language"),
        )
        held, needed = next(
            (held, needed) for kind, held, needed in kinds if isinstance(self.data, kind)
        )
        if self.model.kind != needed:
            raise _Mistakes(
                f"model.kind: data.kind {kind_of(self.data)} holds {held}, which need {needed}, "
                f"found {self.model.kind}"
            )
        return self

    def present(self, clients: Iterable[str], round: int) -> tuple[str, ...]:
        """Return the clients that are there in a round, counted from 0."""
        return tuple(i for i in clients if _within(round, *self.presence.get(i, (0, None))))

    def active(
        self, federation: Federation, round: int, secret: bytes | None = None
    ) -> tuple[str, ...]:
        """Those of them that take part in it, see `Participation.of`."""
        there = self.present(federation.clients, round)
        return self.participation.of(
            there, federation.anchors, federation.clusters, self.seed, round, secret
        )

    def drawn(self, federation: Federation, round: int) -> tuple[int, int] | None:
        """How many are drawn in a round, of how many, every set of them as likely as any other;
        None where they are not drawn so.

        Who is drawn and cannot be reached was drawn all the same: that fewer take part makes
        nobody's own chance smaller.
        """
        part = self.participation
        if part.clients is None or part.anchors is not None or part.schedule != "all":
            return None
        there = len(self.present(federation.clients, round))
        return min(part.clients, there), there

    def build_method(self) -> Method:
        return build_method(self.method)

    def with_method(self, name: str) -> "Recipe":
        """Return the same recipe for another method: the same data, base, training and, where it
        has such a field, the same settings.

        Raises:
            RecipeError: There is no such method.
        """
        if name not in METHODS:
            raise RecipeError(f"method {name!r}", [_unknown_method(name)])
        entry, own = METHODS[name], METHODS[self.method["name"]]
        if name == self.method["name"]:
            return self.model_copy(update={"compare_with": ()})
        fields = (
            {f.name for f in dataclasses.fields(entry.method)} - set(entry.fixed) - set(own.fixed)
        )
        if issubclass(entry.method, METHODS["pretrained"].method):
            fields.discard("rounds")
        return self.model_copy(
            update={
                "method": {"name": name} | {k: v for k, v in self.method.items() if k in fields},
                "compare_with": (),
            }
        )


def _within(round: int, first: int, end: int | None) -> bool:
    return first <= round and (end is None or round < end)


def build_method(section: Mapping[str, Any]) -> Method:
    """Return the method of a recipe's `method` section.

    Raises:
        ValueError: `name` is missing or unknown, or a field is given that the name fixes.
        pydantic.ValidationError: A field is unknown or out of range.
    """
    name = section.get("name")
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(
            "method.name: "
            + ("missing; see `coterie methods`" if name is None else _unknown_method(str(name)))
        )
    entry = METHODS[name]
    if moved := list(_moved(section)):
        raise ValueError("\n".join(moved))
    given = {key: value for key, value in section.items() if key != "name"}
    for key, value in entry.fixed.items():
        if key in given and given[key] != value:
            raise ValueError(
                f"method.{key}: {name} fixes it to {value!r}, found {given[key]!r}; use name: "
                f"comigs to choose it"
            )
    fields = given | dict(entry.fixed)
    return _built(entry.method, _Fields(repr(sorted(fields.items())), fields))


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A method's fields, alike where they are written alike."""

    written: str
    values: Mapping[str, Any] = dataclasses.field(compare=False)


@lru_cache(maxsize=64)
def _built(kind: type[Method], fields: _Fields) -> Method:
    """Return the method with these fields: one object for all that ask, as it is frozen."""
    return TypeAdapter(kind).validate_python(fields.values)


def _moved(method: Mapping[str, Any]) -> Iterator[str]:
    """Say what a recipe of before has to write now."""
    if method.get("generalists") == "pool" or (
        "chosen" in method and str(method["name"]).startswith("comigs")
    ):
        yield (
            "method.generalists: a pool is a method of its own now: name: comigs-pool, where "
            "`generalists` is what was `chosen`"
        )
    if "aggregate" in method:
        yield (
            "method.aggregate: CoBo's weights are a method of its own now: name: comigs-cobo "
            "(comigs averages); leave the field out"
        )


def load(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe by shipped name or path, with `key=value` overrides (values are YAML, keys
    dotted).

    Raises:
        Refused: No such recipe, or not YAML.
        RecipeError: All of its mistakes.
    """
    path = recipes.find(recipe)
    section: dict[str, Any] = {"name": path.stem, **recipes.read(path)}
    mistakes = [mistake for override in overrides if (mistake := _apply(section, override))]
    if mistakes:
        raise RecipeError("--set", mistakes)
    return validate(section, str(recipe))


def changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe with other values for some of its fields, by dotted keys. Raises
    RecipeError.
    """
    return _with(recipe.model_dump(mode="json"), settings, recipe.name)


def _with(section: dict[str, Any], settings: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe of a section in which some values, by dotted keys, are others. Raises
    RecipeError.
    """
    mistakes = [
        wrong
        for key, value in settings.items()
        if (wrong := _set(section, key, value, f"{key}={value!r}"))
    ]
    if mistakes:
        raise RecipeError(f"recipe {source}", mistakes)
    return validate(section, source)


def _flat(changes: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys; a method by its name or class alone
    stands for its section's `name`.
    """
    found: dict[str, Any] = {}
    for key, value in sorted(
        changes.items(), key=lambda change: change[0] != "name"
    ):  # which drops what it has no fields for
        if isinstance(value, Mapping) and value:
            found |= _flat(value, f"{prefix}{key}.")
        elif not prefix and key == "method" and isinstance(value, str | type):
            found["method.name"] = name_of(value)
        else:
            found[f"{prefix}{key}"] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    """Return a value as YAML has it: a path as text, a method's class by its name."""
    if isinstance(value, Path):
        return str(value)
    return name_of(value) if isinstance(value, type) else value


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by dotted keys, as `key=value` texts."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def validate(section: Mapping[str, Any], source: str) -> Recipe:
    """Return a mapping's recipe. Raises RecipeError with all mistakes, each naming its field."""
    try:
        return Recipe(**{str(key): value for key, value in section.items()})
    except RecipeError as error:
        raise RecipeError(f"recipe {source}", error.mistakes) from None


def _impossible(value: Any, where: str = "", depth: int = 0) -> Iterator[str]:
    """Return what no field can have, whatever it is: numbers that are not finite or beyond 64 bits,
    half of a surrogate pair, endless sections.
    """
    if depth > _DEEPEST:
        yield f"{where}: more than {_DEEPEST} sections within each other"
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _impossible(str(key), where, depth)
            yield from _impossible(inner, f"{where}.{key}" if where else str(key), depth + 1)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _impossible(inner, where, depth + 1)
    elif isinstance(value, float) and not math.isfinite(value):
        yield f"{where}: must be a finite number, found {value}"
    elif isinstance(value, int) and abs(value) >= 2**63:
        yield f"{where}: must be below 2^63, found a number of {value.bit_length()} bits"
    elif isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        yield f"{where}: half of a surrogate pair, which is no text"


def _apply(section: dict[str, Any], override: str) -> str | None:
    """Set one `a.b.c=value`, the value being YAML; returns what is wrong with it, if anything."""
    key, sign, text = override.partition("=")
    if not sign or not key.strip().split(".")[-1]:
        return f"{override!r} is not of the form key=value, for instance method.rounds=5"
    shown = override if len(override) < _SHOWN else f"{override[:_SHOWN]}..."
    try:
        value = recipes.parse(text)
    except ValueError as error:
        return f"{shown!r}: the value is not valid YAML ({str(error).splitlines()[0]})"
    return _set(section, key.strip(), value, override)


def _set(section: dict[str, Any], key: str, value: Any, shown: str) -> str | None:
    """Set the value of a dotted key; returns what is wrong with it, if anything. A new method's
    name drops what it has no fields for.
    """
    *path, last = key.split(".")
    for part in path:
        section = section.setdefault(part, {})
        if not isinstance(section, dict):
            return f"{shown!r}: {part} is a value, not a section"
    if last == "name" and path == ["method"] and isinstance(value, str) and value in METHODS:
        keep = {f.name for f in dataclasses.fields(METHODS[value].method)} - set(
            METHODS[value].fixed
        )
        for old in [k for k in section if k not in keep]:
            del section[old]
    section[last] = value
    return None


def _unknown_method(name: str) -> str:
    if is_own(name):
        return f"{name!r} is no method: {import_problem(name)}"
    close = difflib.get_close_matches(name, METHODS, n=1)
    return f"there is no method {name!r}" + (
        f", did you mean {close[0]}?" if close else "; see `coterie methods`"
    )


def _readable(error: ErrorDetails, prefix: tuple[str, ...] = ()) -> str:
    """One mistake in the words of someone who writes a recipe."""
    location = _without_kinds([str(part) for part in (*prefix, *error["loc"])])
    where = ".".join(part for part in location if "[" not in part)
    if isinstance(cause := error.get("ctx", {}).get("error"), _Mistakes):
        return str(cause)
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"{where}: unknown key" + _suggest(location)
    if error["type"] == "union_tag_invalid":
        return (
            f"{where}.kind: there is no {error['ctx']['tag']!r}; choose among "
            f"{error['ctx']['expected_tags']}"
        )
    if error["type"] == "union_tag_not_found":
        return f"{where}.kind: missing"
    if error["type"] == "missing":
        return f"{where}: missing"
    message = error["msg"].removeprefix("Value error, ")
    found = reprlib.repr(error["input"]) if len(given := repr(error["input"])) > _SHOWN else given
    return f"{where}: {message[0].lower()}{message[1:]}, found {found}"


def _without_kinds(location: list[str]) -> list[str]:
    """Return the way to a field as it is written, without the kinds that pydantic puts behind
    sections that have several.
    """
    several = {"data", "model", "experts", "routers", "aggregation"}
    return [
        part
        for k, part in enumerate(location)
        if k == 0 or location[k - 1] not in several or part in several or k == len(location) - 1
    ]


def _suggest(location: list[str]) -> str:
    """Return the known key that an unknown one resembles."""
    known = _keys(Recipe) | {
        f.name for entry in METHODS.values() for f in dataclasses.fields(entry.method)
    }
    if location[-1] in known:
        return " here: it belongs to another section, method or kind of data"
    close = difflib.get_close_matches(location[-1], known, n=1)
    return f", did you mean {close[0]}?" if close else "; see docs/recipes.md for all keys"


def _keys(model: type[BaseModel]) -> set[str]:
    """All keys of a section and the sections in it."""
    found = set(model.model_fields)
    for info in model.model_fields.values():
        for nested in _models(info.annotation):
            found |= _keys(nested)
    return found


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in getattr(annotation, "__args__", ()) for model in _models(part)]


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: every field with its value, so that it can be run again
    as it was.
    """
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def resolve(path: Path) -> Recipe:
    """Return the recipe of a run's folder."""
    return validate(recipes.read(path / "recipe.yaml"), str(path))
