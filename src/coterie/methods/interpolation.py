"""Interpolation: the predictions of several methods' models, which each client mixes.

p_i(y | x) = sum_k w_ik p_ik(y | x), with a client's weights w_i from its own validation data: the
linear interpolation of language models (Jelinek and Mercer 1980), for personalisation "model
interpolation" (Mansour et al., "Three Approaches for Personalization with Applications to Federated
Learning", 2020).
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.site import CENTRE, ClientOfParts
from coterie.core.protocol import MOST_SCORES, Adaptation, Ask, ClientId, Replies, Sends, task
from coterie.core.tensors import Tensors
from coterie.methods.base import Method
from coterie.methods.parts import OfParts
from coterie.methods.section import build_method
from coterie.models.interpolation import PRIOR, evidence, fit_weights, grid, settled
from coterie.models.predictions import joined, likelihoods

ROWS = 8  # windows of text, or examples, of each client by which the centre is chosen


@dataclass(frozen=True)
class Interpolation(OfParts):
    """Train several methods' models and mix their predictions, with weights from validation."""

    # the methods whose models are mixed: names, or sections with a `name` and settings of its own
    parts: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=2)] = ("local", "fedavg")
    # strength of the Dirichlet prior of the weights, in validation examples or tokens
    prior: Annotated[float, Field(ge=0)] = PRIOR
    # whether its centre is what fits a few validation examples of all clients together, for which
    # each also sends their scores, rather than even weights; for clients with a handful of
    # validation examples
    shared_prior: bool = False

    @cached_property
    def methods(self) -> Mapping[str, Method]:
        methods: dict[str, Method] = {}
        common = {name: getattr(self, name) for name in ("rounds", "local_steps", "local_epochs")}
        for part in self.parts:
            section = {"name": part} if isinstance(part, str) else part
            method = build_method(common | section)
            name = str(section["name"])
            if name in methods or method.methods or not method.total_iterations:
                raise ValueError(f"parts: {name} is in them twice, or trains no single model")
            if method.rounds != self.rounds:
                raise ValueError(f"parts: {name} has rounds of its own; all train method.rounds")
            methods[name] = method
        return methods

    def weights(self, client: ClientOfParts, tensors: Tensors, valid: Tensor) -> Tensor:
        if CENTRE in tensors:
            client.state[CENTRE] = tensors[CENTRE]
        return settled(valid, fit_weights(valid, self.prior, centre=client.state.get(CENTRE)))

    def before_scores(self, received: Mapping[ClientId, Tensors]) -> Adaptation:
        """Add the centre of a `shared_prior`: the mean of the posterior of weights that all clients
        share, under even mixtures, given a few examples of each client's validation data.
        """
        if not self.shared_prior:
            return received
        centre = yield from self.fit_common(received)
        return {i: {**tensors, CENTRE: centre} for i, tensors in received.items()}

    def fit_common(self, received: Mapping[ClientId, Tensors]) -> Generator[Ask, Replies, Tensor]:
        """Return the mean of the posterior of weights that these clients share, (P,)."""
        mixtures = grid(len(self.methods), MOST_SCORES)
        total = torch.zeros(len(mixtures), dtype=torch.float64)
        ask = Ask(self.evidence, received, lambda sent: {"evidence": total})
        for _, reply in sorted((yield ask).items()):
            total = total + reply["evidence"]
        return total.softmax(dim=0) @ mixtures

    @task(Sends.SCORES)
    def evidence(self, client: ClientOfParts, tensors: Tensors) -> Tensors:
        """Return the log-likelihood of a few validation examples under each mixture of a grid."""
        by_part = [one.predictions(one.valid, ROWS) for one in self._each(client, tensors)]
        mixtures = grid(len(by_part), MOST_SCORES)
        return {"evidence": evidence(likelihoods(*joined(by_part)), mixtures)}
