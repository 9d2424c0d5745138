"""ONNX Runtime runs one base for clients of any layout, each by a small file of its tensors,
exactly, with a cache.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from random_models import write_models
from torch import nn

import coterie
from coterie.core.errors import Refused
from coterie.export import Source, export, onnx
from coterie.export.functional import Functional, Interface, client_tensors
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

for package in ("onnx", "onnxscript", "onnxruntime"):
    pytest.importorskip(package, reason=f"no {package} (pip install -e '.[device]')")

LAYOUTS = {
    "ann": Layout(rank=3, mlp_rank=2, alpha=5.0),
    "ben": Layout(generalists=1, specialists=3, top_k=2, rank=2, biased=True),
    "cleo": Layout(specialists=0, rank=1),
    "dan": Layout(generalists=2, rank=2, routing="equal"),
}
SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
HEADS, WINDOW = {"head_dim": 8}, {"sliding_window": 5}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": HEADS,
    "smollm3": {},
    "mistral": WINDOW,
    "ministral": HEADS | WINDOW,
    "gemma": HEADS,
    "gemma2": HEADS | WINDOW,
    "gemma3_text": HEADS | WINDOW,
    "gemma4_text": HEADS | WINDOW | {"vocab_size_per_layer_input": 272},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW,
    "granite": {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "cohere": {},
    "cohere2": WINDOW,
    "stablelm": {},
    "helium": HEADS,
    "exaone4": WINDOW,
    "ernie4_5": HEADS,
    "seed_oss": HEADS,
    "starcoder2": WINDOW,
    "nemotron": {},
    "arcee": {},
    "phi": {},
    "phi3": {},
    "glm4": HEADS,
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "falcon": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
IDS = torch.randint(272, (2, 14), generator=torch.Generator().manual_seed(0))


def program_of(folder) -> str:
    """Run the program that an export's README gives, and return what it writes."""
    (program,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-3)


class Model:
    """What an exporter reads of a personal model, of random weights."""

    def __init__(self, family: str, layout: Layout) -> None:
        torch.manual_seed(0)
        sizes = {key: value for key, value in SIZES.items() if family != "gpt2" or "id" in key}
        config = transformers.AutoConfig.for_model(
            family, **{"vocab_size": 272} | sizes | FAMILIES[family]
        )
        base = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in base.parameters():
            nn.init.normal_(parameter, std=0.2)
        self.backbone, self.layout = Backbone(base), layout
        self.language = LanguageModel(self.backbone, layout)
        self.adapter = self.language.adapter
        for parameter in self.adapter.parameters():
            nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize(
    ("family", "layout"),
    [(family, "ben") for family in FAMILIES]
    + [(family, layout) for family in ("llama", "gpt2") for layout in ("ann", "cleo", "dan")],
)
@torch.no_grad()
def test_a_base_as_a_function_computes_what_the_model_does(family, layout):
    model = Model(family, LAYOUTS[layout])
    interface, tensors = Interface.of(model), client_tensors(model)
    wanted, function = model.language.forward(IDS), Functional(model.backbone)
    past = [shape.zeros(2, 0) for shape in interface.caches]
    close(function(IDS, torch.arange(14), past, tensors)[0], wanted)
    logits, past = function(IDS[:, :9], torch.tensor([3, 8]), past, tensors)
    close(logits, wanted[:, [3, 8]])
    for place in range(9, 14):
        logits, past = function(IDS[:, place : place + 1], torch.tensor([0]), past, tensors)
        close(logits[:, 0], wanted[:, place])


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_onnx_runtime_computes_what_the_model_does(family, tmp_path):
    model = Model(family, LAYOUTS["ben"])
    interface = Interface.of(model)
    onnx.write_graph(tmp_path, model, interface, "f32")
    runtime = onnx.OnnxRuntime(tmp_path / onnx.BASE, interface, client_tensors(model))
    with torch.no_grad():
        wanted = model.language.forward(IDS)
    close(runtime.logits(IDS), wanted)
    close(runtime.logits_by_token(IDS), wanted)


@pytest.fixture(scope="module")
def exported(base_of, tmp_path_factory):
    """One export of clients of all layouts, and their models."""
    folder = tmp_path_factory.mktemp("onnx")
    run = write_models(folder / "run", base_of("llama"), LAYOUTS)
    found = export(Source(run, everyone=True), "onnx", folder / "out")
    return found, coterie.load_all(run)


def test_one_base_serves_clients_of_any_layout(exported):
    """As a program does that has neither torch nor coterie: by names and arrays."""
    import onnxruntime
    from safetensors.numpy import load_file

    found, models = exported
    assert len({one.shared for one in found}) == 1
    session = onnxruntime.InferenceSession(found[0].folder / "base.onnx")
    names = [i.name for i in session.get_inputs()]
    outputs = [o.name for o in session.get_outputs()]
    for one in found:
        client = load_file(one.folder / one.files[0])
        assert {*names} == {*client, *names[:6]}
        for rows in (1, 3):
            ids = torch.randint(272, (rows, 12))
            wanted = models[one.client](ids).logits.detach().numpy()
            past = {
                i.name: np.zeros((rows, i.shape[1], 0, i.shape[3]), np.float32)
                for i in session.get_inputs()
                if i.name.startswith("past_key_values")
            }
            for start, end in ((0, 5), (5, 6), (6, 7), (7, 12)):
                inputs = {
                    "input_ids": ids[:, start:end].numpy(),
                    "logits_to_keep": np.array([end - start - 1]),
                }
                given = session.run(None, inputs | past | client)
                assert np.abs(given[0][:, 0] - wanted[:, end - 1]).max() < 1e-3
                past = {
                    name.replace("present", "past_key_values"): array
                    for name, array in zip(outputs[1:], given[1:], strict=True)
                }
                assert past["past_key_values.0.key"].shape == (rows, 2, end, 8)
    assert len({tuple(client["blocks.0.mlp.up.A"].shape) for client in map(_read, found)}) > 2


