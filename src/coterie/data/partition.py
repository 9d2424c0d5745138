"""Division of labelled examples among anchors, other clients, unseen clients and a public set."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.core.foreign import read_text, yaml_of
from coterie.core.protocol import ClientId, derive_seed
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData, ClientInfo, Federation
from coterie.data.partition_fields import numbered
from coterie.data.refusals import Refusals
from coterie.data.schemes import UNSEEN_ANCHORS, ClientShare, PartitionSchemes
from coterie.data.splits import SPLITS, Numbers

# the names of classes, by data set
CLASSES: Mapping[str, Any] = yaml_of(read_text(Path(__file__).with_name("classes.yaml")))


@dataclass(frozen=True)
class Labelled:
    """Examples that all clients share."""

    train: npt.NDArray[Any]  # (N, ...), as `ExampleSplit` takes them
    train_labels: Numbers  # (N,) int64
    test: npt.NDArray[Any]  # (M, ...), like `train`
    test_labels: Numbers  # (M,) int64


class Partitioner(PartitionSchemes):
    """A `data` section of labelled examples. Subclasses say what and where they are; the fields say
    how they fall to clients.

    Partitions:
        permuted-clusters: All clusters have all examples, and each calls the classes by a
            permutation of their labels; the first leaves them as they are. The clients of a cluster
            share the training examples out; each has all test examples.
        disjoint-classes: Each cluster has classes of its own, whose training examples its clients
            share out; each has all their test examples. Anchors are members of the clusters, as
            many of each, and have some of their cluster's classes.
        iid: All clients share the training examples out; each has all test examples.
        dirichlet: How each class falls to the clients is drawn from Dirichlet(alpha), for training
            and test examples alike. Anchors are drawn by themselves from all examples, so that an
            anchor and another client may have the same one (DDOME, Appendix A). A client is said
            to have the classes that make up a tenth of its examples.
        quantity: Each client has a few classes, the rarest first; anchors have disjoint groups of
            classes. The training examples of a class are shared out among those who have it, and
            each has all test examples of its classes.

    Labels keep the data set's classes in every partition.

    Unseen clients have test examples like anybody else, and training examples of their classes
    which others may have too: so many as the smallest client. None has the label set of a client
    that trains, and no two of a group have the same one. With `unseen_valid` their validation
    examples are among those on which nobody trains.
    """

    mean: ClassVar[tuple[float, ...]] = ()  # of each channel of images; see `ExampleSplit`
    std: ClassVar[tuple[float, ...]] = ()
    class_names: ClassVar[tuple[str, ...]] = ()  # of the data set, if its classes have any

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes; () if they have none, or if clusters permute them."""
        return () if self.partition == "permuted-clusters" else self.class_names

    def federated(self, read: Callable[[], Labelled], order_seed: int) -> Federation:
        """Return the federation. Its clients are views of the same arrays. `read`, called once the
        fields are checked, returns the examples; `order_seed`, the run's seed, fixes the order in
        which they are drawn. Raises DataError for invalid fields or labels, or too few examples for
        the clients.
        """
        self._check()
        held = read()
        self._check_labels(held)
        dialects = [
            (calls[held.train_labels], calls[held.test_labels])
            for calls in self._label_permutations()
        ]
        partition = self.partitioned(held.train_labels, held.test_labels)
        clients: dict[ClientId, ClientData] = {}
        unseen = {part.id for parts in partition.unseen.values() for part in parts}
        # public examples and those that clients train on; `everyone` has unseen clients last
        taken = [partition.public]
        with Refusals() as refusals:
            for part in partition.everyone:
                trains, tests = dialects[part.dialect]
                with refusals.gather(f"client {part.id!r}: "):
                    train, valid = self._divide(part)
                    if part.id not in unseen:
                        taken.append(train)
                    elif self.unseen_valid is not None:
                        valid = self._untrained(part, trains, np.concatenate([*taken, train]))
                    sources = (
                        (held.train, trains, train),
                        (held.train, trains, valid),
                        (held.test, tests, part.test),
                    )
                    seed = derive_seed(order_seed, part.id)
                    splits = (
                        self._split(name, *source, seed)
                        for name, source in zip(SPLITS, sources, strict=True)
                    )
                    clients[part.id] = ClientData(part.id, *splits)
        public = None
        if self.public:
            seed, labels = derive_seed(order_seed, "public"), held.train_labels
            public = self._split("public", held.train, labels, partition.public, seed)
        clusters = {p.id: p.cluster for p in partition.clients if p.cluster is not None}
        return Federation(
            {part.id: clients[part.id] for part in partition.clients},
            self._described(len(partition.clients)),
            clusters or None,
            tuple(part.id for part in partition.clients[: self.anchors]),
            {part.id: part.labels for part in partition.everyone},
            {g: {part.id: clients[part.id] for part in of} for g, of in partition.unseen.items()},
            public,
        )

    def client_info(self, client: ClientId) -> ClientInfo | None:
        """Return what is known of a client without the examples; None for an impossible id."""
        return self._client_infos().get(client)

    def _client_infos(self) -> dict[ClientId, ClientInfo]:
        """Return what is known of clients without the examples, in the order of `partitioned`."""
        anchors = numbered("anchor", self.anchors, 1)
        each = max(self.anchors // len(self.sizes), 1)  # anchors per cluster
        if self.partition in ("permuted-clusters", "disjoint-classes"):
            clusters: dict[ClientId, int | None] = {id: k // each for k, id in enumerate(anchors)}
            clusters |= {
                f"c{cluster}-{i}": cluster
                for cluster, size in enumerate(self.sizes)
                for i in range(size)
            }
        else:
            clusters = dict.fromkeys(self._ids())
        everyone = [(id, "") for id in clusters]
        everyone += [
            (id, group) for group, count in self.unseen.items() for id in numbered(group, count)
        ]
        return {
            id: ClientInfo(
                position,
                group,
                clusters.get(id),
                position if position < self.anchors else None,
                self.classes,
            )
            for position, (id, group) in enumerate(everyone)
        }

    def _divide(self, part: ClientShare) -> tuple[Numbers, Numbers]:
        """Return rows for training and validation. Raises DataError if there are too few."""
        held = len(part.train)
        valid = max(1, round(self.valid_fraction * (self.per_client or held)))
        train = self.per_client or held - valid
        if train < 1 or train + valid > held:
            raise DataError(
                f"{held:,} training {self.things} in its share, {max(train, 1) + valid:,} needed "
                f"with {valid:,} for validation",
                "Use fewer clients, or a smaller data.per_client, or a larger data.fraction.",
            )
        return np.sort(part.train[:train]), np.sort(part.train[train : train + valid])

    def _untrained(self, part: ClientShare, labels: Numbers, taken: Numbers) -> Numbers:
        """Return validation rows of an unseen client's classes, on which no client trains."""
        rows = np.setdiff1d(np.flatnonzero(np.isin(labels, part.labels)), taken)
        if not len(rows):
            raise DataError(
                f"data.unseen_valid: others train on all {self.things} of its classes",
                "Leave it out, or use a smaller data.per_client or a larger data.valid_fraction.",
            )
        return np.sort(self._random("unseen valid", part.id).permutation(rows)[: self.unseen_valid])

    def _split(
        self, name: str, inputs: npt.NDArray[Any], labels: Numbers, rows: Numbers, seed: int
    ) -> ExampleSplit:
        return ExampleSplit(name, inputs, labels, rows, seed, self.mean, self.std, self.classes)

    def _label_permutations(self) -> list[Numbers]:
        """Return the (classes,) permutation of the labels in each cluster, the first unchanged."""
        dialects = [np.arange(self.classes)]
        if self.partition == "permuted-clusters":
            random = self._random("labels")
            while len(dialects) < len(self.sizes):
                candidate = random.permutation(self.classes)
                if not any(np.array_equal(candidate, other) for other in dialects):
                    dialects.append(candidate)
        return dialects

    def _described(self, clients: int) -> str:
        unseen = ", ".join(f"{count} {group}" for group, count in self.unseen.items())
        also = f", unseen: {unseen}" * bool(unseen)
        return f"{self.title}: {clients} client{'s' * (clients != 1)}{also}"

    def _check_labels(self, held: Labelled) -> None:
        with Refusals() as refusals:
            for name, labels in (("train", held.train_labels), ("test", held.test_labels)):
                if len(foreign := np.flatnonzero((labels < 0) | (labels >= self.classes))):
                    label = f"label {labels[foreign[0]]} of {self.classes} classes"
                    problem = f"{self.name}, {name}: row {foreign[0]} has {label}"
                    refusals.add(problem, f"Labels are 0 to {self.classes - 1}.")

    def _check(self) -> None:
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
                if getattr(self, field) is not None and not (
                    self.replacement and field == "per_client"
                ):
                    problem = f"data.{field}: {self.partition} decides how much each client has"
                    refusals.add(problem, f"Leave data.{field} out.")
        elif self.fraction is not None and self.fraction * clients > 1 + 1e-9:
            refusals.add(
                f"data.fraction: {clients} clients with {self.fraction:g} of the {self.things} "
                f"each need more than there are",
                f"Use at most {1 / clients:.4g}.",
            )
        if self.fraction is not None and self.per_client is not None:
            problem = "data.fraction and data.per_client: both fix how much a client has"
            refusals.add(problem, "Give one of them.")
        if self.replacement and self.partition != "quantity":
            problem = (
                f"data.replacement: {self.partition} divides {self.things} without replacement"
            )
            refusals.add(problem, "Leave it out, or use data.partition=quantity.")
        if self.replacement and self.per_client is None:
            refusals.add(
                "data.replacement: without data.per_client each client would have all examples "
                "of its classes",
                "Give data.per_client.",
            )

    def _check_counts(self, refusals: Refusals) -> None:
        if self.partition == "permuted-clusters" and len(self.sizes) > math.factorial(self.classes):
            refusals.add(
                f"data.clusters: {len(self.sizes)} clusters, but {self.classes} classes have "
                f"fewer permutations",
                "Use fewer clusters.",
            )
        if self.partition == "disjoint-classes" and len(self.sizes) > self.classes:
            problem = f"data.clusters: {len(self.sizes)} clusters for {self.classes} classes"
            refusals.add(problem, f"Use at most {self.classes}.")
        if (
            self.partition == "quantity" or "random" in self.unseen
        ) and self.classes_per_client > self.classes:
            problem = (
                f"data.classes_per_client: {self.classes_per_client} of {self.classes} classes"
            )
            refusals.add(problem, f"Use at most {self.classes}.")

    def _check_anchors(self, refusals: Refusals) -> None:
        if self.partition in ("permuted-clusters", "iid"):
            problem = f"data.anchors: {self.partition} gives all clients all classes"
            refusals.add(problem, "Leave them out, or use another data.partition.")
        if self.anchor_classes is not None and (self.partition == "dirichlet" or not self.anchors):
            why = "mixtures are drawn" if self.partition == "dirichlet" else "there are no anchors"
            refusals.add(f"data.anchor_classes: {why}", "Leave it out.")
        if self.partition in ("disjoint-classes", "quantity"):
            clusters = len(self.sizes) if self.partition == "disjoint-classes" else 1
            each, most = self.anchors // clusters, self.classes // clusters
            within = f"the {most} classes of a cluster" if clusters > 1 else f"{most} classes"
            if self.anchors % clusters:
                problem = f"data.anchors: {self.anchors} anchors for {clusters} clusters"
                refusals.add(problem, f"Use a multiple of {clusters}.")
            elif each * max(self._anchor_size, 1) > most:
                refusals.add(
                    f"data.anchors: {each} anchors with {max(self._anchor_size, 1)} of {within} "
                    f"each would overlap",
                    "Use fewer data.anchors, or a smaller data.anchor_classes.",
                )

    def _check_unseen(self, refusals: Refusals) -> None:
        if self.partition in ("permuted-clusters", "iid"):
            problem = f"data.unseen: {self.partition} leaves no other classes for them"
            refusals.add(problem, "Leave it out, or use another data.partition.")
        if "aligned" in self.unseen and self.partition == "dirichlet":
            problem = "data.unseen.aligned: anchors of dirichlet have no groups of classes"
            refusals.add(problem, "Use data.unseen.random.")
        if "aligned" in self.unseen and self.anchors < UNSEEN_ANCHORS:
            refusals.add(
                f"data.unseen.aligned: the classes of {UNSEEN_ANCHORS} anchors each, but "
                f"there are {self.anchors}",
                "Use more data.anchors.",
            )
