"""What a client needs of a model, and a server of its trainable part."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coterie.client.settings import Training
from coterie.core.roles import Role
from coterie.core.tensors import Tensors
from coterie.models.lora import LoRA

Metrics = dict[str, object]


class Trainable(Protocol):
    """The trainable part of a model, grouped by role: what a server can know of it without a
    backbone.
    """

    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def active_parameters(self) -> int: ...


class Model(Protocol):
    """What a client needs of a model. Its parameters and buffers are bound to the client's state
    while a task runs.
    """

    @property
    def device(self) -> torch.device: ...
    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def buffers(self) -> Mapping[str, Tensor]: ...
    def initial_buffers(self) -> Tensors: ...
    @property
    def statistics(self) -> Role | None: ...  # the role with which the buffers travel, if they do
    def places(
        self,
    ) -> Sequence[
        Mapping[str, Tensor]
    ]: ...  # for experts of a pool, each with all that travels with one
    def hold(
        self, numbers: Tensor, embeddings: Callable[[], Tensor]
    ) -> None: ...  # which experts they are, and of what data
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    def gradient(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]: ...
    def gradient_elsewhere(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]: ...
    @property
    def embed(
        self,
    ) -> (
        Callable[[Any], Tensor] | None
    ): ...  # a batch's embeddings by a common expert, where there is one
    @property
    def per_example(
        self,
    ) -> (
        Callable[[Any, list[nn.Parameter]], tuple[list[Tensor], dict[str, Tensor]]] | None
    ): ...  # None: it cannot
    def score(self, batches: Iterator[Any]) -> Tensor: ...


class AnyClient(Protocol):
    """What a `Client` and a `ClientBatch` both have: all that a task may use that is to serve
    either, see `protocol.task`.

    The tensors that a batch takes and gives have a first dimension more, its clients.
    """

    @property
    def training(self) -> Training: ...
    @property
    def windows(self) -> int: ...
    @property
    def sample_count(self) -> Tensor: ...
    @property
    def train(self) -> Any: ...
    @property
    def lr(self) -> float: ...
    def advance(self) -> int: ...
    def load(self, tensors: Tensors) -> None: ...
    def read(self, *roles: Role) -> Tensors: ...
    def flat(self, role: Role = ..., into: Tensor | None = None) -> Tensor: ...
    def step(self, *roles: Role, on: Any) -> None: ...
    def shift(self, scale: float, direction: Tensor) -> None: ...
    def descend(self, role: Role, gradient: Tensor, at: int | None = None) -> None: ...
    def gradients_at(self, points: Tensors, purpose: str) -> Tensors: ...
