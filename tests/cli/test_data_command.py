"""`coterie data`: what is read is shown before anything is trained."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from chat_bases import turns, write_chat_base, write_jsonl
from typer.testing import CliRunner

from coterie.cli.base import app
from coterie.models.architecture import tokenizer
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe, load

WORDS = ("the", "cat", "sat", "on", "mat", "while", "dogs", "ran", "over", "hills", "and", "home")


def look(*words: str) -> str:
    done = CliRunner().invoke(app, ["data", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def figures(*words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(look(*words, "--json"))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ann and Ben, who share thirty texts."""
    root, chance = tmp_path_factory.mktemp("2024"), random.Random(0)
    texts = [" ".join(chance.choices(WORDS, k=60)) for _ in range(90)]
    for id, numbers in (("ann", range(60)), ("ben", range(30, 90))):
        (root / id).mkdir()
        for number in numbers:
            (root / id / f"{number}.txt").write_text(texts[number] + "\n" * (id == "ben"))
    (root / "ann" / "again.txt").write_text(f"  {texts[0]}\r\n")
    (root / "ann" / "odd.txt").write_text(
        f"sch\u00c3\u00b6n \u200b {texts[1][:9]} \u043c\u0438\u0440"
    )
    (root / "ben" / "near.txt").write_text(f"{texts[40]} indeed")
    (root / "ben" / "letter.docx").write_bytes(b"PK")
    return root


def test_what_is_read_shared_and_odd_is_counted(folder: Path) -> None:
    found = figures(str(folder), "--files", "--set", "model.context=32")
    ann, ben = found["clients"]["ann"], found["clients"]["ben"]
    assert sum(split["documents"] for split in ann["splits"].values()) == 62
    assert (ann["repeated"], ann["shared"], ann["crossing"]) == (1, 30, 0)
    assert (ben["repeated"], ben["shared"], ben["crossing"]) == (0, 30, 0)
    assert ann["near"] == 1
    assert ben["near"] == 2
    assert ben["not_read"] == {".docx": 1}
    assert sorted(ann["odd"].values()) == [1, 1]
    assert not ben["odd"]
    assert ann["scripts"].keys() == {"LATIN", "CYRILLIC"}
    assert any("ann and ben share 30 documents" in note for note in found["notes"])
    assert any("1 .docx" in note for note in found["notes"])
    for number in range(30, 60):
        places = [
            client["files"][str(folder / id / f"{number}.txt")]
            for id, client in found["clients"].items()
        ]
        assert places[0] == places[1]
        assert len(places[0]) == 1


def test_what_is_shown_is_what_is_trained(folder: Path) -> None:
    recipe = load("folders", [f"data.path={folder}", "model.context=32"])
    base = tokenizer(recipe.model.base)
    federation = recipe.data.load(base, 32)
    found = figures(str(folder), "--examples", "2", "--set", "model.context=32")
    for id, data in federation.clients.items():
        shown = found["clients"][id]
        for split in data.splits:
            tokens = split.tokens.tolist()
            ends = [-1, *(i for i, token in enumerate(tokens) if token == base.eos_token_id)]
            lengths = [end - start for start, end in pairwise(ends)]
            summary = shown["splits"][split.name]
            assert summary["tokens"] == len(tokens)
            assert summary["longest"] == max(lengths)
            assert summary["counted"] == (len(tokens) - 1) // 32 * 32
        for number, row in enumerate(shown["examples"]):
            ids = data.train.tokens[32 * number : 32 * number + 33].tolist()
            assert "".join(token["text"] for token in row) == base.decode(ids)
            assert [token["counted"] for token in row] == [False] + 32 * [True]


def test_tables_in_a_terminal_name_the_clients_that_are_asked_for(folder: Path) -> None:
    shown = look(str(folder), "--client", "ben", "--examples", "0")
    assert "ben" in shown
    assert "with loss" in shown
    assert " ann " not in shown.split("median")[1]
    done = CliRunner().invoke(app, ["data", str(folder), "--client", "cid"])
    assert done.exit_code == 2
    assert "There are: ann, ben" in done.output


