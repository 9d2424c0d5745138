"""The request of methods with a gate to each client: the scores that the gate gives the members of
the pool on its data (DDOME, Section 4).
"""

from collections.abc import Sequence

import torch

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, State, Task
from coterie.core.roles import GATE
from coterie.core.tensors import Tensors
from coterie.data.splits import Split
from coterie.models.language import LanguageModel
from coterie.models.pool import PoolClassifier

SCORES = "scores"


def ask_scores(question: Task, state: State, clients: Sequence[ClientId], size: int) -> Ask:
    """Ask each client for the gate's scores of the `size` members of the pool on its data."""
    form = {SCORES: torch.empty(size, dtype=torch.float64, device="meta")}
    return Ask(question, {i: {GATE: state[GATE]} for i in clients}, lambda sent: form)


def own_scores(client: Client, gate: Tensors, data: Split) -> Tensors:
    """Return sum_i softmax g(x_i), (M,) float64, over a client's embedded data x_i."""
    with client.borrowing(gate), torch.no_grad():
        assert isinstance(client.model, PoolClassifier | LanguageModel)
        return {SCORES: client.model.affinity(client.embeddings(data)).cpu().double()}
