"""Data sets of the Hugging Face Hub, and local files in the same formats."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from coterie.core import names
from coterie.core.errors import DataError
from coterie.data.by_client import ByClient
from coterie.data.fetching import Format, fetch, files_of, local
from coterie.data.refusals import Refusals
from coterie.data.section import Section, Source, TextFractions, Texts, stamps
from coterie.data.splitting import Document, keyed_by_text, split_clients

_REMEDY = (
    "Check its dataset, subset, split and revision; without a network, name a local folder or "
    "file as its dataset."
)


Subset = Annotated[str | None, Field(description="the data set's configuration, if it has several")]
SplitName = Annotated[
    str, Field(min_length=1, description="the data set's split to draw documents from")
]


class Hub(ByClient):
    """Any data set that `datasets.load_dataset` knows, by its Hub id or as a local folder or file;
    one column names the client.

    Client ids are the column's values (the names of class labels); what no name may have, and in
    plain ASCII every space and sign but `._-`, is replaced by `-`.
    Rows without a value or without text are left out. With `content: chats` every row is a
    conversation.
    """

    kind: Literal["hub"] = "hub"
    dataset: Annotated[
        str,
        Field(
            min_length=1,
            description="id on the Hub, or a local folder or file (json, jsonl, parquet, csv)",
        ),
    ]
    subset: Subset = None
    split: SplitName = "train"
    max_clients: Annotated[
        int | None, Field(ge=1, description="most clients, if `clients` is null; null: all")
    ] = 16

    @property
    def title(self) -> str:
        return f"{self.dataset}{f' ({self.subset})' if self.subset else ''} by {self.client_column}"

    def source(self) -> Source:
        remedy = (
            "Check data.dataset, data.subset and data.split; without a network, name a local "
            "folder or file in data.dataset."
        )
        data = fetch(self.dataset, self.subset, self.split, remedy)
        wanted = (*self.columns(data.column_names), self.client_column)
        if missing := [column for column in wanted if column not in data.column_names]:
            found = ", ".join(data.column_names)
            raise DataError(
                f"data set {self.dataset}: no column {', '.join(map(repr, missing))}",
                f"Choose among: {found}.",
            )
        return Source(
            data._fingerprint, lambda: self._read(data.select_columns(list(dict.fromkeys(wanted))))
        )

    def _read(self, data: Any) -> Texts:
        owners = _names(data[self.client_column], data.features[self.client_column])
        return self.by_client(owners, self._documents(data), self.dataset)

    def _documents(self, data: Any) -> list[Document]:
        """Return a document for each row; one without text is empty."""
        if self.content == "chats":
            return self.conversations(
                (f"data set {self.dataset}: row {i}", row) for i, row in enumerate(data)
            )
        documents = []
        for text in data[self.text_column]:
            if not isinstance(text, str | None):
                raise DataError(
                    f"data set {self.dataset}: column {self.text_column!r} is "
                    f"{type(text).__name__}, not text",
                    "Name another.",
                )
            own = text if text and text.strip() else ""
            documents.append(Document(own, own))
        return documents


class HubClient(BaseModel):
    """The source of one client's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: Annotated[
        str,
        Field(
            min_length=1,
            description="id on the Hub, or a local folder or file, or one file of the Hub "
            "(`hf://datasets/...`)",
        ),
    ]
    subset: Subset = None
    split: SplitName = "train"
    revision: Annotated[
        str | None,
        Field(description="commit or tag on the Hub; null: the newest at the first read"),
    ] = None
    format: Annotated[
        Format | None,
        Field(
            description="format of a single file whose ending does not tell it (an archive of "
            "JSON, say)"
        ),
    ] = None
    text_column: Annotated[
        str, Field(min_length=1, description="column with the text; dots lead into nested columns")
    ] = "text"
    where: Annotated[
        dict[str, str | int | float | bool],
        Field(
            description="only rows whose columns have these values; dots lead into nested "
            "columns (`meta.redpajama_set_name`)"
        ),
    ] = {}
    streaming: Annotated[
        bool,
        Field(
            description="read only what is needed; false: download everything first (archives "
            "need that)"
        ),
    ] = True


