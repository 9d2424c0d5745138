"""Publication on the Hub: a client's personal model, or the shared part of a run."""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch

from coterie.adapt.new_client import TRAINED
from coterie.adapt.shared_part import SharedPart, write_shared
from coterie.core.errors import CoterieError, Refused
from coterie.core.files import load, read_json, replaced, write_json
from coterie.core.foreign import opened
from coterie.core.metrics import PERPLEXITY, direction
from coterie.core.result import RESULT, MetricInfo, PrivacySpent, Result
from coterie.core.version import HOME, __version__
from coterie.data.section import Section
from coterie.export.format import filled_readme
from coterie.export.peft import portable, write_adapter
from coterie.methods import METHODS
from coterie.models import artifact, gguf_base
from coterie.models.architecture import EMBEDDED, tokenizer
from coterie.models.artifact import ABOUT, CLASSIFIER, CLASSIFIER_WEIGHTS, WEIGHTS
from coterie.personal import folder_of, read_about
from coterie.personal import load as load_model
from coterie.runs.folder.names import RECIPE
from coterie.runs.recipes.recipe import Recipe, resolve
from coterie.runs.recipes.sections import LanguageSection

CARD = "README.md"
# what the model is, on whose data it was scored, and what it may reveal of its training data
_SHARED = (
    "The shared part of a run",
    "the mean over the clients",
    "No specialist or router of a client is in it. What its clients' texts had in common can be "
    "read out of it: `coterie audit` measures how much of a text it gives away.",
)
_PERSONAL = (
    "One client's personal model",
    "this client's own",
    "It was published by its owner's choice: its own experts were trained on the owner's data "
    "alone, and parts of these may be read out of it.",
)
_TEMPLATE = """
It was trained on conversations, and answers messages by the chat template of that training, which
`client.json` holds where it is not the base's own.
"""
_BUNDLED = """
Its base comes with coterie, and has no repository of its own, so that PEFT cannot open this one.
For other programs, `coterie export --format gguf` (or onnx, web, mixtral) writes the base along.
"""


@dataclass(frozen=True)
class Pushed:
    """A published model."""

    url: str  # of the repository
    files: Mapping[str, int]  # the bytes of each file
    private: bool


@dataclass(frozen=True)
class Facts:
    """The facts that a card states; None if a fact is not known."""

    about: Mapping[str, Any]  # the content of the model's client.json
    shared: bool  # whether it is the shared part of a run
    base: str | None  # its public name: `embedded`, a Hub id, or the last part of a path
    clients: int | None  # the number of clients that trained together
    size: str | None  # the training data in words, e.g. "12,000 tokens"
    metric: MetricInfo  # of the two scores, which are on the same test data
    before: float | None  # the score of the base without any training
    after: float | None  # the score of the published model
    privacy: PrivacySpent | None  # None if no noise was added
    license: str | None = None  # an identifier of the Hub; None: the owner has named none

    @property
    def classifies(self) -> bool:
        """Whether the model, or each part of it, is a classifier."""
        return "network" in self.about

    @property
    def chats(self) -> bool:
        """Whether the model was trained on conversations."""
        return self.about.get("content") == "chats"


