"""Many clients in one batch, for small models that stack: a task sees it as a client."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from coterie.client.blueprint import Metrics
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.client.state import advance, check_loadable, draw, position, training_data
from coterie.core.errors import Divergence
from coterie.core.protocol import ClientId, Replies, State
from coterie.core.roles import GENERALIST, Role
from coterie.core.tensors import Named, Tensors, all_finite
from coterie.data.splits import Split
from coterie.models.classifier import Classifier
from coterie.models.network_tensors import unflatten

_X, _OPTIMISER, _BUFFERS = f"parameters/{GENERALIST}", f"optimiser/{GENERALIST}", "buffers"


class PerClientTensors(Tensors):
    """Tensors whose names differ between the clients of a batch: each under `<client>/<name>`."""


@dataclass
class ClientBatch:
    """Clients that do a task as one, with what `Client` does for one under the same names, see
    `AnyClient`.

    Their parameters are the rows of one matrix X, (n, d), and their optimisers' moments and running
    statistics those of others. The rows are the tensors of the clients' states, so that nothing is
    copied between a batch and its clients. Received and sent tensors have the clients as their
    first dimension, or are `PerClientTensors`.
    """

    site: Site
    states: Mapping[ClientId, State]  # of the clients, in order
    model: Classifier
    round: int  # rounds that the run has done
    round_steps: int  # L, local iterations in a round
    total_iterations: int  # T * L
    _tokens: dict[ClientId, int] = field(default_factory=dict)
    _stats: dict[ClientId, dict[str, list[float]]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        site: Site,
        states: Mapping[ClientId, State],
        round: int,
        round_steps: int,
        total_iterations: int,
    ) -> "ClientBatch | None":
        """Return the batch of these clients, or None unless they have one layout, a model that
        stacks and gains by it, batches in one piece, optimisers and schedules at the same step, and
        no privacy of single examples.
        """
        if len(states) < 2 or site.sanitizes:
            return None
        first, *others = [site.model(i) for i in states]
        alike = all(model is first for model in others)
        if not alike or not isinstance(first, Classifier) or not first.stacks:
            return None
        rows, at_once = site.training.batch_size, site.training.micro_batch
        if (at_once or rows) < rows or not first.gains(rows):
            return None
        for i, state in states.items():
            if _X not in state:
                site.client(i, state)  # gives it its initial values
        kinds = {(position(s, round, round_steps), *_optimiser(s)) for s in states.values()}
        if len(kinds) > 1:
            return None
        return cls(site, states, first, round, round_steps, total_iterations)

    @property
    def ids(self) -> list[ClientId]:
        return list(self.states)

    @property
    def x(self) -> Tensor:
        """X, (n, d)."""
        return self._matrix(_X)

    def stack(self, received: Mapping[ClientId, Tensors]) -> Tensors:
        """Return the clients' tensors stacked; expanded if all have the same object."""
        first, device = received[self.ids[0]], self.model.device
        forms = {
            tuple((name, t.shape) for name, t in tensors.items()) for tensors in received.values()
        }
        if len(forms) > 1:
            named = ((i, *item) for i, tensors in received.items() for item in tensors.items())
            return PerClientTensors({f"{i}/{name}": t.to(device) for i, name, t in named})
        if all(tensors is first for tensors in received.values()):
            return {name: t.to(device).expand(len(received), *t.shape) for name, t in first.items()}
        return {name: stacked([received[i][name] for i in self.ids]).to(device) for name in first}

    def split(self, reply: Tensors) -> Replies:
        """Return the batch's tensors by client, in one pass over them."""
        if not isinstance(reply, PerClientTensors):
            return {i: {name: t[k] for name, t in reply.items()} for k, i in enumerate(self.ids)}
        replies: dict[ClientId, Tensors] = {i: {} for i in self.ids}
        for name, tensor in reply.items():
            client, _, key = name.partition("/")
            replies[client][key] = tensor
        return replies

    @property
    def training(self) -> Training:
        return self.site.training

    @property
    def windows(self) -> int:
        """Rows of the first client; others may differ only where the size does not matter."""
        return self.site.data[self.ids[0]].train.windows

    @property
    def sample_count(self) -> Tensor:
        """See `Client.sample_count`, (n,)."""
        return torch.tensor([self.site.data[i].train.windows for i in self.ids])

    @property
    def train(self) -> Mapping[ClientId, Split]:
        return {i: training_data(self.site.data[i]) for i in self.ids}

    @property
    def lr(self) -> float:
        return self._lr(self._position)

    def _lr(self, at: int) -> float:
        return self.site.training.experts.lr_at(at, self.total_iterations)

    @property
    def _position(self) -> int:
        return position(next(iter(self.states.values())), self.round, self.round_steps)

    def advance(self) -> int:
        before = self._position
        for state in self.states.values():
            advance(state, self.round)
        return before

    def load(self, tensors: Tensors) -> None:
        """Load all values of each client, see `Client.load`, by name or as one vector, or none."""
        # expanded tensors (stride 0) are the same for all clients
        alike = not isinstance(tensors, PerClientTensors) and all(
            t.stride(0) == 0 for t in tensors.values()
        )
        matrices = {key: self._matrix(key) for key in self._shared}
        for k, (i, received) in enumerate(self.split(tensors).items()):
            for key, flat in self._flats(i, received).items() if received else ():
                (matrices[key] if alike else matrices[key][k]).copy_(flat)
            if alike:
                break

    @property
    def _shared(self) -> dict[str, Named]:
        """The shared tensors of a model, by name, under each key of a client's state."""
        shared: dict[str, Named] = {_X: self.model.parameters_by_role[GENERALIST]}
        if self.model.statistics is not None and (buffers := self.model.buffers):
            shared[_BUFFERS] = buffers
        return shared

    def _flats(self, client: ClientId, tensors: Named) -> Tensors:
        """Return a client's tensors as one vector for each key of its state."""
        shared = self._shared
        named = {name: tensor for members in shared.values() for name, tensor in members.items()}
        expected: Named = {GENERALIST: self.x[0]} if GENERALIST in tensors else named
        check_loadable(client, expected, tensors)
        if GENERALIST in tensors:
            return {_X: tensors[GENERALIST]}
        return {
            key: torch.cat([tensors[name].flatten() for name in members])
            for key, members in shared.items()
        }

    def read(self, *roles: Role) -> Tensors:
        """Return the values of GENERALIST and what travels with it, see `Client.read`."""
        self._check_role(*roles)
        stacks = Tensors()
        for key, named in self._shared.items():
            stacks |= unflatten(self._matrix(key).clone(), named)
        return stacks

    def flat(self, role: Role = GENERALIST, into: Tensor | None = None) -> Tensor:
        """See `Client.flat`, (n, d)."""
        self._check_role(role)
        return self.x.clone() if into is None else into.copy_(self.x)

    def step(self, *roles: Role, on: Mapping[ClientId, Split]) -> None:
        """One local iteration of every client, see `Client.step`."""
        self._check_role(*roles)
        gradients = self._gradients(self.x, self.ids, on)
        self.descend(GENERALIST, gradients, self.advance())

    def descend(self, role: Role, gradients: Tensor, at: int | None = None) -> None:
        """See `Client.descend`; gradients: (n, d)."""
        self._check_role(role)
        first = next(iter(self.states.values()))
        memory = {key: self._matrix(key) for key in first if key.startswith(_OPTIMISER)}
        lr = self._lr(self._position - 1 if at is None else at)
        gradients = gradients.to(self.model.device)
        self.site.training.experts.step(self.x, gradients, lr, memory, _OPTIMISER)
        for k, state in enumerate(self.states.values()):
            for key, moment in memory.items():
                state[key] = moment[k] if moment.ndim == 2 else moment.clone()

    def shift(self, scale: float, directions: Tensor) -> None:
        """See `Client.shift`; directions: (n, d)."""
        self.x.add_(directions.to(self.model.device), alpha=scale)

    def gradients_at(self, points: Tensors, purpose: str) -> Tensors:
        """See `Client.gradients_at`; each client's points have names of their own."""
        pairs = [
            (i, j, x) for i, named in self.split(points).items() for j, x in sorted(named.items())
        ]
        gradients_of = PerClientTensors()
        if trained := [pair for pair in pairs if pair[0] == pair[1]]:
            self.load(PerClientTensors({f"{i}/{GENERALIST}": x for i, _, x in trained}))
            gradients_of |= self._gradients_of(trained, self.train)
        if others := [pair for pair in pairs if pair[0] != pair[1]]:
            owners = dict.fromkeys(i for i, *_ in others)
            batches = {i: training_data(self.site.data[i], purpose) for i in owners}
            gradients_of |= self._gradients_of(others, batches, purpose)
        return gradients_of

    def _gradients_of(
        self,
        points: Sequence[tuple[ClientId, str, Tensor]],
        on: Mapping[ClientId, Split],
        purpose: str = "",
    ) -> Tensors:
        """Return the gradients at points of clients, under `<client>/<point>`."""
        owners, names, values = zip(*points, strict=True)
        gradients = self._gradients(torch.stack(values), owners, on, purpose)
        pairs = zip(owners, names, gradients, strict=True)
        return {f"{i}/{j}": gradient for i, j, gradient in pairs}

    def _check_role(self, *roles: Role) -> None:
        if roles != (GENERALIST,):
            problem = f"a batch of clients has only values of {GENERALIST}, asked for {roles}"
            raise TypeError(problem)

    def _gradients(
        self,
        points: Tensor,
        owners: Sequence[ClientId],
        on: Mapping[ClientId, Split],
        purpose: str = "",
    ) -> Tensor:
        """Return gradients, (m, d), at points, (m, d), of their owners' losses on their own batches
        of a split; a client may own several. For `purpose` see `Client.gradient_at`; by default
        each point is the only one, its owner's model, and running statistics are updated.
        """
        if purpose and not all_finite({"points": points}):
            problem = f"points for {purpose}: not all values are finite"
            raise Divergence(problem, "A client diverged: lower the learning rate.")
        batches = [draw(on[i], self.states[i], self.site.training.batch_size) for i in owners]
        x, y = (torch.stack([getattr(batch, part) for batch in batches]) for part in ("x", "y"))
        if purpose or not self.model.buffers:
            gradients, stats = self.model.vectorised(points, x, y)
        else:
            statistics, rows = self._matrix(_BUFFERS), [self.ids.index(i) for i in owners]
            running = statistics[rows]
            gradients, stats = self.model.vectorised(points, x, y, running)
            statistics[rows] = running
        self._note(owners, "elsewhere" if purpose else GENERALIST, stats, y.shape[1])
        return gradients

    def _note(self, owners: Sequence[ClientId], what: str, stats: Tensors, examples: int) -> None:
        for i, *values in zip(
            owners, *(per_owner.tolist() for per_owner in stats.values()), strict=True
        ):
            self._tokens[i] = self._tokens.get(i, 0) + examples
            measured = self._stats.setdefault(i, {})
            for name, value in zip(stats, values, strict=True):
                if not math.isfinite(value):
                    problem = f"client {i!r}: {name} is not finite near iteration {self._position}"
                    remedy = "Training diverged: lower training.experts.lr or training.routers.lr."
                    raise Divergence(problem, remedy)
                measured.setdefault(f"{name}/{what}", []).append(value)

    @property
    def measured(self) -> dict[ClientId, Metrics]:
        """See `Client.metrics`, of each client."""
        metrics: dict[ClientId, Metrics] = {i: {} for i in self.ids}
        for i, stats in self._stats.items():
            means = {name: sum(values) / len(values) for name, values in stats.items()}
            metrics[i] = {"tokens": self._tokens[i], **means}
        return metrics

    def _matrix(self, key: str) -> Tensor:
        """Return the tensors under a key as rows of one matrix, or the scalar that all share."""
        rows = [state[key] for state in self.states.values()]
        if rows[0].ndim == 0:
            return rows[0].clone()
        base = stacked([row.to(self.model.device) for row in rows])
        if base is not rows[0]._base:
            for state, row in zip(self.states.values(), base, strict=True):
                state[key] = row
        return base


def _optimiser(state: State) -> list[tuple[str, float]]:
    """Return an optimiser's tensors by name, with the values of scalars such as Adam's t."""
    memory = {key: tensor for key, tensor in state.items() if key.startswith(_OPTIMISER)}
    return sorted(
        (key, float(tensor) if tensor.ndim == 0 else 0.0) for key, tensor in memory.items()
    )


def stacked(rows: Sequence[Tensor]) -> Tensor:
    """Return rows, (d,) each, as a matrix, (n, d), uncopied if they are the rows of one."""
    base, size = rows[0]._base, rows[0].numel()
    if (
        base is not None
        and rows[0].ndim == 1
        and base.shape == (len(rows), size)
        and all(
            row._base is base and row.storage_offset() == k * size for k, row in enumerate(rows)
        )
    ):
        return base
    return torch.stack(list(rows))
