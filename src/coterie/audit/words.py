"""Test whether one client's rare words appear in another client's suggestions."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from coterie.audit.statistics import Values, bootstrapped, proportion
from coterie.core.protocol import ClientId
from coterie.core.result import Estimate, WordExample, WordsResult
from coterie.data.chats import ChatSplit
from coterie.data.splits import Split, TokenSplit

WORD = re.compile(r"[^\W\d_]{3,}")
LEAST = 2  # how often a word must occur in its client's training text
BEFORE = 160  # characters of a prompt, at most
TOGETHER = 32  # prompts at once
EXAMPLES = 8

Suggest = Callable[[Sequence[str]], list[list[str]]]  # the likeliest next words of each text


@dataclass(frozen=True)
class Case:
    """A word at a place of a text of its client.

    Args:
        owner: The client.
        word: As it stands there.
        prompt: What stands before it.
    """

    owner: ClientId
    word: str
    prompt: str


def documents(tokenizer: Any, split: Split) -> list[str]:
    """Return the texts of a split: those that the tokenizer's end token separates in running text,
    or each conversation or document that is read by itself.
    """
    if isinstance(split, ChatSplit):
        parts = [split.conversation(number) for number in range(len(split.lengths))]
    else:
        assert isinstance(split, TokenSplit)
        ids = split.tokens.astype(np.int64)
        parts = np.split(ids, np.flatnonzero(ids == tokenizer.eos_token_id))
    texts = (tokenizer.decode(part, skip_special_tokens=True) for part in parts if len(part) > 1)
    return list(texts)


def vocabulary(texts: Sequence[str]) -> Counter[str]:
    """Count the words of some texts, whatever their case."""
    return Counter(word.casefold() for text in texts for word in WORD.findall(text))


def rare(
    texts: Mapping[ClientId, Mapping[str, Sequence[str]]], most: int, rng: np.random.Generator
) -> tuple[list[Case], list[Case]]:
    """Choose words that only one client has and, as a control, words that no client was trained on.

    Args:
        texts: By client, then by split.
        most: Words of each client, at most: its most frequent ones; ties are broken at random.
        rng: Chooses.

    Returns:
        Words that occur at least twice in one client's training text and in no split of anybody
        else; and words of a client's test text that are in nobody's training or validation text.
    """
    words_of = {
        i: {split: vocabulary(documents) for split, documents in splits.items()}
        for i, splits in texts.items()
    }
    taught = {word for splits in words_of.values() for word in (*splits["train"], *splits["valid"])}
    cases: list[Case] = []
    control: list[Case] = []
    for i, splits in words_of.items():
        others = [splits.values() for j, splits in words_of.items() if j != i]
        elsewhere = {word for counts in chain.from_iterable(others) for word in counts}
        alone = [
            word
            for word, count in splits["train"].items()
            if count >= LEAST and word not in elsewhere
        ]
        unseen = [word for word in splits["test"] if word not in taught]
        cases += _places(i, alone, texts[i]["train"], most, rng)
        control += _places(i, unseen, texts[i]["test"], most, rng)
    return cases, control


def _places(
    owner: ClientId, words: Sequence[str], texts: Sequence[str], most: int, rng: np.random.Generator
) -> list[Case]:
    """Each of some words at one of its places, with at least one word before it."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    sought = set(words)
    for number, text in enumerate(texts):
        for match in WORD.finditer(text):
            if (
                match[0].casefold() in sought
                and text[: match.start()].strip()
                and text[match.start() - 1].isspace()
            ):
                places.setdefault(match[0].casefold(), []).append(
                    (number, match.start(), match.end())
                )
    chosen = sorted(rng.permutation(sorted(places)).tolist(), key=lambda word: -len(places[word]))[
        :most
    ]
    cases = []
    for word in chosen:
        number, start, end = places[word][rng.integers(len(places[word]))]
        text = texts[number]
        prompt = text[max(start - BEFORE, 0) : start]
        cases.append(
            Case(
                owner,
                text[start:end],
                prompt if start <= BEFORE else prompt.partition(" ")[2] or prompt,
            )
        )
    return cases


def suggested(cases: Sequence[Case], suggest: Suggest) -> Values:
    """Return (cases,) 1 where a word is among the suggestions for what stands before it, else 0."""
    suggestions: list[float] = []
    for start in range(0, len(cases), TOGETHER):
        part = cases[start : start + TOGETHER]
        for case, words in zip(part, suggest([case.prompt for case in part]), strict=True):
            suggestions.append(float(case.word.casefold() in {word.casefold() for word in words}))
    return np.array(suggestions)


def measured(
    cases: Sequence[Case],
    control: Sequence[Case],
    base: Suggest,
    shared: Suggest,
    models: Mapping[ClientId, Suggest],
    seed: int,
) -> WordsResult:
    """Return how often others suggest words that one client alone has, of those that the base does
    not suggest.

    Args:
        cases: Of `rare`.
        control: Likewise.
        base: The base's suggestions.
        shared: Those of the shared part alone.
        models: Those of the clients' personal models.
        seed: Of the intervals.
    """
    new, fresh = (
        [case for case, known in zip(some, suggested(some, base), strict=True) if not known]
        for some in (cases, control)
    )
    hits = {i: suggested(new, suggest) for i, suggest in models.items()}
    by_shared = suggested(new, shared)
    others = _of_others(new, hits)
    unseen = _of_others(fresh, {i: suggested(fresh, suggest) for i, suggest in models.items()})
    owners = np.array([hits[case.owner][k] for k, case in enumerate(new)])
    return WordsResult(
        words=len(new),
        known_to_the_base=len(cases) - len(new),
        others=_estimate(others, seed),
        shared=_estimate(by_shared, seed),
        owner=_estimate(owners, seed),
        control=_estimate(unseen, seed),
        control_words=len(fresh),
        examples=_examples(new, hits, by_shared),
    )


def _of_others(cases: Sequence[Case], hits: Mapping[ClientId, Values]) -> Values:
    """(cases,) the share of the other clients whose models suggest each word."""
    return np.array(
        [
            np.mean([hit[k] for i, hit in hits.items() if i != case.owner])
            for k, case in enumerate(cases)
        ]
    )


def _estimate(rates: Values, seed: int) -> Estimate | None:
    """Return the mean over words, with an exact interval where it is of yes or no; None without
    any.
    """
    if not len(rates):
        return None
    return (
        proportion(int(rates.sum()), len(rates))
        if set(rates.tolist()) <= {0.0, 1.0}
        else bootstrapped([rates], lambda groups: float(groups[0].mean()), seed, "words")
    )


def _examples(
    cases: Sequence[Case], hits: Mapping[ClientId, Values], shared: Values
) -> tuple[WordExample, ...]:
    """Return some of the words that others suggest, those of most others first."""
    by = {
        k: [i for i, hit in hits.items() if i != case.owner and hit[k]]
        for k, case in enumerate(cases)
    }
    order = sorted((k for k in by if by[k]), key=lambda k: -len(by[k]))[:EXAMPLES]
    return tuple(
        WordExample(
            word=cases[k].word,
            owner=cases[k].owner,
            prompt=cases[k].prompt[-40:],
            by=by[k],
            shared=bool(shared[k]),
        )
        for k in order
    )
