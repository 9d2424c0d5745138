"""A run's progress in a terminal."""

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.text import Text

from coterie.core.callback import Callback
from coterie.core.metrics import PERPLEXITY, prediction
from coterie.core.printing import printable
from coterie.core.result import MetricInfo, Result
from coterie.data.refusals import SHOWN
from coterie.reports.pace import RoundTimer
from coterie.reports.tables import clock

EVERY = 2.0  # seconds between plain lines of progress of a kind
# seconds after which a plain line says how far a round, the scoring or the preparation has come
SILENCE = 30.0
PREPARING = "loading base and data"
BROAD = 100  # characters of a terminal that has room for a bar


def loss_of(metrics: Mapping[str, Any]) -> float | None:
    """Return a client's training loss: that of the step that does not train the router alone."""
    losses = {name: value for name, value in metrics.items() if name.startswith("loss/")}
    losses.pop("loss/router", None)
    return next(iter(losses.values()), None)


class _Time(ProgressColumn):
    """The time left, or that a task took: of a method's rounds, and of its last scores."""

    max_refresh = 0.5

    def render(self, task: Task) -> Text:
        return Text(
            f"in {clock(task.finished_time or 0)}" if task.finished else task.fields["left"](),
            style="cyan",
        )


class Terminal(Callback, AbstractContextManager["Terminal"]):
    """A live display, or plain lines, of rounds, clients, loss, predictions per second of training
    and time left (see `RoundTimer`). `rows` is the number of methods that will run. A
    plain line appears after each round, but at most one every `EVERY` seconds; after `SILENCE`
    seconds without a line, another one states the progress.
    """

    def __init__(self, console: Console, rows: int) -> None:
        self.console, self.rows, self.row = console, rows, 0
        # a notebook shows a display by its widgets, where it has them
        self.live = console.is_terminal or (
            console.is_jupyter and find_spec("ipywidgets") is not None
        )
        # a line that does not fit would wrap, and the display would jump
        self.narrow = self.live and console.width < BROAD
        self.progress = Progress(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=16)] if console.width >= BROAD else []),
            TextColumn("{task.fields[where]}"),
            _Time(),
            TextColumn("{task.fields[status]}"),
            console=console,
            disable=not self.live,
        )
        self.task: TaskID | None = None
        self.stage, self.stretch = "", RoundTimer(0, 0)
        self.trained, self.predictions = 0.0, 0  # seconds of the method's training, without scoring
        self.expected: Sequence[float] = ()  # seconds of each method, by a trial before the first
        # seconds, and expected seconds, of each method done in this session
        self.took: list[tuple[float, float]] = []
        self.losses: dict[str, float] = {}
        self.metric, self.privacy = PERPLEXITY.about, ""
        self.patience = 0  # rounds without progress after which a method may end; 0: it does all
        self.spoke = time.monotonic()  # the time of the last plain line
        self._closing = threading.Event()
        self._watch = threading.Thread(target=self._keep_talking, daemon=True)

    def __enter__(self) -> "Terminal":
        self.progress.start()
        if not self.live:
            self._watch.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._closing.set()
        self._prepared()
        self.progress.stop()

    def _keep_talking(self) -> None:
        while not self._closing.wait(1.0):
            self.beat()

    def beat(self) -> None:
        """Print the progress after a while without a line."""
        if self.live or not self.stage or time.monotonic() - self.spoke < SILENCE:
            return
        stretch = self.stretch
        training = self.stage == "training"
        where = f"round {stretch.done + 1} of {stretch.rounds}" if training else self.stage
        clients = f": {stretch.got} of {stretch.clients} clients" if stretch.clients else ""
        parts = (f"  {where}{clients}", self._figures() if training else "", self._left())
        self._line("  ".join(part for part in parts if part))

    def _print(self, text: str, style: str = "", soft_wrap: bool = False) -> None:
        """Print text above the display as it is."""
        self.progress.console.print(
            text, style=style, markup=False, highlight=False, soft_wrap=soft_wrap
        )

    def _line(self, text: str, style: str = "", soft_wrap: bool = False) -> None:
        """Print a plain line about the progress."""
        self.spoke = time.monotonic()
        self._print(text, style, soft_wrap)

    def chosen(self, text: str) -> None:
        self._line(text, soft_wrap=True)

    def noted(self, notes: Sequence[str]) -> None:
        for note in notes[:SHOWN]:
            self.chosen(note)
        if more := notes[SHOWN:]:
            self.chosen(f"... and {len(more):,} notes more, which coterie data shows")

    def preparing(self) -> None:
        self.stage, self.stretch = PREPARING, RoundTimer(0, 0)
        if self.live:
            self.task = self.progress.add_task(
                self.stage, total=None, where="", status="", left=self._left
            )

    def _prepared(self) -> None:
        """Remove the line about the preparation."""
        if self.live and self.stage == PREPARING and self.task is not None:
            self.progress.remove_task(self.task)
        self.stage = ""

    shows_estimate = True

    def expects(self, seconds: Sequence[float]) -> None:
        self.expected = seconds
        if (whole := sum(seconds)) > 0:
            self._line(f"about {clock(whole)} in all, estimated from a few steps")

    def _left(self) -> str:
        """Return the time left of the current method, if there is room, and of all."""
        rest = sum(self.expected[self.row :])
        if self.stretch.left is None or not rest:
            return str(self.stretch)
        took, expected = (sum(times[k] for times in self.took) for k in (0, 1))
        slower = took / expected if expected else 1.0  # than was expected, so far
        whole = clock(self.stretch.left + rest * slower)
        return f"{whole} left" if self.narrow else f"{self.stretch} (all: {whole})"

    def known(self, title: str) -> None:
        self._prepared()
        self._next(title)
        self._print(f"{self.heading}: already done")

    def _next(self, title: str) -> None:
        self.row += 1
        self.heading = f"[{self.row}/{self.rows}] {title}" if self.rows > 1 else title

    def begin(
        self,
        title: str,
        rounds: int,
        done: int,
        clients: Sequence[str],
        metric: MetricInfo | None = None,
    ) -> None:
        self._prepared()
        self._next(title)
        expected = self.expected[self.row - 1] if self.row <= len(self.expected) else None
        self.metric, self.trained, self.predictions = metric or PERPLEXITY.about, 0.0, 0
        self.stretch = RoundTimer(rounds, done, expected)
        self._enter_round(done)
        # the time of the last line of each kind
        self.last_lines = dict.fromkeys(("round", "score"), self.training_since)
        self.losses, self.privacy = {}, ""
        heading = self.heading.replace("[", r"\[")
        self.task = self.progress.add_task(
            heading, total=rounds + 1, completed=done, where="", status="", left=self._left
        )
        self._show()
        self._announce(rounds, done, len(clients))

    def _enter_round(self, done: int) -> None:
        """Note that training goes on, or has ended, after so many rounds."""
        self.training_since = time.monotonic()
        self.stage = "training" if done < self.stretch.rounds else "finishing"

    def _announce(self, rounds: int, done: int, clients: int) -> None:
        """Print a plain line about a method that starts."""
        if not self.live:
            resumed = f", continuing after round {done}" if done else ""
            most = "at most " if 0 < self.patience < rounds else ""
            number = f"{rounds} round{'s' * (rounds > 1)}"
            trained = f"{most}{number}, {clients} clients{resumed}"
            if done == rounds:
                before = "trained already" if done else "no training"
                trained = f"{before}, {clients} clients to score"
            self._line(f"{self.heading}: {trained}")

    def opened(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        self.patience = (recipe.get("patience") or 0) * recipe.get("evaluate_every", 0)

    def asking(self, task: str, clients: int) -> None:
        self.stretch.ask(clients, self.stage == "training")

    def client(self, round: int, client: str, metrics: Mapping[str, Any]) -> None:
        now = time.monotonic()
        self.trained += now - self.training_since
        self.predictions += int(metrics.get("tokens", 0))
        self.training_since = now
        if (loss := loss_of(metrics)) is not None:
            self.losses[client] = loss
        self.stretch.reply()
        self._show()

    def answered(self, client: str) -> None:
        self.training_since = time.monotonic()
        if self.stage == "training":
            self.stretch.reply()
        else:
            self.stretch.score()
        self._show()

    def _show(self) -> None:
        """Update the live display."""
        if not self.live or self.task is None:
            return
        stretch = self.stretch
        clients = f"{stretch.got}/{stretch.clients} clients" if stretch.clients else ""
        status = self._figures() if self.stage == "training" else self.stage
        status = f"{status}  {clients}"
        where = f"round {stretch.done}/{stretch.rounds}"
        self.progress.update(self.task, completed=stretch.rounds_done, where=where, status=status)

    def _figures(self) -> str:
        """Return loss, privacy and pace in one line."""
        loss = f"loss {sum(self.losses.values()) / len(self.losses):.3f}  " if self.losses else ""
        pace = f"{self.predictions / (self.trained or 1):,.0f} {prediction(self.metric)}s/s"
        return f"{loss}{self.privacy}{pace * (self.trained > 0)}".strip()

    def spent(self, round: int, epsilon: float, delta: float) -> None:
        self.privacy = f"epsilon {epsilon:.2f} at delta {delta:.1g}  "

    def warning(self, round: int, client: str, text: str) -> None:
        self._print(f"  round {round + 1}, {printable(client)}: {printable(text)}", "yellow")

    def unfit(self, title: str, problem: str) -> None:
        self.stage = ""
        self._print(f"  {printable(title)}: lost, {printable(problem)}", "yellow")

    def evaluating(self, round: int) -> None:
        self.stage = "scoring"
        self.stretch.ask(0, training=False)
        self._show()

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        self._enter_round(round)
        self.stretch.ask(0, training=False)
        if self._speaks("score", round):
            name = self.metric.name.removeprefix("test ")
            scores = ", ".join(
                f"{split} {name} {value:.2f}{self._unit}" for split, value in means.items()
            )
            self._line(f"  after round {round}: {scores}")

    def point(self, round: int, test: float, windows: int) -> None:
        self.training_since = time.monotonic()  # training goes on from here
        if self._speaks("point", round):
            what = "windows" if prediction(self.metric) == "token" else "examples"
            self._line(
                f"  after round {round}: {self.metric.name} {test:.2f}{self._unit} on "
                f"{windows} {what} of each client"
            )

    def round(self, done: int) -> None:
        self.stretch.round(done)
        self._enter_round(done)
        self._show()
        if self._speaks("round", done):
            self._line(f"  round {done}/{self.stretch.rounds}  {self._figures()}  {self._left()}")

    def _speaks(self, kind: str, done: int) -> bool:
        """Return whether a plain line is due: a method's last always, others after a while."""
        now = time.monotonic()
        due = not self.live and (
            done == self.stretch.rounds or now - self.last_lines.get(kind, 0.0) >= EVERY
        )
        if due:
            self.last_lines[kind] = now
        return due

    @property
    def _unit(self) -> str:
        return " %" if self.metric.unit == "%" else ""

    def end(self, result: Result) -> None:
        self.stage = ""
        if self.stretch.expected and not self.stretch.resumed:
            self.took.append((self.stretch.elapsed, self.stretch.expected))
        status = f"{self.metric.name} {result.mean:.2f}{self._unit}"
        if self.task is not None:
            self.progress.update(
                self.task, completed=self.stretch.rounds + 1, status=status, refresh=True
            )


class SearchTerminal(Terminal):
    """A display of a search: the current run, as `Terminal` has it, and a line with the validation
    score of each finished one, without test figures.
    """

    shows_estimate = False  # it would cost as much as these short runs

    def __init__(self, console: Console) -> None:
        super().__init__(console, rows=1)
        self.heading = ""

    def searching(self, runs: int, rounds: Sequence[int]) -> None:
        self.row, self.rows = 0, runs
        of = " or ".join(f"{n:,}" for n in sorted(set(rounds)))
        if runs > 1:  # a single run's own line says as much
            self._prepared()
            self._line(
                f"{runs:,} runs of {of} {'round' if of == '1' else 'rounds'}:", soft_wrap=True
            )

    def unfit(self, title: str, problem: str) -> None:
        if not self.heading.endswith(title):  # the run did not begin
            self._next(title)
        self._done(f"lost, {problem}")

    def end(self, result: Result) -> None:
        super().end(result)
        name = self.metric.name.removeprefix("test ")
        self._done(f"validation {name} {result.valid:.2f}{self._unit}")

    def _done(self, outcome: str) -> None:
        """Replace the display of the run by a line."""
        if self.task is not None:
            self.progress.remove_task(self.task)
            self.task = None
        self._prepared()
        self._line(f"  {self.heading}: {outcome}", soft_wrap=True)

    def _speaks(self, kind: str, done: int) -> bool:
        return False

    def _announce(self, rounds: int, done: int, clients: int) -> None:
        pass
