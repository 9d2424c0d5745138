"""The states of a device's client, over the runs and restarts of a server."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from coterie.core.errors import CoterieError, TensorError
from coterie.core.files import load, save
from coterie.core.protocol import State
from coterie.runs.device.ledger import Turn

_STATE = re.compile(r"round-(\d{5,})-(\d{3,})\.safetensors")
_MOST_NOTE = 2000  # characters, see `Reply`


@dataclass(frozen=True)
class Memory:
    """A client's states in one run on its device, one file per exchange, each written atomically.

    A request of turn t is answered from the newest state before t. So a device that was killed
    continues from its last complete state, a repeated request gets the same answer, and a server
    that went back to a checkpoint finds clients that go back with it. From `before` to `commit`
    nobody else may use it, see `alone`.
    """

    folder: Path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Lock this memory within the block, against processes late with an earlier request."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            yield

    def turns(self) -> dict[Turn, Path]:
        """Return the existing states, the oldest first."""
        files = ((_STATE.fullmatch(p.name), p) for p in self.folder.glob("round-*"))
        return dict(sorted(((int(m[1]), int(m[2])), path) for m, path in files if m))

    def before(self, turn: Turn, expects: Turn | None) -> tuple[State, str]:
        """Return the newest complete state before a turn ({}: the client starts), and a note on it.
        Raises TensorError if there are only later states: the server went back further than devices
        keep.

        `expects` is the last turn of which the server has a reply; None for a client without any.
        Such a client may have done this turn first: its reply was lost, or the server went back.
        """
        turns, note = self.turns(), ""
        for then in sorted((then for then in turns if then < turn), reverse=True):
            try:
                state, _ = load(turns[then])
            except CoterieError as error:
                note = f"skipped a damaged state ({error.problem}); "
                continue
            if note or (expects is not None and then < expects):
                note += f"continues from its state of round {then[0] + 1}"
            return state, note[-_MOST_NOTE:]
        if turns and not note and expects is not None:
            oldest = next(iter(turns))[0] + 1
            raise TensorError(
                f"the server is in round {turn[0] + 1}, this device only has states from round "
                f"{oldest} on",
                "Resume the run from its newest checkpoint, or start a new one with another --out.",
            )
        if note or expects is not None:
            note += "starts from the beginning: it has no state of this run"
        return {}, note[-_MOST_NOTE:]

    def commit(self, turn: Turn, state: State, kept: int) -> None:
        """Write the state after a turn; delete later ones and those of rounds before `kept`."""
        save(self.folder / f"round-{turn[0]:05d}-{turn[1]:03d}.safetensors", state)
        turns = self.turns()
        for then in [then for then in turns if then > turn]:
            turns.pop(then).unlink()
        old = [then for then in turns if then < (kept, 0)]
        # and the files of a process that was killed
        for path in [*(turns[then] for then in old[:-1]), *self.folder.glob("round-*.new")]:
            path.unlink()
