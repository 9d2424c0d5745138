"""The kinds of the recipe's data section: what they make of sources, and what they refuse."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import datasets
import pytest
from figures import as_json
from pydantic import TypeAdapter, ValidationError

from coterie import personal
from coterie.core.errors import DataError
from coterie.data import (
    AgNews,
    Data,
    Folders,
    Hub,
    HubClients,
    Multilingual,
    Stdlib,
    Topics,
    hub,
    rows,
)
from coterie.data.corpora import mixtures
from coterie.data.hub import HubClient
from coterie.data.origins import STDLIB_TOPICS, seen_in_pretraining
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes.recipe import load
from coterie.runs.run import run

SPLITS = ("train", "valid", "test")


def write_rows(path: Path, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = "\n".join(map(json.dumps, rows)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def refusal(section, tokenizer, context: int = 8) -> str:
    with pytest.raises(DataError) as error:
        section.load(tokenizer, context)
    assert error.value.remedy
    return str(error.value)


def texts(section) -> dict[str, list[list[str]]]:
    return {id: [list(part) for part in parts] for id, parts in section.source().read().items()}


def assert_disjoint(parts) -> None:
    parts = [set(part) for part in parts]
    assert sum(map(len, parts)) == len(set().union(*parts))


# The section


@pytest.mark.parametrize(
    "kind", ["stdlib", "agnews", "multilingual", "topics", "folders", "table", "synthetic", "team"]
)
def test_the_union_knows_every_kind(kind: str) -> None:
    section = TypeAdapter(Data).validate_python({"kind": kind})
    assert section.kind == kind
    assert TypeAdapter(Data).validate_python(section.model_dump(mode="json")) == section


@pytest.mark.parametrize(
    "given",
    [
        {"kind": "nothing"},
        {"kind": "stdlib", "sed": 1},
        {"kind": "stdlib", "train_tokens": 0},
        {"kind": "stdlib", "train_tokens": [1, -1]},
        {"kind": "stdlib", "fractions": [0.5, 0.1, 0.1]},
        {"kind": "stdlib", "fractions": [1.0, 0.0, 0.0]},
        {"kind": "multilingual", "languages": []},
        {"kind": "multilingual", "languages": ["de", "de"]},
        {"kind": "agnews", "distribution": "both"},
        {"kind": "hub", "dataset": "x"},
        {"kind": "hub-clients", "clients": {}},
        {"kind": "hub-clients", "clients": {"a": {}}},
        {"kind": "hub-clients", "clients": {"a": {"dataset": "x", "wher": {}}}},
        {"kind": "hub-clients", "clients": {"a": {"dataset": "x"}}, "documents": 2},
    ],
)
def test_sections_that_are_refused(given: dict) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Data).validate_python(given)


# stdlib


def test_stdlib_has_its_topics(tokenizer) -> None:
    section = Stdlib(train_tokens=3000, valid_tokens=1000, test_tokens=(500, 600, 700, 800))
    federation = section.load(tokenizer, 64)
    assert list(federation.clients) == list(STDLIB_TOPICS)
    assert federation.description == "Python's standard library: 4 clients"
    clients = federation.clients.values()
    assert [len(data.test) for data in clients] == [500, 600, 700, 800]
    assert all(len(data.train) == 3000 and len(data.valid) == 1000 for data in clients)


def test_stdlib_documents_are_chunks_in_one_split_each() -> None:
    found = texts(Stdlib())
    for parts in found.values():
        assert_disjoint(parts)
        assert max(len(text) for part in parts for text in part) <= 4000
    reference = "".join(text for part in found["reference"] for text in part)
    assert "\\n" not in reference[:10_000]
    assert "topics = {" not in reference
    assert texts(Stdlib(seed=1)) != found == texts(Stdlib())


# AG News


@pytest.fixture
def news(tmp_path: Path) -> Path:
    counts = {"train": (100, 60, 80, 90), "test": (40, 44, 48, 40)}
    for name, counted in counts.items():
        rows = [
            {"text": f"{name} news {label} {i} the cat and the dog", "label": label}
            for label, n in enumerate(counted)
            for i in range(n)
        ]
        write_rows(tmp_path / f"ag_news/{name}.jsonl.gz", rows)
    return tmp_path


def category(text: str) -> str:
    return text.split()[2]


def test_in_distribution_each_client_has_its_category(news: Path) -> None:
    found = texts(AgNews(root=news, distribution="in"))
    assert list(found) == ["world", "sports", "business", "sci-tech"]
    for label, (train, valid, test) in enumerate(found.values()):
        assert {category(text) for part in (train, valid, test) for text in part} == {str(label)}
        assert all(text.startswith("train") for text in train + valid)
        assert all(text.startswith("test") for text in test)
        assert_disjoint((train, valid))


@pytest.mark.parametrize("seed", [0, 1])
def test_out_of_distribution_valid_and_test_are_uniform_mixtures(news: Path, seed: int) -> None:
    found = texts(AgNews(root=news, seed=seed, valid_fraction=0.2))
    for label, (train, valid, test) in enumerate(found.values()):
        assert {category(text) for text in train} == {str(label)}
        for part in (valid, test):
            counts = [sum(category(text) == c for text in part) for c in "0123"]
            assert len(set(counts)) == 1
            assert {category(text) for text in part[:4]} == set(
                "0123"
            )  # uniform whatever part a bound leaves
        assert len(valid) == 4 * 3
        assert len(test) == 4 * 10
    assert_disjoint([part for parts in found.values() for part in parts])


def test_mixtures_of_unlike_categories() -> None:
    assert mixtures([["a1", "a2", "a3"], ["b1", "b2"]]) == [["a1", "b1"], ["a2", "b2"]]


def test_ag_news_as_it_is(data_root: Path, tokenizer) -> None:
    federation = AgNews(root=data_root, train_tokens=500, valid_tokens=400, test_tokens=400).load(
        tokenizer, 32
    )
    assert len(federation.clients) == 4
    assert "out of distribution" in federation.description


def test_labels_beyond_the_categories_are_refused(tmp_path, tokenizer) -> None:
    for name in ("train", "test"):
        write_rows(tmp_path / f"ag_news/{name}.jsonl.gz", [{"text": "odd", "label": 4}])
    assert "AG News: label 4 of 'odd'" in refusal(AgNews(root=tmp_path), tokenizer)


def test_ag_news_comes_from_the_hub_where_no_folder_is_named(news, tokenizer, monkeypatch) -> None:
    local = {
        name: datasets.load_dataset(
            "json", data_files=str(news / f"ag_news/{name}.jsonl.gz"), split="train"
        )
        for name in ("train", "test")
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda path, **options: local[options["split"]])
    assert texts(AgNews()) == texts(AgNews(root=news))
    AgNews(train_tokens=400).load(tokenizer, 8)


def test_the_hub_out_of_reach(tokenizer, monkeypatch) -> None:
    def unreachable(*args, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    monkeypatch.setattr(datasets, "load_dataset_builder", unreachable)
    message = refusal(AgNews(), tokenizer)
    assert "cannot load data set fancyzhx/ag_news from the Hub (offline?)" in message
    assert "--set data.root=DIR" in message
    assert "COTERIE_DATA" in message
    assert "from the Hub (offline?)" in refusal(
        Hub(dataset="some/thing", client_column="who"), tokenizer
    )


# multilingual and topics


def test_multilingual_keeps_what_pretraining_saw_out(data_root: Path) -> None:
    section = Multilingual(root=data_root, languages=("de", "it"), exclude_pretraining=True)
    found = texts(section)
    assert list(found) == ["de", "it"]
    for parts in found.values():
        assert_disjoint(parts)
        assert not any(seen_in_pretraining("multilingual", text) for part in parts for text in part)
    everything = texts(section.model_copy(update={"exclude_pretraining": False}))
    assert sum(map(len, everything["de"])) > sum(map(len, found["de"]))


def rows_of(root: Path) -> list[dict]:
    with gzip.open(root / "topics/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def test_no_work_of_a_topic_is_in_two_splits(data_root: Path) -> None:
    works: dict[tuple[str, str], set[str]] = {}
    for row in rows_of(data_root):
        works.setdefault((row["topic"], row["text"]), set()).add(row["id"])
    for exclude in (False, True):
        found = texts(Topics(root=data_root, exclude_pretraining=exclude))
        assert list(found) == ["books", "arxiv", "stackexchange", "code"]
        for topic, parts in found.items():
            ids = [
                set().union(*(works[topic, text] for text in part if len(works[topic, text]) == 1))
                for part in parts
            ]
            assert_disjoint(ids)
            sizes = [sum(map(len, part)) for part in parts]
            assert min(sizes) > 20_000
            if not exclude:
                assert sizes[0] / sum(sizes) == pytest.approx(0.8, abs=0.05)
            else:  # of ten books, three are left
                assert not any(
                    seen_in_pretraining(f"topics/{topic}", id) for part in ids for id in part
                )


@pytest.mark.parametrize(
    ("section", "field", "known"),
    [(Multilingual, "languages", "ca, de"), (Topics, "topics", "arxiv, books")],
)
def test_unknown_names_are_refused_with_the_known_ones(
    corpora_root, tokenizer, section, field: str, known: str
) -> None:
    message = refusal(section(root=corpora_root, **{field: ("xx", "yy")}), tokenizer)
    assert f"data.{field}: " in message
    assert "has no 'xx', 'yy'" in message
    assert f"Choose among: {known}" in message


def test_folders_without_the_corpus_are_refused(tokenizer, tmp_path, monkeypatch) -> None:
    assert f"data.root: {tmp_path}/ag_news/test.jsonl.gz does not exist" in refusal(
        AgNews(root=tmp_path), tokenizer
    )
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path))
    assert f"COTERIE_DATA: {tmp_path}/topics/train.jsonl.gz does not exist" in refusal(
        Topics(), tokenizer
    )


def test_the_environment_names_the_folder(news: Path, monkeypatch) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(news))
    assert texts(AgNews()) == texts(AgNews(root=news))


def test_lists_of_another_length_than_the_clients_are_refused(news, tokenizer) -> None:
    message = refusal(AgNews(root=news, train_tokens=(1, 2), test_tokens=(1, 2, 3)), tokenizer)
    assert (
        "data.train_tokens: 2 values for 4 clients (world, sports, business, sci-tech)" in message
    )
    assert "data.test_tokens: 3 values for 4 clients" in message


# folders


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def test_folders_of_files_of_every_kind(tmp_path, tokenizer) -> None:
    for i in range(12):
        write(tmp_path / f"ann/letters/{i}.txt", f"letter {i} to the cat and the dog")
    write(tmp_path / "ann/notes.md", "# Notes\nthe bird")
    write(tmp_path / "ann/.hidden.txt", "hidden")
    write(tmp_path / "ann/photo.jpg", "no text")
    write_rows(
        tmp_path / "bob.2/a.jsonl",
        [{"body": f"row {i} the cat and the dog", "more": 1} for i in range(15)],
    )
    write_rows(
        tmp_path / "bob.2/b.jsonl.gz",
        [{"body": f"other {i} the cat and the dog"} for i in range(15)],
    )
    write(tmp_path / "README.md", "not a client")
    (tmp_path / ".git").mkdir()
    section = Folders(path=tmp_path, text_column="body")
    found = texts(section)
    assert list(found) == ["ann", "bob.2"]
    assert [sum(map(len, parts)) for parts in found.values()] == [13, 30]
    assert all(min(map(len, parts)) > 0 for parts in found.values())
    for parts in found.values():
        assert_disjoint(parts)
    assert texts(section.model_copy(update={"seed": 1})) != found
    assert section.load(tokenizer, 4).description.endswith("2 clients")


def test_a_single_large_file_is_cut(tmp_path) -> None:
    write(
        tmp_path / "ann/diary.txt",
        "\n\n".join(f"Day {i}. " + "the cat and the dog " * 20 for i in range(100)),
    )
    [parts] = texts(Folders(path=tmp_path)).values()
    assert_disjoint(parts)
    assert [len(part) for part in parts] == pytest.approx([16, 2, 2], abs=3)


@pytest.mark.parametrize(
    "names",
    [("train.txt", "valid.jsonl", "test.md"), ("train/a.txt", "valid/deep/b.jsonl", "test/c.txt")],
)
def test_fixed_splits_are_taken_as_they_are(tmp_path, names) -> None:
    for name in names:
        text = name.split(".")[0].split("/")[0]
        if name.endswith("jsonl"):
            write_rows(tmp_path / "ann" / name, [{"text": text}, {"text": text}])
        else:
            write(tmp_path / "ann" / name, text)
    assert texts(Folders(path=tmp_path)) == {"ann": [["train"], ["valid", "valid"], ["test"]]}


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "valid.txt", "test.txt"),
        ("train.txt", "validation-00000-of-00001.jsonl", "test.txt"),
        ("training/a.txt", "dev/b.txt", "testing/c.txt"),
    ],
)
def test_splits_under_their_usual_names_and_in_shards_are_taken(tmp_path, names) -> None:
    for name in names:
        if name.endswith("jsonl"):
            write_rows(tmp_path / "ann" / name, [{"text": name[:2]}])
        else:
            write(tmp_path / "ann" / name, name[:2])
    train, valid, test = texts(Folders(path=tmp_path))["ann"]
    assert set(train) == {"tr"}
    assert set(valid) <= {"va", "de"}
    assert set(test) == {"te"}
    assert len(train) == len(names) - 2


def test_a_folder_that_is_called_like_a_split_is_none_without_the_others(tmp_path) -> None:
    for name in ("training/a.txt", "dev/b.txt", "notes.txt"):
        write(tmp_path / "ann" / name, f"{name} " * 300)
    assert len(texts(Folders(path=tmp_path))["ann"]) == 3


def test_folders_of_splits_are_no_clients(tmp_path, tokenizer) -> None:
    for name in ("train/ann.txt", "test/ann.txt"):
        write(tmp_path / name, "x")
    message = refusal(Folders(path=tmp_path), tokenizer)
    assert "has folders of splits (test, train), not clients" in message
    assert "DIR/CLIENT/train" in message


def test_what_lies_in_a_folder_without_text_is_said(tmp_path, tokenizer) -> None:
    write(tmp_path / "ann/chat.zip", "PK")
    write(tmp_path / "ann/letter.docx", "PK")
    message = refusal(Folders(path=tmp_path), tokenizer)
    assert "no text in" in message
    assert "but 1 .docx, 1 .zip" in message
    assert "Unpack what is zipped." in message


def test_folders_that_are_refused(tmp_path, tokenizer) -> None:
    assert "data.path is missing" in refusal(Folders(), tokenizer)
    assert "does not exist" in refusal(Folders(path=tmp_path / "nothing"), tokenizer)
    write(tmp_path / "file.txt", "x")
    assert "is not a folder" in refusal(Folders(path=tmp_path / "file.txt"), tokenizer)
    assert "contains no folders" in refusal(Folders(path=tmp_path), tokenizer)
    (tmp_path / "empty").mkdir()
    write(tmp_path / "part/train.txt", "x")
    for name in SPLITS:
        write(tmp_path / f"beside/{name}.txt", "x")
    write(tmp_path / "beside/notes.txt", "x")
    write(tmp_path / "odd (name)/a.txt", "x")
    message = refusal(Folders(path=tmp_path), tokenizer)
    assert "client 'empty': no text in " in message
    assert "has train but no valid, test" in message
    assert "has other text beside train, valid and test: notes.txt" in message
    assert "client id 'odd (name)' is not valid: it has '('" in message
    assert "Give all three of them, or none." in message


def test_files_that_are_refused_come_all_at_once(tmp_path, tokenizer) -> None:
    write(tmp_path / "ann/empty.txt", "")
    (tmp_path / "ann/latin.txt").write_bytes("naïve".encode("latin1"))
    write(tmp_path / "bob/a.jsonl", '{"text": "fine"}\n{"body": "no text"}\n')
    message = refusal(Folders(path=tmp_path), tokenizer)
    assert f"client 'ann': {tmp_path}/ann/empty.txt: the file is empty" in message
    assert f"{tmp_path}/ann/latin.txt:1: not UTF-8 text" in message
    assert f"client 'bob': {tmp_path}/bob/a.jsonl:2: no column 'text' (found: body)" in message


def test_too_little_text_is_refused(tmp_path, tokenizer) -> None:
    write(tmp_path / "ann/a.txt", "the cat")
    message = refusal(Folders(path=tmp_path), tokenizer)
    assert "client 'ann', valid: 0 tokens found, 9 needed for one window of context 8" in message


# hub


def people(n: int = 60) -> list[dict]:
    return [
        {"body": f"{'xyz'[i % 3]} says the cat and the dog {i}", "who": "xyz"[i % 3] + "/1"}
        for i in range(n)
    ] + [{"body": "", "who": "x/1"}]


def write_people(folder: Path, form: str) -> Path:
    rows = people()
    if form == "jsonl":
        write_rows(folder / "train.jsonl", rows)
    else:
        folder.mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    return folder


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("as_file", [False, True])
def test_hub_data_in_a_local_folder_or_file(tmp_path, tokenizer, form: str, as_file: bool) -> None:
    folder = write_people(tmp_path / "people", form)
    path = folder / f"train.{form}" if as_file else folder
    section = Hub(dataset=str(path), text_column="body", client_column="who")
    found = texts(section)
    assert list(found) == ["x-1", "y-1", "z-1"]
    for id, parts in found.items():
        assert_disjoint(parts)
        assert sum(map(len, parts)) == 20
        assert all(text.startswith(id[0]) for part in parts for text in part)
    assert section.load(tokenizer, 4).clients.keys() == found.keys()
    encoded = len(tokenizer.texts)
    section.load(tokenizer, 4)
    assert len(tokenizer.texts) == encoded
    assert list(texts(section.model_copy(update={"clients": ("z/1", "x/1")}))) == ["z-1", "x-1"]
    assert list(texts(section.model_copy(update={"max_clients": 1}))) == ["x-1"]


def test_changed_local_files_are_noticed(tmp_path, tokenizer) -> None:
    section = Hub(
        dataset=str(write_people(tmp_path / "people", "jsonl")),
        text_column="body",
        client_column="who",
    )
    section.load(tokenizer, 4)
    write_rows(tmp_path / "people/train.jsonl", people(90))
    assert sum(map(len, texts(section)["x-1"])) == 30
    assert len(section.load(tokenizer, 4).clients["x-1"].train) > 0
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_class_labels_become_their_names(tmp_path) -> None:
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["Sci/Tech", "World"]),
        }
    )
    rows = {"text": [f"text {i}" for i in range(41)], "label": [i % 2 for i in range(40)] + [-1]}
    (tmp_path / "labelled").mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(
        tmp_path / "labelled/train.parquet"
    )
    found = texts(Hub(dataset=str(tmp_path / "labelled"), client_column="label"))
    assert {id: sum(map(len, parts)) for id, parts in found.items()} == {
        "Sci-Tech": 20,
        "World": 20,
    }


def test_hub_sections_that_are_refused(tmp_path, tokenizer) -> None:
    section = Hub(
        dataset=str(write_people(tmp_path / "people", "jsonl")),
        text_column="body",
        client_column="who",
    )

    def changed(**update) -> str:
        return refusal(section.model_copy(update=update), tokenizer)

    assert "no column 'text', 'person'" in changed(text_column="text", client_column="person")
    assert "Choose among: body, who." in changed(text_column="text")
    assert "has no 'q'" in changed(clients=("x/1", "q"))
    assert "Unknown split" in changed(split="trian")
    assert "no such folder or file" in changed(dataset=str(tmp_path / "nothing"))
    write(tmp_path / "a.pdf", "x")
    assert "files of this kind cannot be read" in changed(dataset=str(tmp_path / "a.pdf"))
    write_rows(tmp_path / "same.jsonl", [{"body": "x", "who": "a/b"}, {"body": "y", "who": "a b"}])
    assert "several clients would be called a-b" in changed(dataset=str(tmp_path / "same.jsonl"))
    write_rows(tmp_path / "numbers.jsonl", [{"body": 1, "who": "a"}])
    assert "column 'body' is int, not text" in changed(dataset=str(tmp_path / "numbers.jsonl"))


# hub-clients


def pajama(n: int = 90) -> list[dict]:
    """Rows in SlimPajama's form."""
    names = ("RedPajamaBook", "RedPajamaArXiv", "RedPajamaC4")
    return [
        {
            "text": f"{names[i % 3]} {i} the cat and the dog",
            "meta": {"redpajama_set_name": names[i % 3]},
        }
        for i in range(n)
    ]


