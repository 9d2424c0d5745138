"""Rows of tables: exactly what stands in the file, or a refusal that names the row."""

import csv
import gzip
import io
import json
import math
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from chat_bases import write_jsonl
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from coterie.core.errors import DataError
from coterie.data.by_client import Table, in_memory
from coterie.data.folders import Folders
from coterie.data.hub import Hub, HubClient, HubClients
from coterie.data.refusals import LeftOut, not_read
from coterie.data.rows import rows_of
from coterie.data.values import client_name, is_missing, plain


def read(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for _, row in rows_of([path])]


def written(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path: Path) -> str:
    with pytest.raises(DataError) as told:
        read(path)
    return str(told.value)


FIELDS = st.text(alphabet='ab ,;"\t\n\r\\é', max_size=6)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(FIELDS, FIELDS), min_size=1, max_size=5), st.sampled_from("\n\r"))
def test_what_is_quoted_throughout_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], end: str
) -> None:
    lines = [
        ",".join('"' + field.replace('"', '""') + '"' for field in row)
        for row in [("client", "text"), *rows]
    ]
    path = written(tmp_path_factory.mktemp("csv") / "a.csv", end.join(lines) + end)
    wanted = [{"client": a or None, "text": b or None} for a, b in rows]
    assert read(path) == wanted


def test_lines_as_rows_in_a_table_of_quotes_are_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", '"client","text"\n"ann","x"\n"ben","one\nann,x"\n')
    assert [row["text"] for row in read(path)] == ["x", "one\nann,x"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("before", ["", "\ufeff", "sep", "\n\n"])
def test_delimiters_line_ends_and_marks_are_told(
    tmp_path: Path, end: str, delimiter: str, before: str
) -> None:
    first = f"sep={delimiter}\n" if before == "sep" else before
    lines = [" client ", "text"], ["001", " NA "], ["", '"a,b;c\td"'], [], ["01", 'says "hi"']
    text = first + "\n".join(delimiter.join(line) for line in lines)
    path = written(tmp_path / "a.CSV", text.replace("\n", end))
    assert read(path) == [
        {"client": "001", "text": " NA "},
        {"client": None, "text": "a,b;c\td"},
        {"client": "01", "text": 'says "hi"'},
    ]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("ann,Dear diary, it rained", "3 fields, but the header has 2"),
        ("ann", "1 fields, but the header has 2"),
        ("ann,one,", "3 fields, but the header has 2"),
        ('ann,"He said "hi""', "text behind a closing quote"),
        (r'ann,"He said \"hi\" to me"', "text behind a closing quote"),
        ('ann,"open', "a quote is opened and never closed"),
        ('ann, "one"', "a space before an opening quote"),
    ],
)
def test_rows_of_csv_that_may_be_read_in_two_ways_are_refused(
    tmp_path: Path, row: str, reason: str
) -> None:
    before = 'ann,"a line\nand another"\n\nben,fine\n'
    message = refusal(written(tmp_path / "a.csv", f"client,text\n{before}{row}\n"))
    assert "a.csv, row 3 (line 6): " in message
    assert reason in message


def test_a_quote_that_a_later_row_would_close_is_refused_where_it_opens(tmp_path: Path) -> None:
    lines = ["client,text", 'ann,"never closed', *["ben,private"] * 3, 'ben,"quoted"']
    message = refusal(written(tmp_path / "a.csv", "\n".join(lines)))
    assert "a.csv, row 1 (line 2): text behind a closing quote" in message


def test_a_space_before_quotes_within_quotes_is_text(tmp_path: Path) -> None:
    path = written(tmp_path / "a.csv", 'client,text\nann,"He said, ""hi"""\nben," ""x"""\n')
    assert [row["text"] for row in read(path)] == ['He said, "hi"', ' "x"']


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ("text,client,text ", "several columns are called 'text'"),
        ("client;text,more", "could be separated by"),
        ('client, "text"', "header (line 1): a space before an opening quote"),
    ],
)
def test_headers_that_are_refused(tmp_path: Path, header: str, reason: str) -> None:
    assert reason in refusal(written(tmp_path / "a.csv", f"{header}\na,b,c\n"))


