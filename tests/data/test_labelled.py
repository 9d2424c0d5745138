"""Labelled texts: what a client's examples say and are called, from local files and from the
Hub, drawn or all.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from coterie.core.errors import DataError
from coterie.data import Data
from coterie.data.fetching import read_rows
from coterie.data.labelled import DOMAINS, INTENTS, Clinc150, DBpedia14, LabelledTexts, YahooAnswers

WORDS = [f"w{i}" for i in range(40)]
DOMAIN_OF = {
    intent: sorted(DOMAINS).index(domain)
    for domain, intents in DOMAINS.items()
    for intent in intents.split()
}
sections = pytest.mark.parametrize("section", [Clinc150, DBpedia14, YahooAnswers])


class Words(PreTrainedTokenizerFast):
    """Knows forty words; puts <s> before a text and </s> behind it."""


@pytest.fixture
def words() -> Words:
    tokenizer = Tokenizer(
        models.WordLevel(
            {word: i for i, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}, unk_token="<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return Words(tokenizer_object=tokenizer, eos_token="</s>")


class Reader:
    """A tokenizer whose texts are in the cache already."""

    def __init__(self, tokenizer: Words) -> None:
        self.eos_token_id, self.backend_tokenizer = (
            tokenizer.eos_token_id,
            tokenizer.backend_tokenizer,
        )


def rows_of(section: type[LabelledTexts], count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows as the files have them, the classes in turn, every text another."""
    rng = np.random.default_rng(seed)
    rows = []
    for i in range(count):
        text = " ".join(rng.choice(WORDS, rng.integers(1, 9)))
        texts = (
            {"question_title": text, "question_content": WORDS[i % 40]}
            if section is YahooAnswers
            else {"text": text}
        )
        rows.append(texts | {section.label: i % section.kinds})
    return rows


def write(section: type[LabelledTexts], root: Path, **files: list[dict[str, Any]]) -> Path:
    for name, rows in files.items():
        path = root / section.folder / f"{name}.jsonl.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    return root


def made(section: type[LabelledTexts], root: Path, train: int = 300, test: int = 150) -> Path:
    return write(section, root, train=rows_of(section, train), test=rows_of(section, test, 1))


def said(federation, tokenizer) -> list[list[tuple[str, int]]]:
    """What the examples of all clients together say, special tokens left out, and their labels,
    split by split.
    """
    found = []
    for name in ("train", "valid", "test"):
        batches = [
            batch
            for client in federation.clients.values()
            for batch in getattr(client, name).scoring(50)
        ]
        pairs = [
            (x[x >= 0], int(y)) for batch in batches for x, y in zip(batch.x, batch.y, strict=True)
        ]
        assert all((ids[0], ids[-1]) == (1, 2) for ids, _ in pairs)
        found.append([(tokenizer.decode(ids[1:-1]), y) for ids, y in pairs])
    return found


def text_of(row: dict[str, Any]) -> str:
    return row.get("text") or f"{row['question_title']} {row['question_content']}".strip()


# Files


@sections
def test_every_text_is_some_clients_with_its_label(section, tmp_path, words) -> None:
    made(section, tmp_path)
    given = {"labels": "intent"} if section is Clinc150 else {"examples": None, "tests": None}
    federation = section(root=tmp_path, partition="iid", clients=3, **given).load(words, 20)
    train, valid, test = said(federation, words)
    assert sorted(train + valid) == sorted(
        (text_of(row), row[section.label]) for row in rows_of(section, 300)
    )
    assert test == [(text_of(row), row[section.label]) for row in rows_of(section, 150, 1)] * 3
    batch = next(iter(federation.clients.values())).train.take(np.arange(4))
    assert (batch.x.dtype, batch.y.dtype) == (torch.int64, torch.int64)


def test_the_domain_of_an_intent_is_its_class(tmp_path, words) -> None:
    made(Clinc150, tmp_path)
    data = Clinc150(root=tmp_path, partition="iid", clients=2)
    train, valid, _ = said(data.load(words, 20), words)
    assert data.classes == 10
    assert sorted(train + valid) == sorted(
        (row["text"], DOMAIN_OF[INTENTS[row["intent"]]]) for row in rows_of(Clinc150, 300)
    )


def test_long_texts_are_cut_and_keep_their_end_token(tmp_path, words) -> None:
    made(DBpedia14, tmp_path)
    before = words.backend_tokenizer.to_str()
    train, valid, _ = said(
        DBpedia14(root=tmp_path, partition="iid", clients=2).load(words, 5), words
    )
    assert Counter(text for text, _ in train + valid) == Counter(
        " ".join(r["text"].split()[:3]) for r in rows_of(DBpedia14, 300)
    )
    assert words.backend_tokenizer.to_str() == before


