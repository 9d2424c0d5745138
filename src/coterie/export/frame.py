"""One export in any format: models are loaded, written to a temporary folder, run in their own
program, and only then moved to their place.
"""

import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

from coterie.core import names
from coterie.core.errors import CoterieError, Refused
from coterie.core.files import digest_of, make_folder, write_all_sums, write_json, writing
from coterie.core.importing import require
from coterie.core.isolation import isolated
from coterie.core.protocol import ClientId
from coterie.core.version import __version__
from coterie.data.chats.splits import ChatSplit
from coterie.data.federation import ClientData
from coterie.data.folders import Folders
from coterie.data.section import Section
from coterie.data.splits import Split
from coterie.export.check import Check, checked
from coterie.export.format import ClientModel, Format, Options, Written
from coterie.export.gguf import Gguf
from coterie.export.layers import single
from coterie.export.mixtral import Mixtral
from coterie.export.onnx import Onnx
from coterie.export.peft import Peft, portable
from coterie.export.web import Web
from coterie.models.architecture import files_of
from coterie.models.artifact import model_folders
from coterie.models.backbone import Backbone
from coterie.personal import PersonalModel, clients_of, folder_of, load_all, read_about
from coterie.runs.folder import names as files
from coterie.runs.problems.loading import own_text, section_of
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import LanguageSection


@dataclass(frozen=True)
class Source:
    """The models to export, and their texts."""

    run: Path  # a run's folder, or a client's folder
    client: ClientId | None = None  # None for the only client
    everyone: bool = False  # whether to export all clients of the run
    base: str | None = None  # path or Hub id of the base, if it has moved
    data: Path | None = None  # the client's own text, if the run's recipe does not name it

    def load(self) -> list[ClientModel]:
        """Load the models, all on one backbone, with the clients' validation and test texts, if
        available. Raises Refused if a client is missing, damaged or a classifier, or a base or text
        cannot be used.
        """
        if self.everyone and self.client is not None:
            raise Refused("--all and --client exclude each other", "Give one of them.")
        if self.everyone and self.data is not None:
            raise Refused("--data is the text of one client", "Give --client instead of --all.")
        ids: list[ClientId | None] = [*clients_of(self.run)] if self.everyone else [self.client]
        folders = [folder_of(self.run, id) for id in ids]
        abouts = [read_about(model_folders(folder)[0]) for folder in folders]
        bases = {self.base or about.base for about in abouts}
        bits = {about.quantise for about in abouts}
        problem = ""
        if len({about.chat_template for about in abouts}) > 1:
            problem = "different chat templates"
        elif len(bases) > 1 or len(bits) > 1:
            problem = f"different bases ({', '.join(sorted(bases))})"
        if problem:
            remedy = "Export them one by one, with --client."
            raise Refused(f"--all: the clients have {problem}", remedy)
        backbone = Backbone.load(bases.pop(), quantised=bits.pop(), plain=True)
        clients = None if self.client is None else [self.client]
        loaded = load_all(self.run, clients, backbone=backbone)
        models = cast(list[PersonalModel], [*loaded.values()])
        for model in models:
            if any(adapter.layout.projected for adapter in model.adapters):
                raise Refused(
                    f"{model.about.client}: no format holds a router of projections (fedamole)",
                    "Use the model by coterie generate or predict, or train fedlease, which has an "
                    "ordinary router.",
                )
            model.about = replace(model.about, base=self.base or model.about.base)
        recipe, absent = self._recipe(folders[0])
        data, absent = self._texts(models[0], recipe, absent)
        return [_with_text(model, data, absent) for model in models]

    def _recipe(self, folder: Path) -> tuple[Recipe | None, str]:
        """Return the recipe of the run, or None and the reason why there is none."""
        run = self.run if (self.run / files.RECIPE).is_file() else folder.parent.parent
        if not (run / files.RECIPE).is_file():
            return None, f"{run} has no {files.RECIPE}, which would name it"
        try:
            return recipes.resolve(run), ""
        except CoterieError as error:
            return None, error.problem

    def _texts(
        self, model: PersonalModel, recipe: Recipe | None, absent: str
    ) -> tuple[Mapping[ClientId, ClientData], str]:
        """Return the clients' data, and the reason if there are none."""
        about = model.about
        if self.data is not None:
            section = _section(model, recipe)
            client_data = own_text(
                section, model.tokenizer, about.context, about.seed, about.client, self.data
            )
            return {about.client: client_data}, ""
        if recipe is None:
            return {}, absent
        if not isinstance(recipe.model, LanguageSection) or not isinstance(recipe.data, Section):
            return {}, f"{recipe.name} is no recipe of language models"
        try:
            federation = recipe.data.load(
                model.tokenizer, recipe.model.context, order_seed=recipe.seed
            )
        except CoterieError as error:
            return {}, error.problem
        return federation.everyone, ""


