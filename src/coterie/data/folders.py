"""Data in folders: one folder of text per client."""

import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from pydantic import Field

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.foreign import refusing
from coterie.data import archives
from coterie.data.chats.fields import ChatFields
from coterie.data.federation import check_id
from coterie.data.fetching import PLAIN, cut, read_many
from coterie.data.refusals import LeftOut, Refusals, kinds, outward_links
from coterie.data.rows import ENDINGS as TABLES
from coterie.data.rows import ending_of, rows_of
from coterie.data.section import Fractions, Source, Texts, choose, stamps
from coterie.data.splits import SPLITS
from coterie.data.splitting import (
    Document,
    LocatedText,
    fixed_places,
    keyed_by_text,
    split_clients,
    where_of,
)

# of text; conversations are in tables
ENDINGS = (*PLAIN, ".jsonl", ".jsonl.gz")

# one of them is in every folder of a run
_OF_RUNS = ("recipe.yaml", "comparison.json", "inputs.json")
# with fewer documents, three splits would be uneven or empty, so texts are cut into chunks first
_FEW = 10

# other names of splits, taken for them where all three are there
_USUAL = {"training": "train", "validation": "valid", "val": "valid", "dev": "valid"}
_USUAL |= {"testing": "test"}

Files = dict[str, list[Path]]  # by split, or all of them under ""


