"""A client that a run has never seen gets a personal model of it, from data without labels."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from coterie import names
from coterie import recipe as recipes
from coterie import run as runs
from coterie.data.documents import read_many
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, check_id
from coterie.data.folders import ENDINGS, text_files
from coterie.data.splits import SPLITS, TokenSplit
from coterie.data.store import encode
from coterie.errors import CheckpointError, DataError, Refused
from coterie.inputs import Inputs, Kept
from coterie.methods import METHODS
from coterie.modality import Examples, Language, Modality
from coterie.models.language import LanguageModel
from coterie.models.pool import PoolClassifier
from coterie.personal import PersonalClassifier, PersonalModel, load
from coterie.personal.samples import read
from coterie.places import OnThisMachine
from coterie.prepared import Prepared, prepare
from coterie.protocol import ClientId
from coterie.recipe import Recipe
from coterie.reports import Reporter


@dataclass(frozen=True)
class Adapted:
    """What it took, and what came of it.

    Args:
        model: The personal model.
        folder: Where it is kept.
        samples: How many images, texts or windows of text the client has.
        experts: The numbers of those that it got of a pool.
        rounds: Of the run in all; the model is from what it had learned after `model.about.round`.
        scores: For each expert of the pool the share of the client's samples that the gate sends to it; () without a gate.
        up: Bytes that the client sent.
        down: Bytes that it got.
        once: Bytes of the common expert besides, which everybody has from the beginning; 0 where the client needs none.
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
    id = names.normal((data.resolve().name if data.is_dir() else data.resolve().stem) if client is None else client)
    check_id(id)
    folder = out or run / "clients" / names.encoded(id)
    if folder.exists():
        raise Refused(f"{folder} exists already", "Choose another --client, or another --out.")
    prepared = prepare(recipe)
    if id in prepared.modality.federation.everyone:
        raise Refused(f"{id!r} is a client of the run itself", "Choose another --client.")
    Kept(run).check_bases(Inputs.of(prepared))
    execution = runs.Execution(_joined(prepared, id, data), run, Reporter(), "", OnThisMachine("inprocess"))
    if not execution.restore() and execution.method.rounds:
        remedy = "Wait for the first one (checkpoint_every), or go on with the run: coterie run --resume."
        raise CheckpointError(f"{run} has no checkpoint yet", remedy)
    tensors, up, down = execution.adapt((id,))
    owner = execution.prepared.site.client(id, dict(execution.engine.states().get(id, {})))
    execution.keep(owner, tensors[id], folder)
    scores: tuple[float, ...] = ()
    if isinstance(owner.model, PoolClassifier | LanguageModel) and owner.model.embed is not None:
        affinity = owner.model.affinity(owner.embeddings(owner.test))
        scores = tuple((affinity / affinity.sum()).tolist())
    once = execution.modality.once_bytes if scores or not down[id] else 0
    experts = tuple(sorted(int(name.removeprefix("expert/")) for name in tensors[id] if name.startswith("expert/")))
    return Adapted(load(folder), folder, owner.test.windows, experts, execution.method.rounds, scores, up[id], down[id], once)


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
    return recipe


def _joined(prepared: Prepared, id: ClientId, data: Path) -> Prepared:
    """A run with one client more, which has these data. Raises DataError."""
    site = prepared.site
    layouts = {**site.layouts, id: prepared.method.layout(0, prepared.modality.base)}
    return replace(prepared, site=replace(site, data={**site.data, id: _data(prepared.modality, id, data)}, layouts=layouts))


def _data(modality: Modality, id: ClientId, data: Path) -> ClientData:
    """What a client has, alike in all splits: nothing is trained. Raises DataError."""
    if isinstance(modality, Language):
        texts = read_many(text_files(data), "text")
        if not texts:
            raise DataError(f"{data}: no text in it", f"Name a file that ends in {', '.join(ENDINGS)}, or a folder of such.")
        tokens = np.concatenate(list(encode(modality.backbone.tokenizer, texts, None)))
        return ClientData(id, *(TokenSplit(name, tokens, modality.section.context, 0) for name in SPLITS))
    assert isinstance(modality, Examples)
    like = next(iter(modality.federation.clients.values())).test
    assert isinstance(like, ExampleSplit)
    found = read([data], modality.shape)
    return ClientData(id, *(found.split(like.mean, like.std, like.classes, name) for name in SPLITS))
