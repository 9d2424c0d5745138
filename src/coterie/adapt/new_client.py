"""A client that a run has never seen gets a personal model of it: from data without labels, or
trained on its own text.
"""

import os
import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from coterie import personal
from coterie.adapt.personalisation import Personalised, shared_part, train
from coterie.adapt.shared_part import holds_shared, started
from coterie.client.client import Client
from coterie.core import names
from coterie.core.callback import Callback
from coterie.core.checksums import write_all_sums
from coterie.core.errors import CheckpointError, Refused, SaveError
from coterie.core.files import make_folder, write_json
from coterie.core.protocol import ClientId
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, nbytes
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, check_id
from coterie.data.splits import SPLITS
from coterie.methods import METHODS
from coterie.models.language import LanguageModel
from coterie.models.pool import PoolClassifier
from coterie.personal import PersonalClassifier, PersonalModel, load
from coterie.personal.samples import read
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.folder import names as files
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.lock import check_apart
from coterie.runs.problems.classification import Classification
from coterie.runs.problems.language import Language
from coterie.runs.problems.own_text import text_of
from coterie.runs.problems.prepare import Prepared, prepare
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

TRAINED = "training.json"  # in the folder of a personal model: what its client's own training gave


@dataclass(frozen=True)
class Training:
    """The training of a new client of language models on its own text.

    Args:
        iterations: Local iterations at most; None for as many as a client of the run does.
        say: Called with a line after every evaluation on the validation text.
    """

    iterations: int | None = None
    say: Callable[[str], None] = lambda line: None


@dataclass(frozen=True)
class Adapted:
    """The result and the costs of an adaptation.

    Args:
        model: The personal model.
        folder: Where it is kept.
        samples: How many images, texts or windows of text the client has.
        experts: The numbers of those that it got of a pool.
        rounds: Of the run in all; the model is from what it had learned after `model.about.round`.
        scores: For each expert of the pool the share of the client's samples that the gate sends to
            it; () without a gate.
        up: Bytes that the client sent.
        down: Bytes that it got.
        once: Bytes of the common expert besides, which everybody has from the beginning; 0 where
            the client needs none.
        personalised: What training on its own text gave; None where nothing was trained.
    """

    model: PersonalClassifier | PersonalModel
    folder: Path
    samples: int
    experts: tuple[int, ...]
    rounds: int
    scores: tuple[float, ...]
    up: int
    down: int
    once: int
    personalised: Personalised | None = None


def adapt(
    run: Path,
    data: Path,
    client: ClientId | None = None,
    out: Path | None = None,
    *,
    training: Training | None = None,
) -> Adapted:
    """Make a personal model for a new client, by the exchange by which the run itself scores
    clients that it never trained with.

    The data are embedded here, and what the gate makes of them is added up; of them all, the
    server's half sees only this sum. Of a run of language models the client then has the shared
    part alone, see `personalise.shared_part`, and can train from it on its own text.

    Args:
        run: The folder of a run, finished or not: the newest checkpoint counts.
        data: A file or folder of images or texts, see `personal.samples.read`; to be trained on,
            texts as `data.kind: folders` takes them.
        client: Its id; default: the name of `data`.
        out: Where its personal model goes, whole or not at all; default: clients/ID in the run's
            folder.
        training: How it trains; None: it does not.

    Raises:
        Refused: There is no such run, or no checkpoint in it; its method cannot do that; the data
            will not do; or there is such a client.
        ClientError: The client's half failed.
        SaveError: The model could not be written.
    """
    recipe = _recipe(run, training is not None)
    id = names.normal(
        (data.resolve().name if data.is_dir() else data.resolve().stem)
        if client is None
        else client
    )
    check_id(id)
    folder = out or run / "clients" / names.encoded(id)
    check_apart(folder, data)
    if folder.exists():
        raise Refused(f"{folder} exists already", "Choose another --client, or another --out.")
    if holds_shared(run):
        execution, received = started(run, recipe, id, data, training is not None)
        up, down = 0, nbytes(received)
    else:
        execution, received, up, down = _exchanged(run, recipe, id, data, training is not None)
    state = execution.state
    with closing(execution.engine):  # its packs of states lie in the run's folder
        owner = state.prepared.site.client(id, dict(execution.engine.states().get(id, {})))
        owner.load(state.method.loadable(owner, received))
        scores: tuple[float, ...] = ()
        if (
            isinstance(owner.model, PoolClassifier | LanguageModel)
            and owner.model.embed is not None
        ):
            affinity = owner.model.affinity(owner.embeddings(owner.data.train))
            scores = tuple((affinity / affinity.sum()).tolist())
        personalised = _keep(execution, owner, received, folder, training)
        once = state.prepared.problem.once_bytes if scores or not down else 0
        experts = tuple(numbers_of_experts(received))
        samples = owner.data.train.windows
        return Adapted(
            load(folder),
            folder,
            samples,
            experts,
            state.method.rounds,
            scores,
            up,
            down,
            once,
            personalised,
        )