def test_an_index_without_a_name_is_no_column(tmp_path: Path) -> None:
    frame = pd.DataFrame({"client": ["ann", "ben"], "text": ["a", "b"]})
    frame.to_csv(tmp_path / "a.csv")
    assert read(tmp_path / "a.csv") == [
        {"client": "ann", "text": "a"},
        {"client": "ben", "text": "b"},
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", '{"text": "a"}\n{"text": "a", "text": "b"}', ":2: not JSON (key 'text' occurs"),
        ("a.jsonl", '{"text": "a"}\n{"text": "b', ":2: not JSON"),
        ("a.jsonl", '{"text": "a", " text": "b"}', "differ only in white space"),
        ("a.json", '[{"a": 1}, 2]', "row 2: int, not a JSON object"),
        ("a.json", '{"data": [{"a": 1}]}', "not a list of objects"),
        ("a.json", '{\n"data": 1}', "not a list of objects"),
        ("a.json", '[{"a": 1}', "not JSON"),
        ("a.csv", "\n\n", "the file is empty"),
        ("a.jsonl", "\n\n", "the file is empty"),
        ("a.xml", "<a/>", "files of this kind cannot be read"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, name: str, content: str, reason: str) -> None:
    assert reason in refusal(written(tmp_path / name, content))


def test_json_lines_may_be_called_json(tmp_path: Path) -> None:
    rows = [{"a": "001", "b": [1, {"c": None}]}, {"a": 2}]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    for name, content in (
        ("a.json", lines.encode()),
        ("a.JSONL", lines.encode()),
        ("b.json", json.dumps(rows, indent=1).encode()),
        ("a.jsonl.gz", gzip.compress(lines.encode())),
        ("a.json.GZ", gzip.compress(lines.encode("utf-16"))),
    ):
        assert read(written(tmp_path / name, content)) == rows


def test_nothing_behind_a_mistake_is_yielded(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", '{"n": 1}\n{"n": \n{"n": 3}\n')
    seen = []
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        seen += [row for _, row in rows_of([path])]
    rows = rows_of([path])
    assert next(rows)[1] == {"n": 1}
    with pytest.raises(DataError):
        next(rows)


# Missing values, and names


@pytest.mark.parametrize(
    "value", [None, math.nan, np.nan, np.float32("nan"), pd.NA, pd.NaT, np.datetime64("NaT")]
)
def test_missing_values_of_all_libraries_are_none(value: Any) -> None:
    assert is_missing(value)
    assert client_name(value, "row 1", "client") is None
    assert plain([{"content": value}]) == [{"content": None}]
    assert plain(pa.array([None, "a"])) == [None, "a"]


@pytest.mark.parametrize("value", ["", "None", "nan", "NA", "null", 0, 0.0, False, [], "0"])
def test_other_values_are_not_missing(value: Any) -> None:
    assert not is_missing(value)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ("001", "001"),
        (" ann\t", "ann"),
        ("  ", None),
        (1, "1"),
        (np.int64(1), "1"),
        (1.0, "1"),
        (1.5, "1.5"),
        ("1.0", "1.0"),
        ("e\u0301", "é"),
        ("\u2068ann\u2069\u200e ", "ann"),
        ("\ufeffann\u200b", "ann"),
        ("NA", "NA"),
    ],
)
def test_names_of_clients(value: Any, name: str | None) -> None:
    assert client_name(value, "row 1", "client") == name


@pytest.mark.parametrize("value", [2.0**53, [1], {"a": 1}, b"ann"])
def test_values_that_are_no_name(value: Any) -> None:
    with pytest.raises(DataError, match=r"a.csv, row 3: "):
        client_name(value, "a.csv, row 3", "client")


# The same rows in every kind of data

AWKWARD = (
    "None",
    "nan",
    "NA",
    "null",
    "007",
    "1.0",
    "true",
    "a, b; c",
    'He said "hi", she "no"',
    '"quoted"',
    " spaces stay \t",
    "two\nlines",
    "\r\nCR LF\r",
    "naïve — 日本語 🙂",
    "=1+1",
    '\\n \\"',
    "#comment",
    "\u2028separated",
)
CLIENTS = ("001", "01", "1", "NA", "nan", "None", "Zoë Ω", "ann")
ROWS = [
    {"client": client, "text": f"{text}{k * '!'}"}
    for client in CLIENTS
    for k, text in enumerate(AWKWARD)
]


def sent(section: Any) -> dict[str, list[str]]:
    """The texts of each client, in whatever split, the second time that they are read."""
    source = section.source()
    source.read()
    texts = source.read()
    return {id: sorted(text for part in parts for text in part) for id, parts in texts.items()}


WANTED = {
    client: sorted(row["text"] for row in ROWS if row["client"] == client) for client in CLIENTS
}


def as_csv(rows: list[dict[str, Any]], delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, ["client", "text"], delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue().encode()


def as_lines(rows: list[dict[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


FORMS = {
    "csv": as_csv,
    "csv.gz": lambda rows: gzip.compress(as_csv(rows)),
    "tsv": lambda rows: as_csv(rows, "\t"),
    "jsonl": as_lines,
    "jsonl.gz": lambda rows: gzip.compress(as_lines(rows)),
    "json": lambda rows: json.dumps(rows).encode(),
}


def table_file(folder: Path, form: str, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"all.{form}"
    if form == "parquet":
        parquet.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(FORMS[form](rows))
    return path


@pytest.mark.parametrize("form", [*FORMS, "parquet"])
def test_tables_and_the_hub_s_reader_give_the_same_texts(tmp_path: Path, form: str) -> None:
    path = table_file(tmp_path / "people", form, ROWS)
    assert sent(Table(path=path)) == WANTED
    for dataset in (path, path.parent):
        assert sent(Hub(dataset=str(dataset), client_column="client")) == WANTED
        clients = {id: HubClient(dataset=str(dataset), where={"client": id}) for id in CLIENTS}
        found = sent(HubClients(clients=clients))
        assert found == WANTED


@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz"])
def test_folders_give_the_same_texts(tmp_path: Path, form: str) -> None:
    for client in CLIENTS:
        own = [{"text": row["text"]} for row in ROWS if row["client"] == client]
        table_file(tmp_path / client, form, own)
    assert sent(Folders(path=tmp_path)) == WANTED


def test_tables_in_memory_give_the_same_texts() -> None:
    datasets = pytest.importorskip("datasets")
    columns = {name: [row[name] for row in ROWS] for name in ("client", "text")}
    for table in (
        ROWS,
        columns,
        {name: np.array(column) for name, column in columns.items()},
        {name: pa.array(column) for name, column in columns.items()},
        pd.DataFrame(columns),
        pd.DataFrame(columns, dtype="string"),
        pd.DataFrame(columns).rename(columns={"text": " text"}),
        pa.table(columns),
        datasets.Dataset.from_list(ROWS),
    ):
        assert sent(Table(**in_memory({"table": table}))) == WANTED


def test_missing_clients_and_texts_are_left_out_alike_and_said(tmp_path: Path) -> None:
    rows = [{"client": k % 2, "text": f"text {k}"} for k in range(20)]
    rows += [{"client": None, "text": "of nobody"}, {"client": 1, "text": None}]
    wanted = {str(c): sorted(f"text {k}" for k in range(c, 20, 2)) for c in (0, 1)}
    frame = pd.DataFrame(rows)
    assert frame["client"].dtype == float  # as pandas has integers beside missing ones
    forms = [in_memory({"table": table}) for table in (rows, frame, frame.convert_dtypes())]
    sections = [Table(**form) for form in forms]
    sections += [
        Table(path=table_file(tmp_path, form, rows)) for form in ("csv", "jsonl", "parquet")
    ]
    sections.append(Hub(dataset=str(tmp_path / "all.csv"), client_column="client"))
    for section in sections:
        source = section.source()
        texts = source.read()
        found = {id: sorted(chain.from_iterable(parts)) for id, parts in texts.items()}
        assert found == wanted
        assert len(source.notes) == 2
        assert source.notes[0].startswith("1 row without a client left out: ")
        assert source.notes[1].startswith("1 row without text left out: ")


def test_messages_of_data_frames_have_no_nan() -> None:
    frame = pd.DataFrame(
        {"who": ["ann"], "messages": [np.array([{"role": "user", "name": np.nan}])]}
    )
    path = Path(in_memory({"table": frame, "client_column": "who"})["path"])
    assert read(path) == [{"who": "ann", "messages": [{"role": "user", "name": None}]}]


def test_spaces_around_names_make_no_other_client(tmp_path: Path) -> None:
    rows = [{"client": "ann" + " " * (k % 2), "text": f"text {k}"} for k in range(20)]
    for form in ("csv", "jsonl", "parquet"):
        assert list(sent(Table(path=table_file(tmp_path, form, rows)))) == ["ann"]
    rows += [{"client": c, "text": f"{c} {k}"} for c in ("a/b", "a b") for k in range(9)]
    with pytest.raises(DataError, match="several clients would be called a-b"):
        sent(Table(path=table_file(tmp_path, "csv", rows)))


@pytest.mark.parametrize("text", [3, 1.5, ["a"], "nul \0 within", "\ud800"])
def test_texts_that_are_none_are_refused_by_row(tmp_path: Path, text: Any) -> None:
    rows = [{"client": "ann", "text": "fine"}, {"client": "ann", "text": text}]
    with pytest.raises(DataError, match=r"all.jsonl:2: column 'text' is"):
        sent(Table(path=table_file(tmp_path, "jsonl", rows)))
    table_file(tmp_path / "texts/ann", "jsonl", rows)
    with pytest.raises(DataError, match=r"all.jsonl:2: column 'text' is"):
        sent(Folders(path=tmp_path / "texts"))


def test_columns_of_unlike_lengths_or_one_name_are_refused() -> None:
    doubled = pd.DataFrame([["ann", "a", "b"]], columns=["client", "text", "text"])
    with pytest.raises(DataError, match="the table: several columns are called 'text'"):
        in_memory({"table": doubled})
    with pytest.raises(DataError, match="unlike lengths"):
        in_memory({"table": {"client": ["a"], "text": []}})


# What is not read


def test_endings_may_have_capitals_and_other_files_are_counted(tmp_path: Path) -> None:
    names = ["a.txt", "B.TXT", "c.Md", "d.JSONL", "deep/e.TxT"]
    for name in names:
        written(tmp_path / "ann" / name, '{"text": "of a row"}' if name == "d.JSONL" else name)
    for name in ("x.docx", "y.DOCX", "z.zst", "README", ".hidden.docx", "deep/x.json"):
        written(tmp_path / "ann" / name, "not read")
    written(tmp_path / "notes.odt", "beside")
    source = Folders(path=tmp_path).source()
    texts = [text for part in source.read()["ann"] for text in part]
    assert sorted(texts) == ["B.TXT", "a.txt", "c.Md", "deep/e.TxT", "of a row"]
    assert not_read(source.skipped) == [
        "ann: 5 files not read (2 .docx, 1 .json, 1 .zst, 1 without an ending)",
        "beside the folders of clients: 1 file not read (1 .odt)",
    ]


def test_what_is_left_out_is_said_with_the_first_rows() -> None:
    left_out = LeftOut()
    for number in range(7):
        left_out.add("text", f"a.csv, row {number}")
    (sentence,) = left_out.sentences("ann: ")
    assert sentence.startswith("ann: 7 rows without text left out: a.csv, row 0, ")
    assert sentence.endswith("a.csv, row 4, ...")
    assert LeftOut().sentences() == []


def test_notes_come_from_the_cache_too(tmp_path: Path, make_tokenizer) -> None:
    rows = [{"text": f"text {k} and more of it"} for k in range(30)] + [{"text": None}]
    write_jsonl(tmp_path / "texts/ann/a.jsonl", rows)
    written(tmp_path / "texts/ann/b.docx", "not read")
    section = Folders(path=tmp_path / "texts")
    first = section.load(make_tokenizer(), 4, cache=tmp_path / "cache").notes
    assert first == (
        "ann: 1 file not read (1 .docx)",
        f"ann: 1 row without text left out: {tmp_path}/texts/ann/a.jsonl:31",
    )
    written(tmp_path / "texts/ann/c.docx", "not read")
    again = section.load(make_tokenizer(), 4, cache=tmp_path / "cache").notes
    assert again == ("ann: 2 files not read (2 .docx)", first[1])
    assert len(list((tmp_path / "cache").iterdir())) == 1


@pytest.mark.parametrize("last", ["a screen of 5", "mid\nben,a screen of 5"])
def test_a_quote_that_a_later_row_closes_by_chance_is_refused(tmp_path: Path, last: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f'client,text\nann,one\nann,"two\nben,{last}"\nben,x\n', encoding="utf-8")
    with pytest.raises(DataError, match=r"row 2 \(line 3\): its quote ends rows later"):
        list(rows_of([path]))


def test_a_text_of_several_lines_with_delimiters_is_a_text(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('client,text\nann,"Dear Ben,\nhello, and\nbye, Ann"\nben,x\n', encoding="utf-8")
    texts = [row["text"] for _, row in rows_of([path])]
    assert texts == ["Dear Ben,\nhello, and\nbye, Ann", "x"]
