"""Who is told of what happens in a run: callbacks, one or several."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from coterie.core.errors import CallbackError, CoterieError
from coterie.core.result import MetricInfo, Result


class Callback:
    """A callback for the events of a run. Subclasses override the methods that they need; the
    others do nothing.

    A run tells of each method `begin`, then of each round `client`, `evaluated`, `round` and
    `checkpoint`, and at last `end`. A callback listens: what it is given is its own copy, and the
    figures of a run do not depend on it. If it raises an exception, the run stops with a
    `CallbackError` that names it, and can be resumed from the last checkpoint.

    Example:
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

    # whether it wants to be told beforehand how long things will take, which costs a few steps of
    # training
    shows_estimate = False

    def expects(self, seconds: Sequence[float]) -> None:
        """Hear about how long each method will take, before the first one begins; 0 for one that is
        done.
        """

    def preparing(self) -> None:
        """Hear that base and data are about to be loaded, and the common start trained."""

    def known(self, title: str) -> None:
        """Hear that a method was done before: its result is there."""

    def begin(
        self,
        title: str,
        rounds: int,
        done: int,
        clients: Sequence[str],
        metric: MetricInfo | None = None,
    ) -> None:
        """Hear that a method starts; `done` of its `rounds` were done before. `metric` is that of
        its result, by default perplexity.
        """

    def asking(self, task: str, clients: int) -> None:
        """Hear that an exchange begins, in a round or outside: so many clients are asked to do a
        task.
        """

    def answered(self, client: str) -> None:
        """Hear that a client finished a task that trains nothing: its models were scored, say."""

    def client(self, round: int, client: str, metrics: Mapping[str, Any]) -> None:
        """Hear that a client finished a training task of the round that is going on."""

    def spent(self, round: int, epsilon: float, delta: float) -> None:
        """Hear what privacy has been spent so far."""

    def warning(self, round: int, client: str, text: str) -> None:
        """Something about a client that stops nothing: it did not answer, or not what it was asked
        for.
        """

    def cores(self, others: int) -> None:
        """How many other processes compute while the machine is short of cores for this one; 0: it
        is not.
        """

    def evaluating(self, round: int) -> None:
        """Hear that the clients' models are about to be scored."""

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        """Hear the mean of the metric over clients, by split."""

    def point(self, round: int, test: float, windows: int) -> None:
        """Hear the mean of the metric over clients on so many windows of each one's test set, after
        a round.
        """

    def round(self, done: int) -> None:
        """Hear that a round is done and saved."""

    def checkpoint(self, round: int, folder: Path) -> None:
        """Hear that a checkpoint after so many rounds was written, to this folder."""

    def end(self, result: Result) -> None:
        """Hear that a method is done; `result` is what result.json says."""


class Callbacks(Callback):
    """Several callbacks, called one after the other in their order.

    Args:
        callbacks: Of a user. What one of them raises stops the run, see `Callback`.
    """

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self.callbacks = tuple(callbacks)
        self.shows_estimate = any(callback.shows_estimate for callback in self.callbacks)

    def tell(self, event: str, *told: Any, **named: Any) -> None:
        """Tell everybody of an event. Raises CallbackError."""
        for callback in self.callbacks:
            try:
                getattr(callback, event)(*deepcopy(told), **deepcopy(named))
            except CoterieError:
                raise
            except Exception as error:
                raise CallbackError(
                    f"callback {type(callback).__name__} raised {type(error).__name__} "
                    f"in `{event}`: {error}",
                    "Correct it or leave it out; the same call with resume=True goes on from the "
                    "last checkpoint.",
                ) from error


def _telling(event: str) -> Callable[..., None]:
    """Return a method of `Callbacks` that passes an event on."""

    def told(self: Callbacks, *given: Any, **named: Any) -> None:
        self.tell(event, *given, **named)

    return told


for _event in [
    name for name, member in vars(Callback).items() if callable(member) and not name.startswith("_")
]:
    setattr(Callbacks, _event, _telling(_event))
