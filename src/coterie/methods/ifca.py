"""IFCA: iterative federated clustering by losses.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1,
option II (model averaging).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.aggregation.clustering import together
from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.core.protocol import Ask, ClientId, Round, State, task
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors, under
from coterie.methods.templates import Aggregating, OneAdapter, unknown_clusters

_CENTRE, _CHOICE, _UNDECIDED = "centre", "choice", -1


@dataclass(frozen=True)
class IFCA(OneAdapter, Aggregating):
    """Clustered training with K models, the centres: each client trains the one that has the least
    loss on its data; a centre becomes its members' mean.

    Centres start at different random values of one distribution. On a language model the B of every
    LoRA starts at zero, so that centres differ in A only and are the same function: all clients
    take the first one in the first round, and hardly leave it once it is trained.

    The server's state holds `centre/<k>`, (d,), and `choice/<client>`, the centre that each client
    chose last, or -1.
    """

    dynamic_membership: ClassVar[bool] = True

    # K, number of models; null: the true number of clusters
    centres: Annotated[int | None, Field(ge=1)] = None

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        if self.centres is None and model.clusters is None:
            mistake = "method.centres: null means the true number of clusters"
            raise unknown_clusters(mistake, "give a number")

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        number = self.centres or len(set((model.clusters or {}).values()))
        centres = {f"{_CENTRE}/{k}": model.flat(GENERALIST, start=k) for k in range(number)}
        return centres | {f"{_CHOICE}/{i}": torch.tensor(_UNDECIDED) for i in clients}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        chosen = {i: state.get(f"{_CHOICE}/{i}", torch.tensor(_UNDECIDED)) for i in clients}
        return {
            i: {} if k == _UNDECIDED else {GENERALIST: state[f"{_CENTRE}/{int(k)}"]}
            for i, k in chosen.items()
        }

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        sent = dict.fromkeys(clients, under(_CENTRE, state))
        replies = yield Ask(self.local_round, sent, self.reply_spec)
        # a centre without members keeps its values
        for k in sorted({int(reply[_CHOICE]) for reply in replies.values()}):
            centre = f"{_CENTRE}/{k}"
            members = {
                i: {n: t for n, t in reply.items() if n != _CHOICE}
                for i, reply in replies.items()
                if reply[_CHOICE] == k
            }
            state = state | {centre: self.combine(members, {GENERALIST: state[centre]})[GENERALIST]}
        return state | {f"{_CHOICE}/{i}": reply[_CHOICE] for i, reply in replies.items()}

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of the client's centre, trained, and its number."""
        return super().reply_spec({GENERALIST: sent["0"], _CHOICE: torch.tensor(len(sent) - 1)})

    @task()
    def local_round(self, client: Client, centres: Tensors) -> Tensors:
        """Do L local iterations from the centre of least loss on a separate batch."""
        batch = client.draw(client.independent_stream(_CHOICE))
        losses: dict[str, float] = {}
        for k in sorted(centres, key=int):
            with client.borrowing({GENERALIST: centres[k]}):
                losses[k] = client.comparable_loss(batch)
        choice = torch.tensor(int(min(losses, key=losses.__getitem__)))
        if choice != client.state.get(f"ifca/{_CHOICE}", choice):
            client.reset_optimizer(GENERALIST)
        client.state[f"ifca/{_CHOICE}"] = choice
        client.load({GENERALIST: centres[str(int(choice))]})
        self.local_iterations(client)
        return {GENERALIST: client.flat(), _CHOICE: choice} | self.sample_count(client)

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        chosen = torch.stack(
            [state.get(f"{_CHOICE}/{i}", torch.tensor(_UNDECIDED)) for i in clients]
        )
        return together(chosen)