def parts(dataset: Path, **more) -> HubClients:
    """Two clients of one data set."""
    sets = {"books": "RedPajamaBook", "arxiv": "RedPajamaArXiv"}
    clients = {
        id: {"dataset": str(dataset), "where": {"meta.redpajama_set_name": name}, **more}
        for id, name in sets.items()
    }
    return TypeAdapter(Data).validate_python({"kind": "hub-clients", "clients": clients})


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("form", ["jsonl", "jsonl.gz", "parquet"])
@pytest.mark.parametrize("as_file", [False, True])
def test_clients_from_parts_of_a_data_set(
    tmp_path, tokenizer, streaming: bool, form: str, as_file: bool
) -> None:
    folder = tmp_path / "pajama"
    path = folder / f"train.{form}"
    if form == "parquet":
        folder.mkdir()
        datasets.Dataset.from_list(pajama()).to_parquet(path)
    else:
        write_rows(path, pajama())
    section = parts(path if as_file else folder, streaming=streaming)
    found = texts(section)
    assert list(found) == ["books", "arxiv"]
    for name, splits in zip(("RedPajamaBook", "RedPajamaArXiv"), found.values(), strict=True):
        assert_disjoint(splits)
        assert sorted(text for part in splits for text in part) == sorted(
            row["text"] for row in pajama() if row["text"].startswith(name)
        )
    section.load(tokenizer, 4)
    encoded = len(tokenizer.texts)
    section.load(tokenizer, 4)
    assert len(tokenizer.texts) == encoded
    write_rows(folder / "train.jsonl", pajama(120)) if form == "jsonl" else path.touch()
    section.load(tokenizer, 4)
    assert len(tokenizer.texts) > encoded  # another version of the files


