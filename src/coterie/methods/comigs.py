"""CoMiGS: Collaborative learning with a Mixture of Generalists and Specialists.

Fan et al., "On-Device Collaborative Language Modeling via a Mixture of Generalists and
Specialists", Algorithm 1 (papers/comigs).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, task
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensors import Tensors
from coterie.data.splits import Split
from coterie.methods.templates import Averaged, Counts, Routed, value_of
from coterie.models.layout import Layout


@dataclass(frozen=True)
class CoMiGS(Routed, Averaged):
    """Average generalists and attention LoRAs; keep specialists and token-level routers local.

    A bilevel problem, solved by alternating first-order steps: experts descend on training data,
    routers on validation data. The server's state is theta^G, by the tensors' names.

    Args:
        router_data: Of the upper level; "train" draws fresh training batches (Table 5, "-tr").
    """

    per_client: ClassVar[tuple[str, ...]] = ("specialists",)
    shared: ClassVar[tuple[Role, ...]] = (GENERALIST,)  # all that leaves a client
    serves_unseen_clients: ClassVar[bool] = True
    stateful: ClassVar[bool] = True
    by_examples = True

    generalists: Annotated[int, Field(ge=0)] = 1  # g, shared experts per MLP block
    specialists: Counts = 1  # s_i, local experts, or one per client
    router_every: Annotated[int, Field(ge=1)] = 30  # tau, iterations per router update
    router_steps: Annotated[int, Field(ge=0)] = 10  # s, steps per router update
    router_data: Literal["valid", "train"] = "valid"  # data of eq. 4

    def layout(self, position: int, base: Layout) -> Layout:
        return self.mixture(base, self.generalists, value_of(self.specialists, position))

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        replies = yield Ask(self.local_round, self.download(state, clients), self.reply_spec)
        return state | self.combine(replies, state)  # theta^G <- 1/N sum_i theta_i^G

    @task(Sends.UPDATE)
    def local_round(self, client: Client, theta_g: Tensors) -> Tensors:
        client.load(theta_g)
        self.local_iterations(client)
        # specialists and routers never leave
        return client.read(GENERALIST) | self.sample_count(client)

    def iterate(self, client: Client) -> None:
        self.lower_step(client)  # eq. 3
        if client.iteration % self.router_every == 0:
            for _ in range(self.router_steps):
                self.upper_step(client)  # eq. 4

    def lower_step(self, client: Client) -> None:
        client.step(GENERALIST, SPECIALIST, on=client.train)

    def upper_step(self, client: Client) -> None:
        client.step(ROUTER, on=self.upper_data(client))

    def upper_data(self, client: Client) -> Split:
        return client.valid if self.router_data == "valid" else client.train
