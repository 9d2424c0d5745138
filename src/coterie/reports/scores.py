"""Scores and costs on a page, and what clients' models are made of, where a method mixes the
predictions of its parts.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coterie.core.metrics import best as best_of
from coterie.core.metrics import better, change, mean, prediction, sort_key
from coterie.core.metrics import worst as worst_of
from coterie.core.result import Result, Row
from coterie.core.result.rows import BOUNDS, NAMED
from coterie.methods import METHODS
from coterie.reports import marks
from coterie.reports.parts import (
    BESIDE,
    FEW,
    MANY,
    Cell,
    bars,
    by_columns,
    escape,
    figure,
    folded,
    plus_minus,
    ranked,
    size,
    table,
    thinned,
    tiles,
    unseen,
)

QUANTILES = {"best": 0.0, "10 %": 0.1, "25 %": 0.25, "median": 0.5}
QUANTILES |= {"75 %": 0.75, "90 %": 0.9, "worst": 1.0}  # the share of clients that do better
COSTS = (
    "<p>Per client. Bytes count the tensors in training messages. A client's state is what it "
    "keeps between rounds: its own parameters, the moments of its optimisers, and counters.</p>"
)
PEAK = (
    "<p class=note>Peak memory is the largest resident size of the whole process up to the end "
    "of the row: Python, its libraries, the base model and all clients. Rows run one after the "
    "other in one process, so a row's figure is never below that of one that ran before it.</p>"
)


def _spread(rows: Sequence[Row], results: Sequence[Result]) -> list[str]:
    """Return an explanation, and strips of all clients or of each group, with one range."""
    clients = results[-1].clients if results else {}
    of_group = {i: client.group or "" for i, client in clients.items()}
    strips: dict[str, marks.Strip] = {}
    for group in rows[0].groups or [""]:
        shown = [i for i in rows[0].clients if of_group.get(i, "") == group]
        strips[group] = {
            _title(r): (_dots(r, shown), r.mean_of(group), r.std_of(group)) for r in rows
        }
    limits = marks.reach(strips.values())
    parts = [
        "<p>Each dot is a client's mean over seeds; the bar is the mean of all clients, the "
        "whisker its standard deviation over seeds.</p>"
    ]
    if len(rows[0].clients) > MANY:
        parts.append(
            f"<p class=note>Of more than {MANY} clients, {MANY} are shown for each method, evenly "
            f"from the best to the worst.</p>"
        )
    for group, strip in strips.items():
        parts += [f"<h3>{escape(unseen(group))}</h3>"] * bool(group)
        parts.append(marks.strip(strip, str(rows[0].metric), limits))
    return parts


def _dots(row: Row, clients: Sequence[str]) -> dict[str, float]:
    """Return the scores of clients; of many clients, only those at even quantiles."""
    order = sorted(clients, key=lambda i: row.clients[i]) if len(clients) > MANY else clients
    return {i: row.clients[i] for i in thinned(order, MANY)}


def _title(row: Row) -> str:
    return METHODS[row.method].title


def _headline(rows: Sequence[Row], result: Result) -> str:
    """Return the most important figures of the run's own method, whose result is `result`."""
    own_row, metric = rows[-1], rows[-1].metric
    unit = " %" if metric.unit == "%" else ""
    groups = own_row.groups or {"": own_row.mean}
    figures = [
        (f"{figure(x)}{unit}", f"mean {metric.name}{f' of {unseen(g)}' if g else ''}, one seed")
        for g, x in groups.items()
    ]
    others = [r for r in rows[:-1] if r.method not in BOUNDS]
    figures += [_against(own_row, others, group) for group in groups] if others else []
    if (privacy := own_row.privacy) and privacy.epsilon is not None:
        of = ", of an experiment," if privacy.experiment else ""
        about = f"epsilon{of} at delta {privacy.delta:.2g}, {privacy.where}"
        figures.append((f"{privacy.epsilon:.2f}", about))
    for group, choices in result.gates.items():
        if (gate := choices.gate_accuracy) is not None:
            about = "samples given to an expert whose anchor has their class"
            figures.append((f"{gate:.1f} %", f"gate accuracy of {unseen(group)}: {about}"))
    if own_row.improved is not None:
        figures.append((f"{own_row.improved:.0f} %", "of clients do better than alone"))
    if (error := own_row.weights_error) is not None:
        figures.append((f"{error:.2f}", "W error: share of wrong collaboration weights"))
    figures.append((size(own_row.bytes_up_per_round), "up per client and round"))
    if own_row.state_bytes is not None:
        figures.append((size(own_row.state_bytes), "state of a client"))
    return tiles(figures)


