"""The shared part of a run of language models, apart from the run: what any new client gets, with
what is needed to train from it elsewhere.
"""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from coterie import personal
from coterie.adapt.personalisation import Snapshot, score, shared_part, untrained
from coterie.client.client import Client
from coterie.core.callback import Callback
from coterie.core.errors import CheckpointError, Refused, TensorError
from coterie.core.files import load, save
from coterie.core.metrics import mean, perplexity
from coterie.core.protocol import ClientId
from coterie.core.tensors import Tensors, check_alike
from coterie.data.federation import ClientData, Federation
from coterie.models.artifact import verify
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.folder.names import RECIPE
from coterie.runs.problems.language import Language, load_backbone, pick_dtype
from coterie.runs.problems.loading import language, pick_device
from coterie.runs.problems.own_text import section_of, text_of
from coterie.runs.problems.prepare import Prepared, assembled, prepare
from coterie.runs.recipes.recipe import Recipe, resolve

SHARED = "shared.safetensors"  # beside recipe.yaml: what any new client gets
NAME = "shared"  # in place of a client's name in client.json
_KEPT = ("name", "model", "method", "training", "seed")  # of the recipe; data are others


@dataclass(frozen=True)
class SharedPart:
    """The shared part of a run.

    Args:
        clients: Number of clients that trained.
        tokens: Of their training text together.
        before: Mean test perplexity of the base over the clients.
        after: Mean test perplexity of the shared part alone over the same clients.
    """

    clients: int
    tokens: int
    before: float
    after: float


def write_shared(run: Path, folder: Path, base: str) -> SharedPart:
    """Write the shared part of a run to a folder: a model that can be used like a client's, and
    what `started` goes on from.

    Args:
        run: The run's folder; its newest checkpoint counts.
        folder: A new folder.
        base: The name of the base that is written down.

    Raises:
        Refused: The run has no shared part that is the same for everybody.
    """
    recipe = resolve(run)
    name, method = recipe.method["name"], recipe.build_method()
    if recipe.model.kind != "language" or not (
        method.total_iterations and (method.serves_unseen_clients or method.joinable)
    ):
        raise Refused(
            f"{run}: {name} has no shared part that is a language model by itself", _REMEDY
        )
    execution = _with_newcomer(prepare(recipe), run)
    with closing(execution.engine):
        if not execution.restore():
            raise CheckpointError(
                f"{run} has no checkpoint yet", "Wait for the first one, or resume the run."
            )
        tensors, up, _ = execution.scorer.adapt((NAME,))
        if up[NAME]:
            raise Refused(f"{run}: with {name}, what a client gets depends on its text", _REMEDY)
        owner = _owner(execution, tensors[NAME])
        snapshot, problem = (
            shared_part(owner, execution.state.method),
            execution.state.prepared.problem,
        )
        assert isinstance(problem, Language)
        origin = personal.Origin(name, recipe.name, execution.state.round, recipe.seed)
        section = recipe.model.model_copy(update={"base": base})
        named = replace(problem, section=section)
        named.write(folder, NAME, snapshot.layout, snapshot.tensors, origin)
        save(folder / SHARED, tensors[NAME], {"format": "pt"})
        (folder / RECIPE).write_text(_portable(recipe, base), encoding="utf-8")
        return _measured(execution, owner, snapshot)


_REMEDY = "Methods whose shared part is one model for everybody: " + ", ".join(
    ("fedavg", "comigs-1g1s", "comigs-2g", "pfedmoe", "fedsa-lora", "ffa-lora", "fedprox")
)


def _with_newcomer(prepared: Prepared, run: Path) -> Execution:
    """Return the run with one client more, who holds what the first one does: it only asks."""
    site = prepared.site
    first = next(iter(site.data.values()))
    joined = replace(
        site,
        data={**site.data, NAME: ClientData(NAME, *first.splits)},
        layouts={**site.layouts, NAME: prepared.method.layout(0, prepared.problem.base)},
    )
    return Execution(replace(prepared, site=joined), run, Callback(), "", LocalBackend("inprocess"))


def _owner(execution: Execution, tensors: Tensors, id: ClientId = NAME) -> Client:
    """Return a client with what the server gave it."""
    owner = execution.state.prepared.site.client(id, dict(execution.engine.states().get(id, {})))
    owner.load(execution.state.method.loadable(owner, tensors))
    return owner


def _portable(recipe: Recipe, base: str) -> str:
    """Return the recipe as YAML without what names its data, its clients and this machine."""
    section: dict[str, Any] = recipe.model_dump(mode="json", include=set(_KEPT))
    section["model"]["base"] = base
    section["data"] = section_of(recipe.data).model_dump(mode="json") | {"path": None}
    return yaml.safe_dump(section, sort_keys=False, allow_unicode=True)


def _measured(execution: Execution, owner: Client, snapshot: Snapshot) -> SharedPart:
    """Measure the shared part and the base on the test text of every client."""
    clients = execution.state.federation.clients.values()
    perplexities = [
        mean(perplexity(score(owner, model, data.test)) for data in clients)
        for model in (untrained(snapshot), snapshot)
    ]
    return SharedPart(len(clients), sum(len(data.train) for data in clients), *perplexities)


def holds_shared(folder: Path) -> bool:
    """Return whether a folder holds a shared part, and no run."""
    return (folder / SHARED).is_file()


def started(
    folder: Path, recipe: Recipe, id: ClientId, data: Path, trains: bool
) -> tuple[Execution, Tensors]:
    """Return a run of one client alone, from a shared part, and what the client gets of it.

    Args:
        folder: As `write_shared` made it.
        recipe: Its own.
        id: The client's.
        data: Its text.
        trains: Whether it trains on that.

    Raises:
        DataError: The text will not do.
        CheckpointError: A file has changed since it was written, or the tensors are not those of
            the recipe.
    """
    assert recipe.model.kind == "language"
    verify(folder)
    device = pick_device(recipe.model.device)
    backbone = load_backbone(recipe.model.base, pick_dtype(recipe.model.dtype, device), device)
    client_data = text_of(recipe, backbone, id, data, trains)
    federation = Federation({id: client_data}, "one client's own text")
    problem = language(recipe.model, backbone, section_of(recipe.data), federation)
    prepared = assembled(recipe, problem)
    execution = Execution(prepared, folder, Callback(), "", LocalBackend("inprocess"))
    expected = execution.scorer.adapt((id,))[0][id]
    tensors, _ = load(folder / SHARED)
    try:
        check_alike(expected, tensors, str(folder / SHARED))
    except TensorError as error:
        raise CheckpointError(error.problem, "It is of another recipe or base.") from None
    execution.state.round = execution.state.method.rounds
    return execution, tensors
