"""The fields of a `data` section that divide labelled examples among clients."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.core.protocol import ClientId
from coterie.data.section import Share

Positive = Annotated[int, Field(ge=1)]
Scheme = Literal["permuted-clusters", "disjoint-classes", "iid", "dirichlet", "quantity"]
Unseen = Literal["aligned", "random"]


class PartitionFields(BaseModel, ABC):
    """The fields that divide labelled examples among clients; see `Partitioner`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = Field(0, ge=0)  # seed of the partition among clients; independent of the run's seed
    partition: Scheme = "permuted-clusters"  # how examples are divided among clients
    clusters: int = Field(4, ge=1)  # for permuted-clusters and disjoint-classes: number of clusters
    clients_per_cluster: int = Field(2, ge=1)  # clients per cluster, without anchors
    # clients of each cluster, in place of the two numbers above
    cluster_sizes: tuple[Positive, ...] | None = Field(None, min_length=1)
    # for iid, dirichlet and quantity: number of clients, without anchors
    clients: int = Field(10, ge=1)
    # for dirichlet: alpha; the smaller, the more the clients differ
    alpha: float = Field(0.5, gt=0, allow_inf_nan=False)
    # classes of each client of quantity, and of each random unseen client
    classes_per_client: int = Field(2, ge=1)
    # for quantity: clients draw `per_client` examples of their classes independently, so that two
    # clients may have the same example
    replacement: bool = False
    # share of the cluster's training examples that each client gets; null: equal shares
    fraction: float | None = Field(None, gt=0, le=1)
    # training examples per client, without those for validation; null: all of its share
    per_client: int | None = Field(None, ge=1)
    valid_fraction: Share = 0.1  # share of a client's examples used for validation (at least one)
    test_examples: int | None = Field(None, ge=1)  # most test examples per client; null: all
    # for disjoint-classes, dirichlet and quantity: number of anchors, besides the clients; those of
    # dirichlet are drawn by themselves from all examples
    anchors: int = Field(0, ge=0)
    # classes per anchor, which no other anchor has; null: as many as possible
    anchor_classes: int | None = Field(None, ge=1)
    # number of clients that never train and are only scored: `aligned`, each with the classes of
    # two anchors, a label set that is kept free for them; `random`, each with `classes_per_client`
    # classes
    unseen: dict[Unseen, Positive] = {}
    # most validation examples of an unseen client, on which nobody trains; null: by
    # `valid_fraction`, some of which others may train on
    unseen_valid: int | None = Field(None, ge=1)
    # training examples that no client gets, in proportion to the classes
    public: int = Field(0, ge=0)

    name: ClassVar[str]
    things: ClassVar[str]  # the plural noun for examples in messages

    @property
    @abstractmethod
    def classes(self) -> int:
        """The number of classes; labels are below it."""

    @property
    def title(self) -> str:
        """A short description of the data."""
        return f"{self.name}, {self.partition}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of clients in each cluster, without anchors."""
        return self.cluster_sizes or (self.clients_per_cluster,) * self.clusters

    @property
    def _anchor_size(self) -> int:
        return self.anchor_classes or self.classes // max(self.anchors, 1)

    def _ids(self) -> list[ClientId]:
        return [*numbered("anchor", self.anchors, 1), *numbered("client", self.clients)]


def numbered(prefix: str, count: int, digits: int = 2) -> list[ClientId]:
    """Return the ids `prefix-00`, `prefix-01`, ..."""
    digits = max(digits, len(str(count - 1)))
    return [f"{prefix}-{i:0{digits}}" for i in range(count)]
