"""The commands that use a run's personal models, as functions with the command line's words."""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.adapt import fresh as refits
from coterie.adapt import new_client
from coterie.core.errors import CheckpointError, Refused
from coterie.core.files import SUMS, check_all_sums
from coterie.core.names import encoded
from coterie.core.protocol import ClientId
from coterie.core.result import RESULT, Result
from coterie.data.summary import DataSummary
from coterie.export import frame
from coterie.export import pull as pulls
from coterie.export import push as pushes
from coterie.export.frame import Source
from coterie.models.artifact import ABOUT
from coterie.personal import PersonalClassifier, PersonalModel, load_all
from coterie.runs.problems import data_summary
from coterie.runs.recipes.recipe import Recipe, resolve

Say = Callable[[str], None]


def silent(line: str) -> None:
    """Say nothing of the progress."""


def data(
    source: Path | str,
    *,
    client: ClientId | None = None,
    examples: int = 1,
    files: bool = False,
    **changes: Any,
) -> DataSummary:
    """Read the data of a recipe as a run would, without training: sizes, what is not read, what
    clients share, and examples as the model sees them.

    Examples:
        >>> import coterie
        >>> small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
        >>> summary = coterie.data("synthetic", data=small)
        >>> sorted(summary.clients)
        ['client-0', 'client-1']

    Args:
        source: A recipe, a folder with one folder per client, or a table that names clients.
        client: The only client to show; None: all.
        examples: Training rows shown of each of the first eight clients.
        files: Whether to name the splits of each file or row.
        changes: Other values for fields of the recipe, see `Recipe.load`.

    Raises:
        Refused: A run would be refused, or the data are examples with labels.
    """
    return data_summary.summary_of(Recipe.load(source, **changes), examples, files, client)


def adapt(
    run: Path | str,
    data: Path | str | None = None,
    *,
    fresh: Path | str | None = None,
    client: ClientId | None = None,
    out: Path | str | None = None,
    train: bool = True,
    iterations: int | None = None,
    me: Sequence[str] = (),
    say: Say = silent,
) -> "new_client.Adapted | refits.Refitted":
    """Make a personal model for a new client, or refit a client's to new text.

    Examples:
        >>> import coterie, pathlib
        >>> small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
        >>> short = {"name": "fedavg", "rounds": 1, "local_steps": 1}
        >>> run = coterie.run("synthetic", out="words", data=small, method=short)
        >>> text = pathlib.Path("carla.txt")
        >>> _ = text.write_text("the water and the fire with the water " * 400)
        >>> coterie.adapt("words", text).model.about.client
        'carla'

    Args:
        run: The folder of a run, finished or not.
        data: The new client's images or texts, a folder or a file; no labels are needed.
        fresh: In its place, new texts of a client that has trained: its router, then its own
            experts, are refitted.
        client: The id; default: the name of `data`.
        out: A new folder, or the one of the same call before; default: clients/ID in the run's
            folder.
        train: Whether a language model is trained on the texts; classifiers need no training.
        iterations: The most local iterations; default: as many as a client of the run does.
        me: Whose messages in `data` are the answers, if they are an archive, see `data.me`.
        say: Is called with a line after every evaluation on validation text.

    Returns:
        The model with its effect and costs, of `fresh` the effect of refitting.

    Raises:
        Refused: As the command: nothing was started.
        ClientError: The client's computation failed.
        SaveError: The model could not be written.
    """
    folder = None if out is None else Path(out)
    if fresh is not None:
        if data is not None or me or client is None or not train:
            raise Refused(
                "fresh refits a client that has trained: it needs client, and neither data, me "
                "nor train=False",
                "For a new client give data alone.",
            )
        return refits.refit(Path(run), client, Path(fresh), folder, iterations=iterations, say=say)
    if data is None:
        raise Refused("adapt needs the client's data", "Give data, or fresh.")
    trains = train and resolve(Path(run)).model.kind == "language"
    training = new_client.Training(iterations, say) if trains else None
    path = Path(data).resolve()
    id = client or (path.name if path.is_dir() else path.stem)
    folder = folder or Path(run) / "clients" / encoded(id)
    # nothing replaces the models of clients that have trained
    trained = Result.read(Path(run)).clients if (Path(run) / RESULT).is_file() else ()
    with _replacing(folder, ABOUT if id not in trained else ""):
        mine = tuple(me)
        return new_client.adapt(Path(run), Path(data), client, folder, training=training, me=mine)