def _section(model: PersonalModel, recipe: Recipe | None) -> Folders:
    """Return the settings to read a client's own files: those of the run."""
    if recipe is not None:
        return section_of(recipe.data)
    if model.about.content != "chats":
        return Folders()
    return Folders(content="chats", chat_template=model.about.chat_template)


def _with_text(
    model: PersonalModel, data: Mapping[ClientId, ClientData], absent: str
) -> ClientModel:
    client_data = data.get(names.normal(model.about.client))
    if client_data is None:
        return ClientModel(model, absent=absent or "it is no client of the recipe")
    valid, test = _apart(client_data.valid), _apart(client_data.test)
    return ClientModel(model, valid, test, train=client_data.train)


def _apart(split: Split) -> Split:
    """Return a split with one conversation in each row, since other programs have no masks."""
    return replace(split, packing=False) if isinstance(split, ChatSplit) else split


_ALL = (Peft(), Mixtral(), Gguf(), Onnx(), Web())
FORMATS: dict[str, Format] = {format.name: format for format in _ALL}
SUMMARY, VERSION = "export.json", 1
LIBRARIES = ("torch", "transformers", "safetensors")  # their versions are written to export.json


@dataclass(frozen=True)
class Exported:
    """The export of one client, and its results in its own program."""

    client: str
    folder: Path
    files: tuple[str, ...]  # the names of the client's own files
    shared: tuple[str, ...]  # the names of the files that all clients share
    notes: tuple[str, ...]  # sentences that the user has to know
    check: Check  # the results in the format's own program
    absent: str  # the reason why the perplexity was not measured

    @property
    def size(self) -> str:
        """The size of the files, in words."""
        own_bytes, shared_bytes = (
            sum((self.folder / name).stat().st_size for name in files)
            for files in (self.files, self.shared)
        )
        return f"{own_bytes:,} bytes" + (
            f", and {shared_bytes:,} that all clients share" if shared_bytes else ""
        )

    @property
    def sentences(self) -> list[str]:
        """The results, sentence by sentence."""
        missing = [f"its perplexity was not measured: {self.absent}"] if self.absent else []
        return self.check.sentences + missing


@isolated()
def export(
    source: Source,
    format: str,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    **given: Any,
) -> list[Exported]:
    """Write models of a run for another program, check them in it, and return the exports by
    client, see `coterie.export`. `given` are fields of `Options`; parts and precisions that are not
    given are the format's first.
    """
    kind, options = _chosen(format, **given)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not an empty folder", "Give --out a new folder.")
    clients = source.load()
    make_folder(out.parent)
    for client in clients:
        kind.check(client, options)
    clients = [single(client, say) for client in clients]
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new = Path(beside) / "export"
        make_folder(new)
        with quiet():
            exported = _write_all(kind, options, clients, new, source.everyone, say)
        with writing(out, "Free some space there, or choose another --out."):
            # it is empty, and some systems cannot rename a folder to the name of another
            if out.exists():
                out.rmdir()
            os.rename(new, out)
    return [replace(one, folder=out / one.folder.relative_to(new)) for one in exported]


