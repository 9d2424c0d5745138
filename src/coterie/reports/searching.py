"""A search's progress in a terminal: a line for each of its many runs, without test figures."""

import time
from collections.abc import Sequence

from rich.console import Console

from coterie.core.result import Result
from coterie.reports.progress import Terminal


class SearchTerminal(Terminal):
    """What `Terminal` shows of a run while it goes on; of one that is done a line with its score on
    validation.

    Args:
        console: Where to.
    """

    shows_estimate = False  # a few steps of each of many short runs would cost as much as they do

    def __init__(self, console: Console) -> None:
        super().__init__(console, rows=1)
        self.heading = ""

    def searching(self, runs: int, rounds: Sequence[int]) -> None:
        self.row, self.rows = 0, runs
        of = " or ".join(f"{n:,}" for n in sorted(set(rounds)))
        if runs > 1:  # the line of a single one says as much
            self._say(f"{runs:,} runs of {of} {'round' if of == '1' else 'rounds'}:")

    def unfit(self, title: str, problem: str) -> None:
        if not self.heading.endswith(title):  # it did not begin
            self._next(title)
        self._done(f"lost, {problem}")

    def end(self, result: Result) -> None:
        super().end(result)
        name = self.metric.name.removeprefix("test ")
        self._done(f"validation {name} {result.valid:.2f}{self._unit}")

    def _done(self, outcome: str) -> None:
        """Put a line in the place of what was shown of the run."""
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
