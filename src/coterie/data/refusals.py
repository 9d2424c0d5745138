"""Errors in data, reported together, and sentences about data that were not read."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from coterie.core.errors import DataError

SHOWN = 5  # mistakes of one file that a message lists
_OTHERS = ", as in "
# file and row, the problem, and the number of others like it
_PLACED = re.compile(rf"(.+?:\d+: )(.*?)(?:{_OTHERS}([\d,]+) more)?", re.DOTALL)


class Refusals:
    """A context that collects DataErrors and raises them as one at its end.

    with Refusals() as refusals:
        for client in clients:
            with refusals.gather():
                check(client)

    Args:
        most: How many are shown; None: all.
        alike: Whether problems that differ by file and row alone are one line.
    """

    def __init__(self, most: int | None = None, alike: bool = False) -> None:
        self.most, self.alike = most, alike
        self.errors: list[DataError] = []

    def __enter__(self) -> "Refusals":
        return self

    @contextmanager
    def gather(self, prefix: str = "") -> Iterator[None]:
        """Collect a DataError of the block, its problem prefixed, and continue after the block."""
        try:
            yield
        except DataError as error:
            self.errors.append(DataError(prefix + error.problem, error.remedy))

    def add(self, problem: str, remedy: str = "") -> None:
        self.errors.append(DataError(problem, remedy))

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None or not self.errors:
            return
        problems = list(dict.fromkeys(error.problem for error in self.errors))
        if self.alike:
            problems = _counted(problems)
        if self.most is not None and len(problems) > self.most:
            problems[self.most :] = [f"... and {len(problems) - self.most:,} more"]
        remedies = dict.fromkeys(error.remedy for error in self.errors if error.remedy)
        raise DataError("\n".join(problems), "\n  ".join(remedies))


def _counted(problems: Iterable[str]) -> list[str]:
    """Return the first of the problems that differ by file and row alone, with their number."""
    places: dict[str, list[str]] = {}
    counts = Counter[str]()
    for problem in problems:
        match = _PLACED.fullmatch(problem)
        place, what, others = match.groups() if match else ("", problem, None)
        places.setdefault(what, []).append(place)
        counts[what] += int((others or "0").replace(",", "")) + 1
    ends = {what: f"{_OTHERS}{n - 1:,} more" if (n := counts[what]) > 1 else "" for what in places}
    return [f"{first}{what}{ends[what]}" for what, (first, *_) in places.items()]


class LeftOut:
    """Counts of rows that are left out."""

    def __init__(self) -> None:
        self._counts = Counter[str]()
        self._first: dict[str, list[str]] = {}

    def add(self, missing: str, where: str) -> None:
        """Count a row, at file and number `where`, by its missing part."""
        self._counts[missing] += 1
        if len(first := self._first.setdefault(missing, [])) < SHOWN:
            first.append(where)

    def sentences(self, whose: str = "") -> list[str]:
        """Return a sentence for each kind of omitted row."""
        return [
            f"{whose}{count:,} {_plural('row', count)} without {missing} left out: "
            f"{', '.join(self._first[missing])}{', ...' if count > SHOWN else ''}"
            for missing, count in self._counts.items()
        ]


def not_read(skipped: Mapping[str, Sequence[Path]]) -> list[str]:
    """Return a sentence for each client ("" for none) with files that are not read."""
    return [
        f"{client or 'beside the folders of clients'}: {len(files):,} "
        f"{_plural('file', len(files))} not read ({kinds(files)})"
        for client, files in skipped.items()
        if files
    ]


def outward_links(root: Path, paths: Iterable[Path]) -> list[str]:
    """Return a sentence about links in a folder to files outside it, if any."""
    inside = root.resolve()
    outside = {p: target for p in paths if not (target := p.resolve()).is_relative_to(inside)}
    if not outside:
        return []
    shown = [f"{path.relative_to(root)} is {to}" for path, to in islice(outside.items(), SHOWN)]
    more = ", ..." if len(outside) > SHOWN else ""
    files = _plural("file", len(outside))
    return [f"{len(outside):,} {files} outside {root}, by links: {', '.join(shown)}{more}"]


def kinds(files: Iterable[Path]) -> str:
    """Return how many files there are of each ending."""
    counts = Counter(file.suffix.lower() or "without an ending" for file in files)
    by_count = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count:,} {kind}" for kind, count in by_count)


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else f"{noun}s"
