"""Collect several errors in data and report them together."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from coterie.core.errors import DataError

SHOWN = 5  # mistakes of one file that a message lists


class Refusals:
    """A context that collects DataErrors and raises them as one at its end.

    with Refusals() as refusals:
        for client in clients:
            with refusals.gather():
                check(client)

    Args:
        most: How many are shown; None: all.
    """

    def __init__(self, most: int | None = None) -> None:
        self.most = most
        self.errors: list[DataError] = []

    def __enter__(self) -> "Refusals":
        return self

    @contextmanager
    def gather(self, prefix: str = "") -> Iterator[None]:
        """Collect a DataError of the block, its problem prefixed, and continue after it."""
        try:
            yield
        except DataError as error:
            self.errors.append(DataError(prefix + error.problem, error.remedy))

    def add(self, problem: str, remedy: str = "") -> None:
        self.errors.append(DataError(problem, remedy))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None and self.errors:
            raise _joined(self.errors, self.most)


def _joined(errors: list[DataError], most: int | None) -> DataError:
    """Return one error with all distinct problems and remedies."""
    problems = list(dict.fromkeys(error.problem for error in errors))
    if most is not None and len(problems) > most:
        problems[most:] = [f"... and {len(problems) - most:,} more"]
    remedies = list(dict.fromkeys(error.remedy for error in errors if error.remedy))
    return DataError("\n".join(problems), "\n  ".join(remedies))
