"""Settings of a client's training: batches, and optimisers with memory in its state."""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, Tag
from torch import Tensor

from coterie.core import unions
from coterie.core.protocol import State
from coterie.core.roles import GATE, ROUTER, Role


class Scheduled(BaseModel, ABC):
    """A learning rate, its schedule, and one step of a flat tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: float = Field(2e-3, gt=0)  # peak learning rate
    weight_decay: float = Field(0.0, ge=0)  # decoupled weight decay
    # one cosine or exponential decay over the whole run, or constant
    schedule: Literal["cosine", "exponential", "constant"] = "constant"
    # last learning rate of the schedule, as a share of the peak
    final: float = Field(0.1, ge=0, le=1)

    # local iterations in which the learning rate rises linearly to lr; null: none
    warmup_steps: int | None = Field(None, ge=1)
    # norm to which longer gradients are scaled, of generalists and of specialists each by itself;
    # null: none
    max_grad_norm: float | None = Field(None, gt=0)

    def lr_at(self, iteration: int, total: int) -> float:
        """Return the learning rate of the step after `iteration` of `total` local iterations."""
        warmup = self.warmup_steps or 0
        if iteration < warmup:
            return self.lr * (iteration + 1) / warmup
        if self.schedule == "constant":
            return self.lr
        progress = min((iteration - warmup) / max(total - warmup, 1), 1.0)
        if self.schedule == "exponential":
            return self.lr * math.pow(self.final, progress)
        return self.lr * (self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2)

    def step(self, flat: Tensor, gradient: Tensor, lr: float, memory: State, prefix: str) -> None:
        """Take one step of `flat`, fp32, in place, with moments at `prefix` in `memory`, which
        start at zero. The rows of a matrix, one for each client, step as they do one by one.
        """
        if self.max_grad_norm is not None:
            norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
            gradient = gradient * (self.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        self._descend(flat, gradient, lr, memory, prefix)

    @abstractmethod
    def _descend(
        self, flat: Tensor, gradient: Tensor, lr: float, memory: State, prefix: str
    ) -> None:
        """Take a step along a gradient as it is, elementwise, see `step`."""


_Beta = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Scheduled):
    """AdamW (CoMiGS, Section B.1.2)."""

    optimiser: Literal["adamw"] = "adamw"  # AdamW
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)  # decay of the first and second moments
    weight_decay: float = Field(0.01, ge=0)  # decoupled weight decay

    def _descend(
        self, flat: Tensor, gradient: Tensor, lr: float, memory: State, prefix: str
    ) -> None:
        adamw = torch.optim.AdamW(
            [flat], lr=lr, betas=self.betas, weight_decay=self.weight_decay, fused=True
        )
        keys = {"exp_avg": "first", "exp_avg_sq": "second", "step": "step"}
        start = {"step": torch.zeros((), dtype=torch.float32)}
        moments = {
            name: _started(memory, f"{prefix}/{key}", start.get(key, flat)).to(flat.device)
            for name, key in keys.items()
        }
        adamw.state[flat] = moments
        flat.grad = gradient
        adamw.step()
        flat.grad = None
        memory |= {f"{prefix}/{key}": moments[name] for name, key in keys.items()}


class SGD(Scheduled):
    """Gradient descent with momentum, m <- beta m + (1 - tau) g from m = 0.

    By default tau = beta, which makes m a moving average of the gradients (CoBo's code); with tau =
    0 it is the classical form, whose steps are 1 / (1 - beta) times as long.
    """

    optimiser: Literal["sgd"]  # gradient descent
    momentum: float = Field(0.0, ge=0, lt=1)  # beta of the moving average of gradients; 0: none
    # tau, dampening of the gradients; null: the same as momentum; 0: classical momentum
    dampening: float | None = Field(None, ge=0, le=1)

    def _descend(
        self, flat: Tensor, gradient: Tensor, lr: float, memory: State, prefix: str
    ) -> None:
        if self.momentum:
            average = _started(memory, f"{prefix}/average", flat).to(flat.device)
            share = 1 - (self.momentum if self.dampening is None else self.dampening)
            memory[f"{prefix}/average"] = gradient = average.mul_(self.momentum).add_(
                gradient, alpha=share
            )
        if self.weight_decay:
            flat.mul_(1 - lr * self.weight_decay)
        flat.add_(gradient, alpha=-lr)


def _started(memory: State, key: str, like: Tensor) -> Tensor:
    if key not in memory:
        memory[key] = torch.zeros_like(like)
    return memory[key]


Optimiser = Annotated[
    Annotated[AdamW, Tag("adamw")] | Annotated[SGD, Tag("sgd")], unions.by("optimiser", AdamW, SGD)
]


UPPER = {ROUTER, GATE}  # what chooses experts


class Training(BaseModel):
    """The training of a client: batches, and an optimiser for each level of the bilevel problem."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: int = Field(64, ge=1)  # sequences or images per optimiser step
    # rows per forward pass; gradients are accumulated to the same step
    micro_batch: int | None = Field(None, ge=1)
    # lower level: LoRA experts and attention; of an image classifier: everything
    experts: Optimiser = AdamW(schedule="cosine")
    routers: Optimiser = AdamW()  # upper level: routers, and the gate of a pool
    # clients keep nothing of the model between rounds, and optimisers start anew; for many clients
    # that rarely take part
    stateless: bool = False

    def optimiser(self, role: Role) -> Optimiser:
        return self.routers if role in UPPER else self.experts
