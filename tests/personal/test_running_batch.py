"""Texts that come and go in one batch, against each of them alone."""

import random
from collections import Counter

import pytest
import torch
from test_many_models import LAYOUTS

from coterie import personal
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import ManyModels, running_batch
from coterie.personal.inference import stacks
from coterie.personal.running_batch import Continuation, RunningBatch
from coterie.personal.sampling import Sampling, choose

GREEDY = Sampling(temperature=0, logprobs=3)
FAMILIES = ["llama", "gpt2", "sliding"]


@pytest.fixture
def together(request, make_run):
    return personal.load_many(make_run(getattr(request, "param", "llama"), **LAYOUTS))


def in_double(together: ManyModels) -> ManyModels:
    """The same models with weights in double precision, so that no error hides behind rounding."""
    together.backbone.model.double()
    for model in together.models.values():
        model.adapter.double()
        model.__dict__.pop("fast", None)
    return ManyModels(together.models)


def run(batch: RunningBatch, arrivals=()) -> dict[Continuation, dict[int, list]]:
    """Everything that a batch generates, by continuation and choice; `arrivals` come one at a
    step.
    """
    found: dict = {}
    arrivals = list(arrivals)
    while batch.busy or arrivals:
        if arrivals:
            batch.add(arrivals.pop(0))
        for progress in batch.step():
            of_choice = found.setdefault(progress.of, {}).setdefault(progress.choice, [])
            assert not any(p.finish for p in of_choice)  # nothing comes behind the end
            of_choice.append(progress)
    return found


def requests(count: int, seed: int = 0) -> list[Continuation]:
    """Prompts of 1 to 40 tokens for random clients, continued by 1 to 20 tokens."""
    rng = random.Random(seed)
    return [
        Continuation(
            rng.choice(list(LAYOUTS)),
            [rng.randrange(257) for _ in range(rng.choice((1, 2, 7, 20, 40)))],
            rng.randrange(1, 21),
            GREEDY,
        )
        for _ in range(count)
    ]


def alone(together, one: Continuation) -> tuple[list[int], torch.Tensor]:
    """The tokens that a model generates by transformers' own `generate`, and (n, V) the
    log-probabilities in their places by the model as it was trained.
    """
    model = together.models[one.client]
    given = torch.tensor([one.prompt])
    every = {"attention_mask": torch.ones_like(given), "eos_token_id": 300}  # nothing ends a text
    ids = model.generate(given, max_new_tokens=one.most, do_sample=False, **every)
    logits = model.language.forward(ids[:, :-1]).detach()[0, len(one.prompt) - 1 :]
    return ids[0, len(one.prompt) :].tolist(), logits.log_softmax(dim=-1)


def check(together, found, abs: float) -> None:
    """Every text is what its model says alone."""
    for one, choices in found.items():
        tokens, logprobs = alone(together, one)
        progress = choices[0]
        assert [p.token.id for p in progress] == tokens
        assert [p.finish for p in progress] == [None] * (one.most - 1) + ["length"]
        for p, place in zip(progress, logprobs, strict=True):
            assert p.token.logprob == pytest.approx(float(place[p.token.id]), abs=abs)
            values, ids = place.topk(3)
            assert [i for i, _ in p.token.top] == ids.tolist()
            assert [v for _, v in p.token.top] == pytest.approx(values.tolist(), abs=abs)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("together", FAMILIES, indirect=True)
def test_each_text_is_what_its_model_says_alone(together, rows):
    together = in_double(together)
    found = run(RunningBatch(together, rows), requests(9, rows))
    assert len(found) == 9
    check(together, found, abs=1e-6)


def test_on_the_embedded_base_in_single_precision_within_2e_5():
    backbone = Backbone.load("embedded")
    models = {}
    for client in ("ann", "ben", "cleo"):
        language = LanguageModel(backbone, Layout(specialists=len(models)))
        torch.manual_seed(len(models))
        for parameter in language.adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        about = personal.About(client, "embedded", language.layout, 8, "", "", 0, 0)
        models[client] = personal.PersonalModel(language, about)
    rng = random.Random(0)
    prompts = [[rng.randrange(1, 4096) for _ in range(rng.randrange(1, 60))] for _ in range(7)]
    together = ManyModels(models)
    wanted = [
        Continuation(list(models)[i % 3], prompt, 12, GREEDY) for i, prompt in enumerate(prompts)
    ]
    check(
        together, run(RunningBatch(together, 4), wanted), abs=2e-5
    )  # ten roundings of a logarithm near -7


