"""DDOME with a shared model, for new clients whose data no few experts cover: beyond the paper.

New clients estimate the class frequencies of their data without labels, as Saerens, Latinne and
Decaestecker do ("Adjusting the Outputs of a Classifier to New a Priori Probabilities", 2002).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.settings import Training
from coterie.client.site import CENTRE, WEIGHTS, ClientOfParts
from coterie.core.errors import RecipeError
from coterie.core.protocol import Adaptation, ClientId, Round, State
from coterie.core.tensors import Tensors, prefixed, under
from coterie.methods.interpolation import Interpolation
from coterie.methods.pool_choice import TRAINED, ChosenPool
from coterie.models.interpolation import fit_weights, interpolate
from coterie.models.layout import Layout
from coterie.models.predictions import joined


@dataclass(frozen=True)
class DDOMEShared(Interpolation):
    """Train DDOME's pool and a shared model on the same batches. A new client gets as many experts
    as cover a share of its gate's scores, mixes their predictions with the shared model's, and adds
    the logarithms of its class frequencies, which never leave it, to all logits.

    After the last round those that trained are served like new ones, and send likelihoods of a few
    validation examples under a grid of mixtures. The weights that fit all, `centre`, (P,), in the
    server's state, are those of new clients without labels.
    """

    serves_unseen_clients: ClassVar[bool] = True
    stateful: ClassVar[bool] = False

    # as of interpolation; all must serve new clients
    parts: Annotated[tuple[str | dict[str, Any], ...], Field(min_length=2)] = (
        {"name": "ddome", "coverage": 0.8},
        "fedavg",
    )
    # strength of an even prior of classes, in examples; null: none
    frequencies: Annotated[float | None, Field(gt=0)] = 1.0
    labelled: bool = False  # whether new clients fit weights to labels

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, part in self.methods.items():
            if not part.serves_unseen_clients:
                raise ValueError(f"parts: {name} has no model for new clients")

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        super().check(model, clients, training)
        networks = [model.trainable(of) for of in self.layout(0, Layout()).models]
        if self.frequencies and any(None in _biases(network) for network in networks):
            raise RecipeError(
                "method", ["method.frequencies: a last layer has no constants; use null"]
            )

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        even = torch.full((len(self.methods),), 1 / len(self.methods), dtype=torch.float64)
        return super().init(model, clients) | {CENTRE: even}

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        return super().members(state, clients) | {CENTRE: state[CENTRE]}

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        parts = yield from super().finish(state, clients)
        received = yield from self.adapt(parts, clients, trained=True)
        return parts | {CENTRE: (yield from self.fit_common(received))} if received else parts

    def adapt(self, state: State, clients: Sequence[ClientId], trained: bool = False) -> Adaptation:
        """See `Method.adapt`. Clients that `trained` are served by their training data."""
        parts = {}
        for name, part in self.methods.items():
            how = {"trained": True} if trained and isinstance(part, ChosenPool) else {}
            parts[name] = part.adapt(under(name, state), clients, **how)
        served = yield from self._in_step(parts)
        marks = {CENTRE: state[CENTRE]} | ({TRAINED: torch.tensor(True)} if trained else {})
        received = {i: {**of, **marks} for i, of in self._by_client(served).items()}
        return {i: of for i, of in received.items() if all(i in to for to in served.values())}

    def weights(self, client: ClientOfParts, tensors: Tensors, valid: Tensor) -> Tensor:
        return super().weights(client, tensors, valid) if self.labelled else client.shares

    def loadable(self, client: ClientOfParts, download: Tensors) -> Tensors:
        """Return a download whose networks expect the class frequencies of the client's data; keep
        the weights that came with it, unless own labels said others.
        """
        if CENTRE in download and not (self.labelled and WEIGHTS in client.state):
            client.state[WEIGHTS] = download[CENTRE].clone()
        if self.frequencies is None or CENTRE not in download:  # its own models are adjusted
            return download
        by_part, adjusted = [], Tensors()
        for name, part in self.methods.items():
            with client.part(name) as one, one.borrowing(part.loadable(one, under(name, download))):
                by_part.append(one.predictions(one.train if TRAINED in download else one.test))
        mixed = interpolate(joined(by_part)[0], client.shares)
        shares = fit_weights(mixed.T, self.frequencies)
        for name, part in self.methods.items():
            with client.part(name) as one, one.borrowing(part.loadable(one, under(name, download))):
                for bias in _biases(one.model):
                    bias.add_((shares * len(shares)).log().to(bias))
                adjusted |= prefixed(name, one.read(*part.shared))
        return adjusted


def _biases(model: Any) -> list[Any]:
    """Return the constants, (classes,) or None, of the logits of each of a client's networks."""
    return [of.output_bias for of in (model.experts if hasattr(model, "experts") else [model])]
