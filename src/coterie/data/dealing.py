"""How labelled examples fall to clients: to anchors, to the others, to clients that are never trained with, and to the public."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, Federation, Standing
from coterie.data.refusals import Refusals
from coterie.data.section import Share
from coterie.data.splits import SPLITS, Numbers
from coterie.errors import DataError
from coterie.protocol import ClientId, mix

Positive = Annotated[int, Field(ge=1)]
Partition = Literal["permuted-clusters", "disjoint-classes", "iid", "dirichlet", "quantity"]
Unseen = Literal["aligned", "random"]
Labels = tuple[int, ...]  # in rising order

_ATTEMPTS = 100  # at a Dirichlet draw that leaves no client without examples
_DRAWS = 10_000  # of label sets, until there are enough that no client has
_HAD = 0.1  # of dirichlet: a client has the classes that make up such a share of its examples


@dataclass(frozen=True)
class Labelled:
    """Examples that all clients share.

    Args:
        train: (N, ...), as `ExampleSplit` takes them.
        train_labels: (N,) int64.
        test: (M, ...), of the same kind.
        test_labels: (M,) int64.
    """

    train: npt.NDArray[Any]
    train_labels: Numbers
    test: npt.NDArray[Any]
    test_labels: Numbers


@dataclass(frozen=True)
class Part:
    """What falls to one client.

    Args:
        id: Of the client.
        train: Rows of the training examples, for training and validation, in random order.
        test: Rows of the test examples.
        labels: The classes that it has.
        cluster: Its true cluster, where there are clusters.
        dialect: How it calls the classes: the number of a permutation of their labels.
    """

    id: ClientId
    train: Numbers
    test: Numbers
    labels: Labels
    cluster: int | None = None
    dialect: int = 0


@dataclass(frozen=True)
class Deal:
    """What falls to whom.

    Args:
        clients: Who trains, anchors first.
        unseen: Who never does, by group.
        public: (public,) rows of the training examples that nobody of them has.
    """

    clients: list[Part]
    unseen: dict[str, list[Part]]
    public: Numbers

    @property
    def everyone(self) -> list[Part]:
        """Who trains, then who does not."""
        return [*self.clients, *chain(*self.unseen.values())]


class Dealing(BaseModel, ABC):
    """A `data` section of labelled examples. Subclasses say what and where they are; the fields say how they fall to clients.

    Partitions:
        permuted-clusters: All clusters have all examples, and each calls the classes by a permutation of their labels; the first leaves
            them as they are. The clients of a cluster share the training examples out; each has all test examples.
        disjoint-classes: Each cluster has classes of its own, whose training examples its clients share out; each has all their test
            examples. Anchors are members of the clusters, as many of each, and have some of their cluster's classes.
        iid: All clients share the training examples out; each has all test examples.
        dirichlet: How each class falls to the clients, anchors among them, is drawn from Dirichlet(alpha), for training and test examples
            alike. A client is said to have the classes that make up a tenth of its examples.
        quantity: Each client has a few classes, the rarest first; anchors have disjoint groups of classes. The training examples of a class
            are shared out among those who have it, and each has all test examples of its classes.

    Labels keep the data set's classes in every partition.

    Unseen clients have test examples like anybody else, and training examples of their classes which others may have too: so many as the
    smallest client. None has the label set of a client that trains, and no two of a group have the same one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: Annotated[int, Field(ge=0, description="fixes which example is whose; independent of the run's seed")] = 0
    partition: Annotated[Partition, Field(description="how the examples fall to clients")] = "permuted-clusters"
    clusters: Annotated[int, Field(ge=1, description="of permuted-clusters and disjoint-classes: how many")] = 4
    clients_per_cluster: Annotated[int, Field(ge=1, description="how many clients each cluster has, anchors not counted")] = 2
    cluster_sizes: Annotated[
        tuple[Positive, ...] | None, Field(min_length=1, description="clients of each cluster, instead of the two numbers above")
    ] = None
    clients: Annotated[int, Field(ge=1, description="of iid, dirichlet and quantity: how many, anchors not counted")] = 10
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False, description="of dirichlet: the smaller, the more unlike the clients")] = 0.5
    classes_per_client: Annotated[int, Field(ge=1, description="classes of each client of quantity, and of each random unseen one")] = 2
    replacement: Annotated[
        bool,
        Field(description="of quantity: each client draws `per_client` examples of its classes, whoever else has them; none of them twice"),
    ] = False
    fraction: Annotated[
        float | None, Field(gt=0, le=1, description="share of its cluster's training examples of each client; null: shared out evenly")
    ] = None
    per_client: Annotated[
        int | None, Field(ge=1, description="training examples of each client, those for validation not counted; null: all of its share")
    ] = None
    valid_fraction: Annotated[Share, Field(description="examples for validation, as a share of the client's (at least one)")] = 0.1
    test_examples: Annotated[int | None, Field(ge=1, description="at most so many test examples of each client; null: all")] = None
    anchors: Annotated[int, Field(ge=0, description="of disjoint-classes, dirichlet and quantity: how many anchors there are besides")] = 0
    anchor_classes: Annotated[
        int | None, Field(ge=1, description="classes of each anchor, which no other anchor has; null: as many as there can be")
    ] = None
    unseen: Annotated[
        dict[Unseen, Positive],
        Field(
            description="how many clients are scored without ever being trained with: `aligned`, each with the classes of some anchors,"
            " a label set that is kept free for them; `random`, each with `classes_per_client` classes"
        ),
    ] = {}
    unseen_anchors: Annotated[int, Field(ge=2, description="of how many anchors an aligned unseen client has the classes")] = 2
    public: Annotated[int, Field(ge=0, description="so many training examples, of every class its share, fall to nobody")] = 0

    name: ClassVar[str]
    things: ClassVar[str]  # what the examples are, in a message
    mean: ClassVar[tuple[float, ...]] = ()  # of each channel of images; see `ExampleSplit`
    std: ClassVar[tuple[float, ...]] = ()

    @property
    @abstractmethod
    def classes(self) -> int:
        """Labels are below it."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the classes are called; () where they have no names, or where clusters disagree about them."""
        return () if self.partition == "permuted-clusters" else self._names

    @property
    def _names(self) -> tuple[str, ...]:
        """What the data set's classes are called, if they have names."""
        return ()

    @property
    def title(self) -> str:
        """What the data are, in a few words."""
        return f"{self.name}, {self.partition}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """Clients of each cluster, anchors not counted."""
        return self.cluster_sizes or (self.clients_per_cluster,) * self.clusters

    def dealt(self, read: Callable[[], Labelled], order_seed: int) -> Federation:
        """The federation. Its clients are views of the same arrays.

        Args:
            read: The examples; called when the fields are known to be sound.
            order_seed: Fixes the order in which examples are drawn: the run's seed.

        Raises:
            DataError: A label is out of range, or there are too few examples for so many clients; all mistakes that could be found.
        """
        self._check()
        held = read()
        self._check_labels(held)
        dialects = [(calls[held.train_labels], calls[held.test_labels]) for calls in self._dialects()]
        deal = self.parts(held.train_labels, held.test_labels)
        made: dict[ClientId, ClientData] = {}
        with Refusals() as refusals:
            for part in deal.everyone:
                trains, tests = dialects[part.dialect]
                with refusals.gather(f"client {part.id!r}: "):
                    train, valid = self._divide(part)
                    sources = ((held.train, trains, train), (held.train, trains, valid), (held.test, tests, part.test))
                    seed = mix(order_seed, part.id)
                    splits = (self._split(name, *source, seed) for name, source in zip(SPLITS, sources, strict=True))
                    made[part.id] = ClientData(part.id, *splits)
        public = self._split("public", held.train, held.train_labels, deal.public, mix(order_seed, "public")) if self.public else None
        return Federation(
            {part.id: made[part.id] for part in deal.clients},
            self._described(len(deal.clients)),
            {part.id: part.cluster for part in deal.clients if part.cluster is not None} or None,
            tuple(part.id for part in deal.clients[: self.anchors]),
            {part.id: part.labels for part in deal.everyone},
            {group: {part.id: made[part.id] for part in parts} for group, parts in deal.unseen.items()},
            public,
        )

    def standing(self, client: ClientId) -> Standing | None:
        """What is known of a client without the examples; None for one that cannot be."""
        return self._standings().get(client)

    def _standings(self) -> dict[ClientId, Standing]:
        """Everybody that there is, in their order, as in `parts`."""
        anchors, each = _numbered("anchor", self.anchors, 1), max(self.anchors // len(self.sizes), 1)
        if self.partition in ("permuted-clusters", "disjoint-classes"):
            clusters: dict[ClientId, int | None] = {id: k // each for k, id in enumerate(anchors)}
            clusters |= {f"c{cluster}-{i}": cluster for cluster, size in enumerate(self.sizes) for i in range(size)}
        else:
            clusters = dict.fromkeys(self._ids())
        everyone = [(id, "") for id in clusters]
        everyone += [(id, group) for group, count in self.unseen.items() for id in _numbered(group, count)]
        return {
            id: Standing(position, group, clusters.get(id), position if position < self.anchors else None, self.classes)
            for position, (id, group) in enumerate(everyone)
        }

    def parts(self, train: Numbers, test: Numbers) -> Deal:
        """Whose examples are which.

        Args:
            train: (N,) the labels of the training examples.
            test: (M,) of the test examples.

        Raises:
            DataError: There are too few, or no label sets are left for unseen clients.
        """
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
        clients = [replace(part, test=self._bounded(part.test)) for part in partitions[self.partition](labels, test)]
        unseen = {group: list(self._newcomers(group, clients, labels, test)) for group in self.unseen}
        return Deal(_among(left, clients), {group: _among(left, parts) for group, parts in unseen.items()}, public)

    def _by_permutation(self, train: Numbers, test: Numbers) -> Iterator[Part]:
        labels = tuple(range(self.classes))
        for cluster, size in enumerate(self.sizes):
            shares = self._share_out(np.arange(len(train)), size, cluster)
            tests = np.arange(len(test))
            yield from (Part(f"c{cluster}-{i}", share, tests, labels, cluster, dialect=cluster) for i, share in enumerate(shares))

    def _by_classes(self, train: Numbers, test: Numbers) -> Iterator[Part]:
        groups = np.array_split(self._random("classes").permutation(self.classes), len(self.sizes))
        each = self.anchors // len(self.sizes)
        ids = _numbered("anchor", self.anchors, 1)
        anchors: list[Part] = []
        others: list[Part] = []
        for cluster, (size, group) in enumerate(zip(self.sizes, groups, strict=True)):
            owned = self._anchor_sets(group, each)
            reserved = [_rows(train, labels) for labels in owned]
            shares = self._share_out(_rows(train, group), size, cluster, reserved)
            named = zip(ids[cluster * each :], shares, owned, strict=False)
            anchors += [Part(id, share, _rows(test, labels), labels, cluster) for id, share, labels in named]
            tests, labels = _rows(test, group), _sorted(group)
            others += [Part(f"c{cluster}-{i}", share, tests, labels, cluster) for i, share in enumerate(shares[each:])]
        yield from (*anchors, *others)

    def _evenly(self, train: Numbers, test: Numbers) -> Iterator[Part]:
        shares = self._share_out(np.arange(len(train)), self.clients, 0)
        labels = tuple(range(self.classes))
        return (Part(id, share, np.arange(len(test)), labels) for id, share in zip(self._ids(), shares, strict=True))

    def _by_dirichlet(self, train: Numbers, test: Numbers) -> Iterator[Part]:
        ids = self._ids()
        for attempt in range(_ATTEMPTS):
            random = self._random("dirichlet", attempt)
            ends = np.cumsum(random.dirichlet([self.alpha] * len(ids), self.classes), axis=1)[:, :-1]
            trains, tests = (self._cut(labels, ends, random) for labels in (train, test))
            if min(map(len, trains)) >= 2 and min(map(len, tests)) >= 1:
                return (Part(id, of, tested, self._had(train[of])) for id, of, tested in zip(ids, trains, tests, strict=True))
        raise DataError(
            f"data.partition dirichlet: {_ATTEMPTS} draws with alpha {self.alpha:g} left some of {len(ids)} clients without {self.things}",
            "Use a larger data.alpha, or fewer data.clients.",
        )

    def _cut(self, labels: Numbers, ends: npt.NDArray[np.float64], random: np.random.Generator) -> list[Numbers]:
        """The rows of each client, (classes, clients - 1) `ends` being where each class is cut, as shares of it."""
        hands: list[list[Numbers]] = [[] for _ in range(ends.shape[1] + 1)]
        for label in range(self.classes):
            rows = random.permutation(np.flatnonzero(labels == label))
            for hand, piece in zip(hands, np.split(rows, np.rint(ends[label] * len(rows)).astype(int)), strict=True):
                hand.append(piece)
        return [random.permutation(np.concatenate(hand)) for hand in hands]

    def _had(self, own: Numbers) -> Labels:
        """The classes that a client with these labels is said to have."""
        shares = np.bincount(own, minlength=self.classes) / len(own)
        return _sorted(np.flatnonzero(shares >= min(_HAD, shares.max())))

    def _by_quantity(self, train: Numbers, test: Numbers) -> Iterator[Part]:
        random = self._random("quantity")
        sets = self._label_sets(random)
        hands: list[list[Numbers]] = [[] for _ in sets]
        for label in range(self.classes):
            owners = [hand for hand, own in zip(hands, sets, strict=True) if label in own]
            rows = random.permutation(np.flatnonzero(train == label))
            pieces = [rows] * len(owners) if self.replacement else np.array_split(rows, max(len(owners), 1))
            if owners and not len(pieces[-1]):
                raise DataError(
                    f"data.partition quantity: {len(rows)} training {self.things} of class {label} for {len(owners)} clients",
                    "Use fewer data.clients, or data.replacement.",
                )
            for owner, piece in zip(owners, pieces, strict=False):
                owner.append(piece)
        for id, hand, own in zip(self._ids(), hands, sets, strict=True):
            yield Part(id, random.permutation(np.concatenate(hand)), _rows(test, own), own)

    def _label_sets(self, random: np.random.Generator) -> list[Labels]:
        """The classes of each client of quantity, anchors first."""
        anchors = self._anchor_sets(self._random("anchors").permutation(self.classes), self.anchors)
        sets, holders = list(anchors), np.zeros(self.classes, dtype=int)
        for _ in range(self.clients):  # the rarest classes first, so that every class has about as many clients
            rarest = sorted(random.permutation(self.classes), key=lambda label: int(holders[label]))
            first, rest = rarest[: self.classes_per_client - 1], rarest[self.classes_per_client - 1 :]
            own = next((own for last in rest if not self._kept_free(own := _sorted([*first, last]), anchors)), None)
            if own is None:
                raise DataError(
                    f"data.unseen.aligned: all label sets of {self.classes_per_client} of {self.classes} classes are kept free for them",
                    "Use other data.classes_per_client, data.anchor_classes or data.unseen_anchors.",
                )
            holders[list(own)] += 1
            sets.append(own)
        return sets

    def _anchor_sets(self, classes: Numbers, anchors: int) -> list[Labels]:
        """Disjoint groups of these classes, one for each of so many anchors."""
        return [_sorted(group) for group in classes[: anchors * self._anchor_size].reshape(anchors, self._anchor_size)]

    @property
    def _anchor_size(self) -> int:
        """Classes of each anchor."""
        return self.anchor_classes or self.classes // max(self.anchors, 1)

    def _kept_free(self, labels: Labels, anchors: Sequence[Labels]) -> bool:
        """Whether the label set is one that aligned unseen clients may get: the classes of some anchors, and no others."""
        whole = sum(set(group) <= set(labels) for group in anchors) == self.unseen_anchors
        return "aligned" in self.unseen and whole and len(labels) == self.unseen_anchors * self._anchor_size

    def _newcomers(self, group: Unseen, clients: Sequence[Part], train: Numbers, test: Numbers) -> Iterator[Part]:
        """The unseen clients of a group."""
        share = min(len(part.train) for part in clients)
        sets = self._unseen_sets(group, clients)
        for id, labels in zip(_numbered(group, len(sets)), sets, strict=True):
            rows = self._random("unseen", id).permutation(_rows(train, labels))
            yield Part(id, rows[:share], self._bounded(_rows(test, labels), id), labels)

    def _unseen_sets(self, group: Unseen, clients: Sequence[Part]) -> list[Labels]:
        """As many label sets as the group has clients, which nobody has yet. Raises DataError if there are not so many."""
        random, wanted = self._random("unseen", group), self.unseen[group]
        anchors, taken = [part.labels for part in clients[: self.anchors]], {part.labels for part in clients}
        found: list[Labels] = []
        for _ in range(_DRAWS):
            if group == "aligned":
                labels = _sorted(chain(*(anchors[q] for q in random.choice(self.anchors, self.unseen_anchors, replace=False))))
            else:
                labels = _sorted(random.choice(self.classes, self.classes_per_client, replace=False))
            if labels not in taken:
                taken.add(labels)
                found.append(labels)
            if len(found) == wanted:
                return found
        made = f"{self.unseen_anchors} anchors' classes" if group == "aligned" else f"{self.classes_per_client} of {self.classes} classes"
        raise DataError(
            f"data.unseen.{group}: {wanted} clients, but {len(found)} label sets of {made} were found that no client has",
            f"Use at most {len(found)}, or change how many classes clients have.",
        )

    def _published(self, train: Numbers) -> Numbers:
        """The rows of the public examples. Raises DataError if nothing would be left."""
        if self.public >= len(train):
            raise DataError(f"data.public: {self.public:,} of {len(train):,} training {self.things}", "Leave some to the clients.")
        random = self._random("public")
        classes = [random.permutation(np.flatnonzero(train == label)) for label in range(self.classes)]
        turns = np.concatenate([(np.arange(len(rows)) + 0.5) / max(len(rows), 1) for rows in classes])  # Webster's apportionment
        return np.sort(np.concatenate(classes)[np.argsort(turns, kind="stable")[: self.public]])

    def _share_out(self, rows: Numbers, clients: int, cluster: int, reserved: Sequence[Numbers] = ()) -> list[Numbers]:
        """Disjoint shares of the rows in random order: all of them evenly, or a fraction each.

        Args:
            rows: Of the cluster.
            clients: How many may have any of them.
            cluster: Fixes the order.
            reserved: For each of some more clients, whose shares come first, the rows that it may have; disjoint.
        """
        shuffled = self._random("shares", cluster).permutation(rows)
        size = len(rows) // (clients + len(reserved)) if self.fraction is None else int(self.fraction * len(rows) + 1e-9)
        shares = [shuffled[np.isin(shuffled, own)][:size] for own in reserved]
        left = shuffled[~np.isin(shuffled, np.concatenate([rows[:0], *shares]))]
        if self.fraction is None:
            return [*shares, *np.array_split(left, clients)]
        return [*shares, *(left[i * size : (i + 1) * size] for i in range(clients))]

    def _divide(self, part: Part) -> tuple[Numbers, Numbers]:
        """Rows for training and for validation. Raises DataError where there are too few."""
        held = len(part.train)
        valid = max(1, round(self.valid_fraction * (self.per_client or held)))
        train = self.per_client or held - valid
        if train < 1 or train + valid > held:
            raise DataError(
                f"{held:,} training {self.things} in its share, {max(train, 1) + valid:,} needed with {valid:,} for validation",
                "Use fewer clients, or a smaller data.per_client, or a larger data.fraction.",
            )
        return np.sort(part.train[:train]), np.sort(part.train[train : train + valid])

    def _split(self, name: str, inputs: npt.NDArray[Any], labels: Numbers, rows: Numbers, seed: int) -> ExampleSplit:
        return ExampleSplit(name, inputs, labels, rows, seed, self.mean, self.std, self.classes)

    def _bounded(self, rows: Numbers, *purpose: str) -> Numbers:
        if self.test_examples is None or len(rows) <= self.test_examples:
            return rows
        return np.sort(self._random("test", *purpose).choice(rows, self.test_examples, replace=False))

    def _dialects(self) -> list[Numbers]:
        """How each cluster calls the classes, (classes,) each; one for all unless labels are permuted."""
        dialects = [np.arange(self.classes)]
        if self.partition == "permuted-clusters":
            random = self._random("labels")
            while len(dialects) < len(self.sizes):
                candidate = random.permutation(self.classes)
                if not any(np.array_equal(candidate, other) for other in dialects):
                    dialects.append(candidate)
        return dialects

    def _ids(self) -> list[ClientId]:
        """Of the clients where there are no clusters, anchors first."""
        return [*_numbered("anchor", self.anchors, 1), *_numbered("client", self.clients)]

    def _random(self, *purpose: str | int) -> np.random.Generator:
        return np.random.default_rng(mix(self.seed, *purpose))

    def _described(self, clients: int) -> str:
        unseen = ", ".join(f"{count} {group}" for group, count in self.unseen.items())
        return f"{self.title}: {clients} client{'s' * (clients != 1)}" + f", unseen: {unseen}" * bool(unseen)

    def _check_labels(self, held: Labelled) -> None:
        """Refuse labels that are none of the classes. Raises DataError."""
        with Refusals() as refusals:
            for name, labels in (("train", held.train_labels), ("test", held.test_labels)):
                if len(foreign := np.flatnonzero((labels < 0) | (labels >= self.classes))):
                    problem = f"{self.name}, {name}: row {foreign[0]} has label {labels[foreign[0]]} of {self.classes} classes"
                    refusals.add(problem, f"Labels are 0 to {self.classes - 1}.")

    def _check_classes(self, labels: Numbers) -> None:
        """Refuse classes without training examples where classes are dealt out. Raises DataError."""
        if len(empty := np.flatnonzero(np.bincount(labels, minlength=self.classes) == 0)):
            raise DataError(
                f"{self.title}: no training {self.things} of class {', '.join(map(str, empty))}"
                + f" once {self.public:,} are public" * bool(self.public),
                "Classes are dealt out, so each needs some: use another data.partition, more data, or a smaller data.public.",
            )

    def _check(self) -> None:
        """Refuse what cannot be, whatever the examples are. Raises DataError with all of it."""
        with Refusals() as refusals:
            self._check_shares(refusals)
            self._check_counts(refusals)
            if self.anchors or self.anchor_classes is not None:
                self._check_anchors(refusals)
            if self.unseen:
                self._check_unseen(refusals)

    def _check_shares(self, refusals: Refusals) -> None:
        clustered = self.partition in ("permuted-clusters", "disjoint-classes")
        clients = max(self.sizes) + self.anchors // len(self.sizes) if clustered else self.clients
        if self.partition in ("dirichlet", "quantity"):
            for field in ("fraction", "per_client"):
                if getattr(self, field) is not None and not (self.replacement and field == "per_client"):
                    refusals.add(f"data.{field}: {self.partition} decides how much each client has", f"Leave data.{field} out.")
        elif self.fraction is not None and self.fraction * clients > 1 + 1e-9:
            refusals.add(
                f"data.fraction: {clients} clients with {self.fraction:g} of the {self.things} each have more than there are",
                f"Use at most {1 / clients:.4g}.",
            )
        if self.fraction is not None and self.per_client is not None:
            refusals.add("data.fraction and data.per_client: both say how much a client has", "Give one of them.")
        if self.replacement and self.partition != "quantity":
            refusals.add(f"data.replacement: {self.partition} shares {self.things} out", "Leave it out, or use data.partition=quantity.")
        if self.replacement and self.per_client is None:
            refusals.add("data.replacement: without a number each client would have all of its classes", "Give data.per_client.")

    def _check_counts(self, refusals: Refusals) -> None:
        if self.partition == "permuted-clusters" and len(self.sizes) > math.factorial(self.classes):
            refusals.add(
                f"data.clusters: {len(self.sizes)} clusters, but {self.classes} classes have fewer permutations", "Use fewer clusters."
            )
        if self.partition == "disjoint-classes" and len(self.sizes) > self.classes:
            refusals.add(f"data.clusters: {len(self.sizes)} clusters for {self.classes} classes", f"Use at most {self.classes}.")
        if (self.partition == "quantity" or "random" in self.unseen) and self.classes_per_client > self.classes:
            refusals.add(f"data.classes_per_client: {self.classes_per_client} of {self.classes} classes", f"Use at most {self.classes}.")

    def _check_anchors(self, refusals: Refusals) -> None:
        if self.partition in ("permuted-clusters", "iid"):
            refusals.add(f"data.anchors: {self.partition} gives all clients all classes", "Leave them out, or use another data.partition.")
        if self.anchor_classes is not None and (self.partition == "dirichlet" or not self.anchors):
            why = "mixtures are drawn" if self.partition == "dirichlet" else "there are no anchors"
            refusals.add(f"data.anchor_classes: {why}", "Leave it out.")
        if self.partition in ("disjoint-classes", "quantity"):
            clusters = len(self.sizes) if self.partition == "disjoint-classes" else 1
            each, most = self.anchors // clusters, self.classes // clusters
            within = f"the {most} classes of a cluster" if clusters > 1 else f"{most} classes"
            if self.anchors % clusters:
                refusals.add(f"data.anchors: {self.anchors} anchors for {clusters} clusters", f"Use a multiple of {clusters}.")
            elif each * max(self._anchor_size, 1) > most:
                refusals.add(
                    f"data.anchors: {each} anchors with {max(self._anchor_size, 1)} of {within} each share some",
                    "Use fewer data.anchors, or a smaller data.anchor_classes.",
                )

    def _check_unseen(self, refusals: Refusals) -> None:
        if self.partition in ("permuted-clusters", "iid"):
            refusals.add(f"data.unseen: {self.partition} leaves no other classes to them", "Leave it out, or use another data.partition.")
        if "aligned" in self.unseen and self.partition == "dirichlet":
            refusals.add("data.unseen.aligned: anchors of dirichlet have no groups of classes", "Use data.unseen.random.")
        if "aligned" in self.unseen and self.unseen_anchors > self.anchors:
            refusals.add(
                f"data.unseen.aligned: the classes of {self.unseen_anchors} anchors each, but there are {self.anchors}",
                "Use more data.anchors, or a smaller data.unseen_anchors.",
            )


def _rows(labels: Numbers, classes: Sequence[int] | Numbers) -> Numbers:
    """Which of these labels are of the classes."""
    return np.flatnonzero(np.isin(labels, classes))


def _sorted(labels: Iterable[int]) -> Labels:
    return tuple(sorted(map(int, labels)))


def _numbered(prefix: str, count: int, digits: int = 2) -> list[ClientId]:
    digits = max(digits, len(str(count - 1)))
    return [f"{prefix}-{i:0{digits}}" for i in range(count)]


def _among(rows: Numbers, parts: Iterable[Part]) -> list[Part]:
    """The same parts, their training rows being counted among others."""
    return [replace(part, train=rows[part.train]) for part in parts]
