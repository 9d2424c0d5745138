"""Every family of bases: without updates the base itself, with updates the base whose weights have
taken them up, with a cache the same, and a gradient that is autograd's.
"""

import re
from pathlib import Path
from typing import cast

import pytest
import torch
from tiny_bases import KINDS, tiny_base
from torch import Tensor, nn

from coterie.core.errors import ModelError
from coterie.models.architecture import Architecture
from coterie.models.backbone import Backbone
from coterie.models.families import FAMILIES, Family
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.text import TextShape
from coterie.personal.inference.stacks import Stacks

DOCS = Path(__file__).parents[2] / "docs"


def filled(backbone: Backbone, layout: Layout) -> LanguageModel:
    model = LanguageModel(backbone, layout)
    torch.manual_seed(2)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def take_up(model: nn.Module, family: Family, adapter: nn.Module) -> None:
    """Add a single expert's updates to a base's weights."""
    for block, own in zip(model.get_submodule(family.blocks), adapter.blocks, strict=True):
        updates = {f"{family.attention}.{name}": [own.attention[name]] for name in family.linears}
        for ours, theirs in family.mlp.items():
            updates.setdefault(family.within(theirs), []).append(own.mlp.generalist[ours])
        for path, loras in updates.items():
            update = torch.cat([each.gamma * each.B[0] @ each.A[0] for each in loras])
            layer = block.get_submodule(path)
            layer.weight.data += update.T if hasattr(layer, "nf") else update


@pytest.mark.parametrize("kind", KINDS)
def test_it_computes_what_it_should(kind: str) -> None:
    ids = torch.randint(2, 61, (2, 12))
    wanted = tiny_base(kind)(ids, use_cache=False).logits
    backbone = Backbone(tiny_base(kind))
    assert backbone.family.name == KINDS[kind][0]

    def same(found: Tensor, to: Tensor) -> None:
        torch.testing.assert_close(found, to, rtol=0, atol=1e-5)

    with torch.no_grad():
        same(backbone.model(ids, use_cache=False).logits, wanted)
        same(LanguageModel(backbone, Layout(rank=2))(ids), wanted)
        one, whole = filled(backbone, Layout(specialists=0, rank=2)), tiny_base(kind)
        take_up(whole, backbone.family, one.adapter)
        taken_up = whole(ids, use_cache=False).logits
        assert (taken_up - wanted).abs().max() > 1e-3
        same(one(ids), taken_up)
        routed = filled(backbone, Layout(specialists=2, rank=2))
        full = routed(ids)
        with backbone.using(Stacks.of([routed.adapter], backbone)):
            parts = [backbone.model(ids[:, :8], use_cache=True)]
            for i in range(8, 12):
                cache = parts[-1].past_key_values
                parts.append(
                    backbone.model(ids[:, i : i + 1], past_key_values=cache, use_cache=True)
                )
        same(torch.cat([part.logits for part in parts], dim=1), full)


@pytest.mark.parametrize("kind", KINDS)
def test_its_gradient_is_autograds(kind: str) -> None:
    """All experts used, so that the objective is smooth; and rows by themselves."""
    model = filled(Backbone(tiny_base(kind)), Layout(rank=2, balance="none"))
    batch, wrt = torch.randint(2, 61, (3, 9)), list(model.adapter.parameters())
    logits = model(batch[:, :-1]).flatten(0, 1)
    loss = nn.functional.cross_entropy(logits, batch[:, 1:].flatten())
    wanted = torch.autograd.grad(loss, wrt)
    found, stats = model.gradient(batch, wrt, 2)
    torch.testing.assert_close(stats["loss"], loss.detach())
    rows, _ = model.per_example(batch, wrt)
    for gradient, each, right in zip(found, rows, wanted, strict=True):
        torch.testing.assert_close(gradient, right, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(each.mean(dim=0), right, rtol=1e-3, atol=1e-6)


def test_gate_and_up_of_one_layer_are_two_in_the_same_memory() -> None:
    model = tiny_base("phi3")
    before = sum(p.numel() for p in model.parameters())
    backbone = Backbone(model)
    assert sum(p.numel() for p in backbone.model.parameters()) == before
    gate, up = backbone.mlps[0].first
    storage = cast(Tensor, gate.weight).untyped_storage().data_ptr()
    assert cast(Tensor, up.weight).untyped_storage().data_ptr() == storage
    mlp = Architecture.of(tiny_base("phi3")).blocks[0].mlp
    assert [(x.name, x.inputs, x.outputs) for x in mlp] == [
        ("gate", 16, 24),
        ("up", 16, 24),
        ("down", 24, 16),
    ]


def test_an_mlp_that_computes_something_else_is_refused() -> None:
    """It has the layers of a Llama, and doubles what they give."""
    model = tiny_base("llama")
    mlp = model.get_submodule("model.layers.1.mlp")
    once = mlp.forward
    mlp.forward = lambda x: 2 * once(x)  # type: ignore[method-assign]
    with pytest.raises(
        ModelError, match=r"block 1 of a LlamaForCausalLM is not down\(act"
    ) as caught:
        Backbone(model)
    assert "Llama, Mistral" in caught.value.remedy


def test_a_refusal_names_all_families_that_work(tmp_path: Path) -> None:
    from transformers import BloomConfig, MambaConfig, T5Config

    T5Config(num_layers=1, d_model=16, d_ff=24, num_heads=2).save_pretrained(tmp_path / "t5")
    BloomConfig(hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    MambaConfig(hidden_size=16, num_hidden_layers=1).save_pretrained(tmp_path / "mamba")
    for name, problem in {
        "t5": "is a t5 model, and transformers has no causal language model of that kind",
        "bloom": "block 0 (transformer.h.0) lacks the layer attn.c_attn",
        "mamba": "MambaForCausalLM has neither transformer.h nor model.layers",
    }.items():
        with pytest.raises(ModelError, match=re.escape(problem)) as caught:
            Architecture.from_base(tmp_path / name)
        assert all(family.models in caught.value.remedy for family in FAMILIES)
    with pytest.raises(ModelError, match="of an encoder and a decoder") as caught:
        TextShape(str(tmp_path / "t5"), 3, 8).build("meta")
    assert "BERT" in caught.value.remedy


def test_every_family_is_tested_and_documented() -> None:
    assert {family for family, *_ in KINDS.values()} == {family.name for family in FAMILIES}
    page = (DOCS / "bases.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        row = next(
            line
            for line in page.splitlines()
            if line.startswith(f"| {family.models or family.name} |")
        )
        for name in (*family.linears, *family.mlp.values()):
            assert f"`{name}`" in row
