"""The sections of a recipe for who takes part in a round, is scored, or may be missing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from coterie.aggregation.noise import Source
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.federation import Federation


class Participation(BaseModel):
    """The clients that take part in a round. They depend only on the run's seed and the round, so
    that all methods of a comparison see the same clients.

    With central privacy on devices it depends on the server's secret in the place of the seed,
    which every device knows.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    clients: int | None = Field(None, ge=1)  # number of clients drawn in each round; null: all
    # number of anchors drawn besides; null: anchors are drawn like other clients
    anchors: int | None = Field(None, ge=0)
    # grow: one more cluster of the data joins after every `every` rounds; turns: clusters take
    # turns, and only anchors stay
    schedule: Literal["all", "grow", "turns"] = "all"
    every: int = Field(200, ge=1)  # rounds until the next cluster

    def of(
        self,
        clients: Sequence[str],
        anchors: Sequence[str],
        clusters: Mapping[str, int] | None,
        seed: int,
        round: int,
        secret: bytes | None = None,
    ) -> tuple[str, ...]:
        """Return the clients that take part in a round, in order, drawn by seed or secret key."""
        here = set(self._here(clients, anchors, clusters or {}, round))
        held = set() if self.anchors is None else here & set(anchors)
        draw = _repeatable(seed, round)
        if secret is not None:
            draw = Source.keyed(secret, "participation", round).sample
        active: set[str] = set()
        for group, most in ((held, self.anchors), (here - held, self.clients)):
            members = sorted(group)
            active.update(members if most is None or most >= len(members) else draw(members, most))
        return tuple(i for i in clients if i in active)

    def _here(
        self, clients: Sequence[str], anchors: Sequence[str], clusters: Mapping[str, int], at: int
    ) -> list[str]:
        """Return the clients available by the schedule."""
        if self.schedule == "all":
            return list(clients)
        groups, turn = sorted(set(clusters.values())), at // self.every
        come = groups[: turn + 1]
        now = come if self.schedule == "grow" else [groups[turn % len(groups)]]
        return [i for i in clients if clusters[i] in now or (i in anchors and clusters[i] in come)]


def _repeatable(seed: int, round: int) -> Callable[[Sequence[str], int], Sequence[str]]:
    """Return a function that draws some of several, reproducibly by seed and round."""
    random = np.random.default_rng(derive_seed(seed, "participation", round))
    return lambda clients, most: list(map(str, random.choice(clients, most, replace=False)))


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
    """Return the scored clients in order, at most `most` of each group of unseen ones, or of the
    group "" if none is unseen. They are drawn by the seed and their names, so that a client that
    joins later replaces at most one.
    """
    groups = federation.unseen or {"": federation.clients}
    if most is None:
        return {group: tuple(clients) for group, clients in groups.items()}
    scored = {}
    for group, clients in groups.items():
        ranked = sorted(clients, key=lambda i: derive_seed(seed, "evaluation", i))
        drawn = set(ranked[:most])
        scored[group] = tuple(i for i in clients if i in drawn)
    return scored


class Quorum(BaseModel):
    """The conditions under which a server continues without some clients, because they did not
    answer in time or their replies were invalid.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    # least number of clients that must answer; all of them, if fewer were asked
    min_clients: int = Field(1, ge=1)
    # seconds to wait for the replies of one exchange; only across devices
    deadline: float = Field(3600.0, gt=0)
    # if fewer answer: stop (continue with --resume), or ask the others again; only across devices
    otherwise: Literal["stop", "wait"] = "stop"
