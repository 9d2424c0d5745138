"""Documents of text files, and data files below a root or from the Hugging Face Hub."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.core.errors import DataError
from coterie.core.importing import require
from coterie.data.plain_text import read_text
from coterie.data.refusals import SHOWN, LeftOut, Refusals
from coterie.data.rows import CHATS, CSV, JSON, LIKE_CHATS, ending_of, json_lines, rows_of
from coterie.data.splitting import LocatedText
from coterie.data.values import text_of

OFFLINE = "Without a network: --set data.root=DIR, or the environment variable COTERIE_DATA."

_BUILDERS = {".jsonl": "json"} | {f".{kind}": kind for kind in ("json", "parquet", "csv", "arrow")}

Format = Literal["json", "parquet", "csv", "arrow", "text"]

Root = Annotated[
    Path | None, Field(description="folder of data; null: the environment variable COTERIE_DATA")
]


def local(dataset: str, remedy: str) -> Path | None:
    """Return a local data set's path; None for the Hub's. Raises DataError if it is missing."""
    path = Path(dataset).expanduser()
    if not path.exists() and dataset.startswith((".", "/", "~")):
        raise DataError(f"data set {dataset}: no such folder or file", remedy)
    return path if path.exists() else None


def files_of(path: Path | None) -> list[Path]:
    """Return the files of a local data set."""
    if path is None or path.is_file():
        return [path] if path else []
    return sorted(file for file in path.rglob("*") if file.is_file())


def located(root: Path | None, files: Sequence[str]) -> list[Path] | None:
    """Return files below a root, or $COTERIE_DATA; None: neither is named. Raises DataError."""
    name = root or os.environ.get("COTERIE_DATA")
    if not name:
        return None
    paths = [Path(name).expanduser().resolve() / file for file in files]
    with Refusals() as refusals:
        for path in (path for path in paths if not path.is_file()):
            field = "data.root" if root else "COTERIE_DATA"
            remedy = f"Name the folder that has {', '.join(files)}: --set data.root=DIR."
            refusals.add(f"{field}: {path} does not exist", remedy)
    return paths


def fetch(
    dataset: str,
    subset: str | None,
    split: str,
    remedy: str,
    streaming: bool = False,
    revision: str | None = None,
    format: Format | None = None,
) -> Any:
    """Return one split of a data set, of the Hub or local: a `datasets.Dataset`, or an
    `IterableDataset` if streamed. Raises DataError with `remedy`.
    """
    require(f"data set {dataset}", "hub")
    from datasets import load_dataset

    path = local(dataset, remedy)
    options = {"name": subset, "split": split, "streaming": streaming, "revision": revision}
    with _refused(dataset, path, remedy):
        if (path and path.is_file()) or dataset.startswith("hf://"):
            builder = format or _builder(path or Path(dataset))
            return load_dataset(builder, data_files={"train": str(path or dataset)}, **options)
        return load_dataset(str(path or dataset), **options)


def fetch_splits(
    dataset: str, subset: str | None, splits: Sequence[str], columns: Sequence[str]
) -> list[Any]:
    """Return several splits of a data set of the Hub. Raises DataError if a column is missing."""
    data = [fetch(dataset, subset, split, OFFLINE) for split in splits]
    for part in data:
        if missing := [column for column in columns if column not in part.column_names]:
            lacks, has = ", ".join(map(repr, missing)), ", ".join(part.column_names)
            raise DataError(f"data set {dataset}: no column {lacks}, only {has}", OFFLINE)
    return data


@contextmanager
def _refused(dataset: str, path: Path | None, remedy: str) -> Iterator[None]:
    """Turn any error of the readers of a data set into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # datasets raises whatever its readers and the network do
        where = "" if path or isinstance(error, ValueError) else " from the Hub (offline?)"
        problem = f"cannot load data set {dataset}{where}: {type(error).__name__}: {error}"
        raise DataError(problem, remedy) from error


def tables(
    dataset: str,
    subset: str | None,
    split: str,
    remedy: str,
    revision: str | None = None,
    streaming: bool = False,
) -> list[Path] | None:
    """Return the files of a split of CSV, TSV or JSON, for the exact `coterie.data.rows`:
    `datasets` would guess types and merge columns. Files on the Hub are downloaded first. None for
    streamed JSON, which `datasets` reads without guessing, for other formats, and if the authors
    specify how the data are read. Raises DataError with `remedy`.
    """
    require(f"data set {dataset}", "hub")
    path = local(dataset, remedy)
    if path and path.is_file():
        return [path] if split == "train" and ending_of(path.name, (*CSV, *JSON)) else None
    from datasets import DownloadConfig, DownloadManager, load_dataset_builder

    with _refused(dataset, path, remedy):
        if dataset.startswith("hf://"):
            builder = load_dataset_builder(_builder(Path(dataset)), data_files={"train": dataset})
        else:
            builder = _described(str(path or dataset), subset, revision)
        urls = [str(url) for url in (builder.config.data_files or {}).get(split, ())]
        endings = CSV if streaming and not path else (*CSV, *JSON)
        if not urls or not all(ending_of(url, endings) for url in urls) or not _as_it_is(builder):
            return None
        config = DownloadConfig(token=builder.token)
        manager = DownloadManager(download_config=config, record_checksums=False)
        return [Path(path_name) for path_name in manager.download(urls)]