def test_no_more_is_read_than_is_asked_for(tmp_path, monkeypatch) -> None:
    write_rows(tmp_path / "pajama/train.jsonl", pajama())
    section, read = parts(tmp_path / "pajama"), []

    def counted(paths):
        for row in rows.rows_of(paths):
            read.append(row)
            yield row

    monkeypatch.setattr(hub, "rows_of", counted)

    def rows_read(**bounds) -> tuple[int, list[int]]:
        read.clear()
        found = texts(section.model_copy(update=bounds))
        return len(read), [sum(map(len, splits)) for splits in found.values()]

    assert rows_read() == (180, [30, 30])
    assert rows_read(documents=5) == (13 + 14, [5, 5])
    assert rows_read(rows=10) == (20, [4, 3])
    assert rows_read(characters=4 * len("RedPajamaBook 0 the cat and the dog")) == (10 + 11, [4, 4])


def test_clients_from_several_data_sets(tmp_path) -> None:
    """As in Common Corpus with patents: unlike columns, a split of another name, an archive with
    a JSON file per document.
    """
    write_rows(
        tmp_path / "talks.jsonl",
        [{"body": {"en": f"talk {i}"}, "loud": bool(i % 2), "year": i % 3} for i in range(60)],
    )
    write_rows(
        tmp_path / "tenders/validation.jsonl",
        [{"text": f"tender {i}" if i else None} for i in range(20)],
    )
    with tarfile.open(tmp_path / "patents.tar.gz", "w:gz") as archive:
        for i in range(10):
            data = json.dumps(
                {"title": f"patent {i}", "full_description": f"what is claimed {i}"}, indent=1
            ).encode()
            entry = tarfile.TarInfo(f"2016/{i}.json")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    patents = {"format": "json", "text_column": "full_description", "streaming": False}
    section = HubClients(
        clients={
            "talks": HubClient(
                dataset=str(tmp_path / "talks.jsonl"),
                text_column="body.en",
                where={"loud": True, "year": 1},
            ),
            "tenders": HubClient(dataset=str(tmp_path / "tenders"), split="validation"),
            "patents": HubClient(dataset=str(tmp_path / "patents.tar.gz"), **patents),
        }
    )
    found = {
        id: {text for part in splits for text in part} for id, splits in texts(section).items()
    }
    assert found == {
        "talks": {f"talk {i}" for i in range(60) if i % 2 and i % 3 == 1},
        "tenders": {f"tender {i}" for i in range(1, 20)},
        "patents": {f"what is claimed {i}" for i in range(10)},
    }


