"""CoMiGS whose personal generalists are pulled towards FedAvg's model, as far as validation says:
beyond the papers.

The pull is that of elastic averaging (Zhang et al., "Deep learning with Elastic Averaging SGD",
NeurIPS 2015); a global model trained beside the personal one is Ditto's (Li et al., ICML 2021).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.client import Client
from coterie.core.protocol import Ask, ClientId, Round, Sends, State, empty_reply, task
from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.core.tensors import Tensors
from coterie.data.splits import Batch
from coterie.methods.templates import Averaged, WeightedMixture

SHARED = "elastic/shared"  # (d,) what the client last sent: FedAvg's model after its local steps
MEMORY = "optimiser/generalist/"  # of the client's own model
LOSSES = "elastic/losses"  # (len(pulls),) sums over rounds; there is a personal model where it is
SHARED_MEMORY = "elastic/optimiser"  # of FedAvg's
Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class CoMiGSElastic(WeightedMixture, Averaged):
    """Two models per client, trained on the same batches: w, FedAvg's, and a personal one with
    generalists v, attention LoRAs included, and specialists u of weight a. In each round

        v <- (1 - b) v + b w for the mean w, with the b of `pulls` of least validation loss so far;
        L times: w <- w - eta grad f(w), and (v, u) <- (v, u) - eta grad f(v, u); send w.

    Who writes like nobody else keeps b = 0 and is alone; who overfits is pulled. Before the share
    `start` of the rounds there is w alone. Then v begins as what the client last sent, not as the
    mean, and u as copies of v: nothing that it has learned is lost. After the last round each
    client takes (v, u), its w, or (v, u) half-way to the mean with a / 2, which is often better
    than both, whichever has the least loss on m validation windows; or that half-way to the base,
    if this is better by two standard errors: for whoever writes what the base knows already
    (Wortsman et al., "Robust fine-tuning of zero-shot models", CVPR 2022). `keep: best` has the
    base itself.

    What is sent depends on no personal model: with `start` 1 all is FedAvg; with pulls of 0 and
    a = 0 v is that of Local. Of K candidates with losses in [0, M] the choice is within
    2 M sqrt(log(2 K / delta) / (2 m)) of the best with probability 1 - delta, by Hoeffding's
    inequality. Weights are constants that routers add to their logits; no router is trained. The
    passes through the base are those of FedAvg and Local together, 1.5 times those of 1G1S; what
    `start` saves pays for validation.

    Args:
        weight: a.
        start: The share of the rounds without a personal model.
        pulls: The values of b; with one alone nothing is chosen.
        pull_windows: Validation windows for that, others in each round.
        windows: m.
        blend: Whether (v, u) half-way to the mean with a / 2 is a candidate.
        halve: Whether half of what was learned is a candidate: every B of the LoRAs halved.
        standalone: Whether w is trained; otherwise v is what is sent, as in CoMiGS.
    """

    stateful: ClassVar[bool] = True

    weight: Annotated[Share, Field(description="a, weight of the specialists")] = 0.5
    start: Annotated[Share, Field(description="share of rounds without a personal model")] = 0.15
    pulls: Annotated[
        tuple[Share, ...],
        Field(min_length=1, description="steps to the mean, from which validation chooses"),
    ] = (0.0, 0.25)
    pull_windows: Annotated[int, Field(ge=1, description="windows for that choice, per round")] = 2
    windows: Annotated[int, Field(ge=1, description="windows for the choice at the end")] = 12
    blend: Annotated[bool, Field(description="half-way to the mean, a / 2, is a candidate")] = True
    halve: Annotated[bool, Field(description="half of what was learned is a candidate")] = True
    standalone: Annotated[bool, Field(description="FedAvg's model is trained, and sent")] = True

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
        both = personal and self.standalone
        for _ in range(self.steps(client)):
            batch, eta = client.draw(client.train), client.lr
            gradient = self.shared_gradient(client, w, batch) if both else None
            client.step_on(batch, GENERALIST, *([SPECIALIST] if personal else []))
            if gradient is not None:
                client.training.experts.step(w, gradient, eta, client.state, SHARED_MEMORY)
        client.state[SHARED] = w if both else client.flat()
        with client.borrowing({GENERALIST: client.state[SHARED]}):
            return client.read(GENERALIST) | self.sample_count(client)

    def begin(self, client: Client, w: Tensor) -> None:
        """Begin the personal model where the client's last local steps ended, or at the mean w if
        it has had none, with specialists that are copies of its generalists once these have
        learned; FedAvg's model goes on with a copy of the optimiser's memory.
        """
        client.load({GENERALIST: client.state.get(SHARED, w), **self.mixing(client, self.weight)})
        if client.round:
            turns, own = torch.arange(self.specialists) % self.generalists, client.read(GENERALIST)
            names = {name: name.replace(SPECIALIST, GENERALIST) for name in client.read(SPECIALIST)}
            client.load({name: own[generalist][turns] for name, generalist in names.items()})
        if self.standalone:
            for key in [key for key in client.state if key.startswith(MEMORY)]:
                moved = f"{SHARED_MEMORY}/{key.removeprefix(MEMORY)}"
                client.state[moved] = client.state[key].clone()
        client.state[LOSSES] = torch.zeros(len(self.pulls), dtype=torch.float64)

    def shared_gradient(self, client: Client, w: Tensor, batch: Batch) -> Tensor:
        """Return the gradient of FedAvg's loss at w, (d,): of generalists alone."""
        with client.borrowing(self.mixing(client, 0.0)):
            return client.gradient_at(w, batch)

    def pulled(self, client: Client, w: Tensor) -> Tensor:
        """Return (1 - b) v + b w, (d,), with the b of the least loss on the windows so far."""
        points = [torch.lerp(client.flat(), w, b) for b in self.pulls]
        if len(points) == 1:
            return points[0]
        batch = client.valid.batch(client.round * self.pull_windows, self.pull_windows)
        losses = client.state[LOSSES]
        for number, point in enumerate(points):
            with client.borrowing({GENERALIST: point}):
                losses[number] += client.loss(batch)
        return points[int(losses.argmin())]

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        yield Ask(self.choose, self.download(state, clients), empty_reply)
        return state

    @task(Sends.NOTHING)
    def choose(self, client: Client, mean: Tensors) -> Tensors:
        """Make the candidate with the least validation loss the client's model."""
        if LOSSES not in client.state:
            return {}
        own, candidates = client.read(GENERALIST), [Tensors()]
        candidates.append({GENERALIST: client.state[SHARED], **self.mixing(client, 0.0)})
        if self.blend:
            pulled = {name: torch.lerp(own[name], t, 0.5) for name, t in mean.items()}
            candidates.append(pulled | self.mixing(client, self.weight / 2))
        losses = [self.losses(client, candidate) for candidate in candidates]
        best = min(range(len(candidates)), key=lambda k: float(losses[k].mean()))
        client.load(candidates[best])
        learned = client.read(GENERALIST) | client.read(SPECIALIST)
        halved = {name: t / 2 for name, t in learned.items() if name.endswith(".B")}
        if self.halve and surely_less(self.losses(client, halved), losses[best]):
            client.load(halved)
        return {}

    def losses(self, client: Client, candidate: Tensors) -> Tensor:
        """Return the loss of a candidate on each of m validation windows, whose mean is that on
        their tokens, (m,).
        """
        with client.borrowing(candidate):
            found = client.score_rows(client.valid, self.windows).cpu()
        return found[:, 0] / found[:, 1].mean()


def surely_less(losses: Tensor, others: Tensor) -> bool:
    """Whether the mean of losses is less by more than two standard errors of the paired
    differences; no with one window alone.
    """
    gain = others - losses
    return len(gain) > 1 and bool(gain.mean() > 2 * gain.std() / math.sqrt(len(gain)))
