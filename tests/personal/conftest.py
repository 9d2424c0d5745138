"""Runs with personal models of random weights, on tiny bases of both families."""

from collections.abc import Callable
from pathlib import Path

import pytest
from random_models import write_base, write_models

from coterie.models.layout import Layout

TOKENS = ("<|endoftext|>", "Ġ", "Ċ", ".", "'", "a", "b", "c", "Ġa", "Ġb", "ab", "Ġab")
MakeRun = Callable[..., Path]


@pytest.fixture(scope="session")
def bases(tiny_base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a Llama, a GPT-2 and a Mistral with a sliding window, with random weights that
    matter and a byte-level tokenizer, and of a Llama with twelve tokens.
    """
    from transformers import AutoTokenizer, GPT2Config, LlamaConfig, MistralConfig

    llama = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    gpt2 = GPT2Config(
        vocab_size=257,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
    )
    few = LlamaConfig(**(llama.to_dict() | {"vocab_size": len(TOKENS)}))
    # attention that reaches no further than 8 tokens back
    sliding = MistralConfig(**(llama.to_dict() | {"model_type": "mistral", "sliding_window": 8}))
    found = {}
    configs = {"llama": llama, "gpt2": gpt2, "few": few, "sliding": sliding}
    for name, config in configs.items():
        tokenizer = few_tokens() if name == "few" else AutoTokenizer.from_pretrained(tiny_base)
        found[name] = write_base(tmp_path_factory.mktemp(name), config, tokenizer)
    return found


def few_tokens():
    """A tokenizer in which words of a, b, c have several spellings."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = [("Ġ", "a"), ("Ġ", "b"), ("a", "b"), ("Ġa", "b")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(TOKENS)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=TOKENS[0], bos_token=TOKENS[0]
    )


@pytest.fixture
def make_run(bases: dict[str, Path], tmp_path: Path) -> MakeRun:
    """Writes a run's folder with one random adapter for each client."""

    def make(family: str, **layouts: Layout) -> Path:
        return write_models(tmp_path, bases[family], layouts)

    return make
