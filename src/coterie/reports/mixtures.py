"""What clients' models are made of, where a method mixes the predictions of its parts."""

from collections.abc import Mapping, Sequence

from coterie.core.metrics import mean
from coterie.core.result import Result
from coterie.methods import METHODS
from coterie.reports.parts import Cell, ranked

WHOSE = {"local": "its own", "fedavg": "everybody's"}  # models of parts in words


def made_of(weights: Mapping[str, float]) -> str:
    """Return what a model is made of: `59 % its own, 41 % everybody's`, or `its own alone`."""
    named = {WHOSE.get(name) or METHODS[name].title: w for name, w in weights.items() if w}
    shares = (f"{min(max(100 * w, 1), 99):.0f} % {whose}" for whose, w in named.items())
    return f"{next(iter(named))} alone" if len(named) == 1 else ", ".join(shares)


def mixtures(results: Sequence[Result]) -> dict[str, tuple[list[str], list[list[Cell]]]]:
    """Return of each result with parts, by a sentence on all its clients, a header and a line for
    each client: what its model is made of, the test metric of each part alone, and its own.
    """
    tables = {}
    for result in results:
        parts = {i: client.parts for i, client in result.clients.items() if client.parts}
        lines, weights = [], dict[str, list[float]]()
        for i, of in parts.items():
            for name, part in of.items():
                weights.setdefault(name, []).append(part.weight or 0.0)
            words = made_of({name: of_all[-1] for name, of_all in weights.items()})
            scores = [*(part.test for part in of.values()), result.clients[i].test]
            lines.append([Cell(f"{i}: {words}"), *ranked(scores, result.metric)])
        if lines:
            whole = made_of({name: mean(of_all) for name, of_all in weights.items()})
            title = f"{METHODS[result.method].title}, on average: {whole}."
            header = ["client, made of", *(METHODS[name].title for name in weights), "mixed"]
            tables[title] = header, lines
    return tables
