"""A base in a GGUF file: the same values, tokens and template as the folder that it was made of."""

import re
from pathlib import Path

import huggingface_hub.constants
import numpy as np
import pytest
import torch
import transformers
from random_models import write_models
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel

import coterie
from coterie.core.errors import ModelError, Refused
from coterie.export import Source, export
from coterie.models import architecture, gguf_base
from coterie.models.backbone import Backbone
from coterie.models.layout import Layout

gguf = pytest.importorskip("gguf", reason="no gguf (pip install -e '.[device]')")
ONE, FOUR = Layout(specialists=0, rank=2), Layout(generalists=1, specialists=3, top_k=2, rank=2)


@pytest.fixture
def file_of(make_run, tmp_path):
    """Writes a base of a family as a GGUF file of a precision."""

    def make(family, precision="f32"):
        folder = tmp_path / f"files-{family}-{precision}"
        export(Source(make_run(family, ann=ONE)), "gguf", folder, precision=precision)
        return folder / f"base-{precision}.gguf"

    return make


@pytest.mark.parametrize("family", ["llama", "scaled"])
def test_a_file_is_the_base_that_it_was_made_of(family, file_of, base_of):
    backbone, wanted = Backbone.load(file_of(family)), Backbone.load(base_of(family))
    ids = torch.arange(40).view(2, 20) * 5
    with backbone.using(None), wanted.using(None):
        torch.testing.assert_close(backbone.logits(ids), wanted.logits(ids), rtol=1e-5, atol=1e-5)
    text = "The state of the <|endoftext|>  it's 2,345 naïve words\n\n"
    assert backbone.tokenizer(text)["input_ids"] == wanted.tokenizer(text)["input_ids"]
    assert backbone.tokenizer.eos_token_id == wanted.tokenizer.eos_token_id
    assert backbone.architecture == wanted.architecture


def test_quantised_weights_are_those_of_the_file(file_of):
    path = file_of("llama", "q8_0")
    name = "blk.1.ffn_down.weight"
    (stored,) = (tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    assert stored.tensor_type.name == "Q8_0"
    # 32 weights of a row share a scale of half precision
    blocks = np.ascontiguousarray(stored.data).reshape(-1, 34)
    scales = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    weights = torch.from_numpy(scales * blocks[:, 2:].view(np.int8))
    kept = load_file(Path(architecture.locate(path)) / "model.safetensors")
    down = kept["model.layers.1.mlp.down_proj.weight"]
    torch.testing.assert_close(down.flatten(), weights.flatten(), rtol=0, atol=0)


def test_a_personal_model_on_a_file_is_exported_for_it(file_of, tmp_path):
    path = file_of("llama")
    run = write_models(tmp_path / "on-file", path, {"ann": ONE})
    (found,) = export(Source(run), "gguf", tmp_path / "out", precision="original")
    assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    assert found.check.difference < 0.05
    (adapter,) = export(Source(run), "peft", tmp_path / "peft")
    assert adapter.check.difference < 1e-3
    readme = (adapter.folder / "README.md").read_text()
    assert f'from_pretrained("path/to", gguf_file="{path.name}", dtype="float32")' in readme


def test_what_cannot_use_the_original_file_is_refused(file_of, make_run, tmp_path):
    path = file_of("llama")
    four = Source(write_models(tmp_path / "four", path, {"ann": FOUR}))
    with pytest.raises(Refused, match=r"4 experts: .* needs a base that repeats every MLP"):
        export(four, "gguf", tmp_path / "out", precision="original")
    with pytest.raises(Refused, match="is no GGUF file"):
        export(Source(make_run("llama", ann=ONE)), "gguf", tmp_path / "out", precision="original")
    assert not (tmp_path / "out").exists()


def test_a_run_trains_on_a_file_and_its_model_is_loaded(file_of, tmp_path):
    texts = tmp_path / "texts"
    for client in ("ann", "ben"):
        (texts / client).mkdir(parents=True)
        (texts / client / "notes.txt").write_text("water and a network of lists. " * 200)
    run = tmp_path / "trained"
    coterie.run(
        "folders",
        out=run,
        data={"path": str(texts)},
        model={"base": str(file_of("llama")), "context": 16},
        method={"name": "fedavg", "rounds": 1, "local_steps": 3},
        patience=None,
        compare_with=[],
    )
    assert coterie.load(run, "ann").generate("water and", max_new_tokens=3)


def test_what_is_no_base_is_named(file_of, tmp_path, monkeypatch):
    whole = file_of("llama").read_bytes()
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"PK\x03\x04")
    with pytest.raises(ModelError, match=r"bad\.gguf is not a GGUF file"):
        architecture.locate(bad)
    bad.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=rf"cannot read {re.escape(str(bad))}") as refused:
        architecture.locate(bad)
    assert "llama, mistral, qwen2" in refused.value.remedy
    part = tmp_path / "whole-00001-of-00003.gguf"
    part.write_bytes(whole)
    with pytest.raises(ModelError, match="one of several parts"):
        architecture.locate(part)
    assert "Q4_K" in refused.value.remedy
    writer = gguf.GGUFWriter(str(tmp_path / "other.gguf"), "rwkv6")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="rwkv6"):
        architecture.locate(tmp_path / "other.gguf")
    with pytest.raises(ModelError, match="no GGUF file at"):
        architecture.locate(tmp_path / "missing.gguf")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"cannot get f\.gguf of owner/name from the Hub"):
        architecture.locate("owner/name/f.gguf")


