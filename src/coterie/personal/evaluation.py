"""Personal models on any text, on conversations and on tasks: choices, and exact answers; and what
a keyboard with a model's suggestions is worth: words foreseen, and keystrokes saved.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase, punctuation, whitespace
from typing import Any, cast

import numpy as np
import torch

from coterie.core.errors import DataError, Refused
from coterie.core.metrics import mean, perplexity
from coterie.core.protocol import ClientId
from coterie.core.result import Evaluated, WordScores
from coterie.data.archives import archives_in
from coterie.data.chats.messages import user
from coterie.data.chats.splits import ChatBatch
from coterie.data.folders import ENDINGS, Folders, files_in
from coterie.data.refusals import Refusals
from coterie.data.rows import CHATS, ending_of, rows_of
from coterie.data.section import CheckedQuestion, Section
from coterie.data.splits import RemoteSplit, Split
from coterie.models.slots import Attachable
from coterie.personal.loading import load_all
from coterie.personal.model import ANSWER, PersonalModel
from coterie.personal.text_inference import Words
from coterie.personal.word_search import PUNCTUATION
from coterie.runs.problems.language import Language
from coterie.runs.problems.loading import whole_text
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe

SHOWN = 3  # suggestions at a time
ROWS = 8  # texts that are searched, or windows that are scored, in one batch
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
    """Return the percent of greedy answers that pass each check, and `all`; None without any."""
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


QUESTION, CHOICES, RIGHT = "question", "choices", "answer"
WORDS = 100  # scored words of a text, by default


@dataclass(frozen=True)
class Question:
    """A question of a task: with choices, of which one is right, or with accepted answers."""

    text: str
    answers: tuple[str, ...]
    right: int | None  # the index of the right choice; None: any of `answers` is right


def evaluate(
    run: Path | str,
    data: Path | str,
    clients: Sequence[ClientId] | None = None,
    *,
    words: int = WORDS,
    me: Sequence[str] = (),
    base: str | None = None,
    device: str = "cpu",
) -> dict[ClientId, Evaluated]:
    """Score the personal language models of a run on a text, on conversations or on a task.

    Examples:
        >>> import coterie, pathlib
        >>> small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
        >>> short = {"name": "fedavg", "rounds": 1, "local_steps": 1}
        >>> run = coterie.run("synthetic", out="words", data=small, method=short)
        >>> text = pathlib.Path("text.txt")
        >>> _ = text.write_text("the water and the fire with the water " * 20)
        >>> scores = coterie.evaluate("words", text, ["client-0"], words=2)["client-0"]
        >>> scores.perplexity > 1, scores.words.words
        (True, 2)

    Args:
        run: A run's folder, or a client's folder in it.
        data: A text file or a folder of such; conversations, in any form that training data may
            have; or JSON lines of questions. A question with `choices`, a list of texts, has the
            index, letter or text of the right one as its `answer`; the chosen one is the most
            likely. A question without choices has a text, or a list of accepted ones; the model's
            own answer must be one of them, apart from capitals, white space and punctuation around.
        clients: Whose models; default: all.
        words: Number of words of a text on which suggestions are scored.
        me: Whose messages in an archive are the answers, see `data.me`.
        base: Path or Hub id of the base, if it has moved since the run.
        device: Where to compute.

    Returns:
        The scores of each client's model.

    Raises:
        DataError: The data cannot be read, or are too short.
        Refused: The run's models are classifiers.
        CheckpointError: As `load`.
    """
    path = Path(data)
    questions = _questions(path)
    models = load_all(run, clients, base=base, device=device)
    if others := [i for i, model in models.items() if not isinstance(model, PersonalModel)]:
        problem = f"{run} holds classifiers (of {others[0]}), which read no text"
        raise Refused(problem, "Use `coterie predict --data` for them.")
    chosen = cast(dict[ClientId, PersonalModel], models)
    if questions:
        return {i: _on_questions(model, questions) for i, model in chosen.items()}
    return {i: _on_text(model, path, words, me) for i, model in chosen.items()}


def _questions(path: Path) -> list[Question]:
    """Return the questions of a file of rows; [] for other data. Raises DataError."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder", "Check the path of the data.")
    if not path.is_file() or not ending_of(path.name):
        return []
    if QUESTION not in next(rows_of([path]), ("", dict[str, Any]()))[1]:
        return []
    questions = []
    with Refusals() as refusals:
        for where, row in rows_of([path]):
            with refusals.gather():
                questions.append(_question(where, row))
    return questions


def _question(where: str, row: Mapping[str, Any]) -> Question:
    text, choices, answer = (row.get(name) for name in (QUESTION, CHOICES, RIGHT))
    labels = None
    if isinstance(choices, Mapping):  # {"text": [...], "label": [...]}, as in ARC
        labels, choices = choices.get("label"), choices.get("text")
        answer = row.get("answerKey", answer)
    if isinstance(answer, float) and answer.is_integer():  # as integers become beside missing ones
        answer = int(answer)
    accepted = [answer] if isinstance(answer, str | int | float) else answer
    given: Any = accepted if choices is None else choices
    answers = tuple(map(str, given)) if isinstance(given, list) else ()
    if not isinstance(text, str) or not answers or not all(map(str.strip, answers)):
        raise DataError(
            f"{where}: a question needs a text as `question`, an `answer`, and may have `choices`, "
            f"a list of texts, none of them empty",
            "Give each row these fields.",
        )
    if choices is None:
        return Question(text, answers, None)
    names = list(map(str, labels or ()))
    if str(answer) in names:
        return Question(text, answers, names.index(str(answer)))
    ways = [given, *([list(ascii_uppercase)] if isinstance(answer, str) else [])]
    meant = {known.index(answer) for known in ways if answer in known} & {*range(len(given))}
    if type(answer) is int and answer in range(len(given)):  # True is no index
        meant.add(answer)
    if len(meant) == 1:
        return Question(text, answers, meant.pop())
    which = "may be one or another" if meant else "is none"
    problem = f"{where}: the answer {answer!r} {which} of the {len(given)} choices"
    raise DataError(problem, "Give the index of the right choice, from 0, its letter, or its text.")


