"""A federation: clients, each with its own train, valid and test split."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from coterie.core import names
from coterie.core.errors import DataError
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.refusals import Refusals
from coterie.data.splits import SPLITS, Split, Tokens, TokenSplit, UnionSplit

CENTRALIZED: ClientId = names.CENTRALIZED
# of a split's name, a client's arrays, the window length and a seed
MakeSplit = Callable[[str, Mapping[str, Tokens], int, int], Split]
_SHOWN = 120  # characters of an id that a message shows


def check_id(id: ClientId) -> None:
    """Refuse an invalid client id; see `names.mistake`. Raises DataError."""
    if mistake := names.mistake(id):
        shown = repr(id) if len(id) <= _SHOWN else f"{id[:_SHOWN]!r}..."
        signs = " ".join(names.SIGNS.strip())
        valid = f"letters and digits of any alphabet, single spaces, and {signs}"
        remedy = f"Rename it: {valid}; at most {names.LONGEST} characters."
        raise DataError(f"client id {shown} is not valid: {mistake}", remedy)


@dataclass(frozen=True)
class ClientData:
    """The data of one client."""

    id: ClientId
    train: Split
    valid: Split
    test: Split

    @property
    def splits(self) -> tuple[Split, Split, Split]:
        return self.train, self.valid, self.test


@dataclass(frozen=True)
class ClientInfo:
    """What a data section knows of a client without its data."""

    position: int | None = None  # among all clients, unseen ones last; None if data decide it
    group: str = ""  # of unseen clients; empty for a client that trains
    cluster: int | None = None  # the true one; None without clusters
    anchor: int | None = None  # the expert that it is tied to; None for other clients
    classes: int | None = None  # number of classes; None without labels


@dataclass(frozen=True)
class Federation:
    """Clients with their data. Raises DataError: no clients, an invalid id, ids that are equal but
    for case, or an anchor that is no client or is named twice.
    """

    clients: Mapping[ClientId, ClientData]  # in the order of a recipe's per-client lists
    description: str  # the data in one line
    clusters: Mapping[ClientId, int] | None = None  # the true ones; None: none or unknown
    anchors: tuple[ClientId, ...] = ()  # clients that are each tied to an expert, the q-th to q
    # the classes of each client, seen or unseen, in rising order; empty if unknown
    labels: Mapping[ClientId, tuple[int, ...]] = field(default_factory=dict)
    # groups of clients that never train and are only scored, by name; they have three splits, too
    unseen: Mapping[str, Mapping[ClientId, ClientData]] = field(default_factory=dict)
    public: Split | None = None  # that no client has: a common expert may be trained on it
    files: Mapping[str, str] = field(default_factory=dict)  # SHA-256 by `Source.files`, of a corpus
    open: bool = False  # whether others may join while it is trained, as devices do
    notes: tuple[str, ...] = ()  # sentences that people should read before training

    def __post_init__(self) -> None:
        if not self.clients:
            remedy = "Name at least one client in the recipe's data section."
            raise DataError("a federation without clients", remedy)
        ids = Counter(id for group in (self.clients, *self.unseen.values()) for id in group)
        with Refusals() as refusals:
            for id, count in ids.items():
                with refusals.gather():
                    check_id(id)
                if count > 1:
                    refusals.add(
                        f"client id {id!r} occurs {count} times",
                        "Rename the others: the ids of clients and unseen clients must be unique.",
                    )
            for one, other in names.alike(ids):
                problem = f"the names of clients {one!r} and {other!r} differ only in case"
                refusals.add(problem, "Rename one of them: many file systems ignore case.")
            for id, count in Counter(self.anchors).items():
                if count > 1:
                    remedy = "Name each anchor once: it is tied to one expert."
                    refusals.add(f"anchor {id!r} is named {count} times", remedy)
                if id not in self.clients:
                    remedy = f"Anchors are among: {', '.join(self.clients)}."
                    refusals.add(f"anchor {id!r} is not a client of the federation", remedy)

    @property
    def everyone(self) -> dict[ClientId, ClientData]:
        """All clients by id, unseen ones last."""
        groups = (self.clients, *self.unseen.values())
        return {id: data for group in groups for id, data in group.items()}

    def with_data(self, data: Mapping[ClientId, ClientData]) -> "Federation":
        """Return the same federation with other data for everyone."""
        unseen = {group: {id: data[id] for id in ids} for group, ids in self.unseen.items()}
        return replace(self, clients={id: data[id] for id in self.clients}, unseen=unseen)

    def centralized(self) -> ClientData:
        """Return the union of all clients' train, valid and test sets as one client's data."""
        members = [member.splits for member in self.clients.values()]
        # another one whenever theirs are
        seed = derive_seed(0, "pool", *(split.seed for splits in members for split in splits))
        unions = (
            UnionSplit(name, parts, seed) for name, *parts in zip(SPLITS, *members, strict=True)
        )
        return ClientData(CENTRALIZED, *unions)


def token_split(name: str, arrays: Mapping[str, Tokens], context: int, seed: int) -> Split:
    """Return a split of running text. Raises DataError if it is too short."""
    return TokenSplit(name, arrays[name], context, seed)


def federate(
    arrays: Mapping[ClientId, Mapping[str, Tokens]],
    context: int,
    seed: int,
    description: str,
    make: MakeSplit = token_split,
) -> Federation:
    """Return a federation of token streams, (tokens,) ids by client and split name, in windows of
    length C. `seed` fixes the orders of all walks, of each client its own; `make` returns a split,
    given its name, a client's arrays, C and the seed of its walk. Raises DataError with all clients
    and splits that are shorter than one window.
    """
    clients: dict[ClientId, ClientData] = {}
    with Refusals() as refusals:
        for id, streams in arrays.items():
            splits: list[Split] = []
            for name in SPLITS:
                with refusals.gather(f"client {id!r}, "):
                    splits.append(make(name, streams, context, derive_seed(seed, id)))
            if len(splits) == len(SPLITS):
                clients[id] = ClientData(id, *splits)
    return Federation(clients, description)