def export(
    run: Path | str,
    out: Path | str,
    *,
    client: ClientId | None = None,
    everyone: bool = False,
    format: str = "peft",
    data: Path | str | None = None,
    base: str | None = None,
    say: Say = silent,
    **options: Any,
) -> list[frame.Exported]:
    """Write models of a run for another program, and run there what was written.

    Examples:
        >>> import coterie
        >>> small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
        >>> short = {"name": "fedavg", "rounds": 1, "local_steps": 1}
        >>> run = coterie.run("synthetic", out="words", data=small, method=short)
        >>> model = coterie.export("words", "adapter", client="client-0")[0]
        >>> "adapter_config.json" in model.files
        True

    Args:
        run: A run's folder, or a client's folder in it.
        out: A new or empty folder, or one of an export before, which is replaced.
        client: Whose model; not needed if there is only one.
        everyone: Whether to export all clients, over one base: `--all`.
        format: peft, mixtral, gguf, onnx or web.
        data: The client's own text, if the run's folder does not name it.
        base: Path or Hub id of the base, if it has moved since the run.
        say: Is called with a line before each client.
        options: `part`, `expert`, `precision`, `base_precision` and `chat`, as of the command.

    Raises:
        Refused: The format, its packages, the client, its text or the folder cannot be used.
        ExportError: The export does not run, or its results differ from the model's.
        SaveError: The files could not be written.
    """
    source = Source(Path(run), client, everyone, base, None if data is None else Path(data))
    with _replacing(Path(out), frame.SUMMARY):
        return frame.export(source, format, Path(out), say=say, **options)


def push(run: Path | str, repo: str, **options: Any) -> pushes.Pushed:
    """Publish the shared part of a run, or one client's personal model, on the Hugging Face Hub.

    Examples:
        >>> import coterie
        >>> try:
        ...     coterie.push("mine", "me/ann", client="ann")
        ... except coterie.CoterieError as error:
        ...     print(error.problem)
        mine holds no personal models

    Args:
        run: The run's folder, or a client's folder for a personal model.
        repo: The repository, `name` or `owner/name`. It is created if it does not exist.
        options: `client`, or `shared`; `publish_personal`, by which a personal model's owner agrees
            that it leaves; `public`; `license`; and `say`, called with lines on the progress.

    Raises:
        Refused: The owner has not agreed, or the repository is public without `public`.
        CoterieError: The Hub does not accept the model.
    """
    return pushes.push(Path(run), repo, **options)


def pull(
    repo: str, out: Path | str, *, revision: str | None = None, most_gb: float = 2.0
) -> pulls.Pulled:
    """Fetch a model that `push` published, and verify it. It is data and runs no code.

    Examples:
        >>> import coterie
        >>> try:
        ...     coterie.pull("not a name", "there")
        ... except coterie.Refused as error:
        ...     print(error.remedy)
        Names are like me/my-model.

    Args:
        repo: The repository, `owner/name`.
        out: A new folder, or one of the same call before, whose files are as they were pulled.
        revision: A commit, branch or tag; default: the newest commit.
        most_gb: The most GiB of a file of tensors.

    Raises:
        Refused: The folder exists, or the repository holds what no model of coterie has.
        CheckpointError: A file is damaged.
        CoterieError: The Hub does not give the model.
    """
    with _replacing(Path(out), pushes.CARD):
        return pulls.pull(repo, Path(out), revision=revision, most_bytes=int(most_gb * 2**30))


