"""The clients that are scored, where scoring all of them would take too long."""

import heapq
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from coterie.core.protocol import ClientId, derive_seed
from coterie.data.federation import Federation

EvaluatedClients = Annotated[
    int | None,
    Field(
        ge=1,
        description="number of clients that are scored, and on this machine keep a personal model; "
        "drawn once from the seed, of each group of unseen clients if there are any; null: all",
    ),
]


def evaluated(
    federation: Federation, most: int | None, seed: int
) -> dict[str, tuple[ClientId, ...]]:
    """Return the clients that are scored, in their order: of each group of unseen ones, or of ""
    where none is unseen.

    Args:
        federation: All clients.
        most: So many of each group; None: all.
        seed: Of the run. Who is drawn depends on it and the client's own name, so that a client
            that joins later takes the place of one at most.
    """
    groups = federation.unseen or {"": federation.clients}
    return {group: _drawn(tuple(of), most, seed) for group, of in groups.items()}


def _drawn(clients: Sequence[ClientId], most: int | None, seed: int) -> tuple[ClientId, ...]:
    if most is None or most >= len(clients):
        return tuple(clients)
    first = heapq.nsmallest(most, clients, key=lambda i: derive_seed(seed, "evaluation", i))
    chosen = set(first)
    return tuple(i for i in clients if i in chosen)