def test_of_chats_the_answers_have_loss(tmp_path: Path) -> None:
    base = write_chat_base(tmp_path / "base")
    for id in ("ann", "ben"):
        (tmp_path / "chats" / id).mkdir(parents=True)
        rows = [{"messages": turns(f"{id} {i}", f"no {i}")} for i in range(6)]
        write_jsonl(tmp_path / "chats" / id / "a.jsonl", rows)
    settings = ("--set", f"model.base={base}", "--set", "model.context=100")
    found = figures(str(tmp_path / "chats"), *settings, "--files")
    ann = found["clients"]["ann"]
    (row,) = ann["examples"]
    text = "".join(token["text"] for token in row if token["counted"])
    assert text.startswith("no ")
    assert "ann" not in text
    ends = [token["text"] for token in row if token["special"] and token["counted"]]
    assert ends == ["<|im_end|>"] * text.count("no ")
    assert len(ann["files"]) == 6
    assert ann["scripts"] == {"LATIN": 1}


def test_sources_are_told_apart(tmp_path: Path) -> None:
    def data_of(source: Path, *overrides: str) -> Any:
        return recipes.load(str(source), overrides).data

    (tmp_path / "2024" / "ann").mkdir(parents=True)
    (tmp_path / "2024" / "ann" / "a.txt").write_text("hello")
    texts = data_of(tmp_path / "2024")
    assert (texts.kind, texts.path, texts.content) == ("folders", tmp_path / "2024", "text")
    table = write_jsonl(tmp_path / "t.jsonl", [{"client": "a", "messages": []}])
    chats = data_of(table)
    assert (chats.kind, chats.path, chats.content) == ("table", table, "chats")
    assert data_of(table, "data.content=text").content == "text"
    write_jsonl(tmp_path / "2024" / "ann" / "b.jsonl", [{"messages": []}])
    assert data_of(tmp_path / "2024").content == "text"  # a text beside it
    (tmp_path / "chats" / "ann").mkdir(parents=True)
    (tmp_path / "chats" / "ann" / "talk.txt").write_text(
        "12.05.24, 14:32 - Ann: hello\n12.05.24, 14:33 - Ben: and you\n" * 5
    )
    assert data_of(tmp_path / "chats").content == "chats"
    named = ["folders", f"data.path={tmp_path / 'chats'}"]
    assert recipes.load(named[0], named[1:]).data.content == "chats"  # type: ignore[union-attr]
    assert Recipe.load(tmp_path / "chats").name == "folders"


def test_chats_of_the_embedded_base_need_no_template_of_ones_own(tmp_path: Path) -> None:
    for id in ("ann", "ben"):
        (tmp_path / "chats" / id).mkdir(parents=True)
        rows = [{"messages": turns(f"who is {i}", f"it is {id} {i}")} for i in range(8)]
        write_jsonl(tmp_path / "chats" / id / "a.jsonl", rows)
    found = figures(str(tmp_path / "chats"), "--set", "model.context=64")
    (row,) = found["clients"]["ann"]["examples"]
    answers = "".join(token["text"] for token in row if token["counted"])
    assert answers.startswith(" it is ann ")
    assert answers.endswith("<|endoftext|>")


def test_rows_that_lack_the_same_column_are_one_line_per_folder(tmp_path: Path) -> None:
    for id in ("ann", "ben"):
        (tmp_path / "own" / id).mkdir(parents=True)
        for name in "ab":
            write_jsonl(tmp_path / "own" / id / f"{name}.jsonl", [{"body": "x"}] * 9)
    done = CliRunner().invoke(app, ["data", str(tmp_path / "own")])
    assert done.exit_code == 2
    lines = [line for line in done.stderr.splitlines() if "no column" in line]
    ends = "a.jsonl:1: no column 'text' (found: body), as in 17 more"
    assert [line.endswith(ends) for line in lines] == [True, True]


def test_labelled_data_are_not_for_it() -> None:
    done = CliRunner().invoke(app, ["data", "cobo-digits"])
    assert done.exit_code == 2
    assert "--dry-run" in done.output
