"""Personal models on any text, on conversations and on tasks: choices, and exact answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import ascii_uppercase, punctuation, whitespace
from typing import Any, cast

import torch

from coterie.core.errors import DataError, Refused
from coterie.core.metrics import perplexity
from coterie.core.protocol import ClientId
from coterie.core.result import Evaluated
from coterie.data.chats.messages import user
from coterie.data.chats.splits import ChatBatch
from coterie.data.folders import ENDINGS, Folders, files_in
from coterie.data.refusals import Refusals
from coterie.data.rows import CHATS, ending_of, rows_of
from coterie.personal.keystrokes import word_scores
from coterie.personal.loading import load_all
from coterie.personal.model import ANSWER, PersonalModel
from coterie.personal.words import Words
from coterie.runs.problems.own_text import whole_text

QUESTION, CHOICES, RIGHT = "question", "choices", "answer"
WORDS = 100  # scored words of a text, by default
ROWS = 8  # windows that are scored at once


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
        raise Refused(
            f"{run} holds classifiers (of {others[0]}), which read no text",
            "Use `coterie predict --data` for them.",
        )
    chosen = cast(dict[ClientId, PersonalModel], models)
    if questions:
        return {i: _on_questions(model, questions) for i, model in chosen.items()}
    return {i: _on_text(model, path, words) for i, model in chosen.items()}


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
    """Return the question of a row. Raises DataError."""
    text, choices, answer = (row.get(name) for name in (QUESTION, CHOICES, RIGHT))
    if isinstance(choices, Mapping):  # {"text": [...], "label": [...]}, as in ARC
        labels, choices = choices.get("label"), choices.get("text")
    else:
        labels = None
    accepted = [answer] if isinstance(answer, str | int | float) else answer
    given = accepted if choices is None else choices
    if not isinstance(text, str) or not isinstance(given, list) or not given:
        raise DataError(
            f"{where}: a question needs a text as `question`, an `answer`, and may have `choices`, "
            f"a list of texts",
            "Give each row these fields.",
        )
    answers = tuple(str(one) for one in given)
    if choices is None:
        return Question(text, answers, None)
    names = [str(label) for label in labels or ascii_uppercase[: len(answers)]]
    if isinstance(answer, int) and answer in range(len(answers)):
        return Question(text, answers, answer)
    for known in (names, list(answers)):
        if str(answer) in known:
            return Question(text, answers, known.index(str(answer)))
    raise DataError(
        f"{where}: the answer {answer!r} is none of the {len(answers)} choices",
        "Give the index of the right choice, from 0, its letter, or its text.",
    )


def _on_questions(model: PersonalModel, questions: Sequence[Question]) -> Evaluated:
    """Return the scores of a model on a task."""
    likely, by_length, exact = list[bool](), list[bool](), list[bool]()
    for question in questions:
        if question.right is None:
            accepted = {_plain(answer) for answer in question.answers}
            exact.append(_plain(_answer(model, question)) in accepted)
            continue
        scores = _log_likelihoods(model, question)
        sizes = torch.tensor([len(answer.encode()) for answer in question.answers])
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
    before = len(model.texts.prompt(prompt))
    rows = [model.texts.prompt(prompt + space + choice) for choice in question.answers]
    # a long prompt loses its beginning, as in the harness
    cut = [max(len(row) - model.backbone.context_limit - 1, 0) for row in rows]
    width = max(len(row) - dropped for row, dropped in zip(rows, cut, strict=True))
    ids, counted = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width)
    positions = torch.full_like(ids, -1)
    for i, (row, dropped) in enumerate(zip(rows, cut, strict=True)):
        kept = len(row) - dropped
        ids[i, :kept], positions[i, :kept] = torch.tensor(row[dropped:]), torch.arange(kept)
        counted[i, max(before - dropped, 1) : kept] = 1
    logits, targets = model.predicted(ChatBatch(ids, counted.bool(), positions))
    each = logits.float().log_softmax(dim=-1).gather(1, targets[:, None])[:, 0].cpu()
    counts = counted[:, 1:].sum(dim=1).int().tolist()
    return torch.stack([of_choice.sum() for of_choice in torch.split(each, counts)])


def _answer(model: PersonalModel, question: Question) -> str:
    """Return a model's own answer, the most likely token at a time."""
    if model.about.content == "chats":
        return model.answer(question.text, do_sample=False)
    prompt = _prompt(model, question)
    room = model.backbone.context_limit - len(model.texts.prompt(prompt))
    text = model.generate(prompt, do_sample=False, max_new_tokens=max(min(ANSWER, room), 1))
    return text[len(prompt) :].strip().split("\n")[0]


def _plain(answer: str) -> str:
    """Return an answer without capitals, and white space and punctuation around it."""
    return answer.strip(whitespace + punctuation).casefold()


def _on_text(model: PersonalModel, path: Path, words: int) -> Evaluated:
    """Return the scores of a model on a text or on conversations. Raises DataError."""
    about = model.about
    chats = {"content": "chats", "chat_template": about.chat_template}
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
    """Return whether data are conversations: by their first row, or if they are not plain text by
    what the model was trained on.
    """
    files = files_in(path)
    tables = [file for file in files if ending_of(file.name)]
    if tables:
        row = next(rows_of(tables[:1]), ("", dict[str, Any]()))[1]
        return not CHATS.isdisjoint(row)
    return trained == "chats" and not any(ending_of(file.name, ENDINGS) for file in files)
