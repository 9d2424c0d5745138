"""The next words against a naive computation: every spelling, by whole passes without a cache,
one sequence at a time.
"""

import re
from collections.abc import Iterator
from itertools import product

import pytest
import torch

import coterie
from coterie.data.text_encoding import TextEncoder
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import PersonalModel
from coterie.personal.text_inference import LONGEST, Words

LAYOUT = Layout(specialists=2, rank=2)
INSIDE = ("'", "a", "b", "c", "ab")  # tokens that go on with a word
EVERYTHING = ("".join(letters) for length in (1, 2, 3) for letters in product("abc", repeat=length))


def spellings(text: str, tokens: list[str]) -> Iterator[list[int]]:
    """Every way to write the text in tokens."""
    if not text:
        yield []
    for i, token in enumerate(tokens):
        if text.startswith(token):
            for rest in spellings(text.removeprefix(token), tokens):
                yield [i, *rest]


def beginnings(text: str, tokens: list[str]) -> Iterator[list[int]]:
    """Every shortest sequence of tokens that begins with the text."""
    for i, token in enumerate(tokens):
        if token.startswith(text):
            yield [i]
        elif text.startswith(token):
            for rest in beginnings(text.removeprefix(token), tokens):
                yield [i, *rest]


def parted(text: str) -> tuple[str, str]:
    """What is before the last word of a text, and that word with the space before it: nothing
    behind a full stop, or without text.
    """
    end = re.search(r" ?[abc']*$", text)[0] if text.strip() else ""
    return text[: len(text) - len(end)] if text.strip() else "", end.replace(" ", "Ġ")


