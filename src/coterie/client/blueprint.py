"""The server's view of the model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from coterie.client.interfaces import Trainable
from coterie.core.protocol import ClientId, derive_seed
from coterie.core.roles import EXPERT, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensors import Tensors
from coterie.models.layout import Layout, parts_of
from coterie.models.mixture import LoRA


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
        model = self.trainable(next(iter(self.layouts.values())))
        return {
            name: t
            for role in roles
            for name, t in model.initial(role, initial_seed(self.seed, role, "")).items()
        }

    def flat(self, role: Role = GENERALIST, start: int = 0) -> Tensor:
        """Return one role's initial values, (d,); `start` 1, 2, ... for others of the same
        distribution. Of a pool it is one expert, with its running statistics, which otherwise are
        in no vector.
        """
        seed = (
            initial_seed(self.seed, role, "")
            if start == 0
            else derive_seed(self.seed, "start", start)
        )
        model = self.trainable(next(iter(self.layouts.values())))
        initial = model.initial(role, seed)
        return torch.cat(
            [
                initial[name].flatten()
                for name in (initial if role is EXPERT else model.parameters_by_role()[role])
            ]
        )

    @property
    def ranks(self) -> dict[ClientId, list[int]]:
        """The ranks of each client's low-rank updates, in the order of the modules' names."""
        updates = {i: self.trainable(layout).loras() for i, layout in self.layouts.items()}
        return {
            i: [loras[module].A.shape[1] for module in sorted(loras)]
            for i, loras in updates.items()
        }

    def loras(self) -> dict[str, LoRA]:
        """Return the initial low-rank updates of the client with the largest rank."""
        model = self.trainable(max(self.layouts.values(), key=lambda layout: layout.expert_rank))
        initial = model.initial(GENERALIST, initial_seed(self.seed, GENERALIST, ""))
        for name, parameter in model.parameters_by_role()[GENERALIST].items():
            parameter.data.copy_(initial[name])
        return dict(model.loras())
