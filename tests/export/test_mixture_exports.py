"""One adapter in place of a mixture of predictions: its parameters by naive formulas, what it
learns from the mixture, and every format of it.
"""

import json
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from random_models import write_mixture, write_models
from torch import Tensor
from torch.nn import functional
from typer.testing import CliRunner

import coterie
from coterie.adapt import distillation
from coterie.cli.base import app
from coterie.core.errors import Refused
from coterie.core.tensors import copy
from coterie.export import Source, export
from coterie.export.layers import folded, mean_weights, single
from coterie.models.backbone import Backbone
from coterie.models.layout import Layout
from coterie.personal.mixture import PersonalMixture, mixed_parameters

PARTS = {
    "local": (0.3, Layout(2, 0, rank=3, routing="equal")),
    "fedavg": (0.7, Layout(1, 0, rank=2, mlp_rank=4, alpha=5.0)),
}
ROUTED = {"local": PARTS["local"], "comigs-1g1s": (0.7, Layout(rank=2))}


@pytest.fixture
def run(base_of, tmp_path) -> Path:
    return write_mixture(tmp_path / "run", base_of("llama"), "ann", PARTS)


def loaded(run: Path, base: Path) -> PersonalMixture:
    backbone = Backbone.load(base, plain=True)
    model = coterie.load(run, backbone=backbone)
    assert isinstance(model, PersonalMixture)
    return model


def constants(model: PersonalMixture) -> list[Tensor]:
    """w_k / n_k for each expert of part k, by block."""
    blocks, parts = len(model.adapter.blocks), model.parts.values()
    return [
        torch.full((blocks, part.layout.experts), w / part.layout.experts)
        for w, part in zip(model.weights.tolist(), parts, strict=True)
    ]


def merged(x: Tensor, layer: torch.nn.Module, *updates: Tensor) -> Tensor:
    return functional.linear(x, layer.weight + sum(updates))


def test_parameters_are_mixed_as_by_whole_weights(run, base_of):
    model = loaded(run, base_of("llama"))
    one = mixed_parameters(model, constants(model))
    assert (one.layout.experts, one.layout.active, one.layout.rank) == (3, 3, 5)
    x = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))
    for i, (attention, mlp) in enumerate(
        zip(model.backbone.attentions, model.backbone.mlps, strict=True)
    ):
        for name in ("q_proj", "k_proj", "v_proj"):
            layer = getattr(attention, name).base
            updates = [
                w * lora.gamma * lora.B[0] @ lora.A[0]
                for w, part in zip(model.weights.tolist(), model.adapters, strict=True)
                for lora in [part.blocks[i].attention[name]]
            ]
            found = one.adapter.blocks[i].attention[name](x, layer)
            torch.testing.assert_close(found, merged(x, layer, *updates))
        expected = torch.zeros_like(x)
        for w, part in zip(model.weights.tolist(), model.adapters, strict=True):
            loras = part.blocks[i].mlp.generalist
            for j in range(part.layout.generalists):
                gate, up, down = (
                    loras[name].gamma * loras[name].B[j] @ loras[name].A[j]
                    for name in ("gate", "up", "down")
                )
                h = mlp.activation.forward(merged(x, mlp.first[0], gate))
                y = merged(h * merged(x, mlp.first[1], up), mlp.down, down)
                expected += w / part.layout.generalists * y
        found = one.adapter.blocks[i].mlp(x, mlp)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


def test_equal_parts_mixed_are_one_part(base_of, tmp_path):
    """Of the logits, too, whatever the weights."""
    base, layout = base_of("llama"), Layout(2, 0, rank=3, routing="equal")
    run = write_mixture(
        tmp_path / "run", base, "ann", {"local": (0.4, layout), "fedavg": (0.6, layout)}
    )
    folder, ids = run / "clients/ann", torch.arange(12).view(2, 6)
    for name in ("adapter.safetensors", "SHA256SUMS", "client.json"):
        (folder / "fedavg" / name).write_bytes((folder / "local" / name).read_bytes())
    model = loaded(run, base)
    one, part = mixed_parameters(model, constants(model)), model.parts["local"]
    torch.testing.assert_close(one(ids).logits, part(ids).logits, rtol=1e-4, atol=1e-4)


def divergence(client, model) -> float:
    """KL from the mixture to a model, in nats for each token of the validation text."""
    total, tokens = 0.0, 0
    for batch in client.valid.scoring(8):
        with torch.no_grad():
            taught = client.mixture(batch[:, :-1]).logits.log_softmax(-1)
            log_p = model(batch[:, :-1]).logits.log_softmax(-1)
        total += float((taught.exp() * (taught - log_p)).sum())
        tokens += batch[:, 1:].numel()
    return total / tokens