def _against(own_row: Row, others: Sequence[Row], group: str) -> tuple[str, str]:
    """Return how far a row is from the best other one for a group ("": all), and a text on it."""
    metric = own_row.metric
    other = min(others, key=lambda r: sort_key(r.mean_of(group), metric))
    ours, theirs = own_row.mean_of(group), other.mean_of(group)
    far, counted = change(ours, theirs, metric)
    way = "better than" if better(ours, theirs, metric) else "WORSE than" if far else "from"
    whose, unit = f" of {unseen(group)}" if group else "", " %" if metric.unit == "%" else ""
    return (
        f"{abs(far):.1f} {counted}",
        f"{way} {_title(other)}, the best other row{whose}: from {figure(theirs)} to "
        f"{figure(ours)}{unit}",
    )


def _scores(rows: Sequence[Row]) -> str:
    """Return figures over all clients, then a column per client; of many, the best and worst."""
    clients, metric = list(rows[-1].clients), rows[0].metric
    first, *others = rows[0].groups or [""]
    columns: dict[str, Sequence[Cell | str]] = {"method": [_title(r) for r in rows]}
    for group in (first, *others):
        summaries = [
            (r.mean_of(group), r.std_of(group) if len(r.per_seed) > 1 else None) for r in rows
        ]
        texts = [plus_minus(mean, std) for mean, std in summaries]
        name = unseen(group) if group else "mean"
        columns[name] = ranked([mean for mean, _ in summaries], metric, texts=texts)
    if first:
        columns |= _of_unseen(rows)
    elif not rows[0].kept_rounds:
        columns["synced"] = ranked([r.mean_synced for r in rows], metric)
    for beside in BESIDE:
        if beside.known(rows):
            way = replace(metric, lower_is_better=beside.lower_is_better)
            columns[beside.name] = ranked(list(map(beside.of, rows)), way, beside.digits)
    if len(columns) - 3 + len(clients) <= FEW:
        return by_columns(
            columns | {i: ranked([r.clients[i] for r in rows], metric) for i in clients}
        )
    for name, end in {"best client": best_of, "worst client": worst_of}.items():
        columns[name] = ranked([end(r.clients.values(), metric) for r in rows], metric)
    if len(clients) > MANY:
        return by_columns(columns) + _quantiles(rows)
    everyone = table(
        ["client", *map(_title, rows)],
        [[i, *(figure(r.clients[i]) for r in rows)] for i in clients],
    )
    return by_columns(columns) + folded(f"All {len(clients)} clients", everyone)


