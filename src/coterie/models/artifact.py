"""A client's folder in a run: its tensors as safetensors, described by a JSON. Never pickle."""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import TypeAdapter, ValidationError

from coterie.core.checksums import SUMS, check_all_sums, replaced
from coterie.core.errors import CheckpointError, ModelError, TensorError
from coterie.core.files import read_json, write_json
from coterie.core.files import save as save_tensors
from coterie.core.tensors import Named, all_finite, check_alike
from coterie.data.text_encoding import ControlTokens, TokenizerDigest
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture
from coterie.models.layout import Layout
from coterie.models.quantised import Quantisation

Content = Literal["text", "chats"]

FORMAT = 1
WEIGHTS, CLASSIFIER_WEIGHTS, ABOUT = "adapter.safetensors", "classifier.safetensors", "client.json"
CLASSIFIER = "classifier"  # the kind of a client's model that is a classifier
CHECKSUMS = {"checksums": SUMS}  # in client.json: none of a model that an earlier coterie saved
FOREIGN = "It was changed by hand, or written by another version of coterie."


@dataclass(frozen=True)
class Origin:
    """The method's and recipe's names, the rounds done, and the seed of a personal model's run."""

    method: str
    recipe: str
    round: int
    seed: int


@dataclass(frozen=True)
class About:
    """The content of `client.json`.

    Args:
        client: The client's id.
        base: Hub id, local folder, or `embedded`.
        layout: The adapter's shape.
        context: The window length that it was trained with, in tokens.
        method: Name of the method.
        recipe: Name of the recipe.
        round: Rounds done.
        seed: The run's seed.
        chat_template: The chat template that it was trained with, if not the base's own.
        quantise: Bits of the base's weights that it was trained on; None: all of them.
        control_tokens: What was done with control tokens in its texts.
        tokenizer: Of the base that it was trained on; None of a model that an earlier coterie
            saved.
        content: What it was trained on; None of a model that an earlier coterie saved.
    """

    client: str
    base: str
    layout: Layout
    context: int
    method: str
    recipe: str
    round: int
    seed: int
    chat_template: str | None = None
    quantise: Quantisation | None = None
    content: Content | None = None
    control_tokens: ControlTokens = "text"
    tokenizer: TokenizerDigest | None = None


def save(folder: Path, about: About, tensors: Named) -> None:
    """Write a personal model to `folder`. Raises SaveError; the previous files stay valid."""
    optional = ("chat_template", "content", "tokenizer")  # which many are without
    content = {k: v for k, v in asdict(about).items() if v is not None or k not in optional}
    write(folder, WEIGHTS, tensors, content)


def write(folder: Path, weights: str, tensors: Named, content: Mapping[str, Any]) -> None:
    """Write a personal model of any kind. Raises SaveError; the previous files stay valid."""
    with replaced(folder) as new:
        save_tensors(new / weights, tensors, {"format": "pt"})
        write_json(new / ABOUT, {"format": FORMAT, **CHECKSUMS, **content})


def verify(folder: Path) -> None:
    """Refuse a personal model whose files are not those that were saved, before any of them is
    used. One that an earlier coterie saved has no checksums.

    Raises:
        CheckpointError: Naming the file that has changed, is missing, or is one more.
    """
    if (folder / SUMS).exists() or CHECKSUMS.keys() <= _content(folder).keys():
        check_all_sums(folder)


def read_about(folder: Path) -> About:
    """Read `client.json` in `folder`, of a language model.

    Raises:
        CheckpointError: It is missing, damaged, of a newer format, or of a classifier.
    """
    content = read_about_json(folder)
    if content.get("kind") == CLASSIFIER:
        raise CheckpointError(
            f"{folder} holds a classifier, not a language model",
            f"See `coterie predict --data`; other programs read {CLASSIFIER_WEIGHTS} and {ABOUT} "
            f"in it as they are.",
        )
    if isinstance(layout := content.get("layout"), dict):
        checked(Layout, layout, folder)
    about, weights = checked(About, content, folder), folder / WEIGHTS
    shape, size = about.layout, weights.stat().st_size if weights.is_file() else math.inf
    if max(shape.experts, shape.members, shape.rank, shape.expert_rank) > size:
        raise CheckpointError(
            f"{folder / ABOUT}: {size:,} bytes of {WEIGHTS} cannot be of {shape}", FOREIGN
        )
    return about


_T = TypeVar("_T")


def checked(kind: type[_T], content: Mapping[str, Any], folder: Path) -> _T:
    """Return the content of client.json as its dataclass.

    Raises:
        CheckpointError: A value is missing, unknown, of the wrong type or out of range.
    """
    if foreign := sorted(content.keys() - {field.name for field in fields(cast(Any, kind))}):
        raise CheckpointError(f"{folder / ABOUT}: {foreign[0]}: unknown", FOREIGN)
    try:
        return TypeAdapter(kind).validate_json(json.dumps(content), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{folder / ABOUT}: {where}: {first['msg']}", FOREIGN) from None
    except ModelError as error:
        raise CheckpointError(f"{folder / ABOUT}: {error.problem}", FOREIGN) from None


def read_about_json(folder: Path) -> dict[str, Any]:
    """Read `client.json` in `folder`, of any kind of model. Raises CheckpointError."""
    return {k: v for k, v in _content(folder).items() if k not in CHECKSUMS}


def _content(folder: Path) -> dict[str, Any]:
    content = read_json(folder / ABOUT)
    if not isinstance(content, dict) or content.pop("format", None) != FORMAT:
        raise CheckpointError(
            f"{folder / ABOUT}: not of format {FORMAT}",
            "Another version of coterie wrote it: update coterie.",
        )
    return content


def expert_names(layout: Layout) -> tuple[str, ...]:
    """Return the experts' names in the order of the router: G or G1, G2, ..., then S or S1, ..."""
    counts = {"G": layout.generalists, "S": layout.specialists}
    return tuple(
        letter if count == 1 else f"{letter}{j}"
        for letter, count in counts.items()
        for j in range(1, count + 1)
    )


def check_size(architecture: Architecture, about: About, tensors: Named, source: str) -> None:
    """Refuse a layout that does not match the tensors before memory is allocated: a JSON may claim
    billions of experts. Raises CheckpointError.
    """
    try:
        with torch.device("meta"):
            outline = Adapter(architecture, about.layout)
        check_alike(dict(outline.named_parameters()), tensors, source)
    except (RuntimeError, TypeError) as error:  # sizes too large for any tensor
        raise CheckpointError(f"{source}: {error}", FOREIGN) from None
    except TensorError as error:
        raise CheckpointError(error.problem, _UNLIKE) from None


_UNLIKE = "The file belongs to another base or layout than client.json says."


def fill(parameters: Named, tensors: Named, source: str) -> None:
    """Give a model's own tensors the values of `source`.

    Raises:
        CheckpointError: Names are unknown or missing, shapes differ, or values are not finite;
            nothing was changed.
    """
    try:
        check_alike(parameters, tensors, source)
    except TensorError as error:
        raise CheckpointError(error.problem, _UNLIKE) from None
    if broken := [name for name in parameters if not all_finite({name: tensors[name]})]:
        raise CheckpointError(
            f"{source}: {broken[0]!r} holds values that are not finite ({len(broken)} tensors in "
            f"all)",
            "The file is damaged, or its client diverged: take an earlier copy, or train it "
            "again with a lower learning rate.",
        )
    for name, tensor in parameters.items():
        tensor.data.copy_(tensors[name])