def test_the_parts_of_prompts_and_the_room_for_tokens_do_not_matter(together, monkeypatch):
    monkeypatch.setattr(running_batch, "PART", 6)
    monkeypatch.setattr(stacks, "SPARE", 3)
    together = in_double(together)
    wanted = requests(8, 5)
    batch = RunningBatch(together, 4)
    for one in wanted:
        batch.add(one)
    check(together, run(batch), abs=1e-6)


def test_running_texts_go_on_while_a_long_prompt_is_computed(together, monkeypatch):
    monkeypatch.setattr(running_batch, "PART", 5)
    batch = RunningBatch(together, 2)
    running = Continuation("ann", [1], 30, GREEDY)
    batch.add(running)
    batch.step()
    batch.add(Continuation("ben", [2] * 40, 1, GREEDY))
    for _ in range(7):  # of the eight parts of that prompt
        assert [p.of for p in batch.step()] == [running]
    assert len(batch.step()) == 2


def test_a_waiting_prompt_joins_at_the_next_step_and_a_finished_text_leaves(together):
    batch = RunningBatch(together, 2)
    first, second, third = (
        Continuation(client, [5, 6], most, GREEDY)
        for client, most in (("ann", 9), ("ben", 3), ("cleo", 9))
    )
    for one in (first, second, third):
        batch.add(one)
    steps = [[p.of for p in batch.step()] for _ in range(4)]
    assert [of.count(second) for of in steps] == [2, 1, 0, 0]
    assert [of.count(third) for of in steps] == [0, 0, 2, 1]  # two at first: behind its prompt
    assert all(first in of for of in steps)


@pytest.mark.parametrize("when", ["waiting", "in its prompt", "running"])
def test_what_is_removed_says_no_more_and_disturbs_nobody(together, when, monkeypatch):
    monkeypatch.setattr(running_batch, "PART", 10)
    together = in_double(together)
    others = requests(5, 9)
    gone = Continuation("ben", [3] * 25, 20, GREEDY, choices=2)
    batch = RunningBatch(together, 3)
    batch.add(gone)
    for one in others:
        batch.add(one)
    steps = {"waiting": 0, "in its prompt": 1, "running": 5}[when]
    early = [p for _ in range(steps) for p in batch.step()]
    assert any(p.of is gone for p in early) == (when == "running")
    batch.remove(gone)
    found = run(batch)
    assert gone not in found
    found = {one: {0: []} for one in others} | found
    for p in early:
        if p.of is not gone:
            found[p.of][0].insert(0, p)
    check(together, found, abs=1e-6)


def test_what_is_sampled_depends_on_the_seed_and_on_nobody_else(together):
    sampled = Sampling(temperature=1.3, top_p=0.9)

    def tokens(companions, seed):
        one = Continuation("eve", [7, 8, 9], 12, sampled, seed=seed, choices=3)
        found = run(RunningBatch(together, 8), [*companions, one])
        return [[p.token.id for p in found[one][choice]] for choice in range(3)]

    first = tokens([], 11)
    assert len({tuple(choice) for choice in first}) == 3
    assert tokens(requests(6), 11) == first
    assert tokens([], 12) != first


def test_an_end_of_text_ends_the_text(together):
    tokens = alone(together, plain := Continuation("ann", [4, 5], 12, GREEDY))[0]
    place = next(i for i in range(1, 12) if tokens[i] not in tokens[:i])
    ended = Continuation("ann", plain.prompt, 12, GREEDY, ends=frozenset({tokens[place], 300}))
    progress = run(RunningBatch(together), [ended])[ended][0]
    assert [p.token.id for p in progress] == tokens[: place + 1]
    assert progress[-1].finish == "stop"


