"""Bases of every family, through a run's folder: personal models speak, and their folds are exact
in PEFT.
"""

from pathlib import Path

import pytest
import torch
from random_models import write_models
from tiny_bases import KINDS, tiny_base
from transformers import AutoTokenizer

import coterie
from coterie.core.errors import Refused
from coterie.export import Source, export
from coterie.models.layout import Layout
from coterie.testing.run import write_tiny_base

QUICK = ("phi3", "opt", "falcon")


@pytest.mark.parametrize(
    "kind",
    [kind if kind in QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS],
)
def test_its_models_are_loaded_speak_and_are_exported(kind: str, tmp_path: Path) -> None:
    base = tmp_path / "base"
    tiny_base(kind, 257).save_pretrained(base)
    AutoTokenizer.from_pretrained(write_tiny_base(tmp_path / "words")).save_pretrained(base)
    layouts = {
        "ann": Layout(specialists=0, rank=2),
        "ben": Layout(rank=2, mlp_rank=3, routing="equal"),
    }
    run = write_models(tmp_path / "run", base, layouts)
    model = coterie.load(run, "ann")
    ids = torch.randint(1, 257, (2, 9))
    said = model.generate(ids, max_new_tokens=4, do_sample=False)
    assert torch.equal(said[:, 9], model.language(ids)[:, -1].argmax(dim=1))
    assert model.next_words("the w", 2)
    (done,) = export(Source(run, "ann"), "peft", tmp_path / "peft")
    assert done.check.difference < 1e-4
    assert (tmp_path / "peft" / "adapter_config.json").is_file()
    if KINDS[kind][0] != "Llama-like":
        for name in ("gguf", "mixtral"):
            with pytest.raises(Refused):
                export(Source(run, "ann"), name, tmp_path / name)
