"""What a client's state counts: local iterations, and the rows that were drawn of each split."""

import torch

from coterie.core.protocol import State
from coterie.data.federation import ClientData
from coterie.data.splits import Batch, Split

BEGAN = "began"  # the last round that a client trained in, and its local iterations before that


def count(state: State, key: str, add: int) -> int:
    """Return a counter of a client's state before `add` is added to it."""
    counter = state.setdefault(key, torch.zeros((), dtype=torch.int64))
    before = int(counter)
    counter += add
    return before


def position(state: State, round: int, steps: int) -> int:
    """Return where the run's schedules stand for a client, in local iterations.

    They run over the run's rounds: the rounds before count whole, whoever took part in them, and of
    this one the client's own iterations.

    Args:
        state: The client's.
        round: Rounds that the run has done.
        steps: Local iterations of the client in a round.
    """
    then, before = state[BEGAN].tolist() if BEGAN in state else (-1, 0)
    return round * steps + (int(state.get("iteration", 0)) - before if then == round else 0)


def advance(state: State, round: int, iterations: int = 1) -> None:
    """Count local iterations of a client that takes part in a round."""
    if BEGAN not in state or int(state[BEGAN][0]) != round:
        state[BEGAN] = torch.tensor([round, int(state.get("iteration", 0))])
    count(state, "iteration", iterations)


def draw(on: Split, state: State, rows: int) -> Batch:
    """Return the next batch of a split, whose cursor is in the client's state."""
    batch: Batch = on.batch(count(state, f"cursor/{on.name}", rows), rows)
    return batch


def training_data(data: ClientData, purpose: str = "") -> Split:
    """Return a client's training data; for another purpose than training itself in another order,
    with a cursor of its own.
    """
    return data.train.reordered(f"train-{purpose}") if purpose else data.train