class Folders(ChatFields):
    """One folder per client; its name is the client's id: letters and digits of any alphabet,
    single spaces, and `-_.'&+@`.

    A folder holds text files (*.txt, *.md: a document each) and JSON lines (*.jsonl, *.jsonl.gz: a
    document per line), also in folders below it; endings may have capitals. Documents are split by
    seed; where there are fewer than ten, they are cut at blank lines into chunks of about 2,000
    characters first. But a folder with `train`, `valid` and `test` (each a file of these kinds, a
    folder of such, or shards: `train-00000-of-00002.jsonl`) is taken as it is. Files of other kinds
    are not read, and counted; hidden files and what runs have written into the folder are left
    alone.

    With `content: chats` a folder holds conversations instead: *.jsonl, *.json, *.csv, *.tsv (also
    with .gz behind it) or *.parquet, one a row, which are not cut but split as they are; or
    people's own archives, see `coterie.data.archives`, in which `me` says who the client is.
    """

    kind: Literal["folders"] = "folders"
    path: Path | None = None  # folder with one folder per client; required
    text_column: str = Field("text", min_length=1)  # column of JSON lines that has the text
    # shares of train, valid and test if a folder has no splits of its own
    fractions: Fractions = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        return f"folders of {self.path}"

    def source(self) -> Source:
        with Refusals() as refusals:
            files: dict[str, Files] = {}
            skipped: dict[str, list[Path]] = {}
            for folder in self._folders():
                id = names.normal(folder.name)
                with refusals.gather():
                    check_id(id)
                if id in files:
                    refusals.add(
                        f"two folders of {self.path} are both named {id!r}, with accents stored "
                        f"differently",
                        "Rename one of them.",
                    )
                with refusals.gather(f"client {id!r}: "):
                    files[id], skipped[id] = _find(folder, self.endings)
        self._check_me(files)
        paths = {id: [str(path) for path in by_split] for id, by_split in files.items()}
        parts = [part for by_split in files.values() for part in by_split.values()]
        every = [file for path in chain.from_iterable(parts) for file in archives.files_of(path)]
        notes: list[str] = []
        assert self.path is not None
        links = outward_links(self.path.expanduser(), every)
        skipped[""] = self._beside()
        read = partial(self._read, files, notes)
        return Source([paths, stamps(every)], read, notes=notes, skipped=skipped, links=links)

    def _check_me(self, clients: Mapping[str, Files]) -> None:
        if self.me is None:
            return
        if isinstance(self.me, dict):
            choose(clients, list(self.me), "me", str(self.path))
        parts = (paths for files in clients.values() for paths in files.values())
        if not archives.archives_in(chain.from_iterable(parts)):
            remedy = "Leave it out: other files say by their roles what the assistant writes."
            raise DataError(f"data.me: no archive in {self.path} that it could be about", remedy)

    def _beside(self) -> list[Path]:
        """Return the files outside the clients' folders."""
        assert self.path is not None
        beside = (p for p in sorted(self.path.expanduser().iterdir()) if not p.is_dir())
        return [path for entry in beside for path in files_in(entry)]

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
        visible = (p for p in path.iterdir() if p.is_dir() and not p.name.startswith("."))
        # file systems list names in different orders
        folders = sorted(
            (p for p in visible if not _of_runs(p)), key=lambda p: names.normal(p.name)
        )
        if not folders:
            problem = f"data.path: {path} contains no folders, so there are no clients"
            raise DataError(problem, remedy)
        stems = [_USUAL.get(_stem(folder), _stem(folder)) for folder in folders]
        if len(stems) > 1 and {*SPLITS} >= {*stems}:
            problem = f"data.path: {path} has folders of splits ({', '.join(stems)}), not clients"
            raise DataError(problem, "Put them into a folder for each client: DIR/CLIENT/train.")
        return folders

    def _read(self, files: dict[str, Files], notes: list[str]) -> Texts:
        parts: dict[str, list[list[Document]]] = {}
        with Refusals() as refusals:
            for id, by_split in files.items():
                with refusals.gather(f"client {id!r}: "):
                    left_out = LeftOut()
                    parts[id] = self.of_client(id)._parts(by_split, left_out)
                    notes += left_out.sentences(f"{id}: ")
        return self._in_splits(parts)

    @property
    def endings(self) -> tuple[str, ...]:
        """The endings of the files to read."""
        return ENDINGS if self.content == "text" else TABLES

    def _parts(self, paths: Files, left_out: LeftOut) -> list[list[Document]]:
        """Return a client's documents by split if its folder fixes them, else as one list."""
        if "" in paths:
            return [self.documents(paths[""], True, left_out)]
        return [self.documents(paths[name], False, left_out) for name in SPLITS]

    def _in_splits(self, clients: Mapping[str, list[list[Document]]]) -> Texts:
        free = {id: parts[0] for id, parts in clients.items() if len(parts) == 1}
        fixed = fixed_places(parts for parts in clients.values() if len(parts) > 1)
        together = self.near_duplicates == "together"
        texts = split_clients(free, self.fractions, self.seed, together, fixed)
        return {
            id: texts.get(id) or [[document.text for document in part] for part in parts]
            for id, parts in clients.items()
        }

    def documents(
        self, paths: Sequence[Path], few: bool = False, left_out: LeftOut | None = None
    ) -> list[Document]:
        """Return the documents of files: texts, or conversations as JSON. With `few`, fewer than
        ten texts are cut into chunks. Raises DataError with all mistakes.
        """
        if self.content == "chats":
            exported = archives.archives_in(paths)
            tables = rows_of(path for path in paths if path not in exported)
            return self.conversations(chain(tables, archives.rows_of(exported, self.me)))
        texts = read_many(paths, self.text_column, left_out or LeftOut())
        if few and len(texts) < _FEW:
            texts = [LocatedText.at(where_of(text), chunk) for text in texts for chunk in cut(text)]
        return keyed_by_text(texts) if few else [Document(text, text) for text in texts]

    def read_one(self, path: Path) -> Sequence[Sequence[str]]:
        """Return one client's train, valid and test documents by its path. Raises DataError."""
        folder = path.is_dir()
        paths = _find(path, self.endings)[0] if folder else {"": text_files(path, self.endings)}
        return self._in_splits({"": self._parts(paths, LeftOut())})[""]


