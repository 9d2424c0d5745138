"""Updates of some layers only, and the two scales of LoRA, compared with PEFT's own models."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tiny_bases import tiny_base
from torch import nn

from coterie.core.errors import ModelError
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.families import Family
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

CASES = [
    ("llama", ("q_proj", "v_proj"), {"q_proj", "v_proj"}),
    ("llama", ("k_proj", "mlp.up_proj", "down_proj"), {"k_proj", "up", "down"}),
    ("gpt2", ("attn.c_proj", "c_fc"), {"c_proj", "up"}),
    ("gpt2", ("c_proj",), {"c_proj", "down"}),
    ("phi3", ("qkv_proj", "down_proj"), {"qkv_proj", "down"}),
    ("opt", ("fc1", "out_proj"), {"out_proj", "up"}),
    ("llama", None, {"q_proj", "k_proj", "v_proj", "o_proj", "gate", "up", "down"}),
]


def trained(model: LanguageModel) -> set[str]:
    return {path.rpartition(".")[2] for path in model.loras()}


def random_values(model: LanguageModel) -> None:
    torch.manual_seed(5)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter, std=0.2)


def peft_of(kind: str, model: LanguageModel, family: Family) -> nn.Module:
    """PEFT's model of the same settings and values, of which our code makes none."""
    layout, paths = model.layout, family.paths
    named = layout.target_modules or [path.rpartition(".")[2] for path in paths.values()]
    config = LoraConfig(
        r=layout.rank, lora_alpha=layout.alpha, use_rslora=layout.use_rslora, lora_dropout=0.0,
        target_modules=[*named], fan_in_fan_out=kind == "gpt2",
    )  # fmt: skip
    theirs, filled = get_peft_model(copy.deepcopy(tiny_base(kind)), config), 0
    for path, lora in model.loras().items():
        block, name = path.split(".")[1], path.rpartition(".")[2]
        layer = theirs.get_submodule(f"base_model.model.{family.blocks}.{block}.{paths[name]}")
        layer.lora_A["default"].weight.data.copy_(lora.A[0])
        layer.lora_B["default"].weight.data.copy_(lora.B[0])
        filled += 1
    assert filled == sum(name.endswith("lora_A.default") for name, _ in theirs.named_modules())
    return theirs.eval()


@pytest.mark.parametrize("use_rslora", [True, False])
@pytest.mark.parametrize(("kind", "targets", "layers"), CASES)
def test_logits_and_gradients_are_those_of_peft(
    kind: str, targets: tuple[str, ...] | None, layers: set[str], use_rslora: bool
) -> None:
    backbone = Backbone(tiny_base(kind))
    layout = Layout(specialists=0, rank=3, alpha=7.0, use_rslora=use_rslora, target_modules=targets)
    model = LanguageModel(backbone, layout)
    random_values(model)
    assert trained(model) == layers
    ids = torch.randint(2, 61, (2, 9))
    theirs = peft_of(kind, model, backbone.family)
    with torch.no_grad():
        expected = theirs(ids[:, :-1]).logits
    torch.testing.assert_close(model(ids[:, :-1]), expected, rtol=1e-4, atol=1e-4)
    other = model.layout.__class__(**vars(layout) | {"use_rslora": not use_rslora})
    scaled = LanguageModel(backbone, other)
    random_values(scaled)
    assert not torch.allclose(scaled(ids[:, :-1]), expected, rtol=1e-2)
    gradients, _ = model.gradient(ids, list(model.adapter.parameters()))
    logits = theirs(ids[:, :-1]).logits.flatten(0, 1)
    nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    ours = sum(float(gradient.norm() ** 2) for gradient in gradients)
    norms = [p.grad.norm() ** 2 for p in theirs.parameters() if p.grad is not None]
    assert ours == pytest.approx(float(sum(norms)), rel=1e-3)


@pytest.mark.parametrize("targets", [("q_proj", "up_proj"), ("gate_proj", "down_proj")])
def test_experts_with_updates_of_some_layers_are_those_with_zeros_in_the_others(
    targets: tuple[str, ...],
) -> None:
    backbone, ids = Backbone(tiny_base("llama")), torch.randint(2, 61, (3, 9))
    some = LanguageModel(backbone, Layout(specialists=2, rank=2, target_modules=targets))
    every = LanguageModel(backbone, Layout(specialists=2, rank=2))
    random_values(some)
    values = dict(some.adapter.named_parameters())
    for name, parameter in every.adapter.named_parameters():
        parameter.data.copy_(values[name] if name in values else torch.zeros_like(parameter))
    assert len(values) < len(list(every.adapter.parameters()))
    torch.testing.assert_close(some(ids), every(ids), rtol=1e-5, atol=1e-5)
    wrt = list(some.adapter.parameters())
    same = [dict(every.adapter.named_parameters())[name] for name in values]
    for left, right in (
        (some.gradient(ids, wrt), every.gradient(ids, same)),
        (some.per_example(ids, wrt), every.per_example(ids, same)),
    ):
        for one, other in zip(left[0], right[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_targets_that_there_are_not_are_refused() -> None:
    architecture = Backbone(tiny_base("llama")).architecture
    with pytest.raises(ModelError, match=r"target_modules: c_attn: no layer") as caught:
        Adapter(architecture, Layout(target_modules=("q_proj", "c_attn")))
    assert caught.value.remedy.startswith("It has q_proj, k_proj")
    with pytest.raises(ModelError, match="no layer of the MLP") as caught:
        Adapter(architecture, Layout(target_modules=("q_proj",)))
    assert "gate_proj, up_proj, down_proj" in caught.value.remedy
