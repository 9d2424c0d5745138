"""Interpolation: the predictions of several methods' models, which each client mixes.

p_i(y | x) = sum_k w_ik p_ik(y | x), with a client's weights w_i from its own validation data: the
linear interpolation of language models (Jelinek and Mercer 1980), for personalisation "model
interpolation" (Mansour et al., "Three Approaches for Personalization with Applications to Federated
Learning", 2020).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field

from coterie.client.client import Client
from coterie.client.parts import WEIGHTS, ClientOfParts
from coterie.client.state import improves, recall, remember
from coterie.core.protocol import MOST_SCORES, Adaptation, Ask, ClientId, Sends, task
from coterie.core.tensors import Tensors, under
from coterie.methods.parts import OfParts
from coterie.models.interpolation import (
    PRIOR,
    evidence,
    fit_weights,
    grid,
    interpolate,
    settled,
)
from coterie.models.predictions import joined, likelihoods, score_of

CENTRE = "centre"  # of the prior of a client's weights, (P,) float64, sent and in its state
ROWS = 8  # windows of text, or examples, of each client by which the centre is chosen


@dataclass(frozen=True)
class Interpolation(OfParts):
    """Train several methods' models and mix their predictions, with weights from validation."""

    prior: Annotated[
        float,
        Field(
            ge=0,
            description="strength of the Dirichlet prior of the weights, in validation examples "
            "or tokens",
        ),
    ] = PRIOR
    shared_prior: Annotated[
        bool,
        Field(
            description="whether its centre is what fits a few validation examples of all clients "
            "together, for which each also sends their scores, rather than even weights; for "
            "clients with a handful of validation examples"
        ),
    ] = False

    def before_scores(self, received: Mapping[ClientId, Tensors]) -> Adaptation:
        """Add the centre of a `shared_prior`: the mean of the posterior of weights that all clients
        share, under even mixtures, given a few examples of each client's validation data.
        """
        if not self.shared_prior:
            return received
        mixtures = grid(len(self.methods), MOST_SCORES)
        total = torch.zeros(len(mixtures), dtype=torch.float64)
        ask = Ask(self.evidence, received, lambda sent: {"evidence": total})
        for reply in (yield ask).values():
            total = total + reply["evidence"]
        centre = total.softmax(dim=0) @ mixtures
        return {i: {**tensors, CENTRE: centre} for i, tensors in received.items()}

    @task(Sends.SCORES)
    def evidence(self, client: ClientOfParts, tensors: Tensors) -> Tensors:
        """Return the log-likelihood of a few validation examples under each mixture of a grid."""
        by_part = [one.predictions(one.valid, ROWS) for one in self._each(client, tensors)]
        mixtures = grid(len(by_part), MOST_SCORES)
        return {"evidence": evidence(likelihoods(*joined(by_part)), mixtures)}

    def score_spec(self, scores: Tensors) -> Tensors:
        sums = torch.stack([scores["valid"], scores["test"]]).expand(len(self.methods), -1, -1)
        weights = torch.empty(len(self.methods), dtype=torch.float64)
        whole = {name: scores[name] for name in ("valid", "test")}  # no choices of a pool's gate
        return whole | {"parts": sums, WEIGHTS: weights}

    @task(Sends.SCORES)
    def score(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        return self._scored(client, tensors, keep=False)

    @task(Sends.SCORES)
    def score_and_keep(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        """Return `score`; of each part, keep the model that is the best on validation."""
        return self._scored(client, tensors, keep=True)

    def _each(self, client: ClientOfParts, tensors: Tensors) -> Iterator[Client]:
        """Yield the client of each part, with that part's tensors on loan."""
        for name, part in self.methods.items():
            with client.part(name) as one, one.borrowing(part.loadable(one, under(name, tensors))):
                yield one

    def _scored(self, client: ClientOfParts, tensors: Tensors, keep: bool) -> Tensors:
        """Fit the weights on validation data; return the scores of the mixture and of each part."""
        by_part, scores = [], []
        for one in self._each(client, tensors):
            by_part.append((one.predictions(one.valid), one.predictions(one.test)))
            its = dict(zip(("valid", "test"), map(score_of, by_part[-1]), strict=True))
            if keep and improves(one, its["valid"]):
                remember(one, its, one.round)
            scores.append(torch.stack(list(its.values())))
        valid, test = map(joined, zip(*by_part, strict=True))
        if CENTRE in tensors:
            client.state[CENTRE] = tensors[CENTRE]
        right = likelihoods(*valid)
        fitted = fit_weights(right, self.prior, centre=client.state.get(CENTRE))
        weights = settled(right, fitted)
        client.state[WEIGHTS] = weights
        return {
            "valid": score_of([(interpolate(valid[0], weights), valid[1])]),
            "test": score_of([(interpolate(test[0], weights), test[1])]),
            "parts": torch.stack(scores),
            WEIGHTS: weights,
        }

    @task(Sends.SCORES)
    def score_test(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        return {"test": self.score_part(client, tensors, None)["test"]}

    def score_part(self, client: ClientOfParts, tensors: Tensors, rows: int | None) -> Tensors:
        """Return the scores on so many rows of test data, and each part's with its weight."""
        by_part = [one.predictions(one.test, rows) for one in self._each(client, tensors)]
        log_probs, right = joined(by_part)
        weights = torch.tensor(list(client.weights.values()), dtype=torch.float64)
        return {
            "test": score_of([(interpolate(log_probs, weights), right)]),
            "parts": torch.stack([score_of(predictions)[None] for predictions in by_part]),
            WEIGHTS: weights,
        }

    @task(Sends.SCORES)
    def recall(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        """Make each part's best model the client's; return the scores of their mixture, and the
        last of the parts' rounds.
        """
        rounds = []
        for name in self.methods:
            with client.part(name) as one:
                rounds.append(recall(one)["round"])
        return self._scored(client, {}, keep=False) | {"round": max(rounds)}