def test_hub_clients_that_are_refused_come_all_at_once(tmp_path, tokenizer, monkeypatch) -> None:
    write_rows(tmp_path / "pajama.jsonl", pajama())
    write_rows(tmp_path / "numbers.jsonl", [{"text": 1, "meta": {"a": 2}}])
    path, numbers = str(tmp_path / "pajama.jsonl"), str(tmp_path / "numbers.jsonl")

    def message(**clients: dict) -> str:
        return refusal(
            TypeAdapter(Data).validate_python({"kind": "hub-clients", "clients": clients}),
            tokenizer,
        )

    found = message(
        a={"dataset": path, "text_column": "body"},
        b={"dataset": path, "where": {"meta.name": "x"}},
        c={"dataset": numbers},
    )
    assert f"data.clients.a: data set {path}: no column 'body'" in found
    assert "Choose among: text, meta.redpajama_set_name." in found
    assert f"data.clients.b: data set {path}: no column 'meta.name'" in found
    assert f"data.clients.c: {numbers}:1: column 'text' is int, not text" in found
    nothing = message(d={"dataset": path, "where": {"meta.redpajama_set_name": "RedPajamaWiki"}})
    assert (
        "0 documents where meta.redpajama_set_name is 'RedPajamaWiki', looking at 1,000,000 rows"
        in nothing
    )
    assert "data.rows" in nothing
    assert "data.clients.e: data set /no/where: no such folder or file" in message(
        e={"dataset": "/no/where"}
    )
    assert "client id 'f/g' is not valid" in message(**{"f/g": {"dataset": path}})
    assert "files of this kind cannot be read" in message(
        h={"dataset": "hf://datasets/some/thing/data.tar.gz"}
    )
    assert "Unknown split" in message(i={"dataset": path, "split": "trian", "streaming": False})

    def broken(*args, **options):
        yield {"text": "one"}
        raise ConnectionError("no route")

    monkeypatch.setattr(hub, "tables", lambda *_: None)
    monkeypatch.setattr(datasets, "load_dataset", broken)
    assert (
        "data.clients.j: cannot read data set some/thing to the end: ConnectionError: no route"
        in message(j={"dataset": "some/thing"})
    )


