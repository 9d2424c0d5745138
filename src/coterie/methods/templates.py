"""Base classes for families of methods: those that average, train alone, compare, or route."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, ClassVar, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.lowrank import own_factors, read_factors, truncated
from coterie.aggregation.means import MOST_SAMPLES, SAMPLES, Mean, by_holders
from coterie.aggregation.robust import Rule
from coterie.client.blueprint import AnyClient, Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Replies, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import clients_with, of_client
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.methods.base import Method
from coterie.models.layout import Balance, Layout, LocalPart


@dataclass(frozen=True)
class Aggregating(Method):
    """A method whose server aggregates the clients' tensors: by their mean, or by a rule that
    withstands attackers.
    """

    aggregation: Annotated[
        Rule,
        Field(
            description="how the clients' updates are aggregated: `rule` mean (`weighting` "
            "uniform or "
            "samples), median, trimmed-mean (`trim`), "
            "krum (`attackers`), multi-krum (`attackers`, `keep`), geometric-median or "
            "clipped-mean (`norm`)"
        ),
    ] = Mean()  # noqa: RUF009 - rules are frozen

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        self.aggregation.check(len(clients) if model.fewest is None else model.fewest)

    def combine(self, replies: Replies, around: Named) -> Tensors:
        """Aggregate the replies, updates of `around`, see `by_holders`; {} without replies."""
        return by_holders(self.aggregation, replies, around)

    def sample_count(self, client: AnyClient) -> Tensors:
        """Return the number of training samples if the rule weights by it, else {}."""
        return {SAMPLES: client.sample_count} if self.aggregation.counts else {}

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of a reply: what was sent, and the client's `sample_count`."""
        return {**sent, SAMPLES: torch.tensor(MOST_SAMPLES)} if self.aggregation.counts else sent


@dataclass(frozen=True)
class Averaged(Aggregating):
    """A method whose server aggregates all tensors of the roles in `shared` in every round, and
    sends the result to all clients.
    """

    dynamic_membership: ClassVar[bool] = True

    @property
    def needs_only_mean(self) -> bool:
        return self.aggregation.needs_only_mean

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return model.read(*self.shared)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, state)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        return state | self.combine(replies, state)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta: Tensors) -> Tensors:
        """Do L local iterations from `theta`; return the trained tensors and `sample_count`."""
        client.load(theta)
        self.local_iterations(client)
        return client.read(*self.shared) | self.sample_count(client)


@dataclass(frozen=True)
class Alone(Method):
    """A method whose clients send nothing."""

    dynamic_membership: ClassVar[bool] = True
    shared: ClassVar[tuple[Role, ...]] = ()

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return {}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        yield Ask(self.local_round, {i: {} for i in clients}, empty_reply)
        return state

    @task(Sends.NOTHING)
    def local_round(self, client: Client, empty: Tensors) -> Tensors:
        """Do the client's L local iterations; return {}."""
        self.local_iterations(client)
        return {}


@dataclass(frozen=True)
class OneAdapter(Method):
    """A method without routing, at the budget of CoMiGS-1G1S (spec section 4); an image classifier
    is always one whole network.
    """

    # experts: two LoRA experts with fixed equal weights, as CoMiGS' authors did; rank: one LoRA of
    # twice the rank; one: one of the rank, the setting of CoBo
    budget: Literal["experts", "rank", "one"] = "experts"

    def layout(self, position: int, base: Layout) -> Layout:
        one = replace(base, generalists=1, specialists=0, routing="equal", balance="none")
        if self.budget == "one":
            return one
        if self.budget == "rank":
            return replace(one, mlp_rank=2 * base.rank)
        return replace(one, generalists=2)


@dataclass(frozen=True)
class PartlyLocal(Averaged, OneAdapter):
    """A method that averages one part of the model; the other is trained by each client alone."""

    joinable: ClassVar[bool] = True
    local_part: ClassVar[LocalPart]

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), local_part=self.local_part)

    def iterate(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, on=client.train)


@dataclass(frozen=True)
class BesidePersonal(OneAdapter, Averaged):
    """A method whose clients send copies w_i of a global model that they trained beside their own,
    which never leaves. The server's state holds `generalist`, (d,), w, the mean of the copies.
    """

    download = Method.download  # clients have models of their own,
    for_absent = Averaged.download  # unless they have not trained yet

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return {GENERALIST: model.flat(GENERALIST)}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, dict.fromkeys(clients, state), self.reply_spec)
        return state | self.combine(replies, state)


def pull(strength: float, client: Client, centre: Named) -> Tensors:
    """Return strength (w - centre) of the client's generalist w, the gradient of a penalty on the
    squared distance, name by name.
    """
    w = client.read(GENERALIST)
    return {name: strength * (value - centre[name]) for name, value in w.items()}


def weight_rows(state: State, clients: Sequence[ClientId], name: str = "weights") -> Tensor:
    """Return the weights that these clients give each other, (N, N), from rows over all clients in
    the order of their ids, `<client>/<name>`.
    """
    order = clients_with(state, name)
    rows = torch.stack([state[of_client(i, name)] for i in clients])
    return rows[:, [order.index(i) for i in clients]]


