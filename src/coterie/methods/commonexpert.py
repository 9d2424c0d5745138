"""Common expert: the frozen, pretrained expert of all clients (DDOME, Table 1)."""

from dataclasses import dataclass

from coterie.methods.pretrained import Pretrained
from coterie.models.layout import CommonLayout, Layout


@dataclass(frozen=True)
class CommonExpert(Pretrained):
    """No rounds. Every client classifies with the expert that DDOME uses to embed data."""

    def layout(self, position: int, base: Layout) -> Layout:
        return CommonLayout()