def _exchanged(
    run: Path, recipe: Recipe, id: ClientId, data: Path, trains: bool
) -> tuple[Execution, Tensors, int, int]:
    """Return a run with one client more, what that client got, and the bytes that it sent and got.
    Raises Refused and ClientError.
    """
    prepared = prepare(recipe)
    if id in prepared.problem.federation.everyone:
        raise Refused(f"{id!r} is a client of the run itself", "Choose another --client.")
    RecordedInputs(run).check_bases(Inputs.of(prepared))
    joined = _joined(prepared, id, _data(prepared, id, data, trains))
    execution = Execution(joined, run, Callback(), "", LocalBackend("inprocess"))
    if not execution.restore() and execution.state.method.rounds:
        remedy = (
            "Wait for the first one (checkpoint_every), or resume the run: coterie run --resume."
        )
        raise CheckpointError(f"{run} has no checkpoint yet", remedy)
    tensors, up, down = execution.scorer.adapt((id,))
    return execution, tensors[id], up[id], down[id]


def _keep(
    execution: Execution, owner: Client, tensors: Tensors, folder: Path, training: Training | None
) -> Personalised | None:
    """Write the client's personal model, trained first if it is to be. Nothing is there before
    all of it is. Raises SaveError.
    """
    state = execution.state
    problem, personalised = state.prepared.problem, None
    make_folder(folder.parent)
    try:
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as beside:
            new = Path(beside) / "model"
            if isinstance(problem, Language):
                snapshot = shared_part(owner, state.method)
                if training is not None:
                    most = training.iterations or state.method.rounds * state.method.steps(owner)
                    snapshot, personalised = train(owner, state.method, most, training.say)
                recipe = execution.recipe
                origin = personal.Origin(
                    recipe.method["name"], recipe.name, state.round, recipe.seed
                )
                problem.write(new, owner.id, snapshot.layout, snapshot.tensors, origin)
            else:
                execution.results.keep(owner, tensors, new)
            if personalised is not None:
                write_json(new / TRAINED, personalised.summary)
                write_all_sums(new)
            os.rename(new, folder)
    except OSError as error:
        raise SaveError(
            f"cannot write {folder}: {error.strerror}",
            "Free some space there, or choose another --out.",
        ) from error
    return personalised


def _recipe(run: Path, trains: bool) -> Recipe:
    """Return the prepared run of a folder, if new clients can get a model from it or train from it.
    Raises Refused.
    """
    if not (run / files.RECIPE).is_file():
        raise CheckpointError(
            f"{run} holds no run: there is no {files.RECIPE}",
            "Give the folder that `coterie run` wrote (--out).",
        )
    recipe = recipes.resolve(run)
    name, method = recipe.method["name"], recipe.build_method()
    if trains and recipe.model.kind != "language":
        raise Refused(
            f"--train is for language models, and {run} holds classifiers",
            "Leave --train out: labels are neither needed nor read.",
        )
    if trains and not method.total_iterations:
        raise Refused(f"{run}: {name} trains nothing that a new client could start from", _ALONE)
    if method.serves_unseen_clients or (trains and method.joinable):
        return recipe
    if method.joinable:
        remedy = "With --train it trains further from what the clients share."
        raise Refused(
            f"{run}: {name} has no model for clients that bring none of their own", remedy
        )
    if trains:
        able = ", ".join(
            known
            for known, entry in METHODS.items()
            if entry.method.serves_unseen_clients or entry.method.joinable
        )
        raise Refused(
            f"{run}: {name} has no shared part that a new client could start from",
            f"{_ALONE} Methods that have: {able}.",
        )
    able = ", ".join(
        known for known, entry in METHODS.items() if entry.method.serves_unseen_clients
    )
    raise Refused(
        f"{run}: {name} has no model for clients that bring none of their own",
        f"Methods that have: {able}.",
    )


_ALONE = "Train on the text alone: coterie run folders --set method.name=local --set data.path=DIR."


def _joined(prepared: Prepared, id: ClientId, data: ClientData) -> Prepared:
    """Return a run with one client more, which has these data."""
    site = prepared.site
    layouts = {**site.layouts, id: prepared.method.layout(0, prepared.problem.base)}
    return replace(prepared, site=replace(site, data={**site.data, id: data}, layouts=layouts))


def _data(prepared: Prepared, id: ClientId, data: Path, trains: bool) -> ClientData:
    """Return what a client has: in splits if it trains, otherwise alike in all of them. Raises
    DataError.
    """
    problem = prepared.problem
    if isinstance(problem, Language):
        return _text(prepared.recipe, problem, id, data, trains)
    assert isinstance(problem, Classification)
    like = next(iter(problem.federation.clients.values())).test
    assert isinstance(like, ExampleSplit)
    samples = read([data], problem.shape)
    return ClientData(
        id, *(samples.split(like.mean, like.std, like.classes, name) for name in SPLITS)
    )


def _text(recipe: Recipe, problem: Language, id: ClientId, data: Path, trains: bool) -> ClientData:
    """Return the text of a client, read as the run's own. Raises DataError for too little of it."""
    return text_of(recipe, problem.backbone, id, data, trains)
