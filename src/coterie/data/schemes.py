"""Partition schemes: which client gets which examples, and the unseen clients."""

from abc import ABC
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.partition_fields import PartitionFields, Unseen, numbered
from coterie.data.splits import Numbers

Labels = tuple[int, ...]  # in rising order
_ATTEMPTS = 100  # at a Dirichlet draw that leaves no client without examples
_DRAWS = 10_000  # of label sets, until there are enough that no client has
UNSEEN_ANCHORS = 2  # whose classes an aligned unseen client has
_HAD = 0.1  # of dirichlet: a client has the classes that make up such a share of its examples


@dataclass(frozen=True)
class ClientShare:
    """The share of one client."""

    id: ClientId
    train: Numbers  # rows for training and validation, in random order
    test: Numbers  # rows of the test examples
    labels: Labels
    cluster: int | None = None  # the true one, if there are clusters
    dialect: int = 0  # the number of its permutation of the labels


@dataclass(frozen=True)
class Partition:
    """The shares of all clients."""

    clients: list[ClientShare]  # that train, anchors first
    unseen: dict[str, list[ClientShare]]  # that never train, by group
    public: Numbers  # rows of the training examples that no client has

    @property
    def everyone(self) -> list[ClientShare]:
        """The clients that train, then the unseen ones."""
        return [*self.clients, *chain(*self.unseen.values())]