def _on_questions(model: PersonalModel, questions: Sequence[Question]) -> Evaluated:
    likely, by_length, exact = list[bool](), list[bool](), list[bool]()
    for question in questions:
        if question.right is None:
            accepted = {_plain(answer) for answer in question.answers}
            exact.append(_plain(_answer(model, question)) in accepted)
            continue
        scores = _log_likelihoods(model, question)
        sizes = torch.tensor([len(answer) for answer in question.answers])
        likely.append(int(scores.argmax()) == question.right)
        by_length.append(int((scores / sizes.clamp(min=1)).argmax()) == question.right)
    shares = [100 * sum(of) / len(of) if of else None for of in (likely, by_length, exact)]
    accuracy, accuracy_by_length, exact_match = shares
    return Evaluated(
        questions=len(questions),
        accuracy=accuracy,
        by_length=accuracy_by_length,
        exact_match=exact_match,
    )


def _prompt(model: PersonalModel, question: Question) -> str:
    """Return the text that a model continues with its answer: by its chat template if it was
    trained on conversations, otherwise in the form of EleutherAI's evaluation harness.
    """
    if model.about.content == "chats":
        return model.chats.opened([user(question.text)])
    return f"Question: {question.text}\nAnswer:"


def _log_likelihoods(model: PersonalModel, question: Question) -> torch.Tensor:
    """Return the log-probability of each choice as the answer, (choices,)."""
    prompt = _prompt(model, question)
    space = "" if model.about.content == "chats" else " "
    begun = model.texts.prompt(prompt)
    rows = [model.texts.prompt(prompt + space + choice) for choice in question.answers]
    # a long prompt loses its beginning, as in the harness
    cut = [max(len(row) - model.backbone.context_limit - 1, 0) for row in rows]
    width = max(len(row) - dropped for row, dropped in zip(rows, cut, strict=True))
    ids, counted = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    positions = torch.full_like(ids, -1)
    for i, (row, dropped) in enumerate(zip(rows, cut, strict=True)):
        kept = len(row) - dropped
        ids[i, :kept], positions[i, :kept] = torch.tensor(row[dropped:]), torch.arange(kept)
        alike = [a == b for a, b in zip(begun, row[:-1], strict=False)]
        before = [*alike, False].index(False)  # a choice may merge with the prompt's last token
        counted[i, max(before - dropped, 1) : kept] = 1
    logits, targets = model.predicted(ChatBatch(ids, counted.bool(), positions))
    each = logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].cpu()
    counts = counted[:, 1:].sum(dim=1).int().tolist()
    return torch.stack([of_choice.sum() for of_choice in torch.split(each, counts)])


def _answer(model: PersonalModel, question: Question) -> str:
    """Return a model's own answer, the most likely token at a time."""
    if model.about.content == "chats":
        return model.answer(question.text, do_sample=False)
    ids = torch.tensor([model.texts.prompt(_prompt(model, question))])
    room = model.backbone.context_limit - ids.shape[1]
    output = model.generate(ids, do_sample=False, max_new_tokens=max(min(ANSWER, room), 1))
    answer: str = model.tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)
    return answer.strip().split("\n")[0]


def _plain(answer: str) -> str:
    """Return an answer without capitals, and white space and punctuation around it."""
    plain = answer.strip(whitespace + punctuation.translate({ord("-"): None, ord("+"): None}))
    return (plain or answer.strip()).casefold()


def _on_text(model: PersonalModel, path: Path, words: int, me: Sequence[str]) -> Evaluated:
    """Return the scores of a model on a text or on conversations. Raises DataError."""
    about = model.about
    chats = {"content": "chats", "chat_template": about.chat_template, "me": me or None}
    kind = chats if _is_chats(path, about.content) else {}
    section = Folders(control_tokens=about.control_tokens, **kind)
    split = whole_text(section, model.backbone, about.context, about.client, path).test
    nll, tokens = model.score(split.scoring(ROWS))
    search = Words(model.backbone, model.texts)
    scored = word_scores(search, model.fast, split, words) if words else None
    return Evaluated(
        perplexity=perplexity(torch.tensor([nll, tokens])), tokens=tokens, words=scored
    )


def _is_chats(path: Path, trained: str | None) -> bool:
    """Return whether data are conversations, by their first row or else by the model's training."""
    files = files_in(path)
    if archives_in(files):
        return True
    tables = [file for file in files if ending_of(file.name)]
    if tables:
        row = next(rows_of(tables[:1]), ("", dict[str, Any]()))[1]
        return not CHATS.isdisjoint(row)
    return trained == "chats" and not any(ending_of(file.name, ENDINGS) for file in files)
