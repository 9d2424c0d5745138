"""The embedded base: its tokenizer, network, optimiser, and its Hugging Face folder."""

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, CONTEXT, END = 4096, 256, "<|endoftext|>"
SAMPLE = 4_000_000  # characters of each kind that the tokenizer is trained on


def train_tokenizer(texts: dict[str, list[str]]) -> Tokenizer:
    """Byte-level BPE, trained on every n-th text of each kind so that none dominates the merges.
    Text of any language can be encoded: what has no merge is bytes.
    """

    def sample() -> Iterator[str]:
        for kind in sorted(texts):
            every = max(1, sum(map(len, texts[kind])) // SAMPLE)
            yield from texts[kind][::every]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of token ids, (tokens,), documents separated by the end token, which is id 0."""
    parts = []
    for start in range(0, len(texts), 256):
        encoded = tokenizer.encode_batch(texts[start : start + 256])
        parts += [np.array([*e.ids, 0], dtype=np.uint16) for e in encoded]
    return np.concatenate(parts)


def build() -> LlamaForCausalLM:
    """The untrained network: 4.2 million parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, initializer_range=0.02,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024), in `dtype`:
    `torch.optim.Muon` uses bf16 always, slow on a CPU without instructions for it.
    """

    def __init__(
        self,
        params,
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.02,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        """One step of every matrix."""
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"]).to(self.dtype)
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(
                        x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
                    )
                x = x.T if tall else x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def write(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """A Hugging Face model folder: bf16 weights, configuration and tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    model.config.architectures, model.config.dtype = ["LlamaForCausalLM"], "bfloat16"
    model.config.save_pretrained(folder)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=None,
        model_max_length=1024,
    )
    fast.save_pretrained(folder)
