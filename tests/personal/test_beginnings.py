"""In use a text begins as in training, whatever the way it comes in, and what people type that
reads like a control token stays text.
"""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from byte_pairs import byte_pairs
from random_models import write_base, write_models
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, LlamaConfig

import coterie
from coterie.core.errors import CheckpointError, ModelError
from coterie.data.text_encoding import TokenizerDigest
from coterie.models.artifact import save
from coterie.models.layout import Layout
from coterie.models.text import TextShape
from coterie.personal import ManyModels, read_about
from coterie.personal.api.preparation import Preparation
from coterie.personal.api.requests import ApiError, ChatRequest, CompletionRequest
from coterie.personal.samples import of_texts

TEXT = "the <s>er and </s>"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on a base whose tokenizer puts <s> before texts and </s> behind them, as some do."""
    tokenizer = byte_pairs()
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=ids
    )
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        bos_token_id=ids[0][1],
        eos_token_id=ids[1][1],
    )
    base = write_base(tmp_path / "base", config, tokenizer)
    return write_models(tmp_path / "run", base, {"ann": Layout(rank=2), "ben": Layout(rank=2)})


@pytest.fixture
def models(run: Path) -> ManyModels:
    return coterie.load_many(run)


@pytest.fixture
def read(models: ManyModels, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The ids of the first token batch that the base reads, and of those behind it."""
    seen: list[list[int]] = []
    embedding = models.backbone.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, ids: seen.append(ids[0][0].tolist()))
    return seen


def as_text(models: ManyModels, text: str) -> list[int]:
    """<s>, and the letters and merges of a text that has no control tokens."""
    plain = byte_pairs()
    return [models.tokenizer.bos_token_id, *plain(text)["input_ids"]]


def test_every_way_in_begins_alike(models: ManyModels, read: list[list[int]]) -> None:
    model, wanted = models.models["ann"], as_text(models, TEXT)
    settings = {"max_new_tokens": 2, "do_sample": False}
    assert model.generate(TEXT, **settings).startswith(TEXT)
    assert model.generate([TEXT], **settings)[0].startswith(TEXT)
    assert models.generate({"ben": TEXT}, **settings)["ben"].startswith(TEXT)
    model.next_words(TEXT + " a ")
    firsts = [ids for ids in read if ids[:1] == wanted[:1]]
    assert [ids[: len(wanted)] for ids in firsts] == [wanted] * 4
    preparation = Preparation(models, 64, 1, 1)
    request = CompletionRequest(model="ann", prompt=TEXT)
    assert preparation.completion(request).continuations[0].prompt == wanted


@pytest.mark.parametrize("text", ["", " "])
def test_nothing_is_the_beginning_of_a_text(
    models: ManyModels, read: list[list[int]], text: str
) -> None:
    model, begin = models.models["ann"], models.tokenizer.bos_token_id
    model.next_words(text)
    assert read[0] == [begin]
    read.clear()
    model.generate("", max_new_tokens=1)
    assert read[0] == [begin]


CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def test_a_message_is_text_in_every_chat(
    run: Path, read: list[list[int]], models: ManyModels
) -> None:
    for model in models.models.values():
        model.about = replace(model.about, chat_template=CHAT)
    tokenizer, message = models.tokenizer, {"role": "user", "content": f"{TEXT} you"}
    plain = byte_pairs()
    wanted = [
        tokenizer.bos_token_id,
        *plain(f"user: {TEXT} you")["input_ids"],
        tokenizer.eos_token_id,
        *plain("assistant:")["input_ids"],
    ]
    models.models["ann"].answer([message], max_new_tokens=1)
    models.next_words(models.chats.opened([message], " a "))
    assert [ids[: len(wanted)] for ids in read if len(ids) >= len(wanted)] == [wanted] * 2
    request = ChatRequest(model="ann", messages=[message], max_tokens=1)
    assert Preparation(models, 64, 1, 1).chat(request).continuations[0].prompt == wanted


