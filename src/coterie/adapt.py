"""A client that a run has never seen gets a personal model of it, from data without labels."""

from dataclasses import dataclass, replace
from pathlib import Path

from coterie import recipe as recipes
from coterie import run as runs
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, check_id
from coterie.data.splits import SPLITS
from coterie.errors import CheckpointError, Refused
from coterie.methods import METHODS
from coterie.modality import Examples
from coterie.models.pool import PoolClassifier
from coterie.personal import PersonalClassifier
from coterie.personal.samples import read
from coterie.protocol import ClientId
from coterie.recipe import LanguageSection, Recipe
from coterie.reports import Reporter


@dataclass(frozen=True)
class Adapted:
    """What it took, and what came of it.

    Args:
        model: The personal model.
        folder: Where it is kept.
        samples: How many the client has.
        rounds: Of the run in all; the model is from what it had learned after `model.about.round`.
        scores: For each expert of the pool the share of the client's samples that the gate sends to it; () without a gate.
        up: Bytes that the client sent.
        down: Bytes that it got.
        once: Bytes of the common expert besides, which everybody has from the beginning; 0 where the client needs none.
    """

    model: PersonalClassifier
    folder: Path
    samples: int
    rounds: int
    scores: tuple[float, ...]
    up: int
    down: int
    once: int


def adapt(run: Path, data: Path, client: ClientId | None = None, out: Path | None = None) -> Adapted:
    """Make a personal model for a new client, by the exchange by which the run itself scores clients that it never trained with.

    The data are embedded here, and what the gate makes of them is added up; of them all, the server's half sees only this sum.

    Args:
        run: The folder of a run, finished or not: the newest checkpoint counts.
        data: A file or folder of images or texts, see `personal.samples.read`.
        client: Its id; default: the name of `data`.
        out: Where its personal model goes; default: clients/ID in the run's folder.

    Raises:
        Refused: There is no such run, or no checkpoint in it; its method cannot do that; the data will not do; or there is such a client.
        ClientError: The client's half failed.
        SaveError: The model could not be written.
    """
    recipe = _recipe(run)
    id = data.resolve().stem if client is None else client
    check_id(id)
    folder = out or run / "clients" / id
    if folder.exists():
        raise Refused(f"{folder} exists already", "Choose another --client, or another --out.")
    prepared = runs.prepare(recipe)
    if id in prepared.modality.federation.everyone:
        raise Refused(f"{id!r} is a client of the run itself", "Choose another --client.")
    execution = runs.Execution(_joined(prepared, id, data), run, Reporter(), "")
    if not execution.restore() and execution.method.rounds:
        remedy = "Wait for the first one (checkpoint_every), or go on with the run: coterie run --resume."
        raise CheckpointError(f"{run} has no checkpoint yet", remedy)
    tensors, up, down = execution.adapt((id,))
    owner = execution.prepared.site.client(id, dict(execution.engine.states().get(id, {})))
    execution.keep(owner, tensors[id], folder)
    kept, scores = PersonalClassifier.load(folder), ()
    if isinstance(owner.model, PoolClassifier) and owner.model.gate is not None:
        scores = tuple((owner.model.affinity(owner.embeddings(owner.test)) / owner.test.windows).tolist())
    once = execution.modality.once_bytes if scores or not down[id] else 0
    return Adapted(kept, folder, owner.test.windows, execution.method.rounds, scores, up[id], down[id], once)


def _recipe(run: Path) -> Recipe:
    """What a folder is a run of, if new clients can get anything from that. Raises Refused."""
    if not (run / runs.RECIPE).is_file():
        raise CheckpointError(f"{run} holds no run: there is no {runs.RECIPE}", "Give the folder that `coterie run` wrote (--out).")
    recipe = recipes.resolve(run)
    if not recipe.build_method().universal:
        able = ", ".join(name for name, entry in METHODS.items() if entry.method.universal)
        raise Refused(
            f"{run}: {recipe.method['name']} has no model for clients that bring none of their own", f"Methods that have: {able}."
        )
    if isinstance(recipe.model, LanguageSection):
        raise Refused(f"{run} holds language models, and new clients get classifiers only", "Use a model that it has: coterie predict.")
    return recipe


def _joined(prepared: runs.Prepared, id: ClientId, data: Path) -> runs.Prepared:
    """A run with one client more, which has these data. Raises DataError."""
    modality, site = prepared.modality, prepared.site
    assert isinstance(modality, Examples)
    like = next(iter(modality.federation.clients.values())).test
    assert isinstance(like, ExampleSplit)
    found = read([data], modality.shape)
    own = ClientData(id, *(found.split(like.mean, like.std, like.classes, name) for name in SPLITS))
    layouts = {**site.layouts, id: prepared.method.layout(0, modality.base)}
    return replace(prepared, site=replace(site, data={**site.data, id: own}, layouts=layouts))