def _find(folder: Path, endings: tuple[str, ...]) -> tuple[Files, list[Path]]:
    """Return a client's files, by split if its folder fixes them, else under "", and others."""
    if archives.archives_in([folder]):
        return {"": text_files(folder, endings)}, []
    above = frozenset({folder.resolve()})
    visible = {entry: files_in(entry, above) for entry in sorted(folder.iterdir())}
    chosen = set(_texts(list(chain.from_iterable(visible.values())), endings))
    entries = {
        entry: texts
        for entry, paths in visible.items()
        if (texts := [path for path in paths if path in chosen])
    }
    stems = {entry: _stem(entry) for entry in entries}
    usual = {entry: _USUAL.get(stem, stem) for entry, stem in stems.items()}
    if {*usual.values()} >= {*SPLITS} and not {*stems.values()} >= {*SPLITS}:
        stems = usual
    fixed: Files = {name: [] for name in SPLITS}
    for entry, texts in entries.items():
        fixed.get(stems[entry], []).extend(texts)
    present = [name for name in SPLITS if fixed[name]]
    every = list(chain.from_iterable(entries.values()))
    skipped = [path for path in chain.from_iterable(visible.values()) if path not in chosen]
    if not every:
        what = "text" if endings == ENDINGS else "conversations (data.content is chats)"
        problem = f"no {what} in {folder}" + (f", but {kinds(skipped)}" if skipped else "")
        zipped = any(path.suffix.lower() == ".zip" for path in skipped)
        remedy = f"Put files into it that end in {', '.join(endings)}, or an archive as it is."
        raise DataError(problem, "Unpack what is zipped." if zipped else remedy)
    if not present:
        return {"": every}, skipped
    if missing := [name for name in SPLITS if name not in present]:
        problem = f"{folder} has {', '.join(present)} but no {', '.join(missing)}"
        raise DataError(problem, "Give all three of them, or none.")
    if beside := [entry.name for entry, stem in stems.items() if stem not in SPLITS]:
        problem = f"{folder} has other text beside train, valid and test: {', '.join(beside)}"
        raise DataError(problem, "Move it into one of them, or elsewhere.")
    return fixed, skipped


def text_files(entry: Path, endings: tuple[str, ...] = ENDINGS) -> list[Path]:
    """Return the text files of an entry, see `files_in`. Raises DataError."""
    return _texts(files_in(entry), endings)


def _texts(paths: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
    """Return the paths with these endings and the archives. Raises DataError for others."""
    exported = archives.archives_in(paths)
    if exported and endings == ENDINGS:
        raise archives.not_text(exported[0])
    named = {path for path in paths if ending_of(path.name, endings)}
    plain = {path for path in named if not archives.is_part_of_export(path, exported)}
    texts = [path for path in paths if path in exported or path in plain]
    for path in texts:
        if path not in exported and not path.is_file():
            what = "not a regular file" if path.exists() else "a broken link"
            raise DataError(f"{path}: {what}", "Remove it, or put a text file in its place.")
    return texts


def files_in(entry: Path, above: frozenset[Path] = frozenset()) -> list[Path]:
    """Return the files that an entry is or holds, without hidden files and those that a run has
    written. Raises DataError, also for a link to a folder `above` it.
    """
    if entry.name.startswith("."):
        return []
    with refusing(DataError, str(entry), "Check its permissions."):
        if entry.is_dir():
            if _is_run(entry):
                return []
            if archives.kind_of(entry):
                return [entry]
            if (target := entry.resolve()) in above:
                problem = f"{entry} is a link to {target}, the folder that contains it"
                raise DataError(problem, "Remove that link.")
            inner = (files_in(path, above | {target}) for path in sorted(entry.iterdir()))
            return list(chain.from_iterable(inner))
    return [entry]


def _is_run(folder: Path) -> bool:
    """Whether `coterie run` or `coterie compare` writes to a folder."""
    return (folder / "lock").is_file() and any((folder / name).is_file() for name in _OF_RUNS)


def _of_runs(folder: Path) -> bool:
    """Whether a folder without text belongs to a run or contains runs, so is not a client."""
    try:
        if text_files(folder):
            return False
    except DataError:  # a client; the error is raised again when its texts are read
        return False
    return any(map(_is_run, (folder, folder.parent, *folder.glob("*/"), *folder.glob("*/*/"))))


def _stem(entry: Path) -> str:
    """Return a name without endings and the number of a shard."""
    return re.sub(r"-\d{5}-of-\d{5}$", "", entry.name.partition(".")[0].lower())
