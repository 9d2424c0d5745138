"""Weights that follow what the owner of a mixture writes: what is observed, and what is kept."""

import json
import math
from pathlib import Path

import pytest
import torch
from browser import opened
from random_models import write_models
from test_personal_commands import run as command

import coterie
from coterie.core.errors import CheckpointError
from coterie.models.artifact import FOLLOWED, Origin, save_mixture
from coterie.models.interpolation import grid, interpolate
from coterie.models.layout import Layout
from coterie.personal import ManyModels, PersonalModel
from coterie.personal.api import server
from coterie.personal.api.preparation import Preparation
from coterie.personal.api.requests import CompletionRequest, parsed
from coterie.personal.mixture import PersonalMixture
from coterie.personal.running_batch import Continuation, RunningBatch
from coterie.personal.sampling import Sampling

FITTED = {"local": 0.3, "fedavg": 0.7}
# half of the mass is on an even grid
FIRST = pytest.approx({"local": 0.4, "fedavg": 0.6})
PLAIN = Layout(specialists=0, rank=2)


@pytest.fixture
def folder(bases: dict[str, Path], tmp_path: Path) -> Path:
    """A run of ann, a mixture of two random models, and of ben, one alone."""
    for client, parts in {"ann": list(FITTED), "ben": [""]}.items():
        write_models(tmp_path / client, bases["few"], dict.fromkeys(["other", *parts], PLAIN))
        for part in parts:
            there = tmp_path / "run" / "clients" / client / part
            there.parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / client / "clients" / part).rename(there)
    origin = Origin("interpolation", "folders", 3, 0)
    save_mixture(tmp_path / "run/clients/ann", "ann", FITTED, origin)
    return tmp_path / "run"


def follow(folder: Path) -> PersonalMixture:
    model = coterie.load(folder, "ann", follow=True)
    assert isinstance(model, PersonalMixture)
    return model


def tokens(model: PersonalModel) -> int:
    assert model.following
    return model.following._kept().tokens


def likelihoods(model: PersonalMixture, ids: list[int]) -> torch.Tensor:
    """(P, T) by plain forward passes of each part."""
    rows = torch.tensor([ids])
    by_part = [part(rows).logits.double().log_softmax(dim=-1) for part in model.parts.values()]
    return torch.stack([p[0, :-1].gather(1, rows[0, 1:, None])[:, 0] for p in by_part])


def test_the_theorem_in_use_on_texts_of_two_authors(folder: Path) -> None:
    """In all at most log K + log T nats more than the best constant mixture, and far less than
    either part where each has written half.
    """
    model, total, scored = follow(folder), 0.0, []
    for part in model.parts.values():
        for parameter in part.adapter.parameters():
            parameter.mul_(3)  # authors who write otherwise
    for author, start in [(part, start) for part in FITTED for start in range(4, 12)]:
        part = model.parts[author]
        ids = part.generate(torch.tensor([[start]]), do_sample=False, max_new_tokens=40)
        text = ids[0].tolist()
        scored.append(likelihoods(model, text))
        assert model.following
        model.following._texts.clear()  # or equal beginnings would count once
        # as it predicts: every token with the weights after the one before
        for end in range(2, len(text) + 1):
            predicted = interpolate(scored[-1][:, end - 2], model.weights)
            total -= float(predicted)
            model.following.observe(text[:end], generated=False)
    every = torch.cat(scored, dim=1)
    assert tokens(model) == every.shape[1]
    best = min(-float(interpolate(every, mixture).sum()) for mixture in grid(2))
    assert total <= best + math.log(2 * len(grid(2))) + math.log(every.shape[1]) + 1e-6
    assert total < min((-every).sum(dim=1).tolist()) - 5
    assert model.shares["fedavg"] > 0.8


