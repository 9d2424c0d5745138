"""Folders of runs named by their content, and the cleaning of those of a search."""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from coterie.core.errors import Refused
from coterie.core.files import SUMS, make_folder, write_json
from coterie.core.foreign import read_text
from coterie.core.names import encoded
from coterie.core.result import RESULT, ROUTING
from coterie.runs.folder.inputs import INPUTS, RecordedInputs
from coterie.runs.folder.lock import alone
from coterie.runs.folder.metrics import METRICS
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

UNFIT = "unfit.json"  # in the folder of a run that has no result: why
CANDIDATE = "candidate.json"  # in that of a run which a search began, and did not choose (yet)
_LARGE = ("checkpoints", "clients", "tensorboard")
# what does not change what a run measures
_BESIDE = {"name", "description", "paper", "seed", "compare_with"}
_BESIDE |= {"samples", "words", "memory", "threads", "curve_every"}


def digest(recipe: Recipe) -> str:
    """Return the digest of all fields that influence results, including those with default values.
    Null fields are left out, so that runs are still found when recipes get a new field.
    """
    settings = asdict(recipe.build_method()).items()
    later = [("choice", "server")]  # the kept runs have none
    method = {key: v for key, v in settings if v is not None and (key, v) not in later}
    rest = recipe.model_dump(mode="json", exclude=_BESIDE, exclude_none=True)
    section = rest | {"method": method, "data": _as_before(rest["data"])}
    text = json.dumps(section, sort_keys=True, default=lambda rule: rule.model_dump(mode="json"))
    return blake2b(text.encode(), digest_size=4).hexdigest()


def _as_before(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a data section with the fields, and only those, that the first kept runs had."""
    later = {"control_tokens": "text"}  # those of the kept runs have none in their texts
    section = {key: value for key, value in data.items() if later.get(key) != value}
    if "anchors" in data:
        section["unseen_anchors"] = 2
    if data.get("partition") == "dirichlet" and data["anchors"]:
        # the anchors of the first kept runs were drawn in one draw with the other clients
        section["dirichlet_anchors"] = "by themselves"
    if data["kind"].startswith("agnews"):
        section["exclude_pretraining"] = False
    return section


def folder_of(recipe: Recipe, root: Path) -> Path:
    """Return the folder of a run in `root`: by method, digest and seed."""
    return root / f"{encoded(recipe.method['name'])}-{digest(recipe)}" / f"seed-{recipe.seed}"


def has_ended(folder: Path) -> bool:
    """Whether a run has a result or is known to have none. Raises CheckpointError."""
    return (folder / UNFIT).exists() or RecordedInputs(folder).done()


def mark(folder: Path) -> None:
    """Mark a run that has not begun as part of a search only. Raises SaveError."""
    if not (folder / RECIPE).exists():
        write_json(folder / CANDIDATE, {"keeps": "its result, and no models unless it is chosen"})


def confirm(folder: Path) -> None:
    """Mark a run as wanted on its own account: it keeps all its files."""
    (folder / CANDIDATE).unlink(missing_ok=True)


def adopt(recipe: Recipe, source: Path, target: Path) -> None:
    """Take over a complete run of a search of exactly this recipe, in place of running it in
    `target`; checkpoints and models move there.

    The result comes last, so that an interrupted move continues from its checkpoint. Raises
    CheckpointError if the result is damaged.
    """
    begun = (target / RECIPE).exists()
    if begun or not same_recipe(recipe, source) or not RecordedInputs(source).done():
        return
    if not (source / "checkpoints").is_dir():
        return  # another search may have chosen, and taken it
    make_folder(target)
    for name in (SUMS, INPUTS, METRICS, RECIPE):
        if (source / name).exists():
            shutil.copy2(source / name, target / name)
    for name in (*_LARGE, ROUTING):
        if (source / name).exists():
            shutil.move(source / name, target / name)
    shutil.copy2(source / RESULT, target / RESULT)


def same_recipe(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder's recipe is exactly this one."""
    try:
        return read_text(folder / RECIPE) == recipes.dump(recipe)
    except (OSError, ValueError):
        return False


def lighten(folder: Path) -> None:
    """Remove checkpoints and models of an ended run that a search began; the result and the metrics
    stay. Runs that others began or are using stay unchanged.
    """
    if not (folder / CANDIDATE).exists() or not has_ended(folder):
        return
    with suppress(Refused), alone(folder):
        for name in _LARGE:
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / ROUTING).unlink(missing_ok=True)
