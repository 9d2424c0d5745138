"""The place where clients' tasks run: their data, and one model for each layout, or for each part
of a method that trains several at once.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.profiler import record_function

from coterie.client.blueprint import Metrics, Model
from coterie.client.client import Client
from coterie.client.outbound import Outbound
from coterie.client.settings import Training
from coterie.client.state import EXPERT_IDS
from coterie.core import devices
from coterie.core.errors import ClientError, CoterieError, Divergence, Refused
from coterie.core.protocol import (
    MOST_SCORES,
    PARTS,
    ClientId,
    Sends,
    State,
    declared,
    derive_seed,
    find_task,
)
from coterie.core.roles import EXPERT, Role
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.data.federation import ClientData
from coterie.models.layout import Layout, PartsLayout, parts_of

CENTRE = "centre"  # of the prior of a client's weights, (P,) float64, sent and in its state
WEIGHTS = "weights"  # of the parts' predictions, (P,) float64 in the client's state


@dataclass
class ClientOfParts:
    """One client during a task: a `Client` for each part, one at a time, made by `clients` on the
    part's state, `<part>/<name>` in `state`; it draws the random numbers of that method alone.
    """

    id: ClientId
    state: State
    clients: Mapping[str, Callable[[State], Client]]
    _metrics: Metrics = field(default_factory=dict)

    @property
    def shares(self) -> torch.Tensor:
        """The weights of the parts' predictions, (P,) float64: even before they were fitted."""
        even = torch.full((len(self.clients),), 1 / len(self.clients), dtype=torch.float64)
        return self.state.get(WEIGHTS, even)

    @property
    def weights(self) -> dict[str, float]:
        """The weight of each part's predictions, by the part."""
        return dict(zip(self.clients, self.shares.tolist(), strict=True))

    @contextmanager
    def part(self, name: str) -> Iterator[Client]:
        """Provide the client of one part; its state and measurements are kept afterwards."""
        client = self.clients[name](under(name, self.state))
        try:
            yield client
        finally:
            for key in [key for key in self.state if key.startswith(f"{name}/")]:
                del self.state[key]
            self.state |= prefixed(name, client.state)
        tokens = client.tokens + int(str(self._metrics.get("tokens", 0)))
        self._metrics |= {f"{key}/{name}": value for key, value in client.metrics().items()}
        self._metrics.pop(f"tokens/{name}", None)
        if tokens:
            self._metrics["tokens"] = tokens

    @property
    def training(self) -> Training:
        return self._first.training

    @property
    def windows(self) -> int:
        """Rows of training data."""
        return self._first.windows

    @property
    def iteration(self) -> int:
        """The local iterations of each part so far."""
        return self._first.iteration

    @property
    def _first(self) -> Client:
        name, client = next(iter(self.clients.items()))
        return client(under(name, self.state))

    def read(self, *roles: Role) -> Tensors:
        """Return copies of all parts' tensors of these roles, `<part>/<name>`."""
        read = Tensors()
        for name in self.clients:
            with self.part(name) as client:
                read |= prefixed(name, client.read(*roles))
        return read

    def metrics(self) -> Metrics:
        """Return the measurements of all parts, see `Client.metrics`, as `<name>/<part>`."""
        return self._metrics


# prefixes of the keys of a client's state that a stateless client drops
_OF_THE_MODEL = ("parameters/", "optimiser/", "buffers", EXPERT_IDS)