def test_ids_stay_as_they_are_given(models: ManyModels, read: list[list[int]]) -> None:
    ids = torch.tensor([[5, 6, 7]])
    models.models["ann"].generate(ids, max_new_tokens=1)
    assert read[0] == [5, 6, 7]
    preparation = Preparation(models, 64, 1, 1)
    request = CompletionRequest(model="ann", prompt=[5, 6, 7])
    assert preparation.completion(request).continuations[0].prompt == [5, 6, 7]


@pytest.mark.parametrize("control_tokens", ["tokens", "refuse"])
def test_the_run_says_what_control_tokens_are(run: Path, control_tokens: str) -> None:
    for client in ("ann", "ben"):
        model = coterie.load(run, client)
        about = replace(model.about, control_tokens=control_tokens)
        save(run / "clients" / client, about, dict(model.adapter.named_parameters()))
    models = coterie.load_many(run)
    preparation = Preparation(models, 64, 1, 1)
    request = CompletionRequest(model="ann", prompt="</s>")
    if control_tokens == "tokens":
        end = models.tokenizer.eos_token_id
        assert models.texts.prompt("</s>")[-1] == end
        assert preparation.completion(request).continuations[0].prompt[-1] == end
    else:
        with pytest.raises(ApiError, match="control tokens"):
            preparation.completion(request)


def test_a_token_that_the_base_lacks_is_named(run: Path) -> None:
    base = Path(read_about(run / "clients/ann").base)
    tokenizer = coterie.load(run, "ann").tokenizer
    tokenizer.add_tokens(["<NAME>"])
    tokenizer.save_pretrained(base)
    models = coterie.load_many(run)
    model = models.models["ann"]
    for use in (
        lambda: model.generate("<NAME> the"),
        lambda: model.generate(["<NAME> the"]),
        lambda: model.next_words("<NAME> the"),
        lambda: models.generate({"ben": "<NAME> the"}),
    ):
        with pytest.raises(ModelError, match="'<NAME>'"):
            use()
    preparation = Preparation(models, 64, 1, 1)
    with pytest.raises(ApiError, match="there is no token"):
        preparation.completion(CompletionRequest(model="ann", prompt="<NAME> the"))


def test_another_tokenizer_than_in_training_is_refused(run: Path) -> None:
    model = coterie.load(run, "ann")
    about = replace(model.about, tokenizer=TokenizerDigest.of(model.tokenizer))
    save(run / "clients/ann", about, dict(model.adapter.named_parameters()))
    assert coterie.load(run, "ann").about.tokenizer == about.tokenizer
    path = Path(about.base) / "tokenizer.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = content["model"]["vocab"]
    vocabulary["x"], vocabulary["y"] = vocabulary["y"], vocabulary["x"]
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match="fall into other tokens") as told:
        coterie.load(run, "ann")
    assert "--base" in told.value.remedy
    coterie.load(run, "ben")  # as saved by an earlier coterie, which kept nothing of a tokenizer


def test_a_run_keeps_what_the_tokenizer_was(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    small = {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200}
    method = {"name": "fedavg", "rounds": 1, "local_steps": 1}
    coterie.run(
        "synthetic", out=tmp_path / "run", data=small | {"control_tokens": "tokens"}, method=method
    )
    about = read_about(tmp_path / "run/clients/client-0")
    assert about.tokenizer == TokenizerDigest.of(
        coterie.load(tmp_path / "run", "client-0").tokenizer
    )
    assert about.control_tokens == "tokens"


@pytest.mark.parametrize("length", [4, 64])
def test_texts_to_classify_are_read_between_the_tokens_around_them(run: Path, length: int) -> None:
    base = read_about(run / "clients/ann").base
    tokenizer = AutoTokenizer.from_pretrained(base)
    plain = "the cat and the dog"
    whole = tokenizer(plain, truncation=True, max_length=length)["input_ids"]
    samples = of_texts([plain], TextShape(base, 2, length))
    assert samples.inputs.tolist() == [whole]
    typed = of_texts([TEXT], TextShape(base, 2, length)).inputs[0].tolist()
    assert (typed[0], typed[-1]) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert not {tokenizer.bos_token_id, tokenizer.eos_token_id} & set(typed[1:-1])
