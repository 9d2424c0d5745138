"""One export, whatever its format: models are loaded, written beside the folder, run in their own
program, and only then put in their place.
"""

import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from coterie.core import names
from coterie.core.checksums import write_all_sums
from coterie.core.errors import Refused, SaveError
from coterie.core.files import digest_of, make_folder, write_json
from coterie.core.version import __version__
from coterie.export.check import Check, checked
from coterie.export.format import ClientModel, Format, Options, Written
from coterie.export.peft import portable
from coterie.export.registry import chosen
from coterie.export.texts import Source
from coterie.models.architecture import files_of

SUMMARY, VERSION = "export.json", 1
LIBRARIES = ("torch", "transformers", "safetensors")  # whose versions are written down


@dataclass(frozen=True)
class Exported:
    """What was written for one client, and how it does in its own program.

    Args:
        client: Its id.
        folder: Where its files are.
        files: Their names in it.
        shared: Of the files that are all clients'.
        notes: What its user has to know, sentence by sentence.
        check: How it does.
        absent: Why its perplexity was not measured; "" where it was.
    """

    client: str
    folder: Path
    files: tuple[str, ...]
    shared: tuple[str, ...]
    notes: tuple[str, ...]
    check: Check
    absent: str

    @property
    def size(self) -> str:
        """Of its files, for people."""
        own_bytes, shared_bytes = (
            sum((self.folder / name).stat().st_size for name in files)
            for files in (self.files, self.shared)
        )
        return f"{own_bytes:,} bytes" + (
            f", and {shared_bytes:,} that all clients share" if shared_bytes else ""
        )

    @property
    def sentences(self) -> list[str]:
        """How it does, for people."""
        missing = [f"its perplexity was not measured: {self.absent}"] if self.absent else []
        return self.check.sentences + missing


def export(
    source: Source,
    format: str,
    out: Path,
    *,
    part: str | None = None,
    precision: str | None = None,
    expert: str | None = None,
    base_precision: str | None = None,
    chat: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> list[Exported]:
    """Write models of a run for another program, and run what was written in it.

    Args:
        source: Which models, and by which text.
        format: A name of `FORMATS`.
        out: An empty or new folder; it is filled whole or not at all.
        part: Which part of the models; default: the first of the format's.
        precision: Of what is written; likewise.
        expert: The expert, of a part that is one.
        base_precision: Of the base, of a format that writes it apart; default: the first.
        chat: Whether what is written answers messages, by the chat template.
        say: Is told a line before each client.

    Returns:
        What was written, client by client.

    Raises:
        Refused: The format, its packages, the client, its text, its chat template or the folder
            will not do.
        DataError: There is no chat template for `chat`.
        ExportError: What was written does not run, or not as the model does.
        SaveError: It could not be written.
    """
    kind, options = chosen(format, part, precision, expert, base_precision, chat)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not an empty folder", "Give --out a new folder.")
    clients = source.load()
    make_folder(out.parent)
    for client in clients:
        kind.check(client, options)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as beside:
        new = Path(beside) / "export"
        make_folder(new)
        with quiet():
            exported = _written(kind, options, clients, new, source.everyone, say)
        _put_in_place(new, out)
    return [_moved(entry, new, out) for entry in exported]


def _written(
    format: Format,
    options: Options,
    clients: Sequence[ClientModel],
    folder: Path,
    several: bool,
    say: Callable[[str], None],
) -> list[Exported]:
    """Write and check each client's files, and the summary."""
    format.write_base(clients, folder, options)
    exported, entries = [], {}
    for client in clients:
        say(f"{client.client} ...")
        client_folder = folder
        if several and not format.shares_base:
            make_folder(client_folder := folder / names.encoded(client.client))
        written = format.write(client, client_folder, options)
        check = checked(format, options, client, written)
        entries[client.client] = _entry(client, folder, written, check)
        exported.append(
            Exported(
                client.client,
                client_folder,
                written.files,
                written.shared,
                written.notes,
                check,
                client.absent,
            )
        )
    write_json(folder / SUMMARY, _summary(format, options, clients[0]) | {"clients": entries})
    write_all_sums(folder)
    return exported


def _entry(client: ClientModel, folder: Path, written: Written, check: Check) -> dict[str, Any]:
    """Describe what was written for one client."""
    about = asdict(client.model.about)
    del about["base"], about["client"]
    files = {
        (written.folder / name).relative_to(folder).as_posix(): _file(written.folder / name)
        for name in (*written.files, *written.shared)
    }
    return {"files": files, "check": asdict(check), "model": about} | written.details


def _file(path: Path) -> dict[str, Any]:
    """Describe a file."""
    return {"bytes": path.stat().st_size, "sha256": digest_of(path)}


def _summary(format: Format, options: Options, client: ClientModel) -> dict[str, Any]:
    """Describe the export as a whole."""
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
    """Within the block, libraries neither warn of each other nor show how far loading is."""
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


def _put_in_place(new: Path, out: Path) -> None:
    try:
        if out.exists():
            out.rmdir()  # it is empty; not everywhere can a folder take the place of another
        os.rename(new, out)
    except OSError as error:
        raise SaveError(
            f"cannot write {out}: {error.strerror}",
            "Free some space there, or choose another --out.",
        ) from error


def _moved(exported: Exported, new: Path, out: Path) -> Exported:
    return Exported(**(vars(exported) | {"folder": out / exported.folder.relative_to(new)}))
