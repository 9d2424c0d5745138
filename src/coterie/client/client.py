"""The client as a task sees it: it trains, and is scored."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie.aggregation.dpsgd import Sanitizer
from coterie.client.blueprint import Metrics, initial_seed
from coterie.client.settings import UPPER
from coterie.client.state import OWNED, BoundClient, advance, draw, position
from coterie.core import devices
from coterie.core.errors import Divergence
from coterie.core.roles import GENERALIST, Role
from coterie.core.tensors import Named, Tensors
from coterie.core.threads import check_stopped
from coterie.data.splits import Batch, Numbers, Split
from coterie.models.classifier import Classifier
from coterie.models.predictions import Prediction


@dataclass
class Client(BoundClient):
    """One client during one task.

    All that it remembers is in `state`, a flat dict of tensors that the engine keeps between tasks:
    `parameters/<role>` and `optimiser/<role>/...`, one flat tensor each, of which the model's
    parameters are views; likewise `buffers` (running statistics); `experts`, the numbers of its
    experts of a pool; `cursor/<split>`, the rows drawn so far; `iteration`, its local iterations
    over the whole run, and `began`, the last round that it trained in with the iterations before
    that; `embeddings/<split>`, a common expert's embeddings of its data; `best/...`, see
    `remember`.

    Args:
        id: The client's stable name.
        model: The process's model of this client's layout; its parameters are bound to `state`.
        data: The client's own splits.
        training: Batch size and optimisers.
        state: Its stored tensors; {} for a new client.
        seed: The run's seed.
        total_iterations: T * L, over which the cosine schedule runs.
        sanitizer: Makes the gradients of shared roles, if single examples are protected.
        round: Rounds that the run has done.
        round_steps: L, the client's local iterations in a round.
        scored_rows: Rows of each set that are scored between rounds, and at the end; None: all of
            them.
        frozen: Roles that no step changes: they belong to others and are not sent back, see
            `Method.iterate`.
    """

    sanitizer: Sanitizer | None = None
    round: int = 0
    round_steps: int = 0
    scored_rows: tuple[int | None, int | None] = (None, None)
    frozen: frozenset[Role] = frozenset()
    stats: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    tokens: int = 0
    _most: int | None = None  # rows of a set that are scored now

    @contextmanager
    def scoring(self, rows: int | None) -> Iterator[None]:
        """Score so many rows of each set within the block."""
        self._most = rows
        try:
            yield
        finally:
            self._most = None

    @property
    def iteration(self) -> int:
        """The client's local iterations so far, over the whole run."""
        return int(self.state.get("iteration", 0))

    @property
    def position(self) -> int:
        """The position of the run's schedules, see `position`."""
        return position(self.state, self.round, self.round_steps)

    def advance(self) -> int:
        """Count a local iteration; return the schedules' position before it."""
        before = self.position
        advance(self.state, self.round)
        return before

    @property
    def lr(self) -> float:
        """eta, the learning rate of the experts in the next local iteration."""
        return self.training.experts.lr_at(self.position, self.total_iterations)

    def step(self, *roles: Role, on: Split, extra: Callable[[], Named] | None = None) -> None:
        """Take one optimiser step of the tensors of these roles on the next batch of a split.

        Gradients are of these roles alone, so that nothing leaks between the levels. A step of
        anything but the router or gate alone is a local iteration.

        If single examples are protected, a `Sanitizer` makes the gradients of shared roles, on its
        own batch, at a model whose other parts have their initial values: trained without noise,
        they would reveal examples.

        Args:
            roles: The roles to train.
            on: The split from which the batch is drawn.
            extra: Returns gradients, by name, of the objective's other terms, such as a penalty;
                those of shared roles must depend on the data only through what is shared.
        """
        if self.sanitizer is None or self.sanitizer.roles.isdisjoint(roles):
            return self.step_on(self.draw(on), *roles, extra=extra)
        present = [role for role in roles if self._parameters[role]]
        shared = [role for role in present if role in self.sanitizer.roles]
        local = [role for role in present if role not in self.sanitizer.roles]
        at = self.position if UPPER.issuperset(roles) else self.advance()
        gradients = self._sanitized(self.sanitizer, on, shared) if shared else {}
        if local:  # at the same point, as in a step without privacy
            gradients |= self._gradients(self.draw(on), local)
        self._descend(gradients, extra, at)
        return None

    def draw(self, on: Split) -> Batch:
        """Return the next batch of a split."""
        check_stopped()
        return draw(on, self.state, self.training.batch_size)

    def step_on(self, batch: Batch, *roles: Role, extra: Callable[[], Named] | None = None) -> None:
        """As `step`, on a batch that was drawn before."""
        present = [role for role in roles if self._parameters[role] and role not in self.frozen]
        at = self.position if UPPER.issuperset(roles) else self.advance()
        if not present:  # a single expert has no router to train
            return
        self._descend(self._gradients(batch, present, "+".join(roles)), extra, at)

    def _gradients(
        self, batch: Batch, roles: Sequence[Role], what: str = ""
    ) -> dict[Role, list[Tensor]]:
        """Return each role's gradients on a batch; record the loss under `what`."""
        wrt = [p for role in roles for p in self._parameters[role].values()]
        gradients, stats = self.model.gradient(batch, wrt, self.training.micro_batch)
        self._note(what or "+".join(roles), len(batch), stats)
        return self._by_role(gradients, roles)

    def _by_role(
        self, gradients: Iterable[Tensor], roles: Sequence[Role]
    ) -> dict[Role, list[Tensor]]:
        remaining = iter(gradients)
        return {role: list(islice(remaining, len(self._parameters[role]))) for role in roles}

    def _descend(
        self, gradients: Mapping[Role, list[Tensor]], extra: Callable[[], Named] | None, at: int
    ) -> None:
        """Take an optimiser step of each role, along its gradients and those of `extra`."""
        extra_gradients = extra() if extra else {}
        for role, parts in gradients.items():
            named = dict(zip(self._parameters[role], parts, strict=True))
            for name in named.keys() & extra_gradients.keys():
                named[name] = named[name] + extra_gradients[name]
            self.descend(role, _flat(named.values()).float(), at)

    def _sanitized(
        self, sanitizer: Sanitizer, on: Split, roles: Sequence[Role]
    ) -> dict[Role, list[Tensor]]:
        """Return each role's gradients on a sample of a split, private for each example."""
        wrt = [p for role in roles for p in self._parameters[role].values()]
        size, expected = sum(p.numel() for p in wrt), min(self.training.batch_size, on.windows)
        with self.borrowing(self._initial(frozenset(OWNED) - sanitizer.roles)):
            sample = sanitizer.sample(on.windows, expected)
            parts = self._by_example(on, sample, wrt, "+".join(roles))
            flat = sanitizer.gradient(parts, size, expected).to(self.model.device)
        # the number of rows that were sampled is a secret
        self.tokens += expected * self.data.train.context
        pieces = zip(wrt, torch.split(flat, [p.numel() for p in wrt]), strict=True)
        return self._by_role([piece.view_as(p) for p, piece in pieces], roles)

    def _by_example(
        self, on: Split, numbers: Numbers, wrt: list[nn.Parameter], what: str
    ) -> Iterator[list[Tensor]]:
        """Yield gradients of single rows of a split, as many at a time as fit into memory."""
        assert self.model.per_example is not None
        rows = self.training.micro_batch or self.training.batch_size
        for part in np.array_split(numbers, math.ceil(len(numbers) / rows)) if len(numbers) else ():
            gradients, stats = self.model.per_example(on.take(part), wrt)
            self._note(what, 0, stats)
            yield gradients

    def _initial(self, roles: frozenset[Role]) -> Tensors:
        if roles not in self._untouched:
            initial = self._untouched[roles] = Tensors()
            for role in sorted(roles):
                if self._parameters[role]:
                    initial |= self.model.initial(role, initial_seed(self.seed, role, self.id))
        return self._untouched[roles]

    def _note(self, what: str, rows: int, stats: dict[str, Tensor]) -> None:
        self.stats.setdefault(what, []).append(stats)
        self.tokens += rows * self.data.train.context

    def descend(self, role: Role, gradient: Tensor, at: int | None = None) -> None:
        """Take one optimiser step of all values of a role along a gradient, (d,), with the schedule
        at position `at`; by default that of the last local iteration.
        """
        settings = self.training.optimiser(role)
        lr = settings.lr_at(self.position - 1 if at is None else at, self.total_iterations)
        values = self.state[f"parameters/{role}"]
        settings.step(values, gradient, lr, self.state, f"optimiser/{role}")

    def gradient_at(self, values: Tensor, batch: Batch, role: Role = GENERALIST) -> Tensor:
        """Return the loss's gradient, (d,) fp32, at other values, (d,), of a role. The client does
        not change, nor do running statistics.
        """
        with self.at(values, role):
            wrt = list(self._parameters[role].values())
            gradients, stats = self.model.gradient_elsewhere(batch, wrt, self.training.micro_batch)
            self._note("elsewhere", len(batch), stats)
            return _flat(gradients).float()

    def gradients_at(self, points: Tensors, purpose: str) -> Tensors:
        """Return the gradients of the client's loss at several models, (d,) fp32 each, by the ids
        of the clients whose models they are, or are halfway to. The one under the client's own id
        becomes its model; its batch is one that trains it, and updates its running statistics. The
        other batches are those of `independent_stream(purpose)`.
        """
        others, gradients_of = self.independent_stream(purpose), Tensors()
        for name, values in sorted(points.items()):
            if name != self.id:
                gradients_of[name] = self.gradient_at(values, self.draw(others))
                continue
            self.load({GENERALIST: values})
            gradients_of[name] = self.gradient(self.draw(self.train))
        return gradients_of

    def gradient(self, batch: Batch) -> Tensor:
        """Return the loss's gradient, (d,) fp32, at its model; running statistics are updated."""
        return _flat(self._gradients(batch, [GENERALIST])[GENERALIST]).float()

    def gradient_to_share(self, values: Tensor, batch: Batch) -> Tensor:
        """As `gradient_at`; if examples are protected, by the sanitizer, on its own batch."""
        if self.sanitizer is None:
            return self.gradient_at(values, batch)
        with self.at(values, GENERALIST):
            return _flat(self._sanitized(self.sanitizer, self.train, [GENERALIST])[GENERALIST])

    def gradients(self, batch: Batch, *roles: Role) -> Tensors:
        """Return the loss's gradients by the names of these roles' tensors; fp32."""
        named = {name: p for role in roles for name, p in self._parameters[role].items()}
        if not named:
            return {}
        wrt = list(named.values())
        values, _ = self.model.gradient_elsewhere(batch, wrt, self.training.micro_batch)
        return {name: gradient.float() for name, gradient in zip(named, values, strict=True)}

    def reset_optimizer(self, role: Role) -> None:
        """Reset the optimiser of a role: its moments belong to tensors that no longer exist."""
        for key in [key for key in self.state if key.startswith(f"optimiser/{role}/")]:
            del self.state[key]

    def score(self, split: Split, batches: int | None = None) -> Tensor:
        """Return the score on a split, or at most `batches` of it: (2,) float64, total negative
        log-likelihood, nats, and number of predictions; of a classifier (3,), with correct ones.
        """
        return self.model.score(islice(self.batches(split), batches))

    def score_part(self, split: Split, windows: int) -> Tensor:
        """Return `score` of so many rows, evenly spaced over the split."""
        return self.model.score(self.batches(split, windows))

    def predictions(self, split: Split, windows: int | None = None) -> list[Prediction]:
        """Return the model's predictions on a split, or on so many rows evenly spaced over it."""
        return list(self.model.predictions(self.batches(split, windows)))

    def losses(self, split: Split, windows: int) -> Tensor:
        """Return each row's loss of `score_part`, (rows,), weighted to have its mean."""
        rows = self._part(split, windows)[:, None]
        scores = torch.stack([self.model.score(iter([split.take(row)])) for row in rows]).cpu()
        return scores[:, 0] / scores[:, 1].mean()

    @staticmethod
    def _part(split: Split, windows: int) -> Numbers:
        return np.linspace(0, split.windows - 1, min(windows, split.windows)).astype(np.int64)

    def batches(self, split: Split, windows: int | None = None) -> Iterator[Any]:
        """Yield all rows of a split in order, or so many evenly spaced, in batches for scoring."""
        most = self._most if windows is None else windows
        part = None if most is None else split.take(self._part(split, most)).split(self._rows)
        for batch in split.scoring(self._rows) if part is None else part:
            check_stopped()
            yield batch

    def comparable_loss(self, batch: Batch) -> float:
        """Return `loss`, with the batch's own statistics where the model normalises batches."""
        if not isinstance(self.model, Classifier):
            return self.loss(batch)
        with self.model.comparing():
            return self.loss(batch)

    def loss(self, batch: Batch) -> float:
        """Return the mean negative log-likelihood of the model on one batch, in nats."""
        parts = batch.split(self.training.micro_batch or len(batch))
        nll, predictions, *_ = self.model.score(iter(parts)).tolist()
        return float(nll / predictions)

    def metrics(self) -> Metrics:
        """Return the task's measurements: mean loss and balance by trained roles, mean routing
        weight (blocks, experts), tokens. Raises Divergence if a loss was not finite.
        """
        metrics: Metrics = {"tokens": self.tokens} if self.tokens else {}
        for roles, steps in self.stats.items():
            for name in steps[0]:
                value = devices.exact(torch.stack([stats[name] for stats in steps])).mean(dim=0)
                if not torch.isfinite(value).all():
                    raise Divergence(
                        f"client {self.id!r}: {name} is not finite near iteration {self.iteration}",
                        "Training diverged: lower training.experts.lr or training.routers.lr.",
                    )
                metrics[f"{name}/{roles}"] = value.tolist()
        return metrics


def _flat(gradients: Iterable[Tensor]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients])