def _quantiles(rows: Sequence[Row]) -> str:
    """Return quantiles of the metric over clients, the mean of the worst tenth, and the worst."""
    metric, own_row = rows[0].metric, rows[-1]
    columns: dict[str, list[float]] = {}
    for row in rows:
        values = sorted(row.clients.values(), key=lambda value: sort_key(value, metric))
        last, tenth = len(values) - 1, -(-len(values) // 10)
        quantiles = [values[round(share * last)] for share in QUANTILES.values()]
        columns[_title(row)] = [*quantiles, mean(values[-tenth:])]
    names = [*QUANTILES, "mean of the worst tenth"]
    lines = [[name, *(figure(v[k]) for v in columns.values())] for k, name in enumerate(names)]
    last_ones = sorted(own_row.clients, key=lambda i: sort_key(own_row.clients[i], metric))[-NAMED:]
    worst = ", ".join(f"{i} {figure(own_row.clients[i])}" for i in reversed(last_ones))
    return (
        f"<h3>Over {len(own_row.clients):,} clients, from the best to the worst</h3>"
        f"{table(['clients', *columns], lines)}"
        f"<p class=note>Worst with {escape(_title(own_row))}: {escape(worst)}. Every client's "
        f"score is in result.json.</p>"
    )


def _kept(rows: Sequence[Row]) -> str:
    """Return the round of each client's model, if validation chose it; "" if all keep the last."""
    if not rows[-1].kept_rounds:
        return ""
    clients = list(rows[-1].clients)
    kept = {_title(row): row.kept_rounds or {} for row in rows}
    if len(clients) > MANY:
        counts = [Counter(of_method.values()) for of_method in kept.values()]
        rounds = sorted({at for count in counts for at in count})
        lines = [[f"{at:g}", *(f"{count[at]:,}" for count in counts)] for at in rounds]
        return folded("How many clients kept each round", table(["round", *kept], lines))
    lines = [[i, *(f"{of_method.get(i, 0):g}" for of_method in kept.values())] for i in clients]
    several = ", mean over seeds" if len(rows[-1].per_seed) > 1 else ""
    return folded(f"Round that each client kept{several}", table(["client", *kept], lines))


def _words(results: Sequence[Result]) -> str:
    """Return what a keyboard with its model is worth to each client; "" if it was not measured."""
    lines = []
    for i in results[-1].clients if results else ():
        for result in results:
            if i in result.clients and (words := result.clients[i].words) is not None:
                shares = words.first, words.first_three, words.keystrokes_saved
                figures = (f"{share:.1f}" for share in shares)
                lines.append([i, METHODS[result.method].title, *figures, f"{words.words:.0f}"])
    header = ["client", "method", "first word, %", "first three, %", "keystrokes saved, %", "words"]
    return folded("Words foreseen, by client", table(header, lines)) if lines else ""


def _of_unseen(rows: Sequence[Row]) -> dict[str, Sequence[Cell | str]]:
    """Return the columns on the first group of unseen clients."""
    metric = rows[0].metric
    share = replace(metric, lower_is_better=False)
    columns = {
        "best": ([r.best for r in rows], metric, 2),
        "best of last ten": ([r.best_of_last_ten for r in rows], metric, 2),
        "gate, %": ([r.gate_accuracy for r in rows], share, 1),
    }
    return {
        name: ranked(values, way, digits)
        for name, (values, way, digits) in columns.items()
        if any(value is not None for value in values)
    }


def _costs(rows: Sequence[Row], results: Sequence[Result]) -> str:
    what = prediction(rows[0].metric)
    served = {r.method: mean(c.bytes_down for c in r.clients.values()) for r in results if r.groups}
    once = bars([served.get(r.method) for r in rows], ",.1f", 1000)
    unseen_clients = {"kB to an unseen client, once": once} if served else {}
    columns: dict[str, Sequence[Cell | str]] = {
        "method": [_title(r) for r in rows],
        "trainable parameters": bars([r.trainable_parameters for r in rows], ",.0f"),
        f"of these active per {what}": bars([r.active_parameters for r in rows], ",.0f"),
        f"MFLOPs per {what}, forward": bars([r.flops_per_token for r in rows], ",.2f", 1e6),
        "kB up per round": bars([r.bytes_up_per_round for r in rows], ",.1f", 1000),
        "kB down per round": bars([r.bytes_down_per_round for r in rows], ",.1f", 1000),
        **unseen_clients,
        "kB state of a client": bars([r.state_bytes for r in rows], ",.1f", 1000),
        "MB peak of the process": bars([r.peak_memory_bytes for r in rows], ",.0f", 1e6),
        "seconds, all clients": bars([r.wall_s for r in rows], ",.0f"),
    }
    return by_columns(columns)


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
