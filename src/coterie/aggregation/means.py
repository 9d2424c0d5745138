"""Means of the tensors that clients sent.

Sums run in the order of the client ids, so that neither the order of the federation nor that of arrival changes a bit.
"""

from collections.abc import Mapping

from coterie.protocol import ClientId, Replies
from coterie.tensors import Tensors, weighted_sum


def uniform_mean(replies: Replies) -> Tensors:
    """1/N sum_i theta_i, name by name. Of one client: exactly its tensors.

    Raises:
        TensorError: The clients' tensors differ in names, shapes or dtypes.
    """
    return weighted_mean(replies, dict.fromkeys(replies, 1.0))


def weighted_mean(replies: Replies, weights: Mapping[ClientId, float]) -> Tensors:
    """sum_i w_i theta_i / sum_i w_i over the clients that replied, name by name.

    Args:
        replies: Tensors by client.
        weights: Non-negative weights, at least for the clients that replied.

    Raises:
        TensorError: The clients' tensors differ in names, shapes or dtypes.
        ValueError: No replies, or weights that are negative or sum to zero.
    """
    total = sum(weights[i] for i in sorted(replies))
    if any(weights[i] < 0 for i in replies) or not total > 0:
        raise ValueError(f"weights {dict(weights)} of {len(replies)} replies: they must be >= 0 with a positive sum")
    return weighted_sum((weights[i] / total, replies[i]) for i in sorted(replies))


def holders_mean(replies: Replies) -> Tensors:
    """The uniform mean of each tensor over the clients that sent it: where they have different members of a pool."""
    names = dict.fromkeys(name for reply in replies.values() for name in reply)
    holders = ({i: {name: reply[name]} for i, reply in replies.items() if name in reply} for name in names)
    return {name: t for held in holders for name, t in uniform_mean(held).items()}


SAMPLES = "samples"  # how many training examples a client has, in its reply


def sample_mean(replies: Replies) -> Tensors:
    """sum_i n_i theta_i / sum_i n_i, name by name, n_i being the scalar `samples` of each reply, which is not averaged (FedAvg).

    Raises:
        TensorError: The clients' tensors differ in names, shapes or dtypes.
        ValueError: No replies, or none of them has a sample.
    """
    tensors = {i: {name: t for name, t in reply.items() if name != SAMPLES} for i, reply in replies.items()}
    return weighted_mean(tensors, {i: float(reply[SAMPLES]) for i, reply in replies.items()})
