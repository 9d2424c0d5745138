"""The inputs of a run besides its recipe: base, texts or images, clients. They are recorded with
the run and compared when it is resumed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coterie.core.errors import CheckpointError, DataError
from coterie.core.files import (
    check_sums,
    digest_later,
    digest_of,
    read_json,
    read_sums,
    write_json,
    write_sums,
)
from coterie.core.protocol import ClientId
from coterie.core.result import RESULT
from coterie.data.splits import RemoteSplit
from coterie.models.architecture import files_of
from coterie.runs.problems.prepare import Prepared

INPUTS = "inputs.json"
REMEDY = (
    "If this is intended, continue with what there is now: --resume-changed. Otherwise "
    "restore the original, or choose another --out."
)
_FEW = 5  # changes that a message lists


class Inputs(BaseModel):
    """SHA-256 of contents."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    bases: dict[str, dict[str, str]]  # of the files of each base, by name
    # of their splits, in order; none if data are on devices
    clients: dict[ClientId, dict[str, str]]
    # of the files of a named corpus, by origin: `corpora/` is the repository's part, `data.root/`
    # and `COTERIE_DATA/` a given folder; the clients' data decide whether a run may continue
    files: dict[str, str] = Field(default_factory=dict)
    changed: tuple[str, ...] = ()  # what changed between resumptions, which the user accepted

    @classmethod
    def of(cls, prepared: Prepared) -> "Inputs":
        """Return the inputs of a prepared recipe; all of them on this machine are read once. Raises
        DataError if a file of a base cannot be read any more.
        """
        problem, everyone = prepared.problem, prepared.problem.federation.everyone
        here = not any(
            isinstance(split, RemoteSplit) for data in everyone.values() for split in data.splits
        )  # else only shapes are known
        later = {
            base: {p.name: digest_later(p) for p in files_of(base) if here or p.suffix == ".json"}
            for base in problem.bases
        }
        clients = {i: {s.name: s.digest() for s in of.splits} for i, of in everyone.items() if here}
        try:
            bases = {base: {n: d.result() for n, d in of.items()} for base, of in later.items()}
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read ({error.strerror})", "Check the base's folder."
            ) from None
        return cls(bases=bases, clients=clients, files=dict(problem.federation.files))

    def changes(self, now: "Inputs") -> list[str]:
        """Return the changes in words: bases first, then clients."""
        differences = [
            f"base {base}: {change}"
            for base in self.bases.keys() | now.bases.keys()
            for change in _changes(self.bases.get(base, {}), now.bases.get(base, {}))
        ]
        return sorted(differences) + _clients(self.clients, now.clients)


def _changes(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """Return how named contents differ."""
    changes = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now:
            changes.append(f"{name} no longer exists")
        elif before.get(name) != now[name]:
            changes.append(f"{name} {'has changed content' if name in before else 'is new'}")
    return changes


def _clients(
    before: Mapping[ClientId, Mapping[str, str]], now: Mapping[ClientId, Mapping[str, str]]
) -> list[str]:
    """Return how clients and their data differ."""
    differences = [f"client {i!r} no longer exists" for i in before if i not in now]
    differences += [f"client {i!r} is new" for i in now if i not in before]
    both = [i for i in before if i in now]
    if [i for i in now if i in before] != both:
        differences.append(f"the clients are in another order: {', '.join(both[:_FEW])}... before")
    for i in both:
        if other := [name for name in before[i] if before[i][name] != now[i].get(name)]:
            differences.append(f"client {i!r} has other data for {', '.join(other)}")
    return differences


class RecordedInputs:
    """The record of inputs and result in a run's folder, with checksums."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begun(self) -> bool:
        """Whether anything in the folder depends on the inputs already."""
        return any((self.folder / name).exists() for name in (RESULT, "checkpoints"))

    def check(self, now: Inputs) -> None:
        """Refuse to continue a begun run with other inputs. Raises CheckpointError on changes."""
        if not self.begun():
            return
        if changes := self._inputs().changes(now):
            few = "\n".join(f"  - {change}" for change in changes[:_FEW])
            more = f"\n  - and {len(changes) - _FEW:,} more" if len(changes) > _FEW else ""
            problem = f"{self.folder}: the inputs of the run have changed\n{few}{more}"
            raise CheckpointError(problem, REMEDY)

    def check_bases(self, now: Inputs) -> None:
        """Refuse a run known to be trained on another base. Raises CheckpointError."""
        try:
            before = self._inputs()
        except CheckpointError:
            return
        if changes := before.model_copy(update={"clients": now.clients}).changes(now):
            problem = f"{self.folder} was trained on another base: {changes[0]}"
            raise CheckpointError(problem, "Restore the base that the run was trained on.")

    def _inputs(self) -> Inputs:
        """Return the inputs at the beginning. Raises CheckpointError."""
        try:
            check_sums(self.folder, [INPUTS], read_sums(self.folder))
            return Inputs.model_validate(read_json(self.folder / INPUTS))
        except ValidationError as error:
            problem = f"{self.folder / INPUTS}: {error.errors()[0]['msg']}"
            raise CheckpointError(problem, REMEDY) from None
        except CheckpointError as error:
            problem = f"the inputs that the run began with are unknown: {error.problem}"
            raise CheckpointError(problem, REMEDY) from None

    def begin(self, inputs: Inputs) -> None:
        """Record the inputs at the beginning. Raises SaveError."""
        write_json(self.folder / INPUTS, inputs.model_dump(mode="json"))
        self._sum([INPUTS])

    def accept(self, inputs: Inputs) -> None:
        """Record the inputs that the run continues with, and the changes. Raises SaveError."""
        done = self.done()
        try:
            before = self._inputs()
            changed = (*before.changed, *before.changes(inputs))
        except CheckpointError as error:
            changed = (error.problem,)
        self.begin(inputs.model_copy(update={"changed": changed}))
        if done:
            self.end()

    def end(self) -> None:
        """Write the final result. Raises SaveError."""
        self._sum([INPUTS, RESULT])

    def _sum(self, names: Sequence[str]) -> None:
        existing = [name for name in names if (self.folder / name).exists()]
        write_sums(self.folder, {name: digest_of(self.folder / name) for name in existing})

    def done(self) -> bool:
        """Whether the run has ended. Raises CheckpointError if its result has been altered."""
        try:
            sums = read_sums(self.folder)
        except CheckpointError:  # which `check` reports
            return False
        # not in the sums if the run was killed right after writing it
        if RESULT not in sums or not (self.folder / RESULT).exists():
            return False
        try:
            check_sums(self.folder, [RESULT], sums)
        except CheckpointError as error:
            remedy = "Delete it: --resume then writes it again from the last checkpoint."
            raise CheckpointError(error.problem, remedy) from None
        return True
