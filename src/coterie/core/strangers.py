"""Connections of callers that have not identified themselves yet."""

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

C = TypeVar("C")


class Strangers(Generic[C]):
    """The open connections of unknown callers. If there are too many, or more of an address, the
    oldest is closed: a silent or slow caller keeps its place until others need it, and one that
    identifies itself at once gets through, whatever others from its address do.
    """

    def __init__(self, of_an_address: int, close: Callable[[C], object]) -> None:
        self._of_an_address, self._close = of_an_address, close
        self._addresses: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def admit(self, connection: C, address: str, most: int) -> None:
        """Count a new connection; close the oldest one of its address, or of all beyond `most`."""
        self._addresses[connection] = address
        alike = [other for other, where in self._addresses.items() if where == address]
        if len(alike) > self._of_an_address:
            self._dismiss(alike)
        elif len(self._addresses) > most:
            self.dismiss_oldest()

    def dismiss_oldest(self) -> None:
        """Close the oldest connection, if any."""
        self._dismiss(self._addresses)

    def leave(self, connection: C) -> None:
        """Stop counting a connection: its caller is known, or gone."""
        self._addresses.pop(connection, None)

    def _dismiss(self, among: Iterable[C]) -> None:
        if (oldest := next(iter(among), None)) is not None:
            self.leave(oldest)
            self._close(oldest)
