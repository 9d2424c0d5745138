"""What clients and splits have in common: documents that people call equal."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from coterie.core.protocol import ClientId
from coterie.data.splits import SPLITS
from coterie.data.splitting import digest

Place = tuple[ClientId, str]  # a client's split

_SHOWN = 3  # sentences about clients, or about splits


@dataclass(frozen=True)
class Overlaps:
    """Counts of equal documents.

    Args:
        documents: Of each client, in all.
        places: Number of different documents by all splits that have them.
        copies: Documents of each client by all splits that have them.
    """

    documents: Mapping[ClientId, int]
    places: Mapping[tuple[Place, ...], int]
    copies: Mapping[tuple[ClientId, tuple[Place, ...]], int]

    @classmethod
    def of(
        cls,
        texts: Mapping[ClientId, Sequence[Sequence[str]]],
        content: Callable[[str], str] = str,
    ) -> "Overlaps":
        """Count the equal documents of clients.

        Args:
            texts: Documents by client and split.
            content: Returns what people compare of a document.
        """
        copies: dict[bytes, Counter[Place]] = defaultdict(Counter)
        for client, parts in texts.items():
            for split, documents in zip(SPLITS, parts, strict=True):
                for document in documents:
                    copies[digest(content(document))][client, split] += 1
        by_client: Counter[tuple[ClientId, tuple[Place, ...]]] = Counter()
        for counts in copies.values():
            for (client, _), count in counts.items():
                by_client[client, tuple(counts)] += count
        return cls(
            {client: sum(map(len, parts)) for client, parts in texts.items()},
            Counter(tuple(counts) for counts in copies.values()),
            by_client,
        )

    @cached_property
    def different(self) -> Mapping[ClientId, int]:
        """Different documents of each client."""
        counts: Counter[ClientId] = Counter()
        for places, count in self.places.items():
            counts.update(dict.fromkeys(_owners(places), count))
        return counts

    @cached_property
    def shared(self) -> Mapping[ClientId, int]:
        """Documents of each client that others have, too."""
        return self._copies(lambda places: len(_owners(places)) > 1)

    @cached_property
    def crossing(self) -> Mapping[ClientId, int]:
        """Documents of each client that are in another split, too, its own or another client's."""
        return self._copies(_crosses)

    def _copies(self, chosen: Callable[[tuple[Place, ...]], bool]) -> Mapping[ClientId, int]:
        counts: Counter[ClientId] = Counter()
        for (client, places), count in self.copies.items():
            counts[client] += count * chosen(places)
        return counts

    @property
    def notes(self) -> list[str]:
        """Sentences about what is shared and about what is in several splits."""
        shared: Counter[tuple[ClientId, ...]] = Counter()
        crossing: Counter[tuple[Place, ...]] = Counter()
        for places, count in self.places.items():
            if _crosses(places):
                crossing[places] = count
            elif len(places) > 1:
                shared[_owners(places)] += count
        crossed = [
            f"{_documents(count)} in {_listed(f'{client}: {split}' for client, split in places)}: "
            f"what is scored is trained on"
            for places, count in crossing.most_common(_SHOWN)
            if any(split == SPLITS[0] for _, split in places)
        ]
        return [
            *(self._sharing(owners, count) for owners, count in shared.most_common(_SHOWN)),
            *_rest(shared, "shared by other clients: each in the same split for all of them"),
            *crossed,
            *_rest(crossing, "in several splits, too"),
        ]

    def _sharing(self, owners: tuple[ClientId, ...], count: int) -> str:
        shares = [f"{count / self.different[id]:.0%} of {id}'s" for id in owners[:2]]
        return (
            f"{_listed(owners)} share {_documents(count)} ({', '.join(shares)}): each is in the "
            f"same split for {'both' if len(owners) == 2 else 'all of them'}"
        )


def _owners(places: Iterable[Place]) -> tuple[ClientId, ...]:
    return tuple(dict.fromkeys(client for client, _ in places))


def _crosses(places: Iterable[Place]) -> bool:
    return len({split for _, split in places}) > 1


def _rest(
    counts: Counter[tuple[ClientId, ...]] | Counter[tuple[Place, ...]], where: str
) -> list[str]:
    """Return a sentence about what no sentence is about yet, if anything."""
    rest = counts.total() - sum(count for _, count in counts.most_common(_SHOWN))
    return [f"{_documents(rest)} more are {where}"] if rest else []


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"


def _listed(names: Iterable[str]) -> str:
    """Return names in a row, the first three of many."""
    *first, last = names
    if len(first) > _SHOWN:
        first, last = first[:_SHOWN], f"{len(first) - _SHOWN + 1:,} more"
    return f"{', '.join(first)} and {last}" if first else last
