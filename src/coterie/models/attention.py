"""Attention in fp32 in a base of bf16 on a CPU, where its backward pass is faster so: 17 ms and not
33 for 4 x 128 tokens and 9 heads, on a processor that has products of bf16.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

_NAME = "sdpa-fp32"


def precise_attention(model: nn.Module) -> None:
    """Have a base of transformers compute its attention in fp32, in place, if it uses SDPA."""
    config: Any = model.config
    if config._attn_implementation == "sdpa":
        config._attn_implementation = _registered()


@cache
def _registered() -> str:
    """Return the name of attention in fp32, known to transformers from then on."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def forward(
        module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **how: Any
    ) -> tuple[Tensor, None]:
        if mask is not None and mask.dtype != torch.bool:
            mask = mask.float()
        y, _ = sdpa_attention_forward(module, q.float(), k.float(), v.float(), mask, **how)
        return y.to(q.dtype), None

    AttentionInterface.register(_NAME, forward)
    AttentionMaskInterface.register(_NAME, sdpa_mask)
    return _NAME
