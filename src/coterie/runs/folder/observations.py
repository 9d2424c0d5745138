"""What observers of a run saw, kept for an audit: tensors as they were sent, nothing else."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coterie.core.files import load, save
from coterie.core.protocol import ClientId
from coterie.core.tensors import Named, Tensors, prefixed, under

Messages = Mapping[ClientId, Named]


@dataclass(frozen=True)
class Exchange:
    """The observations of one training exchange: tensors `to/<client>/<name>` and
    `from/<client>/<name>`, with `*` as client if all are equal.
    """

    round: int
    tensors: Named

    def to(self, client: ClientId) -> Tensors:
        """Return what was sent to a client; {} if it was not asked."""
        return under("to/*", self.tensors) or under(f"to/{client}", self.tensors)

    def sent(self, client: ClientId) -> Tensors:
        """Return what the server received from a client, or the mean if only a sum was received; {}
        if it did not answer.
        """
        return under("from/*", self.tensors) or under(f"from/{client}", self.tensors)


class Observations:
    """The folder `audit/` of a run: what was sent in the last `most` training exchanges (None: in
    all), for `coterie audit`. It never leaves this machine.
    """

    def __init__(self, folder: Path, most: int | None) -> None:
        self.folder, self._most = folder, most

    def keep(self, round: int, phase: int, to: Messages, received: Messages) -> None:
        """Write what was sent in one exchange, and delete the oldest. Raises SaveError."""
        tensors = _packed("to", to) | _packed("from", received)
        save(self.folder / f"round-{round:05d}-{phase:03d}.safetensors", tensors, lasting=False)
        for old in self._all()[: -self._most] if self._most is not None else ():
            old.unlink(missing_ok=True)

    def _all(self) -> list[Path]:
        return sorted(self.folder.glob("round-*-*.safetensors"))

    def before(self, round: int) -> list[Exchange]:
        """Return the exchanges before this round, the oldest first. Raises CheckpointError."""
        exchanges = [Exchange(int(path.name.split("-")[1]), load(path)[0]) for path in self._all()]
        return [exchange for exchange in exchanges if exchange.round < round]


def _packed(direction: str, messages: Messages) -> Tensors:
    """Return the messages of one direction; one that is the same for all clients is stored once."""
    first, *others = list(messages.values()) or [Tensors()]
    if others and all(
        one.keys() == first.keys() and all(one[name] is first[name] for name in one)
        for one in others
    ):
        return prefixed(f"{direction}/*", first)
    return {
        name: t
        for i, message in messages.items()
        for name, t in prefixed(f"{direction}/{i}", message).items()
    }
