"""The decisions of trained routers on real text, token by token, as in `routing.json`."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from coterie.core.files import read_json
from coterie.core.result.parsing import Record

ROUTING = "routing.json"


@dataclass(frozen=True)
class Mixture(Record):
    """The number of experts of a model with a router.

    Args:
        generalists: Number of shared experts.
        specialists: Number of experts that stay with the client.
    """

    generalists: int
    specialists: int


@dataclass(frozen=True)
class Routing(Record):
    """The routing weights of every model with a router on each client's text.

    Args:
        texts: The tokens of each client's text as people read them.
        experts: Of each model with a router.
        weights: By model, then by text, (blocks, tokens, experts).
        depth: Number of blocks of a model; None if no model has a router.
        blocks: The indices of its first, middle and last one.
    """

    rare: ClassVar[Collection[str]] = ("depth", "blocks")

    texts: Mapping[str, Sequence[str]]
    experts: Mapping[str, Mixture]
    weights: Mapping[str, Mapping[str, Sequence[Sequence[Sequence[float]]]]]
    depth: int | None = None
    blocks: Sequence[int] | None = None

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what is in the routing.json of a folder; None without one. Raises
        CheckpointError.
        """
        path = folder / ROUTING
        return cls.from_json(read_json(path, finite=False)) if path.exists() else None
