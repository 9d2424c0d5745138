"""Exports of models trained on chats carry the template that they were trained with, and the tokens
that end an answer; asked in their own programs they answer as in coterie, and stop there.
"""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_bases import CHATML, MARKED, turns, write_jsonl
from chat_templates import STYLES, tokenizer_of
from random_models import write_base, write_models
from test_onnx import program_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig

import coterie
from coterie.core.errors import ExportError, Refused
from coterie.data.chats import ChatTemplate
from coterie.data.text_encoding import TextEncoder
from coterie.export import Source, export
from coterie.export.check import MOST
from coterie.export.format import QUESTION, TorchRuntime
from coterie.export.functional import Functional, Interface, client_tensors
from coterie.export.onnx import OnnxRuntime
from coterie.models.layout import Layout
from coterie.personal import PersonalModel, read_about, save

ASKED = list(QUESTION)
LAYOUT = Layout(rank=2, alpha=0.5)
PLAIN = (  # a template of one's own: answers end with the end of a text
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def begun(tokenizer: Any) -> Any:
    """The tokenizer, which puts `<s>` before texts as Llama's does."""
    from tokenizers.processors import TemplateProcessing

    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.bos_token_id)]
    )
    return tokenizer


def written(folder: Path, tokenizer: Any, template: str | None = None) -> Path:
    """A run's folder with a random model of a client, whose answer to the question ends early."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
    )
    base = write_base(folder / "base", config, tokenizer)
    run = write_models(folder / "run", base, {"ann": LAYOUT})
    own = run / "clients/ann"
    about = replace(read_about(own), content="chats", chat_template=template)
    save(own, about, dict(coterie.load(run).adapter.named_parameters()))
    _end_early(base, coterie.load(run))
    return run


def _end_early(base: Path, model: PersonalModel) -> None:
    """Change the output layer so that the token that ends an answer is one of the first of it."""
    prompt, stop = model.chats.prompt(ASKED), model.chats.stops[-1]
    answer = greedy(model, prompt, ())
    token = next(t for i, t in enumerate(answer) if i and t not in answer[:i] and t != stop)
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.lm_head.weight.data[[token, stop]] = theirs.lm_head.weight.data[[stop, token]]
    theirs.save_pretrained(base)


def greedy(model: PersonalModel, prompt: list[int], stops: tuple[int, ...]) -> list[int]:
    """The likeliest tokens of the personal model, one by one without a cache."""
    answer: list[int] = []
    while len(answer) < MOST and not (answer and answer[-1] in stops):
        answer.append(int(model(torch.tensor([prompt + answer])).logits[0, -1].argmax()))
    return answer


def _require(format: str) -> None:
    if format != "mixtral":
        pytest.importorskip({"peft": "peft", "gguf": "xllamacpp", "onnx": "onnxscript"}[format])


def exported(run: Path, out: Path, format: str, **options: Any) -> dict[str, Any]:
    """What export.json says of the client's check."""
    _require(format)
    part = {"part": "generalist"} if format == "peft" else {}
    export(Source(run), format, out, **part, **options)
    found: dict[str, Any] = json.loads((out / "export.json").read_text())
    return found


