"""Tiny bases with random weights, one of each family."""

import pytest
import torch
from tiny_bases import GPT, SHAPE
from torch import nn

VOCABULARY = 61


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def tiny(family: str) -> nn.Module:
    """A Hugging Face causal LM of two blocks with random weights, always the same."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

    shape = {"vocab_size": VOCABULARY, **SHAPE}
    configs = {
        "gpt2": lambda: GPT2Config(vocab_size=VOCABULARY, **GPT),
        "llama": lambda: LlamaConfig(**shape),
        "qwen2": lambda: Qwen2Config(**shape),
        "qwen3": lambda: Qwen3Config(**shape, head_dim=4),
    }
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(configs[family]())
    for (
        parameter
    ) in model.parameters():  # the default initialisation of norms and biases would hide mistakes
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
