"""Linear interpolation of the predictions of several models, the parts (Jelinek and Mercer, 1980;
for personal models Mansour et al., 2020, arXiv:2002.10619). docs/theory.md has the proofs.
"""

import math
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from coterie.core.errors import TensorError
from coterie.core.tensors import Named, Tensors, check_alike

# observations that the prior of fitted weights is worth: of few tokens they are then no worse than
# even weights, and of thousands as without a prior
PRIOR = 10.0
ONE_PART_COSTS = 0.005  # nats per token at most, half a percent of perplexity, where it is chosen
_MOST_MIXTURES = 66  # of the grid: the multiples of a tenth for three parts
_TINY = torch.finfo(torch.float64).tiny
_SURPRISE = 745.0  # nats: what a probability of 0 counts in a mean, the least float64's logarithm


def interpolate(log_probs: Tensor, weights: Tensor) -> Tensor:
    """Return log sum_p w_p exp(l_p), (...), of log-probabilities l, (P, ...), with weights w, (P,);
    in the precision of l. Weights and probabilities may be 0.
    """
    # in logarithms, as 0 times a logarithm of 0 would be NaN
    log_weights = weights.log().to(log_probs).view(-1, *[1] * (log_probs.dim() - 1))
    return (log_probs + log_weights).logsumexp(dim=0)


def evidence(log_likelihoods: Tensor, mixtures: Tensor) -> Tensor:
    """Return the log-likelihood of T tokens, or labels, under each of K mixtures, (K,) float64,
    given their log-probabilities in P parts, (P, T), and the mixtures' weights, (K, P).
    """
    scores = _possible(log_likelihoods).T[:, None] + mixtures.log()
    return scores.logsumexp(dim=2).clamp(min=-_SURPRISE).sum(dim=0)


def fit_weights(
    log_likelihoods: Tensor,
    prior: float = PRIOR,
    tolerance: float = 1e-3,
    steps: int = 5000,
    centre: Tensor | None = None,
) -> Tensor:
    """Return the weights, (P,) float64, of the largest posterior density, given the P parts'
    log-probabilities of T tokens (or labels), (P, T).

    The prior is Dirichlet's with 1 + prior * centre, (P,), a centre of 1 / P each by default. EM,
    over-relaxed as long as this is no step down (Salakhutdinov and Roweis, 2003), goes on until the
    logarithm of the density is proven to be within `tolerance` nats of the largest, for `steps`
    iterations at most. Tokens that no part thinks possible say nothing.
    """
    log_likelihoods = _possible(log_likelihoods)
    likelihoods = (log_likelihoods - log_likelihoods.amax(dim=0)).exp()
    total = likelihoods.shape[1] + prior
    logits = torch.full((len(likelihoods),), -math.log(len(likelihoods)), dtype=torch.float64)
    weights = logits.exp()
    each = prior * (weights if centre is None else centre.cpu())

    def density(weights: Tensor) -> Tensor:
        return (weights @ likelihoods).log().sum() + torch.xlogy(each, weights).sum()

    power, reached = 1.0, density(weights)
    for _ in range(steps):
        gradient = likelihoods @ (weights @ likelihoods).reciprocal()
        gradient += each / weights.clamp(min=_TINY)  # a weight is 0 only without a prior
        if gradient.max() - total <= tolerance:
            break
        # EM's step is that of power 1; in logarithms, as a weight of 0 would never grow again
        trial = (logits + power * (gradient / total).log()).log_softmax(dim=0)
        if power == 1.0 or density(trial.exp()) > reached:
            logits, weights = trial, trial.exp()
            power, reached = power * 1.5, density(weights)
        else:
            power = 1.0
    return weights


def settled(log_likelihoods: Tensor, weights: Tensor) -> Tensor:
    """Return weights, (P,), of 1 for the best part and 0 for the others where the P parts'
    log-probabilities of T tokens, (P, T), say that it does alone; otherwise `weights`.

    They do where the best part is ahead of each other one by over two standard errors of the mean
    difference, and the mixture ahead of it by no more than one, and `ONE_PART_COSTS`. Neighbours
    among tokens are alike, so errors are of the means of sqrt(T) blocks of consecutive tokens, but
    100 at most (batch means: Flegal and Jones, 2010); fewer than 8, of 64 tokens, settle nothing.
    """
    scores = _possible(log_likelihoods)
    best = int(scores.sum(dim=1).argmax())
    if scores[best].isinf().any():
        return weights
    gain = interpolate(scores, weights) - scores[best]
    mean, error = _batch_means(torch.cat([scores[best] - scores, gain[None]]))
    ahead = mean[:-1] > 2 * error[:-1]
    ahead[best] = True
    enough = ahead.all() and mean[-1] <= min(float(error[-1]), ONE_PART_COSTS)
    return one_of(len(weights), best) if enough else weights


def simplest(log_likelihoods: Tensor) -> int:
    """Return the first of P parts, from the simplest on, whose mean loss of T tokens is within one
    standard error of the difference from the least (Breiman et al., 1984: the one-standard-error
    rule), given their log-probabilities, (P, T). Errors are those of `settled`.
    """
    scores = _possible(log_likelihoods).clamp(min=-_SURPRISE)
    mean, error = _batch_means(scores[int(scores.sum(dim=1).argmax())] - scores)
    return int((~(mean > error)).nonzero()[0])


