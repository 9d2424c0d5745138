"""Figures that a table shows beside the metric."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coterie.core.result import Row


@dataclass(frozen=True)
class Beside:
    """A figure that a table shows beside the metric.

    Args:
        name: The heading of its column.
        of: Returns the figure of a row; None if it is unknown.
        digits: Digits behind the point.
        lower_is_better: Whether lower values are better.
        about: A description in a few words.
        sentence: The description in a sentence, as HTML.
    """

    name: str
    of: Callable[[Row], float | None]
    digits: int
    lower_is_better: bool
    about: str
    sentence: str

    def known(self, rows: Sequence[Row]) -> bool:
        """Return whether any row has the figure."""
        return any(self.of(row) is not None for row in rows)


BESIDE = (
    Beside(
        "loss",
        lambda row: row.loss,
        3,
        True,
        "mean test loss in nats",
        "<em>loss</em> is the mean test loss in nats",
    ),
    Beside(
        "± between clients",
        lambda row: row.between_clients,
        2,
        True,
        "standard deviation over clients",
        "<em>± between clients</em> the standard deviation over clients",
    ),
    Beside(
        "Imp.%",
        lambda row: row.improved,
        0,
        False,
        "Imp.%: clients that do better than alone",
        "<em>Imp.%</em> the share of clients that do better than their own Local run of the same "
        "seed",
    ),
    Beside(
        "W error",
        lambda row: row.weights_error,
        2,
        True,
        "W error: wrong collaboration weights",
        "<em>W error</em> the share of collaboration weights on the wrong side of a threshold in "
        "the end",
    ),
)
