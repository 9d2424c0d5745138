"""Blocks that are computed again, and the memory of a step: foreseen, and measured in a process of
its own.
"""

import json
from pathlib import Path

import pytest
import torch
from script_modules import module_at
from tiny_bases import KINDS, tiny_base
from torch import nn

from coterie.core import devices
from coterie.core.errors import ModelError
from coterie.models import memory
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.memory import Step
from coterie.runs.problems import loading
from coterie.runs.recipes.recipe import load

memory_table = module_at("scripts/memory_table.py")
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
SMOLLM2_135M = memory_table.BASES["SmolLM2-135M"]
LLAMA_1B = SMALL | {  # with a head of its own
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32_000,
    "tie_word_embeddings": False,
}


def config(folder: Path, settings: dict) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    return str(folder)


def ratio(base: str, rows: int, context: int, bits: str, again: bool, dtype: str) -> float:
    """Foreseen by measured bytes of a step."""
    step = Step(base, context, Layout(), dtype, bits or None)
    measured = memory_table.peak(base, rows, context, bits, again, dtype)
    return step.footprint(again).of(rows) / measured


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(
    ("bits", "again"), [("", False), pytest.param("nf4", True, marks=pytest.mark.slow)]
)
def test_a_step_takes_what_is_foreseen(bits: str, again: bool, tmp_path: Path) -> None:
    base = memory_table.random_base(tmp_path / "base", SMALL)
    # of a quantised base, pages of the file that are mapped while it is read may count
    assert (0.7 if bits else 0.85) < ratio(base, 8, 256, bits, again, "fp32") < 1.3


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("settings", [SMOLLM2_135M, LLAMA_1B], ids=["135M", "1B"])
@pytest.mark.parametrize(
    ("bits", "again", "dtype"), [("", False, "fp32"), ("", True, "bf16"), ("nf4", True, "bf16")]
)
def test_a_step_of_a_larger_base_takes_what_is_foreseen(
    settings: dict, bits: str, again: bool, dtype: str, tmp_path: Path
) -> None:
    base = memory_table.random_base(tmp_path / "base", settings, dtype)
    assert 0.85 < ratio(base, 2, 256, bits, again, dtype) < 1.3


@pytest.mark.parametrize(("dtype", "on_cpu"), [("bf16", True), ("fp32", True), ("bf16", False)])
def test_a_cpu_without_bf16_copies_a_layer_in_fp32(
    dtype: str, on_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, fixed = config(tmp_path / "base", SMALL), []
    for able in (False, True):
        monkeypatch.setattr(devices, "has_bf16", lambda device, able=able: able)
        Step.footprint.cache_clear()
        fixed.append(Step(base, 64, Layout(), dtype, on_cpu=on_cpu).footprint().fixed)
    copied = 4 * SMALL["hidden_size"] * SMALL["intermediate_size"]
    assert fixed[0] - fixed[1] == (copied if dtype == "bf16" and on_cpu else 0)


def test_activations_are_those_that_autograd_keeps(tmp_path: Path) -> None:
    """Independent of the meta device: hooks that see each saved tensor on the CPU."""
    base = memory_table.random_base(tmp_path / "base", SMALL)
    backbone = Backbone.load(base)
    model, kept = LanguageModel(backbone, Layout()), dict[int, int]()
    weights = {t.untyped_storage().data_ptr() for t in backbone.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(8192, (1, 129))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.gradient(ids, list(model.adapter.parameters()))
    row = Step(base, 128, Layout()).footprint().row
    assert sum(kept.values()) == pytest.approx(row, rel=0.3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(specialists=2, rank=2, dropout=0.1),
        Layout(specialists=2, rank=2, balance="generalist"),
        Layout(specialists=0, rank=2),
    ],
    ids=["dropout", "balanced", "one"],
)
def test_blocks_computed_again_change_no_bit(kind: str, layout: Layout) -> None:
    backbone = Backbone(tiny_base(kind))
    model = LanguageModel(backbone, layout)
    torch.manual_seed(2)
    for parameter in model.adapter.parameters():
        nn.init.normal_(parameter, std=0.1)
    wrt, batch = list(model.adapter.parameters()), torch.randint(2, 61, (3, 10))
    found = []
    for backbone.attached.checkpointing in (False, True):
        torch.manual_seed(0)
        found.append((*model.gradient(batch, wrt, micro_batch=2), *model.per_example(batch, wrt)))
    for usual, again in zip(*found, strict=True):
        pairs = zip(
            *(value.values() if isinstance(value, dict) else value for value in (usual, again)),
            strict=True,
        )
        assert all(torch.equal(*pair) for pair in pairs)


def test_less_is_kept_where_blocks_are_computed_again() -> None:
    """Counted by hooks: of each block its input alone."""
    backbone, sizes = Backbone(tiny_base("llama")), []
    model = LanguageModel(backbone, Layout())
    for backbone.attached.checkpointing in (False, True):
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), model._using():
            backbone.hidden(torch.randint(2, 61, (3, 10))).sum()
        sizes.append(sum(kept))
    assert sizes[1] < sizes[0] / 3


def test_a_base_that_does_not_fit_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = config(tmp_path / "base", LLAMA_1B)  # without weights
    recipe = load("languages-topics", [f"model.base={base}", "model.context=1024"])
    monkeypatch.setattr(memory, "room", lambda device: 4e9)
    with pytest.raises(
        ModelError, match=r"takes about \d\.\d GB .*and there are 4\.0 GB"
    ) as caught:
        loading.load(recipe)
    assert "model.quantise: nf4" in caught.value.remedy
    monkeypatch.setattr(memory, "room", lambda device: 1e9)
    with pytest.raises(ModelError) as caught:
        loading.load(recipe)
    assert caught.value.remedy == "Take a smaller base, or a machine with more memory."


def test_blocks_are_computed_again_where_a_batch_does_not_fit_otherwise(tmp_path: Path) -> None:
    step = Step(config(tmp_path / "base", LLAMA_1B), 256, Layout())
    usual, small = step.footprint(), step.footprint(True)
    assert small.row < usual.row / 3
    assert (small.weights, small.fixed) == (usual.weights, usual.fixed)
    between = usual.of(3)
    assert not step.checkpointing(3, between)
    assert step.checkpointing(4, between)
    assert step.checkpointing(1, between, True)
    for rows, given in ((4, False), (100, None)):
        with pytest.raises(ModelError, match=f"a step on {rows} windows of 256") as caught:
            step.checkpointing(rows, between, given)
        fits = (usual if given is False else small).rows(between)
        assert caught.value.remedy == f"Set training.micro_batch: {fits}."
    with pytest.raises(ModelError, match="takes about") as caught:
        step.checkpointing(1, small.of(1) * 1.02, False)
    assert "Set model.checkpointing: true" in caught.value.remedy
    assert Step(step.base, 256, Layout(), quantised="nf4").footprint().weights < usual.weights / 3


def test_an_adapter_of_high_rank_counts_before_anything_is_run(tmp_path: Path) -> None:
    step = Step(config(tmp_path / "base", SMALL), 64, Layout(rank=2048))
    with pytest.raises(ModelError, match="takes about"):
        step.checkpointing(1, step.footprint(True).of(1) * 0.99)


def test_an_untied_head_counts(tmp_path: Path) -> None:
    untied = Step(config(tmp_path / "one", SMALL | {"tie_word_embeddings": False}), 64, Layout())
    tied = Step(config(tmp_path / "two", SMALL), 64, Layout())
    assert untied.footprint().weights - tied.footprint().weights == 4 * 8192 * 512
