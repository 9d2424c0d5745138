"""A personal model behaves like a transformers model: generation with and without a cache,
padding, several of them on one base.
"""

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import coterie
from coterie.core.errors import CheckpointError, ModelError
from coterie.models.layout import Layout
from coterie.models.routing import by_experts

LAYOUTS = {
    "1G1S": Layout(rank=2),
    "1G3S, top 2": Layout(specialists=3, rank=2, mlp_rank=3),
    "2G, top 1": Layout(generalists=2, specialists=0, rank=2, top_k=1),
    "one expert": Layout(specialists=0, rank=2),
    "equal weights": Layout(rank=2, routing="equal"),
}
PROMPT = "In my free time, I like to"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_cache_changes_nothing(family, layout, make_run):
    model = coterie.load(make_run(family, ann=layout), "ann")
    inputs = model.tokenizer(PROMPT, return_tensors="pt")
    settings = {
        "max_new_tokens": 20,
        "min_new_tokens": 20,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    cached, plain = (model.generate(**inputs, **settings, use_cache=use) for use in (True, False))
    assert cached.sequences.tolist() == plain.sequences.tolist()
    assert cached.sequences.shape[1] == inputs["input_ids"].shape[1] + 20
    torch.testing.assert_close(
        torch.stack(cached.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4
    )
    whole = model(cached.sequences).logits[:, -21:-1]
    torch.testing.assert_close(torch.stack(cached.logits, dim=1), whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_is_the_model_that_was_trained(family, layout, make_run):
    model = coterie.load(make_run(family, ann=layout), "ann")
    ids = torch.randint(257, (3, 9))
    trained = model.language.forward(ids).detach()
    torch.testing.assert_close(model(ids).logits, trained, rtol=1e-4, atol=1e-4)
    for token in range(3):
        one = model(ids[:1, token : token + 1]).logits
        torch.testing.assert_close(
            one, model.language.forward(ids[:1, token : token + 1]).detach(), rtol=1e-4, atol=1e-4
        )
    with model.backbone.using(None):
        assert not torch.allclose(model.backbone.model(ids).logits, trained, atol=0.1)


@pytest.mark.parametrize(
    ("rows", "tokens"), [(1, 8), (1, 9), (3, 16), (6, 60)]
)  # few; too few to sort some; sorted, at once and in parts
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_any_number_of_tokens_gives_the_trained_models_logits_and_routing(
    family, layout, rows, tokens, make_run
):
    model = coterie.load(make_run(family, ann=layout), "ann")
    ids = torch.randint(257, (rows, tokens))
    torch.testing.assert_close(
        model(ids).logits, model.language.forward(ids).detach(), rtol=1e-4, atol=1e-4
    )
    if layout.routed:
        record = []
        with torch.no_grad(), model.backbone.using(model.fast, record):
            model.backbone.hidden(ids)
        torch.testing.assert_close(
            torch.stack([decision.weights for decision in record]), model.routing(ids).flatten(1, 2)
        )


def test_tokens_are_sorted_by_their_experts():
    selected = torch.tensor([[3, 1], [0, 2], [1, 3], [2, 0], [1, 0]])
    order, sets = by_experts(selected)
    assert sets == [([0, 1], 0, 1), ([0, 2], 1, 3), ([1, 3], 3, 5)]
    for experts, start, end in sets:
        assert all(sorted(selected[token].tolist()) == experts for token in order[start:end])


@pytest.mark.parametrize("shape", [(40, 1), (1, 40)])
def test_in_bf16_it_is_as_near_to_fp32_as_the_trained_model(shape, make_run):
    run = make_run("llama", ann=LAYOUTS["1G3S, top 2"])
    precise, model = coterie.load(run, "ann"), coterie.load(run, "ann", dtype="bf16")
    errors = torch.zeros(2)
    for ids in torch.arange(40).view(shape):
        exact = precise.language.forward(ids[None]).detach()
        errors += torch.stack(
            [
                (logits - exact).abs().mean()
                for logits in (model(ids[None]).logits, model.language.forward(ids[None]).detach())
            ]
        )
    # the trained model's attention is in fp32, that of the cache is not
    assert 0 < errors[0] < 2 * errors[1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_models_on_one_base_do_not_disturb_each_other(family, make_run):
    run = make_run(family, ann=LAYOUTS["1G1S"], ben=LAYOUTS["1G3S, top 2"])
    models = coterie.load_all(run)
    assert models["ann"].backbone is models["ben"].backbone
    ids = {
        name: torch.randint(257, (1, 12), generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(models)
    }
    alone = {name: coterie.load(run, name)(ids[name]).logits for name in models}
    assert not torch.allclose(
        models["ann"](ids["ann"]).logits, models["ben"](ids["ann"]).logits, atol=0.1
    )
    caches, found = dict.fromkeys(models), {name: [] for name in models}
    for t in range(12):
        for name, model in models.items():
            output = model(ids[name][:, t : t + 1], past_key_values=caches[name], use_cache=True)
            caches[name] = output.past_key_values
            found[name].append(output.logits)
    for name in models:
        torch.testing.assert_close(torch.cat(found[name], dim=1), alone[name], rtol=1e-4, atol=1e-4)


def test_threads_wait_for_each_other(make_run):
    models = coterie.load_all(make_run("llama", ann=LAYOUTS["1G1S"], ben=LAYOUTS["1G3S, top 2"]))
    settings = {"max_new_tokens": 20, "do_sample": False}
    wanted = {name: model.generate(PROMPT, **settings) for name, model in models.items()}
    assert len(set(wanted.values())) == 2
    found = {name: [] for name in models}

    def work(name: str) -> None:
        found[name] += [models[name].generate(PROMPT, **settings) for _ in range(5)]

    threads = [threading.Thread(target=work, args=[name]) for name in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {name: [text] * 5 for name, text in wanted.items()}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_padded_batch_equals_single_prompts(family, make_run):
    model = coterie.load(make_run(family, ann=LAYOUTS["1G3S, top 2"]), "ann")
    tokenizer = model.tokenizer
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    prompts = ["a", "some words", "In my free time, I like to"]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    settings = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    together = model.generate(**batch, **settings)
    for prompt, row in zip(prompts, together, strict=True):
        single = model.generate(**tokenizer(prompt, return_tensors="pt"), **settings)
        assert row[-12:].tolist() == single[0, -12:].tolist(), prompt


def test_text_in_text_out_and_ids_in_ids_out(make_run):
    model = coterie.load(make_run("llama", ann=LAYOUTS["1G1S"]))
    ids = model.tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    settings = {"max_new_tokens": 8, "do_sample": False}
    text = model.generate(PROMPT, **settings)
    assert text.startswith(PROMPT)
    by_position, by_name = (
        model.generate(ids, **settings),
        model.generate(input_ids=ids, **settings),
    )
    assert torch.equal(by_position, by_name)
    assert model.tokenizer.decode(by_name[0], skip_special_tokens=True) == text
    assert isinstance(model.generate("", **settings), str)
    with pytest.raises(
        ModelError, match=r"26 tokens of prompt and 40 more exceed the base's context of 64"
    ):
        model.generate(PROMPT, max_new_tokens=40)
    with pytest.raises(ModelError, match="26 tokens of prompt and 40 more"):
        model.generate(PROMPT, max_length=66)
    assert model.generate(ids, max_new_tokens=None, max_length=30, do_sample=False).shape == (1, 30)


def test_routing_by_expert(make_run):
    model = coterie.load(
        make_run("llama", ann=LAYOUTS["1G3S, top 2"], ben=LAYOUTS["2G, top 1"]), "ann"
    )
    assert model.experts == ("G", "S1", "S2", "S3")
    weights = model.routing(torch.randint(257, (2, 5)))
    assert weights.shape == (2, 2, 5, 4)
    assert ((weights > 0).sum(dim=-1) == 2).all()
    assert model.device.type == "cpu"
    assert model.config.vocab_size == 257


def test_a_client_is_found_by_its_run_or_its_own_folder(make_run, tmp_path: Path):
    run = make_run("llama", ann=Layout(rank=2), ben=Layout(rank=2))
    own = coterie.load(run / "clients" / "ann")
    assert own.about.client == "ann"
    ids = torch.randint(257, (1, 5))
    assert torch.equal(
        own(ids).logits, coterie.load(str(run), "ann", backbone=own.backbone)(ids).logits
    )
    assert list(coterie.load_all(run)) == ["ann", "ben"]
    assert list(coterie.load_all(run, ["ben"])) == ["ben"]
    assert list(coterie.load_all(run / "clients" / "ann")) == ["ann"]
    with pytest.raises(CheckpointError, match=r"several clients\n  Its clients: ann, ben"):
        coterie.load(run)
    with pytest.raises(CheckpointError, match=r"no client 'cleo'\n  Its clients: ann, ben"):
        coterie.load(run, "cleo")
    with pytest.raises(CheckpointError, match="holds no personal models"):
        coterie.load(tmp_path / "elsewhere", "ann")
    with pytest.raises(CheckpointError, match="folder of client 'ann', not of 'ben'"):
        coterie.load(run / "clients" / "ann", "ben")
    with pytest.raises(AttributeError, match="nothing"):
        coterie.nothing  # noqa: B018


def test_importing_the_package_is_quick():
    code = (
        "import coterie, sys; assert not {'torch', 'transformers', 'uvicorn'} & set(sys.modules); "
        "print(coterie.load.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "load", done.stderr


def test_several_prompts_are_answered_as_each_alone(make_run):
    model = coterie.load(make_run("llama", ann=Layout(rank=2)), "ann")
    prompts = ["In my free time", "a", ""]
    settings = {"max_new_tokens": 6, "do_sample": False}
    assert model.generate(prompts, **settings) == [
        model.generate(prompt, **settings) for prompt in prompts
    ]
    for words, prompt in zip(model.next_words(prompts, 3), prompts, strict=True):
        assert [word.word for word in words] == [word.word for word in model.next_words(prompt, 3)]
    assert model.generate([]) == model.next_words([]) == []


def test_a_model_is_used_moved_and_saved_as_one_of_transformers(
    make_run, tmp_path, caplog, monkeypatch
):
    from transformers import pipeline

    model = coterie.load(make_run("llama", ann=Layout(rank=2)), "ann")
    words = model.next_words("In my", 3)
    assert model.to("cpu").eval() is model
    log = logging.getLogger("transformers")
    monkeypatch.setattr(log, "propagate", True)  # so that what it says is seen here
    write = pipeline("text-generation", model=model, tokenizer=model.tokenizer, device="cpu")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    (found,) = write("In my free time", max_new_tokens=6, do_sample=False)
    assert found["generated_text"] == model.generate(
        "In my free time", max_new_tokens=6, do_sample=False
    )
    model.save_pretrained(tmp_path / "mine")
    again = coterie.load(tmp_path / "mine")
    assert again.about == model.about
    assert again.next_words("In my", 3) == words