class PartitionSchemes(PartitionFields, ABC):
    """The partition defined by the fields of a `data` section of labelled examples."""

    def partitioned(self, train: Numbers, test: Numbers) -> Partition:
        """Return the partition, by (N,) training and (M,) test labels. Raises DataError."""
        public = self._published(train)
        left = np.setdiff1d(np.arange(len(train)), public)
        labels = train[left]
        if self.partition in ("disjoint-classes", "quantity") or self.unseen:
            self._check_classes(labels)
        partitions = {
            "permuted-clusters": self._by_permutation,
            "disjoint-classes": self._by_classes,
            "iid": self._evenly,
            "dirichlet": self._by_dirichlet,
            "quantity": self._by_quantity,
        }
        clients = [
            replace(part, test=self._bounded(part.test))
            for part in partitions[self.partition](labels, test)
        ]
        unseen = {
            group: list(self._unseen_clients(group, clients, labels, test)) for group in self.unseen
        }
        groups: dict[str, list[ClientShare]] = {g: _among(left, of) for g, of in unseen.items()}
        return Partition(_among(left, clients), groups, public)

    def _by_permutation(self, train: Numbers, test: Numbers) -> Iterator[ClientShare]:
        labels, tests = tuple(range(self.classes)), np.arange(len(test))
        for cluster, size in enumerate(self.sizes):
            for i, share in enumerate(self._share_out(np.arange(len(train)), size, cluster)):
                yield ClientShare(f"c{cluster}-{i}", share, tests, labels, cluster, cluster)

    def _by_classes(self, train: Numbers, test: Numbers) -> Iterator[ClientShare]:
        groups = np.array_split(self._random("classes").permutation(self.classes), len(self.sizes))
        each = self.anchors // len(self.sizes)
        ids = numbered("anchor", self.anchors, 1)
        anchors: list[ClientShare] = []
        others: list[ClientShare] = []
        for cluster, (size, group) in enumerate(zip(self.sizes, groups, strict=True)):
            owned = self._anchor_sets(group, each)
            reserved = [_rows(train, labels) for labels in owned]
            shares = self._share_out(_rows(train, group), size, cluster, reserved)
            for id, share, labels in zip(ids[cluster * each :], shares, owned, strict=False):
                anchors.append(ClientShare(id, share, _rows(test, labels), labels, cluster))
            tests, labels = _rows(test, group), _sorted(group)
            for i, share in enumerate(shares[each:]):
                others.append(ClientShare(f"c{cluster}-{i}", share, tests, labels, cluster))
        yield from (*anchors, *others)

    def _evenly(self, train: Numbers, test: Numbers) -> Iterator[ClientShare]:
        shares = self._share_out(np.arange(len(train)), self.clients, 0)
        labels = tuple(range(self.classes))
        for id, share in zip(self._ids(), shares, strict=True):
            yield ClientShare(id, share, np.arange(len(test)), labels)

    def _by_dirichlet(self, train: Numbers, test: Numbers) -> Iterator[ClientShare]:
        ids = self._ids()
        # anchors are drawn from all examples once more, as in DDOME, Appendix A
        anchors, others = ids[: self.anchors], ids[self.anchors :]
        for kind, members in (("dirichlet anchors", anchors), ("dirichlet", others)):
            if members:
                trains, tests = self._skewed(kind, len(members), train, test)
                for id, of, tested in zip(members, trains, tests, strict=True):
                    yield ClientShare(id, of, tested, self._had(train[of]))

    def _skewed(
        self, kind: str, count: int, train: Numbers, test: Numbers
    ) -> tuple[list[Numbers], list[Numbers]]:
        """Return training and test rows of so many clients, drawn from Dirichlet(alpha)."""
        for attempt in range(_ATTEMPTS):
            random = self._random(kind, attempt)
            ends = np.cumsum(random.dirichlet([self.alpha] * count, self.classes), axis=1)[:, :-1]
            trains, tests = (self._cut(labels, ends, random) for labels in (train, test))
            if min(map(len, trains)) >= 2 and min(map(len, tests)) >= 1:
                return trains, tests
        raise DataError(
            f"data.partition dirichlet: {_ATTEMPTS} draws with alpha {self.alpha:g} left some of "
            f"{count} clients without {self.things}",
            "Use a larger data.alpha, or fewer data.clients.",
        )

    def _cut(
        self, labels: Numbers, ends: npt.NDArray[np.float64], random: np.random.Generator
    ) -> list[Numbers]:
        """Return each client's rows; each class is cut at its (classes, clients - 1) `ends`."""
        hands: list[list[Numbers]] = [[] for _ in range(ends.shape[1] + 1)]
        for label in range(self.classes):
            rows = random.permutation(np.flatnonzero(labels == label))
            pieces = np.split(rows, np.rint(ends[label] * len(rows)).astype(int))
            for hand, piece in zip(hands, pieces, strict=True):
                hand.append(piece)
        return [random.permutation(np.concatenate(hand)) for hand in hands]

    def _had(self, labels: Numbers) -> Labels:
        """Return the classes of at least a tenth of these labels, or else the largest class."""
        shares = np.bincount(labels, minlength=self.classes) / len(labels)
        return _sorted(np.flatnonzero(shares >= min(_HAD, shares.max())))

    def _by_quantity(self, train: Numbers, test: Numbers) -> Iterator[ClientShare]:
        random = self._random("quantity")
        sets = self._label_sets(random)
        hands: list[list[Numbers]] = [[] for _ in sets]
        for label in range(self.classes):
            owners = [hand for hand, classes in zip(hands, sets, strict=True) if label in classes]
            rows = random.permutation(np.flatnonzero(train == label))
            pieces = [rows] * len(owners)
            if not self.replacement:
                pieces = np.array_split(rows, max(len(owners), 1))
            if owners and not len(pieces[-1]):
                raise DataError(
                    f"data.partition quantity: {len(rows)} training {self.things} of class "
                    f"{label} for {len(owners)} clients",
                    "Use fewer data.clients, or data.replacement.",
                )
            for owner, piece in zip(owners, pieces, strict=False):
                owner.append(piece)
        for id, hand, classes in zip(self._ids(), hands, sets, strict=True):
            rows = random.permutation(np.concatenate(hand))
            yield ClientShare(id, rows, _rows(test, classes), classes)

    def _label_sets(self, random: np.random.Generator) -> list[Labels]:
        """Return the classes of each client in the scheme quantity, anchors first."""
        anchors = self._anchor_sets(self._random("anchors").permutation(self.classes), self.anchors)
        sets, holders = list(anchors), np.zeros(self.classes, dtype=int)
        for _ in range(self.clients):
            # the rarest classes first, so that every class has about as many clients
            rarest = sorted(random.permutation(self.classes), key=lambda label: int(holders[label]))
            few = self.classes_per_client - 1
            candidates = (_sorted([*rarest[:few], last]) for last in rarest[few:])
            labels = next((c for c in candidates if not self._kept_free(c, anchors)), None)
            if labels is None:
                raise DataError(
                    f"data.unseen.aligned: all label sets of {self.classes_per_client} of "
                    f"{self.classes} classes are reserved for them",
                    "Use other data.classes_per_client or data.anchor_classes.",
                )
            holders[list(labels)] += 1
            sets.append(labels)
        return sets

    def _anchor_sets(self, classes: Numbers, anchors: int) -> list[Labels]:
        """Return disjoint groups of these classes, one per anchor."""
        return [
            _sorted(group)
            for group in classes[: anchors * self._anchor_size].reshape(anchors, self._anchor_size)
        ]

    def _kept_free(self, labels: Labels, anchors: Sequence[Labels]) -> bool:
        """Whether a label set (that of some anchors) is reserved for aligned unseen clients."""
        whole = sum(set(group) <= set(labels) for group in anchors) == UNSEEN_ANCHORS
        return (
            "aligned" in self.unseen and whole and len(labels) == UNSEEN_ANCHORS * self._anchor_size
        )

    def _unseen_clients(
        self, group: Unseen, clients: Sequence[ClientShare], train: Numbers, test: Numbers
    ) -> Iterator[ClientShare]:
        """Yield the unseen clients of a group."""
        share = min(len(part.train) for part in clients)
        sets = self._unseen_sets(group, clients)
        for id, labels in zip(numbered(group, len(sets)), sets, strict=True):
            rows = self._random("unseen", id).permutation(_rows(train, labels))
            yield ClientShare(id, rows[:share], self._bounded(_rows(test, labels), id), labels)

    def _unseen_sets(self, group: Unseen, clients: Sequence[ClientShare]) -> list[Labels]:
        """Return a new label set for each client of a group. Raises DataError."""
        random, count = self._random("unseen", group), self.unseen[group]
        anchors = [part.labels for part in clients[: self.anchors]]
        taken = {part.labels for part in clients}
        label_sets: list[Labels] = []
        for _ in range(_DRAWS):
            if group == "aligned":
                members = random.choice(self.anchors, UNSEEN_ANCHORS, replace=False)
                labels = _sorted(chain(*(anchors[q] for q in members)))
            else:
                labels = _sorted(
                    random.choice(self.classes, self.classes_per_client, replace=False)
                )
            if labels not in taken:
                taken.add(labels)
                label_sets.append(labels)
            if len(label_sets) == count:
                return label_sets
        kind = f"{self.classes_per_client} of {self.classes} classes"
        if group == "aligned":
            kind = f"{UNSEEN_ANCHORS} anchors' classes"
        raise DataError(
            f"data.unseen.{group}: {count} clients, but only {len(label_sets)} label sets of "
            f"{kind} were found that no client has",
            f"Use at most {len(label_sets)}, or change how many classes clients have.",
        )

    def _published(self, train: Numbers) -> Numbers:
        """Return the rows of the public set. Raises DataError if no others are left."""
        if self.public >= len(train):
            problem = f"data.public: {self.public:,} of {len(train):,} training {self.things}"
            raise DataError(problem, "Leave some for the clients.")
        random = self._random("public")
        classes = [
            random.permutation(np.flatnonzero(train == label)) for label in range(self.classes)
        ]
        # Webster's apportionment
        turns = np.concatenate(
            [(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in classes]
        )
        return np.sort(np.concatenate(classes)[np.argsort(turns, kind="stable")[: self.public]])

    def _share_out(
        self, rows: Numbers, clients: int, cluster: int, reserved: Sequence[Numbers] = ()
    ) -> list[Numbers]:
        """Return disjoint shares, all equal or a fraction each; anchors', of `reserved`, first."""
        shuffled = self._random("shares", cluster).permutation(rows)
        size = len(rows) // (clients + len(reserved))
        if self.fraction is not None:
            size = int(self.fraction * len(rows) + 1e-9)
        shares = [shuffled[np.isin(shuffled, allowed)][:size] for allowed in reserved]
        left = shuffled[~np.isin(shuffled, np.concatenate([rows[:0], *shares]))]
        if self.fraction is None:
            return [*shares, *np.array_split(left, clients)]
        return [*shares, *(left[i * size : (i + 1) * size] for i in range(clients))]

    def _bounded(self, rows: Numbers, *purpose: str) -> Numbers:
        if self.test_examples is None or len(rows) <= self.test_examples:
            return rows
        return np.sort(
            self._random("test", *purpose).choice(rows, self.test_examples, replace=False)
        )

    def _random(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(derive_seed(self.seed, *purpose))

    def _check_classes(self, labels: Numbers) -> None:
        """Refuse classes without training examples. Raises DataError."""
        if len(empty := np.flatnonzero(np.bincount(labels, minlength=self.classes) == 0)):
            raise DataError(
                f"{self.title}: no training {self.things} of class {', '.join(map(str, empty))}"
                + f" after {self.public:,} are set aside as public" * bool(self.public),
                "Clients share the classes, so each needs examples: use another data.partition, "
                "more data, or a smaller data.public.",
            )


def _rows(labels: Numbers, classes: Sequence[int] | Numbers) -> Numbers:
    return np.flatnonzero(np.isin(labels, classes))


def _sorted(labels: Iterable[int]) -> Labels:
    return tuple(sorted(map(int, labels)))


def _among(rows: Numbers, parts: Iterable[ClientShare]) -> list[ClientShare]:
    """Return the same shares, with training rows numbered within `rows`."""
    return [replace(part, train=rows[part.train]) for part in parts]
