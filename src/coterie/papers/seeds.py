"""What the runs of a cell came to, seed by seed."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from itertools import permutations
from pathlib import Path
from typing import Literal

from coterie.core import metrics
from coterie.core.result import Result
from coterie.core.result import rows as comparison
from coterie.papers.reproduced import SeedFigures
from coterie.papers.tables import Favours, Reproduction, Routers, stand_ins
from coterie.reports.curves import router_series
from coterie.runs.folder.metrics import METRICS

Spoken = AbstractSet[Literal["routers", "weights"]]


def seed_figures(
    shown: Sequence[float],
    results: Sequence[Result],
    alone: Sequence[Result],
    folders: Sequence[Path],
    spoken: Spoken,
) -> list[SeedFigures]:
    """Return the figures of each seed.

    Args:
        shown: What the table shows.
        results: Of the runs.
        alone: Of Local, with the same seeds in the same order; () where it was not run.
        folders: Of the runs.
        spoken: What statements speak of.
    """
    return [
        SeedFigures(
            mean=mean,
            clients={i: client.test for i, client in result.headline.items()},
            groups=result.groups,
            improved=comparison.improved([result], alone) if alone else None,
            weights_error=result.weights_error,
            gate_accuracy=result.gate_accuracy,
            generalist=_generalist(result, folder) if "routers" in spoken else None,
            weights=_weights(result) if "weights" in spoken else None,
        )
        for mean, result, folder in zip(shown, results, folders, strict=True)
    ]


def spoken_of_row(reproduction: Reproduction, row: str) -> Spoken:
    """Return what the statements of a table speak of a row that needs more than its result."""
    of_row = [
        s
        for s in reproduction.statements
        if isinstance(s, Routers | Favours) and row in (s.row, *stand_ins(s))
    ]
    return {"routers" if isinstance(s, Routers) else "weights" for s in of_row}


def _weights(result: Result) -> dict[str, dict[str, float]] | None:
    """Return each client's weights for the others, the mean over evaluations; None of a method
    without.
    """
    known = [e.weights for e in result.evaluations if e.weights is not None]
    if not known:
        return None
    means: dict[str, dict[str, float]] = {client: {} for client in result.clients}
    for (i, one), (j, other) in permutations(enumerate(result.clients), 2):
        means[one][other] = metrics.mean(weights[i][j] for weights in known)
    return means


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