def test_the_distilled_adapter_comes_nearer_to_the_mixture_and_changes_nothing_else(
    run, own_text, base_of
):
    (client,) = Source(run, data=own_text).load()
    model = client.model
    kept = [model.backbone.model, *model.adapters]
    before = [copy(module.state_dict()) for module in kept]
    start = single(replace(client, train=None), print)
    assert "what that costs is unknown" in start.note
    lines: list[str] = []
    done = single(client, lines.append)
    assert lines == ["ann: distilled from its mixture ..."]
    valid = [
        math.exp(nll / tokens)
        for each in (model, start.model, done.model)
        for nll, tokens in [each.score(client.valid.scoring(16))]
    ]
    assert valid[2] < valid[1]
    assert divergence(done, done.model) < 0.7 * divergence(done, start.model)
    whole, mixed, after = (f"{value:.2f}" for value in valid)
    figures = rf"perplexity {after}, of the mixture {whole} \(.*, of parameters mixed {mixed}\."
    assert re.search(figures, done.note)
    assert "(30% local, 70% fedavg)" in done.note
    for module, values in zip(kept, before, strict=True):
        assert not any(parameter.requires_grad for parameter in module.parameters())
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, values[name])


def test_a_part_with_a_router_is_folded_by_its_means_on_validation_text(
    base_of, own_text, tmp_path
):
    run = write_mixture(tmp_path / "run", base_of("llama"), "ann", ROUTED)
    with pytest.raises(Refused, match=r"a fold needs the client's validation text(.|\n)*--data"):
        export(Source(run), "peft", tmp_path / "out")
    (client,) = Source(run, data=own_text).load()
    routed = replace(client, model=client.model.parts["comigs-1g1s"])
    weights = [*constants(client.model)[:1], 0.7 * mean_weights(routed)]
    mixed = mixed_parameters(client.model, weights)
    ids = next(iter(client.valid.scoring(2)))[:, :-1]
    means = mixed.routing(ids)  # the same for all tokens
    torch.testing.assert_close(means[:, 0, 0], torch.cat(weights, dim=1))
    fold = folded(mixed, torch.cat(weights, dim=1), range(4))
    start = single(replace(client, train=None), print).model
    torch.testing.assert_close(start(ids).logits, fold(ids))


PACKAGES = {  # `onnx` is what `web` is made of
    "peft": (),
    "mixtral": (),
    "gguf": ("gguf", "xllamacpp"),
    "web": ("onnx", "onnxscript", "onnxruntime"),
}


@pytest.mark.parametrize("format", PACKAGES)
def test_every_format_has_one_adapter_and_says_what_it_loses(
    format, run, own_text, tmp_path, monkeypatch
):
    for package in PACKAGES[format]:
        pytest.importorskip(package)
    monkeypatch.setattr(distillation, "STEPS", 10)
    out, words = tmp_path / "out", ["--format", format, "--data", own_text, "--precision", "f32"]
    words += ["--base-precision", "f32"] if format == "web" else []
    done = CliRunner().invoke(app, ["export", *map(str, (run, "--out", out, *words))])
    assert done.exit_code == 0, done.output
    entry = json.loads((out / "export.json").read_text())["clients"]["ann"]
    check, model = entry["check"], entry["model"]
    note = "one adapter in place of a mixture of predictions (30% local, 70% fedavg)"
    assert note in entry["mixture"]
    assert entry["mixture"] in done.output
    assert (model["method"], model["layout"]["generalists"]) == ("interpolation", 1)
    assert check["likeness"] == "that adapter"
    # the original is the mixture: what is lost is said against it
    (client,) = Source(run, data=own_text).load()
    if check["tokens"] == client.test.predictions:
        nll, tokens = client.model.score(client.test.scoring(8))
        assert check["original"] == pytest.approx(math.exp(nll / tokens), rel=1e-4)
    change = check["perplexity"] / check["original"] - 1
    assert f"of the personal model {check['original']:.2f} ({change:+.2%})" in done.output


def test_without_the_clients_text_parameters_are_mixed(run, tmp_path):
    (found,) = export(Source(run), "peft", tmp_path / "out")
    assert any("what that costs is unknown: " in note for note in found.notes)
    assert found.check.perplexity is None
    assert "one adapter in place of a mixture" in (tmp_path / "out/README.md").read_text()


def test_clients_of_one_part_and_of_two_share_a_graph(run, base_of, tmp_path):
    """A weight of exactly 1 leaves a client with one part, whose ranks are not those of a fold."""
    write_models(run, base_of("llama"), {"ben": PARTS["fedavg"][1]})
    source = Source(run, everyone=True)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    found = {each.client: each for each in export(source, "onnx", tmp_path / "onnx")}
    assert found.keys() == {"ann", "ben"}
    assert any("one adapter in place of a mixture" in note for note in found["ann"].notes)
    assert found["ben"].notes == ()
    assert all(each.check.difference < 1e-3 for each in found.values())
