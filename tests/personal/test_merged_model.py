"""A personal model whose attention has taken up its updates."""

import pytest
import torch
from torch import nn

import coterie
from coterie.core.errors import ModelError, Refused
from coterie.models.layout import Layout

LAYOUTS = {
    "1G1S": Layout(rank=2),
    "1G3S, top 2": Layout(specialists=3, rank=2, mlp_rank=3),
    "one expert": Layout(specialists=0, rank=2),
}


@pytest.mark.parametrize(("rows", "tokens"), [(1, 1), (3, 1), (1, 8), (2, 30)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_it_says_what_the_trained_model_says(family, layout, rows, tokens, make_run):
    model = coterie.load(make_run(family, ann=layout), "ann", merged=True)
    ids = torch.randint(257, (rows, tokens))
    torch.testing.assert_close(
        model(ids).logits, model.language.forward(ids).detach(), rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_base_that_others_share_stays_as_it_is(family, make_run):
    run = make_run(family, ann=LAYOUTS["1G1S"], ben=LAYOUTS["1G1S"])
    ann = coterie.load(run, "ann", merged=True)
    ben = coterie.load(run, "ben", backbone=ann.backbone)
    ids = torch.randint(257, (2, 9))
    before = ben.language.forward(ids).detach()
    state = {name: value.clone() for name, value in ann.backbone.model.state_dict().items()}
    ann(ids), ann(ids[:, :1])
    assert all(
        torch.equal(value, state[name]) for name, value in ann.backbone.model.state_dict().items()
    )
    assert torch.equal(ben.language.forward(ids).detach(), before)
    torch.testing.assert_close(ben(ids).logits, before, rtol=1e-4, atol=1e-4)


def test_generation_token_by_token_is_that_of_whole_passes(make_run):
    model = coterie.load(make_run("llama", ann=LAYOUTS["1G3S, top 2"]), "ann", merged=True)
    settings = {"max_new_tokens": 20, "do_sample": False}
    ids = torch.randint(257, (1, 7))
    assert torch.equal(
        model.generate(ids, **settings), model.generate(ids, **settings, use_cache=False)
    )


def test_what_cannot_be_merged_is_refused(make_run, monkeypatch):
    class Packed(nn.Linear):
        """A layer whose weight is not what it multiplies by."""

        def forward(self, x):
            return 2 * super().forward(x)

    model = coterie.load(make_run("llama", ann=LAYOUTS["1G1S"]), "ann", merged=True)
    model.backbone.model.model.layers[0].self_attn.o_proj.base.__class__ = Packed
    with pytest.raises(
        ModelError, match=r"a Packed cannot take up an update\n  Leave out merged=True"
    ):
        model(torch.zeros(1, 1, dtype=torch.int64))
    monkeypatch.setattr(
        "coterie.personal.loading.read_about_json", lambda folder: {"kind": "classifier"}
    )
    with pytest.raises(Refused, match="has no updates to merge"):
        coterie.load(make_run("llama", ben=LAYOUTS["1G1S"]), "ben", merged=True)
