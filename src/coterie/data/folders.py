"""Data in folders: one folder of text per client."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from coterie.core import names
from coterie.core.errors import DataError
from coterie.data.chats import files
from coterie.data.chats.fields import ChatFields
from coterie.data.documents import cut, read_many
from coterie.data.federation import check_id
from coterie.data.refusals import Refusals
from coterie.data.section import Fractions, Source, Texts, stamps
from coterie.data.splits import SPLITS
from coterie.data.splitting import Document, keyed_by_text, split_clients

ENDINGS = (".txt", ".md", ".jsonl", ".jsonl.gz")  # of text; of conversations see chats.files

_OF_RUNS = (
    "recipe.yaml",
    "comparison.json",
    "inputs.json",
)  # one of them is in every folder of a run
# documents: with fewer, three splits would be lopsided or empty, so texts are cut into chunks first
_FEW = 10

Files = dict[str, list[Path]]  # by split, or all of them under ""


class Folders(ChatFields):
    """One folder per client; its name is the client's id: letters and digits of any alphabet,
    single spaces, and `-_.'&+@`.

    A folder holds text files (*.txt, *.md: a document each) and JSON lines (*.jsonl, *.jsonl.gz: a
    document per line), also in folders below it. Documents are split by seed; where there are fewer
    than ten, they are cut at blank lines into chunks of about 2,000 characters first. But a folder
    with `train`, `valid` and `test` (each a file of these kinds, or a folder of such) is taken as
    it is. Hidden files, files of other kinds, and what runs have written into the folder are left
    alone.

    With `content: chats` a folder holds conversations instead: *.jsonl, *.jsonl.gz, *.json,
    *.parquet or *.csv, one a row, which are not cut but split as they are.
    """

    kind: Literal["folders"] = "folders"
    path: Annotated[
        Path | None, Field(description="folder with one folder per client; required")
    ] = None
    text_column: Annotated[
        str, Field(min_length=1, description="column of JSON lines that has the text")
    ] = "text"
    fractions: Annotated[
        Fractions,
        Field(description="shares of train, valid and test if a folder has no splits of its own"),
    ] = (
        0.8,
        0.1,
        0.1,
    )

    @property
    def title(self) -> str:
        return f"folders of {self.path}"

    def source(self) -> Source:
        with Refusals() as refusals:
            found: dict[str, Files] = {}
            for folder in self._folders():
                id = names.normal(folder.name)
                with refusals.gather():
                    check_id(id)
                if id in found:
                    refusals.add(
                        f"two folders of {self.path} are both named {id!r}, with accents stored "
                        f"differently",
                        "Rename one of them.",
                    )
                with refusals.gather(f"client {id!r}: "):
                    found[id] = _find(folder, self.endings)
        paths = {id: [str(path) for path in own] for id, own in found.items()}
        parts = [part for own in found.values() for part in own.values()]
        every = list(chain.from_iterable(parts))
        return Source([paths, stamps(every)], lambda: self._read(found))

    def _folders(self) -> list[Path]:
        remedy = "Name a folder that has one folder of text per client: --set data.path=DIR."
        if self.path is None:
            raise DataError("data.path is missing", remedy)
        path = self.path.expanduser()
        if not path.is_dir():
            raise DataError(
                f"data.path: {path} {'is not a folder' if path.exists() else 'does not exist'}",
                remedy,
            )
        found = (
            p
            for p in path.iterdir()
            if p.is_dir() and not p.name.startswith(".") and not _of_runs(p)
        )
        folders = sorted(
            found, key=lambda p: names.normal(p.name)
        )  # so that the order is the same on every disk
        if not folders:
            raise DataError(
                f"data.path: {path} contains no folders, so there are no clients", remedy
            )
        return folders

    def _read(self, found: dict[str, Files]) -> Texts:
        parts: dict[str, list[list[Document]]] = {}
        with Refusals() as refusals:
            for id, own in found.items():
                with refusals.gather(f"client {id!r}: "):
                    parts[id] = self._parts(own)
        return self._in_splits(parts)

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of files end that are read."""
        return ENDINGS if self.content == "text" else files.ENDINGS

    def _parts(self, paths: Files) -> list[list[Document]]:
        """Return the documents of a client by split if its folder fixes them, else all in one."""
        if "" in paths:
            return [self.documents(paths[""], few=True)]
        return [self.documents(paths[name]) for name in SPLITS]

    def _in_splits(self, clients: Mapping[str, list[list[Document]]]) -> Texts:
        free = {id: parts[0] for id, parts in clients.items() if len(parts) == 1}
        together = self.near_duplicates == "together"
        texts = split_clients(free, self.fractions, self.seed, together)
        return {
            id: texts.get(id) or [[document.text for document in part] for part in parts]
            for id, parts in clients.items()
        }

    def documents(self, paths: Sequence[Path], few: bool = False) -> list[Document]:
        """Return the documents of files: texts, or conversations as JSON.

        Args:
            paths: The files.
            few: Whether texts are cut into chunks where there are few.

        Raises:
            DataError: All that is wrong with any of the files.
        """
        if self.content == "chats":
            return self.conversations(files.rows_of(paths))
        texts = read_many(paths, self.text_column)
        if few and len(texts) < _FEW:
            texts = [chunk for text in texts for chunk in cut(text)]
        return keyed_by_text(texts) if few else [Document(text, text) for text in texts]

    def read_one(self, path: Path) -> Sequence[Sequence[str]]:
        """Read the documents of one client, as if its folder, or its only file, were in the folder
        of clients: train, valid and test.

        Raises:
            DataError: No text, splits that are incomplete, or files that cannot be read.
        """
        folder = path.is_dir()
        paths = _find(path, self.endings) if folder else {"": text_files(path, self.endings)}
        return self._in_splits({"": self._parts(paths)})[""]