def test_a_file_that_asks_for_countless_blocks_is_refused_before_they_are_made(file_of, tmp_path):
    path = file_of("llama")
    reader = gguf.GGUFReader(path, "r+")
    reader.fields["llama.block_count"].parts[-1][0] = 10**8
    reader.data.flush()
    with pytest.raises(ModelError, match="num_hidden_layers is 100,000,000"):
        architecture.locate(path)


def test_a_file_is_read_once_and_anew_if_it_changes(file_of, base_of, monkeypatch):
    path = Path(file_of("llama"))
    first = architecture.locate(path)
    with monkeypatch.context() as patched:
        patched.setattr(gguf_base, "_read", lambda *_: pytest.fail("read again"))
        gguf_base._converted.cache_clear()
        assert architecture.locate(str(path)) == first
    path.write_bytes(Path(file_of("scaled", "f16")).read_bytes())
    assert architecture.locate(path) != first
    assert Backbone.load(path).model.config.rope_parameters["rope_type"] == "llama3"


def test_positions_scaled_in_ways_that_are_not_read_are_refused(tmp_path):
    path = tmp_path / "yarn.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    config = transformers.LlamaConfig()
    with pytest.raises(ModelError, match=r"scales its positions \(yarn\)"):
        gguf_base._scale_positions(path, gguf.GGUFReader(path), config)


@pytest.mark.parametrize(
    ("name", "pieces"),
    [
        ("smollm", ["a", "ĠĠ", "2", "3", "Ġit", "'s"]),
        ("stablelm2", ["a", "Ġ", "Ġ", "2", "3", "Ġit", "'s"]),
        ("gpt-2", ["a", "Ġ", "Ġ23", "Ġit", "'s"]),
    ],
)
def test_text_is_split_as_the_file_says(name, pieces, base_of, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(base_of("llama"))
    tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    gguf_base._split_text(tmp_path, named(tmp_path, name), tokenizer)
    split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  23 it's")
    assert [piece for piece, _ in split] == pieces


def test_a_way_to_split_text_that_nothing_knows_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"splits text in a way \(falcon\)"):
        gguf_base._split_text(tmp_path, named(tmp_path, "falcon"), None)


def named(folder, split):
    """Return a reader of a file with a name for how text is split."""
    writer = gguf.GGUFWriter(str(folder / "named.gguf"), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return gguf.GGUFReader(folder / "named.gguf")


def test_a_file_too_large_for_this_machine_is_refused_before_it_is_read(file_of, monkeypatch):
    path = file_of("llama")
    monkeypatch.setattr(gguf_base.devices, "memory_here", lambda: 1e5)
    with pytest.raises(ModelError, match=r"its weights take .* GB, and there are"):
        architecture.locate(path)
