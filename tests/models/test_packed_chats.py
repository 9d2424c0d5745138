"""Packed conversations: their loss and gradients are those of each alone."""

from collections.abc import Iterator

import pytest
import torch
from tiny_bases import FAMILIES, SHAPE, VOCABULARY, tiny

from coterie.core.errors import ModelError
from coterie.data.chats import ChatBatch, ChatSplit
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

LAYOUTS = {
    "one": Layout(1, 0, rank=2, balance="none"),
    "mixed": Layout(1, 1, rank=2),
    "top 2 of 4": Layout(1, 3, rank=2, top_k=2, balance_weight=1.0),
    "equal": Layout(2, 0, rank=2, routing="equal", balance="none"),
}


def random_model(backbone: Backbone, layout: Layout) -> LanguageModel:
    model = LanguageModel(backbone, layout)
    torch.manual_seed(3)
    for parameter in model.adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


def split_of(lengths: list[int], context: int = 16, packing: bool = True) -> ChatSplit:
    """Random conversations, of which the second half of each counts."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(VOCABULARY, (sum(lengths),), generator=generator).numpy()
    counted = torch.cat([torch.arange(n) >= max(n // 2, 1) for n in lengths]).numpy()
    sizes = torch.tensor(lengths).numpy()
    return ChatSplit("train", tokens, counted, sizes, context, 0, packing)


def alone(split: ChatSplit) -> Iterator[ChatBatch]:
    yield from ChatSplit(
        split.name, split.tokens, split.counted, split.lengths, split.context, 0, False
    ).scoring(1)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_conversations_score_as_each_alone(family, layout, attention) -> None:
    base = tiny(family)
    base.set_attn_implementation(attention)
    model = random_model(Backbone(base), LAYOUTS[layout])
    split = split_of([5, 9, 3, 12, 8, 7, 4])
    assert split.take(torch.arange(split.windows).numpy()).packed
    together = model.score(split.scoring(4))
    each = torch.stack([model.score([batch]) for batch in alone(split)])
    torch.testing.assert_close(together, each.sum(dim=0), rtol=1e-5, atol=0)
    assert int(together[1]) == split.predictions == int(split.counted.sum())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_packed_gradients_are_those_of_conversations_alone(layout, micro_batch) -> None:
    """Mean over all counted tokens, and load balancing over all real ones."""
    model = random_model(Backbone(tiny("llama")), LAYOUTS[layout])
    split, wrt = split_of([5, 9, 3, 12]), list(model.adapter.parameters())
    batch = split.take(torch.arange(split.windows).numpy())
    apart = split_of([5, 9, 3, 12], packing=False)
    alone = apart.take(torch.arange(apart.windows).numpy())
    assert batch.packed
    assert not alone.packed
    assert len(alone) == 4
    found, told = model.gradient(batch, wrt, micro_batch)
    wanted, same = model.gradient(alone, wrt)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(told, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_by_example_are_those_of_each_row(family, layout) -> None:
    model = random_model(Backbone(tiny(family)), LAYOUTS[layout])
    split, wrt = split_of([5, 9, 3, 12, 6]), list(model.adapter.parameters())
    batch = split.take(torch.arange(split.windows).numpy())
    found, told = model.per_example(batch, wrt)
    rows = [model.gradient(row, wrt)[0] for row in batch.split(1)]
    wanted = [torch.stack(of_one) for of_one in zip(*rows, strict=True)]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=3e-5)
    torch.testing.assert_close(told["loss"], model.gradient(batch, wrt)[1]["loss"])


def test_a_conversation_does_not_see_the_one_before_it() -> None:
    """The masks are what keeps them apart: without positions, scores differ."""
    model = random_model(Backbone(tiny("llama")), LAYOUTS["mixed"])
    batch = split_of([5, 9]).take(torch.zeros(1, dtype=torch.int64).numpy())
    mixed = ChatBatch(batch.ids, batch.counted, torch.arange(batch.ids.shape[1])[None])
    assert not mixed.packed
    assert abs(float(model.score([batch])[0] - model.score([mixed])[0])) > 1e-2


def test_windows_that_slide_stay_apart(tmp_path) -> None:
    """Sliding attention is composed with the masks, not replaced by them."""
    from transformers import AutoModelForCausalLM, Gemma3TextConfig, MistralConfig

    shape = {"vocab_size": VOCABULARY, **SHAPE, "sliding_window": 4}
    for config in (MistralConfig(**shape), Gemma3TextConfig(**shape, head_dim=4)):
        torch.manual_seed(0)
        base = AutoModelForCausalLM.from_config(config)
        for parameter in base.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model = random_model(Backbone(base.eval()), LAYOUTS["mixed"])
        split = split_of([5, 9, 3, 12, 8])
        each = torch.stack([model.score([batch]) for batch in alone(split)])
        torch.testing.assert_close(
            model.score(split.scoring(4)), each.sum(dim=0), rtol=1e-5, atol=0
        )


def test_a_base_that_mixes_conversations_is_refused() -> None:
    base = tiny("llama")
    forward = base.model.forward

    def deaf(*ids, position_ids=None, **options):
        return forward(*ids, **options)

    base.model.forward = deaf
    model = random_model(Backbone(base), LAYOUTS["one"])
    split = split_of([5, 9])
    with pytest.raises(ModelError, match="does not keep conversations") as told:
        model.score(split.scoring(1))
    assert "packing: false" in told.value.remedy
    assert model.score(alone(split)).isfinite().all()
