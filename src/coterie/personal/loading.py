"""Loading of a run's personal models, of any kind."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict, Unpack, cast

from coterie.core import names
from coterie.core.errors import CheckpointError, Refused
from coterie.core.isolation import isolated
from coterie.models.artifact import ABOUT, CLASSIFIER, model_folders, read_about_json
from coterie.models.backbone import Backbone
from coterie.personal.classifier import ClassifierMixture, PersonalClassifier
from coterie.personal.many import ManyModels
from coterie.personal.mixture import PersonalMixture
from coterie.personal.model import PersonalModel

Personal = PersonalModel | PersonalClassifier


class Settings(TypedDict, total=False):
    """The settings of `load` for several models."""

    base: str | None
    backbone: Backbone | None
    dtype: Literal["fp32", "bf16"]
    device: str
    follow: bool


@isolated()
def load(
    run: Path | str,
    client: str | None = None,
    *,
    base: str | None = None,
    backbone: Backbone | None = None,
    dtype: Literal["fp32", "bf16"] = "fp32",
    device: str = "cpu",
    follow: bool = False,
) -> Personal:
    """Load the personal model of a client.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> model = coterie.load("digits", "c0-0")
        >>> model.about.client, model.about.method
        ('c0-0', 'cobo')

    Args:
        run: A run's folder, or a client's folder in it (clients/ID).
        client: The client's id; not needed for a client's folder, or if there is only one client.
        base: Path or Hub id of the base; default: that in client.json.
        backbone: For language models, in place of `base`: a loaded base that several personal
            models share.
        dtype: For language models: dtype of the base if it is loaded here, "fp32" or "bf16".
        device: Device to load the model to.
        follow: Whether the weights of a mixture of models follow what its owner writes, from where
            they were the last time, see `PersonalModel.observe`; other models have none.

    Raises:
        CheckpointError: There is no such client, or its files are damaged or belong to another
            base.
        ModelError: The base cannot be loaded.
        Refused: A backbone is given for a model without one.
    """
    folder = folder_of(run, client).absolute()
    first, *others = model_folders(folder)
    if read_about_json(first).get("kind") != CLASSIFIER:
        model = (PersonalMixture if others else PersonalModel).load(
            folder, base=base, backbone=backbone, dtype=dtype, device=device
        )
        if follow and isinstance(model, PersonalMixture):
            model.follow(folder)
        return model
    if backbone is not None:
        raise Refused(f"{folder} holds a classifier, which has no backbone", "Leave it out.")
    return (ClassifierMixture if others else PersonalClassifier).load(folder, base, device)


@isolated()
def load_all(
    run: Path | str, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
) -> dict[str, Personal]:
    """Load the personal models of several clients. Language models share a backbone, so that each
    needs little more memory than its adapter.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> models = coterie.load_all("digits", ["c0-0", "c3-1"])
        >>> sorted(models)
        ['c0-0', 'c3-1']

    By default, `clients` are all clients. Errors and the other arguments are those of `load`.
    """
    ids: list[str | None] = [*dict.fromkeys(map(names.normal, clients or ()))]
    if not ids:
        ids = [None] if (Path(run) / ABOUT).is_file() else [*clients_of(run)]
    models: dict[str, Personal] = {}
    for client in ids:
        model = load(run, client, **settings)
        models[client or model.about.client] = model
        settings["backbone"] = model.backbone if isinstance(model, PersonalModel) else None
    return models


@isolated()
def load_many(
    run: Path | str, clients: Sequence[str] | None = None, **settings: Unpack[Settings]
) -> ManyModels:
    """Load the language models of several clients, to compute all of them in one batch.

    Examples:
        >>> import coterie
        >>> run = coterie.run(
        ...     "synthetic",
        ...     out="words",
        ...     data={"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200},
        ...     method={"name": "fedavg", "rounds": 1, "local_steps": 1},
        ... )
        >>> models = coterie.load_many("words")
        >>> words = models.next_words("the water and the", k=1)
        >>> sorted(words)
        ['client-0', 'client-1']

    The arguments are those of `load_all`.

    Raises:
        Refused: The run's models are classifiers.
    """
    models = load_all(run, clients, **settings)
    if classifiers := [
        client for client, model in models.items() if not isinstance(model, PersonalModel)
    ]:
        raise Refused(
            f"{run} holds classifiers (of {classifiers[0]}), which share no backbone",
            "Load them by load_all.",
        )
    return ManyModels({client: cast(PersonalModel, model) for client, model in models.items()})


def clients_of(run: Path | str) -> list[str]:
    """Return the ids of the clients with a model in a run's folder. Raises CheckpointError."""
    return list(_folders(Path(run)))


def _folders(run: Path) -> dict[str, Path]:
    """Return the folder of each client's personal model, by client id. Raises CheckpointError."""
    folders = [path.parent for path in (run / "clients").glob(f"*/{ABOUT}")]
    if not folders:
        raise CheckpointError(
            f"{run} holds no personal models",
            "Give the folder of a finished run, with clients/ in it (`coterie run`).",
        )
    return dict(sorted((_client_of(folder), folder) for folder in folders))


def _client_of(folder: Path) -> str:
    """Return the id of the client to whom a folder belongs."""
    client = (
        read_about_json(folder).get("client")
        if names.is_cut(folder.name)
        else names.decoded(folder.name)
    )
    return names.normal(str(client))


def folder_of(run: Path | str, client: str | None) -> Path:
    """Return a client's folder, from a run's folder or the client's own. Raises CheckpointError."""
    run, client = Path(run), None if client is None else names.normal(client)
    if (run / ABOUT).is_file():
        if client not in (None, owner := read_about_json(run).get("client")):
            raise CheckpointError(
                f"{run} is the folder of client {owner!r}, not of {client!r}",
                "Give the run's folder.",
            )
        return run
    folders = _folders(run)
    if client is None and len(folders) == 1:
        return next(iter(folders.values()))
    if client not in folders:
        problem = (
            f"{run} has several clients" if client is None else f"{run} has no client {client!r}"
        )
        raise CheckpointError(problem, f"Its clients: {', '.join(folders)}.")
    return folders[client]
