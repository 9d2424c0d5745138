"""Epsilon as our accountant counts it against Google's dp-accounting, which is not a dependency: it
must be importable when this runs.

    pip install --target DIR dp-accounting
    PYTHONPATH=DIR python benchmarks/accountant.py [--json benchmarks/results/accountant.json]

With all clients in each exchange, and for local privacy, theirs is the distribution of the privacy
loss, by Fourier transforms: exact but for a rounding upwards. With clients that are drawn without
replacement, theirs is a Rényi bound for neighbours by replacement, a newer theorem of the same
paper as ours (Wang et al., 2019, Theorem 27 of the long version, where we use Theorem 9); and
`pair` is exact for one pair of neighbours, so that no epsilon below it can be right: all other
clients contribute the same, and one contributes that or its opposite, so that what is drawn is a
mixture of two Gaussians 2C apart.
"""

import argparse
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import dp_accounting as dp
from common import report, table
from dp_accounting import pld, rdp

from coterie.aggregation.accountant import Accountant
from coterie.aggregation.privacy import Privacy

DELTAS = (1e-3, 1e-5, 1e-6)
FULL = [(z, steps) for z in (0.7, 1.0, 2.0, 4.0, 6.0, 12.0, 20.0) for steps in (1, 30, 300, 1000)]
DRAWN = [
    (z, drawn, clients, steps)
    for drawn, clients in ((500, 10_000), (1000, 10_000), (10, 1000), (50, 200))
    for z in (2.0, 4.0, 8.0)
    for steps in (1, 30, 300)
]
ABOUT = (
    "`coterie` is what the accountant says. `dp-accounting`: with all clients, and for local "
    "privacy, the distribution of the privacy "
    "loss, exact but for a rounding upwards; with clients drawn without replacement, the Renyi "
    "bound of that library, for neighbours by "
    "replacement. `pair`: exact for one pair of neighbours, so that no smaller epsilon can be "
    "right."
)
MOST = 100.0  # an epsilon beyond it is not compared


def ours(where: str, z: float, rate: float, steps: int, delta: float) -> float:
    """What the accountant says of so many exchanges."""
    return Accountant(
        Privacy(where=where, clip=1.0, noise=z, delta=delta), 2, [(steps, rate)]
    ).epsilon(delta)


def exact(event: dp.DpEvent, steps: int, delta: float) -> float:
    """By the distribution of the privacy loss; rounded upwards, by at most 1e-4 of a loss in
    each of the steps.
    """
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4)
    return float(accountant.compose(event, steps).get_epsilon(delta))


def bound(drawn: int, clients: int, multiplier: float, steps: int, delta: float) -> float:
    """By Rényi divergences, for neighbours by replacement."""
    accountant = rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    event = dp.SampledWithoutReplacementDpEvent(clients, drawn, dp.GaussianDpEvent(multiplier))
    return float(accountant.compose(event, steps).get_epsilon(delta))


def rows() -> Iterator[dict[str, Any]]:
    """One for each setting."""
    for where, sensitivity in (("central", 1), ("local", 2)):
        for z, steps in FULL:
            for delta in DELTAS:
                found = ours(where, z, 1.0, steps, delta)
                if 0 < found <= MOST:
                    theirs = exact(dp.GaussianDpEvent(z / sensitivity), steps, delta)
                    yield _row(
                        f"{where}, all, z = {z:g}, T = {steps}, delta = {delta:g}", found, theirs
                    )
    for z, drawn, clients, steps in DRAWN:
        found = ours("central", z, drawn / clients, steps, 1e-5)
        if found <= MOST:
            theirs = bound(drawn, clients, z / 2, steps, 1e-5)
            pair = exact(
                dp.PoissonSampledDpEvent(drawn / clients, dp.GaussianDpEvent(z / 2)), steps, 1e-5
            )
            yield _row(
                f"central, {drawn} of {clients}, z = {z:g}, T = {steps}, delta = 1e-05",
                found,
                theirs,
                pair,
            )


def _row(setting: str, found: float, theirs: float, pair: float | None = None) -> dict[str, Any]:
    return {
        "setting": setting,
        "coterie": found,
        "dp-accounting": theirs,
        "ratio": found / theirs,
        "pair": pair,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    path = parser.parse_args().json
    found = list(rows())
    full = [row["ratio"] for row in found if row["pair"] is None]
    drawn = [row for row in found if row["pair"] is not None]
    about = {
        "all": {"settings": len(full), "least ratio": min(full), "greatest ratio": max(full)},
        "drawn": {
            "settings": len(drawn),
            "least ratio": min(row["ratio"] for row in drawn),
            "greatest ratio": max(row["ratio"] for row in drawn),
            "below the pair": sum(row["coterie"] < row["pair"] for row in drawn),
        },
    }
    report(found, path, dp_accounting=version("dp-accounting"), summary=about)
    if path is not None:
        words = [
            f"{name}: {', '.join(f'{key} {value:.6g}' for key, value in of.items())}."
            for name, of in about.items()
        ]
        command = (
            "    PYTHONPATH=DIR python benchmarks/accountant.py --json "
            "benchmarks/results/accountant.json"
        )
        title = f"# Epsilon against dp-accounting {version('dp-accounting')}"
        path.with_suffix(".md").write_text(
            "\n\n".join([title, command, ABOUT, " ".join(words), table(found)]) + "\n"
        )


if __name__ == "__main__":
    main()
