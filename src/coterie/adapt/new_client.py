"""Personal models for unseen clients: from unlabelled data, or trained on the client's own text."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from coterie import personal
from coterie.adapt.personalisation import Personalised, shared_part, train
from coterie.adapt.shared_part import holds_shared, opened, owner_of, serving, started
from coterie.client.client import Client
from coterie.client.site import ClientOfParts
from coterie.core import names
from coterie.core.errors import Refused, SaveError
from coterie.core.files import make_folder, replaced, write_json
from coterie.core.isolation import isolated
from coterie.core.protocol import ClientId
from coterie.core.roles import GATE
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, nbytes, under
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, check_id
from coterie.data.section import Names
from coterie.data.splits import SPLITS
from coterie.methods import METHODS, Method
from coterie.models.artifact import save_mixture
from coterie.models.interpolation import PRIOR
from coterie.models.pool import PoolClassifier
from coterie.models.text import kept
from coterie.personal import PersonalClassifier, PersonalModel, load
from coterie.personal.samples import read
from coterie.runs.execution import Execution
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.lock import check_apart
from coterie.runs.problems.classification import Classification
from coterie.runs.problems.language import Language
from coterie.runs.problems.loading import text_of
from coterie.runs.problems.prepare import Prepared, prepare
from coterie.runs.recipes.recipe import Recipe, resolve

# the file in a personal model's folder with the effect of the client's own training
TRAINED = "training.json"


@dataclass(frozen=True)
class Training:
    """The training of a new client of language models on its own text."""

    # most local iterations; None: as many as a client of the run does
    iterations: int | None = None
    # called with a line after every evaluation on validation text
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Adapted:
    """The result and the costs of an adaptation."""

    model: PersonalClassifier | PersonalModel
    folder: Path
    samples: int  # number of the client's images, texts or windows of text
    experts: tuple[int, ...]  # numbers of the experts received from a pool
    rounds: int  # of the whole run; the model is from after round `model.about.round`
    # per expert of the pool, the share of samples that the gate sends to it; () without a gate
    scores: tuple[float, ...]
    up: int  # bytes that the client sent
    down: int  # bytes that the client received
    # bytes of the common expert, which all clients start with; 0 if the client needs none
    once: int
    # the effect of training on own text; None without training
    personalised: Personalised | None = None


@isolated()
def adapt(
    run: Path,
    data: Path,
    client: ClientId | None = None,
    out: Path | None = None,
    *,
    training: Training | None = None,
    me: Names = (),
) -> Adapted:
    """Make a personal model for a new client from a run's newest checkpoint, by the exchange with
    which the run itself scores clients that it did not train with.

    `data`, a file or folder of images or texts (see `personal.samples.read`; for training, texts in
    the format of `data.kind: folders`), are embedded on the client, and the gate's outputs are
    added up; the server sees only this sum. In a run of language models the client then has the
    shared part alone, see `personalisation.shared_part`, and can train from it on its own text. Its
    id is by default the name of `data`; `me` says whose messages in an archive are the answers; the
    model's new folder, written whole or not at all,
    clients/ID in the run's. Raises Refused: the run or a checkpoint is missing, its method does not
    support new clients, the data are unsuitable, or the client exists already; ClientError;
    SaveError.
    """
    recipe = _recipe(run, training is not None)
    if client is None:
        client = data.resolve().name if data.is_dir() else data.resolve().stem
    id = names.normal(client)
    check_id(id)
    folder = out or run / "clients" / names.encoded(id)
    check_apart(folder, data)
    if folder.exists():
        raise Refused(f"{folder} exists already", "Choose another --client, or another --out.")
    if holds_shared(run):
        execution, received = started(run, recipe, id, data, training is not None, me)
        up, down = 0, nbytes(received)
    else:
        execution, received, up, down = _exchange(run, recipe, id, data, training is not None, me)
    state = execution.state
    # the engine's packs of states lie in the run's folder
    with closing(execution.engine):
        owner = owner_of(execution, received, id)
        scores, experts = _choice(owner, received)
        personalised = _write_model(execution, recipe, owner, received, folder, training)
        return Adapted(
            model=load(folder),
            folder=folder,
            samples=owner.windows,
            experts=experts,
            rounds=state.method.rounds,
            scores=scores,
            up=up,
            down=down,
            once=state.prepared.problem.once_bytes if scores or not down else 0,
            personalised=personalised,
        )


def _choice(
    owner: Client | ClientOfParts, received: Tensors
) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return a gate's share of samples by expert, if any, and the numbers of those received."""
    if isinstance(owner, ClientOfParts):
        choices = []
        for name in owner.clients:
            its = under(name, received)
            with owner.part(name) as one, one.borrowing({n: its[n] for n in its if n == GATE}):
                choices.append(_choice(one, its))
        return max(choices)
    model, scores = owner.model, ()
    if isinstance(model, PoolClassifier) and model.embed is not None:
        affinity = model.affinity(owner.embeddings(owner.data.train))
        scores = tuple((affinity / affinity.sum()).tolist())
    return scores, tuple(numbers_of_experts(received))


