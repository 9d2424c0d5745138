"""Load and check the base and data of a recipe, or on a server their shapes alone; and the text of
one client alone, from its own files.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.core import devices
from coterie.core.errors import DataError, ModelError, RecipeError
from coterie.core.protocol import ClientId
from coterie.data.chats.fields import ChatFields
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, Federation, MakeSplit, federate
from coterie.data.folders import Folders, text_files
from coterie.data.images import Images
from coterie.data.labelled import LabelledTexts
from coterie.data.partition import Partitioner
from coterie.data.section import Names, Section
from coterie.data.splits import SPLITS, Tokens
from coterie.models import memory, network_tensors, text
from coterie.models.architecture import EMBEDDED, configuration, tokenizer
from coterie.models.backbone import Backbone
from coterie.models.common import CommonExpert, Normalisation, trained
from coterie.models.networks import Shape
from coterie.models.text import TextShape
from coterie.runs.problems.classification import Classification
from coterie.runs.problems.language import (
    Language,
    fitted,
    fitted_federation,
    load_backbone,
    memory_step,
    pick_dtype,
)
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import (
    ClassifierSection,
    CommonSection,
    LanguageSection,
    TextClassifierSection,
)

UNUSED_TO_CHATS = (
    "the base was never trained on conversations: it learns the form of these answers, and knows "
    "little besides them. One that answers is a base trained for chats, say --set "
    "model.base=HuggingFaceTB/SmolLM2-135M-Instruct."
)


def pick_device(device: str) -> str:
    """Resolve `auto`: an accelerator, if there is one. Raises RecipeError for a missing device."""
    if device == "auto":
        return devices.accelerator() or "cpu"
    if not devices.is_available(device):
        allowed = " or ".join(["auto", *devices.here()])
        mistake = f"model.device: {device} is not available here; use {allowed}"
        raise RecipeError("recipe", [mistake])
    return device


def load(recipe: Recipe) -> LearningProblem:
    """Return the base and the data of a recipe. Raises Refused if they cannot be used."""
    device = pick_device(recipe.model.device)
    section, data = recipe.model, recipe.data
    if not (isinstance(section, LanguageSection) and isinstance(data, Section)):
        return _classification(recipe, device)
    dtype = pick_dtype(section.dtype, device)
    rows = recipe.training.micro_batch or recipe.training.batch_size
    limit = int(configuration(section.base).max_position_embeddings)
    if section.context > limit:
        problem = f"model.context: {section.context} tokens, but {section.base} allows {limit}"
        raise ModelError(problem, f"Set model.context to at most {limit}.")
    step = memory_step(section, dtype, device)
    checkpointing = step.checkpointing(rows, memory.room(device), section.checkpointing)
    backbone = load_backbone(section.base, dtype, device, section.quantise)
    backbone.attached.checkpointing = checkpointing
    federation = data.load(backbone.tokenizer, section.context, order_seed=recipe.seed)
    return language(section, backbone, data, fitted_federation(federation, backbone))


def language(
    section: LanguageSection, backbone: Backbone, data: Section, federation: Federation
) -> Language:
    """Return language models of clients whose data are read as a section says."""
    if not isinstance(data, ChatFields):
        return Language(section, backbone, federation, control_tokens=data.control_tokens)
    # as far as it can be told: bases without a chat template of their own were never trained so
    unused = section.base == EMBEDDED or not getattr(backbone.tokenizer, "chat_template", None)
    if data.content == "chats" and unused:
        federation = replace(federation, notes=(*federation.notes, UNUSED_TO_CHATS))
    return Language(
        section, backbone, federation, data.chat_template, data.content, data.control_tokens
    )


def distant(recipe: Recipe, federation: Federation) -> LearningProblem:
    """Return what a server knows of a recipe's base and data: shapes, from configurations without
    weights, and who the clients are. Raises Refused if these are unusable. A common expert is the
    server's, too: from a file that the recipe names, or trained on its public examples.
    """
    if isinstance(recipe.model, LanguageSection):
        return Language(recipe.model, Backbone.outlined(recipe.model.base), federation)
    return _classification(recipe, "cpu", federation)


def _classification(
    recipe: Recipe, device: str, elsewhere: Federation | None = None
) -> Classification:
    """Return classifiers of the recipe's data, or of clients elsewhere. Raises Refused."""
    common = None if isinstance(recipe.model, LanguageSection) else recipe.model.common
    needed = elsewhere is None or (common is not None and common.pretraining is not None)
    shape: Shape
    common_shape: Shape
    encoder: TextShape | None = None
    match recipe.model, recipe.data:
        case ClassifierSection() as section, Images() as data:
            shape = section.shape(data.shape, data.classes)
            common_shape = section.common_shape(data.shape, data.classes)
            here = data.load(order_seed=recipe.seed) if needed else None
        case TextClassifierSection() as section, LabelledTexts() as data:
            shape, common_shape = section.shape(data.classes), section.common_shape(data.classes)
            here = None
            if needed:
                here = data.load(tokenizer(section.base), section.length, order_seed=recipe.seed)
            if section.head is not None:
                encoder = section.encoder(data.classes)
                here = here and text.of_federation(here, encoder, device)
        case _:
            raise AssertionError("the recipe checked that data and model fit")
    expert = None if common is None else _common(common, common_shape, here, data, device)
    if expert is not None and common is not None and common.standardise and here is not None:
        expert = expert.standardised(_public(here, "standardise"))
    federation = here if elsewhere is None else elsewhere
    assert federation is not None
    return Classification(
        shape, expert, section, torch.device(device), federation, data.names, encoder
    )


