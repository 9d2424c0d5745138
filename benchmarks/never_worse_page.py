"""Tables of `never_worse.py`: perplexities, regrets, and what rows cost."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from common import table

Line = Mapping[str, Any]


class Table:
    """The results of one setting and reading.

    Args:
        lines: Of `never_worse.Bench`.
        rows: All, in order.
        references: Those against which regret is measured.
        more: Further ones, against which it is measured too.
    """

    def __init__(
        self,
        lines: Sequence[Line],
        rows: Sequence[str],
        references: Sequence[str],
        more: Sequence[str] = (),
    ) -> None:
        self.rows, self.references, self.wider = rows, references, (*references, *more)
        self.losses: dict[str, dict[str, dict[tuple[int, str], float]]] = {}
        for line in lines:
            of = self.losses.setdefault(line["federation"], {}).setdefault(line["row"], {})
            of |= {(line["seed"], i): test for i, (_, test) in line["clients"].items()}

    def regrets(self, federation: str, row: str, others: Sequence[str]) -> dict[str, float]:
        """Return by client how much more perplexity, in percent, a row has than the best of the
        other rows, each in the mean over the seeds that both have.
        """
        losses, gaps = self.losses[federation], dict[str, list[float]]()
        of_row = losses.get(row, {})
        for other in (r for r in losses if r in others and r != row):
            for i in dict.fromkeys(i for _, i in of_row):
                keys = [key for key in of_row if key[1] == i and key in losses[other]]
                if keys:
                    gap = statistics.mean(of_row[k] - losses[other][k] for k in keys)
                    gaps.setdefault(i, []).append(gap)
        return {i: 100 * math.expm1(max(of)) for i, of in gaps.items()}

    def mean(self, federation: str, row: str, other: str | None = None) -> float:
        """Return the mean test perplexity over clients and the seeds that another row has too."""
        of = self.losses[federation]
        keys = of[row].keys() & of[other or row].keys()
        return statistics.mean(math.exp(of[row][key]) for key in keys)

    def summary(self) -> str:
        """Return mean perplexities by federation, and regrets over all clients: against the
        references, and against all of the rows `wider`.
        """
        rows = []
        for row in self.rows:
            regrets, wide = (
                self.all_regrets(row, self.references),
                self.all_regrets(row, self.wider),
            )
            if not regrets:
                continue
            worst = max(regrets, key=lambda i: regrets[i])
            figures = {
                "clients": len(regrets),
                "mean regret, %": statistics.mean(regrets.values()),
                "over 0.5 %": sum(regret > 0.5 for regret in regrets.values()),
                "largest, %": regrets[worst],
                "of": worst,
                "mean with memory, %": statistics.mean(wide.values()),
            }
            means = {f: self.mean(f, row) if row in of else None for f, of in self.losses.items()}
            rows.append({"row": row} | means | figures)
        return table(rows)

    def all_regrets(self, row: str, others: Sequence[str]) -> dict[str, float]:
        """Return a row's regrets of the clients of all federations."""
        return {
            f"{federation}/{i}": regret
            for federation in self.losses
            for i, regret in self.regrets(federation, row, others).items()
        }

    def against(self, row: str) -> str:
        """Return how often a row is ahead of each other one."""
        rows = []
        for other in self.rows:
            pairs = [
                f for f, of in self.losses.items() if row != other and {row, other} <= of.keys()
            ]
            if not pairs:
                continue
            gaps = {
                f"{f}/{i}": gap for f in pairs for i, gap in self.regrets(f, row, [other]).items()
            }
            ahead = sum(self.mean(f, row, other) < self.mean(f, other, row) for f in pairs)
            worst = max(gaps, key=lambda i: gaps[i])
            rows.append(
                {
                    f"{row} against": other,
                    "federations ahead": f"{ahead} of {len(pairs)}",
                    "clients ahead": f"{sum(gap < 0 for gap in gaps.values())} of {len(gaps)}",
                    "behind by over 0.5 %": sum(gap > 0.5 for gap in gaps.values()),
                    "mean difference, %": statistics.mean(gaps.values()),
                    "worst, %": gaps[worst],
                    "of": worst,
                }
            )
        return table(rows)

    def clients(self, federation: str) -> str:
        """Return each client's perplexity by row, mean over seeds."""
        rows = []
        for row in (r for r in self.rows if r in self.losses[federation]):
            losses = self.losses[federation][row]
            line: dict[str, Any] = {"row": row, "mean": self.mean(federation, row)}
            for i in dict.fromkeys(i for _, i in losses):
                line[i] = statistics.mean(math.exp(v) for (_, j), v in losses.items() if j == i)
            rows.append(line | {"seeds": len({seed for seed, _ in losses})})
        return table(rows)


def costs(lines: Sequence[Line], parts: Mapping[str, Sequence[str]]) -> str:
    """Return what rows of one run cost, those of several models as the sum of their parts."""
    by_row, rows = {line["row"]: line for line in lines}, []
    for row, line in by_row.items():
        of = [by_row[part] for part in parts[row]]
        rows.append(
            {
                "row": row,
                "test perplexity": mean_perplexity(line),
                "MB sent": sum(part["bytes_up"] for part in of) / 1e6,
                "parameters of a prediction": sum(part["active"] for part in of),
                "seconds of training": sum(part["cpu_s"] for part in of),
            }
        )
    return table(rows)


def mean_perplexity(line: Line) -> float:
    """Return the mean test perplexity over clients."""
    return statistics.mean(math.exp(test) for _, test in line["clients"].values())
