"""Several clients at once, for small models that stack: what the batched form of a task sees instead of one client after the other."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.client import Metrics, Site, advance, draw, position, training_data
from coterie.errors import ClientError, TensorError
from coterie.models.classifier import Classifier, parted
from coterie.protocol import ClientId, State
from coterie.roles import GENERALIST
from coterie.tensors import Named, Tensors, all_finite, check_alike

_X, _OPTIMISER, _BUFFERS = f"parameters/{GENERALIST}", f"optimiser/{GENERALIST}", "buffers"


@dataclass
class Cohort:
    """Clients whose parameters are the rows of one matrix X, (n, d), and whose optimisers' moments and running statistics those of others.

    The rows are the tensors of the clients' states, so that nothing is copied between a cohort and its clients one by one.

    Args:
        site: What the process needs to be these clients.
        states: Of the clients, in order.
        model: Theirs.
        round: Rounds that the run has done.
        round_steps: L, local iterations in a round.
    """

    site: Site
    states: Mapping[ClientId, State]
    model: Classifier
    round: int = 0
    round_steps: int = 0
    _tokens: dict[ClientId, int] = field(default_factory=dict)
    _stats: dict[ClientId, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def of(cls, site: Site, states: Mapping[ClientId, State], round: int = 0, round_steps: int = 0) -> "Cohort | None":
        """The cohort of these clients; None where they must be asked one by one.

        They must have one layout, a model that stacks and gains by it, batches in one piece, no privacy of single examples, optimisers that
        have done the same number of steps, and schedules at one place.
        """
        if len(states) < 2 or site.sanitizes:
            return None
        first, *others = [site.model(i) for i in states]
        if not isinstance(first, Classifier) or not first.stacks or any(model is not first for model in others):
            return None
        rows, at_once = site.training.batch_size, site.training.micro_batch
        if (at_once or rows) < rows or not first.gains(rows):
            return None
        for i, state in states.items():
            if _X not in state:
                site.client(i, state)  # gives it its initial values
        kinds = {(position(state, round, round_steps), *_optimiser(state)) for state in states.values()}
        return cls(site, states, first, round, round_steps) if len(kinds) == 1 else None

    @property
    def ids(self) -> list[ClientId]:
        return list(self.states)

    @property
    def x(self) -> Tensor:
        """X, (n, d)."""
        return self._matrix(_X)

    @property
    def lr(self) -> float:
        """See `Client.lr`."""
        return self.site.training.experts.lr_at(self._position, self.site.total_iterations)

    @property
    def _position(self) -> int:
        return position(next(iter(self.states.values())), self.round, self.round_steps)

    def load(self, tensors: Mapping[ClientId, Named]) -> None:
        """See `Client.load`; a client gets all of its values, by their names or as one vector, or {}.

        Raises:
            TensorError: As there.
        """
        flats = {id(found): self._flats(i, found) for i, found in tensors.items() if found}  # often all get the same
        matrices = {key: self._matrix(key) for key in self._shared}
        for k, i in enumerate(self.ids):
            for key, flat in flats.get(id(tensors[i]), {}).items():
                matrices[key][k].copy_(flat)

    @property
    def _shared(self) -> dict[str, Named]:
        """What travels of a model, by name, under each key of a client's state."""
        found: dict[str, Named] = {_X: self.model.parameters_by_role()[GENERALIST]}
        if self.model.statistics is not None and (buffers := self.model.buffers()):
            found[_BUFFERS] = buffers
        return found

    def _flats(self, client: ClientId, tensors: Named) -> Tensors:
        """What a client gets as one vector for each key of its state."""
        shared = self._shared
        named = {name: tensor for own in shared.values() for name, tensor in own.items()}
        check_alike({GENERALIST: self.x[0]} if GENERALIST in tensors else named, tensors, f"tensors for client {client!r}")
        if not all_finite(tensors):
            raise TensorError(f"tensors for client {client!r}: not all values are finite", "A client diverged: lower the learning rate.")
        if GENERALIST in tensors:
            return {_X: tensors[GENERALIST]}
        return {key: torch.cat([tensors[name].flatten() for name in own]) for key, own in shared.items()}

    def read(self) -> dict[ClientId, Tensors]:
        """Copies of every client's tensors, by name, see `Client.read`."""
        stacks: dict[str, Tensor] = {}
        for key, named in self._shared.items():
            stacks |= parted(self._matrix(key).clone(), named)
        return {i: {name: stack[k] for name, stack in stacks.items()} for k, i in enumerate(self.ids)}

    def step(self) -> None:
        """One local iteration of every client, see `Client.step`, along the gradients at their own models."""
        self.descend(self.gradients_at(self.x, self.ids))

    def descend(self, gradients: Tensor) -> None:
        """One optimiser step of every client, which is a local iteration; gradients: (n, d)."""
        lr, memory = self.lr, {key: self._matrix(key) for key in next(iter(self.states.values())) if key.startswith(_OPTIMISER)}
        self.site.training.experts.step(self.x, gradients.to(self.model.device), lr, memory, _OPTIMISER)
        for k, state in enumerate(self.states.values()):
            state |= {key: moment[k] if moment.ndim == 2 else moment.clone() for key, moment in memory.items()}
            advance(state, self.round)

    def shift(self, scale: float, directions: Tensor) -> None:
        """See `Client.shift`; directions: (n, d)."""
        self.x.add_(directions.to(self.model.device), alpha=scale)

    def gradients_at(self, points: Tensor, owners: Sequence[ClientId], purpose: str = "") -> Tensor:
        """The gradient at each point of its owner's loss, each on a batch of its own.

        Args:
            points: (m, d).
            owners: Of each point; one client may own several.
            purpose: Batches are those of `Client.again(purpose)`, see `Client.gradient_at`. By default they are those that train, each
                point is its owner's model, the only one, and running statistics follow.

        Returns:
            (m, d).

        Raises:
            TensorError: A point is not finite, and not a client's own model, whose loss will tell.
        """
        if purpose and not all_finite({"points": points}):
            raise TensorError(f"points for {purpose}: not all values are finite", "A client diverged: lower the learning rate.")
        splits = {i: training_data(self.site.data[i], purpose) for i in dict.fromkeys(owners)}
        batches = [draw(splits[i], self.states[i], self.site.training.batch_size) for i in owners]
        x, y = (torch.stack([getattr(batch, part) for batch in batches]) for part in ("x", "y"))
        if purpose or not self.model.buffers():
            gradients, stats = self.model.vectorised(points, x, y)
        else:
            statistics, rows = self._matrix(_BUFFERS), [self.ids.index(i) for i in owners]
            running = statistics[rows]
            gradients, stats = self.model.vectorised(points, x, y, running)
            statistics[rows] = running
        self._note(owners, "elsewhere" if purpose else GENERALIST, stats, y.shape[1])
        return gradients

    def _note(self, owners: Sequence[ClientId], what: str, stats: Tensors, examples: int) -> None:
        for i, *values in zip(owners, *(found.tolist() for found in stats.values()), strict=True):
            self._tokens[i] = self._tokens.get(i, 0) + examples
            own = self._stats.setdefault(i, {})
            for name, value in zip(stats, values, strict=True):
                if not math.isfinite(value):
                    raise ClientError(
                        f"client {i!r}: {name} is not finite near iteration {self._position}",
                        "Training diverged: lower training.experts.lr or training.routers.lr.",
                    )
                own.setdefault(f"{name}/{what}", []).append(value)

    @property
    def measured(self) -> dict[ClientId, Metrics]:
        """See `Client.metrics`, of each client."""
        return {i: self._measured(i) if i in self._stats else {} for i in self.ids}

    def _measured(self, client: ClientId) -> Metrics:
        means = {name: sum(values) / len(values) for name, values in self._stats[client].items()}
        return {"tokens": self._tokens[client], **means}

    def _matrix(self, key: str) -> Tensor:
        """The clients' tensors under a key as the rows of one matrix, or what they all share if it is a scalar."""
        rows = [state[key] for state in self.states.values()]
        if rows[0].ndim == 0:
            return rows[0].clone()
        base = stacked([row.to(self.model.device) for row in rows])
        if base is not rows[0]._base:
            for state, row in zip(self.states.values(), base, strict=True):
                state[key] = row
        return base


def _optimiser(state: State) -> list[tuple[str, float]]:
    """The names of what an optimiser remembers, and the figures that clients of a cohort must have in common, such as Adam's t."""
    found = {key: tensor for key, tensor in state.items() if key.startswith(_OPTIMISER)}
    return sorted((key, float(tensor) if tensor.ndim == 0 else 0.0) for key, tensor in found.items())


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """(n, d): the rows, each (d,), as one matrix; it is that of which they are the rows already, if there is one."""
    base, size = rows[0]._base, rows[0].numel()
    if (
        base is not None
        and base.shape == (len(rows), size)
        and all(row._base is base and row.storage_offset() == k * size for k, row in enumerate(rows))
    ):
        return base
    return torch.stack(list(rows))
