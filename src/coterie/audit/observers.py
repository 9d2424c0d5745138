"""The models that observers of a run build from messages, and their scores of samples."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from coterie.audit.statistics import Values
from coterie.client.blueprint import Model
from coterie.client.client import Client
from coterie.core.errors import Refused, TensorError
from coterie.core.protocol import ClientId
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Named, Tensors
from coterie.data.chats.splits import ChatBatch
from coterie.data.examples import Examples as Batch
from coterie.models.classifier import Classifier
from coterie.models.language import LanguageModel
from coterie.models.windows import TextBatch
from coterie.personal.loading import Personal
from coterie.runs.problems.language import Language
from coterie.runs.problems.prepare import Prepared

LOGITS = 2**23  # values at once
LOWEST = 0.2  # k of Min-K%++
ABLE = (
    "An audit measures methods that share whole models or experts, such as fedavg, comigs-1g1s "
    "and ditto."
)


class Shared(ABC):
    """The shared part of a run as a model, without specialists and routers, which stay local."""

    def __init__(self, prepared: Prepared, client: ClientId, model: Model) -> None:
        site = prepared.site
        data, total = site.data[client], site.total_iterations
        self.client = Client(client, model, data, site.training, {}, site.seed, total)
        self.personal: Any = None  # in place of `model`

    def load(self, shown: Named | Personal) -> None:
        """Load the model's tensors in a message, or take a personal model in its place. Raises
        Refused if the model is incomplete.
        """
        self.personal = shown if isinstance(shown, Personal) else None
        if isinstance(shown, Personal):
            return
        names, problem = self.client.read(GENERALIST).keys(), "is not a complete model"
        parts = {name: t for name, t in shown.items() if name in names or name == GENERALIST}
        if not parts or (GENERALIST not in parts and parts.keys() != names):
            raise Refused(f"audit: what this method sends {problem}", ABLE)
        try:
            self.client.load(parts)
        except TensorError as error:
            problem += f" ({error.problem})"
            raise Refused(f"audit: what this method sends {problem}", ABLE) from None

    @abstractmethod
    def likelihoods(self, rows: Any) -> Values:
        """Return (N,) the mean log-likelihood of each row's predictions, in nats."""


class SharedText(Shared):
    """The shared part of a language model. If a client mixes several experts of its own, an
    observer takes the generalists with equal weights.
    """

    def __init__(self, prepared: Prepared, client: ClientId) -> None:
        assert isinstance(prepared.problem, Language)
        layout = prepared.site.layouts[client]
        if not layout.generalists or layout.local_b:
            raise Refused(f"audit: {prepared.recipe.method['name']} shares no whole experts", ABLE)
        self.language: LanguageModel = prepared.problem.build(
            replace(layout, specialists=0, biased=False, routing="equal", balance="none")
        )
        super().__init__(prepared, client, self.language)

    def likelihoods(self, rows: TextBatch, last: int = 0) -> Values:
        """Return (N,) the mean log-likelihood of each row's tokens, or of its `last` ones."""
        means = [nll[:, -last:].mean(dim=1).cpu().double() for nll, _ in self._scored(rows)]
        return -np.concatenate(means)

    def min_k(self, rows: TextBatch) -> Values:
        """Return (N,) Min-K%++ (Zhang et al., ICLR 2025): the mean of the lowest fifth of a row's
        standardised log-likelihoods of tokens, (log p - mu) / sigma, with mu and sigma those of log
        p of a token drawn from the model's own prediction.
        """
        scores = []
        for nll, logits in self._scored(rows):
            log_p = logits.log_softmax(dim=-1)
            mean = (log_p.exp() * log_p).sum(dim=-1)
            variance = (log_p.exp() * log_p.square()).sum(dim=-1) - mean.square()
            standardised = (-nll - mean) / variance.clamp(min=1e-12).sqrt()
            count = max(int(LOWEST * standardised.shape[1]), 1)
            lowest = standardised.topk(count, dim=1, largest=False).values
            scores.append(lowest.mean(dim=1).double().cpu())
        return np.concatenate(scores)

    @torch.no_grad()
    def _scored(self, rows: TextBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield for some rows of (N, C + 1) ids (n, C) the loss of each next token, and (n, C, V)
        the logits; conversations row by row, the T tokens that count, (1, T) and (1, T, V).
        """
        chats = isinstance(rows, ChatBatch)
        width = rows.ids.shape[1] if isinstance(rows, ChatBatch) else rows.shape[1]
        size = max(LOGITS // (width * self.language.backbone.architecture.vocabulary), 1)
        predicted = (self.personal or self.language).predicted
        for part in rows.split(1 if chats else size):
            logits, targets = predicted(part)
            nll = cross_entropy(logits.float(), targets, reduction="none")
            yield nll.view(len(part), -1), logits.float().view(len(part), -1, logits.shape[-1])


class SharedClassifier(Shared):
    """The shared part of a classifier that is one network."""

    def __init__(self, prepared: Prepared, client: ClientId) -> None:
        model = prepared.problem.build(prepared.site.layouts[client])
        if not isinstance(model, Classifier):
            raise Refused("audit: with a pool of experts each client gets a different part", ABLE)
        self.model = model
        super().__init__(prepared, client, model)

    @torch.no_grad()
    def likelihoods(self, rows: Batch) -> Values:
        scores = []
        for part in rows.split(256):
            x, y = self.model.checked(part)
            logits = self.personal(part.x) if self.personal else self.model(x)
            scores.append(-cross_entropy(logits.float(), y, reduction="none").cpu().double())
        return np.concatenate(scores)


def shared(prepared: Prepared, client: ClientId) -> Shared:
    """Return the shared part of a client's model at its initial values. Raises Refused."""
    kind = SharedText if isinstance(prepared.problem, Language) else SharedClassifier
    return kind(prepared, client)


# The observations of an attacker who targets one client: pairs of models, after and before it was
# trained; None: the initial values. For the server, a pair is what it received of the client in an
# exchange and what it had sent it; for another client, the final model that everybody gets and the
# initial one; for the user of a personal model, that and the initial one.
View = Sequence[tuple[Tensors | Personal, Tensors | None]]


def calibrated(model: Shared, view: View, score: Callable[[Shared], Values]) -> Values:
    """Return (N,) log p(x | after) - log p(x | before), summed over the pairs of a view. That is
    the likelihood ratio by which RMIA ranks (Zarifzadeh, Liu and Shokri, ICML 2024) with the model
    before as its reference: for one set of other texts z the share of them that x dominates grows
    with it, so that both have the same ROC curve but for ties.
    """
    initial = model.client.read(GENERALIST)
    total: Values | float = 0.0
    try:
        for after, before in view:
            for sign, tensors in ((1.0, after), (-1.0, initial if before is None else before)):
                model.load(tensors)
                total = total + sign * score(model)
    finally:
        model.load(initial)
    return np.asarray(total, dtype=np.float64)
