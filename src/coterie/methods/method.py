"""What every method is: one file, state in and state out."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, Protocol

import torch
from pydantic import ConfigDict, Field

from coterie.client import Client
from coterie.models.adapter import Layout
from coterie.protocol import ClientId, Round, State, task
from coterie.roles import Role
from coterie.tensors import Tensors


class Reader(Protocol):
    """The server's view of the model: initial values of the shared tensors."""

    def read(self, *roles: Role) -> Tensors: ...


@dataclass(frozen=True)
class Method(ABC):
    """A way of training personal models together. Subclasses give `init`, `round` and their `@task`s.

    Args:
        rounds: T, communication rounds.
        local_steps: L, local iterations per round.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    pooled: ClassVar[bool] = False  # whether it trains on the union of all clients' data

    rounds: Annotated[int, Field(ge=0, description="T, communication rounds")] = 20
    local_steps: Annotated[int, Field(ge=1, description="L, local iterations per round")] = 10

    @property
    def total_iterations(self) -> int:
        """T * L: what the cosine schedule of the experts runs over."""
        return self.rounds * self.local_steps

    @abstractmethod
    def layout(self, position: int, base: Layout) -> Layout:
        """The adapter of the client at `position` of the federation; `base` carries the recipe's rank, alpha and dropout."""

    @abstractmethod
    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        """The server's state before the first round."""

    @abstractmethod
    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        """One round: yields Asks, is sent the replies, returns the next state."""

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """What each client would get from the server now: with it loaded, it is synchronised (`test_synced`)."""
        return {i: {} for i in clients}

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """What a client needs beyond its own state to have its personal model: nothing, right after its last local iteration."""
        return {i: {} for i in clients}

    @task
    def score(self, client: Client, tensors: Tensors) -> Tensors:
        """NLL and tokens, (2,) each, of the whole valid and test sets, with `tensors` on loan."""
        with client.borrowing(tensors):
            return {"valid": client.score(client.valid), "test": client.score(client.test)}

    @task
    def score_test(self, client: Client, tensors: Tensors) -> Tensors:
        """NLL and tokens, (2,), of the whole test set, with `tensors` on loan."""
        with client.borrowing(tensors):
            return {"test": client.score(client.test)}

    @task
    def keep(self, client: Client, tensors: Tensors) -> Tensors:
        """Make `tensors` part of the client's personal model."""
        client.load(tensors)
        return {}


@dataclass(frozen=True)
class OneAdapter(Method):
    """A method without routing, at the budget of CoMiGS-1G1S (spec section 4).

    Args:
        budget: "experts": two LoRA experts with fixed equal weights, as the authors did; "rank": one LoRA of twice the rank.
    """

    budget: Annotated[
        Literal["experts", "rank"], Field(description="two LoRA experts with fixed equal weights, or one LoRA of twice the rank")
    ] = "experts"

    def layout(self, position: int, base: Layout) -> Layout:
        if self.budget == "rank":
            return replace(base, generalists=1, specialists=0, mlp_rank=2 * base.rank, routing="equal", balance="none")
        return replace(base, generalists=2, specialists=0, routing="equal", balance="none")
