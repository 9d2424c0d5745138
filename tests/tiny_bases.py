"""Tiny bases of random weights, one of each family that adapters attach to."""

from typing import Any

import torch
from torch import nn

SHAPE = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
GPT = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
FALCON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
VOCABULARY = 61
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")  # of `tiny`
# model -> (family, model_type, settings)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT-2", "gpt2", GPT),
    "gpt-bigcode": ("GPT-2", "gpt_bigcode", GPT),
    "llama": ("Llama-like", "llama", SHAPE),
    "gemma3": ("Llama-like", "gemma3_text", {**SHAPE, "head_dim": 4}),
    "nemotron": ("ungated Llama", "nemotron", SHAPE),
    "arcee": ("ungated Llama", "arcee", SHAPE),
    "jais2": ("ungated Llama", "jais2", SHAPE),
    "starcoder2": ("StarCoder2", "starcoder2", SHAPE),
    "glm4": ("GLM", "glm4", {**SHAPE, "head_dim": 4}),
    "phi3": ("Phi-3", "phi3", SHAPE),
    "phi": ("Phi", "phi", SHAPE),
    "gpt-neox": (
        "GPT-NeoX",
        "gpt_neox",
        {key: value for key, value in SHAPE.items() if key != "num_key_value_heads"},
    ),
    "falcon": ("Falcon", "falcon", FALCON),
    "falcon-new": (
        "Falcon",
        "falcon",
        {**FALCON, "num_kv_heads": 2, "new_decoder_architecture": True, "bias": True},
    ),
    "gptj": ("GPT-J", "gptj", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGen", "codegen", {**GPT, "rotary_dim": 4}),
    "gpt-neo": (
        "GPT-Neo",
        "gpt_neo",
        {
            "hidden_size": 16,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
            "max_position_embeddings": 32,
        },
    ),
    "opt": (
        "OPT",
        "opt",
        {
            "hidden_size": 16,
            "word_embed_proj_dim": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 24,
            "max_position_embeddings": 32,
        },
    ),
    "xglm": (
        "XGLM",
        "xglm",
        {
            "d_model": 16,
            "num_layers": 2,
            "attention_heads": 4,
            "ffn_dim": 24,
            "max_position_embeddings": 32,
        },
    ),
}


def tiny_base(kind: str, vocabulary: int = 61) -> nn.Module:
    """A causal LM of two blocks, always the same."""
    from transformers import AutoConfig, AutoModelForCausalLM

    _, model_type, settings = KINDS[kind]
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(model_type, vocab_size=vocabulary, **ends, **settings)
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():  # norms of one and biases of zero would hide mistakes
        nn.init.normal_(parameter, std=0.2)
    return model.eval()


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