def one_of(parts: int, chosen: int) -> Tensor:
    """Return the weights, (P,) float64, of one part alone."""
    return torch.eye(parts, dtype=torch.float64)[chosen]


def _batch_means(differences: Tensor) -> tuple[Tensor, Tensor]:
    """Return means of (P, T) differences and standard errors, (P,); infinite below 64 tokens."""
    blocks = min(100, math.isqrt(differences.shape[1]))
    length = differences.shape[1] // max(blocks, 1)
    if blocks < 8:
        return differences.mean(dim=1), torch.full((len(differences),), math.inf)
    differences = differences.clamp(-_SURPRISE, _SURPRISE)[:, : blocks * length]
    means = differences.reshape(-1, blocks, length).mean(dim=2)
    return means.mean(dim=1), means.std(dim=1) / math.sqrt(blocks)


def _possible(log_likelihoods: Tensor) -> Tensor:
    """Return (P, T) log-probabilities in float64, without tokens of probability 0 in all parts."""
    precise = log_likelihoods.cpu().double()
    return precise[:, (precise > -math.inf).any(dim=0)]


def grid(parts: int, most: int = _MOST_MIXTURES) -> Tensor:
    """Return mixtures, (K, P), on an even grid over the simplex with the parts alone among them,
    `most` if these are no more: steps of 1/20 for two parts (K = 21), of 1/10 for three (K = 66),
    coarser ones for more.
    """
    steps = 1
    while steps < 20 and math.comb(steps + parts, parts - 1) <= most:
        steps += 1
    end = steps + parts - 1
    bars = [(-1, *bars, end) for bars in combinations(range(end), parts - 1)]
    return (torch.tensor(bars, dtype=torch.float64).diff() - 1) / steps


class Follower:
    """Weights that follow a text: Bayes' posterior over K mixtures on a grid (Cover, 1991), of
    which, after token t = 0, 1, ..., a share of 1/(t + 2) returns to where it began (Herbster and
    Warmuth, 1998).

    On every text of T tokens, the loss in all is at most log K + log T nats more than that of the
    best of the mixtures, and log K without `share`. Predicting with the K mixtures is the same as
    mixing the parts with the posterior's mean, `weights`, because both are linear.

    Args:
        parts: P, how many models are mixed.
        start: Weights, (P,), that begin as one more mixture, with half of the mass: 2K in place of
            K above, and 2 where it is they that are best. None: all begin alike.
        share: Whether a share returns, so that a text may change.
    """

    def __init__(self, parts: int, start: Tensor | None = None, share: bool = True) -> None:
        mixtures = grid(parts)
        prior = torch.full((len(mixtures),), 1 / len(mixtures), dtype=torch.float64)
        if start is not None:
            mixtures = torch.cat([start.cpu().double()[None], mixtures])
            prior = torch.cat([prior.new_tensor([1.0]), prior]) / 2
        self.mixtures, self.log_prior, self.share = mixtures, prior.log(), share
        self.log_posterior, self.tokens = self.log_prior, 0

    @property
    def weights(self) -> Tensor:
        """The parts' weights for the next token, (P,) float64."""
        return self.log_posterior.softmax(dim=0) @ self.mixtures

    def observe(self, log_likelihoods: Tensor) -> Tensor:
        """Follow T tokens, given their log-probabilities in the parts, (P, T); return the logarithm
        of the probability that each had before it was seen, (T,) float64. A token that no part
        thinks possible has -inf, and changes nothing.
        """
        scores = log_likelihoods.cpu().double().T[:, None]
        rows = (
            row
            for part in scores.chunk(1 + len(scores) // 1024)
            for row in (part + self.mixtures.log()).logsumexp(dim=2).numpy()
        )
        predicted = np.empty(len(scores))
        log_prior, log_posterior = self.log_prior.numpy(), self.log_posterior.numpy()
        for t, row in enumerate(rows):
            joint = log_posterior + row
            predicted[t] = evidence = np.logaddexp.reduce(joint)
            if evidence == -math.inf:
                continue
            log_posterior = joint - evidence
            if self.share:
                share = 1 / (self.tokens + 2)
                log_posterior = np.logaddexp(
                    log_posterior + math.log1p(-share), log_prior + math.log(share)
                )
            self.tokens += 1
        self.log_posterior = torch.from_numpy(log_posterior)
        return torch.from_numpy(predicted)

    def state(self) -> Tensors:
        """Return what a follower of the same parts and start resumes from, to be kept in a file."""
        return {"log_posterior": self.log_posterior, "tokens": torch.tensor(self.tokens)}

    def resume(self, state: Named) -> None:
        """Go on from a state. Raises TensorError if it is none of a follower like this one."""
        check_alike(self.state(), state, "weights that follow a text")
        log_posterior, tokens = state["log_posterior"], int(state["tokens"])
        if not abs(float(log_posterior.logsumexp(dim=0))) < 1e-6 or tokens < 0:
            raise TensorError(
                f"weights that follow a text: {log_posterior.exp().sum():g} in all after {tokens} "
                f"tokens",
                "Start them again, without this state.",
            )
        self.log_posterior, self.tokens = log_posterior, tokens