def push(
    run: Path,
    repo: str,
    *,
    client: str | None = None,
    shared: bool = False,
    publish_personal: bool = False,
    public: bool = False,
    license: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Pushed:
    """Write a model with its card to a repository of the Hub, as one commit, see `coterie.push`."""
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
        facts = replace(facts, license=license)
        adapts = _is_adapter(folder)
        with replaced(folder) as new:
            (new / CARD).write_text(card(facts, repo, adapts), encoding="utf-8")
        if adapts:  # for PEFT alone, so that the checksums are without it
            model: Any = load_model(folder, base=base_of(facts.about))
            write_adapter(folder, model, torch.ones(len(model.adapter.blocks), 1), [0])
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = {path.relative_to(folder).as_posix(): path.stat().st_size for path in paths}
        say(f"{', '.join(sizes)}: {sum(sizes.values()):,} bytes ...")
        return _upload(folder, sizes, repo, public)


def _is_adapter(folder: Path) -> bool:
    """Return whether a model has one expert, which is a PEFT adapter as it is, on a base that other
    programs find by its name; False without PEFT, which writes its configuration.
    """
    if not (folder / WEIGHTS).is_file() or find_spec("peft") is None:
        return False
    about = read_about(folder)
    foreign = about.base == EMBEDDED or gguf_base.names_file(about.base) or about.quantise
    return about.layout.experts == 1 and not foreign


def _shared(run: Path, folder: Path) -> Facts:
    """Write the shared part of a run, and return the facts for its card."""
    recipe = resolve(run)
    base = portable(getattr(recipe.model, "base", ""))
    part: SharedPart = write_shared(run, folder, base)
    assert isinstance(recipe.model, LanguageSection)
    return Facts(
        about=read_json(folder / ABOUT) | {"base": recipe.model.base},
        shared=True,
        base=base,
        clients=part.clients,
        size=f"{part.tokens:,} tokens of all clients together",
        metric=PERPLEXITY.about,
        before=part.before,
        after=part.after,
        privacy=Result.read(run).privacy if (run / RESULT).is_file() else None,
    )


def _personal(run: Path, client: str | None, folder: Path) -> Facts:
    """Copy a personal model, and return the facts for its card."""
    source = folder_of(run, client)
    parts, about = artifact.model_folders(source), dict[str, Any]()
    for one in dict.fromkeys([*parts, source]):
        artifact.verify(one)
        with replaced(folder / one.relative_to(source)) as new:
            about |= (content := read_json(one / ABOUT))
            write_json(new / ABOUT, _with_portable_bases(content))
            if one in parts:
                weights = CLASSIFIER_WEIGHTS if content.get("kind") == CLASSIFIER else WEIGHTS
                load(one / weights)  # refuses damaged weights
                with opened(one / weights) as file:
                    (new / weights).write_bytes(file.read())
    whole = run if (run / RECIPE).is_file() else source.parent.parent
    result = Result.read(whole) if (whole / RESULT).is_file() else None
    before, after = _scores(whole, result, about["client"]) if result else (None, None)
    size = _size(whole, about["client"])
    if (source / TRAINED).is_file():
        trained = read_json(source / TRAINED)
        before, after = trained.get("base"), trained["after" if trained["helped"] else "before"]
        size = f"{trained['tokens']['train']:,} tokens"
    base = base_of(about)
    return Facts(
        about=about,
        shared=False,
        base=base and portable(base),
        clients=len(result.training or result.clients) if result else None,
        size=size,
        metric=result.metric if result else PERPLEXITY.about,
        before=before,
        after=after,
        privacy=result.privacy if result else None,
    )


def _scores(run: Path, result: Result, client: str) -> tuple[float | None, float | None]:
    """Return a client's test metric without training and at the end; None if not measured."""
    untrained, first = run / "baselines" / "pretrained", result.evaluations[:1]
    before: Mapping[str, Any] = {}
    if (untrained / RESULT).is_file():
        before = Result.read(untrained).clients
    elif first and first[0].round == 0:
        before = first[0].clients or {}
    base, end = before.get(client), result.clients.get(client)
    return base and base.test, None if end is None else end.test


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


def base_of(about: Mapping[str, Any]) -> str | None:
    """Return the base in a client.json, for any kind of model."""
    network = about.get("encoder") or about.get("network", {})
    return cast(str | None, about.get("base") or network.get("base"))


def _with_portable_bases(value: Any) -> Any:
    """Return JSON values with the names of bases for other machines."""
    if isinstance(value, Mapping):
        return {
            key: portable(entry) if key == "base" and entry else _with_portable_bases(entry)
            for key, entry in value.items()
        }
    return [_with_portable_bases(entry) for entry in value] if isinstance(value, list) else value


def _upload(folder: Path, sizes: Mapping[str, int], repo: str, public: bool) -> Pushed:
    """Upload files of a folder as one commit. Raises Refused and CoterieError."""
    from huggingface_hub import CommitOperationAdd, HfApi

    api = HfApi(library_name="coterie")
    with hub_errors(repo, "the Hub does not take"):
        created = api.create_repo(repo, private=not public, exist_ok=True)
        private = bool(api.model_info(created.repo_id).private)
        if not private and not public:
            problem = f"everybody can read {created.repo_id}"
            raise Refused(problem, "Choose another --repo, make that one private, or say --public.")
        operations = [CommitOperationAdd(name, folder / name) for name in sizes]
        api.create_commit(created.repo_id, operations, commit_message="A model of coterie")
    return Pushed(str(created), sizes, private)


@contextmanager
def hub_errors(repo: str, problem: str) -> Iterator[None]:
    """Turn an error of the network or the Hub within the block into one of coterie."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        yield
    except HFValidationError as error:
        raise Refused(f"{repo}: {error}", "Names are like me/my-model.") from None
    except (HfHubHTTPError, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise CoterieError(
            f"{problem} {repo}: {reason}",
            "Check the name and the network, and that this machine is logged in with a token that "
            "may do that: hf auth login.",
        ) from error


def card(facts: Facts, repo: str, adapts: bool = False) -> str:
    """Return the text of README.md, with the front matter that the Hub reads; `adapts` says whether
    PEFT opens the repository.
    """
    method, rounds = facts.about["method"], facts.about["round"]
    entry = METHODS[method]
    what, scored, note = _SHARED if facts.shared else _PERSONAL
    name = repo.rpartition("/")[2]
    rows = {
        "base": f"`{facts.base}`" if facts.base else "none: the whole network is here",
        "method": f"{entry.title} (`{method}`), {rounds} rounds; {entry.paper}",
        "clients that trained together": _number(facts.clients),
        "training data": facts.size or "not recorded",
        f"{facts.metric} before, without training": _number(facts.before, ".2f"),
        f"{facts.metric} after": _number(facts.after, ".2f"),
        "privacy spent": _spent(facts.privacy),
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    notes = [_TEMPLATE] * facts.chats + [_BUNDLED] * (facts.base == EMBEDDED)
    if adapts:
        beside = f", beside a folder `{facts.base}` with its base"
        where = "" if "/" in (facts.base or "") else beside
        notes.append(filled_readme("card-peft", where=where, repo=repo))
    return filled_readme(
        "card",
        front=_front_matter(facts, name),
        name=name,
        what=what,
        program=f"[coterie]({HOME})" if HOME else "coterie",
        version=__version__,
        table=table,
        direction=direction(facts.metric),
        scored=scored,
        note=note,
        repo=repo,
        commands=_commands(facts, name),
        notes="".join(notes),
    )


def _front_matter(facts: Facts, name: str) -> str:
    """Return the metadata of a card that the Hub reads: results, and the base if it is there."""
    from huggingface_hub import EvalResult, ModelCardData

    kind = "text" if facts.about.get("encoder") else "image"
    task = f"{kind}-classification" if facts.classifies else "text-generation"
    base = facts.base if facts.base and facts.base != EMBEDDED and "/" in facts.base else None
    if base and gguf_base.names_file(base):
        base = base.rpartition("/")[0]
    results = None
    if facts.after is not None:
        measured = facts.metric.name.removeprefix("test ")
        about: Any = {"dataset_type": "private", "dataset_name": "the clients' own test data"}
        results = [
            EvalResult(task_type=task, metric_type=measured, metric_value=facts.after, **about)
        ]
    data = ModelCardData(
        library_name="coterie",
        license=facts.license,
        tags=["personalization", "federated-learning"],
        base_model=base,
        pipeline_tag=None if facts.classifies else task,
        model_name=name if results else None,
        eval_results=results,
    )
    return f"---\n{data.to_yaml()}\n---"


def _commands(facts: Facts, name: str) -> str:
    if facts.classifies:
        return f"coterie predict {name} --data FILES"
    options = '--chat --text "How are you?"' if facts.chats else '--text "The weather is"'
    lines = [f"coterie generate {name} {options}"]
    if facts.shared:
        lines += [f"coterie adapt {name} --data MY_TEXTS --out mine"]
    return "\n".join(lines)


def _spent(privacy: PrivacySpent | None) -> str:
    if privacy is None:
        return "no noise was added: the training gives no formal guarantee of privacy"
    epsilon = "infinite" if privacy.epsilon is None else f"{privacy.epsilon:.3g}"
    known = ", with noise from a known seed, which protects nobody" if privacy.experiment else ""
    return f"epsilon {epsilon} at delta {privacy.delta:g} ({privacy.where} noise{known})"


def _number(value: float | None, form: str = ",") -> str:
    """Return a formatted number, or "not recorded" for None."""
    return "not recorded" if value is None else format(value, form)