class HubClients(Section):
    """Clients whose texts come from several data sets, or from several parts of one. Only what is
    needed is read.

    Rows come in the order of the data set, those without text are left out, and reading stops at
    whichever bound is met first. So a data set of terabytes costs what was read of it. What was
    read is kept as tokens: a second run with the same section needs no network, and a newer version
    on the Hub is not noticed; name a `revision` to fix which one it is.
    """

    kind: Literal["hub-clients"] = "hub-clients"
    clients: Annotated[
        dict[Annotated[str, AfterValidator(names.normal)], HubClient],
        Field(min_length=1, description="source of each client's text, by client id"),
    ]
    documents: Annotated[int, Field(ge=3, description="most documents per client")] = 20_000
    characters: Annotated[
        int,
        Field(ge=1, description="stop reading a client's documents after so many characters"),
    ] = 20_000_000
    rows: Annotated[int, Field(ge=1, description="most rows to search per client")] = 1_000_000
    fractions: TextFractions = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        return (
            f"parts of "
            f"{', '.join(dict.fromkeys(client.dataset for client in self.clients.values()))}"
        )

    def source(self) -> Source:
        self._check(list(self.clients))
        files = []
        with Refusals() as refusals:
            for id, client in self.clients.items():
                with refusals.gather(f"data.clients.{id}: "):
                    files.append(stamps(files_of(local(client.dataset, _REMEDY))))
        return Source(files, self._read)

    def _read(self) -> Texts:
        documents = {}
        with Refusals() as refusals:
            for id, client in self.clients.items():
                with refusals.gather(f"data.clients.{id}: "):
                    documents[id] = keyed_by_text(self._documents(client))
        return split_clients(documents, self.fractions, self.seed)

    def _documents(self, client: HubClient) -> list[str]:
        """Return the first documents of a client that its bounds allow."""
        data = fetch(
            client.dataset,
            client.subset,
            client.split,
            _REMEDY,
            client.streaming,
            client.revision,
            client.format,
        )
        texts, characters = [], 0
        for row in islice(_rows(data, client.dataset), self.rows):
            if any(
                _value(row, column, client.dataset) != value
                for column, value in client.where.items()
            ):
                continue
            text = _value(row, client.text_column, client.dataset)
            if not isinstance(text, str | None):
                problem = (
                    f"data set {client.dataset}: column {client.text_column!r} is "
                    f"{type(text).__name__}, not text"
                )
                raise DataError(problem, "Name another.")
            if text and text.strip():
                texts.append(text)
                characters += len(text)
            if len(texts) == self.documents or characters >= self.characters:
                break
        if len(texts) < 3:  # a split each
            where = " and ".join(f"{column} is {value!r}" for column, value in client.where.items())
            problem = (
                f"data set {client.dataset}: {len(texts)} "
                f"documents{f' where {where}' * bool(where)}, looking at {self.rows:,} rows"
            )
            raise DataError(
                problem,
                "Check the client's where, give it more text, or look at more rows: data.rows.",
            )
        return texts


def _rows(data: Any, dataset: str) -> Iterator[Mapping[str, Any]]:
    """Return the rows of a data set, streamed or not. Raises DataError where the network or a file
    fails on the way.
    """
    rows = iter(data)
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # datasets raises whatever its readers and the network do
            raise DataError(
                f"cannot read data set {dataset} to the end: {type(error).__name__}: {error}",
                _REMEDY,
            ) from error
        yield row


def _value(row: Mapping[str, Any], column: str, dataset: str) -> Any:
    """Return the value of a column, `a.b` being b in a. Raises DataError if there is none."""
    found: Any = row
    for part in column.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise DataError(
                f"data set {dataset}: no column {column!r}",
                f"Choose among: {', '.join(_columns(row))}.",
            )
        found = found[part]
    return found


def _columns(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the names of a row's columns, nested ones with dots."""
    return [
        name
        for key, value in row.items()
        for name in (
            _columns(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [f"{prefix}{key}"]
        )
    ]


def _names(values: Iterable[Any], feature: Any) -> list[str | None]:
    """Return the clients' names of a column's values; None where there is none (of class labels, -1
    by convention).
    """
    if hasattr(feature, "int2str"):
        return [
            None if value is None or value < 0 else str(feature.int2str(value)) for value in values
        ]
    return [None if value is None else str(value) for value in values]