HeadBlocks = Annotated[
    int,
    Field(
        ge=1,
        description="the last blocks of a language model whose adapters are its head; of a "
        "classifier it is the last layer",
    ),
]


@dataclass(frozen=True)
class WithHead(PartlyLocal):
    """A method that treats a model's head and its body differently."""

    head_blocks: HeadBlocks = 1

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), head_blocks=self.head_blocks)


Rank = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Counts = Count | tuple[Count, ...]  # one number for all clients, or one per client
V = TypeVar("V")


def value_of(field: V | tuple[V, ...], position: int) -> V:
    """Return the value for a client's position of a field that may have one per client."""
    return field[position] if isinstance(field, tuple) else field


@dataclass(frozen=True)
class Ranked(Method):
    """A method whose clients have MLP LoRAs of different ranks; attention LoRAs have the recipe's
    rank.
    """

    per_client: ClassVar[tuple[str, ...]] = ("ranks",)

    # r_i of the MLP LoRAs, one number or one per client; null: twice model.rank, the budget of
    # CoMiGS-1G1S
    ranks: Rank | tuple[Rank, ...] | None = None

    def layout(self, position: int, base: Layout) -> Layout:
        one = replace(base, generalists=1, specialists=0, routing="equal", balance="none")
        return replace(one, mlp_rank=value_of(self.ranks, position) or 2 * base.rank)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        """Return the factors of the largest rank (their form: `aggregation.lowrank`), and
        `ranks/<client>`, (modules,), the rank of each module at a client.
        """
        ranks = {i: torch.tensor(model.ranks[i]) for i in clients}
        return read_factors(model.loras()) | prefixed("ranks", ranks)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return for each client the first of the server's ranks, as many as it has."""
        ranks = under("ranks", state)
        theta = {name: tensor for name, tensor in state.items() if not name.startswith("ranks/")}
        return {i: truncated(theta, ranks[i].tolist()) for i in clients}

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        """Return a download in the common form (`aggregation.lowrank`) by the client's names."""
        return own_factors(client.loras, download) if download else {}


@dataclass(frozen=True)
class Routed(Method):
    """A method whose MLPs are mixtures with a learned router."""

    top_k: Annotated[int, Field(ge=1)] = 2  # k, experts per token
    # load-balancing loss; generalist: CoMiGS, eq. 6, scaled as uniform; generalist-printed: eq. 6
    # as printed
    balance: Balance = "uniform"
    # lambda, weight of the load-balancing loss
    balance_weight: Annotated[float, Field(ge=0)] = 0.01

    def mixture(self, base: Layout, generalists: int, specialists: int) -> Layout:
        """Return the layout of a client with so many experts. Raises ValueError if a token would
        use only one of several experts: the softmax over one logit is always 1, so that the router
        has no gradient. Weighted by its share of all logits instead, the frozen MLP would be scaled
        down with its expert, and a fresh adapter would not equal the base.
        """
        if self.top_k == 1 < generalists + specialists:
            raise ValueError(
                f"top_k: 1 of {generalists + specialists} experts leaves the router without a "
                f"gradient; use 2 or more"
            )
        form = replace(base, generalists=generalists, specialists=specialists, top_k=self.top_k)
        return replace(form, balance=self.balance, balance_weight=self.balance_weight)


@dataclass(frozen=True)
class TwoExperts(Routed):
    """Two experts of one kind and a router, trained on training data only (CoMiGS, Table 5, ii and
    iii; alternating are the rows "-tr").
    """

    # simultaneous: routers train with the experts; alternating: in turn, on fresh training batches
    updates: Literal["simultaneous", "alternating"] = "simultaneous"
    # tau, local iterations between alternating router updates
    router_every: Annotated[int, Field(ge=1)] = 30
    # s, optimiser steps per alternating router update
    router_steps: Annotated[int, Field(ge=0)] = 10

    def layout(self, position: int, base: Layout) -> Layout:
        return self.mixture(base, generalists=2, specialists=0)

    def iterate(self, client: Client) -> None:
        if self.updates == "simultaneous":
            client.step(GENERALIST, ROUTER, on=client.train)
            return
        client.step(GENERALIST, on=client.train)
        if client.iteration % self.router_every == 0:
            for _ in range(self.router_steps):
                client.step(ROUTER, on=client.train)


def unknown_clusters(mistake: str, remedy: str) -> RecipeError:
    """Return the refusal of a method that needs the true clusters where nobody knows them."""
    return RecipeError("method", [f"{mistake}, which is unknown for these data; {remedy}"])


def portion(share: float, of: int) -> Fraction:
    """Return a share of a number exactly: 0.55 of 100 are 55, though as floats they are more."""
    return Fraction(str(share)) * of


def first_phase(share: float, steps: int) -> int:
    """Return how many of a round's iterations are of the first of two phases: at least one of each,
    if neither is left out by the share and there are two.
    """
    return min(max(round(share * steps), share > 0), steps - (share < 1))


def check_two_phases(method: Method, share: float) -> None:
    """Raise RecipeError for rounds too short for two phases."""
    if method.local_epochs is None and method.local_steps < 2 and 0 < share < 1:
        problem = "method.local_steps: two phases need 2 iterations a round or more"
        raise RecipeError("method", [problem])
