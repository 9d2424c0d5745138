"""Bases in 8 and 4 bits: small, computed and differentiated with the values that the codes stand
for, remembered by personal models, and exported as these values.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_bases import KINDS, tiny_base
from torch import nn

from coterie import personal
from coterie.core.errors import ModelError
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.quantised import NF4, QuantisedLinear, bytes_per_weight

BITS = ("int8", "nf4")
# the most that a value is off, in parts of the range of its scale
OFF = {"int8": 0.5 / 127, "nf4": 0.153}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("inputs", [64, 50])
def test_values_are_off_by_no_more_than_half_a_step(bits: str, inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(24, inputs)
    weight[3] = 0.0
    found = QuantisedLinear(weight, None, bits).weight_as(torch.float32)
    assert found.shape == weight.shape
    width = inputs if bits == "int8" else 64
    for start in range(0, inputs, width):
        part, own = weight[:, start : start + width], found[:, start : start + width]
        span = part.abs().amax(dim=1, keepdim=True)
        assert ((own - part).abs() <= OFF[bits] * span + 1e-3 * span + 1e-6).all()


def test_nf4_gives_its_levels_back() -> None:
    """The 16 quantiles of the paper, scaled, are what they are."""
    weight = torch.tensor(NF4).repeat(4)[None] * 0.75
    found = QuantisedLinear(weight, None, "nf4").weight_as(torch.float32)
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "phi3", "opt", "falcon"])
def test_a_step_is_that_on_the_values_of_the_codes(bits: str, kind: str) -> None:
    """Loss, gradient, and what it says with a cache; and every layer of a block is in codes."""
    coded = Backbone(tiny_base(kind), quantised=bits)
    plain = Backbone(tiny_base(kind), quantised=bits, plain=True)
    layers = {type(layer) for mlp in coded.mlps for layer in (*mlp.first, mlp.down)}
    layers |= {
        type(getattr(attention, name).base)
        for attention in coded.attentions
        for name in coded.family.linears
    }
    assert layers == {QuantisedLinear}
    assert not any(isinstance(layer, QuantisedLinear) for layer in plain.model.modules())
    batch, found = torch.randint(2, 61, (3, 10)), []
    for backbone in (coded, plain):
        model = LanguageModel(backbone, Layout(specialists=2, rank=2))
        torch.manual_seed(2)
        for parameter in model.adapter.parameters():
            nn.init.normal_(parameter, std=0.1)
        gradients, stats = model.gradient(batch, list(model.adapter.parameters()))
        about = personal.About("ann", "", model.layout, 8, "", "", 0, 0)
        said = personal.PersonalModel(model, about).generate(
            batch[:, :4], max_new_tokens=4, do_sample=False
        )
        found.append((gradients, stats["loss"], said))
    assert torch.equal(found[0][2], found[1][2])
    torch.testing.assert_close(found[0][1], found[1][1])
    for one, other in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_what_it_takes(bits: str) -> None:
    """The bytes of a block's weights, and nothing of the original."""
    full = Backbone.load("embedded")
    small = Backbone.load("embedded", quantised=bits)
    weights = sum(
        linear.inputs * linear.outputs
        for block in full.architecture.blocks
        for linear in (*block.attention, *block.mlp)
    )
    saved = (full.nbytes - small.nbytes) / weights
    assert saved == pytest.approx(4 - bytes_per_weight(bits), abs=0.06)
    assert small.dtype == torch.float32


def test_kinds_that_there_are_not_are_refused() -> None:
    with pytest.raises(ModelError, match="cannot be quantised to 'int2'") as caught:
        Backbone(tiny_base("llama"), quantised="int2")
    assert caught.value.remedy == "Allowed: int8, nf4."


def test_every_family_can_be_quantised() -> None:
    for kind in KINDS:
        backbone = Backbone(tiny_base(kind), quantised="int8")
        assert torch.isfinite(
            LanguageModel(backbone, Layout(rank=2)).score([torch.ones(1, 5).long()])
        ).all()


def test_a_personal_model_remembers_its_base(tmp_path: Path) -> None:
    about = personal.About("ann", "embedded", Layout(rank=2), 8, "", "", 0, 0)
    for bits in (None, "nf4"):
        model = LanguageModel(Backbone.load("embedded", quantised=bits), Layout(rank=2))
        own = replace(about, quantise=bits)
        personal.save(tmp_path / str(bits), own, dict(model.adapter.named_parameters()))
        assert personal.load(tmp_path / str(bits)).backbone.quantised == bits