def test_texts_are_encoded_once_for_each_tokenizer_length_and_choice(
    tmp_path, words, monkeypatch
) -> None:
    made(Clinc150, tmp_path)
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    cache = tmp_path / "encoded"
    one = Clinc150(partition="iid", clients=2)
    first = said(one.load(words, 20, cache), words)
    assert said(one.load(Reader(words), 20, cache), words) == first  # it cannot encode anything
    assert (
        said(one.model_copy(update={"clients": 3, "seed": 4}).load(Reader(words), 20, cache), words)
        != first
    )
    assert len(list(cache.iterdir())) == 1
    one.load(words, 19, cache)
    one.model_copy(update={"labels": "intent"}).load(words, 20, cache)
    one.model_copy(update={"examples": 20}).load(words, 20, cache)
    words.add_tokens(["w40"])
    one.load(words, 20, cache)
    made(Clinc150, tmp_path, train=400)
    one.load(words, 20, cache)
    assert len(list(cache.iterdir())) == 6


# Drawn texts


def test_as_many_texts_of_each_class_are_drawn_and_blank_ones_are_not(tmp_path, words) -> None:
    rows = rows_of(YahooAnswers, 400)
    for row in rows[::3]:
        row["question_title"] = row["question_content"] = "  "
    write(YahooAnswers, tmp_path, train=rows, test=rows_of(YahooAnswers, 100, 1))

    def drawn(seed: int) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
        data = YahooAnswers(
            root=tmp_path, seed=seed, partition="iid", clients=1, examples=102, tests=30
        )
        train, valid, test = said(data.load(words, 20), words)
        return sorted(train + valid), sorted(test)

    train, test = drawn(0)
    assert sorted(Counter(y for _, y in train).items()) == [
        (y, 11 if y < 2 else 10) for y in range(10)
    ]
    assert Counter(y for _, y in test) == dict.fromkeys(range(10), 3)
    left = Counter((text_of(row), row["topic"]) for i, row in enumerate(rows) if i % 3)
    assert not Counter(train) - left
    assert drawn(0) == (train, test)
    assert drawn(1)[0] != train


def test_more_texts_than_there_are_cannot_be_drawn(tmp_path, words) -> None:
    made(YahooAnswers, tmp_path)
    with pytest.raises(
        DataError,
        match=r"data.examples: 5,000 texts of class 0 are wanted, Yahoo! Answers has 30\n.*at "
        r"most 300, or null",
    ):
        YahooAnswers(root=tmp_path, partition="iid").load(words, 20)


# The Hub


def on_the_hub(
    section: type[LabelledTexts], root: Path, rows: dict[str, list[dict[str, Any]]]
) -> None:
    """A folder that stands for the data set on the Hub: its columns and its numbers."""
    folder = root / section.dataset
    folder.mkdir(parents=True)
    for name, found in rows.items():
        names = [str(kind) for kind in range(section.kinds)]
        columns = {column: [row[column] for row in found] for column in section.columns}
        if section is Clinc150:  # numbered otherwise, with a number for what is out of scope
            names = [*reversed(INTENTS[40:]), "oos", *INTENTS[:40]]
            columns["intent"] = [names.index(INTENTS[intent]) for intent in columns["intent"]]
            columns = {
                "text": [*columns["text"], "w1 w1"],
                "intent": [*columns["intent"], names.index("oos")],
            }
        if section is DBpedia14:
            columns["content"] = columns.pop("text")
            columns["title"] = ["a title"] * len(found)
        if section is YahooAnswers:
            columns["best_answer"] = ["an answer"] * len(found)
        features = datasets.Features(
            {
                c: datasets.ClassLabel(names=names)
                if c == section.label
                else datasets.Value("string")
                for c in columns
            }
        )
        datasets.Dataset.from_dict(columns, features=features).to_parquet(
            folder / f"{name}.parquet"
        )
    files = [{"split": name, "path": f"{name}.parquet"} for name in rows]
    about = {"configs": [{"config_name": section.subset or "default", "data_files": files}]}
    (folder / "README.md").write_text(f"---\n{json.dumps(about)}\n---\n")


@sections
def test_a_data_set_of_the_hub_is_the_same_as_files(section, tmp_path, words, monkeypatch) -> None:
    made(section, tmp_path / "files")
    on_the_hub(
        section, tmp_path, {"train": rows_of(section, 300), "test": rows_of(section, 150, 1)}
    )
    monkeypatch.chdir(tmp_path)
    given = {"examples": 90, "tests": 20} if section is YahooAnswers else {}
    data = section(partition="iid", clients=3, **given)
    local = said(data.model_copy(update={"root": tmp_path / "files"}).load(words, 20), words)
    assert said(data.load(words, 20), words) == local


