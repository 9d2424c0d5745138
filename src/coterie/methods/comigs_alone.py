"""CoMiGS whose clients never share anything, the row 2S as the authors of CoMiGS released it.

Their script runs one single round, at the end of which nothing is averaged (epfml/CoMiGS,
collab_runscripts/table1/comigs_2s.sh); in Algorithm 1 the attention LoRAs are averaged in every
round, which is `comigs-2s`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.tensors import Tensors
from coterie.methods.base import Reader
from coterie.methods.comigs import CoMiGS


@dataclass(frozen=True)
class CoMiGSAlone(CoMiGS):
    """Experts on training data, routers on validation data, the client's own attention LoRAs; no
    tensor ever leaves a client.
    """

    serves_unseen_clients: ClassVar[bool] = False
    needs_only_mean = False

    def init(self, model: Reader, clients: Sequence[ClientId]) -> State:
        return {}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        return {i: {} for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        yield Ask(self.local_round, {i: {} for i in clients}, empty_reply)
        return state

    @task(Sends.NOTHING)
    def local_round(self, client: Client, empty: Tensors) -> Tensors:
        self.local_iterations(client)
        return {}
