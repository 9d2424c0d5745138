"""What the rows of a command share: base and data, and how many threads they compute with."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from coterie.core.callback import Callback
from coterie.core.errors import CheckpointError
from coterie.core.files import read_json
from coterie.runs.backends import Backend, choose_threads, clients_at_once, computing_threads
from coterie.runs.problems.prepare import Prepared, share_data
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe


class SharedData:
    """The base and the data of the row that was prepared last, for the next one if it has the same;
    released before others are loaded.
    """

    def __init__(self) -> None:
        self._held: tuple[Recipe, LearningProblem] | None = None

    def prepared(self, recipe: Recipe, backend: Backend) -> Prepared:
        """Return a row with its base and data, loaded if they differ. Raises Refused."""
        if self._held is not None and not share_data(self._held[0], recipe):
            self._held = None
        prepared = backend.prepare(recipe, None if self._held is None else self._held[1])
        self.keep(prepared)
        return prepared

    def keep(self, prepared: Prepared) -> None:
        """Keep the base and the data of this row for the next one."""
        self._held = prepared.recipe, prepared.problem


class CommonThreads:
    """The number of threads for the rows of a command: the same for all, so that what differs
    between them cannot be rounding.

    A row that has begun keeps its own number, because sums of floating-point numbers depend
    on how many threads share them: with another one it would not end bit-equal to the same run
    without an interruption. New rows take that of one that has begun; otherwise the first row that
    needs a number has it found out, see `choose_threads`.
    """

    def __init__(
        self, rows: Sequence[tuple[Recipe, Path]], backend: Backend, reporter: Callback
    ) -> None:
        self._backend, self._reporter = backend, reporter
        self._kept = {folder: _kept_threads(folder) for _, folder in rows}
        self._common = next((number for number in self._kept.values() if number), None)

    def assign(self, prepared: Prepared, folder: Path | None = None) -> Prepared:
        """Return a row with its number of threads and of clients that compute at once, for the run
        in `folder` or one that has not begun.
        """
        if self._backend.devices:
            return replace(prepared, threads=prepared.recipe.threads)
        prepared = replace(prepared, threads=self._threads(prepared, folder))
        most = torch.get_num_threads() // computing_threads(prepared)
        return replace(prepared, at_once=max(min(clients_at_once(prepared), most), 1))

    def _threads(self, prepared: Prepared, folder: Path | None) -> int | None:
        if prepared.recipe.threads or prepared.problem.threads:
            return prepared.recipe.threads
        kept = None if folder is None else self._kept[folder]
        if kept is None and self._common is None:
            choice = choose_threads(prepared)
            if choice.others:
                self._reporter.cores(choice.others)
            self._common = choice.threads
        return self._common if kept is None else kept or None


def _kept_threads(folder: Path) -> int | None:
    """Return with how many threads the run in a folder computes; None if it has not begun.

    A damaged checkpoint is ignored here (0): resuming from it reports the damage.
    """
    begun = sorted((folder / "checkpoints").glob("round-*/checkpoint.json"))
    if not begun:
        return None
    try:
        return int(read_json(begun[-1], finite=False)["progress"]["threads"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return 0