def test_a_data_set_of_the_hub_without_a_column_is_refused(tmp_path, words, monkeypatch) -> None:
    on_the_hub(
        YahooAnswers,
        tmp_path,
        {"train": rows_of(YahooAnswers, 30), "test": rows_of(YahooAnswers, 30)},
    )
    (tmp_path / YahooAnswers.dataset).rename(tmp_path / "other")
    (tmp_path / DBpedia14.dataset).parent.mkdir()
    (tmp_path / "other").rename(tmp_path / DBpedia14.dataset)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        DataError, match=r"no column 'content', 'label', only .*question_title.*\n.*COTERIE_DATA"
    ):
        DBpedia14(partition="iid").load(words, 20)


def test_no_network_is_refused_with_what_to_do(words, monkeypatch) -> None:
    def unreachable(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(
        DataError, match=r"fancyzhx/dbpedia_14 from the Hub \(offline\?\).*\n.*data.root=DIR"
    ):
        DBpedia14(partition="iid").load(words, 20)


# Refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": 14}, "DBpedia, train: row 7 has label 14, expected 0 to 13"),
        ({"label": -1}, "row 7 has label -1"),
        ({"text": " \n"}, r"row 7 has no text\n.*[Rr]epair"),
        ({"label": "3"}, "'label' is str, expected int"),
    ],
)
def test_rows_that_will_not_do_are_refused(change, message, tmp_path, words) -> None:
    rows = rows_of(DBpedia14, 30)
    rows[7] |= change
    write(DBpedia14, tmp_path, train=rows, test=rows_of(DBpedia14, 30))
    with pytest.raises(DataError, match=message):
        DBpedia14(root=tmp_path, partition="iid", clients=2).load(words, 20)


def test_a_text_of_which_nothing_is_left_is_refused(tmp_path) -> None:
    made(DBpedia14, tmp_path)
    tokenizer = Tokenizer(models.BPE({"x": 0}, []))  # no word for what it does not know
    with pytest.raises(
        DataError, match=r"row 0 has 'w.*', for which the tokenizer returns no tokens"
    ):
        DBpedia14(root=tmp_path, partition="iid", clients=2).load(
            PreTrainedTokenizerFast(tokenizer_object=tokenizer), 20
        )


def test_missing_files_and_tokenizers_are_refused(tmp_path, words) -> None:
    with pytest.raises(
        DataError, match=r"train.jsonl.gz does not exist\n.*test.jsonl.gz does not exist"
    ):
        Clinc150(root=tmp_path, partition="iid").load(words, 20)
    made(Clinc150, tmp_path)
    for tokenizer in (None, object()):
        with pytest.raises(DataError, match="is not a fast tokenizer"):
            Clinc150(root=tmp_path, partition="iid").load(tokenizer, 20)


@sections
def test_sections_are_found_by_their_kind(section) -> None:
    assert TypeAdapter(Data).validate_python(section().model_dump(mode="json")) == section()


# Real data


def test_clinc150(data_root, words) -> None:
    names = json.loads((data_root / "clinc150/names.json").read_text())
    assert (list(INTENTS), sorted(DOMAINS)) == (names["intent"], names["domain"])
    for name in ("train", "test"):
        rows = read_rows(data_root / f"clinc150/{name}.jsonl.gz", {"intent": int, "domain": int})
        assert all(DOMAIN_OF[INTENTS[row["intent"]]] == row["domain"] for row in rows)
    data = Clinc150(
        root=data_root,
        partition="quantity",
        clients=20,
        classes_per_client=4,
        anchors=5,
        unseen={"aligned": 4, "random": 3},
    )
    federation = data.load(words, 24)
    assert (len(federation.clients), len(federation.everyone), federation.anchors[0]) == (
        25,
        32,
        "anchor-0",
    )
    assert (
        sum(len(client.train) + len(client.valid) for client in federation.clients.values())
        == 15_000
    )
    assert set(federation.everyone["anchor-0"].test.take(np.arange(900)).y.tolist()) == set(
        federation.labels["anchor-0"]
    )


def test_dbpedia14(data_root, words) -> None:
    federation = DBpedia14(
        root=data_root, partition="iid", clients=4, examples=1400, tests=140
    ).load(words, 16)
    batch = federation.clients["client-00"].test.take(np.arange(140))
    assert Counter(batch.y.tolist()) == dict.fromkeys(range(14), 10)
