"""Bases and personal models of random weights that matter, for tests of what is done with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import personal
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture
from coterie.models.artifact import save_mixture
from coterie.models.layout import Layout


def write_base(folder: Path, config: Any, tokenizer: Any) -> Path:
    """Write a base of random weights, with a tokenizer."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_models(folder: Path, base: Path, layouts: Mapping[str, Layout]) -> Path:
    """Write a run's folder with one random adapter for each client, and no more."""
    for seed, (client, layout) in enumerate(layouts.items()):
        about = personal.About(client, str(base), layout, 8, "comigs-1g1s", "folders", 3, 0)
        _write(folder / "clients" / client, about, seed)
    return folder


def write_mixture(
    folder: Path, base: Path | str, client: str, parts: Mapping[str, tuple[float, Layout]]
) -> Path:
    """Write a run's folder with a client's mixture: its parts' weights and layouts by method."""
    for seed, (name, (_, layout)) in enumerate(parts.items()):
        about = personal.About(client, str(base), layout, 8, name, "folders", 3, 0)
        _write(folder / "clients" / client / name, about, seed)
    weights = {name: weight for name, (weight, _) in parts.items()}
    origin = personal.Origin("interpolation", "folders", 3, 0)
    save_mixture(folder / "clients" / client, client, weights, origin)
    return folder


def _write(folder: Path, about: personal.About, seed: int) -> None:
    adapter = Adapter(Architecture.from_base(about.base), about.layout)
    torch.manual_seed(seed)
    for parameter in adapter.parameters():
        nn.init.normal_(parameter, std=0.3)
    personal.save(folder, about, dict(adapter.named_parameters()))
