"""Interpolation against its parts alone and naive mixtures of their predictions."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import coterie
from coterie.client.site import WEIGHTS, ClientOfParts
from coterie.core.errors import ModelError, RecipeError, TensorError
from coterie.core.protocol import PARTS, Replies, Sends, declared, drive, find_task
from coterie.core.tensors import Tensors, under
from coterie.methods import Method
from coterie.methods.section import build_method
from coterie.personal.mixture import PersonalMixture
from coterie.personal.running_batch import Continuation, RunningBatch
from coterie.personal.sampling import Sampling
from coterie.runs.problems.prepare import prepare
from coterie.testing.run import Run, language, pictures

SMALL = {"rounds": 3, "local_steps": 2}
ROUTED = {"name": "comigs-1g1s", "router_every": 2, "router_steps": 1}
TEXTS = ("local", "fedavg", ROUTED, "finetuned-fedavg", "flexlora")


def interpolation(*parts: Any, **fields: Any) -> Method:
    return build_method({"name": "interpolation", "parts": list(parts), **SMALL, **fields})


def scored(run: Run, task: str) -> dict[str, Tensors]:
    """The clients' replies to a scoring task after the last round."""
    method = run.method
    tensors = method.personal(run.server, run.clients)
    if method.stateless:
        adaptation = method.adapt(run.server, run.clients)
        tensors = drive(adaptation, lambda ask, phase: run.engine.answer(ask, run.round, -2))
    replies = {}
    for i in run.clients:
        state = run.engine.states()[i]
        replies[i], _ = run.site.answer(run.method, task, i, dict(tensors[i]), state, run.round, -1)
    return replies


@pytest.mark.parametrize(
    ("world", "parts"),
    [
        (language(), TEXTS),
        (pictures().one_by_one, ("local", "fedavg", "cobo", "scaffold", "ifca")),
        (pictures().one_by_one, ("fedavg", {"name": "ddome", "pool": 3})),
    ],
    ids=["texts", "pictures", "pictures, a pool"],
)
def test_each_part_is_that_method_alone_bit_for_bit(world: Any, parts: tuple[Any, ...]) -> None:
    """The server's state, the clients', and the scores by which each keeps its best round."""
    method = interpolation(*parts)
    together = Run(method, world)
    alone = {name: Run(part, world) for name, part in method.methods.items()}
    for _ in range(method.rounds):
        kept = scored(together.rounds(1), "score_and_keep")
        for place, (name, run) in enumerate(alone.items()):
            run_scores = scored(run.rounds(1), "score_and_keep")
            same(under(name, together.server), run.server)
            for i in run.clients:
                same(under(name, together.engine.states()[i]), run.engine.states()[i])
                sums = torch.stack([run_scores[i]["valid"], run_scores[i]["test"]])
                assert torch.equal(kept[i]["parts"][place], sums)


def same(one: Tensors, other: Tensors) -> None:
    assert one.keys() == other.keys()
    for name, tensor in other.items():
        assert torch.equal(one[name], tensor), name


def test_what_leaves_a_client_is_what_the_parts_send() -> None:
    method = interpolation("local", "fedavg", ROUTED)
    together = Run(method, language())
    parts = {name: Run(part, language()) for name, part in method.methods.items()}
    sent: dict[str, list[Any]] = {name: [] for name in ["all", *parts]}
    for name, run in (("all", together), *parts.items()):
        answer = run.answer

        def kept(ask: Any, phase: int, run: str = name, answer: Any = answer) -> Any:
            replies = answer(ask, phase)
            sent[run].append((ask.name, replies))
            return replies

        run.rounds(1, kept)
    ((task, replies),) = sent["all"]
    assert task == PARTS.join(sent[name][0][0] for name in parts)
    assert declared(getattr(method, task)) is Sends.UPDATE
    for name in parts:
        for i, reply in sent[name][0][1].items():
            same(under(name, replies[i]), reply)
    assert not any(under("local", reply) for reply in replies.values())


