"""Who is told of what happens in a run."""

from collections.abc import Mapping, Sequence
from typing import Any


class Reporter:
    """Told of what happens, and does nothing: the base of those that show it."""

    # whether it wants to be told beforehand how long things will take, which costs a few steps of
    # training
    foretells = False

    def expects(self, seconds: Sequence[float]) -> None:
        """About how long each method will take, before the first one begins; 0 for one that is
        done.
        """

    def preparing(self) -> None:
        """Base and data are about to be loaded, and what everybody begins with trained."""

    def known(self, title: str) -> None:
        """A method was done before: its result is there."""

    def begin(
        self,
        title: str,
        rounds: int,
        done: int,
        clients: Sequence[str],
        metric: Mapping[str, Any] | None = None,
    ) -> None:
        """A method starts; `done` of its `rounds` were done before. `metric` is that of its
        result, by default perplexity.
        """

    def asking(self, task: str, clients: int) -> None:
        """An exchange begins, of a round or outside of one: so many clients are asked to do a
        task.
        """

    def answered(self, client: str) -> None:
        """A client finished a task that trains nothing: its models were scored, say."""

    def client(self, round: int, client: str, metrics: Mapping[str, Any]) -> None:
        """A client finished a training task of the round that is going on."""

    def spent(self, round: int, epsilon: float, delta: float) -> None:
        """What privacy has been spent so far."""

    def warning(self, round: int, client: str, text: str) -> None:
        """Something about a client that stops nothing: it did not answer, or not what it was
        asked for.
        """

    def cores(self, others: int) -> None:
        """How many other processes compute while the machine is short of cores for this one; 0:
        it is not.
        """

    def evaluating(self, round: int) -> None:
        """The clients' models are about to be scored."""

    def evaluated(self, round: int, means: Mapping[str, float]) -> None:
        """The mean of the metric over clients, by split."""

    def point(self, round: int, test: float, windows: int) -> None:
        """The mean of the metric over clients on so many windows of each one's test set, after a
        round.
        """

    def round(self, done: int) -> None:
        """A round is done and saved."""

    def end(self, result: Mapping[str, Any]) -> None:
        """A method is done; `result` is what is in result.json."""
