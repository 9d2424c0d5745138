"""Federations from one table, in a file or in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_bases import chat_tokenizer, turns, write_jsonl

import coterie
from coterie.core.errors import DataError
from coterie.data.by_client import Table, in_memory
from coterie.data.hub import Hub
from coterie.runs.recipes.recipe import load

COUNTS = {"ann": 40, "ben": 30, "cid": 5, "dora": 6}


def rows_of(counts: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"who": client, "text": f"{client} writes the line {i} and more of it"}
        for client, count in counts.items()
        for i in range(count)
    ]


def chats_of(counts: dict[str, int]) -> list[dict[str, Any]]:
    return [
        {"who": client, "messages": turns(f"{client} {i}?", f"so {i}")}
        for client, count in counts.items()
        for i in range(count)
    ]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    path = write_jsonl(tmp_path / "all.jsonl", rows_of(COUNTS))
    return Table(path=path, client_column="who")


def names(found) -> list[str]:
    return list(found.clients)


def test_a_column_names_the_client(table, make_tokenizer) -> None:
    found = table.load(make_tokenizer(), 16)
    assert names(found) == ["ann", "ben", "dora", "cid"]  # most documents first
    tokenizer = make_tokenizer()
    for id, count in COUNTS.items():
        texts = "".join(tokenizer.decode(split.tokens) for split in found.clients[id].splits)
        assert texts.count(f"{id} writes") == count
    few = table.model_copy(update={"clients": ("cid", "ann")}).load(make_tokenizer(), 16)
    assert names(few) == ["cid", "ann"]
    assert names(table.model_copy(update={"max_clients": 1}).load(make_tokenizer(), 16)) == ["ann"]


def test_small_clients_are_refused_left_out_or_merged_by_name(table, make_tokenizer) -> None:
    tokenizer, whole = make_tokenizer(), table.load(make_tokenizer(), 16)
    with pytest.raises(DataError, match=r"too little: dora .*cid") as told:
        table.load(tokenizer, 60)
    assert "valid has" in told.value.problem
    assert "small_clients: leave-out or merge" in told.value.remedy
    left = table.model_copy(update={"small_clients": "leave-out"}).load(tokenizer, 60)
    assert names(left) == ["ann", "ben"]
    assert "left out, with too little text: dora (valid has" in left.description
    together = table.model_copy(update={"small_clients": "merge"}).load(tokenizer, 60)
    assert names(together) == ["ann", "ben", "others"]
    assert "merged into 'others': dora" in together.description
    for name in ("train", "valid", "test"):
        both = [getattr(whole.clients[id], name).tokens for id in ("dora", "cid")]
        merged = getattr(together.clients["others"], name).tokens
        assert merged.tolist() == np.concatenate(both).tolist()
    update = {"small_clients": "merge", "least_tokens": 10**6}
    with pytest.raises(DataError, match="even when merged"):
        table.model_copy(update=update).load(tokenizer, 16)


def test_fewest_tokens_of_training_text_may_be_set(table, make_tokenizer) -> None:
    sizes = {i: len(d.train) for i, d in table.load(make_tokenizer(), 16).clients.items()}
    least = sizes["ben"] + 1
    update = {"least_tokens": least, "small_clients": "leave-out"}
    found = table.model_copy(update=update).load(make_tokenizer(), 16)
    assert names(found) == ["ann"]
    assert f"ben (train has {sizes['ben']:,} of {least:,} tokens)" in found.description
    with pytest.raises(DataError, match="every client has too little"):
        table.model_copy(update=update | {"least_tokens": 10**6}).load(make_tokenizer(), 16)


def test_small_clients_of_conversations_are_merged(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "all.jsonl", chats_of({"ann": 10, "ben": 1, "cid": 2, "d": 1}))
    section = Table(path=path, client_column="who", content="chats", small_clients="leave-out")
    found = section.load(chat_tokenizer(), 64)
    assert names(found) == ["ann"]
    assert "cid (" in found.description
    assert "has no conversation: it has 2 in all, and three splits need 3" in found.description
    hub = Hub(dataset=str(path), client_column="who", content="chats", small_clients="leave-out")
    assert names(hub.load(chat_tokenizer(), 64)) == ["ann"]


@pytest.mark.parametrize("form", ["jsonl", "csv", "parquet", "json"])
def test_tables_of_every_kind_are_alike(tmp_path: Path, make_tokenizer, form: str) -> None:
    import pyarrow as pa
    from pyarrow import csv, parquet

    rows, path = rows_of({"ann": 30, "ben": 30}), tmp_path / f"all.{form}"
    match form:
        case "jsonl":
            write_jsonl(path, rows)
        case "json":
            path.write_text(json.dumps(rows))
        case "csv":
            csv.write_csv(pa.Table.from_pylist(rows), path)
        case "parquet":
            parquet.write_table(pa.Table.from_pylist(rows), path)
    found = Table(path=path, client_column="who").load(make_tokenizer(), 16)
    like = Table(path=write_jsonl(tmp_path / "x.jsonl", rows), client_column="who")
    wanted = like.load(make_tokenizer(), 16)
    for id in ("ann", "ben"):
        assert found.clients[id].train.digest() == wanted.clients[id].train.digest()


def test_tables_that_are_refused(tmp_path: Path, table, make_tokenizer) -> None:
    def refusal(**update: Any) -> str:
        with pytest.raises(DataError) as told:
            table.model_copy(update=update).load(make_tokenizer(), 16)
        return str(told.value)

    assert "data.path is missing" in refusal(path=None)
    assert "does not exist" in refusal(path=tmp_path / "none.csv")
    assert "no column 'owner'" in refusal(client_column="owner")
    assert "has no 'eve'" in refusal(clients=("eve",))
    assert "no column 'messages'" in refusal(content="chats")
    number = write_jsonl(
        tmp_path / "n.jsonl", [{"who": "ann", "text": "a"}, {"who": "b", "text": 3}]
    )
    assert "n.jsonl:2: column 'text' is int, not text" in refusal(path=number)


def test_tables_in_memory_are_kept_as_files(make_tokenizer) -> None:
    datasets = pytest.importorskip("datasets")
    rows = rows_of({"ann": 30, "ben": 30})
    columns = {name: [row[name] for row in rows] for name in ("who", "text")}
    forms = [
        columns,
        rows,
        datasets.Dataset.from_list(rows),
        {"who": np.array(columns["who"]), "text": columns["text"]},
    ]
    paths = {in_memory({"table": form, "client_column": "who"})["path"] for form in forms}
    assert len(paths) == 1
    assert {in_memory(form)["path"] for form in forms} == paths
    recipe = load("table", []).with_changes(data=in_memory({"table": rows, "client_column": "who"}))
    assert recipe.data.kind == "table"
    assert names(recipe.data.load(make_tokenizer(), 16)) == ["ann", "ben"]
    labels = datasets.ClassLabel(names=["ann", "ben"])
    numbered = datasets.Dataset.from_list(rows).cast_column("who", labels)
    assert in_memory({"table": numbered})["path"] in paths
    for wrong in ({"table": {"who": ["a"], "text": []}}, {"table": 3}):
        with pytest.raises(DataError):
            in_memory(wrong)
    splits = datasets.DatasetDict(train=datasets.Dataset.from_list(rows), test=numbered)
    for held in (splits, {"table": splits}):
        with pytest.raises(DataError, match=r"splits of a data set \(train, test\), not one table"):
            in_memory(held)
    fields = {"kind": "folders", "path": "x"}
    assert in_memory(fields) is fields


def test_python_runs_a_table_in_memory(tiny_base: Path, tmp_path: Path) -> None:
    run = coterie.run(
        "table",
        out=tmp_path / "run",
        data={"table": rows_of({"ann": 30, "ben": 30, "cid": 2}), "client_column": "who"},
        model={"base": str(tiny_base), "context": 16},
        method={"name": "fedavg", "rounds": 1, "local_steps": 1},
        compare_with=[],
    )
    assert run.clients == ("ann", "ben")
    assert str(run.recipe.data.path).endswith(".jsonl")  # so that it can be resumed
