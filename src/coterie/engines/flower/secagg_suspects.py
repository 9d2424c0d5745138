"""Who spoilt a sum under masks: found by halves, from one exchange to the next.

A sum that is no sum of updates has been spoilt by one of the clients in it, and nothing in it tells
which. So the following exchanges leave out one half of the suspects, and then the other. Each
further sum that is spoilt clears those that were left out; one that is not clears nobody, since who
lies can be quiet for a while, and have others blamed by that. After some quiet exchanges all take
part again; if they are then spoilt again, twice as many follow. So of R exchanges with n clients
one client spoils about log2(n) + log2(R), and one that always does so is found after 2 log2(n).

The same update is in no second sum: devices refuse that, as the difference of two sums is the sum
of those in one of them alone. For the same reason groups of at least `FEWEST` are left out, not
single clients.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from coterie.aggregation.secure import FEWEST


@dataclass
class Suspects:
    """Clients of which one spoilt all the sums that were spoilt so far.

    Args:
        names: Sorted; none: no sum was spoilt.
        turn: Exchanges since the last one that was.
        patience: How many of these leave out suspects.
    """

    names: list[str] = field(default_factory=list)
    turn: int = 0
    patience: int = 2

    def learn(self, spoilt: Collection[str]) -> None:
        """Take note of the clients in a sum that was spoilt."""
        before, self.turn = self.names, 0
        self.names = sorted(set(before) & set(spoilt) or spoilt)
        if self.names == before:
            self.patience *= 2

    def left_out(self, clients: Sequence[str]) -> list[str]:
        """Select clients to leave out of an exchange with these: the one that is found, or half of
        the suspects and, where these are few, others. None: that would leave, or leave out, too
        few.
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