def naive(models: dict[str, Any], weights: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the mixture, by probabilities."""
    p: Any = sum(
        w * model(ids).logits.double().softmax(dim=-1)
        for w, model in zip(weights, models.values(), strict=True)
    )
    return torch.log(p)


@pytest.fixture(scope="module")
def run(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three parts on made-up text, each part's best round kept."""
    folder = tmp_path_factory.mktemp("run") / "run"
    coterie.run(
        "synthetic",
        out=folder,
        model={"base": str(tiny_base), "context": 32},
        data={"clients": 3, "train_tokens": 1500, "valid_tokens": 600, "test_tokens": 600},
        method={
            "name": "interpolation",
            "parts": ["local", "fedavg", ROUTED],
            "rounds": 3,
            "local_steps": 6,
        },
        training={"batch_size": 4},
        compare_with=["local", "fedavg"],
        keep="best",
        evaluate_every=1,
    )
    return folder


def test_scores_are_those_of_a_naive_mixture(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    recipe = coterie.Recipe.load(run / "recipe.yaml")
    data = prepare(recipe).problem.federation.clients
    for i, of in result["clients"].items():
        model = coterie.load(run, i)
        kept = {name: part["weight"] for name, part in of["parts"].items() if part["weight"]}
        assert math.isclose(sum(kept.values()), 1, abs_tol=1e-9)
        if isinstance(model, PersonalMixture):
            assert dict(model.mixture.weights) == kept
            parts = model.parts
        else:  # one part does as well alone
            parts = {model.about.method: model}
            assert list(kept) == list(parts)
        for split in ("valid", "test"):
            total, count = 0.0, 0
            for batch in getattr(data[i], split).scoring(8):
                log_p = naive(parts, model.weights, batch[:, :-1])
                total -= float(log_p.gather(-1, batch[:, 1:, None]).sum())
                count += batch[:, 1:].numel()
            assert math.isclose(math.exp(total / count), of[split], rel_tol=1e-4)
            nll, tokens = model.score(getattr(data[i], split).scoring(8))
            assert tokens == count
            assert math.isclose(nll, total, rel_tol=1e-5)
        for name, part in of["parts"].items():
            assert of["valid"] <= part["valid"] * (1 + 1e-2)
            if name in ("local", "fedavg"):
                alone = json.loads((run / "baselines" / name / "result.json").read_text())
                assert alone["clients"][i]["test"] == part["test"]
                assert alone["clients"][i]["valid"] == part["valid"]


def test_a_mixture_is_used_like_one_model(run: Path, tmp_path: Path) -> None:
    models = coterie.load_all(run)
    client, model = next(kv for kv in models.items() if isinstance(kv[1], PersonalMixture))
    ids = torch.tensor([model.texts.prompt("the water and the")])
    expected = naive(model.parts, model.weights, ids)
    torch.testing.assert_close(model(ids).logits.double(), expected, rtol=1e-4, atol=1e-4)
    # greedy text, token by token without a cache
    text = ids
    for _ in range(6):
        best = naive(model.parts, model.weights, text)[:, -1].argmax(dim=-1)
        text = torch.cat([text, best[:, None]], dim=1)
    assert torch.equal(model.generate(ids, max_new_tokens=6, do_sample=False), text)
    several = model.generate(ids.repeat(3, 1), max_new_tokens=6, do_sample=False)
    assert torch.equal(several, text.repeat(3, 1))
    (word, *_), (again, *_) = model.next_words(["the wat", "and the"], k=2)
    alone = model.next_words("the wat", k=2)[0]
    assert (word.word, again.word) == (alone.word, model.next_words("and the", k=2)[0].word)
    assert math.isclose(word.probability, alone.probability, rel_tol=1e-4)
    with pytest.raises(ModelError, match="beams"):
        model.generate(ids, max_new_tokens=2, num_beams=2)
    with pytest.raises(ModelError, match="no router"):
        model.routing(ids)
    model.save_pretrained(tmp_path / "copy")
    again_loaded = coterie.load(tmp_path / "copy")
    assert torch.equal(again_loaded(ids).logits, model(ids).logits)
    part = coterie.load(run / "clients" / client / "fedavg")
    assert torch.equal(part(ids).logits, model.parts["fedavg"](ids).logits)


def test_mixtures_of_several_clients_in_one_batch(run: Path) -> None:
    many = coterie.load_many(run)
    clients = list(many.models)
    prompts = {
        i: f"the water {word}" for i, word in zip(clients, ("and", "of the", "in"), strict=True)
    }
    alone = {
        i: many.models[i].generate(prompt, max_new_tokens=5, do_sample=False)
        for i, prompt in prompts.items()
    }
    assert many.generate(prompts, max_new_tokens=5, do_sample=False) == alone
    words = many.next_words(prompts, k=2)
    for i, prompt in prompts.items():
        first, of_one = words[i][0], many.models[i].next_words(prompt, k=2)[0]
        assert first.word == of_one.word
        assert math.isclose(first.probability, of_one.probability, rel_tol=1e-4)
    batch = RunningBatch(many)
    jobs = [
        Continuation(i, many.texts.prompt(prompts[i]), 5 + n, Sampling(0.0))
        for n, i in enumerate([*clients, clients[0]])
    ]
    texts: dict[int, list[int]] = {id(job): [] for job in jobs}
    for job in jobs[:2]:
        batch.add(job)
    steps = 0
    while batch.busy:
        for progress in batch.step():
            if progress.token is not None:
                texts[id(progress.of)].append(progress.token.id)
        steps += 1
        if steps == 2:  # the others join while these are under way
            for job in jobs[2:]:
                batch.add(job)
    for job in jobs:
        model = many.models[job.client]
        ids = torch.tensor([list(job.prompt)])
        expected = model.generate(ids, max_new_tokens=job.most, do_sample=False)
        assert texts[id(job)] == expected[0, len(job.prompt) :].tolist()


def test_weights_are_even_until_they_are_fitted() -> None:
    run = Run(interpolation("fedavg", "local"), language()).rounds(1)
    i = run.clients[0]
    client = run.client(i)
    assert isinstance(client, ClientOfParts)
    assert client.weights == {"fedavg": 0.5, "local": 0.5}
    state = run.engine.states()[i]
    reply, _ = run.site.answer(run.method, "score", i, {}, state, 0, -1)
    assert torch.equal(state[WEIGHTS], reply[WEIGHTS])
    assert math.isclose(float(state[WEIGHTS].sum()), 1)
    test, _ = run.site.answer(run.method, "score_test", i, {}, state, 0, -1)
    assert torch.equal(test["test"], reply["test"])


def test_nothing_leaves_a_device_for_an_even_prior() -> None:
    run = Run(interpolation("fedavg", "local"), language()).rounds(1)
    received = dict.fromkeys(run.clients, Tensors())

    def asked(ask: object, phase: int) -> Replies:
        raise AssertionError(ask)

    assert drive(run.method.before_scores(received), asked) is received


def test_few_examples_leave_a_client_the_weights_that_fit_all() -> None:
    """The centre of the prior against sums over all clients' examples of naive mixtures, and the
    weights of a client without validation examples of its own to speak of.
    """
    settings = interpolation("fedavg", "local", prior=1e9, shared_prior=True)
    run = Run(settings, pictures().one_by_one).rounds(3)
    method, received = run.method, dict.fromkeys(run.clients, Tensors())
    sent = drive(
        method.before_scores(received), lambda ask, phase: run.engine.answer(ask, run.round, -1)
    )
    by_client = []
    for i in run.clients:
        client = run.client(i)
        by_part = []
        for name in ("fedavg", "local"):
            with client.part(name) as one:
                data = list(one.predictions(one.valid, 8))
            by_part.append(
                torch.cat([p.gather(1, right[:, None])[:, 0] for p, right in data]).exp()
            )
        assert 0 < len(by_part[0]) <= 8
        by_client.append(torch.stack(by_part).double())
    shares = [k / 20 for k in range(21)]
    logs = [sum(float((w * p[0] + (1 - w) * p[1]).log().sum()) for p in by_client) for w in shares]
    masses = [math.exp(log - max(logs)) for log in logs]
    expected = sum(w * mass for w, mass in zip(shares, masses, strict=True)) / sum(masses)
    for i in run.clients:
        state = run.engine.states()[i]
        reply, _ = run.site.answer(method, "score", i, dict(sent[i]), state, run.round, -1)
        assert float(sent[i]["centre"][0]) == pytest.approx(expected)
        assert float(reply[WEIGHTS][0]) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (["local"], "at least 2"),
        (["local", "local"], "twice"),
        (["local", "pretrained"], "rounds"),
        (["local", "centralized"], "all clients' data"),
        (["local", "nonsense"], "no method 'nonsense'"),
        (["local", {"name": "fedavg", "mu": 1}], "mu"),
        (["local", {"name": "fedavg", "rounds": 2}], "fedavg has rounds of its own"),
    ],
)
def test_parts_that_cannot_be_are_refused(parts: list[Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        coterie.Recipe(
            name="mine",
            data={"kind": "digits", "partition": "dirichlet", "clients": 4},
            model={"kind": "classifier", "network": "mlp", "hidden": [16]},
            method={"name": "interpolation", "parts": parts, **SMALL},
        )


def test_a_foreign_name_of_a_task_is_refused() -> None:
    method = interpolation("local", "fedavg")
    for name in ("local_round+nonsense", "a+b+c", "local_round+__init__", "+layout"):
        with pytest.raises(TensorError, match="has no task"):
            find_task(method, name)
