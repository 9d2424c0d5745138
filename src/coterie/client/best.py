"""The personal model that was best on a client's own validation data: a copy in the client's
state, with the scores that it had.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.client.state import EXPERT_IDS, BoundClient
from coterie.core.errors import ClientError
from coterie.core.metrics import better, metric_of
from coterie.core.tensors import Tensors, all_finite

_BEST, _SCORE, _ROUND = "best/", "best/score/", "best/round"  # of a client's state
_MODEL = ("parameters/", "buffers", EXPERT_IDS)  # prefixes of the keys of a model
_SPLITS = ("valid", "test")


def improves(client: BoundClient, valid: Tensor) -> bool:
    """Return whether a validation score, see `Client.score`, is better than that of the kept copy.
    Of equal ones the earliest stays.
    """
    if not all_finite({"valid": valid}):
        return False
    kept, metric = client.state.get(f"{_SCORE}valid"), metric_of(valid)
    return kept is None or better(metric.of(valid), metric.of(kept), metric.about)


def remember(client: BoundClient, scores: Mapping[str, Tensor], round: int) -> None:
    """Keep a copy of the client's model with its scores and the rounds done so far, in place of a
    former one.
    """
    model = {key: t for key, t in client.state.items() if key.startswith(_MODEL)}
    client.state.update({f"{_BEST}{key}": t.detach().clone() for key, t in model.items()})
    client.state.update({f"{_SCORE}{name}": scores[name].clone() for name in _SPLITS})
    client.state[_ROUND] = torch.tensor(round)


def kept_round(client: BoundClient) -> int | None:
    """Return the round of the kept copy; None where there is none."""
    return int(client.state[_ROUND]) if _ROUND in client.state else None


def recall(client: BoundClient) -> Tensors:
    """Make the kept copy the client's model.

    Returns:
        Its scores `valid` and `test`, see `Client.score`, and the `round` that it is of, ().

    Raises:
        ClientError: The client never kept one: it was not scored, or lost its state.
    """
    if _ROUND not in client.state:
        raise ClientError(
            f"client {client.id!r} has no best model: it was never scored on its validation data",
            "Connect it while clients are scored, or use keep: last, which needs no scores.",
        )
    for key, tensor in client.state.items():
        if key.startswith(_MODEL):
            tensor.copy_(client.state[f"{_BEST}{key}"])
    scores = {name: client.state[f"{_SCORE}{name}"].clone() for name in _SPLITS}
    return scores | {"round": client.state[_ROUND].clone()}
