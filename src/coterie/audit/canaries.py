"""Results of planted canaries: their exposure, and how many coin flips an observer guesses
right.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from coterie.audit.observers import SharedText, View, calibrated
from coterie.audit.onerun import audited
from coterie.audit.statistics import LEVEL, Values, auc, bootstrapped
from coterie.core.protocol import ClientId
from coterie.core.result import CanaryResult, EpsilonBound, Exposure
from coterie.data.canaries import Canaries, Ids


@dataclass(frozen=True)
class CanaryScores:
    """Scores of the canaries of one client: how much likelier an observer finds them than before.

    Args:
        candidates: (n,) each of the client's.
        planted: (n,) the coin flips.
        references: (r,) canaries that no client has.
    """

    candidates: Values
    planted: npt.NDArray[np.bool_]
    references: Values

    @property
    def exposures(self) -> Values:
        """(planted ones,) log2 N - log2 rank of each among those that were not planted (Carlini et
        al., 2019, Definition 2).

        N counts it and them; the rank is 1 if it is the likeliest, and of equals the worst.
        """
        others = np.concatenate([self.candidates[~self.planted], self.references])
        ranks = 1 + (others[None] >= self.candidates[self.planted][:, None]).sum(axis=1)
        bits: Values = np.log2(len(others) + 1) - np.log2(ranks)
        return bits

    @property
    def standardised(self) -> Values:
        """(n,) the candidates in standard deviations of the references: so those of different
        clients can be compared.
        """
        deviations: Values = (self.candidates - self.references.mean()) / (
            self.references.std() + 1e-12
        )
        return deviations

    @property
    def ranked_among(self) -> int:
        """N of the exposures."""
        return int((~self.planted).sum()) + len(self.references) + 1


def chance(ranked_among: int) -> float:
    """Return the mean exposure of a canary whose rank is as likely to be any."""
    return float(np.log2(ranked_among) - np.log2(np.arange(1, ranked_among + 1)).mean())


def scored(
    model: SharedText, view: View, canaries: Canaries, references: Ids, begin: Sequence[int]
) -> CanaryScores:
    """Score a client's canaries by what an observer saw of it.

    Args:
        model: To put the observer's tensors into.
        view: What was seen.
        canaries: The client's candidates.
        references: (r, k) random parts that no client has.
        begin: The ids that are before every document.
    """
    before = [*begin, *canaries.prefix.tolist()]
    count, length = canaries.tokens.shape
    tokens = torch.from_numpy(np.concatenate([canaries.tokens, references]))
    start = tokens.new_tensor(before).expand(len(tokens), -1)
    rows = torch.cat([start, tokens], dim=1)
    length = min(length, rows.shape[1] - 1)
    scores = calibrated(model, view, lambda shared: model.of_ends(rows, length))
    return CanaryScores(scores[:count], canaries.planted, scores[count:])


def measured(clients: Mapping[ClientId, CanaryScores], delta: float, seed: int) -> CanaryResult:
    """Return exposure, the AUC of planted against left out, and a lower bound on epsilon, over
    the canaries of all clients.
    """
    all_scores = list(clients.values())
    exposures = [scores.exposures for scores in all_scores if scores.planted.any()]
    groups = []
    for scores in all_scores:
        parts = scores.standardised[scores.planted], scores.standardised[~scores.planted]
        groups += [part for part in parts if len(part)]
    split = [scores.planted.any() and (~scores.planted).any() for scores in all_scores]
    bound = audited(
        np.concatenate([scores.standardised for scores in all_scores]),
        np.concatenate([scores.planted for scores in all_scores]),
        delta,
    )
    among = round(float(np.mean([scores.ranked_among for scores in all_scores])))

    def mean(groups: Sequence[Values]) -> float:
        return float(np.concatenate(groups).mean())

    def told_apart(groups: Sequence[Values]) -> float:
        return auc(np.concatenate(groups[::2]), np.concatenate(groups[1::2]))

    exposure = bootstrapped(exposures, mean, seed, "canaries")
    return CanaryResult(
        exposure=Exposure(**vars(exposure), chance=chance(among), most=float(np.log2(among))),
        auc=bootstrapped(groups, told_apart, seed, "canaries") if all(split) else None,
        epsilon=EpsilonBound(
            at_least=bound.epsilon,
            confidence=LEVEL,
            delta=delta,
            right=bound.right,
            guesses=bound.guesses,
            coins=bound.coins,
            most=bound.most,
        ),
    )
