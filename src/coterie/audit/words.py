"""Test whether one client's rare words appear in another client's suggestions."""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from coterie.audit.statistics import Values, bootstrapped, proportion
from coterie.core.protocol import ClientId
from coterie.core.result.audit import Estimate, WordExample, WordsResult
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
    """A word at a place of a text of its owner, and the text before it."""

    owner: ClientId
    word: str
    prompt: str


def documents(tokenizer: Any, split: Split) -> list[str]:
    """Return the texts of a split: those between the tokenizer's end tokens in running text, or
    each conversation or document that is read by itself.
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
    """Choose words of texts, by client and split, that only one client has and, as a control, words
    that no client was trained on: the `most` most frequent of each client; ties are broken at
    random.

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
        often = {word for word, count in splits["train"].items() if count >= LEAST}
        alone, unseen = often - elsewhere, splits["test"].keys() - taught
        cases += _places(i, alone, texts[i]["train"], most, rng)
        control += _places(i, unseen, texts[i]["test"], most, rng)
    return cases, control


def _places(
    owner: ClientId, words: Set[str], texts: Sequence[str], most: int, rng: np.random.Generator
) -> list[Case]:
    """Return each word at one of its places, with at least one word before it."""
    places: dict[str, list[tuple[str, int, int]]] = {}
    for text in texts:
        for match in WORD.finditer(text):
            word, start = match[0].casefold(), match.start()
            if word in words and text[:start].strip() and text[start - 1].isspace():
                places.setdefault(word, []).append((text, *match.span()))
    permuted = rng.permutation(sorted(places)).tolist()
    cases = []
    for word in sorted(permuted, key=lambda word: -len(places[word]))[:most]:
        text, start, end = places[word][rng.integers(len(places[word]))]
        prompt = text[max(start - BEFORE, 0) : start]
        # not from the middle of a word
        whole = prompt if start <= BEFORE else prompt.partition(" ")[2] or prompt
        cases.append(Case(owner, text[start:end], whole))
    return cases


def suggested(cases: Sequence[Case], suggest: Suggest) -> Values:
    """Return (cases,) 1 if the word is among the suggestions for the text before it, else 0."""
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
    """Return how often the shared part alone, and the clients' personal models, suggest the words
    of others in `rare`, of those that the base does not suggest. `seed` is that of the intervals.
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
    """Return (cases,) the share of the other clients whose models suggest each word."""
    owners = enumerate(case.owner for case in cases)
    by_others = ([hit[k] for i, hit in hits.items() if i != owner] for k, owner in owners)
    return np.array([np.mean(of_others) for of_others in by_others])


def _estimate(rates: Values, seed: int) -> Estimate | None:
    """Return the mean over words, if any, with an exact interval if each rate is 0 or 1."""
    if not len(rates):
        return None
    if set(rates.tolist()) <= {0.0, 1.0}:
        return proportion(int(rates.sum()), len(rates))
    return bootstrapped([rates], lambda groups: float(groups[0].mean()), seed, "words")


def _examples(
    cases: Sequence[Case], hits: Mapping[ClientId, Values], shared: Values
) -> tuple[WordExample, ...]:
    """Return some of the words that others suggest, those of most others first."""
    examples = []
    for k, case in enumerate(cases):
        if by := [i for i, hit in hits.items() if i != case.owner and hit[k]]:
            about = {**vars(case), "prompt": case.prompt[-40:]}
            examples.append(WordExample(**about, by=by, shared=bool(shared[k])))
    return tuple(sorted(examples, key=lambda example: -len(example.by))[:EXAMPLES])
