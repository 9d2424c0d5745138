"""The scores of a keyboard's suggestions against a person who types one letter at a time."""

import re

import numpy as np
import pytest

import coterie
from coterie.data.splits import TokenSplit
from coterie.models.layout import Layout
from coterie.personal import PersonalModel
from coterie.personal.evaluation import word_scores
from coterie.personal.text_inference import Words

CONTEXT = 24
SIZE = 4 * CONTEXT + 1


def typed(model: PersonalModel, before: str, word: str) -> tuple[bool, bool, int]:
    """Whether the first suggestion and the first three have the word, and all keys pressed."""
    words = [suggestion.word for suggestion in model.next_words(before, 3)]
    keys = 0
    while word not in [w.word for w in model.next_words(before + word[:keys], 3)]:
        keys += 1
        if keys == len(word):
            break
    return word == words[0], word in words, keys + 1  # a suggestion, or the space


@pytest.mark.parametrize("seed", [0, 1])
def test_scores_are_those_of_a_person_who_types(make_run, seed: int) -> None:
    model = coterie.load(make_run("few", ann=Layout(specialists=2, rank=2)), "ann")
    assert isinstance(model, PersonalModel)
    ids = np.random.default_rng(seed).integers(1, 12, SIZE, dtype=np.uint16)
    split = TokenSplit("test", ids, CONTEXT, 0)
    every = list[tuple[bool, bool, int, int]]()
    for start in range(0, SIZE - 1, CONTEXT):
        row = ids[start : start + CONTEXT + 1].tolist()
        first = len(model.tokenizer.decode(row[:1]))
        text = model.tokenizer.decode(row)
        every += [
            (*typed(model, text[: match.start()], match[0]), len(match[0]))
            for match in re.finditer(r"(?<=[ \n.])[abc']*[abc][abc']*(?=[ \n.])", text)
            if match.start() > first
        ]
    assert len(every) > 8
    scores = word_scores(Words(model.backbone, model.texts), model.fast, split, 1000)
    assert scores is not None
    assert scores.words == len(every)
    firsts, threes, keys, letters = (list(column) for column in zip(*every, strict=True))
    assert scores.first == pytest.approx(100 * np.mean(firsts))
    assert scores.first_three == pytest.approx(100 * np.mean(threes))
    strokes = sum(letters) + len(letters)
    assert scores.keystrokes_saved == pytest.approx(100 * (1 - sum(keys) / strokes))
    assert 0 < scores.keystrokes_saved < 100


def test_fewer_words_are_some_of_them(make_run) -> None:
    model = coterie.load(make_run("few", ann=Layout(specialists=2, rank=2)), "ann")
    assert isinstance(model, PersonalModel)
    ids = np.random.default_rng(2).integers(1, 12, SIZE, dtype=np.uint16)
    split = TokenSplit("test", ids, CONTEXT, 0)
    scores = word_scores(Words(model.backbone, model.texts), model.fast, split, 3)
    assert scores is not None
    assert scores.words == 3


def test_a_text_without_words_has_no_scores(make_run) -> None:
    model = coterie.load(make_run("few", ann=Layout(specialists=2, rank=2)), "ann")
    assert isinstance(model, PersonalModel)
    dots = TokenSplit("test", np.full(SIZE, 3, dtype=np.uint16), CONTEXT, 0)
    assert word_scores(Words(model.backbone, model.texts), model.fast, dots, 3) is None
