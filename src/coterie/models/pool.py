"""A client's share of a server's pool: K of M experts, and the gate (DDOME, Section 4)."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from coterie.core.errors import ModelError
from coterie.core.roles import EXPERT, GATE, GENERALIST, Role, by_role, tag
from coterie.core.tensors import Tensors
from coterie.data.examples import Examples
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.models.layout import ABSENT, GateTarget, PoolLayout
from coterie.models.mixture import LoRA
from coterie.models.network_tensors import statistics
from coterie.models.networks import NetworkShape, Shape
from coterie.models.predictions import Prediction


class PoolClassifier:
    """K networks of one architecture, or more, and a gate, a two-layer perceptron with `gate_width`
    hidden units from a common expert's embeddings to M logits; without a common expert the mixture
    needs no gate. Every expert begins with `start`, or with random values.

    `numbers`, (slots,) int64, has the experts in the places, ascending, then `ABSENT`.
    """

    def __init__(
        self,
        shape: Shape,
        layout: PoolLayout,
        common: CommonExpert | None,
        start: Tensors | None = None,
        gate_width: int = 64,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape, self.layout, self.common = shape, layout, common
        self.device = torch.device(device)
        places = range(layout.slots or layout.chosen)
        self.experts = [Classifier(shape, device, start, statistics=True) for _ in places]
        self.numbers = torch.full((len(places),), ABSENT)
        self.gate: Classifier | None = None
        if layout.gated:
            if common is None:
                remedy = "Set model.common in the recipe: it embeds the data for the gate."
                raise ModelError("the gate needs a common expert", remedy)
            gate = NetworkShape("mlp", (1, 1, common.width), layout.pool, (gate_width,))
            self.gate = Classifier(gate, device)
            tag(self.gate.network, GATE)
        networks = {str(place): expert.network for place, expert in enumerate(self.experts)}
        for network in networks.values():
            tag(network, EXPERT)
        gates = {} if self.gate is None else {"gate": self.gate.network}
        together = nn.ModuleDict(networks | gates)
        # named `<place>.<parameter>` and `gate.<parameter>`
        self.parameters_by_role, self.buffers = by_role(together), statistics(together)
        tensors = dict[str, Tensor](self.parameters_by_role[EXPERT]) | self.buffers
        self._expert_slots = [
            {name: t for name, t in tensors.items() if name.startswith(f"{place}.")}
            for place in places
        ]

    def initial_buffers(self) -> Tensors:
        """Return `Classifier.initial_buffers` of each place."""
        return {
            f"{place}.{name}": buffer
            for place, expert in enumerate(self.experts)
            for name, buffer in expert.initial_buffers().items()
        }

    pools = 1

    def expert_slots(self) -> list[dict[str, Tensor]]:
        """Return the parameters and statistics in each place, which are sent with its expert."""
        return self._expert_slots

    def bind_experts(self, numbers: Tensor) -> None:
        """Take over the numbers of a client's experts, (K,) int64."""
        self.numbers = numbers

    @property
    def statistics(self) -> None:
        """Return None: running statistics belong to no role, they are sent with their expert."""

    def loras(self) -> dict[str, LoRA]:
        """Return {}: whole networks are trained."""
        return {}

    def initial(self, role: Role, seed: int) -> Tensors:
        """Return initial values of ONE expert, with running statistics, or of the gate."""
        if role is EXPERT:
            return self.experts[0].initial(GENERALIST, seed)
        if role is GATE and self.gate is not None:
            initial = self.gate.initial(GENERALIST, seed)
            return {f"gate.{name}": tensor for name, tensor in initial.items()}
        return {}

    @property
    def trainable_parameters(self) -> int:
        """The number of values that a client trains: K experts, and the gate."""
        gate = sum(p.numel() for p in self.parameters_by_role[GATE].values())
        return gate + self.layout.chosen * self.experts[0].trainable_parameters

    @property
    def active_parameters(self) -> int:
        """The number of values that one example uses: one expert, or a mixture's, and the gate."""
        unused = self.layout.chosen - 1 if self.layout.answer == "best" else 0
        return self.trainable_parameters - unused * self.experts[0].trainable_parameters

    def flops(self) -> int:
        """Return the floating-point operations of one example: embedding, gate and experts."""
        experts = 1 if self.layout.answer == "best" else self.layout.chosen
        flops = experts * self.experts[0].flops()
        if self.gate is not None and self.common is not None:
            flops += self.gate.flops() + self.common.flops()
        return flops

    per_example = None

    @property
    def embed(self) -> Callable[[Examples], Tensor] | None:
        """The common expert's embedding of batches, (B, e) on the CPU; None without a gate."""
        common = self.common
        if self.gate is None or common is None:
            return None
        return lambda batch: common.embed(batch.x.to(self.device)).cpu()

    @torch.no_grad()
    def affinity(self, embeddings: Tensor) -> Tensor:
        """Return sum_i softmax g(x_i), (M,) float64: how much (N, e) embeddings want experts."""
        return self._logits(embeddings).softmax(dim=1).cpu().double().sum(dim=0)

    def gradient(
        self,
        batch: Examples | GateTarget,
        wrt: Sequence[nn.Parameter],
        micro_batch: int | None = None,
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return the gradient of the mixture's mean cross-entropy with respect to `wrt`, in its
        order, zeros for what the loss does not depend on; of a `GateTarget`, that of the gate; and
        the detached scalars "loss" and "accuracy". Examples have embeddings, or none for a client
        with one expert, which is then trained alone. Raises ModelError if there is no expert, the
        batch does not fit, or micro-batches would change its statistics.
        """
        if isinstance(batch, GateTarget):
            logits = self._logits(batch.embedding)
            target = torch.full((len(batch),), batch.expert, device=self.device)
            loss = cross_entropy(logits, target)
            return _gradients(loss, wrt), _stats(logits, target, loss)
        size = micro_batch or len(batch)
        self.experts[0].check_whole(size, len(batch))
        total: list[Tensor] = []
        stats: list[tuple[float, dict[str, Tensor]]] = []
        for part in batch.split(size):
            share = len(part) / len(batch)
            with ExitStack() as training:
                for expert in self.present():
                    training.enter_context(expert.batch_statistics())
                outputs, target = self._mixed(part)
            loss = nll_loss(outputs, target)
            terms = _gradients(share * loss, wrt)
            total = [a + b for a, b in zip(total, terms, strict=True)] if total else terms
            stats.append((share, _stats(outputs, target, loss)))
        return total, {
            name: torch.stack([share * part[name] for share, part in stats]).sum()
            for name in stats[0][1]
        }

    def gradient_elsewhere(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> Any:
        """Raise ModelError: no method compares experts of a pool."""
        problem = "a pool of experts cannot give gradients at another client's model"
        raise ModelError(problem, "Use a method without a pool, such as cobo.")

    def score(self, batches: Iterable[Examples]) -> Tensor:
        """See `Classifier.score`."""
        return self.judge(batches)[0]

    def predictions(self, batches: Iterable[Examples]) -> Iterator[Prediction]:
        """See `Classifier.predictions`."""
        for batch in batches:
            outputs = self.predict(batch)[0]
            yield outputs, batch.y.to(outputs.device)

    @torch.no_grad()
    def judge(self, batches: Iterable[Examples]) -> tuple[Tensor, Tensor]:
        """Return (3,) float64, see `Classifier.score`, of examples with embeddings and labels; and
        (2, classes, M) float64: each class's examples at each expert, and the correct ones.

        In a mixture an example counts for the expert with the highest score.
        """
        score = torch.zeros(3, dtype=torch.float64)
        choices = torch.zeros(2, self.shape.classes, self.layout.pool, dtype=torch.float64)
        for batch in batches:
            outputs, experts = (values.cpu() for values in self.predict(batch))
            right = (outputs.argmax(dim=1) == batch.y).double()
            nll = nll_loss(outputs.double(), batch.y, reduction="sum")
            score += torch.stack([nll, torch.tensor(len(batch)), right.sum()])
            for row, counted in zip(choices, (torch.ones_like(right), right), strict=True):
                row.index_put_((batch.y, experts), counted, accumulate=True)
        return score, choices

    @torch.no_grad()
    def predict(self, batch: Examples) -> tuple[Tensor, Tensor]:
        """Return (B, classes) log-probabilities of examples with embeddings, and (B,) the expert
        with the highest score for each. Labels must be present but are not used.
        """
        places = self._weights(batch).argmax(dim=1)
        if self.layout.answer == "mixture":
            outputs, _ = self._mixed(batch)
        else:
            x, _ = self.experts[0].checked(batch)
            outputs = torch.empty(len(batch), self.shape.classes, device=self.device)
            for place, expert in enumerate(self.present()):
                if (rows := places == place).any():
                    outputs[rows] = expert(x[rows]).log_softmax(dim=1)
        return outputs, self.numbers.to(self.device)[places]

    def present(self) -> list[Classifier]:
        """Return the client's experts."""
        count = int((self.numbers != ABSENT).sum())
        if not count:
            remedy = "The server must send some before the client trains or predicts."
            raise ModelError("the client has no expert of the pool", remedy)
        return self.experts[:count]

    def _logits(self, embeddings: Tensor) -> Tensor:
        """Return the gate's (B, M) logits of (B, e) embeddings."""
        assert self.gate is not None
        return cast(Tensor, self.gate.network(embeddings.to(self.device)))

    def _weights(self, batch: Examples) -> Tensor:
        """Return the log-weight of each of the client's experts for each example, (B, k)."""
        k = len(self.present())
        alone = k == 1 and (batch.embedding is None or self.layout.mixture != "scores")
        if self.gate is None or alone:
            return torch.full((len(batch), k), -math.log(k), device=self.device)
        if batch.embedding is None:
            problem = "the batch has no embeddings"
            raise ModelError(problem, "Draw it from the client's own splits, which have them.")
        scores, numbers = self._logits(batch.embedding), self.numbers[:k].to(self.device)
        if self.layout.mixture == "scores":
            return scores.log_softmax(dim=1)[:, numbers]
        return scores[:, numbers].log_softmax(dim=1)

    def _mixed(self, batch: Examples) -> tuple[Tensor, Tensor]:
        """Return the mixture's (B, classes) log-probabilities, and the labels."""
        weights = self._weights(batch)
        x, target = self.experts[0].checked(batch)
        # (B, k, classes)
        outputs = torch.stack([expert(x) for expert in self.present()], dim=1)
        if self.layout.mixture in ("probabilities", "mean"):
            return (outputs.log_softmax(dim=2) + weights.unsqueeze(2)).logsumexp(dim=1), target
        return (weights.exp().unsqueeze(2) * outputs).sum(dim=1).log_softmax(dim=1), target


def _gradients(loss: Tensor, wrt: Sequence[nn.Parameter]) -> list[Tensor]:
    return list(torch.autograd.grad(loss, wrt, allow_unused=True, materialize_grads=True))


def _stats(outputs: Tensor, target: Tensor, loss: Tensor) -> dict[str, Tensor]:
    return {"loss": loss.detach(), "accuracy": (outputs.argmax(dim=1) == target).float().mean()}