def test_a_growing_text_is_observed_once(folder: Path) -> None:
    model, whole = follow(folder), "ab a cab ab a"
    for end in range(1, len(whole) + 1):
        model.next_words(whole[:end], k=1)
    ids = model.texts.prompt("ab a cab ab")  # the last word may go on
    assert tokens(model) == len(ids) - 1
    at_once = Path(folder / "clients/ann" / FOLLOWED).read_bytes()
    weights = model.weights.clone()
    for text in (whole, "ab a c", "ab", ""):  # as one deletes
        model.next_words(text, k=1)
    assert tokens(model) == len(ids) - 1
    model.next_words("ab a ba ", k=1)  # and writes otherwise
    assert tokens(model) > len(ids) - 1
    model.following.reset()
    assert model.shares == FIRST
    fresh = follow(folder)
    fresh.observe(whole, growing=True)
    torch.testing.assert_close(fresh.weights, weights)
    assert Path(folder / "clients/ann" / FOLLOWED).stat().st_size == len(at_once)


def test_what_is_observed_is_what_its_owner_wrote(folder: Path) -> None:
    model = follow(folder)
    text = model.generate("ab a", max_new_tokens=8, do_sample=False)
    seen = tokens(model)
    assert seen == len(model.texts.prompt("ab a")) - 1
    model.generate(f"{text} cab", max_new_tokens=1)
    assert (
        tokens(model)
        == len(model.texts.prompt(f"{text} cab")) - len(model.texts.prompt(text)) + seen
    )
    many = ManyModels({"ann": model})
    before = tokens(model)
    many.next_words("b b b ", k=1)  # for all: nobody's
    many.generate(torch.tensor([[5, 6]]), ["ann"], max_new_tokens=1)
    model.generate(torch.tensor([[5, 6]]), max_new_tokens=1)
    assert tokens(model) == before
    many.generate({"ann": "b b b c"}, max_new_tokens=1)
    many.next_words({"ann": "c c b "}, k=1)
    assert tokens(model) > before
    before = tokens(model)
    template = "{% for m in messages %}{{ m.role[:1] }}: {{ m.content }}\n{% endfor %}"
    model.chats = type(model.chats)(model.tokenizer, template)
    chat = [{"role": "user", "content": "a cab"}]
    model.answer(chat, max_new_tokens=1)
    once = tokens(model)
    assert once == before + len(model.texts.prompt("a cab")) - 1
    said = [{"role": "assistant", "content": "c c c c"}, {"role": "user", "content": "cc ab"}]
    model.answer([*chat, *said], max_new_tokens=1)
    assert tokens(model) == once + len(model.texts.prompt("cc ab")) - 1


def test_it_is_carried_on_and_is_no_part_of_the_model(folder: Path, tmp_path: Path) -> None:
    model = follow(folder)
    model.observe("ab a cab ab")
    assert model.shares != FIRST
    again, fixed = follow(folder), coterie.load(folder, "ann")
    assert torch.equal(again.weights, model.weights)
    assert fixed.shares == FITTED
    again.observe("c b c b c")
    model.observe("a a a a")  # goes on from where the other is
    texts = ("ab a cab ab", "c b c b c", "a a a a")
    assert tokens(model) == sum(tokens_of(text, model) for text in texts)
    model.save_pretrained(tmp_path / "copy")
    assert not (tmp_path / "copy" / FOLLOWED).exists()
    assert coterie.load(tmp_path / "copy", follow=True).shares == FIRST
    kept = folder / "clients/ann" / FOLLOWED
    kept.write_bytes(kept.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"truncated .*\n.*Delete .*\.weights\.safetensors"):
        follow(folder)
    assert coterie.load(folder, "ann").shares == FITTED
    kept.unlink()
    assert coterie.load_all(folder, follow=True)["ben"].following is None


def tokens_of(text: str, model: PersonalModel) -> int:
    return len(model.texts.prompt(text)) - 1


def test_texts_that_run_keep_the_weights_with_which_they_began(folder: Path) -> None:
    many = coterie.load_many(folder, follow=True)
    model = many.models["ann"]
    batch = RunningBatch(many)
    prompt = many.texts.prompt("ab a")
    first = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    jobs = [Continuation(i, prompt, 12, Sampling(0.0)) for i in ("ann", "ben", "ann")]
    texts: dict[int, list[int]] = {id(job): [] for job in jobs}
    batch.add(jobs[0])
    for steps in range(100):
        if steps == 3:
            model.observe(" c c b b c c c b")
            assert model.shares != FIRST
            batch.add(jobs[1])
            batch.add(jobs[2])
        for progress in batch.step():
            if progress.token is not None:
                texts[id(progress.of)].append(progress.token.id)
        if not batch.busy and steps > 3:
            break
    then = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    ben = many.models["ben"].generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    for job, expected in zip(jobs, (first, ben, then), strict=True):
        assert texts[id(job)] == expected[0, len(prompt) :].tolist()