def _described(dataset: str, subset: str | None, revision: str | None) -> Any:
    """Return the builder of a data set; offline, that of its downloaded copy."""
    from datasets import load_dataset_builder
    from huggingface_hub import snapshot_download

    try:
        return load_dataset_builder(dataset, subset, revision=revision)
    except ConnectionError:
        with suppress(FileNotFoundError):  # also raised by huggingface_hub as an OSError
            folder = snapshot_download(
                dataset, repo_type="dataset", revision=revision, local_files_only=True
            )
            return load_dataset_builder(folder, subset)
        raise


def _as_it_is(builder: Any) -> bool:
    """Whether the authors of a data set specify neither types nor how files are read."""
    config = builder.config
    kept = ("name", "version", "data_dir", "data_files", "description")
    plain = type(config)(**{name: getattr(config, name) for name in kept})
    if getattr(config, "sep", "") == "\t":  # of TSV, which its ending says
        plain = replace(plain, sep="\t")
    return builder.info.features is None and config == plain


def _builder(path: Path) -> str:
    for ending in (suffix for suffix in path.suffixes if suffix in _BUILDERS):
        return _BUILDERS[ending]
    problem = f"data set {path}: files of this kind cannot be read"
    raise DataError(problem, f"Files end in {', '.join(_BUILDERS)}, possibly followed by .gz.")


def download(dataset: str, file: str) -> Path:
    """Download a file of a data set of the Hub and return its path. Raises DataError."""
    import huggingface_hub

    try:
        return Path(huggingface_hub.hf_hub_download(dataset, file, repo_type="dataset"))
    except Exception as error:  # whatever the network does
        problem = f"cannot load {file} of data set {dataset} from the Hub (offline?): {error}"
        raise DataError(problem, OFFLINE) from error


CHUNK = 2000  # characters
PLAIN = (".txt", ".text", ".md", ".markdown")  # endings of files that are one document each

Row = dict[str, Any]

# Where text may be cut, best first: before a blank line, behind a line, behind a space.
_BOUNDARIES = tuple(map(re.compile, (r"(?<=\n)(?=[^\S\n]*\n)", r"(?<=\n)", r"(?<=\s)")))


def read_rows(path: Path, columns: Mapping[str, type]) -> list[Row]:
    """Return these columns of a JSON-lines file; see `json_lines`."""
    return [dict(row) for _, row in json_lines(path, columns)]


def read_many(paths: Iterable[Path], text_column: str, left_out: LeftOut) -> list[str]:
    """Return the texts of several files, one per text file or row of a table. Raises DataError."""
    texts: list[str] = []
    with Refusals(alike=True) as refusals:
        for path in paths:
            with refusals.gather():
                if ending_of(path.name):
                    texts += _texts(path, text_column, left_out)
                else:
                    texts.append(LocatedText.at(str(path), read_text(path)))
    return texts


def _texts(path: Path, column: str, left_out: LeftOut) -> Iterator[str]:
    with Refusals(SHOWN, alike=True) as refusals, refusals.gather():
        for where, row in rows_of([path]):
            with refusals.gather():
                if column not in row:
                    raise DataError(
                        f"{where}: no column {column!r} (found: {', '.join(row) or 'none'})",
                        f"Every row must have its text in {column!r}; data.text_column names it."
                        f"{'' if CHATS.isdisjoint(row) else LIKE_CHATS}",
                    )
                if text := text_of(row[column], where, column):
                    yield LocatedText.at(where, text)
                else:
                    left_out.add("text", where)


def cut(
    text: str, size: int = CHUNK, boundaries: Sequence[re.Pattern[str]] = _BOUNDARIES
) -> list[str]:
    """Cut a text at blank lines, if any, into chunks of about (at most twice) `size` characters."""
    if not boundaries:
        return [text[start : start + size] for start in range(0, len(text), size)]
    chunks, current = [], ""
    for piece in boundaries[0].split(text):
        if current and len(current) + len(piece) > size:
            chunks.append(current)
            current = ""
        if len(piece) > 2 * size:
            chunks += cut(piece, size, boundaries[1:])
        else:
            current += piece
    return [*chunks, current] if current else chunks
