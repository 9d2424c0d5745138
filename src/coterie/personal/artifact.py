"""A client's folder in a run: its adapter and router as safetensors, and a JSON that names the base. Never pickle."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from coterie.errors import CheckpointError, TensorError
from coterie.models.adapter import Adapter, Layout
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.records import read_json, write_json
from coterie.tensors import Named, check_alike
from coterie.tensors import load as load_tensors
from coterie.tensors import save as save_tensors

FORMAT = 1
WEIGHTS, ABOUT = "adapter.safetensors", "client.json"


@dataclass(frozen=True)
class About:
    """What `client.json` says.

    Args:
        client: The client's id.
        base: Hub id, local folder, or `embedded`.
        layout: The adapter's shape.
        context: The window length that it was trained with, in tokens.
        method: Name of the method.
        recipe: Name of the recipe.
        round: Rounds done.
        seed: The run's seed.
    """

    client: str
    base: str
    layout: Layout
    context: int
    method: str
    recipe: str
    round: int
    seed: int


def save(folder: Path, about: About, tensors: Named) -> None:
    """Write a personal model to `folder`. Raises SaveError; what was there before stays good."""
    save_tensors(folder / WEIGHTS, tensors, {"format": "pt"})
    write_json(folder / ABOUT, {"format": FORMAT} | asdict(about))


def read_about(folder: Path) -> About:
    """What `client.json` in `folder` says.

    Raises:
        CheckpointError: It is missing, damaged, or of a newer format.
    """
    found: dict[str, Any] = read_json(folder / ABOUT)
    if found.pop("format", None) != FORMAT:
        raise CheckpointError(f"{folder / ABOUT}: not of format {FORMAT}", "It was written by another version of coterie: update.")
    try:
        return About(**(found | {"layout": Layout(**found["layout"])}))
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / ABOUT}: {error}", "It was changed by hand, or written by another version of coterie.") from None


def load(
    run: Path | str, client: str, *, backbone: Backbone | None = None, dtype: Literal["fp32", "bf16"] = "fp32", device: str = "cpu"
) -> LanguageModel:
    """The personal model of a client of a run.

    Args:
        run: A run's folder.
        client: The client's id.
        backbone: A loaded base to share between several personal models; default: the one that the client's JSON names.
        dtype: Of the base if it is loaded here, "fp32" or "bf16".
        device: Likewise.

    Raises:
        CheckpointError: There is no such client, or its files are damaged or do not fit the base.
        ModelError: The base cannot be loaded.
    """
    folder = Path(run) / "clients" / client
    if not folder.is_dir():
        known = sorted(path.name for path in folder.parent.glob("*") if path.is_dir())
        raise CheckpointError(f"{run} has no client {client!r}", f"Its clients: {', '.join(known) or 'none (is this a run?)'}.")
    about = read_about(folder)
    model = LanguageModel(backbone or Backbone.load(about.base, dtype=dtype, device=device), about.layout)
    fill(model.adapter, load_tensors(folder / WEIGHTS)[0], str(folder / WEIGHTS))
    return model


def fill(adapter: Adapter, tensors: Named, source: str) -> None:
    """Give an adapter the tensors of `source`. Raises CheckpointError for foreign or missing names and other shapes."""
    own = {name: p for named in adapter.parameters_by_role().values() for name, p in named.items()}
    try:
        check_alike(own, tensors, source)
    except TensorError as error:
        raise CheckpointError(error.problem, "The file belongs to another base or layout than client.json says.") from None
    for name, parameter in own.items():
        parameter.data.copy_(tensors[name])