def _chosen(
    name: str,
    part: str | None = None,
    precision: str | None = None,
    expert: str | None = None,
    base_precision: str | None = None,
    chat: bool = False,
) -> tuple[Format, Options]:
    """Return a format and its options, by default the format's first. Raises Refused if a format,
    part, precision or --chat does not exist, or a package is missing.
    """
    if name not in FORMATS:
        raise Refused(
            f"--format {name}: unknown",
            "; ".join(f"{known}: {format.about}" for known, format in FORMATS.items()) + ".",
        )
    format = FORMATS[name]
    if format.packages:
        require(f"--format {name}", format.extra, *format.packages)
    if expert is not None and part is None and "generalist" in format.parts:
        part = "generalist"
    for option, value, known in (
        ("--part", part, format.parts),
        ("--precision", precision, format.precisions),
        ("--base-precision", base_precision, format.base_precisions),
    ):
        if value is not None and value not in known:
            remedy = f"It has: {', '.join(known)}." if known else f"Leave {option} out."
            raise Refused(f"--format {name} has no {option} {value}", remedy)
    if chat and not format.chats:
        with_chats = ", ".join(known for known, other in FORMATS.items() if other.chats)
        problem = f"--format {name} has no --chat"
        raise Refused(problem, f"Leave it out, or use --format {with_chats}.")
    chosen_part = part or format.parts[0]
    chosen_base = base_precision or next(iter(format.base_precisions), "")
    options = Options(chosen_part, precision or format.precisions[0], expert, chosen_base, chat)
    if expert is not None and options.part != "generalist":
        problem = f"--expert {expert} is for an export of one expert"
        raise Refused(problem, "Use --format peft --part generalist, or leave --expert out.")
    return format, options


def _write_all(
    format: Format,
    options: Options,
    clients: Sequence[ClientModel],
    folder: Path,
    several: bool,
    say: Callable[[str], None],
) -> list[Exported]:
    format.write_base(clients, folder, options)
    exported, entries = [], {}
    for client in clients:
        say(f"{client.client} ...")
        client_folder = folder
        if several and not format.shares_base:
            make_folder(client_folder := folder / names.encoded(client.client))
        written = format.write(client, client_folder, options)
        if client.mixture is not None:
            notes, details = (client.note, *written.notes), written.details
            details |= {"mixture": client.note}
            written = replace(written, likeness="that adapter", notes=notes)
        check = checked(format, options, client, written)
        entries[client.client] = _entry(client, folder, written, check)
        parts = written.files, written.shared, written.notes
        exported.append(Exported(client.client, client_folder, *parts, check, client.absent))
    write_json(folder / SUMMARY, _summary(format, options, clients[0]) | {"clients": entries})
    write_all_sums(folder)
    return exported


def _entry(client: ClientModel, folder: Path, written: Written, check: Check) -> dict[str, Any]:
    about = asdict(client.model.about)
    del about["base"], about["client"]
    paths = [written.folder / name for name in (*written.files, *written.shared)]
    files = {
        path.relative_to(folder).as_posix(): {
            "bytes": path.stat().st_size,
            "sha256": digest_of(path),
        }
        for path in paths
    }
    return {"files": files, "check": asdict(check), "model": about} | written.details


def _summary(format: Format, options: Options, client: ClientModel) -> dict[str, Any]:
    base = client.model.about.base
    packages = dict.fromkeys([*LIBRARIES, *format.packages])
    return {
        "format": VERSION,
        "kind": format.name,
        "part": options.part,
        "precision": options.precision,
        **({"base_precision": options.base_precision} if options.base_precision else {}),
        **({"chat": True} if options.chat else {}),
        "base": {
            "name": portable(base),
            "quantised": client.model.about.quantise,
            "sha256": {path.name: digest_of(path) for path in files_of(base)},
        },
        "text": client.serving.described,
        **format.interface(client),
        "versions": {"coterie": __version__, "python": platform.python_version()}
        | {name: version(name) for name in packages},
    }


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the libraries' warnings about each other, and their progress bars."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
