"""What the runs of a cell came to, seed by seed."""

from collections.abc import Sequence
from pathlib import Path

from coterie.core import metrics
from coterie.core.result import Result
from coterie.papers.found import SeedFigures
from coterie.papers.tables import Reproduction, Routers
from coterie.reports import comparison
from coterie.reports.curves import router_series
from coterie.runs.metrics import METRICS


def seed_figures(
    shown: Sequence[float],
    results: Sequence[Result],
    alone: Sequence[Result],
    folders: Sequence[Path],
    routed: bool,
) -> list[SeedFigures]:
    """Return the figures of each seed.

    Args:
        shown: What the table shows.
        results: Of the runs.
        alone: Of Local, with the same seeds in the same order; () where it was not run.
        folders: Of the runs.
        routed: Whether a statement speaks of the routers.
    """
    return [
        SeedFigures(
            mean=mean,
            clients={i: client.test for i, client in result.headline.items()},
            groups=result.groups,
            improved=comparison.improved([result], alone) if alone else None,
            weights_error=result.weights_error,
            gate_accuracy=result.gate_accuracy,
            generalist=_generalist(result, folder) if routed else None,
        )
        for mean, result, folder in zip(shown, results, folders, strict=True)
    ]


def speaks_of_routers(reproduction: Reproduction, row: str) -> bool:
    """Whether a statement of a table speaks of the routers of a row."""
    return any(isinstance(s, Routers) and s.row == row for s in reproduction.statements)


def _generalist(result: Result, folder: Path) -> tuple[float, float]:
    """Return the mean routing weight of generalists in the first and in the last round, over
    clients and blocks.
    """
    series = router_series(folder / METRICS)

    def weight(at: int) -> float:
        return metrics.mean(
            sum(weights[: result.clients[i].generalists])
            for i, rounds in series.items()
            for weights in rounds[at][1]
        )

    return weight(0), weight(-1)
