"""The next words against a naive computation: every spelling, by whole passes without a cache, one sequence at a time."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch

import coterie
from coterie.models.adapter import Layout
from coterie.personal import PersonalModel
from coterie.personal.words import LONGEST

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


def naive(model: PersonalModel, prompt: str, insert: str) -> tuple[float, list[torch.Tensor]]:
    """P(the word, then anything that begins a new one), and for each spelling the mean routing weight where its tokens were chosen."""
    tokens = model.tokenizer.convert_ids_to_tokens(list(range(12)))
    ends = torch.tensor([token not in INSIDE for token in tokens])
    head = model.tokenizer(prompt)["input_ids"]
    white = ["Ġ" + insert[1:], "Ċ" + insert[1:]] if insert.startswith(" ") else [insert]
    probability, experts = 0.0, []
    for spelling in (s for text in white for s in spellings(text, tokens)):
        ids = torch.tensor([head + spelling])
        p = model.language.forward(ids)[0].detach().softmax(dim=-1)
        of_tokens = p[range(len(head) - 1, ids.shape[1] - 1), spelling].prod()
        probability += float(of_tokens * p[-1, ends].sum())
        experts.append(model.routing(ids)[:, 0, len(head) - 1 : ids.shape[1] - 1].mean(dim=(0, 1)))
    return probability, experts


@pytest.fixture
def model(make_run) -> PersonalModel:
    return coterie.load(make_run("few", ann=LAYOUT), "ann")


@pytest.mark.parametrize("text", ["cab ab", "a.", "b'c"])
def test_probabilities_and_experts_are_those_of_the_naive_computation(text, model):
    words = model.next_words(text, 150)[:20]  # so many that little falls out of the search
    assert [w.probability for w in words] == sorted((w.probability for w in words), reverse=True)
    for word in words:
        p, experts = naive(model, text, word.insert)
        assert 0.9 * p < word.probability < 1.001 * p, word  # a few long spellings fall out of the search
        assert any(word.experts == pytest.approx(one.tolist(), abs=1e-4) for one in experts)
        assert sum(word.experts) == pytest.approx(1, abs=1e-5)
        assert word.experts[model.experts.index(model.speaker(word))] == max(word.experts)


def test_no_word_is_missed(model):
    """All words of up to three letters by brute force: none beats the last suggestion without being among the suggestions."""
    words = model.next_words("cab a", 4)
    found = {word.insert for word in words}
    assert all(word.probability <= naive(model, "cab a", word.insert)[0] * 1.001 for word in words)
    for letters in EVERYTHING:
        for insert in (letters, " " + letters):
            assert insert in found or naive(model, "cab a", insert)[0] <= words[-1].probability * 1.001, insert


def test_what_is_shown_and_what_is_appended(model):
    words = model.next_words("ab cab", 150)
    assert {word.insert[0] == " " for word in words} == {True, False}
    for word in words:
        assert word.word == (word.insert[1:] if word.insert.startswith(" ") else "cab" + word.insert)
    after_space = model.next_words("ab cab ", 150)[:20]
    spaced = {word.word: word for word in words if word.insert.startswith(" ")}
    common = [word for word in after_space if word.word in spaced]
    assert len(common) > 3
    for word in common:  # the space that was typed is the one that the word begins with
        assert word.insert == word.word
        assert word.probability == pytest.approx(spaced[word.word].probability, rel=0.02)
        assert word.experts == pytest.approx(spaced[word.word].experts, abs=1e-4)
    assert all(word.word == word.insert for text in ("", "  ", "a.\n") for word in model.next_words(text, 5))


def test_a_text_longer_than_the_context_counts_by_its_end(model):
    end = "c" * (model.backbone.context_limit - LONGEST)
    assert [word.insert for word in model.next_words("b" * 500 + end)] == [word.insert for word in model.next_words(end)]


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
