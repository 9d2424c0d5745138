"""`model.dtype: auto` on a CPU: measured once per machine and base, kept, and kept on resume."""

from pathlib import Path

import pytest
import torch

from coterie.core import devices
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.models.architecture import EMBEDDED
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.runs.budget import planned
from coterie.runs.problems import auto
from coterie.runs.problems.auto import measure, with_dtype
from coterie.runs.recipes import read
from coterie.runs.recipes.recipe import Recipe, load, validate
from coterie.runs.run import run

SETTINGS = ["method=fedavg", "method.rounds=1", "method.local_steps=1", "training.batch_size=2"]
SETTINGS += ["model.context=16", "compare_with=[]", "keep=last", "patience=null"]
SETTINGS += ["evaluate_rows=null", "training.experts.lr=0.001"]


@pytest.fixture
def recipe(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """Two clients' texts on a base that is not too small."""
    monkeypatch.setattr(auto, "SMALL", 0)
    monkeypatch.setattr("coterie.core.devices.has_bf16", lambda device: True)
    monkeypatch.setenv("COTERIE_CACHE", str(tmp_path / "cache"))
    for client in ("ann", "ben"):
        (tmp_path / "texts" / client).mkdir(parents=True)
        for k in range(20):
            text = " ".join(f"{client} saw {(k + n) ** 3} cats" for n in range(9))
            (tmp_path / "texts" / client / f"{k}.txt").write_text(text)
    paths = [f"data.path={tmp_path / 'texts'}", f"model.base={tiny_base}", "model.device=cpu"]
    return load("folders", [*SETTINGS, *paths])


def refuse(*layer: int) -> float:
    raise AssertionError("measured again")


@pytest.mark.parametrize(("share", "dtype"), [(0.4, "bf16"), (0.9, "fp32")])
def test_it_is_measured_once_and_kept(
    share: float, dtype: str, recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "measure", lambda *layer: share)
    chosen, lines = planned(recipe)
    assert chosen.model.dtype == dtype
    assert lines[0].startswith(f"model.dtype {dtype}: here products in bf16 take {share:.2f} of")
    monkeypatch.setattr(auto, "measure", refuse)
    assert planned(recipe) == (chosen, lines)
    assert any(map(str.strip, devices.processor()))
    monkeypatch.setattr(devices, "processor", lambda: ["another one"])
    with pytest.raises(AssertionError, match="measured again"):
        planned(recipe)


def test_a_damaged_measurement_is_repeated(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "measure", lambda *layer: 0.9)
    with_dtype(recipe)
    (kept,) = (tmp_path / "cache").glob("dtype-*.json")
    kept.write_text("{")
    monkeypatch.setattr(auto, "measure", lambda *layer: 0.4)
    assert with_dtype(recipe)[0].model.dtype == "bf16"


def test_a_resumed_run_goes_on_in_its_dtype(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for share, dtype in ((0.4, "bf16"), (0.9, "fp32")):
        monkeypatch.setattr(auto, "_kept", lambda *layer, share=share: share)
        run(recipe, folder := tmp_path / dtype)
        assert read(folder / "recipe.yaml")["model"]["dtype"] == dtype
        # another machine
        monkeypatch.setattr(auto, "_kept", lambda *layer, share=share: 1.3 - share)
        assert planned(recipe)[0].model.dtype != dtype
        assert planned(recipe, folder)[0].model.dtype == dtype
        run(recipe, folder, resume=True)


def test_small_bases_and_named_dtypes_are_not_measured(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "measure", refuse)
    for changes in ({"base": EMBEDDED}, {"dtype": "fp32"}, {"dtype": "bf16"}, {"quantise": "int8"}):
        model = recipe.model.model_dump() | changes
        other = validate(recipe.model_dump(mode="json") | {"model": model}, "test")
        assert with_dtype(other) == (other, "")
    with pytest.raises(AssertionError, match="measured again"):
        with_dtype(recipe)
    monkeypatch.setattr(auto, "SMALL", 50_000_000)
    assert with_dtype(recipe) == (recipe, "")


def test_products_are_measured_in_both_dtypes() -> None:
    assert 0 < measure(64 * 96, 64) < 1000


def test_a_step_in_bf16_has_nearly_the_gradient_of_fp32(tiny_base: Path) -> None:
    batch, gradients = torch.randint(257, (4, 33)), []
    for dtype in ("fp32", "bf16"):
        model = LanguageModel(Backbone.load(tiny_base, dtype=dtype), Layout(rank=2))
        torch.manual_seed(0)
        for parameter in model.adapter.parameters():
            torch.nn.init.normal_(parameter, std=0.05)
        roles = model.parameters_by_role
        trained = [*roles[GENERALIST].values(), *roles[SPECIALIST].values()]
        found, statistics = model.gradient(batch, trained)
        gradients.append(torch.cat([gradient.flatten() for gradient in found]))
        assert {gradient.dtype for gradient in found} == {torch.float32}
        assert statistics["loss"].isfinite()
    exact, rounded = gradients
    assert 0 < (rounded - exact).norm() < 0.05 * exact.norm()


def test_attention_of_a_base_in_bf16_is_computed_in_fp32(tiny_base: Path) -> None:
    """Naive: rounded to bf16 only before and after, also where texts of one row lie apart."""
    from transformers import AttentionInterface

    backbone = Backbone.load(tiny_base, dtype="bf16")
    attention = AttentionInterface()[backbone.config._attn_implementation]
    q, k, v = torch.randn(3, 2, 4, 9, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    apart = causal & (torch.arange(9)[:, None] // 4 == torch.arange(9) // 4)
    module = backbone.attentions[0]
    for allowed, mask in ((causal, None), (apart, apart[None, None])):
        scores = (q.float() @ k.float().mT / 8**0.5).masked_fill(~allowed, -torch.inf)
        expected = (scores.softmax(dim=-1) @ v.float()).transpose(1, 2)
        found, _ = attention(module, q, k, v, mask, dropout=0.0, scaling=8**-0.5)
        assert found.dtype == torch.bfloat16
        # half of the last bit that bf16 keeps, and no more
        torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-6)
    assert backbone.packs
    assert Backbone.load(tiny_base).config._attn_implementation == "sdpa"
