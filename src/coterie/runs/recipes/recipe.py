"""Recipes: what a run is made of, validated before any work, all mistakes at once."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from coterie.aggregation.privacy import Privacy
from coterie.aggregation.robust import Attack
from coterie.client.settings import Training
from coterie.core.errors import CheckpointError, RecipeError
from coterie.core.names import normal
from coterie.data import Data, kind_of
from coterie.data.canaries import Audit
from coterie.data.federation import Federation
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.section import Section
from coterie.methods import METHODS, Method, name_of
from coterie.methods.section import build_method, unknown_method
from coterie.runs import recipes
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes import dotted
from coterie.runs.recipes.mistakes import Mistakes, impossible, readable
from coterie.runs.recipes.sections import LanguageSection, ModelSection, Participation, Quorum


class Recipe(BaseModel):
    """Everything that determines a run but the machine: data, model, method, training and the rest
    of docs/recipes.md.

    Its fields are keyword arguments, its sections mappings as in YAML. All mistakes are refused at
    once, with a `RecipeError`.

    Examples:
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

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")  # name; default: the file's name
    description: str = ""  # one line for `coterie recipes` and the report
    paper: str = ""  # paper and table that it reproduces
    data: Data
    model: ModelSection = LanguageSection()
    method: dict[str, Any]
    training: Training = Training()
    # how clients run; inprocess: in this process; flower: Flower's simulation on this machine, or
    # devices, see docs/deploy.md
    engine: Literal["inprocess", "loopback", "flower"] = "inprocess"
    quorum: Quorum = Quorum()  # when the server goes on without some of those that it asked
    evaluate_every: int = Field(0, ge=0)  # rounds between evaluations; 0: only after the last round
    # with keep: best, windows or examples of each validation and test set, evenly spaced, that are
    # scored between rounds; null: everything each time
    evaluate_rows: int | None = Field(None, ge=1)
    # as evaluate_rows, of what a run ends with, where there is no time for more; null: everything
    final_rows: int | None = Field(None, ge=1)
    # seconds, or 30m or 2h, in which `coterie run` ends on this machine: the run chooses rounds,
    # iterations and the fields that are auto by it; null: no bound
    time: float | None = Field(None, gt=0)
    # number of clients that are scored, and on this machine keep a personal model; drawn once from
    # the seed, of each group of unseen clients if there are any; null: all
    evaluate_clients: int | None = Field(None, ge=1)
    # whose scores and personal models a run ends with: last, those after the last round; best, of
    # each client those of the evaluation at which its own validation score was best, that before
    # the first round included
    keep: Literal["last", "best"] = "last"
    # with keep: best, evaluations in a row at which no client's validation score, nor that of a
    # part of its model, is better than before; then a run ends. null: it does all rounds
    patience: int | None = Field(None, ge=1)
    # rounds between points of the curves, the first before round 1; each point uses eight rows of
    # each test set and decides nothing; left out if clients run in separate processes; null: the
    # curves show the evaluations
    curve_every: int | None = Field(None, ge=1)
    metrics_every: int = Field(1, ge=1)  # rounds between records of training metrics
    # clients that join late or leave early: the first round, and the first round without the client
    # or null
    presence: dict[str, tuple[Annotated[int, Field(ge=0)], int | None]] = {}
    privacy: Privacy | None = None  # differential privacy of what clients share; null: none
    # the server learns only the sum of the updates (Flower's SecAgg+): needs engine flower and
    # three clients
    secure: bool = False
    # plant canaries and keep the updates sent, for `coterie audit`; needs all data on this machine;
    # null: neither
    audit: Audit | None = None
    # clients that send false updates, to test method.aggregation; null: none
    attack: Attack | None = None
    # which of the connected clients take part in a round
    participation: Participation = Participation()
    checkpoint_every: int = Field(1, ge=1)  # rounds between checkpoints
    # GiB of client states kept in memory, with engine inprocess; the rest is kept in files in the
    # run's folder; null: half of this machine's memory, or of the GPU's if the model is there
    memory: float | None = Field(None, ge=0)
    # number of CPU threads of each client; with engine inprocess several clients compute at once if
    # there are cores left; results are bit-identical only with the same number; null:
    # OMP_NUM_THREADS if set, otherwise one for each of as many clients as there are cores, or all
    # of them where clients compute one by one; a resumed run keeps its number
    threads: int | None = Field(None, ge=1)
    # methods that `coterie run` runs beside this one, for the table
    compare_with: tuple[str, ...] = ()
    samples: bool = True  # show the beginnings of test texts, coloured by expert, in the report
    # number of words of each client's test text on which the suggestions of a keyboard with its
    # model are scored in the end: next words that they foresee, and keystrokes saved (about 0.2 s a
    # word with the embedded base); null: none
    words: int | None = Field(None, ge=1)
    seed: int = Field(0, ge=0)  # seed of everything except the data splits
    # fields that the run chooses: those whose value is `auto`, see own-text.md
    auto: tuple[Annotated[str, Field(pattern=f"^({'|'.join(dotted.AUTOMATIC)})$")], ...] = ()

    def __init__(self, /, **fields: Any) -> None:
        """Validate the fields. Raises RecipeError with all mistakes."""
        fields = dotted.without_auto(fields)
        name = fields.get("name")
        source = f"recipe {name if isinstance(name, str) else ''}".rstrip()
        if mistakes := list(impossible(fields)):
            raise RecipeError(source, mistakes)
        try:
            super().__init__(**fields)
        except ValidationError as error:
            raise RecipeError(
                source,
                [line for e in error.errors() for line in readable(e, type(self)).splitlines()],
            ) from None

    @classmethod
    def load(cls, recipe: str | Path, **changes: Any) -> "Recipe":
        """Return a shipped recipe, or one of a YAML file or a run's folder, or for one's own data,
        with changes.

        Args:
            recipe: A shipped name (`coterie recipes`), the path of a YAML file, a run's folder, a
                folder with one folder per client, or a table that names clients.
            changes: Values for its fields. A mapping changes only these fields of a section, as
                `--set` does; `method` may be just a name or a class of `Method`.

        Raises:
            Refused: No such recipe, or not YAML.
            RecipeError: All of its mistakes.
        """
        return _with(recipes.section_of(str(recipe)), dotted.flat(changes), str(recipe))

    def with_changes(self, **changes: Any) -> "Recipe":
        """Return the recipe with other values, given as to `load`. Raises RecipeError."""
        return changed(self, dotted.flat(changes))

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
            raise Mistakes(
                "\n".join(readable(e, cls, ("method",)) for e in error.errors())
            ) from None
        except ValueError as error:
            raise Mistakes(str(error)) from None
        return section

    _in_seconds = field_validator("time", mode="before")(dotted.seconds)

    @field_validator("presence")
    @classmethod
    def _in_normal_form(cls, presence: dict[str, Any]) -> dict[str, Any]:
        return {normal(client): rounds for client, rounds in presence.items()}

    @field_validator("compare_with")
    @classmethod
    def _check_compare_with(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [unknown_method(name) for name in names if name not in METHODS]:
            raise Mistakes("\n".join(f"compare_with: {problem}" for problem in unknown))
        return names

    @model_validator(mode="after")
    def _check_patience(self) -> "Recipe":
        if self.patience is not None and (self.keep != "best" or not self.evaluate_every):
            raise Mistakes("patience: needs keep: best and evaluate_every of at least 1, or null")
        if self.evaluate_rows is not None and self.keep != "best":
            raise Mistakes("evaluate_rows: needs keep: best, or null")
        if self.final_rows is not None and self.evaluate_rows is None:
            raise Mistakes("final_rows: needs evaluate_rows, or null")
        return self

    @model_validator(mode="after")
    def _check_kinds(self) -> "Recipe":
        kinds = (
            (Images, "images", "classifier"),
            (LabelledTexts, "labelled texts", "text-classifier"),
            (Section, "texts", "language"),
        )
        held, needed = next(names for kind, *names in kinds if isinstance(self.data, kind))
        if self.model.kind != needed:
            raise Mistakes(
                f"model.kind: data.kind {kind_of(self.data)} holds {held}, which need {needed}, "
                f"found {self.model.kind}"
            )
        return self

    def present(self, clients: Iterable[str], round: int) -> tuple[str, ...]:
        """Return the clients that are present in a round, counted from 0."""
        spans = ((i, *self.presence.get(i, (0, None))) for i in clients)
        return tuple(i for i, first, end in spans if first <= round < (end or math.inf))

    def active(
        self, federation: Federation, round: int, secret: bytes | None = None
    ) -> tuple[str, ...]:
        """Return the clients that take part in a round, see `Participation.of`."""
        there = self.present(federation.clients, round)
        return self.participation.of(
            there, federation.anchors, federation.clusters, self.seed, round, secret
        )

    def drawn(self, federation: Federation, round: int) -> tuple[int, int] | None:
        """Return how many clients are drawn in a round, and out of how many; None if not every set
        of them is equally likely. Drawn clients that cannot be reached count.
        """
        part = self.participation
        if part.clients is None or part.anchors is not None or part.schedule != "all":
            return None
        there = len(self.present(federation.clients, round))
        return min(part.clients, there), there

    def build_method(self) -> Method:
        return build_method(self.method)

    @property
    def limit(self) -> str:
        """A sentence on when the run ends before its last round; empty if it cannot."""
        wait, rounds = (self.patience or 0) * self.evaluate_every, self.build_method().rounds
        span = f"{wait} round{'s' * (wait > 1)}"
        ends = f"training ends when no validation score has become better for {span}"
        sentence = f"at most {rounds} rounds: {ends}; times are estimated for all {rounds}"
        return sentence if 0 < wait < rounds else ""

    def trains(self, row: "Recipe") -> bool:
        """Return whether this recipe's method trains exactly what another recipe does, as one of
        its parts; never where protection, canaries or attacks are of a method as a whole.
        """
        part = self.build_method().methods.get(row.method["name"])
        other = row.model_copy(update={"method": self.method, "compare_with": self.compare_with})
        whole = self.privacy or self.audit or self.attack or self.engine != "inprocess"
        return not whole and other == self and row.build_method() == part

    def with_method(self, name: str) -> "Recipe":
        """Return the recipe for another method: same data, base, training and, as far as it has
        such fields, settings. Raises RecipeError for an unknown method.
        """
        if name not in METHODS:
            raise RecipeError(f"method {name!r}", [unknown_method(name)])
        if name == self.method["name"]:
            return self.model_copy(update={"compare_with": ()})
        entry, before = METHODS[name], METHODS[self.method["name"]]
        fields = {f.name for f in dataclasses.fields(entry.method)}
        fields -= entry.fixed.keys() | before.fixed.keys()
        if issubclass(entry.method, METHODS["pretrained"].method):
            fields.discard("rounds")
        method = {"name": name} | {k: v for k, v in self.method.items() if k in fields}
        return self.model_copy(update={"method": method, "compare_with": ()})


def load(recipe: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a recipe by its source, see `recipes.section_of`, with `key=value` overrides (dotted
    keys, YAML values). Raises Refused without such a recipe; RecipeError with all mistakes.
    """
    section = recipes.section_of(recipe)
    if mistakes := [wrong for text in overrides if (wrong := dotted.apply(section, text))]:
        raise RecipeError("--set", mistakes)
    return validate(section, str(recipe))


def changed(recipe: Recipe, settings: Mapping[str, Any]) -> Recipe:
    """Return the recipe with new values by dotted keys. Raises RecipeError."""
    return _with(recipe.model_dump(mode="json"), settings, recipe.name)


def _with(section: dict[str, Any], settings: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe of a section with new values by dotted keys. Raises RecipeError."""
    tried = (dotted.assign(section, key, v, f"{key}={v!r}") for key, v in settings.items())
    if mistakes := [wrong for wrong in tried if wrong]:
        raise RecipeError(f"recipe {source}", mistakes)
    return validate(section, source)


def overrides(settings: Mapping[str, Any]) -> list[str]:
    """Return settings by dotted keys as `key=value` texts."""
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def validate(section: Mapping[str, Any], source: str) -> Recipe:
    """Return the recipe of a mapping. Raises RecipeError with all mistakes by field."""
    try:
        section = recipes.with_content(dotted.with_our_names(section))
        return Recipe(**{str(key): value for key, value in section.items()})
    except RecipeError as error:
        raise RecipeError(f"recipe {source}", error.mistakes) from None


def dump(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML: every field with its value."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def resolve(path: Path) -> Recipe:
    """Return the recipe of a run's folder. Raises CheckpointError if it holds no run."""
    if not (path / RECIPE).is_file():
        problem = f"{path} holds no run: there is no {RECIPE}"
        raise CheckpointError(problem, "Give the folder that `coterie run` wrote (--out).")
    return validate(recipes.read(path / RECIPE), str(path))
