"""The server's view of the model; and the interfaces of a client's model, and of its trainable part
on a server.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from coterie.client.settings import Training
from coterie.core.protocol import ClientId, derive_seed
from coterie.core.roles import EXPERT, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensors import Tensors
from coterie.models.layout import Layout, parts_of
from coterie.models.mixture import LoRA
from coterie.models.predictions import Prediction

Metrics = dict[str, object]
Gradients = tuple[list[Tensor], dict[str, Tensor]]  # with what was measured: loss, balance


class Trainable(Protocol):
    """The trainable part of a model by role, as a server knows it without a backbone."""

    @property
    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def active_parameters(self) -> int: ...


class Model(Protocol):
    """The interface of a client's model, which is bound to the client's state during a task."""

    @property
    def device(self) -> torch.device: ...
    @property
    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    @property
    def buffers(self) -> Mapping[str, Tensor]: ...
    def initial_buffers(self) -> Tensors: ...
    @property
    def statistics(self) -> Role | None: ...  # the role with which the buffers travel, if they do
    # for experts of a pool: the tensors that travel with each
    def expert_slots(self) -> Sequence[Mapping[str, Tensor]]: ...
    # of how many pools, in turn: the expert of number n is a member of pool n % pools
    @property
    def pools(self) -> int: ...
    # say which experts are in the slots
    def bind_experts(self, numbers: Tensor) -> None: ...
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    def gradient(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> Gradients: ...
    def gradient_elsewhere(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> Gradients: ...
    # the embeddings of a batch by the common expert, if the model has one
    @property
    def embed(self) -> Callable[[Any], Tensor] | None: ...
    # the gradients of each example, if the model can give them
    @property
    def per_example(self) -> Callable[[Any, list[nn.Parameter]], Gradients] | None: ...
    def predictions(self, batches: Iterator[Any]) -> Iterator[Prediction]: ...
    def score(self, batches: Iterator[Any]) -> Tensor: ...


class AnyClient(Protocol):
    """The common interface of `Client` and `ClientBatch`, for tasks that serve both, see
    `protocol.task`. Tensors of a batch have its clients as an additional first dimension.
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


def initial_seed(seed: int, role: Role, client: ClientId) -> int:
    """Return the seed of a role's initial values: the run's if shared, else the client's."""
    return derive_seed(seed, "initial", role, client if role in (SPECIALIST, ROUTER) else "")


@dataclass(frozen=True)
class Blueprint:
    """The server's view of the model: its shapes and the run's seed, without the base's weights."""

    trainable: Callable[[Layout], Trainable]  # makes the trainable part of a layout
    layouts: Mapping[ClientId, Layout]
    seed: int
    # each client's true cluster, if known: for oracles
    clusters: Mapping[ClientId, int] | None = None
    anchors: Sequence[ClientId] = ()  # the q-th client is tied to expert q
    fewest: int | None = None  # the least number of clients in a round; None: all

    def part(self, name: str) -> "Blueprint":
        """Return the view of one part of a method that trains several models of each client."""
        return replace(self, layouts=parts_of(name, self.layouts))

    def read(self, *roles: Role) -> Tensors:
        """Return the initial values of the shared tensors."""
        model, values = self.trainable(next(iter(self.layouts.values()))), Tensors()
        for role in roles:
            values |= model.initial(role, initial_seed(self.seed, role, ""))
        return values

    def flat(self, role: Role = GENERALIST, start: int = 0) -> Tensor:
        """Return one role's initial values, (d,); `start` 1, 2, ... for others of the same
        distribution. Of a pool it is one expert with running statistics, else in no vector.
        """
        first = initial_seed(self.seed, role, "")
        model = self.trainable(next(iter(self.layouts.values())))
        initial = model.initial(role, derive_seed(self.seed, "start", start) if start else first)
        names = initial if role is EXPERT else model.parameters_by_role[role]
        return torch.cat([initial[name].flatten() for name in names])

    @property
    def ranks(self) -> dict[ClientId, list[int]]:
        """The ranks of each client's low-rank updates, in the order of the modules' names."""
        loras = {i: self.trainable(layout).loras() for i, layout in self.layouts.items()}
        return {i: [of[name].A.shape[1] for name in sorted(of)] for i, of in loras.items()}

    def loras(self) -> dict[str, LoRA]:
        """Return the initial low-rank updates of the client with the largest rank."""
        model = self.trainable(max(self.layouts.values(), key=lambda layout: layout.expert_rank))
        initial = model.initial(GENERALIST, initial_seed(self.seed, GENERALIST, ""))
        for name, parameter in model.parameters_by_role[GENERALIST].items():
            parameter.data.copy_(initial[name])
        return dict(model.loras())
