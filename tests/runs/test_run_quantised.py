"""A run on a base in 4 bits: its models are scored, written and read again on such a base."""

import json
from pathlib import Path

import pytest

import coterie
from coterie.core.errors import RecipeError
from coterie.testing.run import write_tiny_base

CHANGES = {
    "data": {"clients": 2, "train_tokens": 600, "valid_tokens": 200, "test_tokens": 200},
    "method": {"rounds": 1, "local_steps": 1},
    "compare_with": [],
}


def test_a_run_on_a_base_in_4_bits(tmp_path: Path) -> None:
    base, scores = str(write_tiny_base(tmp_path / "base")), {}
    for bits in (None, "nf4"):
        out = tmp_path / str(bits)
        model = {"base": base, "context": 16, "quantise": bits}
        coterie.run("synthetic", out=str(out), model=model, **CHANGES)
        scores[bits] = json.loads((out / "result.json").read_text())["mean"]
    assert scores["nf4"] != scores[None]
    assert scores["nf4"] == pytest.approx(scores[None], rel=0.05)
    model = coterie.load(tmp_path / "nf4", "client-0")
    assert (model.about.quantise, model.backbone.quantised) == ("nf4", "nf4")
    assert coterie.load(tmp_path / "None", "client-0").backbone.quantised is None
    assert model.next_words("the water", 1)


def test_only_language_models_have_a_base_to_quantise() -> None:
    with pytest.raises(RecipeError, match=r"model\.quantise"):
        coterie.run("cobo-digits", model={"quantise": "int8"})
    with pytest.raises(RecipeError, match="int8"):
        coterie.run("synthetic", model={"quantise": "int3"})
