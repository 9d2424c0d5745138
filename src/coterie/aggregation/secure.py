"""Secure aggregation: what clients and server agree on, so that the server learns only the mean of
the updates. A client sends its update, reply - sent, as integers modulo 2^32 under masks that
cancel in the sum: Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine
Learning", CCS 2017; Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic
Overhead", CCS 2020 (SecAgg+). Engines run the protocol; its constants are here, because a client
accepts none from a server.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import TensorError
from coterie.core.tensors import Named, Tensors, check_alike

FEWEST = 3  # of two clients, each would learn the other's update from the sum
RANGE = 8.0  # no value of an update may be beyond
MODULUS = 1 << 32
UPDATE = "update"  # the one tensor of a reply that is to be masked


def levels(clients: int) -> int:
    """Return the number of levels: the greatest power of two of which the sum is below 2^32."""
    return 1 << min(30, ((MODULUS - 1) // clients).bit_length() - 1)


def step(clients: int) -> float:
    """Return the distance of two `levels`. Random rounding is unbiased: the mean's error is below a
    step, its deviation step / 2 sqrt(n).
    """
    return 2 * RANGE / levels(clients)


def threshold(clients: int) -> int:
    """Return how many clients must stay to the end: over two thirds, so that a server cannot get
    both masks of a client from different halves.
    """
    return max(FEWEST, 2 * clients // 3 + 1)


def check_form(first: Named, sent: Named, back: Named) -> None:
    """Raise TensorError if a client is sent, or has to return, other tensors than the first, so
    that updates have no sum; the exchange must then not be done unmasked.
    """
    check_alike(first, sent, "secure aggregation: sent to two clients")
    check_alike(sent, back, "secure aggregation: sent and expected back")
    if foreign := [name for name in sorted(sent) if not sent[name].is_floating_point()]:
        raise TensorError(
            f"secure aggregation: {foreign[0]!r} holds integers",
            "It carries floating-point numbers only.",
        )


def difference(reply: Named, sent: Named) -> Tensor:
    """Return reply - sent as one vector, (d,) float64, in the order of the tensors' names."""
    parts = [
        (reply[name].detach().cpu().double() - sent[name].detach().cpu().double()).flatten()
        for name in sorted(sent)
    ]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float64)


def update(sent: Named, reply: Named) -> Tensor:
    """Return the update, see `difference`. Raises TensorError: the reply has another form than what
    was sent, integers, or a value out of `RANGE`.
    """
    check_form(sent, sent, reply)
    vector = difference(reply, sent)
    if not bool((vector.abs() <= RANGE).all()):  # of NaN: not true
        raise TensorError(
            f"reply to be masked: an update with values that are not numbers, or beyond "
            f"{RANGE:g}, which secure aggregation carries",
            "Training diverged there: lower the learning rate.",
        )
    return vector


def moved(sent: Sequence[Named], mean: np.ndarray) -> Tensors:
    """Return the mean of the replies: that of what was sent, plus the mean update, (d,)."""
    tensors_moved: Tensors = {}
    vector, start = torch.from_numpy(mean), 0
    for name in sorted(sent[0]):
        form = sent[0][name]
        part = vector[start : start + form.numel()].view(form.shape)
        origins = torch.stack([tensors[name].detach().cpu().double() for tensors in sent])
        tensors_moved[name] = (origins.mean(dim=0) + part).to(form.device, form.dtype)
        start += form.numel()
    return tensors_moved