def _find(folder: Path, endings: tuple[str, ...]) -> Files:
    """Return the files of a client: by split if the folder fixes them, else all under "".

    Raises:
        DataError: No text at all, or splits that are incomplete or have other text beside them.
    """
    entries = {
        entry: found
        for entry in sorted(folder.iterdir())
        if (found := text_files(entry, endings, frozenset({folder.resolve()})))
    }
    fixed: dict[str, list[Path]] = {name: [] for name in SPLITS}
    for entry, found in entries.items():
        if (name := _stem(entry)) in fixed:
            fixed[name] += found
    present = [name for name in SPLITS if fixed[name]]
    every = [path for found in entries.values() for path in found]
    if not every:
        raise DataError(
            f"no text in {folder}", f"Put files into it that end in {', '.join(endings)}."
        )
    if not present:
        return {"": every}
    if missing := [name for name in SPLITS if name not in present]:
        raise DataError(
            f"{folder} has {', '.join(present)} but no {', '.join(missing)}",
            "Give all three of them, or none.",
        )
    if beside := [entry.name for entry in entries if _stem(entry) not in SPLITS]:
        raise DataError(
            f"{folder} has other text beside train, valid and test: {', '.join(beside)}",
            "Move it into one of them, or elsewhere.",
        )
    return fixed


def text_files(
    entry: Path, endings: tuple[str, ...] = ENDINGS, above: frozenset[Path] = frozenset()
) -> list[Path]:
    """Return the text files that an entry of a folder is or holds; none of those that are hidden,
    or that a run has written.

    Args:
        entry: A file or folder.
        endings: How the names of such files end.
        above: The folders that led to it.

    Raises:
        DataError: A link leads nowhere or back to a folder that it is in, or what is called a text
            is no file.
    """
    if entry.name.startswith("."):
        return []
    try:
        if entry.is_dir():
            if _is_run(entry):
                return []
            if (own := entry.resolve()) in above:
                raise DataError(
                    f"{entry} is a link to {own}, the folder that contains it", "Remove that link."
                )
            return [
                path
                for inner in sorted(entry.iterdir())
                for path in text_files(inner, endings, above | {own})
            ]
    except OSError as error:
        raise DataError(
            f"{entry}: cannot be read ({error.strerror})", "Check its permissions."
        ) from None
    if not entry.name.endswith(endings):
        return []
    if not entry.is_file():
        what = "a broken link" if entry.is_symlink() else "not a regular file"
        raise DataError(f"{entry}: {what}", "Remove it, or put a text file in its place.")
    return [entry]


def _is_run(folder: Path) -> bool:
    """Whether runs write into a folder: one that `coterie run` or `coterie compare` has made, or
    was sent to.
    """
    return (folder / "lock").is_file() and any((folder / name).is_file() for name in _OF_RUNS)


def _of_runs(folder: Path) -> bool:
    """Whether a folder is no client, but a run's, in a run's, or of runs: it holds no text
    besides.
    """
    try:
        if text_files(folder):
            return False
    except DataError:  # of a client, whose texts are read and refused later
        return False
    return any(map(_is_run, (folder, folder.parent, *folder.glob("*/"), *folder.glob("*/*/"))))


def _stem(entry: Path) -> str:
    return entry.name.partition(".")[0]
