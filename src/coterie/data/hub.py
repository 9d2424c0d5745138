"""Data sets of the Hugging Face Hub, and local files in the same formats."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Annotated, Any, Literal, NoReturn

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from coterie.core import names
from coterie.core.errors import DataError
from coterie.data.by_client import ByClient
from coterie.data.fetching import Format, fetch, files_of, local, tables
from coterie.data.refusals import LeftOut, Refusals, outward_links
from coterie.data.rows import Row, rows_of
from coterie.data.section import Section, Source, TextFractions, Texts, stamps
from coterie.data.splitting import keyed_by_text, split_clients
from coterie.data.values import class_names, text_of

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
    Rows without a value or without text are left out, and counted. CSV, TSV and JSON are read as
    `table` reads them. With `content: chats` every row is a conversation.
    """

    kind: Literal["hub"] = "hub"
    # id on the Hub, or a local folder or file (json, jsonl, parquet, csv)
    dataset: str = Field(min_length=1)
    subset: Subset = None
    split: SplitName = "train"
    max_clients: int | None = Field(16, ge=1)  # most clients, if `clients` is null; null: all

    @property
    def title(self) -> str:
        return f"{self.dataset}{f' ({self.subset})' if self.subset else ''} by {self.client_column}"

    def source(self) -> Source:
        otherwise = "without a network, name a local folder or file in data.dataset"
        remedy = f"Check data.dataset, data.subset and data.split; {otherwise}."
        where, notes = f"data set {self.dataset}", list[str]()
        if (paths := tables(self.dataset, self.subset, self.split, remedy)) is not None:
            return Source(
                [stamps(paths)], lambda: self.by_client(rows_of(paths), where, notes), notes=notes
            )
        data = fetch(self.dataset, self.subset, self.split, remedy)

        def rows() -> Iterator[Row]:
            for number, row in enumerate(class_names(data, data.features), start=1):
                yield f"{where}, row {number}", row

        return Source(data._fingerprint, lambda: self.by_client(rows(), where, notes), notes=notes)