# The user-specific study (CoMiGS, section 3.3): unlike amounts of data, unlike numbers of experts


@pytest.mark.parametrize("specialists", [(1, 3, 7, 0), (7, 3, 0, 1)])
def test_clients_with_unlike_data_and_experts_train_together(
    corpora_root: Path, tiny_base: Path, tmp_path, specialists
) -> None:
    tokens = [2000, 1000, 500, 800]
    options = [
        f"data.root={corpora_root}",
        f"data.train_tokens={tokens}",
        "data.valid_tokens=300",
        "data.test_tokens=300",
    ]
    options += [
        f"model.base={tiny_base}",
        "model.context=32",
        "model.rank=2",
        "training.batch_size=2",
    ]
    options += [
        "method.name=comigs-1gxs",
        f"method.specialists={list(specialists)}",
        "method.rounds=2",
        "method.local_steps=2",
    ]
    recipe = load("multilingual", [*options, "method.router_every=2", "method.router_steps=1"])
    prepared = prepare(recipe)
    assert [len(data.train) for data in prepared.site.data.values()] == tokens
    assert [
        (prepared.site.layouts[i].generalists, prepared.site.layouts[i].specialists)
        for i in prepared.clients
    ] == [(1, count) for count in specialists]
    [result] = as_json(run(recipe, tmp_path / "run"))
    clients = result["clients"]
    assert list(clients) == ["de", "fr", "it", "nl"]
    by_experts = sorted(clients.values(), key=lambda client: client["trainable_parameters"])
    assert [list(clients.values()).index(client) for client in by_experts] == sorted(
        range(4), key=lambda i: specialists[i]
    )
    assert (
        len({client["bytes_up"] for client in clients.values()}) == 1
    )  # what is shared is the same, however many specialists there are
    for client, count in zip(clients, specialists, strict=True):
        assert personal.load(tmp_path / "run", client).layout.routed == (count > 0)
