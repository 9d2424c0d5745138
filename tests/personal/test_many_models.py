"""Many personal models in one batch against each of them by itself."""

from pathlib import Path

import pytest
import torch

import coterie
from coterie import personal
from coterie.core.errors import CoterieError, ModelError, Refused
from coterie.models.layout import Layout
from coterie.personal import ManyModels
from coterie.personal.inference import mixtures

LAYOUTS = {
    "ann": Layout(rank=2),
    "ben": Layout(specialists=3, rank=3, mlp_rank=1),
    "cleo": Layout(generalists=2, specialists=0, rank=2, top_k=1, alpha=3.0),
    "dan": Layout(specialists=0, rank=1, mlp_rank=4),
    "eve": Layout(specialists=2, rank=2, routing="equal"),
    "fay": Layout(specialists=2, rank=2, biased=True, top_k=3),
}
ALIKE = {
    "1G1S": Layout(rank=2),
    "1G3S, top 2": Layout(specialists=3, rank=2),
    "1G3S, top 1": Layout(specialists=3, rank=2, top_k=1),
    "one expert": Layout(specialists=0, rank=2),
    "equal weights": Layout(rank=2, routing="equal"),
}
IN_ORDER = tuple(LAYOUTS)
BATCHES = {
    "in order": IN_ORDER,
    "two rows each": tuple(client for client in LAYOUTS for _ in range(2)),
    "some, again and again": ("eve", "ann", "ann", "ben", "eve"),
    "runs of unequal length": ("ben",) * 4 + ("fay",) * 2,
    "one only": ("cleo",) * 3,
}
GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
PROMPTS = {
    "ann": "In my free time",
    "ben": "a",
    "cleo": "The weather is",
    "dan": "",
    "eve": "some words",
    "fay": "a b c",
}


def windows(rows: int, tokens: int) -> torch.Tensor:
    return torch.randint(257, (rows, tokens), generator=torch.Generator().manual_seed(tokens))


def one_by_one(together: ManyModels, ids: torch.Tensor, clients: tuple[str, ...]) -> torch.Tensor:
    """The logits of each row by the model as it was trained, without anything that is made for
    inference.
    """
    rows = [
        together.models[client].language.forward(row[None])[0]
        for client, row in zip(clients, ids, strict=True)
    ]
    return torch.stack(rows).detach()


