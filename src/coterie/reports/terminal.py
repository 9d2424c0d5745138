"""What a terminal shows: progress while a run goes on, and tables at its end. Plain lines where there is no terminal."""

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from coterie.evaluation import best, label, metric_of, prediction, worst
from coterie.reports.parts import rounded, size, unseen
from coterie.reports.reporter import Reporter

EVERY = 2.0  # seconds between plain lines of progress of a kind
W_ERROR = "W\u00a0error"  # which stays on one line
FEW = 8  # clients that a table has a column for, if it has room for all of them


def loss_of(metrics: Mapping[str, Any]) -> float | None:
    """The training loss among a client's metrics: that of the step which is not the router's alone."""
    return next((value for name, value in metrics.items() if name.startswith("loss/") and name != "loss/router"), None)


class Terminal(Reporter, AbstractContextManager["Terminal"]):
    """Rounds, clients, loss, predictions per second and time left: a live display, or a line a round, but one every `EVERY` seconds.

    Args:
        console: Where to.
        rows: How many methods will run, for the heading of each.
    """

    def __init__(self, console: Console, rows: int) -> None:
        self.console, self.rows, self.row = console, rows, 0
        self.live = console.is_terminal
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("round {task.fields[round]}/{task.fields[rounds]}  {task.fields[status]}"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            disable=not self.live,
        )

    def __enter__(self) -> "Terminal":
        self.progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.progress.stop()

    def begin(self, title: str, rounds: int, done: int, clients: Sequence[str], metric: Mapping[str, Any] | None = None) -> None:
        self.row += 1
        self.title, self.rounds, self.clients = title, rounds, clients
        self.metric = metric_of({"metric": metric})
        self.heading = f"[{self.row}/{self.rows}] {title}" if self.rows > 1 else title
        self.first, self.started, self.tokens = done, time.monotonic(), 0
        self.said = dict.fromkeys(("round", "score"), self.started)  # when the last line of each kind was
        self.losses: dict[str, float] = {}
        self.privacy = ""
        self.task = self.progress.add_task(
            self._escape(self.heading),
            total=max(rounds, 1) * len(clients),
            completed=done * len(clients),
            round=done,
            rounds=rounds,
            status="",
        )
        if not self.live:
            resumed = f", going on after round {done}" if done else ""
            self.console.print(f"{self.heading}: {rounds} rounds, {len(clients)} clients{resumed}", markup=False)

    @staticmethod
    def _escape(text: str) -> str:
        return text.replace("[", r"\[")

    def client(self, round: int, client: str, metrics: Mapping[str, Any]) -> None:
        self.tokens += int(metrics.get("tokens", 0))
        if (loss := loss_of(metrics)) is not None:
            self.losses[client] = loss
        if client in self.clients:
            self.progress.advance(self.task)
        self.progress.update(self.task, status=self._status(client))

    def _status(self, note: str = "") -> str:
        speed = self.tokens / max(time.monotonic() - self.started, 1e-9)
        loss = f"loss {sum(self.losses.values()) / len(self.losses):.3f}  " if self.losses else ""
        return f"{loss}{self.privacy}{speed:,.0f} {prediction(self.metric)}s/s  {note}".rstrip()

    def spent(self, round: int, epsilon: float, delta: float) -> None:
        self.privacy = f"epsilon {epsilon:.2f} at delta {delta:.1g}  "

    def warning(self, round: int, client: str, text: str) -> None:
        self.progress.console.print(f"  round {round + 1}, {client}: {text}", markup=False, highlight=False, style="yellow")

    def evaluating(self, round: int) -> None:
        self.progress.update(self.task, status=self._status("scoring"))

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        if self._speaks("score", round):
            name = self.metric["name"].removeprefix("test ")
            scores = ", ".join(f"{split} {name} {value:.2f}{self._unit}" for split, value in means.items())
            self.console.print(f"  after round {round}: {scores}", markup=False)

    def round(self, done: int) -> None:
        self.progress.update(self.task, round=done, completed=done * len(self.clients), status=self._status())
        if self._speaks("round", done):
            left = (time.monotonic() - self.started) / (done - self.first) * (self.rounds - done)
            self.console.print(f"  round {done}/{self.rounds}  {self._status()}  {_clock(left)} left", markup=False, highlight=False)

    def _speaks(self, kind: str, done: int) -> bool:
        """Whether a plain line of a kind is due: the last of a method is, and any other a while after the one before."""
        now = time.monotonic()
        due = not self.live and (done == self.rounds or now - self.said[kind] >= EVERY)
        if due:
            self.said[kind] = now
        return due

    @property
    def _unit(self) -> str:
        return " %" if self.metric["unit"] == "%" else ""

    def end(self, result: Mapping[str, Any]) -> None:
        status = f"{self.metric['name']} {result['mean']:.2f}{self._unit}"
        self.progress.update(self.task, completed=max(self.rounds, 1) * len(self.clients), status=status, refresh=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def verdicts(console: Console, items: Iterable[tuple[bool, str, str]]) -> None:
    """Print sentences that were checked: whether each holds, the sentence, and the numbers behind the verdict."""
    for holds, says, detail in items:
        console.print(Text.assemble(("holds  " if holds else "does not hold  ", "green" if holds else "yellow"), says))
        console.print(Padding(Text(detail, style="dim"), (0, 0, 0, 4)))


def tables(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], width: int = 80) -> list[Table]:
    """What fits a terminal: the test metric by method and client, what is known beside it, and what each method cost.

    Of more than eight clients, or of those that the terminal has no room for, only the best and the worst are shown.

    Args:
        rows: As in comparison.json.
        titles: Of the methods.
        width: Of the terminal, in characters.
    """
    scores = _groups(rows, titles) if rows[0].get("groups") else _scores(rows, titles, width)
    return [scores, _beside(rows, titles), _costs(rows, titles)]