class HubClient(BaseModel):
    """The source of one client's text."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # id on the Hub, or a local folder or file, or one file of the Hub (`hf://datasets/...`)
    dataset: str = Field(min_length=1)
    subset: Subset = None
    split: SplitName = "train"
    revision: str | None = None  # commit or tag on the Hub; null: the newest at the first read
    # format of a single file whose ending does not tell it (an archive of JSON, say)
    format: Format | None = None
    # column with the text; dots lead into nested columns
    text_column: str = Field("text", min_length=1)
    # only rows whose columns have these values; dots lead into nested columns
    # (`meta.redpajama_set_name`)
    where: dict[str, str | int | float | bool] = {}
    # read only what is needed of parquet and JSON; false: download everything first (archives need
    # that)
    streaming: bool = True


class HubClients(Section):
    """Clients whose texts come from several data sets, or from several parts of one. Only what is
    needed is read.

    Rows come in the order of the data set, those without text are left out, and reading stops at
    whichever bound is met first. So a data set of terabytes costs what was read of it. What was
    read is kept as tokens: a second run with the same section needs no network, and a newer version
    on the Hub is not noticed; name a `revision` to fix which one it is.
    """

    kind: Literal["hub-clients"] = "hub-clients"
    # source of each client's text, by client id
    clients: dict[Annotated[str, AfterValidator(names.normal)], HubClient] = Field(min_length=1)
    documents: int = Field(20_000, ge=3)  # most documents per client
    # stop reading a client's documents after so many characters
    characters: int = Field(20_000_000, ge=1)
    rows: int = Field(1_000_000, ge=1)  # most rows to search per client
    fractions: TextFractions = (0.8, 0.1, 0.1)

    @property
    def title(self) -> str:
        datasets = dict.fromkeys(client.dataset for client in self.clients.values())
        return f"parts of {', '.join(datasets)}"

    def source(self) -> Source:
        self._check(list(self.clients))
        files, links = [], list[str]()
        with Refusals() as refusals:
            for id, client in self.clients.items():
                with refusals.gather(f"data.clients.{id}: "):
                    path = local(client.dataset, _REMEDY)
                    files.append(stamps(files_of(path)))
                    if path is not None and path.is_dir():
                        links += outward_links(path, files_of(path))
        notes: list[str] = []
        return Source(files, partial(self._read, notes), notes=notes, links=links)

    def _read(self, notes: list[str]) -> Texts:
        documents = {}
        with Refusals() as refusals:
            for id, client in self.clients.items():
                with refusals.gather(f"data.clients.{id}: "):
                    left_out = LeftOut()
                    documents[id] = keyed_by_text(self._documents(client, left_out))
                    notes += left_out.sentences(f"{id}: ")
        return split_clients(documents, self.fractions, self.seed)

    def _documents(self, client: HubClient, left_out: LeftOut) -> list[str]:
        """Return the first documents of a client, up to the bounds."""
        columns = (client.text_column, *client.where)
        texts, characters = list[str](), 0
        seen = set[str]()
        row: Mapping[str, Any] = {}
        for place, row in islice(_rows(client), self.rows):
            values = _values(row, columns)
            seen |= values.keys()
            if not all(_equal(values.get(name), value) for name, value in client.where.items()):
                continue
            if text := text_of(values.get(client.text_column), place, client.text_column):
                texts.append(text)
                characters += len(text)
            else:
                left_out.add("text", place)
            if len(texts) == self.documents or characters >= self.characters:
                break
        if len(texts) < 3:  # a split each
            self._refuse(client, len(texts), [name for name in columns if name not in seen], row)
        return texts

    def _refuse(
        self, client: HubClient, texts: int, missing: list[str], row: Mapping[str, Any]
    ) -> NoReturn:
        if missing:
            problem = f"data set {client.dataset}: no column {', '.join(map(repr, missing))}"
            raise DataError(problem, f"Choose among: {', '.join(_columns(row))}.")
        where = " and ".join(f"{column} is {value!r}" for column, value in client.where.items())
        raise DataError(
            f"data set {client.dataset}: {texts} documents{f' where {where}' * bool(where)}, "
            f"looking at {self.rows:,} rows",
            "Check the client's where, give it more text, or look at more rows: data.rows.",
        )


def _rows(client: HubClient) -> Iterator[Row]:
    """Yield the rows of a client's data set, exactly read if possible."""
    what = client.dataset, client.subset, client.split, _REMEDY
    read_by_ending = client.format is None  # otherwise the file's ending does not tell
    if read_by_ending and (paths := tables(*what, client.revision, client.streaming)) is not None:
        yield from rows_of(paths)
        return
    data = fetch(*what, client.streaming, client.revision, client.format)
    try:
        for number, row in enumerate(data, start=1):
            yield f"data set {client.dataset}, row {number}", row
    except Exception as error:  # datasets raises whatever its readers and the network do
        raise DataError(
            f"cannot read data set {client.dataset} to the end: {type(error).__name__}: {error}",
            _REMEDY,
        ) from error


def _values(row: Mapping[str, Any], columns: Iterable[str]) -> dict[str, Any]:
    """Return the values of a row's columns; `a.b` is b in a."""
    values: dict[str, Any] = {}
    for column in columns:
        value: Any = row
        for part in column.split("."):
            if not isinstance(value, Mapping) or part not in value:
                break
            value = value[part]
        else:
            values[column] = value
    return values


def _equal(value: Any, expected: str | int | float | bool) -> bool:
    """Whether a field has a value; in CSV every field is text."""
    if isinstance(value, str) and not isinstance(expected, str):
        return value.lower() == str(expected).lower()
    return bool(value == expected)


def _columns(row: Mapping[str, Any], prefix: str = "") -> list[str]:
    names = list[str]()
    for key, value in row.items():
        nested = isinstance(value, Mapping)
        names += _columns(value, f"{prefix}{key}.") if nested else [f"{prefix}{key}"]
    return names
