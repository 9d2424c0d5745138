"""bf16 on a CPU that has no instructions for it: products of many rows are in fp32, of weights that
stay in bf16, and come to what bf16 comes to.
"""

import platform

import pytest
import torch
from tiny_bases import tiny_base
from torch import nn

from coterie.core import devices
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.quantised import Bf16Linear
from coterie.models.windows import head_nll

ROLES = (GENERALIST, SPECIALIST, ROUTER)


@pytest.fixture(params=[True, False], ids=["emulated", "native"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(devices, "has_bf16", lambda device: not request.param)
    return bool(request.param)


@pytest.mark.parametrize(("rows", "few"), [(15, True), (16, False)])
def test_many_rows_are_multiplied_in_fp32(rows: int, few: bool, emulated: bool) -> None:
    x = torch.ones(rows, 4, dtype=torch.bfloat16)
    assert (devices.product_dtype(x) == torch.float32) == (emulated and not few)
    assert devices.product_dtype(x.double()) == torch.float64
    assert devices.product_dtype(x.to("meta")) == torch.bfloat16


def test_a_layer_gives_what_fp32_gives_rounded_once(emulated: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(24, 20).to(torch.bfloat16).requires_grad_(False)
    weight, bias = layer.weight.float(), layer.bias.float()
    layer.__class__ = Bf16Linear
    x = torch.randn(40, 24, dtype=torch.bfloat16, requires_grad=True)
    y = layer(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    exact = nn.functional.linear(x.detach().float(), weight, bias)
    if emulated:
        assert torch.equal(y, exact.to(torch.bfloat16))
        assert torch.equal(x.grad, (grad.float() @ weight).to(torch.bfloat16))
    assert y.dtype == x.grad.dtype == layer.weight.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("kind", ["llama", "phi3", "opt"])
def test_a_step_is_as_near_to_fp32_and_weights_stay_bf16(
    kind: str, emulated: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = torch.randint(2, 61, (3, 10))
    model = LanguageModel(Backbone(tiny_base(kind)), Layout(specialists=2, rank=2))
    torch.manual_seed(2)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter, std=0.05)
    half = LanguageModel(Backbone(tiny_base(kind).to(torch.bfloat16)), model.layout)
    half.adapter.load_state_dict(model.adapter.state_dict())
    layers = [layer for mlp in half.backbone.mlps for layer in (*mlp.first, mlp.down)]
    assert all(isinstance(layer, Bf16Linear) == emulated for layer in layers)
    assert {p.dtype for p in half.backbone.model.parameters()} == {torch.bfloat16}
    results = []
    for one in (model, half):
        by_role = one.parameters_by_role
        parameters = [p for role in ROLES for p in by_role[role].values()]
        gradients, stats = one.gradient(batch, parameters)
        results.append((torch.cat([g.flatten() for g in gradients]), float(stats["loss"])))
    assert results[1][1] == pytest.approx(results[0][1], rel=0.02)
    assert torch.cosine_similarity(results[0][0], results[1][0], dim=0) > 0.98


def test_the_output_layer_is_as_exact(emulated: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(20, 8).bfloat16(), torch.randn(700, 8).bfloat16()
    targets, gradient = torch.randint(700, (20,)), torch.zeros(20, 8)
    exact = hidden.double().requires_grad_()
    nll = nn.functional.cross_entropy(exact @ weight.double().T, targets, reduction="none")
    nll.sum().backward()
    computed = head_nll(hidden, weight, None, targets, gradient)
    off = 1e-5 if emulated else 0.02  # logits are not rounded
    torch.testing.assert_close(computed.double(), nll.detach(), rtol=off, atol=off)
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=0.02, atol=0.02)


def test_what_a_processor_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX512 alone is no bf16, though oneDNN takes it."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    for able in (True, False):
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda able=able: able)
        assert devices.has_bf16("cpu") == (able and torch.backends.mkldnn.is_available())
