"""The cheap mixture equals the naive one: every expert runs the full MLP with W + gamma B A."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import mixture as oracle
from torch import Tensor, nn

from coterie.models import mixture
from coterie.models.families import LinearShape
from coterie.models.layout import Layout
from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import Activation, FrozenMLP

D, F = 6, 10
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.1}
ACTIVATIONS = {
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "any": nn.Softplus(),
}


def build(
    kind: str, layout: Layout, activation: nn.Module, dtype: torch.dtype
) -> tuple[Mixture, FrozenMLP]:
    names = ("gate", "up") if kind == "gated" else ("up",)
    shape = (*(LinearShape(name, D, F) for name in names), LinearShape("down", F, D))
    module = Mixture(shape, layout)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    # fp32 parameters, except where the test itself is in fp64
    module.to(torch.promote_types(dtype, torch.float32))
    layers = {
        name: nn.Linear(F if name == "down" else D, D if name == "down" else F, dtype=dtype)
        for name in (*names, "down")
    }
    for layer in layers.values():
        layer.requires_grad_(False)
    return module, FrozenMLP(
        tuple(layers[name] for name in names), layers["down"], Activation.of(activation)
    )


def naive(module: Mixture, base: FrozenMLP, x: Tensor, activation: nn.Module) -> Tensor:
    """The oracle on the module's tensors, in fp64 so that bf16 is compared with the truth."""
    layout, wide = module.layout, torch.float64
    layers = dict(zip((*module.first, "down"), (*base.first, base.down), strict=True))
    experts = [
        {name: (stack[name].A[j].to(wide), stack[name].B[j].to(wide)) for name in layers}
        for stack in (
            getattr(module, role) for role in ("generalist", "specialist") if hasattr(module, role)
        )
        for j in range(len(stack["down"].A))
    ]
    x = x.to(wide)
    if module.router is not None:
        weights = oracle.topk_weights(x @ module.router.weight.to(wide).T, layout.active)
    else:
        weights = x.new_full((len(x), layout.experts), 1 / layout.experts)
    frozen = {name: (layer.weight.to(wide), layer.bias.to(wide)) for name, layer in layers.items()}
    return oracle.mixture(
        x, frozen, experts, weights, layout.alpha / layout.expert_rank**0.5, activation
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    g = draw(st.integers(0, 3))
    return Layout(
        generalists=g,
        specialists=draw(st.integers(0 if g else 1, 3)),
        rank=draw(st.integers(1, 3)),
        mlp_rank=draw(st.sampled_from([None, 2])),
        alpha=draw(st.sampled_from([1.0, 2.5])),
        top_k=draw(st.integers(1, 6)),
        routing=draw(st.sampled_from(["learned", "equal"])),
    )


@settings(max_examples=40, deadline=None)
@given(
    layout=layouts(),
    kind=st.sampled_from(["plain", "gated"]),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    dtype=st.sampled_from(list(TOLERANCE)),
    tokens=st.integers(1, 9),
    cached=st.sampled_from([16 * F, 2**16]),
    per_set=st.sampled_from([1, 1000]),
    seed=st.integers(0, 2**16),
)
def test_equals_the_naive_formula_with_all_gradients(
    layout, kind, activation, dtype, tokens, cached, per_set, seed
):
    torch.manual_seed(seed)
    module, base = build(kind, layout, ACTIVATIONS[activation], dtype)
    x = torch.randn(tokens * 4, D).to(dtype).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, "CACHED_VALUES", cached)  # 16 tokens a chunk, or all at once
        patch.setattr(
            mixture, "TOKENS_PER_SET", per_set
        )  # tokens sorted by their experts, or gathered expert by expert
        y = module(x, base)
    expected = naive(module, base, x, ACTIVATIONS[activation])
    assert y.dtype == dtype
    direction = torch.randn(y.shape, dtype=torch.float64)
    wrt = [x, *module.parameters()]
    found = torch.autograd.grad((y.double() * direction).sum(), wrt)
    wanted = torch.autograd.grad((expected * direction).sum(), wrt)
    for a, b in ((y, expected), *zip(found, wanted, strict=True)):
        scale = b.double().abs().max().clamp_min(1.0)
        assert (a.double() - b.double()).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize(("k", "kind"), list(itertools.product((1, 2, 3), ("plain", "gated"))))
def test_second_call_agrees_in_every_subset_of_gradients(k, kind):
    """What is asked for does not change what is found: experts without router, router without
    experts, x alone.
    """
    module, base = build(
        kind,
        Layout(generalists=1, specialists=2, rank=2, top_k=k, alpha=1.0),
        nn.SiLU(),
        torch.float64,
    )
    x = torch.randn(7, D, dtype=torch.float64)
    parameters = dict(module.named_parameters())

    def gradients(names: list[str], of_x: bool) -> dict[str, Tensor]:
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in names)
        leaf = x.clone().requires_grad_(of_x)
        wrt = [parameters[name] for name in names] + ([leaf] if of_x else [])
        found = torch.autograd.grad(module(leaf, base).square().sum(), wrt)
        return dict(zip([*names, *(["x"] if of_x else [])], found, strict=True))

    everything = gradients(list(parameters), True)
    for names, of_x in (
        (["router.weight"], False),
        (["router.weight"], True),
        ([name for name in parameters if "router" not in name], False),
        (["specialist.down.A"], False),
        (["generalist.up.B"], True),
        ([], True),
    ):
        for name, found in gradients(names, of_x).items():
            torch.testing.assert_close(found, everything[name])


def test_dropout_path_equals_the_cheap_one_where_nothing_is_dropped():
    module, base = build(
        "gated",
        Layout(generalists=1, specialists=2, rank=2, dropout=1e-9),
        nn.SiLU(),
        torch.float64,
    )
    x = torch.randn(7, D, dtype=torch.float64)
    torch.testing.assert_close(module.train()(x, base), module.eval()(x, base))


def test_dropout_drops_while_training_only():
    module, base = build("plain", Layout(rank=2, dropout=0.5), nn.SiLU(), torch.float32)
    x = torch.randn(7, D)
    assert not torch.equal(module.train()(x, base), module(x, base))
    assert torch.equal(module.eval()(x, base), module(x, base))


def test_memory_kept_for_backward_grows_only_by_codes_and_loras():
    """What one more expert keeps of each token: codes, c, weight, logits. No hidden-width
    tensor.
    """

    def kept(specialists: int) -> int:
        module, base = build(
            "gated", Layout(specialists=specialists, rank=2, top_k=9), nn.SiLU(), torch.float32
        )
        x = torch.randn(tokens, D, requires_grad=True)
        seen: dict[int, int] = {}

        def note(tensor: Tensor) -> Tensor:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            module(x, base)
        return sum(seen.values())

    tokens, rank = 500, 2
    a, b, c = kept(1), kept(2), kept(3)
    per_expert = tokens * (3 * rank + 3) + 4 * rank * (D + F) * 3
    assert b - a <= 4 * per_expert
    assert c - b <= 4 * per_expert


def test_no_tokens():
    module, base = build("gated", Layout(rank=2), nn.SiLU(), torch.float32)
    assert module(torch.zeros(0, D), base).shape == (0, D)
