"""What a run will take: a few steps of a few clients, measured before it starts; bytes are counted, time and memory extrapolated."""

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice

import torch

from coterie.engines import InProcess, Listener
from coterie.errors import CoterieError
from coterie.evaluation import peak_memory
from coterie.prepared import Prepared
from coterie.protocol import Ask, Replies, drive, mix
from coterie.tensors import nbytes

FEW = 2  # clients that are measured
STEPS = 2  # local iterations of each
LONG_S = 2.0  # a first round that takes so long is not repeated: what warms up no longer matters
BATCHES = 2  # of a test set that are scored


@dataclass(frozen=True)
class Estimate:
    """What one method will take on this machine as it is now.

    Args:
        seconds: Of all rounds and evaluations.
        up: Bytes that a client sends in a round.
        down: Bytes that it gets.
        memory: Bytes: the most that the process was resident in so far, and the states of all clients.
    """

    seconds: float
    up: float
    down: float
    memory: float | None


def estimate(prepared: Prepared) -> Estimate:
    """Measure a round of a few clients, in memory alone, and extrapolate. What it trains is forgotten."""
    method, recipe = prepared.method, prepared.recipe
    steps = min(method.local_steps, STEPS)
    trial = _Trial(prepared, steps)
    seconds = 0.0
    if method.rounds:
        begun = time.monotonic()
        trial.round(min(1, steps), 1)
        if time.monotonic() - begun < LONG_S:
            trial.round(steps, FEW)
        per_round = trial.seconds * _iterations(prepared) / trial.steps * _router(prepared, trial.steps)
        seconds = method.rounds * per_round
    every = recipe.evaluate_every
    evaluations = max(math.ceil(method.rounds / every), 1) if every else 1
    seconds += (evaluations + 0.5) * trial.scoring()  # and once more, synchronised, of the test sets alone
    peak = peak_memory()
    states = trial.state_bytes * len(prepared.site.data)
    return Estimate(seconds, trial.up, trial.down, None if peak is None else peak + states)


def _iterations(prepared: Prepared) -> float:
    """Mean local iterations of a client in a round."""
    method, size = prepared.method, prepared.recipe.training.batch_size
    found = [method.steps_of(data.train.windows, size) for data in prepared.modality.federation.clients.values()]
    return sum(found) / len(found)


def _router(prepared: Prepared, steps: int) -> float:
    """How much longer iterations are on average for the router's own steps, where too few were measured to see one."""
    every, own = getattr(prepared.method, "router_every", 0), getattr(prepared.method, "router_steps", 0)
    alternating = getattr(prepared.method, "updates", "alternating") == "alternating"
    return 1 + own / every if every > steps and alternating else 1.0


class _Trial:
    """A round of few clients, scaled up to all of them.

    Args:
        prepared: The recipe.
        steps: Local iterations at most.
    """

    def __init__(self, prepared: Prepared, steps: int) -> None:
        self.prepared, self.steps = prepared, max(steps, 1)
        self.seconds = self.up = self.down = self.state_bytes = 0.0
        self.few = FEW

    def round(self, steps: int, few: int) -> None:
        """Measure a round."""
        recipe, federation = self.prepared.recipe, self.prepared.modality.federation
        method = replace(self.prepared.method, local_steps=steps, local_epochs=None)
        engine = InProcess(self.prepared.site, method, Listener())
        clients = recipe.active(federation, 0)
        self.steps, self.few, self.seconds, self.up, self.down = steps, few, 0.0, 0.0, 0.0

        def answer(ask: Ask, phase: int) -> Replies:
            chosen = dict(islice(ask.to.items(), self.few))
            begun = time.monotonic()
            replies = engine.answer(replace(ask, to=chosen), 0, phase)
            _synchronise(self.prepared.modality.device)
            if chosen:
                share = len(ask.to) / len(chosen)
                self.seconds += share * (time.monotonic() - begun)
                self.down += share * sum(map(nbytes, chosen.values())) / len(clients)
                self.up += share * sum(map(nbytes, replies.values())) / len(clients)
            return replies

        server = method.init(self.prepared.blueprint, recipe.present(self.prepared.clients, 0))
        with suppress(CoterieError, KeyError, IndexError):  # a method that cannot do without the others: what was measured stays
            drive(method.round(server, clients, torch.Generator().manual_seed(mix(recipe.seed, "round", 0))), answer)
        self.state_bytes = max(engine.state_bytes().values(), default=0)

    def scoring(self) -> float:
        """Seconds that one evaluation of all clients takes."""
        data = self.prepared.modality.federation.unseen or {"": self.prepared.modality.federation.clients}
        scored = [found for group in data.values() for found in group.values()]
        client = self.prepared.site.client(scored[0].id, {})
        client.bind()
        rows = sum(len(batch) for batch in islice(client.batches(client.test), BATCHES))
        begun = time.monotonic()
        client.score(client.test, BATCHES)
        _synchronise(client.model.device)
        windows = sum(found.valid.windows + found.test.windows for found in scored)
        return (time.monotonic() - begun) * windows / max(rows, 1)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
