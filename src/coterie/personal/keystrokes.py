"""What a keyboard with a model's suggestions is worth: words foreseen, and keystrokes saved."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from coterie.core.metrics import mean
from coterie.core.protocol import ClientId
from coterie.core.result import WordScores
from coterie.data.chats.splits import ChatBatch
from coterie.data.section import CheckedQuestion, Section
from coterie.data.splits import RemoteSplit, Split
from coterie.models.slots import Attachable
from coterie.personal.loading import load_all
from coterie.personal.model import PersonalModel
from coterie.personal.word_search import PUNCTUATION
from coterie.personal.words import Words
from coterie.runs.problems.language import Language
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe

SHOWN = 3  # suggestions at a time
ROWS = 16  # texts that are searched in one batch
_WORD = re.compile(rf"[^\s{re.escape(''.join(sorted(PUNCTUATION)))}]+")


@dataclass(frozen=True)
class WordToType:
    """A word of a text, and the text before it."""

    before: str
    word: str


def word_scores(search: Words, adapter: Attachable, split: Split, most: int) -> WordScores | None:
    """Return how well three suggestions foresee `most` words, evenly spaced over a split, of
    conversations those of counted answers; None if it has no word.

    Someone types each word letter by letter and a space after it. As soon as the word is shown, one
    keystroke writes the rest of it with the space.
    """
    places = list(_places(search, split, most))
    if not places:
        return None
    places = [places[i] for i in _even(len(places), most)]
    first = shown = saved = typed = 0
    waiting = places
    while waiting:
        later = []
        for start in range(0, len(waiting), ROWS):
            some = waiting[start : start + ROWS]
            texts = [place.before + place.word[:typed] for place in some]
            for place, words in zip(some, search.of(adapter, texts, SHOWN), strict=True):
                offered = [word.word for word in words]
                if place.word in offered:
                    shown += not typed
                    first += not typed and offered[0] == place.word
                    saved += len(place.word) - typed
                elif len(place.word) > typed + 1:
                    later.append(place)
        waiting, typed = later, typed + 1
    keystrokes = sum(len(place.word) + 1 for place in places)
    share = 100 / len(places)
    return WordScores(len(places), first * share, shown * share, 100 * saved / keystrokes)


def of_run(
    folder: Path, problem: LearningProblem, recipe: Recipe
) -> Mapping[ClientId, Mapping[str, Any]]:
    """Return the scores of the personal models in a run's folder by what they write, as fields of
    `ClientResult`: on words of the clients' test texts, if the recipe asks for them, and of answers
    to the data's questions, if there are any; {} for texts on other machines.
    """
    if not isinstance(problem, Language) or not isinstance(recipe.data, Section):
        return {}
    splits = {i: data.test for i, data in problem.federation.everyone.items()}
    questions = {i: recipe.data.questions(i) for i in splits}
    far = any(isinstance(split, RemoteSplit) for split in splits.values())
    if far or not (recipe.words or any(questions.values())):
        return {}
    search, scores = None, dict[ClientId, Mapping[str, Any]]()
    for id, model in load_all(folder, backbone=problem.backbone).items():
        assert isinstance(model, PersonalModel)
        search = search or Words(problem.backbone, model.texts)
        words = word_scores(search, model.fast, splits[id], recipe.words) if recipe.words else None
        scores[id] = {"words": words, "answers": answer_scores(model, questions[id])}
    return scores


def answer_scores(
    model: PersonalModel, questions: Sequence[CheckedQuestion]
) -> dict[str, float] | None:
    """Return the percent of a model's answers, the most likely token at a time, that pass each
    check, and `all`; None without questions.
    """
    passed = []
    for one in questions:
        answer = model.answer(one.question, do_sample=False)
        checks = {name: check(answer) for name, check in one.checks.items()}
        passed.append(checks | {"all": all(checks.values())})
    return {name: 100 * mean(of[name] for of in passed) for name in passed[0]} if passed else None


def _even(count: int, most: int) -> list[int]:
    """Return at most `most` indices, evenly spaced."""
    return list(map(int, np.linspace(0, count - 1, min(most, count))))


def _places(search: Words, split: Split, most: int) -> Iterator[WordToType]:
    """Yield the words of `most` rows of a split, each after its row's text."""
    special = search.texts.special
    for row in _even(split.windows, most):
        batch = split.take(np.array([row]))
        for ids, counted, whole in _passages(batch):
            start = 0
            while start < len(ids):
                end = start
                while end < len(ids) and counted[end] and ids[end] not in special:
                    end += 1
                yield from _words(search, ids, start, end, whole)
                start = end + 1


def _passages(batch: Any) -> Iterator[tuple[list[int], list[bool], bool]]:
    """Yield the token ids of each text of a row, which of them count, and whether it is whole."""
    if not isinstance(batch, ChatBatch):
        (ids,) = batch.tolist()
        yield ids, [False] + [True] * (len(ids) - 1), False
        return
    ids, counted, positions = (t[0].tolist() for t in (batch.ids, batch.counted, batch.positions))
    starts = [i for i, position in enumerate(positions) if position == 0]
    ends = [*starts[1:], sum(position >= 0 for position in positions)]
    for start, end in zip(starts, ends, strict=True):
        yield ids[start:end], counted[start:end], True


def _words(
    search: Words, ids: list[int], start: int, end: int, whole: bool
) -> Iterator[WordToType]:
    """Yield the words of ids[start:end]. A window may begin and end within a word."""
    if start == end:
        return
    before = search.texts.marked(search.vocabulary.decode(ids[:start]))
    text = search.vocabulary.decode(ids[start:end])
    for match in _WORD.finditer(text):
        begins = whole or start > 1 or match.start() > 0
        ends = whole or end < len(ids) or match.end() < len(text)
        if begins and ends and any(map(str.isalnum, match[0])) and "\ufffd" not in match[0]:
            yield WordToType(search.texts.begun(before + text[: match.start()]), match[0])