def _exchange(
    run: Path, recipe: Recipe, id: ClientId, data: Path, trains: bool, me: Names
) -> tuple[Execution, Tensors, int, int]:
    """Return a run with a new client, what it received, and its bytes. Raises Refused."""
    prepared = prepare(recipe)
    if id in prepared.problem.federation.everyone:
        raise Refused(f"{id!r} is a client of the run itself", "Choose another --client.")
    RecordedInputs(run).check_bases(Inputs.of(prepared))
    execution = opened(prepared, run, _client_data(prepared, id, data, trains, me))
    tensors, up, down = execution.scorer.adapt((id,))
    return execution, tensors[id], up[id], down[id]


def _write_model(
    execution: Execution,
    whole: Recipe,
    owner: Client | ClientOfParts,
    tensors: Tensors,
    folder: Path,
    training: Training | None,
) -> Personalised | None:
    """Write the personal model; `execution` serves it, of `whole` runs. Raises SaveError."""
    state, about = execution.state, (whole.name, execution.state.round, whole.seed)
    problem, personalised = state.prepared.problem, None
    with written(folder) as new:
        if isinstance(problem, Language) and isinstance(owner, Client):
            name, method, shared = execution.recipe.method["name"], state.method, None
            models = {name: shared_part(owner, method)}
            if training is not None:
                most = training.iterations or method.rounds * method.steps(owner)
                if (mixing := whole.build_method()).methods:
                    shared = name, models[name], getattr(mixing, "prior", PRIOR)
                    steps = method.rounds, method.local_steps, method.local_epochs
                    method = METHODS["local"].method(*steps)
                    layouts = {owner.id: method.layout(0, problem.base)}
                    owner = replace(state.prepared.site, layouts=layouts).client(owner.id, {})
                kept, personalised = train(owner, method, most, training.say, shared)
                several = shared is not None and personalised.helped
                models = {"local": kept, **models} if several else {name: kept}
            for part, model in models.items():
                below = new / names.encoded(part) if len(models) > 1 else new
                origin = personal.Origin(part, *about)
                problem.write(below, owner.id, model.layout, model.tensors, origin)
            if personalised is not None and personalised.weights and len(models) > 1:
                origin = personal.Origin(whole.method["name"], *about)
                save_mixture(new, owner.id, personalised.weights, origin)
        else:
            state.prepared.keep(owner, tensors, state.round, new)
        if personalised is not None:
            with replaced(new) as staged:
                write_json(staged / TRAINED, personalised.summary)
    return personalised


@contextmanager
def written(folder: Path) -> Iterator[Path]:
    """Provide a temporary folder, which becomes a new one when the block ends. Raises SaveError."""
    make_folder(folder.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            yield Path(beside) / "model"
            os.rename(Path(beside) / "model", folder)
    except OSError as error:
        problem = f"cannot write {folder}: {error.strerror}"
        raise SaveError(problem, "Free some space there, or choose another --out.") from error


def _recipe(run: Path, trains: bool) -> Recipe:
    """Return the recipe of a run that can serve new clients. Raises Refused."""
    recipe = resolve(run)
    name, method = recipe.method["name"], serving(recipe.build_method())
    if trains and recipe.model.kind != "language":
        problem = f"training is for language models, and {run} holds classifiers"
        raise Refused(problem, "Adapt without it: labels are neither needed nor read.")
    if trains and not method.total_iterations:
        raise Refused(f"{run}: {name} trains nothing that a new client could start from", _ALONE)
    if _can_serve(method, trains):
        return recipe
    able = [known for known, entry in METHODS.items() if _can_serve(entry.method, trains)]
    others = f"Methods that have: {', '.join(able)}."
    if trains:
        problem = f"{run}: {name} has no shared part that a new client could start from"
        raise Refused(problem, f"{_ALONE} {others}")
    if method.joinable:
        others = "Without --no-train it trains further from what the clients share."
    raise Refused(f"{run}: {name} has no model for clients that bring none of their own", others)


def _can_serve(method: Method | type[Method], trains: bool) -> bool:
    return bool(method.serves_unseen_clients or (trains and method.joinable))


_ALONE = "Train on the text alone: coterie run folders --set method.name=local --set data.path=DIR."


def _client_data(
    prepared: Prepared, id: ClientId, data: Path, trains: bool, me: Names
) -> ClientData:
    problem = prepared.problem
    if isinstance(problem, Language):
        return text_of(prepared.recipe, problem.backbone, id, data, trains, me)
    assert isinstance(problem, Classification)
    like = next(iter(problem.federation.clients.values())).test
    assert isinstance(like, ExampleSplit)
    samples, encoder = read([data], problem.encoder or problem.shape), problem.encoder
    if encoder is not None:
        samples = replace(samples, inputs=kept(samples.inputs, encoder, str(problem.device)))
    return ClientData(
        id, *(samples.split(like.mean, like.std, like.classes, name) for name in SPLITS)
    )