@pytest.mark.parametrize("tokens", [1, 2, 60])  # the last in parts
@pytest.mark.parametrize("clients", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_each_row_is_told_what_its_model_says(family, clients, tokens, make_run):
    together = personal.load_many(make_run(family, **LAYOUTS))
    ids = windows(len(clients), tokens)
    torch.testing.assert_close(
        together(ids, clients).logits, one_by_one(together, ids, clients), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("tokens", [1, 50])
@pytest.mark.parametrize("layout", ALIKE.values(), ids=ALIKE)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_that_are_alike_need_no_filling(family, layout, tokens, make_run):
    together = personal.load_many(make_run(family, **dict.fromkeys("abcdefgh", layout)))
    ids = windows(8, tokens)
    torch.testing.assert_close(
        together(ids, "abcdefgh").logits,
        one_by_one(together, ids, "abcdefgh"),
        rtol=1e-4,
        atol=1e-4,
    )


def test_more_tokens_than_one_part_holds(make_run, monkeypatch):
    together = personal.load_many(make_run("llama", **LAYOUTS))
    ids = windows(6, 30)
    whole = together(ids, IN_ORDER).logits
    for part in (7, 30, 64):  # within a row; a row; two rows
        monkeypatch.setattr(mixtures, "MANY", part)
        torch.testing.assert_close(together(ids, IN_ORDER).logits, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 5])
def test_routing_is_recorded_for_each_row(tokens, make_run):
    together = personal.load_many(make_run("llama", **LAYOUTS))
    clients = ("fay", "ann", "ben", "cleo")
    ids, record = windows(4, tokens), []
    with torch.no_grad(), together.backbone.using(together._of(clients, 4), record):
        together.backbone.hidden(ids)
    weights = torch.stack(
        [decision.weights.view(4, tokens, -1) for decision in record]
    )  # (blocks, B, C, n)
    for row, client in enumerate(clients):
        own = together.models[client].routing(ids[row : row + 1])[:, 0]
        torch.testing.assert_close(weights[:, row, :, : own.shape[-1]], own, rtol=1e-4, atol=1e-5)
        assert not weights[:, row, :, own.shape[-1] :].any()


@pytest.mark.parametrize("tokens", [1, 40])
def test_in_bf16_it_is_as_near_to_fp32_as_the_trained_models(tokens, make_run):
    run = make_run("llama", **LAYOUTS)
    precise, together = personal.load_many(run), personal.load_many(run, dtype="bf16")
    ids = windows(6, tokens)
    exact = one_by_one(precise, ids, IN_ORDER)
    errors = [
        (logits - exact).abs().mean()
        for logits in (together(ids, IN_ORDER).logits, one_by_one(together, ids, IN_ORDER))
    ]
    assert 0 < errors[0] < 1.5 * errors[1]


def test_rows_go_on_token_by_token_though_clients_change_in_between(make_run):
    together = personal.load_many(make_run("llama", **LAYOUTS))
    batches = {
        clients: windows(len(clients), 9)
        for clients in (IN_ORDER, ("ben", "ann", "ben"), ("dan", "cleo"))
    }
    caches, found = dict.fromkeys(batches), {clients: [] for clients in batches}
    for t in range(9):
        for clients, ids in batches.items():
            output = together(
                ids[:, t : t + 1], clients, past_key_values=caches[clients], use_cache=True
            )
            caches[clients] = output.past_key_values
            found[clients].append(output.logits)
    for clients, ids in batches.items():
        torch.testing.assert_close(
            torch.cat(found[clients], dim=1),
            one_by_one(together, ids, clients),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_texts_of_different_lengths_go_on_as_they_do_alone(family, make_run):
    together = personal.load_many(make_run(family, **LAYOUTS))
    alone = {
        client: together.models[client].generate(text, **GREEDY) for client, text in PROMPTS.items()
    }
    assert together.generate(PROMPTS, **GREEDY) == alone
    some = {client: PROMPTS[client] for client in ("fay", "ben")}
    assert together.generate(some, **GREEDY) == {client: alone[client] for client in some}


def test_a_text_that_ends_early_ends_as_it_does_alone(make_run):
    together = personal.load_many(make_run("few", **LAYOUTS))  # of twelve tokens one ends texts
    settings = {"max_new_tokens": 40, "do_sample": False}
    prompts = {
        client: text * 2
        for client, text in zip(LAYOUTS, ("cab", "a b", "c", "ab", "b.", "a'c"), strict=True)
    }
    found = together.generate(prompts, **settings)
    assert found == {
        client: together.models[client].generate(text, **settings)
        for client, text in prompts.items()
    }
    assert len({len(text) for text in found.values()}) > 1


@pytest.mark.parametrize(
    "settings",
    [GREEDY, GREEDY | {"num_beams": 3, "num_return_sequences": 2}],
    ids=["greedy", "beams"],
)
def test_ids_and_several_sequences_for_each_row(settings, make_run):
    together = personal.load_many(make_run("llama", **LAYOUTS))
    clients = ("eve", "ann", "ben")
    ids = windows(3, 7)
    found = together.generate(ids, clients, **settings)
    alone = [
        together.models[client].generate(row[None], **settings)
        for client, row in zip(clients, ids, strict=True)
    ]
    assert found.tolist() == torch.cat(alone).tolist()


def test_drawn_sequences_of_a_row_are_of_its_model(make_run):
    together = personal.load_many(make_run("llama", ann=LAYOUTS["ann"], ben=LAYOUTS["ben"]))
    ids, settings = (
        windows(2, 5),
        {"max_new_tokens": 6, "do_sample": True, "top_k": 1, "num_return_sequences": 2},
    )
    found = together.generate(ids, ["ann", "ben"], **settings)  # of one token there is no choice
    alone = [
        together.models[client].generate(row[None], **GREEDY)[0, :11]
        for client, row in zip(("ann", "ben"), ids, strict=True)
    ]
    assert found[:, :11].tolist() == [alone[place].tolist() for place in (0, 0, 1, 1)]


@pytest.mark.parametrize(
    "texts",
    ["cab a", dict(zip(LAYOUTS, ("a.", "cab ab", "", "b'c", "cab a ", "c" * 90), strict=True))],
)
def test_words_are_those_of_each_model(texts, make_run):
    together = personal.load_many(make_run("few", **LAYOUTS))
    found = together.next_words(texts, 5)
    assert list(found) == list(LAYOUTS)
    for client, words in found.items():
        alone = together.models[client].next_words(
            texts if isinstance(texts, str) else texts[client], 5
        )
        assert [(word.word, word.insert) for word in words] == [
            (word.word, word.insert) for word in alone
        ]
        for word, own in zip(words, alone, strict=True):
            assert word.probability == pytest.approx(own.probability, rel=1e-3)
            assert word.experts == pytest.approx(own.experts, abs=1e-4)


def test_what_is_alone_is_not_stacked_and_a_choice_is_copied_once(make_run):
    together = personal.load_many(make_run("llama", **LAYOUTS))
    assert together._of(("ann",) * 3, 3) is together.models["ann"].fast
    assert together._of([client for client in LAYOUTS for _ in range(4)], 24) is together._of(
        IN_ORDER, 6
    )
    chosen = together._of(("ben", "ann"), 2)
    assert together._of(["ben", "ben", "ann", "ann"], 4) is chosen
    assert together._of(("ann", "ben"), 2) is not chosen


def test_mistakes_are_named(make_run):
    run = make_run("llama", ann=LAYOUTS["ann"], ben=LAYOUTS["ben"])
    together = personal.load_many(run)
    with pytest.raises(ModelError, match=r"2 clients for 3 rows\n  Name the client of each row"):
        together(windows(3, 4), ["ann", "ben"])
    with pytest.raises(ModelError, match=r"no model of client 'zoe'\n  There are: ann, ben"):
        together.generate({"zoe": "a"})
    with pytest.raises(ModelError, match="0 clients for 0 rows"):
        together.generate({})
    with pytest.raises(ModelError, match=r"several sequences for one text\n  Give token ids"):
        together.generate({"ann": "a"}, num_return_sequences=2)
    with pytest.raises(ModelError, match="exceed the base's context of 64"):
        together.generate({"ann": "a", "ben": "b" * 60}, max_new_tokens=10)
    apart = {client: coterie.load(run, client) for client in ("ann", "ben")}
    with pytest.raises(
        ModelError,
        match=r"2 models on 2 backbones cannot be one batch\n  Load them by coterie.load_many",
    ):
        ManyModels(apart)
    with pytest.raises(CoterieError, match="0 models"):
        ManyModels({})


def test_classifiers_are_refused(make_run, monkeypatch):
    run = make_run("llama", ann=LAYOUTS["ann"])
    monkeypatch.setattr("coterie.personal.loading.load_all", lambda *_, **__: {"ann": object()})
    with pytest.raises(Refused, match=r"holds classifiers \(of ann\)"):
        personal.load_many(run)


def test_the_example_of_the_documentation_runs(make_run):
    page = Path(__file__).parents[2] / "docs/personal.md"
    (code,) = (block for block in page.read_text().split("```python\n")[1:] if "load_many" in block)
    run = make_run("llama", ann=LAYOUTS["ann"], ben=LAYOUTS["ben"])
    scope = {}
    exec(code.partition("```")[0].replace("runs/mine", str(run)), scope)
    assert list(scope["texts"]) == ["ann", "ben"]
    assert all(
        text.startswith(prompt)
        for text, prompt in zip(scope["texts"].values(), scope["prompts"].values(), strict=True)
    )
    assert scope["logits"].shape[:2] == (3, 8)