@contextmanager
def _replacing(folder: Path, marker: str) -> Iterator[None]:
    """Move a folder away that the same call wrote before, as its marker and checksums show, and
    back if the block fails: a cell of a notebook is run again. Without a marker, nothing is moved.
    """
    before = folder.with_name(f".{folder.name}.before")
    written = marker != "" and (folder / marker).is_file() and (folder / SUMS).is_file()
    if written:
        try:
            check_all_sums(folder)
        except CheckpointError:
            written = False  # somebody has changed it, and may want to keep that
    if not written:
        yield
        return
    folder.rename(before)
    try:
        yield
    except BaseException:
        before.rename(folder)
        raise
    shutil.rmtree(before)


@dataclass
class Served(AbstractContextManager["Served"]):
    """A page or an interface for programs, served until it is closed or its block ends.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> with coterie.serve("digits", port=0, clients=["c0-0"]) as page:
        ...     print(page.address.partition(":")[0])
        http
    """

    address: str
    token: str | None = None  # the API key that callers send; None: it is in the page's link
    stack: ExitStack = field(default_factory=ExitStack, repr=False)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Serve no longer."""
        self.stack.close()

    def _repr_html_(self) -> str:
        return f'<a href="{self.address}" target="_blank">{self.address}</a>'


_open: dict[int, Served] = {}


def serve(
    run: Path | str,
    *,
    clients: Sequence[ClientId] | None = None,
    port: int = 7860,
    api: bool = False,
    chat: bool = False,
    base: str | None = None,
    follow: bool = False,
    say: Say = print,
    **settings: Any,
) -> Served:
    """Serve a run's models on this machine: as a page, or with `api` by OpenAI's protocol.

    Examples:
        >>> import coterie
        >>> run = coterie.run("cobo-digits", out="digits", method={"rounds": 1}, compare_with=[])
        >>> page = coterie.serve("digits", port=0, clients=["c0-0"])
        >>> page.address.startswith("http://127.0.0.1:")
        True
        >>> page.close()

    Args:
        run: A run's folder, or a client's folder in it.
        clients: Whose models; default: all.
        port: The port; 0 is any free one. What was served there before, by this function, is closed
            first.
        api: Whether to serve programs instead of a page.
        chat: Whether the page is for answers to messages.
        base: Path or Hub id of the base, if it has moved since the run.
        follow: Whether the weights of a mixture of models follow what is written.
        say: Is called with one line about each internal error.
        settings: With `api`: `token`, `host`, `rows`, `queue`, `context`, `access_log`.

    Raises:
        Refused: The port is taken, or classifiers are to continue text.
        CheckpointError: There are no such models.
    """
    from coterie.personal.api import server
    from coterie.personal.ui import keyboard, page

    if port in _open:
        _open.pop(port).close()
    models = load_all(Path(run), clients, base=base, follow=follow)
    language = {i: model for i, model in models.items() if isinstance(model, PersonalModel)}
    classifiers = {i: m for i, m in models.items() if isinstance(m, PersonalClassifier)}
    if (api or chat) and classifiers:
        raise Refused(f"{run} holds classifiers, which continue no text", "Leave out api and chat.")
    stack = ExitStack()
    if api:
        chosen = server.Settings(port, **settings)
        address = stack.enter_context(server.served(language, chosen, say))
        served = Served(address, chosen.token, stack)
    else:
        if settings:
            raise Refused(f"{next(iter(settings))} needs api", "Give api=True, or leave it out.")
        examples = keyboard.own_examples(Path(run), list(language), chat) if language else ()
        shown: Mapping[str, Any] = language or classifiers
        served = Served(
            stack.enter_context(page.served(shown, port, chat, examples, say)), None, stack
        )
    if port:
        _open[port] = served
    return served
