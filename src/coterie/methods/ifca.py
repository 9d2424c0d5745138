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
from coterie.data.splits import Batch
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
        chosen = {i: int(state.get(f"{_CHOICE}/{i}", _UNDECIDED)) for i in clients}
        return {
            i: {} if k == _UNDECIDED else {GENERALIST: state[f"{_CENTRE}/{k}"]}
            for i, k in chosen.items()
        }

    def for_absent(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return dict.fromkeys(clients, under(_CENTRE, state))

    def loadable(self, client: Client, download: Tensors) -> Tensors:
        """Return a centre; of all, the one of least loss on the client's first training batch."""
        if not download or GENERALIST in download:
            return download
        batch = client.train.batch(0, client.training.batch_size)
        return {GENERALIST: download[nearest(client, download, batch)]}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        sent = dict.fromkeys(clients, under(_CENTRE, state))
        replies = yield Ask(self.local_round, sent, self.reply_spec)
        trained: dict[ClientId, Tensors] = {}
        for i, reply in replies.items():
            names: dict[str, str] = {GENERALIST: f"{_CENTRE}/{int(reply[_CHOICE])}"}
            trained[i] = {names.get(n, n): t for n, t in reply.items() if n != _CHOICE}
        state = state | self.combine(trained, state)  # a centre without members keeps its values
        return state | {f"{_CHOICE}/{i}": reply[_CHOICE] for i, reply in replies.items()}

    def reply_spec(self, sent: Named) -> Named:
        """Return the specification of the client's centre, trained, and its number."""
        return super().reply_spec({GENERALIST: sent["0"], _CHOICE: torch.tensor(len(sent) - 1)})

    @task()
    def local_round(self, client: Client, centres: Tensors) -> Tensors:
        """Do L local iterations from the centre of least loss on a separate batch."""
        k = nearest(client, centres, client.draw(client.independent_stream(_CHOICE)))
        choice = torch.tensor(int(k))
        if choice != client.state.get(f"ifca/{_CHOICE}", choice):
            client.reset_optimizer(GENERALIST)
        client.state[f"ifca/{_CHOICE}"] = choice
        client.load({GENERALIST: centres[k]})
        self.local_iterations(client)
        return {GENERALIST: client.flat(), _CHOICE: choice} | self.sample_count(client)

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor:
        chosen = [int(state.get(f"{_CHOICE}/{i}", _UNDECIDED)) for i in clients]
        return together(torch.tensor(chosen))


def nearest(client: Client, centres: Tensors, batch: Batch) -> str:
    """Return the number of the centre of least loss on a batch."""
    losses: dict[str, float] = {}
    for k in sorted(centres, key=int):
        with client.borrowing({GENERALIST: centres[k]}):
            losses[k] = client.comparable_loss(batch)
    return min(losses, key=losses.__getitem__)