@dataclass
class Site:
    """The models, data and settings by which a process runs any client's tasks, on one backbone."""

    build: Callable[[Layout], Model]  # makes a model of some layout
    layouts: Mapping[ClientId, Layout]  # of each client's model
    data: Mapping[ClientId, ClientData]  # also of the pool, if a method trains on it
    training: Training
    seed: int
    total_iterations: int  # T * L
    outbound: Outbound | None = None  # processes replies; None: they are sent unchanged
    # of each set between rounds, and at the end; None: all
    scored_rows: tuple[int | None, int | None] = (None, None)
    models: dict[Layout, Model] = field(default_factory=dict)
    _parts: "dict[str, Site]" = field(default_factory=dict)  # see `part`
    _known: dict[Layout, tuple[dict[str, Role], dict[Role, int]]] = field(default_factory=dict)

    def built(self, layout: Layout) -> Model:
        """Return the model that clients of this layout take turns in."""
        if layout not in self.models:
            self.models[layout] = self.build(layout)
        return self.models[layout]

    def model(self, id: ClientId) -> Model:
        """Return a client's model; of parts, the first's."""
        first, *_ = [self.built(layout) for layout in self.layouts[id].models]
        return first

    def part(self, name: str) -> "Site":
        """Return the place of one part of a method that trains several models of each client."""
        if name not in self._parts:
            self._parts[name] = replace(self, layouts=parts_of(name, self.layouts), _parts={})
        return self._parts[name]

    def twin(self) -> "Site":
        """Return a copy for another thread, with its own models on the base's weights."""
        return replace(
            self, build=lambda of: deepcopy(self.built(of)), models={}, _parts={}, _known={}
        )

    def client(self, id: ClientId, state: State, **task: Any) -> Client:
        """Return the client `id` with its state, and the settings of a task."""
        given: dict[str, Any] = {"scored_rows": self.scored_rows}
        given |= {"total_iterations": self.total_iterations} | task
        return Client(id, self.model(id), self.data[id], self.training, state, self.seed, **given)

    def clients(self, id: ClientId, state: State) -> Client | ClientOfParts:
        """Return the client `id` with its state, of one model or of several parts."""
        if not isinstance(layout := self.layouts[id], PartsLayout):
            return self.client(id, state)
        return ClientOfParts(
            id, state, {name: partial(self.part(name).client, id) for name, _ in layout.parts}
        )

    def _at_task(
        self, method: Any, id: ClientId, round: int, phase: int, seeded: bool, state: State
    ) -> Client | ClientOfParts:
        """Return a client with its state during a task; each part has random numbers of its own."""
        if method.methods:
            clients: dict[str, Any] = {
                name: partial(self.part(name)._at_task, part, id, round, phase, seeded)
                for name, part in method.methods.items()
            }
            return ClientOfParts(id, state, clients)
        if seeded:
            devices.seed(derive_seed(self.seed, round, phase, id), self.model(id).device)
        steps = method.steps_of(self.data[id].train.windows, self.training.batch_size)
        task = {"round": round, "round_steps": steps, "total_iterations": method.rounds * steps}
        if self.outbound is not None:
            task["sanitizer"] = self.outbound.sanitizer(method, steps, round, phase, id)
        return self.client(id, state, **task)

    def _unshared(
        self, shared: Sequence[Role], id: ClientId, name: str, tensor: Tensor
    ) -> str | None:
        """Return why a tensor of a reply has no shared role; None if it has one, or is scores or
        counts. Parts of several models have prefixes (`change/<name>`), gradients clients' names.
        """
        roles, sizes = self._roles_of(id)
        parts = name.split("/")
        # the two matrices of a product travel as `<module>/A` and `/B`
        suffixes = [".".join(parts[at:]) for at in range(len(parts))]
        role = next((roles[suffix] for suffix in suffixes if suffix in roles), None)
        # a client may be called as a role is
        whole = {role for role in Role if role in parts and tensor.numel() == sizes[role]}
        role = EXPERT if len(parts) == 2 and parts[0] == EXPERT else next(iter(whole), role)
        figures = tensor.dtype in (torch.float64, torch.int64, torch.bool)  # no model's tensors
        if role in shared or (figures and (role is None or tensor.numel() <= MOST_SCORES)):
            return None
        if role is None:
            if tensor.numel() in {sizes[candidate] for candidate in shared}:
                return None
            return f"its {tensor.numel():,} numbers are not a tensor of a shared role"
        return f"its role is {role}"

    def _roles_of(self, id: ClientId) -> tuple[dict[str, Role], dict[Role, int]]:
        """Return the role of each tensor of a client's model, and each role's number of values."""
        layout = self.layouts[id]
        if layout not in self._known:
            model = self.model(id)
            named = model.parameters_by_role
            roles = {name: role for role, of in named.items() for name in of}
            if model.statistics is not None:
                roles |= dict.fromkeys(model.buffers, model.statistics)
            sizes = {role: sum(p.numel() for p in of.values()) for role, of in named.items()}
            self._known[layout] = roles, sizes
        return self._known[layout]

    @property
    def sanitizes(self) -> bool:
        """Whether clients protect their single examples."""
        return self.outbound is not None and self.outbound.sanitizes

    def end(self, state: State, method: Any) -> None:
        """Drop the model from a stateless client's state after a task."""
        for part, model in (method.methods or {"": method}).items():
            if model.stateless or self.training.stateless:
                of_the_model = tuple(f"{part}/{key}".lstrip("/") for key in _OF_THE_MODEL)
                for key in [key for key in state if key.startswith(of_the_model)]:
                    del state[key]

    def measured(self, metrics: Metrics) -> Metrics:
        """Metrics as they leave a client."""
        return metrics if self.outbound is None else self.outbound.measured(metrics)

    def leaving(
        self,
        method: Any,
        task: str,
        id: ClientId,
        sent: Named,
        reply: Tensors,
        round: int,
        phase: int,
    ) -> Tensors:
        """Return a reply as it leaves a client. Raises Refused for an unshared tensor."""
        if PARTS in task:  # each part's reply as that method's
            replies = Tensors()
            for (name, part), its in zip(method.methods.items(), task.split(PARTS), strict=True):
                if its:
                    ours, theirs = under(name, reply), under(name, sent)
                    left = self.part(name).leaving(part, its, id, theirs, ours, round, phase)
                    replies |= prefixed(name, left)
            return replies
        scores = declared(find_task(method, task)) is Sends.SCORES
        for name, tensor in reply.items():
            if scores and tensor.dtype == torch.float64 and bool((tensor == tensor.floor()).all()):
                # counts, of a pool's choices in each class; an owner who is protected lets few of
                # them out, see `check_declared`
                continue
            if problem := self._unshared(method.shared, id, name, tensor):
                shares = ", ".join(method.shared) or "nothing"
                raise Refused(
                    f"{task}: {name!r} does not leave client {id!r}: {problem}, and "
                    f"{type(method).__name__} shares {shares}",
                    "Send shared tensors only, or declare the role in the method's `shared`.",
                )
        if self.outbound is None:
            return reply
        return self.outbound(find_task(method, task), id, sent, reply, round, phase)

    def answer(
        self,
        method: Any,
        task: str,
        id: ClientId,
        tensors: Tensors,
        state: State,
        round: int,
        phase: int,
        seeded: bool = True,
    ) -> tuple[Tensors, Metrics]:
        """Do one task of one client; `state` is updated in place, and a stateless client forgets
        its model. Learning rates are those of the run's position, not of the client's. Global
        random generators are seeded from (run seed, round, phase, client id) and restored, unless
        `seeded` is False, for threads, which share them. Raises ClientError, which names these.
        """
        device = self.model(id).device
        with ExitStack() as stack:
            if seeded:
                stack.enter_context(devices.forked(device))
            stack.enter_context(record_function(f"{task} {id}"))  # its name in a trace
            try:
                if self.outbound is not None:
                    self.outbound.check(find_task(method, task))
                client = self._at_task(method, id, round, phase, seeded, state)
                reply = find_task(method, task)(client, tensors)
                reply = self.leaving(method, task, id, tensors, reply, round, phase)
                return reply, self.measured(client.metrics())
            except CoterieError as error:
                problem = error.problem.removeprefix(f"client {id!r}: ")
                kind = Divergence if isinstance(error, Divergence) else ClientError
                raise kind(
                    f"client {id!r}, task {task}, round {round + 1}: {problem}", error.remedy
                ) from error
            except Exception as error:
                raise ClientError(
                    f"client {id!r}, task {task}, round {round + 1}: {type(error).__name__}: "
                    f"{error}"
                ) from error
            finally:
                self.end(state, method)
