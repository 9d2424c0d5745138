"""CoMiGS with a pool of generalists at the server, of which a gate picks a few for each client:
beyond both papers. The gate is DDOME's; it learns to choose what it was assigned by self-labelling
(Asano et al. 2020), so that it can choose freely for clients that come later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import Field

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.state import EXPERT_IDS
from coterie.core.protocol import Adaptation, ClientId, Replies, Round, Sends, State, task
from coterie.core.roles import EXPERT, GATE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import of_expert
from coterie.core.tensors import Tensors
from coterie.methods.comigs import CoMiGS
from coterie.methods.pools import ask_scores, chosen_experts, own_scores
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout

CHOSEN = "chosen"  # each client's generalists, in the server's state


@dataclass(frozen=True)
class CoMiGSPool(CoMiGS):
    """The server has M generalists; each client trains the K that the gate scores highest for its
    text, under a limit of load. The gate is averaged over all clients, a generalist over its
    holders.

    The server's state is the attention LoRAs by name, `expert/<number>`, (d,), one generalist in
    all blocks; `gate`, (d_g,); and `chosen/<client>`, (K,).
    """

    shared: ClassVar[tuple[Role, ...]] = (GENERALIST, EXPERT, GATE)
    packages: ClassVar[tuple[str, ...]] = ("scipy",)
    needs_only_mean = False

    generalists: Annotated[
        int, Field(ge=1, description="K, generalists of the pool that each client gets")
    ] = 2
    pool: Annotated[int, Field(ge=1, description="M, generalists at the server")] = 4
    load: Annotated[
        float | None,
        Field(
            ge=1,
            description="most clients per generalist, as a multiple of an equal share; null: no "
            "limit",
        ),
    ] = 1

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), members=self.pool)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        pool = {of_expert(m): model.flat(EXPERT, m) for m in range(self.pool)}
        common = super().init(model, clients) | {GATE: model.flat(GATE)}
        return common | pool | self.first(clients)

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        new = [i for i in clients if f"{CHOSEN}/{i}" not in state]
        return state | self.first(new)  # until the gate has chosen theirs

    def first(self, clients: Sequence[ClientId]) -> State:
        """Return `chosen/<client>` of clients without scores."""
        return {f"{CHOSEN}/{i}": torch.arange(self.generalists) for i in clients}

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        common = {
            name: tensor
            for name, tensor in state.items()
            if not name.startswith((f"{CHOSEN}/", f"{EXPERT}/"))
        }
        chosen = {i: [of_expert(m) for m in state[f"{CHOSEN}/{i}"].tolist()] for i in clients}
        return {i: common | {name: state[name] for name in names} for i, names in chosen.items()}

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        scores = yield ask_scores(self.score_generalists, state, clients, self.pool)
        state = state | self.assign(scores, self.load)
        return (yield from super().round(state, tuple(scores), rng))

    def adapt(self, state: State, clients: Sequence[ClientId]) -> Adaptation:
        scores = yield ask_scores(self.score_generalists, state, clients, self.pool)
        return self.download(state | self.assign(scores, None), tuple(scores))

    def assign(self, scores: Replies, load: float | None) -> State:
        """Return `chosen/<client>` of clients that sent their scores."""
        order = {i: scores[i] for i in sorted(scores)}
        chosen = chosen_experts(order, self.generalists, load)
        return {f"{CHOSEN}/{i}": torch.tensor(experts) for i, experts in chosen.items()}

    @task(Sends.SCORES)
    def score_generalists(self, client: Client, gate: Tensors) -> Tensors:
        """Return the gate's score of each generalist, (M,), on the client's text: all that the
        server learns before it sends any.
        """
        return own_scores(client, gate, client.data.train)

    @task(Sends.UPDATE)
    def local_round(self, client: Client, received: Tensors) -> Tensors:
        held = client.state.get(EXPERT_IDS, torch.empty(0)).tolist()
        client.load(received)
        if client.state[EXPERT_IDS].tolist() != held:
            client.reset_optimizer(EXPERT)  # the optimiser's moments are of other generalists
        self.local_iterations(client)
        return (
            client.read(GENERALIST)
            | client.experts()
            | {GATE: client.flat(GATE)}
            | self.sample_count(client)
        )

    def lower_step(self, client: Client) -> None:
        client.step(GENERALIST, EXPERT, SPECIALIST, on=client.train)

    def upper_step(self, client: Client) -> None:
        """Train routers and gate on validation data; the gate also towards the assignment, as an
        anchor's in DDOME.
        """
        assert isinstance(client.model, LanguageModel)
        client.step(ROUTER, GATE, on=self.upper_data(client), extra=client.model.towards)
