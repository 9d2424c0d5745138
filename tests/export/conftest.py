"""Runs whose models are exported: tiny bases of several families with random models, and a short
run of the quickstart.
"""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from byte_pairs import byte_pairs
from random_models import write_base, write_models

import coterie
from coterie.models.layout import Layout

MakeRun = Callable[..., Path]
SIZES = {
    "vocab_size": 272,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


@pytest.fixture(scope="session")
def base_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Writes a base of a family, once."""
    import transformers

    kinds = {
        "llama": ("Llama", {"tie_word_embeddings": True}),
        "narrow": ("Llama", {"intermediate_size": 24}),
        "mistral": ("Mistral", {"sliding_window": 5}),
        "biased": ("Llama", {"attention_bias": True}),
        "qwen3": ("Qwen3", {"head_dim": 8}),
        "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
        "windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5}),
        "scaled": ("Llama", {"rope_parameters": LLAMA3}),
        "gpt2": ("GPT2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    }

    @cache
    def make(family: str) -> Path:
        name, own = kinds[family]
        sizes = {key: SIZES[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
        config = getattr(transformers, f"{name}Config")(
            **(sizes if family == "gpt2" else SIZES) | own
        )
        return write_base(tmp_path_factory.mktemp(family), config, byte_pairs())

    return make


@pytest.fixture
def make_run(base_of: Callable[[str], Path], tmp_path: Path) -> MakeRun:
    """Writes a run's folder with one random adapter for each client."""

    def make(family: str, **layouts: Layout) -> Path:
        return write_models(tmp_path / "run", base_of(family), layouts)

    return make


@pytest.fixture(scope="session")
def own_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The text of a client, in a file."""
    rng = random.Random(0)
    words = ("the", "water", "and", "network", "number", "list", "of", "a", "reference")
    path = tmp_path_factory.mktemp("own") / "notes.txt"
    path.write_text("\n\n".join(" ".join(rng.choices(words, k=40)) for _ in range(20)))
    return path


@pytest.fixture(scope="session")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run of the quickstart: one round, little text."""
    folder = tmp_path_factory.mktemp("quickstart") / "run"
    coterie.run(
        "quickstart",
        out=folder,
        data={"train_tokens": 1500, "valid_tokens": 200, "test_tokens": 200},
        method={"rounds": 1, "local_steps": 3, "router_every": 2, "router_steps": 1},
        training={"batch_size": 4},
        compare_with=[],
    )
    return folder
