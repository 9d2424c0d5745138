"""CoMiGS with personal generalists that are pulled towards FedAvg's model, beyond the papers.

The pull is that of elastic averaging (Zhang et al., "Deep learning with Elastic Averaging SGD",
NeurIPS 2015); a global model trained beside the personal one is Ditto's (Li et al., ICML 2021).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.client import Client
from coterie.core.metrics import surely_less
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.methods.templates import Averaged, WeightedMixture

SHARED = "elastic/shared"  # (d,) what the client last sent: FedAvg's model after its local steps
MEMORY = "optimiser/generalist/"  # of the client's own model
LOSSES = "elastic/losses"  # (len(pulls),) sums over rounds; there is a personal model where it is
SHARED_MEMORY = "elastic/optimiser"  # of FedAvg's
PULL_WINDOWS = 2  # validation windows for the choice of b in a round
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class CoMiGSElastic(WeightedMixture, Averaged):
    """Two models per client, trained on the same batches: w, FedAvg's, and a personal one with
    generalists v, attention LoRAs included, and specialists u of weight a. In each round

        v <- (1 - b) v + b w for the mean w, with the b of `pulls` of least validation loss so far;
        L times: w <- w - eta grad f(w), and (v, u) <- (v, u) - eta grad f(v, u); send w.

    Before the share `start` of the rounds there is w alone; then v begins as what the client sent
    last, and u as copies of v. At the end each client takes (v, u), its w, or (v, u) half-way to
    the mean with a / 2, whichever has the least loss on m validation windows; or, if it is surely
    better, that half-way to the base (WiSE-FT: Wortsman et al., CVPR 2022).

    What is sent depends on no personal model: with `start` 1 all is FedAvg; with pulls of 0 and
    a = 0 v is that of Local. Of K candidates with losses in [0, M] the choice is within
    2 M sqrt(log(2 K / delta) / (2 m)) of the best with probability 1 - delta (Hoeffding).
    """

    stateful: ClassVar[bool] = True

    weight: Annotated[Share, Field(description="a, weight of the specialists")] = 0.5
    start: Annotated[Share, Field(description="share of rounds without a personal model")] = 0.15
    pulls: Annotated[
        tuple[Share, ...],
        Field(min_length=1, description="steps to the mean, from which validation chooses"),
    ] = (0.0, 0.25)
    windows: Annotated[int, Field(ge=1, description="m, windows for the choice at the end")] = 12

    @task(Sends.UPDATE)
    def local_round(self, client: Client, mean: Tensors) -> Tensors:
        with client.borrowing(mean):
            w = client.flat()
        personal = client.round >= self.start * self.rounds
        if not personal:
            client.load({GENERALIST: w, **self.mixing(client, 0.0)})
        elif LOSSES in client.state:
            client.load({GENERALIST: self.pulled(client, w)})
        else:
            self.begin(client, w)
        roles = (GENERALIST, SPECIALIST) if personal else (GENERALIST,)
        for _ in range(self.steps(client)):
            batch, eta = client.draw(client.train), client.lr
            if personal:
                with client.borrowing(self.mixing(client, 0.0)):  # w has generalists alone
                    gradient = client.gradient_at(w, batch)
            client.step_on(batch, *roles)
            if personal:
                client.training.experts.step(w, gradient, eta, client.state, SHARED_MEMORY)
        client.state[SHARED] = w if personal else client.flat()
        with client.borrowing({GENERALIST: client.state[SHARED]}):
            return client.read(GENERALIST) | self.sample_count(client)

    def begin(self, client: Client, w: Tensor) -> None:
        """Begin the personal model where the client's last local steps ended, or at the mean w
        before any; copy the optimiser's memory for FedAvg's model.
        """
        client.load({GENERALIST: client.state.get(SHARED, w), **self.mixing(client, self.weight)})
        if client.round:
            turns = torch.arange(self.specialists) % self.generalists
            generalists = client.read(GENERALIST)
            client.load(
                {
                    name: generalists[name.replace(SPECIALIST, GENERALIST)][turns]
                    for name in client.read(SPECIALIST)
                }
            )
        for key in [key for key in client.state if key.startswith(MEMORY)]:
            client.state[f"{SHARED_MEMORY}/{key.removeprefix(MEMORY)}"] = client.state[key].clone()
        client.state[LOSSES] = torch.zeros(len(self.pulls), dtype=torch.float64)

    def pulled(self, client: Client, w: Tensor) -> Tensor:
        """Return (1 - b) v + b w, (d,), with the b of least loss on the windows so far."""
        points, losses = [client.flat().lerp(w, b) for b in self.pulls], client.state[LOSSES]
        if len(points) == 1:
            return points[0]
        batch = client.valid.batch(client.round * PULL_WINDOWS, PULL_WINDOWS)
        for number, point in enumerate(points):
            with client.borrowing({GENERALIST: point}):
                losses[number] += client.loss(batch)
        return points[int(losses.argmin())]

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        yield Ask(self.choose, self.download(state, clients), empty_reply)
        return state

    @task(Sends.NOTHING)
    def choose(self, client: Client, mean: Tensors) -> Tensors:
        """Make the candidate of least validation loss the client's model."""
        if LOSSES not in client.state:
            return {}
        personal, shared = client.read(GENERALIST), {GENERALIST: client.state[SHARED]}
        halfway = {name: torch.lerp(personal[name], t, 0.5) for name, t in mean.items()}
        candidates = [
            Tensors(),
            shared | self.mixing(client, 0.0),
            halfway | self.mixing(client, self.weight / 2),
        ]
        losses = [self.losses(client, candidate) for candidate in candidates]
        best = int(torch.stack(losses).mean(1).argmin())
        client.load(candidates[best])
        half = self.halved(client)
        if surely_less(self.losses(client, half), losses[best]):
            client.load(half)
        return {}

    def losses(self, client: Client, candidate: Tensors) -> Tensor:
        with client.borrowing(candidate):
            return client.losses(client.valid, self.windows)
