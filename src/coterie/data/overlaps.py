"""Documents that are equal between clients or splits."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from coterie.core.protocol import ClientId
from coterie.data.splits import SPLITS
from coterie.data.splitting import digest

ClientSplit = tuple[ClientId, str]  # a client's split

_SHOWN = 3  # sentences about clients, or about splits


@dataclass
class Overlaps:
    """Counts of equal documents by client."""

    documents: Counter[ClientId] = field(default_factory=Counter)
    different: Counter[ClientId] = field(default_factory=Counter)
    shared: Counter[ClientId] = field(default_factory=Counter)  # with other clients
    crossing: Counter[ClientId] = field(default_factory=Counter)  # also in another split of anyone
    # different documents by the splits that have them
    owners: Counter[tuple[ClientSplit, ...]] = field(default_factory=Counter)

    @classmethod
    def of(
        cls, texts: Mapping[ClientId, Sequence[Sequence[str]]], content: Callable[[str], str] = str
    ) -> "Overlaps":
        """Count equal documents in texts by client and split, comparing their `content`."""
        copies: dict[bytes, Counter[ClientSplit]] = defaultdict(Counter)
        for client, parts in texts.items():
            for split, documents in zip(SPLITS, parts, strict=True):
                for document in documents:
                    copies[digest(content(document))][client, split] += 1
        overlaps = cls()
        for counts in copies.values():
            splits = tuple(counts)
            clients = _clients(splits)
            overlaps.owners[splits] += 1
            overlaps.different.update(clients)
            for (client, _), count in counts.items():
                overlaps.documents[client] += count
                overlaps.shared[client] += count * (len(clients) > 1)
                overlaps.crossing[client] += count * _crosses(splits)
        return overlaps

    @property
    def notes(self) -> list[str]:
        """Return sentences about documents that are shared by clients or are in several splits."""
        shared: Counter[tuple[ClientId, ...]] = Counter()
        crossing: Counter[tuple[ClientSplit, ...]] = Counter()
        for splits, count in self.owners.items():
            if _crosses(splits):
                crossing[splits] = count
            elif len(splits) > 1:
                shared[_clients(splits)] += count
        crossed = [
            f"{_documents(count)} in {_listed(f'{client}: {split}' for client, split in splits)}"
            f"{': what is scored is trained on' * any(split == SPLITS[0] for _, split in splits)}"
            for splits, count in crossing.most_common(_SHOWN)
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


def _clients(splits: Iterable[ClientSplit]) -> tuple[ClientId, ...]:
    return tuple(dict.fromkeys(client for client, _ in splits))


def _crosses(splits: Iterable[ClientSplit]) -> bool:
    return len({split for _, split in splits}) > 1


def _rest(
    counts: Counter[tuple[ClientId, ...]] | Counter[tuple[ClientSplit, ...]], where: str
) -> list[str]:
    rest = counts.total() - sum(count for _, count in counts.most_common(_SHOWN))
    return [f"{_documents(rest)} more are {where}"] if rest else []


def _documents(count: int) -> str:
    return f"{count:,} document{'s' * (count != 1)}"


def _listed(names: Iterable[str]) -> str:
    *first, last = names
    if len(first) > _SHOWN:
        first, last = first[:_SHOWN], f"{len(first) - _SHOWN + 1:,} more"
    return f"{', '.join(first)} and {last}" if first else last
