"""Results of planted canaries: their exposure, how many coin flips an observer guesses right, and a
lower bound on epsilon from these guesses in one training run.

Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023, Theorem 5.2:
whatever is (epsilon, delta)-private with respect to each of m independent fair coins can be used to
guess r of them right no better than W ~ Binomial(r, e^epsilon / (1 + e^epsilon)) does, up to delta:

    P[at least v right] <= P[W >= v] + 2 m delta max_{1 <= i <= v} P[v - i <= W < v] / i
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import cast

import numpy as np
import numpy.typing as npt
import torch

from coterie.audit.observers import SharedText, View, calibrated
from coterie.audit.statistics import LEVEL, Values, auc_of_pairs, bootstrapped
from coterie.core.protocol import ClientId
from coterie.core.result.audit import CanaryResult, EpsilonBound, Exposure
from coterie.data.canaries import Canaries, Ids

# of the coins that are guessed, the surest first; the others are left open
SHARES = (1.0, 0.5, 0.25)
LARGEST = 50.0  # largest epsilon that is tested


@dataclass(frozen=True)
class CanaryScores:
    """Scores of the canaries of a client: how much likelier an observer finds them than before."""

    candidates: Values  # (n,) of the client
    planted: npt.NDArray[np.bool_]  # (n,) the coin flips
    references: Values  # (r,) of canaries that no client has

    @property
    def exposures(self) -> Values:
        """(planted ones,) log2 N - log2 rank of each among those that were not planted (Carlini et
        al., 2019, Definition 2). N counts it and them; the rank is 1 if it is the likeliest, and of
        equals the worst.
        """
        others = np.concatenate([self.candidates[~self.planted], self.references])
        ranks = 1 + (others[None] >= self.candidates[self.planted][:, None]).sum(axis=1)
        return cast(Values, np.log2(len(others) + 1) - np.log2(ranks))

    @property
    def standardised(self) -> Values:
        """(n,) the candidates in standard deviations of the references, to compare clients."""
        spread = self.references.std() + 1e-12
        return cast(Values, (self.candidates - self.references.mean()) / spread)

    @property
    def ranked_among(self) -> int:
        """N of the exposures."""
        return int((~self.planted).sum()) + len(self.references) + 1


def chance(ranked_among: int) -> float:
    """Return the mean exposure of a canary whose rank is uniformly random."""
    return float(np.log2(ranked_among) - np.log2(np.arange(1, ranked_among + 1)).mean())


def scored(
    model: SharedText, view: View, canaries: Canaries, references: Ids, begin: Sequence[int]
) -> CanaryScores:
    """Score a client's canaries by an observer's view, with `references` (r, k), random parts that
    no client has; the ids of `begin` are before every document.
    """
    count, length = canaries.tokens.shape
    tokens = torch.from_numpy(np.concatenate([canaries.tokens, references]))
    start = tokens.new_tensor([*begin, *canaries.prefix.tolist()]).expand(len(tokens), -1)
    rows = torch.cat([start, tokens], dim=1)
    length = min(length, rows.shape[1] - 1)
    scores = calibrated(model, view, lambda _: model.likelihoods(rows, length))
    return CanaryScores(scores[:count], canaries.planted, scores[count:])


def measured(clients: Mapping[ClientId, CanaryScores], delta: float, seed: int) -> CanaryResult:
    """Return exposure, AUC and a lower bound on epsilon, over the canaries of all clients."""
    all_scores = list(clients.values())
    exposures = [scores.exposures for scores in all_scores if scores.planted.any()]
    groups = []
    for scores in all_scores:
        parts = scores.standardised[scores.planted], scores.standardised[~scores.planted]
        groups += [part for part in parts if len(part)]
    split = [scores.planted.any() and (~scores.planted).any() for scores in all_scores]
    candidates = np.concatenate([scores.standardised for scores in all_scores])
    bound = audited(candidates, np.concatenate([scores.planted for scores in all_scores]), delta)
    among = round(float(np.mean([scores.ranked_among for scores in all_scores])))

    def mean(groups: Sequence[Values]) -> float:
        return float(np.concatenate(groups).mean())

    exposure = bootstrapped(exposures, mean, seed, "canaries")
    return CanaryResult(
        exposure=Exposure(**vars(exposure), chance=chance(among), most=float(np.log2(among))),
        auc=bootstrapped(groups, auc_of_pairs, seed, "canaries") if all(split) else None,
        epsilon=bound,
    )


def p_value(right: int, guesses: int, coins: int, epsilon: float, delta: float) -> float:
    """Return the largest probability that v = `right` of r = `guesses` about m = `coins` are right,
    if the guarantee holds. Raises ValueError unless 0 <= v <= r <= m.
    """
    from scipy.stats import binom

    if not 0 <= right <= guesses <= coins:
        raise ValueError(f"{right} right of {guesses} guesses of {coins} coins")
    chance = 1 / (1 + np.exp(-epsilon))
    beta = float(binom.sf(right - 1, guesses, chance))
    if not delta or not right:
        return min(beta, 1.0)
    # P[v - i <= W < v] for i = 1 ... v
    below = np.cumsum(binom.pmf(np.arange(right - 1, -1, -1), guesses, chance))
    return min(beta + 2 * coins * delta * float((below / np.arange(1, right + 1)).max()), 1.0)


@cache  # the same counts come again: whoever audits many releases asks for few bounds
def lower_bound(
    right: int, guesses: int, coins: int, delta: float, error: float = 1 - LEVEL
) -> float:
    """Return the largest epsilon up to which all p-values are below `error`; or 0."""
    low, high = 0.0, LARGEST
    if p_value(right, guesses, coins, low, delta) >= error:
        return 0.0
    for _ in range(40):
        middle = (low + high) / 2
        if p_value(right, guesses, coins, middle, delta) < error:
            low = middle
        else:
            high = middle
    return low


def audited(scores: Values, planted: npt.NDArray[np.bool_], delta: float) -> EpsilonBound:
    """Guess each coin, (m,), by a score, the higher, the likelier planted, and bound epsilon by how
    many guesses are right; `delta` is that of the guarantee that is tested. Scores may depend on
    the coins only through the observations.

    Half of the guesses are that the highest scores were planted, half that the lowest were not.
    Several shares of the coins are tried, each at its part of the error, so that the best of them
    may be reported.
    """
    coins, error = len(scores), (1 - LEVEL) / len(SHARES)
    order = np.argsort(-scores, kind="stable")
    tried = []
    for share in SHARES:
        half = min(max(int(share * coins / 2), 1), coins // 2)
        right = int(planted[order[:half]].sum() + (~planted[order[coins - half :]]).sum())
        tried.append((lower_bound(right, 2 * half, coins, delta, error), right, 2 * half))
    at_least, right, guesses = max(tried, key=lambda one: (one[0], one[1] / max(one[2], 1)))
    return EpsilonBound(
        at_least=at_least,
        confidence=LEVEL,
        delta=delta,
        right=right,
        guesses=guesses,
        coins=coins,
        most=max(lower_bound(count, count, coins, delta, error) for _, _, count in tried),
    )
