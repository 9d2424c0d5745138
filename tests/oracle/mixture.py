"""The mixture of LoRA experts straight from the paper: every expert runs the whole MLP with its
own merged weights W + gamma B A.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

Expert = Mapping[str, tuple[Tensor, Tensor]]  # layer -> (A (r, in), B (out, r))
Linear = tuple[Tensor, Tensor | None]  # weight (out, in), bias (out,)


def topk_weights(logits: Tensor, k: int) -> Tensor:
    """(T, n) softmax over the k selected logits, 0 elsewhere (Section 3)."""
    threshold = logits.topk(k, dim=-1).values[:, -1:]
    return logits.masked_fill(logits < threshold, -torch.inf).softmax(dim=-1)


def merged(base: Linear, lora: tuple[Tensor, Tensor], gamma: float) -> Linear:
    A, B = lora
    return base[0] + gamma * B @ A, base[1]


def mlp(x: Tensor, layers: Mapping[str, Linear], activation: Callable[[Tensor], Tensor]) -> Tensor:
    """W2 act(W1 x), or W2 (act(Wg x) * (W1 x)) if there is a gate."""
    hidden = torch.nn.functional.linear(x, *layers["up"])
    hidden = (
        activation(torch.nn.functional.linear(x, *layers["gate"])) * hidden
        if "gate" in layers
        else activation(hidden)
    )
    return torch.nn.functional.linear(hidden, *layers["down"])


def mixture(
    x: Tensor,
    base: Mapping[str, Linear],
    experts: Sequence[Expert],
    weights: Tensor,
    gamma: float,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """sum_j w_j(x) MLP_j(x) for tokens x (T, d) and weights (T, n)."""
    outputs = [
        mlp(x, {name: merged(base[name], expert[name], gamma) for name in base}, activation)
        for expert in experts
    ]
    return sum(
        (weights[:, j, None] * output for j, output in enumerate(outputs)), torch.zeros_like(x)
    )


def balance(logits: Tensor, k: int, coefficients: Sequence[float]) -> Tensor:
    """sum_j a_j f_j P_j of one block, from the router's logits (T, n)."""
    used = (topk_weights(logits, k) > 0).to(logits.dtype).mean(dim=0)
    return (
        torch.tensor(coefficients, dtype=logits.dtype) * used * logits.softmax(dim=-1).mean(dim=0)
    ).sum()
