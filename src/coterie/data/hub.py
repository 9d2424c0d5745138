"""Data sets of the Hugging Face Hub, and local files in the same formats."""

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from coterie.data.documents import keyed_by_text, split
from coterie.data.section import Fractions, Names, Section, Source, Texts, choose
from coterie.errors import DataError

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class Hub(Section):
    """Any data set that `datasets.load_dataset` knows, by its Hub id or as a local folder or file; one column names the client.

    Client ids are the column's values (the names of class labels), with anything but letters, digits and `._-` replaced by `-`.
    Rows without a value or without text are left out.
    """

    kind: Literal["hub"] = "hub"
    dataset: Annotated[str, Field(min_length=1, description="id on the Hub, or a local folder or file (json, jsonl, parquet, csv)")]
    subset: Annotated[str | None, Field(description="the data set's configuration, if it has several")] = None
    split: Annotated[str, Field(min_length=1, description="the data set's split to draw documents from")] = "train"
    text_column: Annotated[str, Field(min_length=1, description="column with the text")] = "text"
    client_column: Annotated[str, Field(min_length=1, description="column that says whose document it is")]
    clients: Annotated[Names | None, Field(description="values of the client column; null: those with most documents")] = None
    max_clients: Annotated[int, Field(ge=1, description="where `clients` is null: at most so many clients")] = 16
    fractions: Annotated[Fractions, Field(description="shares of train, valid and test in a client's text")] = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        return f"{self.dataset}{f' ({self.subset})' if self.subset else ''} by {self.client_column}"

    def source(self) -> Source:
        remedy = "Check data.dataset, data.subset and data.split; without a network, name a local folder or file in data.dataset."
        data = fetch(self.dataset, self.subset, self.split, remedy)
        wanted = (self.text_column, self.client_column)
        if missing := [column for column in wanted if column not in data.column_names]:
            found = ", ".join(data.column_names)
            raise DataError(f"data set {self.dataset}: no column {', '.join(map(repr, missing))}", f"Choose among: {found}.")
        return Source(data._fingerprint, lambda: self._read(data.select_columns(list(dict.fromkeys(wanted)))))

    def _read(self, data: Any) -> Texts:
        columns = data[:]
        owners = _names(columns[self.client_column], data.features[self.client_column])
        documents: dict[str, list[str]] = {}
        for owner, text in zip(owners, columns[self.text_column], strict=True):
            if not isinstance(text, str | None):
                raise DataError(f"data set {self.dataset}: column {self.text_column!r} is {type(text).__name__}, not text", "Name another.")
            if owner is not None and text:
                documents.setdefault(owner, []).append(text)
        chosen = self._choose(documents)
        return {_id(name): split(keyed_by_text(documents[name]), self.fractions, self.seed) for name in chosen}

    def _choose(self, documents: dict[str, list[str]]) -> list[str]:
        if self.clients is not None:
            choose(documents, self.clients, "clients", f"column {self.client_column!r} of {self.dataset}")
            names = list(self.clients)
        else:
            names = sorted(documents, key=lambda name: (-len(documents[name]), name))[: self.max_clients]
        if doubled := [id for id, count in Counter(map(_id, names)).items() if count > 1]:
            raise DataError(
                f"data set {self.dataset}: several clients would be called {', '.join(doubled)}", "Rename them, or list data.clients."
            )
        return names


def _id(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip(".")


def _names(values: Iterable[Any], feature: Any) -> list[str | None]:
    """The clients' names of a column's values; None where there is none (of class labels, -1 by convention)."""
    if hasattr(feature, "int2str"):
        return [None if value is None or value < 0 else str(feature.int2str(value)) for value in values]
    return [None if value is None else str(value) for value in values]


def fetch(dataset: str, subset: str | None, split: str, remedy: str) -> Any:
    """One split of a data set of the Hub or of a local folder or file: a `datasets.Dataset`.

    Raises:
        DataError: It cannot be had, with `remedy`.
    """
    from datasets import load_dataset

    path = Path(dataset).expanduser()
    if not path.exists() and dataset.startswith((".", "/", "~")):
        raise DataError(f"data set {dataset}: there is no such folder or file", remedy)
    try:
        if path.is_file():
            return load_dataset(_builder(path), name=subset, split=split, data_files={"train": str(path)})
        return load_dataset(str(path) if path.is_dir() else dataset, name=subset, split=split)
    except DataError:
        raise
    except Exception as error:  # datasets raises whatever its readers and the network do
        where = "" if path.exists() or isinstance(error, ValueError) else " from the Hub (offline?)"
        raise DataError(f"cannot load data set {dataset}{where}: {type(error).__name__}: {error}", remedy) from error


def _builder(path: Path) -> str:
    for ending in (suffix for suffix in path.suffixes if suffix in _BUILDERS):
        return _BUILDERS[ending]
    raise DataError(
        f"data set {path}: files of this kind cannot be read", f"Files end in {', '.join(_BUILDERS)}, possibly followed by .gz."
    )
