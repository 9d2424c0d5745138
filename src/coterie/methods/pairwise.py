"""The common part of CoBo and related methods: gradients at midpoints, weights W of pairs, and
clients that join.

"CoBo: Collaborative Learning via Bilevel Optimization", NeurIPS 2024 (papers/cobo).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.aggregation import rearranged
from coterie.client.client import Client
from coterie.client.interfaces import AnyClient
from coterie.core.errors import RecipeError
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import by_client, client_of, clients_with, of_client
from coterie.core.tensors import Tensors
from coterie.methods.base import Method


@dataclass(frozen=True)
class Comparing(Method):
    """A method whose server compares clients by their gradients halfway between their models.

    The server's state holds `<client>/generalist`, (d,), each client's own, and `weights`, (n, n),
    W over these clients in the order of their ids.
    """

    @task(batched=True)
    def midpoint_gradients(self, client: AnyClient, midpoints: Tensors) -> Tensors:
        """Return g_i = grad f_i(z_ij), (d,), for each j whose midpoint came, each on a fresh batch
        of the client's own data.
        """
        return client.gradients_at(midpoints, "midpoints")

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        members = clients_with(state)
        matrix = torch.zeros(len(clients), len(clients), dtype=torch.float64)
        places = [k for k, i in enumerate(clients) if i in members]
        at, rows = torch.tensor(places), torch.tensor([members.index(clients[k]) for k in places])
        matrix[at[:, None], at] = state["weights"][rows[:, None], rows]
        return matrix


@dataclass(frozen=True)
class Joining(Method):
    """A method whose clients may join late, from a model that the server makes, see `rejoined`, and
    sends once.
    """

    def marked(self, state: State, before: State) -> State:
        """Return the state, in which who is new since `before` has the mark `<client>/joined`."""
        new = set(clients_with(state)) - set(clients_with(before))
        return state | {of_client(i, "joined"): torch.tensor(True) for i in sorted(new)}

    def started(self, state: State, clients: Sequence[ClientId]) -> Round:
        """Let those of the clients that have joined take over their models; return the state in
        which the ones that did are marked no more.
        """
        joined = [i for i in sorted(clients) if of_client(i, "joined") in state]
        if not joined:
            return state
        models = {i: Tensors({GENERALIST: state[of_client(i)]}) for i in joined}
        done = yield Ask(self.start, models, empty_reply)
        marks = {of_client(i, "joined") for i in done}
        return {name: tensor for name, tensor in state.items() if name not in marks}

    @task(Sends.NOTHING)
    def start(self, client: Client, x: Tensors) -> Tensors:
        """Take over the mean of the others' models."""
        client.load(x)
        return {}


def rejoined(
    state: State, clients: Sequence[ClientId], start: Tensor, row_stochastic: bool
) -> State:
    """Return the state for these clients: who leaves takes its model and its row of W along; who
    joins starts from the mean of the others' models.

    Args:
        state: Of a `Comparing` method.
        clients: Those that are there now.
        start: (n, n), W of n clients that all are new.
        row_stochastic: Whether each row of W sums to 1.
    """
    members, order = clients_with(state), sorted(clients)
    if order == members:
        return state
    # if all are new, the mean is of the models that are left
    stayed = [i for i in members if i in order] or members
    mean = torch.stack([state[of_client(i)] for i in stayed]).mean(dim=0)
    tensors = {name: t for name, t in state.items() if client_of(name) in (None, *order)}
    for i in sorted(set(order) - set(members)):
        tensors[of_client(i)] = mean.clone()
    places = [members.index(i) if i in members else None for i in order]
    return tensors | {"weights": rearranged(state["weights"], places, start, row_stochastic)}


def check_pull(rho: float, eta: float | None, n: int, row_stochastic: bool) -> None:
    """Refuse a rho with which the pull alone diverges: its step times the Laplacian's largest
    eigenvalue, n where all weights are 1 and 2 of a row-stochastic W, must stay below 2.

    Args:
        rho: Strength of the pull.
        eta: The learning rate, if the pull is multiplied by it.
        n: Clients.
        row_stochastic: Whether each row of W sums to 1.

    Raises:
        RecipeError: It diverges.
    """
    step, largest = 1.0 if eta is None else eta, 2.0 if row_stochastic else n
    if rho * step * largest >= 2:
        by = "" if eta is None else f"{eta:g} (the learning rate) x "
        what = f"method.rho: {rho:g} x {by}{largest:g} (the pull's largest eigenvalue)"
        most = f"use a rho below {2 / (step * largest):.3g}"
        raise RecipeError("method", [f"{what} is not below 2, so models would diverge; {most}"])


def drawn_output(
    state: State, t: int, x: Mapping[ClientId, Tensor], rng: torch.Generator
) -> Tensors:
    """Return `<client>/output`: models of a uniformly drawn round, though nobody knows how many
    there will be. Each takes the place of those before with probability 1 / (t + 1) (Theorem I).
    """
    drawn = float(torch.rand((), generator=rng)) < 1 / (t + 1)
    before = {i: None if drawn else state.get(of_client(i, "output")) for i in x}
    outputs = {i: x[i].clone() if old is None else old for i, old in before.items()}
    return by_client(outputs, "output")
