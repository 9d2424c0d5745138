"""The fields of a `data` section that say how labelled examples fall to clients."""

from abc import ABC, abstractmethod
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.core.protocol import ClientId
from coterie.data.section import Share

Positive = Annotated[int, Field(ge=1)]
Scheme = Literal["permuted-clusters", "disjoint-classes", "iid", "dirichlet", "quantity"]
Unseen = Literal["aligned", "random"]


class PartitionFields(BaseModel, ABC):
    """What a recipe says of the clients of labelled examples; see `Partitioner`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: Annotated[
        int, Field(ge=0, description="fixes which example is whose; independent of the run's seed")
    ] = 0
    partition: Annotated[Scheme, Field(description="how the examples fall to clients")] = (
        "permuted-clusters"
    )
    clusters: Annotated[
        int, Field(ge=1, description="of permuted-clusters and disjoint-classes: how many")
    ] = 4
    clients_per_cluster: Annotated[
        int, Field(ge=1, description="how many clients each cluster has, anchors not counted")
    ] = 2
    cluster_sizes: Annotated[
        tuple[Positive, ...] | None,
        Field(
            min_length=1, description="clients of each cluster, instead of the two numbers above"
        ),
    ] = None
    clients: Annotated[
        int,
        Field(ge=1, description="of iid, dirichlet and quantity: how many, anchors not counted"),
    ] = 10
    alpha: Annotated[
        float,
        Field(
            gt=0,
            allow_inf_nan=False,
            description="of dirichlet: the smaller, the more unlike the clients",
        ),
    ] = 0.5
    classes_per_client: Annotated[
        int,
        Field(
            ge=1, description="classes of each client of quantity, and of each random unseen one"
        ),
    ] = 2
    replacement: Annotated[
        bool,
        Field(
            description="of quantity: each client draws `per_client` examples of its classes, "
            "whoever else has them; none of them twice"
        ),
    ] = False
    fraction: Annotated[
        float | None,
        Field(
            gt=0,
            le=1,
            description="share of its cluster's training examples of each client; null: shared "
            "out evenly",
        ),
    ] = None
    per_client: Annotated[
        int | None,
        Field(
            ge=1,
            description="training examples of each client, those for validation not counted; "
            "null: all of its share",
        ),
    ] = None
    valid_fraction: Annotated[
        Share,
        Field(description="examples for validation, as a share of the client's (at least one)"),
    ] = 0.1
    test_examples: Annotated[
        int | None,
        Field(ge=1, description="at most so many test examples of each client; null: all"),
    ] = None
    anchors: Annotated[
        int,
        Field(
            ge=0,
            description="of disjoint-classes, dirichlet and quantity: how many anchors there are "
            "besides",
        ),
    ] = 0
    anchor_classes: Annotated[
        int | None,
        Field(
            ge=1,
            description="classes of each anchor, which no other anchor has; null: as many as "
            "there can be",
        ),
    ] = None
    unseen: Annotated[
        dict[Unseen, Positive],
        Field(
            description="how many clients are scored without ever being trained with: `aligned`, "
            "each with the classes of some anchors,"
            " a label set that is kept free for them; `random`, each with `classes_per_client` "
            "classes"
        ),
    ] = {}
    unseen_anchors: Annotated[
        int, Field(ge=2, description="of how many anchors an aligned unseen client has the classes")
    ] = 2
    public: Annotated[
        int,
        Field(
            ge=0, description="so many training examples, of every class its share, fall to nobody"
        ),
    ] = 0

    name: ClassVar[str]
    things: ClassVar[str]  # what the examples are, in a message

    @property
    @abstractmethod
    def classes(self) -> int:
        """Labels are below it."""

    @property
    def title(self) -> str:
        """What the data are, in a few words."""
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
        """Of the clients where there are no clusters, anchors first."""
        return [*numbered("anchor", self.anchors, 1), *numbered("client", self.clients)]


def numbered(prefix: str, count: int, digits: int = 2) -> list[ClientId]:
    """Return ids of so many clients: `prefix-00`, `prefix-01`, ..."""
    digits = max(digits, len(str(count - 1)))
    return [f"{prefix}-{i:0{digits}}" for i in range(count)]