def _common(
    section: CommonSection, shape: Shape, here: Federation | None, data: Partitioner, device: str
) -> CommonExpert:
    """Return the common expert of a recipe. Raises Refused."""
    if section.path is not None:
        preprocessing = None
        if section.mean is not None and section.std is not None:
            preprocessing = Normalisation(section.mean, section.std)
        tensors = network_tensors.load(_file_of(section.path), shape)
        expected = Normalisation(data.mean, data.std)
        return CommonExpert(shape, tensors, device, expected, preprocessing)
    if section.pretraining is None:
        if isinstance(shape, TextShape):  # its base is pretrained
            return CommonExpert(shape, shape.initial(0), device)
        remedy = "Give model.common.path, or model.common.pretraining with data.public."
        raise ModelError("model.common: gives neither a path nor pretraining", remedy)
    assert here is not None
    return trained(shape, _public(here, "pretraining"), section.pretraining, device)


def _public(federation: Federation, field: str) -> ExampleSplit:
    """Return the public examples for a field of model.common. Raises ModelError without any."""
    if federation.public is None:
        problem = f"model.common.{field}: the data have no public examples"
        raise ModelError(problem, "Set data.public: examples that no client gets.")
    assert isinstance(federation.public, ExampleSplit)
    return federation.public


def _file_of(path: str) -> Path:
    """Return a file by a path that may also be relative to $COTERIE_DATA or its parent."""
    roots = [Path()]
    if data := os.environ.get("COTERIE_DATA"):
        roots += [Path(data), Path(data).parent]
    return next((root / path for root in roots if (root / path).is_file()), Path(path))


def _files(section: Folders, data: Path) -> list[Path]:
    """Return the files of a text or of conversations. Raises DataError if there is none."""
    if not (paths := text_files(data, section.endings)):
        problem = f"{data}: no {'text' if section.content == 'text' else 'conversations'} in it"
        remedy = f"Name a file that ends in {', '.join(section.endings)}, or a folder of such."
        raise DataError(problem, remedy)
    return paths


def section_of(data: Any) -> Folders:
    """Return the section that reads a client's own files in a run with these data."""
    if isinstance(data, Folders):
        return data
    if not isinstance(data, ChatFields):
        return Folders(control_tokens=data.control_tokens)
    shared = ChatFields.model_fields.keys() & Folders.model_fields.keys()
    return Folders(**{name: getattr(data, name) for name in shared})


def own_text(
    section: Folders,
    tokenizer: Any,
    context: int,
    seed: int,
    id: ClientId,
    data: Path,
    otherwise: str = "",
) -> ClientData:
    """Return a client's text, from a file or folder, split as in a folder of clients. `seed` fixes
    the orders of all walks. Raises DataError, with `otherwise` as further advice, for no or too
    little text.
    """
    _files(section, data)
    parts = dict(zip(SPLITS, section.of_client(id).read_one(data), strict=True))
    arrays, make = _arrays(section, tokenizer, parts, context)
    tokens = {name: len(arrays[name]) for name in SPLITS}
    running = arrays.keys() == tokens.keys()  # otherwise documents, of which one will do
    needed = context + 1 if running else 1
    if min(tokens.values()) < needed:
        sizes = ", ".join(f"{count:,} for {name}" for name, count in tokens.items())
        raise DataError(
            f"{data}: too little text to train on and to judge by: tokens {sizes}, and each "
            f"needs {needed:,}",
            f"Give more text (to each split, if the folder has its own){otherwise}.",
        )
    return federate({id: arrays}, context, seed, str(data), make).clients[id]


def _arrays(
    section: Folders, tokenizer: Any, parts: Mapping[str, Sequence[str]], context: int
) -> tuple[dict[str, Tokens], MakeSplit]:
    """Return the arrays of some splits, and the function that makes splits of them."""
    encoder, arrays = section.encoder(tokenizer), dict[str, Tokens]()
    for name, texts in parts.items():
        arrays |= encoder.arrays(texts, name, context)
    return arrays, encoder.split


def text_of(
    recipe: Recipe, backbone: Backbone, id: ClientId, data: Path, trains: bool, me: Names = ()
) -> ClientData:
    """Return a client's text, read like a run's own: in splits if it trains, otherwise the whole in
    each; `me` says whose messages in an archive are the answers, by default as in the run. Raises
    DataError for too little text or tokens that the base lacks.
    """
    assert recipe.model.kind == "language"
    section, context, tokenizer = section_of(recipe.data), recipe.model.context, backbone.tokenizer
    if me:
        section = section.model_copy(update={"me": me})
    if trains:
        text = own_text(section, tokenizer, context, recipe.seed, id, data, ", or give --no-train")
        return fitted(text, backbone)
    return whole_text(section, backbone, context, id, data)


def whole_text(
    section: Folders, backbone: Backbone, context: int, id: ClientId, data: Path
) -> ClientData:
    """Return the text of a file or folder, the whole in each split. Raises DataError."""
    documents = section.of_client(id).documents(_files(section, data))
    texts = [document.text for document in documents]
    arrays, make = _arrays(section, backbone.tokenizer, dict.fromkeys(SPLITS, texts), context)
    return fitted(ClientData(id, *(make(name, arrays, context, 0) for name in SPLITS)), backbone)