@pytest.fixture(scope="module", params=STYLES)
def style(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def run(style: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on a base with one of the well-known templates, which begins texts with `<s>`."""
    return written(tmp_path_factory.mktemp(style), begun(tokenizer_of(style)))


def test_stock_transformers_answers_as_coterie_and_stops_there(run: Path, tmp_path: Path) -> None:
    entry = exported(run, tmp_path / "out", "mixtral")
    model = coterie.load(run)
    wanted = greedy(model, model.chats.prompt(ASKED), model.chats.stops)
    assert 1 < len(wanted) < MOST
    assert wanted[-1] in model.chats.stops
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    prompt = tokenizer.apply_chat_template(
        ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    answer = theirs.generate(**prompt, max_new_tokens=MOST, do_sample=False)
    assert answer[0, prompt["input_ids"].shape[1] :].tolist() == wanted
    assert theirs.generation_config.eos_token_id == [*model.chats.stops]
    chat = entry["clients"]["ann"]["check"]["chat"]
    assert (chat["tokens"], chat["ended"]) == (len(wanted), True)
    assert tokenizer("a")["input_ids"][0] == entry["text"]["begin"][0] == tokenizer.bos_token_id


def test_llama_cpp_writes_chats_and_stops_as_coterie(run: Path, tmp_path: Path) -> None:
    entry = exported(run, tmp_path / "out", "gguf", precision="f32")
    model = coterie.load(run)
    wanted = greedy(model, model.chats.prompt(ASKED), model.chats.stops)
    chat = entry["clients"]["ann"]["check"]["chat"]
    assert (chat["tokens"], chat["ended"]) == (len(wanted), True)
    fields = gguf_fields(tmp_path / "out")
    ends = {fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    assert ends - {None} == {*model.chats.stops}
    begins = model.chats.prompt(ASKED)[0] == model.tokenizer.bos_token_id
    assert fields["tokenizer.ggml.add_bos_token"] == begins
    assert not fields["tokenizer.ggml.add_eos_token"]


def gguf_fields(folder: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    (path,) = folder.glob("base-*.gguf")
    return {name: field.contents() for name, field in GGUFReader(path).fields.items()}


@pytest.fixture(scope="module")
def other(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a template of its own, on a base with none or another one."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = request.param
    return written(tmp_path_factory.mktemp("other"), tokenizer, PLAIN)


@pytest.mark.parametrize(
    ("other", "format"),
    [
        (None, "mixtral"),
        (CHATML, "mixtral"),
        (CHATML, "peft"),
        pytest.param(None, "onnx", marks=pytest.mark.slow),
    ],
    indirect=["other"],
)
def test_a_template_of_ones_own_takes_the_place_of_the_bases(
    format: str, other: Path, tmp_path: Path
) -> None:
    base, out = other.parent / "base", tmp_path / "out"
    before = {path.name: path.read_bytes() for path in base.iterdir()}
    entry = exported(other, out, format)
    model = coterie.load(other)
    assert AutoTokenizer.from_pretrained(out).chat_template == PLAIN
    assert GenerationConfig.from_pretrained(out).eos_token_id == [*model.chats.stops]
    assert entry["text"]["stops"] == [*model.chats.stops]
    assert entry["clients"]["ann"]["check"]["chat"]["answer"] is not None
    assert {path.name: path.read_bytes() for path in base.iterdir()} == before
    if format == "onnx":
        prompt = model.chats.prompt(ASKED)
        answer = greedy(model, prompt, model.chats.stops)
        assert answer[-1] in model.chats.stops
        wanted = model.tokenizer.decode(prompt + answer[:10], skip_special_tokens=True)
        assert program_of(out) == f"{wanted}\n"


@pytest.mark.parametrize("other", [None, CHATML], indirect=True)
def test_llama_cpp_gets_a_template_of_ones_own(other: Path, tmp_path: Path) -> None:
    entry = exported(other, tmp_path / "out", "gguf")
    assert entry["clients"]["ann"]["check"]["chat"]["ended"]
    assert gguf_fields(tmp_path / "out")["tokenizer.chat_template"] == PLAIN


def test_a_graph_is_asked_token_by_token(tmp_path: Path) -> None:
    model = coterie.load(written(tmp_path, tokenizer_of("chatml")))
    tensors, function = client_tensors(model), Functional(model.backbone)

    class Eager(OnnxRuntime):
        def step(self, ids: Tensor, kept: Tensor, past: Sequence[Tensor]) -> list[Tensor]:
            pairs = list(zip(past[::2], past[1::2], strict=True))
            logits, present = function(ids, kept, pairs, tensors)
            return [logits, *(part for pair in present for part in pair)]

    prompt, stops = model.chats.prompt(ASKED), model.chats.stops
    runtime = Eager(tmp_path, Interface.of(model), tensors)
    with torch.no_grad():
        assert runtime.answer(prompt, MOST) == (greedy(model, prompt, ()), False)
        runtime.stops = stops
        assert runtime.answer(prompt, MOST) == (greedy(model, prompt, stops), True)


def test_texts_begin_and_end_as_the_bases(tmp_path: Path) -> None:
    """A model trained on texts, on a base with a template: nothing of that is for its texts."""
    run = written(tmp_path, begun(tokenizer_of("llama3.1")))
    own = run / "clients/ann"
    text = replace(read_about(own), content="text")
    save(own, text, dict(coterie.load(run).adapter.named_parameters()))
    entry = exported(run, tmp_path / "out", "gguf")
    model = coterie.load(run)
    assert entry["text"]["content"] == "text"
    assert entry["clients"]["ann"]["check"]["chat"] is None
    assert entry["text"]["stops"] == [model.tokenizer.eos_token_id]
    assert entry["text"]["begin"] == TextEncoder(model.tokenizer).begin != []
    assert gguf_fields(tmp_path / "out")["tokenizer.ggml.add_bos_token"]


def conversations(folder: Path) -> Path:
    rows = [{"messages": turns(f"Is {i} odd?", "Yes" if i % 2 else "No, even")} for i in range(20)]
    return write_jsonl(folder / "chats/ann.jsonl", rows)


@pytest.mark.parametrize("format", ["mixtral", "peft", "gguf"])
def test_perplexity_is_over_the_answers(format: str, tmp_path: Path) -> None:
    run = written(tmp_path, tokenizer_of("chatml"))
    own = run / "clients/ann"
    about = replace(read_about(own), context=48, layout=LAYOUT)
    save(own, about, dict(coterie.load(run).adapter.named_parameters()))
    _require(format)
    source = Source(run, data=conversations(tmp_path))
    (one,) = export(source, format, tmp_path / "out", precision="f32")
    (client,) = source.load()
    model, nll, tokens = client.model, 0.0, 0
    for number in range(len(client.test.lengths)):
        ids = client.test.conversation(number)
        text = model.tokenizer.decode(ids)
        answer = text.index("<|im_start|>assistant\n") + len("<|im_start|>assistant\n")
        start = len(model.tokenizer(text[:answer], add_special_tokens=False)["input_ids"])
        logits: Tensor = model(torch.tensor([ids.tolist()])).logits[0].log_softmax(-1)
        nll -= sum(float(logits[i - 1, ids[i]]) for i in range(start, len(ids)))
        tokens += len(ids) - start
    assert one.check.tokens == tokens > 0
    assert one.check.original == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    if format != "peft":  # whose fold is another model
        assert one.check.perplexity == pytest.approx(one.check.original, rel=1e-3)


def test_what_answers_otherwise_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = written(tmp_path, tokenizer_of("chatml"))

    def refused(name: str, value: Any, message: str) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(TorchRuntime, name, value)
            with pytest.raises(ExportError, match=message):
                export(Source(run), "mixtral", tmp_path / "out")
        assert not (tmp_path / "out").exists()

    stop = coterie.load(run).chats.stops[-1]
    refused("chat_ids", lambda *_: [1, 2], "writes a chat with other tokens")
    refused("ending", lambda *_: set(), r"does not end an answer at .*<\|im_end\|>")
    refused("answer", lambda *_: ([5, stop, 6], False), "ends an answer at another token")
    refused("answer", lambda *_: ([5, 6, 7], True), "ends an answer at another token")
    refused("answer", lambda *_: ([5, 6, 7], False), "answers a chat otherwise")


def test_clients_with_different_templates_are_not_exported_together(tmp_path: Path) -> None:
    run = written(tmp_path, tokenizer_of("chatml"))
    shutil.copytree(run / "clients/ann", run / "clients/ben")
    own = run / "clients/ben"
    about = replace(read_about(own), client="ben", chat_template=PLAIN)
    save(own, about, dict(coterie.load(run, "ann").adapter.named_parameters()))
    with pytest.raises(Refused, match="different chat templates"):
        export(Source(run, everyone=True), "mixtral", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "template", "chats"),
    [("chats", CHATML, True), ("text", CHATML, False), ("text", None, False)],
)
def test_a_model_says_whether_it_was_trained_on_chats(
    content: Any, template: str | None, chats: bool, make_run: Any, tmp_path: Path
) -> None:
    own = make_run("llama", ann=LAYOUT) / "clients/ann"
    about = replace(read_about(own), content=content, chat_template=template)
    save(own, about, dict(coterie.load(own).adapter.named_parameters()))
    (client,) = Source(own).load()
    assert client.chats == chats
    assert bool(client.serving.prompt) == chats


def test_marks_of_answers_are_no_obstacle(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = MARKED
    run = written(tmp_path, tokenizer)
    assert ChatTemplate(tokenizer).has_marks
    for format in ("mixtral", "gguf"):
        entry = exported(run, tmp_path / format, format)
        assert entry["clients"]["ann"]["check"]["chat"]["ended"]
