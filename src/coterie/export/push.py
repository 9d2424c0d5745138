"""Publication on the Hub: a client's personal model, or the shared part of a run."""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.adapt.new_client import TRAINED
from coterie.adapt.shared_part import SharedPart, write_shared
from coterie.core.checksums import write_all_sums
from coterie.core.errors import CheckpointError, CoterieError, Refused
from coterie.core.files import load, read_json, write_json
from coterie.core.foreign import opened
from coterie.core.metrics import PERPLEXITY
from coterie.core.result import RESULT, Result
from coterie.data.section import Section
from coterie.export.card import Facts, card
from coterie.export.peft import portable
from coterie.models.architecture import tokenizer
from coterie.models.artifact import ABOUT, CLASSIFIER, CLASSIFIER_WEIGHTS, WEIGHTS, verify
from coterie.personal import folder_of
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes.recipe import Recipe, resolve

CARD = "README.md"


@dataclass(frozen=True)
class Pushed:
    """A published model.

    Args:
        url: The address of the repository.
        files: The bytes of each file.
        private: Whether the repository is private.
    """

    url: str
    files: Mapping[str, int]
    private: bool


def push(
    run: Path,
    repo: str,
    *,
    client: str | None = None,
    shared: bool = False,
    publish_personal: bool = False,
    public: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Pushed:
    """Write a model with its card to a repository of the Hub, as one commit.

    Args:
        run: The run's folder, or a client's folder for a personal model.
        repo: The repository, `name` or `owner/name`. It is created if it does not exist.
        client: The client whose personal model is published; None for the only one in the folder.
        shared: Whether to publish the shared part of the run.
        publish_personal: Whether the owner of a personal model agrees that it leaves.
        public: Whether everybody may read the repository.
        say: A function that is called with lines on the progress.

    Raises:
        Refused: The owner has not agreed; there is no such model; or the repository is public
            without `public`.
        CoterieError: The Hub does not accept the model.
    """
    if shared == (client is not None) and (shared or not publish_personal):
        raise Refused("push takes one model", "Give --client ID, or --shared.")
    if not shared and not publish_personal:
        folder = folder_of(run, client)
        owner = read_json(folder / ABOUT).get("client")
        raise Refused(
            f"the personal model of {owner!r} holds what was trained on this client's own data and "
            f"never left it; whoever can read the repository can read parts of that out of it",
            "If its owner wants that, say so: --publish-personal. The part that clients share "
            "anyway is published by --shared.",
        )
    with tempfile.TemporaryDirectory(prefix="coterie-push-") as beside:
        folder = Path(beside)
        facts = _shared(run, folder) if shared else _personal(run, client, folder)
        (folder / CARD).write_text(card(facts, repo), encoding="utf-8")
        names = sorted(path.name for path in folder.iterdir())
        write_all_sums(folder)
        say(f"{', '.join(names)}: {sum((folder / n).stat().st_size for n in names):,} bytes ...")
        return _upload(folder, repo, public)


def _shared(run: Path, folder: Path) -> Facts:
    """Write the shared part of a run, and return the facts for its card."""
    if not (run / RECIPE).is_file():
        raise CheckpointError(f"{run} holds no run", "Give the folder that `coterie run` wrote.")
    recipe = resolve(run)
    base = portable(getattr(recipe.model, "base", ""))
    part: SharedPart = write_shared(run, folder, base)
    about = read_json(folder / ABOUT)
    return Facts(
        client=None,
        base=base,
        method=recipe.method["name"],
        rounds=about["round"],
        clients=part.clients,
        size=f"{part.tokens:,} tokens of all clients together",
        metric=PERPLEXITY.about,
        before=part.before,
        after=part.after,
        privacy=_result(run).privacy if (run / RESULT).is_file() else None,
        chats=about.get("content") == "chats",
    )


def _personal(run: Path, client: str | None, folder: Path) -> Facts:
    """Copy a personal model, and return the facts for its card."""
    source = folder_of(run, client)
    verify(source)
    about = read_json(source / ABOUT)
    classifies = about.get("kind") == CLASSIFIER
    weights = CLASSIFIER_WEIGHTS if classifies else WEIGHTS
    # refuses damaged weights
    load(source / weights)
    write_json(folder / ABOUT, _with_portable_bases(about))
    with opened(source / weights) as file:
        (folder / weights).write_bytes(file.read())
    whole = run if (run / RECIPE).is_file() else source.parent.parent
    result = _result(whole) if (whole / RESULT).is_file() else None
    before, after = _scores(whole, result, about["client"]) if result else (None, None)
    size = _size(whole, about["client"])
    if (source / TRAINED).is_file():
        trained = read_json(source / TRAINED)
        before, after = trained["base"], trained["after" if trained["helped"] else "before"]
        size = f"{trained['tokens']['train']:,} tokens"
    return Facts(
        client=about["client"],
        base=_base(about),
        method=about["method"],
        rounds=about["round"],
        clients=len(result.training or result.clients) if result else None,
        size=size,
        metric=result.metric if result else PERPLEXITY.about,
        before=before,
        after=after,
        privacy=result.privacy if result else None,
        language=not classifies,
        chats=about.get("content") == "chats",
    )


def _result(run: Path) -> Result:
    return Result.read(run)


def _scores(run: Path, result: Result, client: str) -> tuple[float | None, float | None]:
    """Return a client's test metric without training and at the end; None if not measured."""
    before = None
    untrained = run / "baselines" / "pretrained"
    if (untrained / RESULT).is_file():
        known = _result(untrained).clients.get(client)
        before = known.test if known else None
    elif result.evaluations and result.evaluations[0].round == 0:
        first = result.evaluations[0].clients or {}
        before = first[client].test if client in first else None
    return before, result.clients[client].test if client in result.clients else None


def _size(run: Path, client: str) -> str | None:
    """Return the size of a client's training data in words; None if the data are absent."""
    try:
        recipe: Recipe = resolve(run)
        if recipe.model.kind != "language" or not isinstance(recipe.data, Section):
            return None
        words = tokenizer(recipe.model.base)
        federation = recipe.data.load(words, recipe.model.context, order_seed=recipe.seed)
        return f"{len(federation.everyone[client].train):,} tokens"
    except (CoterieError, KeyError):
        return None


def _base(about: Mapping[str, Any]) -> str | None:
    """Return the base in a client.json, for any kind of model."""
    base = about.get("base") or about.get("network", {}).get("base")
    return None if base is None else portable(base)


def _with_portable_bases(value: Any) -> Any:
    """Return JSON values with the names of bases for other machines."""
    if isinstance(value, Mapping):
        return {
            key: portable(entry) if key == "base" and entry else _with_portable_bases(entry)
            for key, entry in value.items()
        }
    return [_with_portable_bases(entry) for entry in value] if isinstance(value, list) else value


def _upload(folder: Path, repo: str, public: bool) -> Pushed:
    """Upload all files of a folder as one commit. Raises Refused and CoterieError."""
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    api = HfApi(library_name="coterie")
    files = sorted(path for path in folder.iterdir() if path.is_file())
    try:
        created = api.create_repo(repo, private=not public, exist_ok=True)
        private = bool(api.model_info(created.repo_id).private)
        if not private and not public:
            raise Refused(
                f"everybody can read {created.repo_id}",
                "Choose another --repo, make that one private, or say --public.",
            )
        operations = [CommitOperationAdd(path.name, path) for path in files]
        api.create_commit(created.repo_id, operations, commit_message="A model of coterie")
    except HFValidationError as error:
        raise Refused(f"--repo {repo}: {error}", "Names are like me/my-model.") from None
    except (HfHubHTTPError, OSError) as error:
        raise hub_error(f"the Hub does not take {repo}", error) from error
    return Pushed(str(created), {path.name: path.stat().st_size for path in files}, private)


def hub_error(problem: str, error: Exception) -> CoterieError:
    """Return an error of the network or the Hub as an error of coterie."""
    reason = " ".join(str(error).split())[:300]
    return CoterieError(
        f"{problem}: {reason}",
        "Check the name and the network, and that this machine is logged in with a token that may "
        "do that: hf auth login.",
    )
