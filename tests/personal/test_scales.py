"""Scales and values that no model can compute with: refused by name, at loading or at the first
score that is not finite.
"""

import json
from pathlib import Path

import pytest
import torch

from coterie import personal
from coterie.core.errors import CheckpointError, ExportError, ModelError, Refused
from coterie.core.files import load as load_tensors
from coterie.core.files import save, write_all_sums
from coterie.export import onnx
from coterie.export.gguf_files import Tokens
from coterie.models.artifact import ABOUT, WEIGHTS, AboutClassifier
from coterie.models.layout import MOST_ALPHA, Layout
from coterie.models.quantised import QuantisedLinear
from coterie.personal.running_batch import Continuation, RunningBatch
from coterie.personal.sampling import Sampling
from coterie.runs.recipes import recipe as recipes

LAYOUTS = {"ann": Layout(rank=2), "ben": Layout(rank=2)}


def spoil(folder: Path, size: float) -> None:
    """Make every value of a personal model so large."""
    tensors, _ = load_tensors(folder / WEIGHTS)
    save(folder / WEIGHTS, {name: torch.full_like(t, size) for name, t in tensors.items()})
    write_all_sums(folder)


@pytest.mark.parametrize("alpha", ["1e308", "-1e308", "65505", "1e999", "NaN", "1" * 400])
def test_an_absurd_alpha_is_refused_by_name(alpha: str, make_run, tmp_path: Path) -> None:
    """Once the model loaded, suggested nothing, and the command ended with 0."""
    folder = personal.folder_of(make_run("llama", **LAYOUTS), "ann")
    text = json.dumps(json.loads((folder / ABOUT).read_text()), indent=2)
    (folder / ABOUT).write_text(text.replace('"alpha": 16.0', f'"alpha": {alpha}'))
    write_all_sums(folder)
    with pytest.raises(
        CheckpointError, match=r"alpha must be within|is no finite number|a number of 400 digits"
    ):
        personal.load(folder)


def test_the_greatest_alpha_is_that_of_half_precision() -> None:
    assert torch.finfo(torch.half).max == MOST_ALPHA
    Layout(alpha=MOST_ALPHA)
    with pytest.raises(ModelError, match="alpha must be within ±65,504"):
        Layout(alpha=65505)
    with pytest.raises(Refused, match=r"model\.alpha: input should be less than or equal to 65504"):
        recipes.load("quickstart", ["model.alpha=65505"])


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_scores_that_are_not_finite_name_the_model(family: str, make_run) -> None:
    folder = personal.folder_of(make_run(family, **LAYOUTS), "ann")
    spoil(folder, 3e38)
    model = personal.load(folder)
    problem = "the model of 'ann' computes scores that are not finite"
    with pytest.raises(ModelError, match=problem):
        model.next_words("a")
    for sampled in (False, True):
        with pytest.raises(ModelError, match=problem):
            model.generate("a", max_new_tokens=2, do_sample=sampled)


@pytest.mark.parametrize("temperature", [1e-320, 1e-7, 1e30, float("inf"), float("nan")])
def test_an_absurd_temperature_is_refused_by_name(temperature: float, make_run) -> None:
    """Also that of a base's generation_config.json."""
    model = personal.load(make_run("llama", **LAYOUTS), "ann")
    with pytest.raises(ModelError, match="the temperature is"):
        model.generate("a", max_new_tokens=1, do_sample=True, temperature=temperature)
    model.generation_config.temperature = temperature
    with pytest.raises(ModelError, match="the temperature is"):
        model.generate("a", max_new_tokens=1, do_sample=True)
    model.generation_config.temperature = 1.0
    model.generate("a", max_new_tokens=1, do_sample=True, temperature=0.5)


def test_a_spoilt_model_harms_no_other_in_its_batch(make_run) -> None:
    run = make_run("llama", **LAYOUTS)
    greedy = Sampling(temperature=0)

    def texts(clients: tuple[str, ...]) -> dict[str, list[int]]:
        batch = RunningBatch(personal.load_many(run))
        for client in clients:
            batch.add(Continuation(client, [1, 2, 3], 5, greedy))
        found: dict[str, list[int]] = {}
        while batch.busy:
            for progress in batch.step():
                if progress.error is not None:
                    assert progress.of.client == "ann"
                    assert "the model of 'ann'" in progress.error.problem
                    found["ann"] = [-1]
                elif progress.token is not None:
                    found.setdefault(progress.of.client, []).append(progress.token.id)
        return found

    alone = texts(("ben",))
    spoil(personal.folder_of(run, "ann"), 3e38)
    assert texts(("ann", "ben")) == {"ann": [-1], "ben": alone["ben"]}


def test_scales_of_a_quantised_layer_are_finite_in_half_precision() -> None:
    weight = torch.full((4, 64), 1e7)
    QuantisedLinear(weight, None, "int8")  # its scales are single
    with pytest.raises(ModelError, match="nf4: the scales of a layer of 4 x 64 weights"):
        QuantisedLinear(weight, None, "nf4")
    with pytest.raises(ModelError, match="int8: the scales"):
        QuantisedLinear(weight * float("inf"), None, "int8")


@pytest.mark.parametrize("std", [0.0, -1.0, 1e-300, 1e300])
def test_images_are_not_divided_by_absurd_numbers(std: float) -> None:
    from coterie.models.networks import NetworkShape

    shape = NetworkShape("mlp", (1, 8, 8), 2)
    with pytest.raises(ValueError, match=r"cannot be normalised by mean \(0.5,\) and std"):
        AboutClassifier("c", shape, None, ("a", "b"), (0.5,), (std,), "local", "r", 1, 0)


@pytest.mark.parametrize("precision", onnx.PRECISIONS)
def test_an_export_holds_finite_values_alone(precision: str, tmp_path: Path) -> None:
    onnx.write_tensors(tmp_path / "a", {"x": torch.ones(2, 2)}, precision)
    large = {"x": torch.full((2, 2), 1e5)}
    if precision == "f16":
        with pytest.raises(ExportError, match="x has values that f16 cannot hold"):
            onnx.write_tensors(tmp_path / "b", large, precision)
    else:
        onnx.write_tensors(tmp_path / "b", large, precision)


def test_values_beyond_a_precision_of_gguf_are_refused() -> None:
    pytest.importorskip("gguf")
    import numpy as np

    from coterie.export.gguf_files import _within

    for precision, size in (("f16", 7e4), ("q8_0", 7e4), ("q4_0", np.inf), ("f32", np.nan)):
        with pytest.raises(ExportError, match=f"which {precision} can hold"):
            _within("x", np.full(3, size, np.float32), precision)
    assert len(_within("x", np.full(3, 7e4, np.float32), "f32")) == 3


def test_tokens_beyond_the_base_are_refused() -> None:
    """Of a tokenizer of another base: once an IndexError."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 9}, [("a", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    assert Tokens.of(fast, 10).texts[9] == "ab"
    with pytest.raises(Refused, match="tokens from 0 to 9, and the base 9"):
        Tokens.of(fast, 9)
