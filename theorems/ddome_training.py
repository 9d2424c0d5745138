"""What the experiment on DDOME's Theorem 1 trains: experts before their gate, in turn, and
jointly.
"""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from theorems.ddome_model import (
    Mixture,
    Sample,
    alternate,
    blended,
    compressed,
    draw_truth,
    expected,
    fit_experts,
    fit_gate,
    likelihood,
    nearness,
    train_jointly,
)

# inputs for (1), whose noise would flatter oracle routing, and for (2), and as many to test
FITTED = 200_000
INPUTS = 40_000  # for what is trained jointly or in turn, and as many to test
PASSES = 8


@dataclass(frozen=True)
class Disjoint:
    """What (1) and then (2) give for random truths and starts. Losses are those of fresh inputs,
    [b].
    """

    truth: Mixture
    start: Tensor  # v_j,0, [b, m, d]
    labels: Tensor  # E[y^2] where x has covariance I, [b]
    linear: Tensor  # loss of the best single linear model
    initial: Tensor  # of the experts at the gate's start
    gated: Tensor  # then with the best gate found
    oracle: Tensor  # with oracle routing
    distances: Tensor  # ||w_j - w*_j'||, [b, m, m]
    cosines: Tensor  # of each expert with the truth nearest to it, [b, m]
    outside: Tensor  # share of the gate's norm across the span of all v*_j and v_j,0, [b]


def train_disjointly(d: int, m: int, generator: Generator) -> Disjoint:
    """(1) and (2) at DRAWS truths and starts."""
    original = draw_truth(d, m, generator)
    truth, start = compressed(*original)
    sample, test = (Sample.draw(truth, generator, FITTED) for _ in range(2))
    experts = fit_experts(sample, start)
    model = fit_gate(sample, [0.1 * start, truth.gate], experts)
    known = torch.linalg.qr(torch.cat([start, truth.gate], 1).mT)[0]
    return Disjoint(
        *original,
        labels=test.y.square().mean(-1),
        linear=sample.linear_loss(test),
        initial=test.loss(Mixture(start, experts)),
        gated=test.loss(model),
        oracle=test.oracle_loss(experts),
        distances=torch.cdist(experts, truth.experts),
        cosines=nearness(experts, truth.experts).amax(-1),
        outside=(model.gate - model.gate @ known @ known.mT).norm(dim=(1, 2))
        / model.gate.norm(dim=(1, 2)),
    )


@dataclass(frozen=True)
class Size:
    """All ways of training at one d and m."""

    d: int
    m: int
    disjoint: Disjoint
    passes: Tensor  # loss after (1) and (2) each time, [PASSES, b]
    joint: dict[str, Tensor]  # loss by objective, [b]
    nearness: Tensor  # of the experts of `likelihood`, [b, m, m]

    @staticmethod
    def run(d: int, m: int, generator: Generator) -> "Size":
        disjoint = train_disjointly(d, m, generator)
        sample, test = (Sample.draw(disjoint.truth, generator, INPUTS) for _ in range(2))
        passes = torch.stack(
            [test.loss(model) for model in alternate(sample, 0.1 * disjoint.start, PASSES)]
        )
        joint = {
            "likelihood": train_jointly(sample, m, likelihood, generator, restarts=2),
            "expected": train_jointly(sample, m, expected, generator),
            "blended": train_jointly(sample, m, blended, generator),
        }
        cosines = nearness(joint["likelihood"].experts, disjoint.truth.experts)
        return Size(
            d,
            m,
            disjoint,
            passes,
            {name: test.loss(model) for name, model in joint.items()},
            cosines,
        )

    def rows(self) -> dict[str, Tensor]:
        """Return what the table shows."""
        return {
            "the best single linear model": self.disjoint.linear,
            "(1) experts at the gate's start": self.disjoint.initial,
            "(2) then the gate": self.disjoint.gated,
            "gate and experts jointly": self.joint["likelihood"],
            "experts of (1), oracle routing": self.disjoint.oracle,
            f"(1) and (2), {PASSES} times": self.passes[-1],
            "jointly, by the objective of (2)": self.joint["expected"],
            "jointly, outputs blended": self.joint["blended"],
        }
