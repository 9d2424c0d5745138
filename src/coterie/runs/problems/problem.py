"""The learning problem: one interface to language models and classifiers."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import torch

from coterie.client.blueprint import Model, Trainable
from coterie.client.client import Client
from coterie.core.metrics import Metric
from coterie.core.protocol import ClientId
from coterie.core.result import Routing
from coterie.core.tensors import Tensors
from coterie.data.federation import Federation
from coterie.models import artifact
from coterie.models.layout import Layout


class LearningProblem(ABC):
    """A kind of model on the data of a recipe, loaded and checked."""

    metric: ClassVar[Metric]
    device: torch.device
    dtype: torch.dtype
    federation: Federation

    @property
    def threads(self) -> int | None:
        """Threads that suit very small models; None: as many as PyTorch has."""
        return None

    @property
    @abstractmethod
    def base(self) -> Layout:
        """The layout before a method's requirements."""

    @abstractmethod
    def check(self, method: str, layout: Layout) -> None:
        """Refuse a layout that models of this kind cannot have. Raises ModelError."""

    @abstractmethod
    def build(self, layout: Layout) -> Model:
        """Return a model for the clients of one layout to take turns in."""

    @abstractmethod
    def trainable(self, layout: Layout) -> Trainable:
        """Return the trainable part of a model."""

    @abstractmethod
    def flops(self, layout: Layout, trained: bool) -> int:
        """Return one prediction's forward operations; `trained`: by a method that trains."""

    def scores(self, layout: Layout) -> Tensors:
        """Return the shape of a client's score of each split, see `Client.score`."""
        score = torch.empty(self.metric.totals, dtype=torch.float64)
        return {"valid": score, "test": score}

    @property
    def fingerprint(self) -> str | None:
        """Return a fingerprint of what all clients start with, if recipes do not determine it."""
        return None

    @property
    def bases(self) -> tuple[str, ...]:
        """The pretrained bases that it uses: Hub ids, local folders, or `embedded`."""
        return ()

    @property
    def once_bytes(self) -> int:
        """The bytes of what all clients start with, sent at most once."""
        return 0

    @abstractmethod
    def keep(self, folder: Path, client: Client, layout: Layout, origin: artifact.Origin) -> None:
        """Write the client's personal model to a folder of its own."""

    def look(
        self, clients: Sequence[ClientId], build: Callable[[ClientId], Client]
    ) -> Routing | None:
        """Return the routing of the beginnings of all test texts; None without a router."""
        return None
