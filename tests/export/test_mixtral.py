"""A checkpoint that transformers loads by itself is the personal model, with its router."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import coterie
from coterie.core.errors import Refused
from coterie.export import Source, export
from coterie.models.layout import Layout

ROUTED = Layout(rank=3, mlp_rank=2, alpha=5.0)


@pytest.mark.parametrize(
    ("family", "kind", "layout"),
    [
        ("llama", "mixtral", ROUTED),
        ("llama", "mixtral", Layout(generalists=1, specialists=3, top_k=2, rank=2)),
        ("llama", "mixtral", Layout(generalists=2, rank=2, routing="equal")),
        ("llama", "mixtral", Layout(specialists=0, rank=2)),
        ("mistral", "mixtral", ROUTED),
        ("qwen2", "qwen2_moe", ROUTED),
        ("qwen2", "qwen2_moe", Layout(generalists=1, specialists=3, top_k=2, rank=2)),
        ("qwen2", "qwen2_moe", Layout(specialists=0, rank=2)),
        ("qwen3", "qwen3_moe", Layout(generalists=1, specialists=2, top_k=2, rank=2)),
    ],
)
def test_a_stock_checkpoint_gives_the_same_logits(family, kind, layout, make_run, tmp_path):
    run, out = make_run(family, ann=layout), tmp_path / "out"
    (found,) = export(Source(run), "mixtral", out)
    theirs = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert theirs.config.model_type == kind
    model, ids = coterie.load(run), torch.randint(257, (3, 20))
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-3)
    if layout.experts > 1:  # what is compared depends on the router
        gates = [p for name, p in theirs.named_parameters() if name.endswith("mlp.gate.weight")]
        assert len(gates) == 2
        with torch.no_grad():
            for gate in gates:
                gate.add_(torch.randn_like(gate))
            assert (theirs(ids).logits - model(ids).logits).abs().max() > 0.1
    assert found.notes == ()


def test_it_continues_texts_as_the_personal_model_does(quickstart, tmp_path):
    (found,) = export(Source(quickstart, "network"), "mixtral", tmp_path / "out")
    assert found.check.difference < 1e-4
    assert found.check.perplexity == pytest.approx(found.check.original, rel=1e-5)
    theirs = AutoModelForCausalLM.from_pretrained(found.folder)
    tokenizer = AutoTokenizer.from_pretrained(found.folder)
    text, model = "The socket module", coterie.load(quickstart, "network")
    given = theirs.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=12)
    wanted = model.generate(text, max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(given[0], skip_special_tokens=True) == wanted


def test_each_of_several_has_a_checkpoint_of_half_the_size(make_run, tmp_path):
    run = make_run("llama", ann=ROUTED, ben=Layout(rank=1))
    sizes = {}
    for precision in ("f32", "f16"):
        found = export(
            Source(run, everyone=True), "mixtral", tmp_path / precision, precision=precision
        )
        assert [one.folder for one in found] == [tmp_path / precision / i for i in ("ann", "ben")]
        sizes[precision] = (found[0].folder / "model.safetensors").stat().st_size
    assert sizes["f16"] < 0.6 * sizes["f32"]


@pytest.mark.parametrize(
    ("family", "layout", "problem"),
    [
        ("gpt2", ROUTED, "gpt2 has no relative.*llama, mistral, qwen2, qwen3"),
        ("windows", ROUTED, "use_sliding_window of the base is not False"),
        ("llama", Layout(rank=2, biased=True), "its routers have biases"),
        ("biased", ROUTED, "the base has model.layers.0.self_attn.k_proj.bias"),
    ],
)
def test_what_has_no_relative_is_refused(family, layout, problem, make_run, tmp_path):
    with pytest.raises(Refused) as refused:
        export(Source(make_run(family, ann=layout)), "mixtral", tmp_path / "out")
    assert re.search(problem, refused.value.problem)
    assert re.search("--format onnx.*--format peft", refused.value.remedy)
    assert not (tmp_path / "out").exists()
