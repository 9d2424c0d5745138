"""The rows of a comparison, one method's results over seeds each, and how rows are unlike."""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from coterie.core.metrics import better, deviation, mean, prediction
from coterie.core.result import PrivacySpent, Result, Row, WordScores

BOUNDS = {
    "centralized": "one model trained on the data of all clients: a bound, not a private method",
    "oracle": "is given the true clusters, which are unknown in practice: a bound",
}
ALONE = "local"  # the method that Imp.% compares with
NAMED = 8  # clients in a sentence, at most


def improved(results: Sequence[Result], alone: Sequence[Result]) -> float | None:
    """Return Imp.%: the share of clients that do better than in Local's run of the same seed (CoBo,
    Table 2), over clients and seeds; None if Local lacks a seed, and for Local itself.
    """
    local = {result.seed: result.clients for result in alone}
    if any(result.seed not in local or result.method == ALONE for result in results):
        return None
    both = [(r, i) for r in results for i in r.clients.keys() & local[r.seed].keys()]
    wins = [better(r.clients[i].test, local[r.seed][i].test, r.metric) for r, i in both]
    return 100 * mean(wins)


def between(result: Result) -> float:
    """Return the standard deviation of the test metric over a result's clients."""
    values = [client.test for client in result.headline.values()]
    return statistics.pstdev(values) if all(map(math.isfinite, values)) else math.inf


def row(name: str, results: Sequence[Result], alone: Sequence[Result] = ()) -> Row:
    """Return one method's row of a comparison: means and deviations over seeds, and costs. Figures
    that a result lacks (of an older version) are None; Imp.% compares with `alone`, Local's
    results.
    """
    first, per_seed = results[0], [r.mean for r in results]
    of_groups = {g: [(r.groups or {})[g] for r in results] for g in first.groups or {}}
    of_clients = {i: [r.clients[i].test for r in results if i in r.clients] for i in first.clients}
    costs = [c for r in results for c in (r.training or r.clients).values()]
    rounds = mean(max(r.rounds, 1) for r in results for _ in r.training or r.clients)
    spread = {i: deviation(values) for i, values in of_clients.items()}
    headline = [client for r in results for client in r.headline.values()]
    words = _means(vars(client.words) for client in headline if client.words)
    spent = [r.privacy for r in results if r.privacy]
    absentees = [None if (i := r.never_took_part) is None else len(i) for r in results]
    return Row(
        method=name,
        metric=first.metric,
        mean=mean(per_seed),
        std=deviation(per_seed),
        per_seed=per_seed,
        mean_synced=mean(r.mean_synced for r in results),
        kept_rounds=_kept_rounds(results),
        groups={group: mean(values) for group, values in of_groups.items()} or None,
        groups_std={group: deviation(values) for group, values in of_groups.items()} or None,
        best=_average([r.best for r in results]),
        best_of_last_ten=_average([r.best_of_last_ten for r in results]),
        gate_accuracy=_average([r.gate_accuracy for r in results]),
        loss=_average([r.mean_loss for r in results]),
        words=WordScores(**words) if words else None,
        answers=_means(client.answers for client in headline) or None,
        predictions=_predictions(first),
        between_clients=mean(map(between, results)),
        improved=improved(results, alone) if alone else None,
        weights_error=_average([r.weights_error for r in results]),
        iterations=first.evaluations[-1].iteration if first.evaluations else None,
        clients={i: mean(values) for i, values in of_clients.items()},
        clients_std=spread if len(results) > 1 else None,
        trainable_parameters=round(mean(c.trainable_parameters for c in costs)),
        active_parameters=_known([c.active_parameters for c in costs]),
        flops_per_token=round(mean(c.flops_per_token for c in costs)),
        bytes_up_per_round=round(mean(c.bytes_up for c in costs) / rounds),
        bytes_down_per_round=round(mean(c.bytes_down for c in costs) / rounds),
        state_bytes=_known([c.state_bytes for c in costs]),
        once_bytes=_known([r.once_bytes for r in results]),
        peak_memory_bytes=_known([r.peak_memory_bytes for r in results]),
        wall_s=mean(r.wall_s for r in results),
        part_of=first.part_of,
        lost=dict(sorted(sum((Counter(r.lost) for r in results), Counter[str]()).items())),
        never_took_part=_known(absentees),
        privacy=max(spent, key=_epsilon, default=None),  # seeds may end at different rounds
        drawn_of=first.drawn_of,
    )


def _means(scores: Iterable[Mapping[str, float] | None]) -> dict[str, float]:
    """Return the means by name over the clients and seeds that have any; {} without."""
    known = [each for each in scores if each]
    return {name: mean(each[name] for each in known) for name in known[0]} if known else {}


def _kept_rounds(results: Sequence[Result]) -> dict[str, float] | None:
    """Return each client's mean kept round over seeds; None if it has the last round's model."""
    rounds_of: dict[str, list[int]] = {}
    for i, client in (item for r in results for item in r.clients.items()):
        if client.kept_round is not None:
            rounds_of.setdefault(i, []).append(client.kept_round)
    return {i: mean(rounds) for i, rounds in rounds_of.items()} or None


def rows(results: Sequence[Result]) -> list[Row]:
    """Return the rows of several methods, in the order of their first results, with Imp.% if Local
    is among them. Clients that some run could not reach to score have no column.
    """
    by_method: dict[str, list[Result]] = {}
    for result in results:
        by_method.setdefault(result.method, []).append(result)
    alone = by_method.get(ALONE, ())
    lines = [row(name, of_method, alone) for name, of_method in by_method.items()]
    everybody = results[0].clients if results else ()
    common = [i for i in everybody if all(i in result.clients for result in results)]
    return [replace(line, clients={i: line.clients[i] for i in common}) for line in lines]


