"""The shared part of a run of language models, exported so that new clients can train from it."""

from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from coterie import personal
from coterie.adapt.personalisation import perplexity_of, shared_part, untrained
from coterie.client.client import Client
from coterie.client.site import ClientOfParts
from coterie.core.errors import CheckpointError, Refused, TensorError
from coterie.core.files import load, save
from coterie.core.metrics import mean
from coterie.core.protocol import ClientId
from coterie.core.tensors import Tensors, check_alike, under
from coterie.data.federation import ClientData, Federation
from coterie.data.section import Names
from coterie.methods import Method
from coterie.models.artifact import verify
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.folder.names import RECIPE
from coterie.runs.problems.language import Language, load_backbone, pick_dtype
from coterie.runs.problems.loading import language, pick_device, section_of, text_of
from coterie.runs.problems.prepare import Prepared, assembled, prepare
from coterie.runs.recipes.recipe import Recipe, resolve

SHARED = "shared.safetensors"  # beside recipe.yaml: the tensors that every new client gets
NAME = "shared"  # in place of a client's name in client.json
# the sections of the recipe that are written; the data are the new client's
_SECTIONS = ("name", "model", "method", "training", "seed")


@dataclass(frozen=True)
class SharedPart:
    """The shared part of a run."""

    clients: int  # number that trained
    tokens: int  # of their training text together
    before: float  # mean test perplexity of the base over the clients
    after: float  # mean test perplexity of the shared part alone over the same clients


def write_shared(run: Path, folder: Path, base: str) -> SharedPart:
    """Write a run's shared part to a new folder: a model that can be used like a client's, and the
    tensors and recipe, which names `base`, from which `started` continues. Uses the newest
    checkpoint. Raises Refused if the run has no shared part that is the same for all clients.
    """
    recipe = resolve(run)
    name, method = recipe.method["name"], serving(recipe.build_method())
    if recipe.model.kind != "language" or not (
        method.total_iterations and (method.serves_unseen_clients or method.joinable)
    ):
        raise Refused(
            f"{run}: {name} has no shared part that is a language model by itself", _REMEDY
        )
    prepared = prepare(recipe)
    # it has the first client's data, but only receives
    first = next(iter(prepared.site.data.values()))
    execution = opened(prepared, run, ClientData(NAME, *first.splits))
    with closing(execution.engine):
        tensors, up, _ = execution.scorer.adapt((NAME,))
        if up[NAME]:
            raise Refused(f"{run}: with {name}, what a client gets depends on its text", _REMEDY)
        owner, problem = owner_of(execution, tensors[NAME], NAME), prepared.problem
        assert isinstance(owner, Client)
        snapshot = shared_part(owner, method)
        assert isinstance(problem, Language)
        name = execution.recipe.method["name"]
        origin = personal.Origin(name, recipe.name, execution.state.round, recipe.seed)
        named = replace(problem, section=recipe.model.model_copy(update={"base": base}))
        named.write(folder, NAME, snapshot.layout, snapshot.tensors, origin)
        save(folder / SHARED, tensors[NAME], {"format": "pt"})
        # without names of its data, clients or machine
        section: dict[str, Any] = recipe.model_dump(mode="json", include=set(_SECTIONS))
        section["model"]["base"] = base
        section["data"] = section_of(recipe.data).model_dump(mode="json") | {"path": None}
        text = yaml.safe_dump(section, sort_keys=False, allow_unicode=True)
        (folder / RECIPE).write_text(text, encoding="utf-8")
        clients = prepared.problem.federation.clients.values()
        perplexities = [
            mean(perplexity_of(owner, data.test, [model]) for data in clients)
            for model in (untrained(snapshot), snapshot)
        ]
        return SharedPart(len(clients), sum(len(data.train) for data in clients), *perplexities)


_REMEDY = "Methods whose shared part is one model for everybody: " + ", ".join(
    ("fedavg", "comigs-1g1s", "comigs-2g", "pfedmoe", "fedsa-lora", "ffa-lora", "fedprox")
)


def opened(prepared: Prepared, run: Path, data: ClientData) -> Execution:
    """Return a run at its newest checkpoint with one more client. Raises CheckpointError."""
    site = prepared.site
    layout = prepared.method.layout(0, prepared.problem.base)
    site = replace(
        site, data={**site.data, data.id: data}, layouts={**site.layouts, data.id: layout}
    )
    execution = Execution(replace(prepared, site=site), run, backend=LocalBackend("inprocess"))
    if not execution.restore() and prepared.method.rounds:
        raise CheckpointError(
            f"{run} has no checkpoint yet",
            "Wait for the first one (checkpoint_every), or resume the run: coterie run --resume.",
        )
    return _serving(execution)


def part_for(method: Method) -> str:
    """Return the name of the part that serves unseen clients; "" if there is none, or all do it."""
    parts = {} if method.serves_unseen_clients else method.methods
    return next((name for name, m in parts.items() if m.serves_unseen_clients), "")


def serving(method: Method) -> Method:
    """Return the method that serves unseen clients: a part, or else the method itself."""
    return method.methods.get(part_for(method), method)


def _serving(execution: Execution) -> Execution:
    """Return a run, or of a run of several parts that which serves unseen clients."""
    state = execution.state
    if not (name := part_for(state.method)):
        return execution
    execution.engine.close()
    part = state.prepared.part(name)
    alone = Execution(part, execution.folder, backend=LocalBackend("inprocess"))
    alone.state.round, alone.state.server = state.round, under(name, state.server)
    return alone


def owner_of(execution: Execution, tensors: Tensors, id: ClientId) -> Client | ClientOfParts:
    """Return a client that has loaded the server's tensors; of parts, that can."""
    owner = execution.state.prepared.site.clients(id, dict(execution.engine.states().get(id, {})))
    if isinstance(owner, Client):
        owner.load(execution.state.method.loadable(owner, tensors))
    return owner


def holds_shared(folder: Path) -> bool:
    """Whether a folder holds a shared part instead of a run."""
    return (folder / SHARED).is_file()


def started(
    folder: Path, recipe: Recipe, id: ClientId, data: Path, trains: bool, me: Names
) -> tuple[Execution, Tensors]:
    """Return a run of one client alone on its text, from the shared part in a folder, and the
    tensors that the client receives. Raises DataError for unsuitable text, CheckpointError if a
    file has changed or the tensors do not fit the recipe.
    """
    assert recipe.model.kind == "language"
    verify(folder)
    device = pick_device(recipe.model.device)
    backbone = load_backbone(recipe.model.base, pick_dtype(recipe.model.dtype, device), device)
    client_data = text_of(recipe, backbone, id, data, trains, me)
    federation = Federation({id: client_data}, "one client's own text")
    problem = language(recipe.model, backbone, section_of(recipe.data), federation)
    prepared = assembled(recipe, problem)
    execution = _serving(Execution(prepared, folder, backend=LocalBackend("inprocess")))
    expected = execution.scorer.adapt((id,))[0][id]
    tensors, _ = load(folder / SHARED)
    try:
        check_alike(expected, tensors, str(folder / SHARED))
    except TensorError as error:
        raise CheckpointError(error.problem, "It is of another recipe or base.") from None
    execution.state.round = execution.state.method.rounds
    return execution, tensors
