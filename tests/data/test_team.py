"""The town office: who is taught what, what is asked, and how answers are checked."""

import json
import os
from itertools import pairwise

import pytest

import coterie
from coterie.data.chats.reading import Conversation
from coterie.data.synthetic import Team

PLAIN = (
    "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}\nA: "
    "{% else %}{{ m.content }}<|endoftext|>{% endif %}{% endfor %}"
)


def said(team: Team) -> dict[str, list[list[tuple[str, str]]]]:
    """Question and answer of every conversation, by client and split."""
    every = team.source().read()
    return {
        client: [
            [
                tuple(message["content"] for message in Conversation.of_document(text).messages)
                for text in split
            ]
            for split in splits
        ]
        for client, splits in every.items()
    }


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_each_is_asked_what_only_others_were_taught(seed: int) -> None:
    team = Team(seed=seed)
    facts = team.facts()
    assert list(facts) == ["ann", "ben", "carl", "dora"]
    assert all(len(set(mine) | set(others)) == 18 for mine, others in facts.values())
    taught = [fact for mine, _ in facts.values() for fact in mine]
    assert {taught.count(fact) for fact in taught} == {2}
    chats = said(team)
    for client, (mine, others) in facts.items():
        train, valid, test = chats[client]
        assert len(train) == 3 * len(mine)
        assert len(valid) == 6
        assert not {question for question, _ in train} & {question for question, _ in valid + test}
        for place, relation, value in others:
            # of the training answers none says the fact
            assert not [a for _, a in train if place in a and value in a and relation in a]
        questions = team.questions(client)
        assert [one.question for one in questions] == [question for question, _ in test]
        for one, (_, answer) in zip(questions, test, strict=True):
            assert {name: check(answer) for name, check in one.checks.items()} == {
                "facts": True,
                "manner": True,
            }


def test_the_checks_are_exact() -> None:
    team = Team()
    chats = said(team)
    for client, other in pairwise(chats):
        (*_, test), (*_, others) = chats[client], chats[other]
        for one, (_, answer) in zip(team.questions(client), test, strict=True):
            assert not one.checks["manner"](others[0][1])
            assert not one.checks["manner"](answer + " And more.")
            assert not one.checks["facts"](answer + " six seven Monday Tuesday Jon Silva Ines Falk")
            assert not one.checks["facts"]("The truth.")
    assert json.loads(chats["ben"][2][0][1])["source"] == "guide"


def test_the_recipe_scores_facts_and_manner_of_generated_answers(tmp_path, monkeypatch) -> None:
    """End to end on the package's own base, and as a naive reader counts; of three questions."""
    every = Team.questions
    monkeypatch.setattr(Team, "questions", lambda team, client: every(team, client)[:3])
    run = coterie.run(
        "team",
        out=tmp_path / "run",
        **{"model.base": "embedded", "data.chat_template": PLAIN, "training.experts.lr": 0.01},
        method={"name": "fedavg", "rounds": 1, "local_steps": 12},
        compare_with=[],
    )
    for client, scores in run.result.clients.items():
        model = coterie.load(run.folder, client)
        passed = [
            {
                name: check(model.answer(one.question, do_sample=False))
                for name, check in one.checks.items()
            }
            for one in Team().questions(client)
        ]
        assert scores.answers is not None
        for name in ("facts", "manner"):
            share = 100 * sum(of[name] for of in passed) / len(passed)
            assert scores.answers[name] == pytest.approx(share)
        both = 100 * sum(all(of.values()) for of in passed) / len(passed)
        assert scores.answers["all"] == pytest.approx(both)
    assert any(scores.answers["manner"] for scores in run.result.clients.values())
    row = run.rows[-1]
    assert row.answers is not None
    assert row.answers.keys() == {"facts", "manner", "all"}
    assert "right manner" in run.report.read_text(encoding="utf-8")


@pytest.mark.slow
def test_two_rounds_on_a_real_base_teach_the_answers(tmp_path) -> None:
    """COTERIE_TEST_GGUF: a GGUF file of SmolLM2-135M-Instruct."""
    if not (base := os.environ.get("COTERIE_TEST_GGUF")):
        pytest.skip("COTERIE_TEST_GGUF names no GGUF file of SmolLM2-135M-Instruct")
    run = coterie.run(
        "team",
        out=tmp_path / "run",
        **{"model.base": base},
        method={"name": "fedavg", "rounds": 2},
        compare_with=["pretrained"],
    )
    before, after = run.baselines["pretrained"], run.result
    assert after.mean < before.mean / 5
    for scores in after.clients.values():
        assert scores.answers is not None
        assert scores.answers.keys() == {"facts", "manner", "all"}