def _predictions(result: Result) -> int | None:
    counts = [client.predictions for client in result.headline.values()]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def reading(row: Row) -> str:
    """Return sentences on which models the scores of a table's rows are of, and on how much."""
    if row.predictions is None:
        return _models(row)
    return f"{_models(row)} On {row.predictions:,} test {prediction(row.metric)}s of all clients."


def _models(row: Row) -> str:
    """Return a sentence on which models the scores of a table's rows are of."""
    if row.groups:
        return "Clients that took no part in training, with the model that the server gives them."
    if row.kept_rounds:
        best = "Each client's best round by its own validation data (keep: best)"
        return f"{best}, the untrained start included."
    model = "each client's model right after its last local iteration"
    return f"After the last round (keep: last): {model}; synced: after one more synchronisation."


def comparability(
    rows: Sequence[Row], own_method: str | None = None, titles: Mapping[str, str] | None = None
) -> list[str]:
    """Return sentences on what a reader of a table must know: bounds, lost replies, privacy, and
    budgets that differ by more than 5 % in parameters or 10 % in work from those of `own_method`,
    or if it is missing, of the first row that trains. Methods are called by `titles`, or their
    names.
    """
    called = {r.method: r.method for r in rows} | dict(titles or {})
    trained = [r for r in rows if r.trainable_parameters]
    references = [r for r in trained if r.method == own_method] + trained
    # a part costs less than the whole
    against = [r for r in trained if r.part_of != references[0].method]
    sentences = [sentence for r in against for sentence in _budget(r, references[0], called)]
    sentences += [
        drawn(*pair) for pair in sorted({(len(r.clients), r.drawn_of) for r in rows if r.drawn_of})
    ]
    sentences += [f"{called[r.method]}: {lost(r.lost)}" for r in rows if r.lost]
    sentences += [
        f"{called[r.method]}: {absent(r.never_took_part)}" for r in rows if r.never_took_part
    ]
    spent: dict[str, list[str]] = {}  # rows alike share a sentence
    for r in rows:
        if r.part_of:
            whole = called.get(r.part_of, r.part_of)
            once = f"trained as a part of {whole}, once, which costs what its parts cost together"
            text = f"{once}; their seconds are equal shares."
            spent.setdefault(text, []).append(called[r.method])
        if r.privacy:
            spent.setdefault(protected(r.privacy), []).append(called[r.method])
    return sentences + [f"{', '.join(names)}: {sentence}" for sentence, names in spent.items()]


def _budget(row: Row, reference: Row, called: Mapping[str, str]) -> list[str]:
    """Return sentences on how a row's budget differs from a reference, and on a bound."""
    kinds: Sequence[tuple[Callable[[Row], int | None], str, float]] = (
        (lambda r: r.trainable_parameters, "trainable parameters", 0.05),
        (lambda r: r.active_parameters, "active parameters", 0.05),
        (lambda r: r.flops_per_token, f"work per {prediction(row.metric)}", 0.1),
        (lambda r: r.iterations, "local iterations", 0.1),
    )
    name, other, unlike, sentences = called[row.method], called[reference.method], [], []
    for value, what, limit in kinds:
        ours, theirs = value(row), value(reference)
        if ours and theirs and abs(share := ours / theirs - 1) > limit:
            unlike.append(f"{share:+.0%} {what}")
    if unlike:
        sentences.append(f"{name}: {', '.join(unlike)} against {other}: the budgets differ.")
    if row.method in BOUNDS:
        sentences.append(f"{name}: {BOUNDS[row.method]}.")
    return sentences


def lost(counts: Mapping[str, int]) -> str:
    """Return a sentence on lost replies that names the clients which lost the most."""
    total, most = sum(counts.values()), sorted(counts, key=lambda i: -counts[i])[:NAMED]
    named = ", ".join(f"{i} {counts[i]}" for i in most) + (
        f" and {len(counts) - NAMED} other clients" if len(counts) > NAMED else ""
    )
    replies = "1 reply was" if total == 1 else f"{total:,} replies were"
    how = f"{replies} lost, rejected as invalid or missing ({named})"
    return f"{how}. See the lines of kind lost in metrics.jsonl."


def drawn(scored: int, of: int) -> str:
    """Return a sentence on scoring only some clients."""
    who = f"{scored:,} of {of:,} clients, drawn once from the seed"
    return f"Scores and personal models are of {who}; costs are of all that train."


def absent(clients: int) -> str:
    """Return a sentence on clients that took part in no round."""
    who = "1 client" if clients == 1 else f"{clients:,} clients"
    score = "a score of theirs is that of the model that the server would give them"
    return f"{who} never took part in a round; {score}."


def protected(privacy: PrivacySpent) -> str:
    """Return a sentence on the privacy spent: how much, how it was computed, and what it covers."""
    epsilon = "no finite epsilon (no protection)"
    if privacy.epsilon is not None:
        epsilon = f"epsilon {privacy.epsilon:.2f}"
    given = f"{epsilon}, delta {privacy.delta:.2g} ({privacy.where}, noise z = {privacy.noise:g}"
    assumed = f" It assumes: {privacy.assumes}." if privacy.assumes is not None else ""
    clip = f"clip C = {privacy.clip:g}): {privacy.sampling}. It covers {privacy.covers}."
    return f"{given}, {clip}{assumed}"


def _epsilon(privacy: PrivacySpent) -> float:
    return math.inf if privacy.epsilon is None else privacy.epsilon


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _known(values: Sequence[int | None]) -> int | None:
    average = _average(values)
    return None if average is None else round(average)
