"""FedBABU: FedAvg of the body under one fixed head, then every client alone.

Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification", ICLR 2022,
Algorithm 1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from coterie.client.blueprint import AnyClient, Blueprint
from coterie.core.protocol import ClientId, Sends, State, task
from coterie.core.roles import GENERALIST, SPECIALIST, Role
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.methods.finetunedfedavg import FinetunedFedAvg
from coterie.methods.templates import HeadBlocks
from coterie.models.layout import Layout

HEAD = "head"


@dataclass(frozen=True)
class FedBABU(FinetunedFedAvg):
    """The head of all clients keeps one random value while bodies are trained and averaged; in the
    last rounds each client fine-tunes both. The paper fine-tunes for a few epochs after training.

    The server's state is fine-tuned FedAvg's, with `mean/<tensor>` of the body, and the head as
    `head/<tensor>`.
    """

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, SPECIALIST)  # the head, to clients alone

    # share of the rounds after which each client fine-tunes
    start: Annotated[float, Field(ge=0, le=1)] = 0.8
    head_blocks: HeadBlocks = 1

    def layout(self, position: int, base: Layout) -> Layout:
        layout = super().layout(position, base)
        return replace(layout, local_part="head", head_blocks=self.head_blocks)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        state = super().init(model, clients)  # with both parts in the mean
        head = model.read(SPECIALIST)
        body = {name: t for name, t in state.items() if name.removeprefix("mean/") not in head}
        return body | prefixed(HEAD, head)

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        head = prefixed(HEAD, under(HEAD, state))
        means = super().download(state, clients)
        return {i: mean | head if mean else {} for i, mean in means.items()}

    def loadable(self, client: Any, download: Tensors) -> Tensors:
        return body(download) | under(HEAD, download)

    def reply_spec(self, sent: Named) -> Named:
        return super().reply_spec(body(sent))

    @task(Sends.UPDATE)
    def local_round(self, client: AnyClient, theta: Tensors) -> Tensors:
        return super().local_round(client, self.loadable(client, theta))

    @task(Sends.NOTHING)
    def finetune(self, client: AnyClient, theta: Tensors) -> Tensors:
        """Train head and body for L local iterations, from the last mean if it is sent."""
        client.load(self.loadable(client, theta))
        for _ in range(self.steps(client)):
            client.step(GENERALIST, SPECIALIST, on=client.train)
        return {}


def body(named: Named) -> Tensors:
    """Return the tensors that are not of the head."""
    return {name: tensor for name, tensor in named.items() if not name.startswith(f"{HEAD}/")}
