"""A search's progress in a terminal: a line for each of its many runs, without test figures."""

import time
from collections.abc import Sequence

from rich.console import Console

from coterie.core.result import Result
from coterie.reports.progress import Terminal


class SearchTerminal(Terminal):
    """A display of the current run, as `Terminal` has it, and a line with the validation score of
    each finished one.

    Args:
        console: The console to print to.
    """

    shows_estimate = False  # it would cost as much as these short runs

    def __init__(self, console: Console) -> None:
        super().__init__(console, rows=1)
        self.heading = ""

    def searching(self, runs: int, rounds: Sequence[int]) -> None:
        self.row, self.rows = 0, runs
        of = " or ".join(f"{n:,}" for n in sorted(set(rounds)))
        if runs > 1:  # a single run's own line says as much
            self._say(f"{runs:,} runs of {of} {'round' if of == '1' else 'rounds'}:")

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
        self._say(f"  {self.heading}: {outcome}")

    def _say(self, text: str) -> None:
        self._prepared()
        self.spoke = time.monotonic()
        self.progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _speaks(self, kind: str, done: int) -> bool:
        return False

    def _announce(self, rounds: int, done: int, clients: int) -> None:
        pass