def _scores(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str], width: int) -> Table:
    metric, clients = metric_of(rows[0]), list(rows[0]["clients"])
    top = best((row["mean"] for row in rows), metric)
    lines = []
    for row in rows:
        spread = f" ± {row['std']:.2f}" if len(row["per_seed"]) > 1 else ""
        values = [row["clients"][i] for i in clients]
        ends = best(values, metric), worst(values, metric)
        lines.append([[titles[row["method"]], f"{row['mean']:.2f}{spread}"], values, ends, [f"{row['mean_synced']:.2f}"]])
    few = len(clients) <= FEW and _needed(_lines(lines, 1)) <= width
    shown = _plain(label(metric), ("method", "mean", *(clients if few else ("best client", "worst client")), "synced"))
    for row, line in zip(rows, _lines(lines, 1 if few else 2), strict=True):
        shown.add_row(*line, style="bold" if row["mean"] == top else "")
    _keep_whole(shown)
    return shown


def _groups(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    """The test metric of each group of unseen clients, and what was best of the first one during training."""
    metric, (first, *others) = metric_of(rows[0]), rows[0]["groups"]
    top, gated = best((row["mean"] for row in rows), metric), any(row.get("gate_accuracy") is not None for row in rows)
    title = f"{label(metric)}; best and best of last ten evaluations: of {first}, chosen on the test set" + "; gate accuracy" * gated
    names = *(unseen(g).replace(" ", "\n") for g in (first, *others)), "best", "best of\nlast ten"
    shown = _plain(title, ("method", *names, *("gate %",) * gated))
    for row in rows:
        spread = f" ± {row['std']:.2f}" if len(row["per_seed"]) > 1 else ""
        values = [f"{row[key]:.2f}" for key in ("best", "best_of_last_ten")]
        gate = ["" if row["gate_accuracy"] is None else f"{row['gate_accuracy']:.1f}"] * gated
        cells = [f"{row['mean']:.2f}{spread}", *(f"{row['groups'][g]:.2f}" for g in others), *values, *gate]
        shown.add_row(titles[row["method"]], *cells, style="bold" if row["mean"] == top else "")
    _keep_whole(shown)
    return shown


def _lines(lines: Sequence[Sequence[Any]], chosen: int) -> list[list[str]]:
    """Name and mean, the chosen ones of the clients' values, and what is behind them."""
    return [[*line[0], *(f"{value:.2f}" for value in line[chosen]), *line[3]] for line in lines]


def _needed(lines: Sequence[Sequence[str]]) -> int:
    """Characters that a table without its header takes: three between columns, and one at the end."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return sum(widths) + 3 * (len(widths) - 1) + 1


def _keep_whole(table: Table) -> None:
    """Let headers wrap, but not figures."""
    for column in table.columns:
        column.min_width = max(len(str(cell)) for cell in column.cells if cell is not column.header)


def _beside(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    """What the metric does not tell: loss, how unlike the clients fare, how many gain, and how wrong collaboration weights are."""
    kinds = {
        "loss": ("loss", ".3f"),
        "between_clients": ("± between clients", ".2f"),
        "improved": ("Imp.%", ".0f"),
        "weights_error": (W_ERROR, ".2f"),
    }
    known = {key: kind for key, kind in kinds.items() if any(row.get(key) is not None for row in rows)}
    about = {
        "loss": "mean test loss in nats",
        "between_clients": "standard deviation over clients",
        "improved": "Imp.%: clients that do better than alone",
        "weights_error": f"{W_ERROR}: wrong collaboration weights",
    }
    shown = _plain("; ".join(about[key] for key in known), ("method", *(name for name, _ in known.values())))
    for row in rows:
        cells = ("" if row.get(key) is None else format(row[key], form) for key, (_, form) in known.items())
        shown.add_row(titles[row["method"]], *cells)
    return shown


def _costs(rows: Sequence[Mapping[str, Any]], titles: Mapping[str, str]) -> Table:
    what = prediction(metric_of(rows[0]))
    once = f"; common expert, once: {size(rows[0]['once_bytes'])}" if rows[0].get("once_bytes") else ""
    shown = _plain(
        f"cost per client: parameters trained, and active per {what}; work of a forward pass; seconds of all clients{once}",
        ("method", "parameters", "active", f"MFLOPs /{what}", "kB up /round", "kB down /round", "s"),
    )
    for row in rows:
        kilobytes = (rounded(row[key] / 1000, ",.0f") for key in ("bytes_up_per_round", "bytes_down_per_round"))
        parameters, work = f"{row['trainable_parameters']:,}", rounded(row["flops_per_token"] / 1e6, ",.2f")
        active = "" if row["active_parameters"] is None else f"{row['active_parameters']:,}"
        shown.add_row(titles[row["method"]], parameters, active, work, *kilobytes, f"{row['wall_s']:.0f}")
    return shown


def _plain(title: str, header: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for k, name in enumerate(header):
        shown.add_column(name, justify="right" if k else "left", no_wrap=k <= 2, overflow="fold", min_width=3)
    return shown