def test_prompts_of_the_interface_are_observed_but_not_scored_texts(folder: Path) -> None:
    many = coterie.load_many(folder, follow=True)
    model, preparation = many.models["ann"], Preparation(many, 64, 8, 8)

    def asked(**fields: object) -> int:
        preparation.completion(
            parsed(CompletionRequest, json.dumps({"model": "ann", **fields}).encode())
        )
        return tokens(model)

    assert asked(prompt="ab a", max_tokens=0, echo=True, logprobs=0) == 0
    assert asked(prompt=[5, 6, 7], max_tokens=2) == 0
    assert asked(prompt="ab a", max_tokens=2) == tokens_of("ab a", model)
    assert asked(prompt="ab a", max_tokens=2) == tokens_of("ab a", model)


def test_the_page_says_the_weights_and_begins_again(folder: Path) -> None:
    pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
    expect = pytest.importorskip("playwright.sync_api").expect
    from coterie.personal.ui.page import served

    models = coterie.load_all(folder, follow=True)
    first = "40 % its own, 60 % everybody's"
    with served(models, 0) as address, opened() as page:
        page.goto(address)
        shares = page.locator(".shares")
        page.wait_for_function("() => !document.querySelector('button.word[disabled]')")
        assert shares.all_inner_texts() == [first, "", ""]
        page.locator("#text").fill("ab a cab ab a cab ab c")
        expect(shares.first).not_to_have_text(first)
        assert models["ann"].shares != FIRST
        page.get_by_role("button", name="Begin again with the first weights").click()
        expect(shares.first).to_have_text(first)
        assert models["ann"].shares == FIRST
    with served(coterie.load_all(folder), 0) as address, opened() as page:
        page.goto(address)
        assert not page.get_by_role("button", name="Begin again").is_visible()


def test_commands_follow_one_writer(folder: Path) -> None:
    words = ("generate", folder, "--client", "ann", "--text", "ab a cab", "--tokens", 2)
    plain = command(*words)
    assert plain.returncode == 0, plain.stderr
    assert not (folder / "clients/ann" / FOLLOWED).exists()
    for times in (1, 2):
        assert command(*words, "--follow").returncode == 0
        assert tokens(follow(folder)) == times * tokens_of("ab a cab", follow(folder))
    assert command(*words, "--reset-weights").returncode == 0
    assert tokens(follow(folder)) == tokens_of("ab a cab", follow(folder))
    assert command("predict", folder, "--text", "ab a ", "--follow").returncode == 0
    alone = command("predict", folder, "--client", "ben", "--text", "ab a", "--follow")
    assert alone.returncode == 2
    assert "0 models" in alone.stderr


def test_the_interface_has_the_weights_and_knows_what_it_has_generated(folder: Path) -> None:
    openai = pytest.importorskip("openai")
    models, problems = coterie.load_all(folder, follow=True), list[str]()
    settings = server.Settings(0, token="a-token-of-the-tests")
    with server.served(models, settings, problems.append) as address:
        client = openai.OpenAI(base_url=address, api_key=settings.token, max_retries=0)
        assert client.models.retrieve("ann").weights == FIRST
        assert not hasattr(client.models.retrieve("ben"), "weights")
        few = {"model": "ann", "max_tokens": 6, "temperature": 0}
        text = "ab a" + client.completions.create(prompt="ab a", **few).choices[0].text
        followed = client.models.retrieve("ann").weights
        assert followed == models["ann"].shares != FIRST
        client.completions.create(prompt=f"{text} cab", **few)
        known = len(models["ann"].texts.prompt(text))
        new = len(models["ann"].texts.prompt(f"{text} cab")) - known
        assert tokens(models["ann"]) == tokens_of("ab a", models["ann"]) + new
    assert problems == []
