"""Differential privacy of the shared tensors, by clients: clipping, Gaussian noise, accounting.

Neighbouring federations differ in what one client contributes: either it is zero in one of them
(add or remove, the number of clients being public: sensitivity C), or it is replaced by any other
(sensitivity 2C, as two vectors of norm C are that far apart). `Accountant` says which of the two
its epsilon is for.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018 (clients as
the unit, clipping of updates); Andrew et al., "Differentially Private Learning with Adaptive
Clipping", NeurIPS 2021; Wang, Balle and Kasiviswanathan, "Subsampled Rényi Differential Privacy and
Analytical Moments Accountant", AISTATS 2019.
"""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from coterie.aggregation.noise import Source, grid, on_grid, protected
from coterie.aggregation.secure import difference, moved
from coterie.core.errors import Refused
from coterie.core.protocol import ClientId, Replies
from coterie.core.tensors import Named, Tensors, axpy, check_alike
from coterie.core.tensors import norm as length

# what is assumed of a run whose randomness follows from its seed, which also drew the same {}
EXPERIMENT = (
    "an experiment: whoever has the recipe's seed can draw the same noise, and the same {}, and is "
    "not covered"
)


class Adaptive(BaseModel):
    """A norm C that follows a quantile of the updates' norms (Andrew et al., 2021, Algorithm 1)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # gamma, the share of updates that should not be clipped
    quantile: float = Field(0.5, gt=0, lt=1)
    lr: float = Field(0.2, gt=0)  # eta_C, the step of the geometric update of C
    # sigma_b, the standard deviation of the noise on the number of updates within C; the paper uses
    # n / 20
    noise: float = Field(gt=0)


class Privacy(BaseModel):
    """Differential privacy of the shared tensors alone, for whole clients or single examples."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # what is protected; client: all data of a client; example: each window or image of a client, by
    # DP-SGD on the client
    unit: Literal["client", "example"] = "client"
    # who clips and adds noise, for unit client: central: the server, which is trusted; local: each
    # client, before anything leaves it; for unit example: null, each client in every step
    where: Literal["central", "local"] | None = Field(None, validate_default=True)
    # C, the clipping norm of an update, or of an example's gradient, over all shared tensors as one
    # vector
    clip: float = Field(gt=0)
    # z, the noise multiplier: the standard deviation of the noise is z C; 0: none, and no privacy
    noise: float = Field(ge=0)
    # delta of the guarantee; should be well below 1 / N; null: 1 / N^1.1 with N clients (which says
    # little for few clients), or with N examples of the largest client
    delta: float | None = Field(None, gt=0, lt=1)
    # adapt C to a quantile of the norms, starting from `clip`; null: C is fixed; central only
    adaptive: Adaptive | None = None

    @field_validator("where")
    @classmethod
    def _check_where(cls, where: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("unit") == "example" and where is not None:
            raise ValueError(
                "with unit: example each client clips and adds noise in every step; leave it out"
            )
        if info.data.get("unit") == "client" and where is None:
            raise ValueError("with unit: client choose central or local")
        return where

    @field_validator("adaptive")
    @classmethod
    def _check_adaptive(cls, adaptive: Adaptive | None, info: ValidationInfo) -> Adaptive | None:
        if adaptive is None:
            return None
        if info.data.get("unit") == "example":
            raise ValueError(
                "a norm that follows a quantile is of whole updates; with unit: example use null"
            )
        if info.data.get("where") == "local":
            raise ValueError("one client does not know the quantile; use where: central, or null")
        if 2 * adaptive.noise <= info.data.get("noise", 0):
            raise ValueError(
                f"noise must be more than half of privacy.noise {info.data['noise']}: the count "
                f"takes its part of the privacy"
            )
        return adaptive

    @property
    def update_noise(self) -> float:
        """The multiplier of updates: z, or z_Delta if C adapts (Andrew et al., Theorem 1)."""
        if self.adaptive is None or self.noise == 0:
            return self.noise
        return float((self.noise**-2 - (2 * self.adaptive.noise) ** -2) ** -0.5)

    def delta_of(self, units: int) -> float:
        """Return delta for so many clients or examples. Raises Refused for one without `delta`."""
        if self.delta is None and units < 2:
            problem = f"privacy.delta: there is no default for a single {self.unit}"
            raise Refused(problem, "Give one, for instance --set privacy.delta=1e-5")
        return self.delta or units**-1.1


def clipped(reply: Named, sent: Named, norm: float) -> tuple[Tensors, bool]:
    """Return the reply with its update, reply - sent, multiplied by min(1, C / |update|), and
    whether that is below 1; otherwise the reply is unchanged. Integers are left alone. C, `norm`,
    is of all tensors of the update as one vector. Raises TensorError for a floating tensor that was
    not sent in that form, so that it has no update.
    """
    trained, origin = _trained(reply, sent)
    update = axpy(-1.0, origin, trained)
    size = length(update)
    if size <= norm:
        return dict(reply), False
    return dict(reply) | axpy(norm / size, update, origin), True


def local(reply: Named, sent: Named, privacy: Privacy, source: Source) -> Tensors:
    """Return a reply protected for a client that trusts nobody: clipped, and N(0, (z C)^2) on every
    coordinate, see `noise.protected`. Raises TensorError as `clipped`, and for NaN.

    This hides which update of norm at most C was made. Two of them are up to 2C apart, and neither
    the mean nor other clients help: one reply is a Gaussian mechanism of noise multiplier z / 2, as
    `Accountant` counts it. The source's key must be the client's secret, so that the server cannot
    reproduce the noise. Without noise the reply is only clipped.
    """
    if not privacy.noise:
        return clipped(reply, sent, privacy.clip)[0]
    trained, origin = _trained(reply, sent)
    update = difference(trained, origin).numpy()
    noisy = protected(update, privacy.clip, privacy.noise * privacy.clip, source)
    return dict(reply) | moved([origin], noisy)


def central(
    replies: Replies, to: Mapping[ClientId, Named], privacy: Privacy, clip: float, source: Source
) -> tuple[dict[ClientId, Tensors], float]:
    """Return replies to what clients had received, `to`, whose uniform mean is differentially
    private, in their order, and C of the next exchange: all have moved by the noisy mean of the
    clipped updates.

    The sum of the n clipped updates, integers on a grid, gets N(0, (z C)^2), and so the mean N(0,
    (z C / n)^2), however many clients have replied. No rounding of a later sum can reveal a single
    update, as none is used. Without noise each reply is only clipped. The source's key must be the
    server's secret. Raises TensorError as `clipped`, or if updates are not of one form, or a value
    is not a number.
    """
    deviation = privacy.update_noise * clip
    if deviation and replies:
        protected_replies, within = _noisy_mean(replies, to, clip, deviation, source)
    else:
        cut = {i: clipped(reply, to[i], clip) for i, reply in replies.items()}
        protected_replies = {i: reply for i, (reply, _) in cut.items()}
        within = sum(not beyond for _, beyond in cut.values())
    return protected_replies, _next_clip(within, len(replies), privacy.adaptive, clip, source)


def _noisy_mean(
    replies: Replies, to: Mapping[ClientId, Named], clip: float, deviation: float, source: Source
) -> tuple[dict[ClientId, Tensors], int]:
    """Return replies that all moved by the noisy mean, and the number of updates within C."""
    step, within = grid(clip, deviation), 0
    first: Named = {}
    total = np.zeros((), np.int64)
    for i, reply in replies.items():
        trained, origin = _trained(reply, to[i])
        first = first or origin
        check_alike(first, origin, f"update of client {i!r}, to be summed")
        update = difference(trained, origin).numpy()
        total = total + on_grid(update, clip, step)
        within += float(np.linalg.norm(update)) <= clip
    mean = (total + source.gaussian(total.size, deviation / step)) * (step / len(replies))
    # most often all were sent the same
    shifted = {id(to[i]): moved([{name: to[i][name] for name in first}], mean) for i in replies}
    return {i: dict(reply) | shifted[id(to[i])] for i, reply in replies.items()}, within


def _trained(reply: Named, sent: Named) -> tuple[Tensors, Tensors]:
    """Return a reply's floating tensors, and what was sent of them. Raises as `clipped`."""
    trained = {name: t for name, t in reply.items() if t.is_floating_point()}
    origin = {name: sent[name].to(t.device) for name, t in trained.items() if name in sent}
    check_alike(origin, trained, "update to be clipped")
    return trained, origin


def _next_clip(
    within: int, replies: int, adaptive: Adaptive | None, clip: float, source: Source
) -> float:
    """Return C exp(-eta_C (b - gamma)), with b the noisy share of updates within C."""
    if adaptive is None or not replies:
        return clip
    # at most 1/2, so that the count, less half the replies as in the paper, is on the grid
    step = grid(1.0, adaptive.noise)
    noise = step * int(source.gaussian(1, adaptive.noise / step)[0])
    return clip * math.exp(-adaptive.lr * ((within + noise) / replies - adaptive.quantile))