def forward(
    model: PersonalModel, head: list[int], spellings: list[list[int]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(S, C + 1, V) the probabilities where each token of each spelling was chosen, and of what
    follows; (S, C + 1, n) the experts'.
    """
    width = max(map(len, spellings))
    ids = torch.tensor([head + spelling + [0] * (width - len(spelling)) for spelling in spellings])
    p = model.language.forward(ids).detach().softmax(dim=-1)
    return p[:, len(head) - 1 :], model.routing(ids)[:, :, len(head) - 1 :].mean(dim=0)


def naive(model: PersonalModel, text: str, insert: str) -> tuple[float, list[torch.Tensor]]:
    """Compute P(the word, then anything that begins a new one, given the text), and for each
    spelling the word's mean routing weight.
    """
    tokens = model.tokenizer.convert_ids_to_tokens(list(range(12)))
    tokens[0] = "<end of text>"
    ends = torch.tensor([token not in INSIDE for token in tokens])
    before, end = parted(text)
    head = model.tokenizer(before)["input_ids"] or [0]
    given = 1.0
    if end:
        begun = list(beginnings(end, tokens))
        given = sum(
            float(p[range(len(s)), s].prod())
            for s, p in zip(begun, forward(model, head, begun)[0], strict=True)
        )
    continues = end[-1:] not in ("", "Ġ") and not insert.startswith(" ")
    bare = insert.strip()
    wholes = (
        [end + bare]
        if continues
        else [end + white + bare for white in ("Ġ", "Ċ", *([""] if end in ("", "Ġ") else []))]
    )
    every = [spelling for whole in wholes for spelling in spellings(whole, tokens)]
    probability, experts = 0.0, []
    for spelling, p, chosen in zip(every, *forward(model, head, every), strict=True):
        size = len(spelling)
        probability += float(p[range(size), spelling].prod() * p[size, ends].sum())
        others = 0 if continues or end in ("", "Ġ") else len(next(shortest(spelling, end, tokens)))
        experts.append(chosen[others:size].mean(dim=0))
    return probability / given, experts


def shortest(spelling: list[int], end: str, tokens: list[str]) -> Iterator[list[int]]:
    """The first tokens of a spelling that say the end of the text."""
    for size in range(1, len(spelling) + 1):
        if "".join(tokens[i] for i in spelling[:size]) == end:
            yield spelling[:size]


@pytest.fixture
def model(make_run) -> PersonalModel:
    return coterie.load(make_run("few", ann=LAYOUT), "ann")


@pytest.mark.parametrize("text", ["cab ab", "a.", "b'c", "c ab ", ""])
def test_probabilities_and_experts_are_those_of_the_naive_computation(text, model):
    words = model.next_words(text, 100)[:8]  # so many that little falls out of the search
    assert [w.probability for w in words] == sorted((w.probability for w in words), reverse=True)
    assert len({w.word for w in words}) == len(words)
    for word in words:
        p, experts = naive(model, text, word.insert)
        assert 0.9 * p < word.probability < 1.01 * p, (
            word
        )  # a few long spellings fall out of the search
        assert any(word.experts == pytest.approx(one.tolist(), abs=1e-4) for one in experts)
        assert sum(word.experts) == pytest.approx(1, abs=1e-5)
        assert word.experts[model.experts.index(model.speaker(word))] == max(word.experts)


@pytest.mark.parametrize("text", ["cab a", "c. "])
def test_no_word_is_missed(text, model):
    """All words of up to three letters by brute force: none beats the last suggestion without
    being among the suggestions.
    """
    words = model.next_words(text, 60)[:4]  # so many that little falls out of the search
    found = {word.word for word in words}
    assert all(
        word.probability <= naive(model, text, word.insert)[0] * 1.02 for word in words
    )  # RARE spellings of the text are left out
    for letters in EVERYTHING:
        for insert in (letters, " " + letters):
            shown = letters if insert[0] == " " or text[-1] == " " else "a" + letters
            assert (
                shown in found or naive(model, text, insert)[0] <= words[-1].probability * 1.02
            ), insert


def test_no_word_is_shown_twice(model):
    """Where there is no text, or a space, or a full stop, " ab" and "ab" are one word; where it
    is begun, one is the rest of another.
    """
    for text in ("", " ", "\n", "a. ", "a.", "c ab", "c a"):
        shown = [word.word for word in model.next_words(text, 40)]
        assert len(set(shown)) == len(shown) > 10, text
    without, spaces = model.next_words("", 5), model.next_words("  ", 5)
    assert without == spaces
    assert all(word.insert == word.word for word in without)


def test_an_unfinished_word_is_completed_whatever_its_tokens_are():
    """What follows the tokens of " peop" is never "le", since " people" is one token."""
    backbone = Backbone.load("embedded")
    words = Words(backbone, TextEncoder(backbone.tokenizer))
    (found,) = words.of(LanguageModel(backbone, Layout()).adapter, ["The number of peop"], 3)
    assert (found[0].word, found[0].insert) == ("people", "le")
    assert found[0].probability > 0.5
    (found,) = words.of(LanguageModel(backbone, Layout()).adapter, ["(the so"], 3)
    assert all(word.word.startswith("so") or word.insert.startswith(" ") for word in found)
    assert any(word.word == "source" for word in found)


def test_what_is_shown_and_what_is_appended(model):
    words = model.next_words("ab cab", 150)
    assert {word.insert[0] == " " for word in words} == {True, False}
    for word in words:
        assert word.word == (
            word.insert[1:] if word.insert.startswith(" ") else "cab" + word.insert
        )
    for word in model.next_words(
        "ab cab ", 150
    ):  # the space that was typed is the one that the word begins with
        assert word.insert == word.word
    assert all(
        word.word == word.insert
        for text in ("", "  ", "a.\n")
        for word in model.next_words(text, 5)
    )


def test_a_text_longer_than_the_context_counts_by_its_end(model):
    end = "c" * (model.backbone.context_limit - LONGEST)
    assert [word.insert for word in model.next_words("b" * 500 + end)] == [
        word.insert for word in model.next_words(end)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_nonsense_of_an_untrained_model_is_survived(family, make_run):
    model = coterie.load(make_run(family, ann=LAYOUT), "ann")
    for text in ("I like to", "Ünï ☃", "\x1b"):
        for word in model.next_words(text, 20):
            assert word.word.isprintable()
            assert 0 < word.probability < 1


def test_words_without_a_router_have_no_experts(make_run):
    model = coterie.load(make_run("few", ann=Layout(rank=2, routing="equal")), "ann")
    words = model.next_words("a", 2)
    assert [word.experts for word in words] == [(), ()]
    assert model.speaker(words[0]) == ""
