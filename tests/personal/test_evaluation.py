"""`coterie evaluate` against naive computations with whole passes, one text at a time."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_bases import write_jsonl
from typer.testing import CliRunner

import coterie
from coterie.cli import app
from coterie.core.errors import DataError
from coterie.models.layout import Layout
from coterie.personal import PersonalModel
from coterie.personal.evaluation import Question, _log_likelihoods, _plain, _question

LAYOUT = Layout(specialists=2, rank=2)
CHOSEN = [
    {"question": "a b?", "choices": ["cab", "a", "bb b"], "answer": 1},
    {"question": "who?", "choices": ["cab", "a", "bb b"], "answer": "C"},
    {"question": "b?", "choices": {"text": ["ab", "bä"], "label": [1, 2]}, "answerKey": "2"},
]


@pytest.fixture
def run(make_run) -> Path:
    return make_run("llama", ann=LAYOUT, ben=LAYOUT)


def loaded(run: Path, client: str) -> PersonalModel:
    model = coterie.load(run, client)
    assert isinstance(model, PersonalModel)
    return model


@torch.no_grad()
def naive(model: PersonalModel, ids: list[int], first: int) -> float:
    """The log-probability of the tokens from a place on."""
    p = model(torch.tensor([ids])).logits[0].log_softmax(dim=-1)
    return float(sum(p[i - 1, ids[i]] for i in range(first, len(ids))))


def test_the_perplexity_of_a_text_is_the_naive_one(run: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("ab ba cab. b a c " * 5)
    scores = coterie.evaluate(run, path, words=5)
    assert list(scores) == ["ann", "ben"]
    for client, of in scores.items():
        model = loaded(run, client)
        ids = model.tokenizer(path.read_text())["input_ids"]
        ids += [model.tokenizer.eos_token_id]
        context = model.about.context
        rows = [ids[i : i + context + 1] for i in range(0, len(ids) - 1, context)]
        nll = -sum(naive(model, row, 1) for row in rows)
        assert of.tokens == len(ids) - 1
        assert of.perplexity == pytest.approx(math.exp(nll / (len(ids) - 1)), rel=1e-4)
        assert of.words is not None
        assert of.words.words == 5
        assert of.questions is None


def test_a_choice_that_merges_with_the_prompt_is_scored_from_where_they_differ(run: Path) -> None:
    model = loaded(run, "ann")
    prompts = {"Question: ?\nAnswer:": [5, 6, 7]}  # a tokenizer that merges the last two tokens
    rows = {" cab": [5, 6, 7, 9], " b": [5, 8], " a": [5, 6, 8, 9]}
    spoken = prompts | {"Question: ?\nAnswer:" + choice: ids for choice, ids in rows.items()}
    model.texts.prompt = spoken.__getitem__
    scores = _log_likelihoods(model, Question("?", ("cab", "b", "a"), 0))
    firsts = dict(zip(rows, (3, 1, 2), strict=True))
    expected = [naive(model, rows[choice], first) for choice, first in firsts.items()]
    torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-4, atol=1e-4)


def test_choices_are_scored_by_the_naive_likelihood(run: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "task.jsonl", CHOSEN)
    (of,) = coterie.evaluate(run, tmp_path / "task.jsonl", ["ann"]).values()
    model, likely, by_length = loaded(run, "ann"), 0, 0
    for row, right in zip(CHOSEN, (1, 2, 1), strict=True):
        choices = row["choices"]["text"] if isinstance(row["choices"], dict) else row["choices"]
        prompt = f"Question: {row['question']}\nAnswer:"
        first = len(model.tokenizer(prompt)["input_ids"])
        logs = [
            naive(model, model.tokenizer(f"{prompt} {choice}")["input_ids"], first)
            for choice in choices
        ]
        each = [log / len(choice) for log, choice in zip(logs, choices, strict=True)]
        likely += logs.index(max(logs)) == right
        by_length += each.index(max(each)) == right
    assert of.questions == 3
    assert of.accuracy == pytest.approx(100 * likely / 3)
    assert of.by_length == pytest.approx(100 * by_length / 3)
    assert of.exact_match is of.perplexity is None


@pytest.mark.parametrize(
    ("choices", "answer", "right"),
    [
        ({"text": ["x", "y", "z"], "label": [1, 2, 3]}, 1, 0),
        ([10, 20, 30], 20, 1),
        (["1", "2", "3"], "2", 1),
        (["1", "2", "3"], 2, 2),
        ([1, 2, 3], 2, None),
        (["b", "A"], "A", None),
        (["b", "c"], "D", None),
        (["b", "c"], 2, None),
        (["b", ""], "b", None),
        (["b", "c"], 1.0, 1),
        (["yes", "no"], True, None),
    ],
)
def test_an_answer_that_may_be_two_choices_is_refused(
    choices: Any, answer: Any, right: int | None
) -> None:
    row = {"question": "?", "choices": choices, "answer": answer}
    if right is not None:
        assert _question("task.jsonl:1", row).right == right
        return
    with pytest.raises(DataError, match=r"task\.jsonl:1: (the answer .* of the|a question needs)"):
        _question("task.jsonl:1", row)


def test_signs_are_part_of_an_answer() -> None:
    assert _plain(" The answer. ") == _plain("the answer")
    assert _plain("-5") != _plain("5")
    assert _plain("C++.") != _plain("c")
    assert _plain("?") == "?"


def test_an_answer_of_the_models_own_is_compared_without_capitals(
    run: Path, tmp_path: Path
) -> None:
    model = loaded(run, "ann")
    prompt = "Question: ab?\nAnswer:"
    room = 64 - len(model.tokenizer(prompt)["input_ids"])
    said = model.generate(prompt, do_sample=False, max_new_tokens=room)[len(prompt) :]
    own = said.strip().split("\n")[0]
    write_jsonl(
        tmp_path / "task.jsonl",
        [
            {"question": "ab?", "answer": f" {own.swapcase()}."},
            {"question": "ab?", "answer": ["no", own]},
            {"question": "ab?", "answer": "another"},
        ],
    )
    (of,) = coterie.evaluate(run, tmp_path / "task.jsonl", ["ann"]).values()
    assert of.exact_match == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"question": "a?", "choices": ["b", "c"], "answer": 2}, "none of the 2 choices"),
        ({"question": "a?", "choices": ["b", "c"], "answer": "D"}, "none of the 2 choices"),
        ({"question": "a?", "choices": [], "answer": 0}, "a question needs"),
        ({"question": 3, "answer": "b"}, "a question needs"),
        ({"question": "a?"}, "a question needs"),
    ],
)
def test_mistakes_in_questions_are_found_before_a_model_is_loaded(row, problem, tmp_path) -> None:
    write_jsonl(tmp_path / "task.jsonl", [CHOSEN[0], row])
    with pytest.raises(DataError, match=problem) as error:
        coterie.evaluate(tmp_path / "no run", tmp_path / "task.jsonl")
    assert "task.jsonl" in str(error.value)
    assert "2" in str(error.value)


def test_missing_data_and_classifiers_are_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        coterie.evaluate(run, tmp_path / "nothing.txt")


def test_the_command_prints_a_table_or_json(run: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "task.jsonl", CHOSEN)
    arguments = ["evaluate", str(run), "--data", str(tmp_path / "task.jsonl"), "--client", "ben"]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == 0, shown.output
    assert "right choice" in " ".join(shown.output.split())
    said = CliRunner().invoke(app, [*arguments, "--json"])
    (of,) = coterie.evaluate(run, tmp_path / "task.jsonl", ["ben"]).values()
    assert json.loads(said.output) == {"ben": of.to_json()}
    assert CliRunner().invoke(app, [*arguments[:3], "no.txt"]).exit_code != 0
