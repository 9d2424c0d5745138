"""The base class of methods: each is one file, and maps a state to the next."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import ConfigDict, Field
from torch import Tensor

from coterie.client.blueprint import AnyClient, Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.client.state import improves, recall, remember
from coterie.core.protocol import Adaptation, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST, Role
from coterie.core.tensors import Tensors
from coterie.models.layout import Layout


@dataclass(frozen=True)
class Method(ABC):
    """A way of training personal models together. Subclasses give `init`, `round` and their
    `@task`s.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")
    # Roles whose tensors may leave a client.
    shared: ClassVar[tuple[Role, ...]] = (GENERALIST,)
    # Fields that may be lists with one value per client.
    per_client: ClassVar[tuple[str, ...]] = ()
    # Whether it trains on the union of all clients' data.
    centralized: ClassVar[bool] = False
    # Whether clients may join the federation and leave it, see `members`.
    dynamic_membership: ClassVar[bool] = False
    # Whether the server alone can give a model to anyone, also to clients that it never saw.
    serves_unseen_clients: ClassVar[bool] = False
    # Whether new clients can train on from what the server has, though it is no model yet.
    joinable: ClassVar[bool] = False
    # Whether clients must keep parts of their model that exist nowhere else.
    stateful: ClassVar[bool] = False
    # Whether clients keep nothing of the model between rounds, whatever the recipe says.
    stateless: ClassVar[bool] = False
    # Whether a step follows the aggregation, at the server or where a client loads the result: a
    # single client does not get back what it sent.
    server_steps: ClassVar[bool] = False
    # Why clients' single updates have to be seen, where `needs_only_mean` does not hold.
    beyond_mean: ClassVar[str] = "needs more of its clients than the uniform mean of their updates"
    # Modules of other packages that it needs besides coterie's core.
    packages: ClassVar[tuple[str, ...]] = ()

    rounds: Annotated[int, Field(ge=0)] = 20  # T, communication rounds
    local_steps: Annotated[int, Field(ge=1)] = 10  # L, local iterations per round
    # epochs over a client's own data per round, in place of local_steps
    local_epochs: Annotated[int | None, Field(ge=1)] = None

    @property
    def methods(self) -> Mapping[str, "Method"]:
        """The methods that train at once, by name, if it is made of several; else {}."""
        return {}

    def steps(self, client: AnyClient) -> int:
        """Return the local iterations of a client in a round, see `steps_of`."""
        return self.steps_of(client.windows, client.training.batch_size)

    def steps_of(self, windows: int, batch_size: int) -> int:
        """Return the local iterations in a round of a client with so many rows of training data;
        schedules, privacy and the conformance suite count by it.
        """
        if self.local_epochs is None:
            return self.local_steps
        return math.ceil(self.local_epochs * windows / batch_size)

    @property
    def total_iterations(self) -> int:
        """T * L, for clients that take `local_steps`; schedules run over `rounds` * `steps`."""
        return self.rounds * self.local_steps

    @abstractmethod
    def layout(self, position: int, base: Layout) -> Layout:
        """Return the adapter of the client at `position` of the federation; `base` carries the
        recipe's rank, alpha and dropout.
        """

    @abstractmethod
    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        """Return the server's state before the first round."""

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        """Return the state for a federation of these clients, where some have joined or left it
        since; see `dynamic_membership`.
        """
        return state

    @abstractmethod
    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        """Do one round: yield Asks, receive the replies, return the next state.

        Args:
            state: The server's.
            clients: The clients that take part. Other members keep their tensors, on the client and
                in the state, and continue from them later.
            rng: The server's random numbers of this round.
        """

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        """Do what follows the last round once, with all connected clients; usually nothing."""
        yield from ()
        return state

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:  # noqa: B027 - most have nothing to refuse
        """Refuse, before anything starts, a combination that cannot work. Raises RecipeError."""

    @property
    def needs_only_mean(self) -> bool:
        """Whether the server needs only the uniform mean of updates."""
        return False

    @property
    def by_examples(self) -> bool:
        """Whether all that a client sends was trained by gradients that can be made private, one in
        each local iteration. These are `Client.step` of the roles in `shared`, and
        `Client.gradient_to_share`. A method must declare this itself: an inherited value does not
        count, see `protocol.protects_examples`.
        """
        return False

    @property
    def row_stochastic(self) -> bool:
        """Whether each row of `collaboration` sums to 1; otherwise each weight lies in [0, 1]."""
        return True

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor | None:
        """Return the weights that client i, row i, gives each client, (N, N), if the method has
        any.
        """
        return None

    def adapt(self, state: State, clients: Sequence[ClientId]) -> Adaptation:
        """Give models to clients that have none, without labels; return what each client gets. See
        `serves_unseen_clients`.
        """
        yield from ()
        return self.download(state, clients)

    def local_iterations(self, client: Client) -> None:
        """Do the L local iterations of a round."""
        for _ in range(self.steps(client)):
            self.iterate(client)

    def iterate(self, client: Client) -> None:
        """Do one local iteration outside a round, training all roles but `client.frozen`."""
        client.step(GENERALIST, on=client.train)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return what each client would get from the server now, to be synchronised
        (`test_synced`).
        """
        return {i: {} for i in clients}

    def for_absent(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return what clients that took part in no round are scored with, by default `download`."""
        return self.download(state, clients)

    def loadable(self, client: Any, download: Tensors) -> Tensors:
        """Return what a client loads from a download, which may be in another form."""
        return download

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return the tensors that a client's personal model needs beyond the client's state: by
        default none, right after its last local iteration.
        """
        return {i: {} for i in clients}

    def before_scores(self, received: Mapping[ClientId, Tensors]) -> Adaptation:
        """Return what each client is sent to be scored, after any exchange that this needs."""
        yield from ()
        return received

    def score_spec(self, scores: Tensors) -> Tensors:
        """Return the form of a score's reply, from that of one model's."""
        return scores

    def score_part(self, client: Any, tensors: Tensors, rows: int) -> Tensors:
        """Return `score_test` of so many rows of test data."""
        with client.borrowing(self.loadable(client, tensors)):
            return {"test": client.score_part(client.test, rows)}

    @task(Sends.SCORES)
    def score(self, client: Client, tensors: Tensors) -> Tensors:
        """Return the score (`Client.score`) of all valid and test data, with `tensors` on loan."""
        with client.borrowing(self.loadable(client, tensors)):
            return {"valid": client.score(client.valid), "test": client.score(client.test)}

    @task(Sends.SCORES)
    def score_test(self, client: Client, tensors: Tensors) -> Tensors:
        """Return the score (`Client.score`) of all test data, with `tensors` on loan."""
        with client.borrowing(self.loadable(client, tensors)):
            return {"test": client.score(client.test)}

    @task(Sends.SCORES)
    def score_and_keep(self, client: Client, tensors: Tensors) -> Tensors:
        """Return `score` of `Client.scored_rows`; keep a copy of the personal model if it is the
        best on validation.
        """
        with client.scoring(client.scored_rows[0]):
            scores = self.score(client, tensors)
        if improves(client, scores["valid"]):
            with client.borrowing(self.loadable(client, tensors)):
                remember(client, scores, client.round)
        return scores

    @task(Sends.SCORES)
    def recall(self, client: Client, tensors: Tensors) -> Tensors:
        """Make the copy of `score_and_keep` the client's model; return its scores, of what is
        scored at the end, and round.
        """
        recalled = recall(client)
        if client.scored_rows[0] is None:
            return recalled
        with client.scoring(client.scored_rows[1]):
            scores = self.score(client, {})
        return recalled | {name: scores[name] for name in ("valid", "test")}

    @task(Sends.NOTHING)
    def keep(self, client: Client, tensors: Tensors) -> Tensors:
        """Make `tensors` part of the client's personal model."""
        client.load(self.loadable(client, tensors))
        return {}
