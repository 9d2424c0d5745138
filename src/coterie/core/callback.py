"""Callbacks for the events of a run."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import partialmethod
from pathlib import Path
from typing import Any

from coterie.core.errors import CallbackError, CoterieError
from coterie.core.isolation import unchanged
from coterie.core.result import MetricInfo, Result


class Callback:
    """A callback for the events of a run. Subclasses override the methods that they need; the
    others do nothing.

    For each method, a run calls `opened` and `begin`; in each round `recorded`, `client`,
    `evaluated`, `round` and `checkpoint`; and at the end `end`. Callbacks only observe: their
    arguments are copies, and results do not depend on them. If a callback raises an exception, the
    run stops with a `CallbackError` that names it, and can be resumed from the last checkpoint.

    Examples:
        >>> import coterie
        >>> class Scores(coterie.Callback):
        ...     def __init__(self):
        ...         self.test = {}
        ...
        ...     def evaluated(self, round, means):
        ...         self.test[round] = means["test"]
        >>> scores = Scores()
        >>> short = {"method": {"rounds": 2}, "evaluate_every": 1, "compare_with": []}
        >>> run = coterie.run("cobo-digits", out="heard", callbacks=[scores], **short)
        >>> list(scores.test)
        [1, 2]
    """

    # whether it needs an estimate of the time beforehand, which costs a few training steps
    shows_estimate = False

    def expects(self, seconds: Sequence[float]) -> None:
        """Receive each method's estimated seconds before the first starts; 0 if it is finished."""

    def chosen(self, text: str) -> None:
        """Receive, in one line, the values that a run has chosen for fields that were `auto`."""

    def noted(self, notes: Sequence[str]) -> None:
        """Receive sentences about the data that people should read before training."""

    def preparing(self) -> None:
        """Handle the start of loading the base and data, and of training the common start."""

    def known(self, title: str) -> None:
        """Handle a method whose result exists already."""

    def searching(self, runs: int, rounds: Sequence[int]) -> None:
        """Handle the start of a search for settings; `rounds` are the lengths of its runs."""

    def unfit(self, title: str, problem: str) -> None:
        """Handle a run of a search without a result: it diverged, or its settings are refused."""

    def opened(self, folder: Path, recipe: Mapping[str, Any]) -> None:
        """Receive a method's folder and recipe, as in recipe.yaml, before it starts or resumes."""

    def begin(
        self,
        title: str,
        rounds: int,
        done: int,
        clients: Sequence[str],
        metric: MetricInfo | None = None,
    ) -> None:
        """Handle the start of a method with `done` rounds done; `metric` defaults to perplexity."""

    def asking(self, task: str, clients: int) -> None:
        """Handle the start of an exchange with so many clients, in a round or outside."""

    def answered(self, client: str) -> None:
        """Handle the end of a client's task that trains nothing, such as an evaluation."""

    def client(self, round: int, client: str, metrics: Mapping[str, Any]) -> None:
        """Handle the end of a client's training task in the current round."""

    def recorded(self, kind: str, round: int, client: str, values: Mapping[str, Any]) -> None:
        """Receive a line of metrics.jsonl; lines of kinds `lost` and `note` hold text."""

    def spent(self, round: int, epsilon: float, delta: float) -> None:
        """Receive the privacy spent so far."""

    def warning(self, round: int, client: str, text: str) -> None:
        """Receive a warning about a client whose reply is missing or invalid; the run continues."""

    def evaluating(self, round: int) -> None:
        """Handle the start of an evaluation."""

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        """Receive the mean of the metric over clients, by split."""

    def point(self, round: int, test: float, windows: int) -> None:
        """Receive the mean metric on `windows` windows of each client's test set, after a round."""

    def round(self, done: int) -> None:
        """Handle the end of a round, which is saved."""

    def checkpoint(self, round: int, folder: Path) -> None:
        """Handle a checkpoint that was written to this folder after so many rounds."""

    def end(self, result: Result) -> None:
        """Handle the end of a method; `result` is the content of result.json."""


class Callbacks(Callback):
    """Several callbacks, called in order. The first exception stops the run, see `Callback`."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self.shows_estimate = any(callback.shows_estimate for callback in self.callbacks)

    def tell(self, event: str, *values: Any, **named: Any) -> None:
        """Pass an event to all callbacks. Raises CallbackError."""
        for callback in self.callbacks:
            try:
                with unchanged():
                    getattr(callback, event)(*deepcopy(values), **deepcopy(named))
            except CoterieError:
                raise
            except Exception as error:
                raise CallbackError(
                    f"callback {type(callback).__name__} raised {type(error).__name__} "
                    f"in `{event}`: {error}",
                    "Correct it or leave it out. To continue from the last checkpoint, repeat the "
                    "call with resume=True.",
                ) from error


for _event in [
    name for name, member in vars(Callback).items() if callable(member) and not name.startswith("_")
]:
    setattr(Callbacks, _event, partialmethod(Callbacks.tell, _event))