@pytest.mark.parametrize("part", [3, 128])
@pytest.mark.parametrize("most", [0, 4])
def test_prompts_are_scored(together, most, part, monkeypatch):
    monkeypatch.setattr(running_batch, "SCORED_PART", part)
    together = in_double(together)
    wanted = [
        Continuation(client, prompt, most, GREEDY, scores_prompt=scores)
        for client, prompt, scores in (
            ("ann", [1, 2, 3, 4, 5, 6, 7], True),
            ("ben", [9], True),
            ("cleo", [8, 8, 8, 2], True),
            ("dan", [8, 8], False),
        )
    ]
    batch = RunningBatch(together, 4)
    for one in wanted:
        batch.add(one)
    found = run(batch)
    for one in wanted[:3]:
        logits = together.models[one.client].language.forward(torch.tensor([one.prompt]))[0]
        places = logits.detach().log_softmax(dim=-1)
        assert [token.id for token in one.scored] == one.prompt
        assert one.scored[0].logprob is None
        for token, place in zip(one.scored[1:], places, strict=False):
            assert token.logprob == pytest.approx(float(place[token.id]), abs=1e-6)
            assert token.top[0][1] == pytest.approx(float(place.max()), abs=1e-6)
    assert wanted[3].scored == []
    if most:
        check(together, found, abs=1e-6)
    else:
        assert all(p[0][0].token is None and p[0][0].finish == "length" for p in found.values())


def drawn(settings: Sampling, logits: torch.Tensor, generated=(), count: int = 4000) -> Counter:
    """How often each token is chosen."""
    generator = torch.Generator().manual_seed(0)
    return Counter(
        choose(logits[None], [settings], [Counter(generated)], [generator])[0].id
        for _ in range(count)
    )


def test_tokens_are_drawn_in_proportion_to_their_probability():
    logits = torch.tensor([1.0, 0.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        found = drawn(Sampling(temperature), logits)
        for token, p in enumerate((logits / temperature).softmax(dim=0).tolist()):
            assert found[token] / 4000 == pytest.approx(p, abs=4 * (p * (1 - p) / 4000) ** 0.5)
    assert set(drawn(Sampling(1e-300), logits, count=5)) == {2}
    assert len(drawn(Sampling(1.0, top_k=1), torch.zeros(3), count=50)) == 1  # of equal ones too


@pytest.mark.parametrize("size", [4, 1000])  # the second: more than are sorted at first
def test_a_nucleus_has_the_fewest_tokens_that_reach_the_sum(size):
    if size == 4:
        logits = torch.tensor([0.1, 0.5, 0.15, 0.25]).log()
        for top_p, kept in ((0.5, {1}), (0.51, {1, 3}), (0.75, {1, 3}), (0.8, {1, 2, 3}), (0, {1})):
            assert set(drawn(Sampling(top_p=top_p), logits, count=400)) == kept
    else:
        logits = torch.zeros(size).index_fill(0, torch.tensor([7]), -1e-3)
        assert len(drawn(Sampling(top_p=0.9), logits)) > 800
        assert 7 not in drawn(Sampling(top_p=0.9), logits)


def test_penalties_and_biases_change_the_choice_and_not_the_log_probabilities():
    logits = torch.tensor([2.0, 1.9, 0.0])
    greedy = {"temperature": 0.0, "logprobs": 1}

    def chosen(generated=(), **settings):
        own = Sampling(**greedy, **settings)
        return choose(logits[None], [own], [Counter(generated)], [torch.Generator()])[0]

    assert chosen().id == 0
    assert chosen([0], presence_penalty=0.2).id == 1
    assert chosen([0], frequency_penalty=0.05).id == 0
    assert chosen([0] * 3, frequency_penalty=0.05).id == 1
    assert chosen(bias={2: 5.0}).id == 2
    assert chosen([2] * 4, bias={2: 5.0}, frequency_penalty=1.0).id == 0
    token = chosen(bias={0: -100.0})
    assert token.id == 1
    assert token.logprob == pytest.approx(float(logits.log_softmax(dim=0)[1]))
    assert token.top == ((0, pytest.approx(float(logits.log_softmax(dim=0)[0]))),)
