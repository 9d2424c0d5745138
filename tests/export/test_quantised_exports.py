"""What is exported of a run on a base in 8 or 4 bits: the values that the codes stand for, or
nothing.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from random_models import write_models
from tiny_bases import tiny_base
from transformers import AutoTokenizer

from coterie import personal
from coterie.core.errors import Refused
from coterie.core.files import load
from coterie.export import Source, export
from coterie.models.layout import Layout
from coterie.testing.run import write_tiny_base


def test_the_values_of_the_codes_are_what_is_exported(tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_base("llama", 257).save_pretrained(base)
    AutoTokenizer.from_pretrained(write_tiny_base(tmp_path / "words")).save_pretrained(base)
    run = write_models(tmp_path / "run", base, {"ann": Layout(rank=2)})
    folder = run / "clients" / "ann"
    tensors, _ = load(folder / "adapter.safetensors")
    personal.save(folder, replace(personal.load(run).about, quantise="nf4"), tensors)
    (done,) = export(Source(run, "ann"), "mixtral", tmp_path / "mixtral")
    assert done.check.difference < 1e-4
    with pytest.raises(Refused, match="was trained on a base in nf4") as caught:
        export(Source(run, "ann"), "peft", tmp_path / "peft")
    assert "model.quantise" in caught.value.remedy
