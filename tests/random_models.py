"""Bases and personal models of random weights that matter, for tests of what is done with them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from coterie import personal
from coterie.models.adapter import Adapter
from coterie.models.architecture import Architecture
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
    architecture = Architecture.from_base(base)
    for seed, (client, layout) in enumerate(layouts.items()):
        adapter = Adapter(architecture, layout)
        torch.manual_seed(seed)
        for parameter in adapter.parameters():
            nn.init.normal_(parameter, std=0.3)
        about = personal.About(client, str(base), layout, 8, "comigs-1g1s", "folders", 3, 0)
        personal.save(folder / "clients" / client, about, dict(adapter.named_parameters()))
    return folder
