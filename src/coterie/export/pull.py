"""Download of models that `coterie push` wrote: only plain data files of known names and bounded
size are kept, and their checksums must be right.
"""

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.adapt.shared_part import SHARED
from coterie.core.errors import CheckpointError, CoterieError, Refused, SaveError
from coterie.core.files import SUMS, check_sums, load, make_folder, read_sums, replaced
from coterie.core.tensors import all_finite
from coterie.export.push import CARD, base_of, hub_errors
from coterie.methods import METHODS
from coterie.models.artifact import (
    ABOUT,
    CLASSIFIER,
    CLASSIFIER_WEIGHTS,
    WEIGHTS,
    model_folders,
    read_about,
    read_about_json,
    read_classifier,
)
from coterie.personal import PersonalModel
from coterie.personal import load as load_model
from coterie.runs import recipes
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes.recipe import resolve

TENSORS = (WEIGHTS, CLASSIFIER_WEIGHTS, SHARED)
TEXTS = (ABOUT, RECIPE, CARD, SUMS)
MOST_TEXT = 2**20  # the most bytes of a file of text
MOST_TENSORS = 2 * 2**30  # the most bytes of a file of tensors, unless the user allows more
# endings of files that could run code when they are loaded
_CODE = (".py", ".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".npy", ".npz", ".so")


@dataclass(frozen=True)
class Pulled:
    """A model that was pulled."""

    folder: Path
    client: str  # `shared` for the shared part of a run
    base: str | None  # None for a network of its own
    method: str  # the name of the method
    revision: str  # the commit

    @property
    def shared(self) -> bool:
        """Whether this is the shared part of a run, from which a client can train."""
        return (self.folder / SHARED).is_file()


def pull(
    repo: str, out: Path, *, revision: str | None = None, most_bytes: int = MOST_TENSORS
) -> Pulled:
    """Fetch a model that `push` wrote, and verify it, see `coterie.pull`. Either all files are kept
    or none; a file of tensors has at most `most_bytes`.
    """
    from huggingface_hub import HfApi

    if out.exists():
        raise Refused(f"{out} exists already", "Give --out a new folder.")
    api = HfApi(library_name="coterie")
    make_folder(out.parent)
    with hub_errors(repo, "the Hub does not give"):
        info = api.model_info(repo, revision=revision, files_metadata=True)
        if not info.sha:
            raise Refused(f"{repo} has no commit", "Push a model to it first.")
        siblings: Any = info.siblings or []
        sizes = _checked_listing(repo, siblings, most_bytes)
        try:
            with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
                new = Path(beside) / "model"
                new.mkdir()
                for name, size in sizes.items():
                    (new / name).parent.mkdir(exist_ok=True)
                    hub = Path(beside) / "hub"
                    api.hf_hub_download(repo, name, revision=info.sha, local_dir=hub)
                    file = hub / name
                    if file.is_symlink() or not file.is_file() or file.stat().st_size != size:
                        raise CheckpointError(f"{repo}: {name} is not what the repository lists")
                    os.rename(file, new / name)
                large = [file for file in siblings if file.lfs and file.rfilename in sizes]
                _verify(repo, new, {file.rfilename: file.lfs.sha256 for file in large})
                os.rename(new, out)
        except OSError as error:
            if error.filename is None or str(out.parent) not in str(error.filename):
                raise
            raise SaveError(f"cannot write {out}: {error.strerror}", "Free some space.") from error
    about = read_about_json(model_folders(out)[0]) | read_about_json(out)
    return Pulled(out, str(about["client"]), base_of(about), str(about["method"]), info.sha)


def from_pretrained(repo: Path | str, revision: str | None, **settings: Any) -> PersonalModel:
    """Load a language model from a folder or a repository, see `PersonalModel.from_pretrained`."""
    from huggingface_hub import HfApi, cached_assets_path

    folder = Path(repo)
    if not folder.is_dir():
        with hub_errors(str(repo), "the Hub does not give"):
            info = HfApi(library_name="coterie").model_info(str(repo), revision=revision)
        folder = Path(cached_assets_path("coterie", info.id, info.sha or "")) / "model"
        if not folder.exists():
            pull(str(repo), folder, revision=info.sha)
    model = load_model(folder, **settings)
    if not isinstance(model, PersonalModel):
        raise Refused(f"{repo} holds a classifier", "Pull it, and load it by coterie.load.")
    return model


def _checked_listing(repo: str, siblings: Any, most_bytes: int) -> dict[str, int]:
    """Return the names and sizes of the files to fetch. Raises Refused."""
    sizes: dict[str, int] = {}
    for file in siblings:
        name = file.rfilename
        if "\\" in name or ":" in name or name.startswith("/") or ".." in Path(name).parts:
            raise _unsafe(repo, f"a file with the path {name!r}, which leads outside")
        if name.lower().endswith(_CODE):
            raise _unsafe(repo, f"{name!r}, which could run code when it is loaded")
        part, kind = Path(name).parent.as_posix(), Path(name).name
        if part not in (".", *METHODS) or kind not in TENSORS + TEXTS:
            continue
        most = most_bytes if kind in TENSORS else MOST_TEXT
        if file.size is None or not 0 < file.size <= most:
            raise Refused(
                f"{repo}: {name} has {'no known size' if file.size is None else file.size} bytes, "
                f"at most {most:,} are taken",
                "If its owner is known to you: --most-gb."
                if kind in TENSORS
                else "`coterie push` writes no such file.",
            )
        sizes[name] = file.size
    kinds = {Path(name).name for name in sizes}
    if missing := {ABOUT, SUMS} - sizes.keys() or not kinds & {WEIGHTS, CLASSIFIER_WEIGHTS}:
        what = ", ".join(sorted(missing)) if isinstance(missing, set) else "tensors"
        problem = f"{repo} holds no model of coterie: it has no {what}"
        raise Refused(problem, "`coterie push` writes such repositories.")
    return sizes


def _unsafe(repo: str, what: str) -> Refused:
    remedy = "No model that `coterie push` wrote has such a file. Nothing was fetched."
    return Refused(f"{repo} holds {what}", remedy)


def _verify(repo: str, folder: Path, stated: Mapping[str, str]) -> None:
    """Check that the files are as they were pushed, with the SHA-256 that the Hub states of large
    ones, and make up a model. Raises Refused and CheckpointError.
    """
    try:
        files = [path for path in folder.rglob("*") if path.is_file()]
        for one in {path.parent for path in files}:
            names = {path.name for path in files if path.parent == one} - {SUMS}
            check_sums(one, sorted(names), read_sums(one))
        check_sums(folder, stated, stated)
        for one in model_folders(folder):
            kind = read_about_json(one).get("kind")
            (read_classifier if kind == CLASSIFIER else read_about)(one)
            for name in TENSORS:
                if (one / name).is_file() and not all_finite(load(one / name)[0]):
                    raise CheckpointError(f"{name} holds values that are not finite")
            if not (one / (CLASSIFIER_WEIGHTS if kind == CLASSIFIER else WEIGHTS)).is_file():
                raise CheckpointError(f"{ABOUT} and the files of tensors are of different kinds")
        _verify_recipe(folder)
    except CoterieError as error:
        problem = error.problem.replace(f"{folder}/", "")
        kind_of = Refused if type(error) is Refused else CheckpointError
        remedy = error.remedy or "Nothing was kept. Ask its owner to push it again."
        raise kind_of(f"{repo}: {problem}", remedy) from None


def _verify_recipe(folder: Path) -> None:
    """Check that the recipe of a shared part is valid and cannot import code of its choosing."""
    if not (folder / SHARED).is_file():
        # without a shared part nothing reads the recipe
        with replaced(folder):
            (folder / RECIPE).unlink(missing_ok=True)
        return
    section = recipes.read(folder / RECIPE)
    method = section.get("method")
    name = method.get("name") if isinstance(method, Mapping) else None
    if not isinstance(name, str) or ":" in name or name not in METHODS:
        problem = f"{RECIPE}: method.name: {name!r} is no method of coterie"
        raise Refused(problem, "A recipe of a stranger may not name a program. Nothing was kept.")
    if set(section) - {"name", "model", "method", "training", "seed", "data"}:
        raise Refused(f"{RECIPE} has other sections than `coterie push` writes", "")
    data = section.get("data")
    if not isinstance(data, Mapping) or data.get("kind") != "folders" or data.get("path"):
        raise Refused(f"{RECIPE}: data must name nothing of this machine", "")
    resolve(folder)