def _read(one):
    return onnx.read_tensors(one.folder / one.files[0])


def test_the_program_in_the_readme_writes_a_text(exported):
    found, models = exported
    text = "In my free time, I like to"
    wanted = models["ann"].generate(text, max_new_tokens=10, do_sample=False)
    assert program_of(found[0].folder) == f"{wanted}\n"


def test_the_page_on_devices_has_that_program(exported):
    page = (Path(__file__).parents[2] / "docs/on-device.md").read_text("utf-8")
    readme = (exported[0][0].folder / "README.md").read_text("utf-8")
    (program,) = re.findall(r"```python\n.*?```", readme, re.DOTALL)
    assert program in page


def test_the_summary_says_what_the_graph_takes(exported):
    from onnx import load

    found, _ = exported
    summary = json.loads((found[0].folder / "export.json").read_text())
    graph = load(found[0].folder / "base.onnx", load_external_data=False).graph
    for kind, values in (("inputs", graph.input), ("outputs", graph.output)):
        shapes = {
            value.name: [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
            for value in values
        }
        assert {name: entry["shape"] for name, entry in summary[kind].items()} == shapes
        assert list(shapes) == list(summary[kind])
    assert summary["versions"].keys() >= {"onnx", "onnxscript", "onnxruntime"}
    assert (summary["precision"], summary["base_precision"]) == ("f32", "f32")
    for entry in summary["clients"].values():
        assert entry["check"]["difference"] < 1e-3
        assert entry["check"]["by_token"] < 1e-3
        assert {"base.onnx", "base.onnx.data", "tokenizer.json"} < entry["files"].keys()


def test_quantised_bases_and_clients_are_smaller_and_near(exported, tmp_path):
    found, models = exported
    whole = found[0].folder / onnx.BASE
    model = models["ann"]
    interface, tensors = Interface.of(model), client_tensors(model)
    ids = torch.randint(272, (2, 20))
    with torch.no_grad():
        wanted = model(ids).logits

    def error(runtime):
        return (runtime.logits(ids) - wanted).abs().mean().item()

    sizes, costs = {"f32": _size(whole)}, {}
    for precision in ("int8", "w8", "w4"):
        base = tmp_path / precision / onnx.BASE
        base.parent.mkdir()
        onnx.quantise(whole, base, precision)
        sizes[precision] = _size(base)
        costs[precision] = error(onnx.OnnxRuntime(base, interface, tensors))
    assert sizes["int8"] < sizes["w8"] < sizes["f32"]
    assert sizes["w4"] < sizes["w8"]
    assert 1e-6 < costs["w8"] < costs["w4"] < 0.5 * wanted.abs().mean()
    own, costs = {}, {}
    for precision in onnx.PRECISIONS:
        path = tmp_path / f"{precision}.safetensors"
        onnx.write_tensors(path, tensors, precision)
        own[precision] = sum(t.nbytes for t in coterie.core.files.load(path)[0].values())
        costs[precision] = error(onnx.OnnxRuntime(whole, interface, onnx.read_tensors(path)))
    assert own["f16"] < 0.51 * own["f32"]
    assert own["int8"] < 0.4 * own["f32"]
    assert costs["f32"] < 1e-5 < costs["f16"] < costs["int8"] < 0.05 * wanted.abs().mean()


def _size(base) -> int:
    return base.stat().st_size + base.with_name(f"{base.name}.data").stat().st_size


def test_a_quantised_base_says_its_cost(make_run, own_text, tmp_path):
    source = Source(make_run("gpt2", ann=LAYOUTS["ann"]), data=own_text)
    out = tmp_path / "out"
    (found,) = export(source, "onnx", out, precision="f16", base_precision="int8")
    assert found.check.difference > 1e-4
    assert found.check.perplexity == pytest.approx(found.check.original, rel=0.02)
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*found.files, *found.shared, "export.json", "SHA256SUMS"]
    )
    assert re.search(r"from the personal model: 0\.\d+, token by token 0\.", found.sentences[0])


def test_precisions_of_bases_are_refused_where_there_is_none(make_run, tmp_path):
    source = Source(make_run("llama", ann=LAYOUTS["ann"]))
    for format, precision, message in (
        ("peft", "int8", r"--format peft has no --base-precision int8\n.*[Ll]eave"),
        ("onnx", "w3", r"--format onnx has no --base-precision w3\n.*f32, int8, w8, w4"),
    ):
        with pytest.raises(Refused, match=message):
            export(source, format, tmp_path / "out", base_precision=precision)


@pytest.mark.parametrize("precision", onnx.PRECISIONS)
def test_a_client_is_read_as_it_was_written(precision, make_run, tmp_path):
    (client,) = Source(make_run("llama", ann=LAYOUTS["ben"])).load()
    tensors, path = client_tensors(client.model), tmp_path / "ann.safetensors"
    onnx.write_tensors(path, tensors, precision)
    found = onnx.read_tensors(path)
    assert found.keys() == tensors.keys()
    allowed = {"f32": 0.0, "f16": 2e-3, "int8": 1 / 127}[precision]
    for name, tensor in tensors.items():
        largest = float(tensor.abs().max())
        assert found[name].dtype == tensor.dtype
        assert float((found[name] - tensor).abs().max()) <= allowed * largest
