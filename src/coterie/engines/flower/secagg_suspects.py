"""The search for a client that spoils masked sums, by halves, from one exchange to the next.

An out-of-range sum does not tell which of its clients spoilt it. So the next exchanges leave out
one half of the suspects, and then the other. Each further spoilt sum clears those that were left
out; a good one clears nobody, since a liar can be quiet for a while, to have others blamed. After
some quiet exchanges all take part again; if one is spoilt then, twice as many follow. So one client
spoils about log2(n) + log2(R) of R exchanges with n clients, and one that always does so is found
after 2 log2(n).

No update is in two sums, whose difference would be the sum of the clients in only one of them:
devices refuse that. For the same reason groups of at least `FEWEST` are left out, not single
clients.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from coterie.aggregation.secure import FEWEST


@dataclass
class Suspects:
    """Clients of which one spoilt all sums that were spoilt so far."""

    names: list[str] = field(default_factory=list)  # sorted; empty: no sum was spoilt
    turn: int = 0  # exchanges since the last spoilt one
    patience: int = 2  # exchanges after a spoilt one that leave out suspects

    def learn(self, spoilt: Collection[str]) -> None:
        """Record the clients in a spoilt sum."""
        before, self.turn = self.names, 0
        self.names = sorted(set(before) & set(spoilt) or spoilt)
        if self.names == before:
            self.patience *= 2

    def left_out(self, clients: Sequence[str]) -> list[str]:
        """Return clients to leave out of an exchange: the culprit, or half of the suspects, with
        others if these are few; none if too few would stay or be left out.
        """
        here = [name for name in self.names if name in clients]
        if len(self.names) == 1:
            return here if len(clients) > FEWEST else []
        if not here or self.turn >= self.patience or len(clients) < 2 * FEWEST:
            return []
        half, others = (len(here) + 1) // 2, sorted(set(clients) - set(here))
        return [
            *_rotated(here, self.turn * half)[:half],
            *_rotated(others, self.turn)[: max(0, FEWEST - half)],
        ]

    def __str__(self) -> str:
        if len(self.names) == 1:
            return (
                "left out: it was in every sum that was out of range, and each other client was "
                "left out of one of them"
            )
        return (
            f"left out of this exchange: one of {', '.join(self.names)} spoilt a sum, and until "
            f"it is found, half of them are left out in turn"
        )


def _rotated(names: list[str], by: int) -> list[str]:
    start = by % max(len(names), 1)
    return names[start:] + names[:start]
