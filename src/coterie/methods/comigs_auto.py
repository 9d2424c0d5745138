"""CoMiGS with the number of specialists that suits each client: beyond the paper, in which people
choose it, though "users may not know their local data complexity".

CoMiGS with each of several numbers of specialists trains at once, and each client keeps one model:
that with the fewest specialists whose loss of the validation data is within one standard error of
the least (Breiman et al., "Classification and Regression Trees", 1984). Routers have learned from
these data, so that the least loss alone would favour more specialists.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor

from coterie.client.site import ClientOfParts
from coterie.core.tensors import Tensors
from coterie.methods.base import Method
from coterie.methods.comigs import CoMiGS
from coterie.methods.parts import OfParts
from coterie.methods.templates import Count
from coterie.models.interpolation import one_of, simplest


@dataclass(frozen=True)
class CoMiGSAuto(OfParts, CoMiGS):
    """CoMiGS in several sizes, of which each client keeps one."""

    per_client: ClassVar[tuple[str, ...]] = ()
    serves_unseen_clients: ClassVar[bool] = False
    by_examples = OfParts.by_examples

    # s, the numbers of specialists among which clients choose
    specialists: Annotated[tuple[Count, ...], Field(min_length=2)] = (0, 1, 3)

    @cached_property
    def methods(self) -> Mapping[str, Method]:
        common = {field.name: getattr(self, field.name) for field in fields(CoMiGS)}
        sizes = sorted(set(self.specialists))
        if len(sizes) < 2:
            raise ValueError("specialists: name two different numbers or more to choose among")
        return {
            f"comigs-{self.generalists}g{s}s": CoMiGS(**common | {"specialists": s}) for s in sizes
        }

    def weights(self, client: ClientOfParts, tensors: Tensors, valid: Tensor) -> Tensor:
        return one_of(len(valid), simplest(valid))
