"""Simulated attackers, to test aggregation rules; only recipes with `attack` have any."""

from collections.abc import Iterable
from typing import Annotated, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from coterie.core.errors import RecipeError
from coterie.core.names import normal
from coterie.core.protocol import ClientId
from coterie.core.tensors import Named, Tensors, axpy, weighted_sum
from coterie.core.tensors import norm as length


class Attack(BaseModel):
    """An attack on the aggregation: which clients attack, and what each sends instead of its update
    u. For experiments with `method.aggregation`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["sign-flip", "scaled", "noise", "nan"] = Field(
        description="sign-flip: -scale u; scaled: scale u; noise: a random direction with the "
        "norm of scale u; nan: NaN"
    )
    clients: Annotated[int, Field(ge=0)] | tuple[str, ...] = Field(
        1, description="attackers: a number (the first ones by id), or a list of ids"
    )
    scale: float = Field(
        10.0, gt=0, description="scale of the false update, relative to the true one"
    )

    def attackers(self, clients: Iterable[ClientId]) -> frozenset[ClientId]:
        """Return the attackers. Raises RecipeError: there are too few clients or an unknown id."""
        known = sorted(clients)
        if isinstance(self.clients, int):
            if self.clients > len(known):
                raise RecipeError(
                    "attack",
                    [
                        f"attack.clients: {self.clients} attackers among {len(known)} clients; "
                        f"use at most that many"
                    ],
                )
            return frozenset(known[: self.clients])
        named = [normal(i) for i in self.clients]
        if unknown := [i for i in named if i not in known]:
            raise RecipeError(
                "attack",
                [
                    f"attack.clients: there is no client {i!r}; there are {', '.join(known)}"
                    for i in unknown
                ],
            )
        return frozenset(named)


def poisoned(
    reply: Named, sent: Named, is_update: bool, attack: Attack, generator: torch.Generator
) -> Tensors:
    """Return what an attacker sends in place of an honest reply, in its form; integers are kept.

    The false update of what `is_update` is added to what was sent; otherwise, and for names that
    were not sent, to zero. Raises TensorError for a tensor of another form than was sent.
    """
    honest = {name: t for name, t in reply.items() if t.is_floating_point()}
    if attack.kind == "nan":
        return dict(reply) | {name: torch.full_like(t, torch.nan) for name, t in honest.items()}
    origin = {
        name: sent[name].to(t.device) if is_update and name in sent else torch.zeros_like(t)
        for name, t in honest.items()
    }
    update = axpy(-1.0, origin, honest)
    if attack.kind == "noise":
        update = weighted_sum([(length(update), _direction(update, generator))])
    return dict(reply) | axpy(
        -attack.scale if attack.kind == "sign-flip" else attack.scale, update, origin
    )


def _direction(like: Named, generator: torch.Generator) -> Tensors:
    """Return a uniformly random direction, of norm 1 over all names."""
    drawn = {
        name: torch.randn(
            like[name].shape, generator=generator, dtype=like[name].dtype, device=generator.device
        ).to(like[name].device)
        for name in sorted(like)
    }
    return weighted_sum([(1 / (length(drawn) or 1.0), drawn)])
