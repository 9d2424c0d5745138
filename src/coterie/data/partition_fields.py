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

    seed: Annotated[
        int,
        Field(
            ge=0, description="seed of the partition among clients; independent of the run's seed"
        ),
    ] = 0
    partition: Annotated[Scheme, Field(description="how examples are divided among clients")] = (
        "permuted-clusters"
    )
    clusters: Annotated[
        int,
        Field(ge=1, description="for permuted-clusters and disjoint-classes: number of clusters"),
    ] = 4
    clients_per_cluster: Annotated[
        int, Field(ge=1, description="clients per cluster, without anchors")
    ] = 2
    cluster_sizes: Annotated[
        tuple[Positive, ...] | None,
        Field(
            min_length=1, description="clients of each cluster, in place of the two numbers above"
        ),
    ] = None
    clients: Annotated[
        int,
        Field(
            ge=1, description="for iid, dirichlet and quantity: number of clients, without anchors"
        ),
    ] = 10
    alpha: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="for dirichlet: alpha; the smaller, the more the clients differ",
        ),
    ] = 0.5
    classes_per_client: Annotated[
        int,
        Field(
            ge=1, description="classes of each client of quantity, and of each random unseen client"
        ),
    ] = 2
    replacement: Annotated[
        bool,
        Field(
            description="for quantity: clients draw `per_client` examples of their classes "
            "independently, so that two clients may have the same example"
        ),
    ] = False
    fraction: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of the cluster's training examples that each client gets; null: "
            "equal shares",
        ),
    ] = None
    per_client: Annotated[
        int | None,
        Field(
            ge=1,
            description="training examples per client, without those for validation; null: all of "
            "its share",
        ),
    ] = None
    valid_fraction: Annotated[
        Share,
        Field(description="share of a client's examples used for validation (at least one)"),
    ] = 0.1
    test_examples: Annotated[
        int | None,
        Field(ge=1, description="most test examples per client; null: all"),
    ] = None
    anchors: Annotated[
        int,
        Field(
            ge=0,
            description="for disjoint-classes, dirichlet and quantity: number of anchors, besides "
            "the clients",
        ),
    ] = 0
    anchor_classes: Annotated[
        int | None,
        Field(
            ge=1,
            description="classes per anchor, which no other anchor has; null: as many as possible",
        ),
    ] = None
    unseen: Annotated[
        dict[Unseen, Positive],
        Field(
            description="number of clients that never train and are only scored: `aligned`, each "
            "with the classes of some anchors,"
            " a label set that is kept free for them; `random`, each with `classes_per_client` "
            "classes"
        ),
    ] = {}
    unseen_valid: Annotated[
        int | None,
        Field(
            ge=1,
            description="most validation examples of an unseen client, on which nobody trains; "
            "null: by `valid_fraction`, some of which others may train on",
        ),
    ] = None
    unseen_anchors: Annotated[
        int, Field(ge=2, description="number of anchors whose classes an aligned unseen client has")
    ] = 2
    public: Annotated[
        int,
        Field(
            ge=0, description="training examples that no client gets, in proportion to the classes"
        ),
    ] = 0

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
        """Clients of each cluster, anchors not counted."""
        return self.cluster_sizes or (self.clients_per_cluster,) * self.clusters

    @property
    def _anchor_size(self) -> int:
        """Classes of each anchor."""
        return self.anchor_classes or self.classes // max(self.anchors, 1)

    def _ids(self) -> list[ClientId]:
        """Return the ids of clients without clusters, anchors first."""
        return [*numbered("anchor", self.anchors, 1), *numbered("client", self.clients)]


def numbered(prefix: str, count: int, digits: int = 2) -> list[ClientId]:
    """Return the ids `prefix-00`, `prefix-01`, ... of some clients."""
    digits = max(digits, len(str(count - 1)))
    return [f"{prefix}-{i:0{digits}}" for i in range(count)]
