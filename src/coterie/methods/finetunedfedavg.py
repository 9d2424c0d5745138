"""Fine-tuned FedAvg: FedAvg first, then every client alone.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, then local training, as in Hashemi et al., "CoBo: Collaborative Learning via Bilevel
Optimization", NeurIPS 2024, Section 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.blueprint import AnyClient, Blueprint
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST
from coterie.core.tensor_names import of_client
from coterie.core.tensors import Tensors, prefixed, under
from coterie.methods.fedavg import FedAvg
from coterie.methods.templates import portion


@dataclass(frozen=True)
class FinetunedFedAvg(FedAvg):
    """In the first part of the run all is averaged; then each client goes on from the last mean,
    and nothing is sent any more.

    The server's state holds `mean/<tensor>`, the last mean; `round`; and `<client>/alone`, whether
    a client has that mean and is alone now: one that joins late starts from it too.
    That it does so after half of the rounds is our decision: the paper does not say.
    """

    serves_unseen_clients: ClassVar[bool] = False
    joinable: ClassVar[bool] = True

    # share of the rounds after which each client trains alone
    start: Annotated[float, Field(ge=0, le=1)] = 0.5

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        alone = {of_client(i, "alone"): torch.tensor(False) for i in clients}
        return prefixed("mean", super().init(model, clients)) | alone | {"round": torch.tensor(0)}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        mean = under("mean", state)
        return {i: {} if state.get(of_client(i, "alone")) else mean for i in clients}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        t, down = int(state["round"]), self.download(state, clients)
        counted = state | {"round": torch.tensor(t + 1)}
        if t < portion(self.start, self.rounds):
            replies = yield Ask(self.local_round, down, self.reply_spec)
            return counted | prefixed("mean", self.combine(replies, under("mean", state)))
        replies = yield Ask(self.finetune, down, empty_reply)
        return counted | {of_client(i, "alone"): torch.tensor(True) for i in replies}

    @task(Sends.NOTHING, batched=True)
    def finetune(self, client: AnyClient, mean: Tensors) -> Tensors:
        """Do L local iterations of a client alone, from the last mean if it is sent."""
        client.load(mean)
        for _ in range(self.steps(client)):
            client.step(GENERALIST, on=client.train)
        return {}
