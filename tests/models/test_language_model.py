"""A whole language model: equal to Hugging Face's, and gradients of the whole batch's objective,
of the named parameters only.
"""

import pytest
import torch
from oracle import mixture as oracle
from tiny_bases import FAMILIES, VOCABULARY, tiny
from torch import Tensor, nn

from coterie.core.errors import ModelError
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.routing import Routing


def filled(family: str, layout: Layout, std: float = 0.1) -> LanguageModel:
    """A tiny model whose adapter is not zero anywhere."""
    model = LanguageModel(Backbone(tiny(family)), layout)
    torch.manual_seed(2)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter, std=std)
    return model


def ids(rows: int = 5, tokens: int = 9) -> Tensor:
    return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(3))


def parameters(model: LanguageModel, *roles) -> list[nn.Parameter]:
    return [
        p
        for role in roles or (GENERALIST, SPECIALIST, ROUTER)
        for p in model.parameters_by_role[role].values()
    ]


def objective(model: LanguageModel, batch: Tensor) -> Tensor:
    """The whole batch's objective by plain autograd: mean cross-entropy + lambda * load
    balancing averaged over blocks.
    """
    record: list[Routing] = []
    with model.backbone.using(model.adapter, record):
        logits = model.backbone.model(batch[:, :-1]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    coefficients = model.layout.balance_coefficients
    balances = [
        oracle.balance(decision.probabilities.log(), model.layout.active, coefficients)
        for decision in record
        if coefficients
    ]
    return loss + model.layout.balance_weight * sum(balances, torch.zeros(())) / max(len(record), 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_with_zero_updates_the_logits_are_the_base_models(family):
    reference, batch = tiny(family)(ids()).logits, ids()
    model = LanguageModel(Backbone(tiny(family)), Layout(specialists=2))
    torch.testing.assert_close(model(batch), reference, rtol=1e-5, atol=1e-5)
    with model.backbone.using(None):
        torch.testing.assert_close(
            model.backbone.model(batch).logits, reference, rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_single_expert_is_the_model_with_merged_weights(family):
    model = filled(family, Layout(specialists=0, rank=3, alpha=2.0))
    merged = tiny(family)
    by_path = dict(merged.named_modules())
    at = {"gpt2": ("transformer.h", "attn"), "llama": ("model.layers", "self_attn")}[
        "gpt2" if family == "gpt2" else "llama"
    ]
    theirs = (
        {"up": "c_fc", "down": "c_proj"}
        if family == "gpt2"
        else {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    )
    with torch.no_grad():
        for i, block in enumerate(model.adapter.blocks):
            loras = {f"{at[1]}.{name}": lora for name, lora in block.attention.items()}
            loras |= {f"mlp.{theirs[name]}": lora for name, lora in block.mlp.generalist.items()}
            for path, lora in loras.items():
                update = 2.0 / 3**0.5 * lora.B[0] @ lora.A[0]
                by_path[f"{at[0]}.{i}.{path}"].weight += update.T if family == "gpt2" else update
    torch.testing.assert_close(model(ids()), merged(ids()).logits, rtol=1e-4, atol=1e-4)


LAYOUTS = {
    "1G1S": Layout(rank=2, balance_weight=0.5),
    "1G3S": Layout(specialists=3, rank=2, balance_weight=0.5),
    "1G3S, eq. 6": Layout(specialists=3, rank=2, balance_weight=0.5, balance="generalist"),
    "1G2S, all, eq. 6": Layout(
        specialists=2, rank=2, top_k=3, balance_weight=0.5, balance="generalist"
    ),
    "2S, k = 1": Layout(generalists=0, specialists=2, rank=2, top_k=1),
    "2G, no balance": Layout(generalists=2, specialists=0, rank=2, balance="none"),
    "equal": Layout(rank=2, routing="equal"),
    "single": Layout(specialists=0, rank=2, mlp_rank=4),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_gradient_is_that_of_the_whole_objective_whatever_the_micro_batch(family, layout):
    model, batch = filled(family, layout), ids()
    wrt = parameters(model)
    wanted = torch.autograd.grad(objective(model, batch), wrt)
    for micro_batch in (None, 1, 2, 4, 99):
        found, stats = model.gradient(batch, wrt, micro_batch)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)
        value = stats["loss"] + layout.balance_weight * stats["balance"]
        torch.testing.assert_close(value, objective(model, batch).detach(), rtol=1e-4, atol=1e-5)
        assert all(not tensor.requires_grad for tensor in (*stats.values(), *found))
        assert ("router" in stats) == layout.routed
        if layout.routed:
            assert stats["router"].shape == (2, layout.experts)
            torch.testing.assert_close(stats["router"].sum(dim=1), torch.ones(2))


@pytest.mark.parametrize("roles", [(ROUTER,), (GENERALIST, SPECIALIST), (SPECIALIST,)])
def test_a_step_of_one_level_leaves_no_trace_in_the_other(roles):
    model, batch = filled("llama", Layout(specialists=2, rank=2)), ids()
    wrt = parameters(model, *roles)
    kept = torch.full_like(wrt[0], 7.0)
    wrt[0].grad = kept
    found, _ = model.gradient(batch, wrt, 2)
    everything, _ = model.gradient(batch, parameters(model))
    by_id = {id(p): g for p, g in zip(parameters(model), everything, strict=True)}
    for parameter, gradient in zip(wrt, found, strict=True):
        torch.testing.assert_close(gradient, by_id[id(parameter)], rtol=1e-3, atol=1e-6)
    assert wrt[0].grad is kept
    assert torch.equal(kept, torch.full_like(kept, 7.0))
    assert all(
        p.grad is None
        for p in (*model.adapter.parameters(), *model.backbone.model.parameters())
        if p is not wrt[0]
    )
    assert all(p.requires_grad for p in model.adapter.parameters())


def test_uniform_balance_has_no_gradient_when_all_experts_are_used():
    assert not Layout().balance_has_gradient
    assert Layout(specialists=3).balance_has_gradient
    assert not Layout(
        balance="generalist"
    ).balance_has_gradient  # n = 2: equal to uniform up to scale
    assert Layout(specialists=2, top_k=3, balance="generalist").balance_has_gradient
    assert not Layout(specialists=3, balance_weight=0.0).balance_has_gradient


def test_score_is_the_total_negative_log_likelihood():
    model = filled("gpt2", Layout(rank=2))
    batches = [ids(3, 9), ids(1, 4)]
    wanted = sum(
        nn.functional.cross_entropy(
            model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten(), reduction="sum"
        ).item()
        for batch in batches
    )
    nll, tokens = model.score(iter(batches))
    assert tokens == 3 * 8 + 3
    assert nll == pytest.approx(wanted, rel=1e-5)
    assert model.score([]).tolist() == [0.0, 0]


def test_dropout_acts_on_gradients_only_and_is_seeded():
    model, batch = filled("llama", Layout(specialists=2, rank=2, dropout=0.5)), ids()
    assert torch.equal(model(batch), model(batch))
    wrt = parameters(model)

    def seeded(seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        return model.gradient(batch, wrt, 2)[0]

    assert all(torch.equal(a, b) for a, b in zip(seeded(1), seeded(1), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(seeded(1), seeded(2), strict=True))


@pytest.mark.parametrize("family", FAMILIES)
def test_generation_with_and_without_cache_agrees(family):
    model = filled(family, Layout(specialists=2, rank=2))
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    prompt = ids(2, 5)
    mask = torch.ones_like(prompt)
    cached = model.generate(prompt, use_cache=True, attention_mask=mask, **settings)
    assert cached.shape == (2, 11)
    assert torch.equal(
        cached, model.generate(prompt, use_cache=False, attention_mask=mask, **settings)
    )


def test_routing_of_each_token():
    model, batch = filled("llama", Layout(specialists=3, rank=2)), ids()
    weights = model.routing(batch)
    assert weights.shape == (2, *batch.shape, 4)
    assert torch.equal((weights > 0).sum(dim=-1), torch.full((2, *batch.shape), 2))
    torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, *batch.shape))
    with pytest.raises(ModelError, match="no router"):
        filled("llama", Layout(routing="equal")).routing(batch)


def test_bf16_computes_near_fp32_and_keeps_fp32_parameters():
    model, batch = filled("llama", Layout(specialists=2, rank=2), std=0.05), ids()
    half = LanguageModel(Backbone(tiny("llama").to(torch.bfloat16)), model.layout)
    half.adapter.load_state_dict(model.adapter.state_dict())
    found, stats = half.gradient(batch, parameters(half))
    wanted, expected = model.gradient(batch, parameters(model))
    assert {gradient.dtype for gradient in found} == {torch.float32}
    assert stats["loss"].item() == pytest.approx(expected["loss"].item(), rel=0.02)
    a, b = (torch.cat([g.flatten() for g in gradients]) for gradients in (found, wanted))
    assert torch.cosine_similarity(a, b, dim=0) > 0.98


def test_bad_input_is_refused():
    model = filled("gpt2", Layout(rank=2))
    wrt = parameters(model)
    for batch, message in (
        (ids().float(), "int64"),
        (ids()[0], "int64"),
        (ids(2, 1), "int64"),
        (ids(1, 34), "context of 32"),
    ):
        with pytest.raises(ModelError, match=message):
            model.gradient(batch, wrt)
    with pytest.raises(ModelError, match="another model"):
        model.gradient(ids(), [nn.Parameter(torch.zeros(2))])
    with (
        pytest.raises(ModelError, match="another base"),
        model.backbone.using(filled("llama", Layout()).adapter),
    ):
        pass
    assert all(p.requires_grad for p in wrt)
