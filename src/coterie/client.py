"""The client as a task sees it: its model, its data, its optimisers, its state, and nothing of anybody else's."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any, Protocol

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from coterie.aggregation.dpsgd import Sanitizer
from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Privacy, local
from coterie.attackers import Attack, poisoned
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData
from coterie.data.splits import Batch, Numbers, Split
from coterie.errors import ClientError, CoterieError, Refused, TensorError
from coterie.models.classifier import Classifier
from coterie.models.layout import Layout
from coterie.models.lora import LoRA
from coterie.models.pool import ABSENT
from coterie.optimisers import AdamW, Optimiser
from coterie.profiling import STEP, span
from coterie.protocol import (
    MOST_SCORES,
    PROTECTS,
    ClientId,
    Sends,
    State,
    Task,
    check_declared,
    declared,
    find_task,
    mix,
    protects_examples,
)
from coterie.roles import BACKBONE, EXPERT, GATE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.tensors import Named, Tensors, all_finite, check_alike, to_bytes

# What a client owns, in the order of its parameters. Of BACKBONE an adapter has what a method freezes at its initial value.
OWNED = (GENERALIST, SPECIALIST, ROUTER, EXPERT, GATE, BACKBONE)
POOLED = (EXPERT, GATE)  # of these a client has nothing until something comes from the server
UPPER = {ROUTER, GATE}  # what chooses experts
NUMBERS = "experts"  # which of a pool's experts are in a client's places
BEGAN = "began"  # the last round that a client trained in, and its local iterations before that
_EXPERT = f"{EXPERT}/"  # what the names of a pool's experts begin with
_OF_THE_MODEL = ("parameters/", "optimiser/", "buffers", NUMBERS)  # what the keys of a client's state that a stateless one drops begin with
_MOST_MEASURED = 16  # numbers that a device which protects its owner measures aloud
Metrics = dict[str, object]


class Training(BaseModel):
    """How a client trains: batches, and one optimiser for each level of the bilevel problem."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: Annotated[int, Field(ge=1, description="sequences or images per optimiser step")] = 64
    micro_batch: Annotated[int | None, Field(ge=1, description="rows per forward pass; gradients accumulate to the same step")] = None
    experts: Annotated[Optimiser, Field(description="lower level: LoRA experts and attention; of an image classifier: everything")] = AdamW(
        schedule="cosine"
    )
    routers: Annotated[Optimiser, Field(description="upper level: routers, and the gate of a pool")] = AdamW()
    stateless: Annotated[
        bool, Field(description="clients keep nothing of the model between rounds: optimisers start afresh, as where many take part seldom")
    ] = False

    def optimiser(self, role: Role) -> Optimiser:
        return self.routers if role in UPPER else self.experts


class Trainable(Protocol):
    """The trainable part of a model, grouped by role: what a server can know of it without a backbone."""

    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    @property
    def trainable_parameters(self) -> int: ...
    @property
    def active_parameters(self) -> int: ...


class Model(Protocol):
    """What a client needs of a model. Its parameters and buffers are bound to the client's state while a task runs."""

    @property
    def device(self) -> torch.device: ...
    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def buffers(self) -> Mapping[str, Tensor]: ...
    def initial_buffers(self) -> Tensors: ...
    @property
    def statistics(self) -> Role | None: ...  # the role with which the buffers travel, if they do
    def places(self) -> Sequence[Mapping[str, Tensor]]: ...  # for experts of a pool, each with all that travels with one
    def hold(self, numbers: Tensor, embeddings: Callable[[], Tensor]) -> None: ...  # which experts they are, and of what data
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    def gradient(self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None) -> tuple[list[Tensor], dict[str, Tensor]]: ...
    def gradient_elsewhere(
        self, batch: Any, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]: ...
    @property
    def embed(self) -> Callable[[Any], Tensor] | None: ...  # a batch's embeddings by a common expert, where there is one
    @property
    def per_example(self) -> Callable[[Any, list[nn.Parameter]], tuple[list[Tensor], dict[str, Tensor]]] | None: ...  # None: it cannot
    def score(self, batches: Iterator[Any]) -> Tensor: ...


class AnyClient(Protocol):
    """What a `Client` and a `ClientBatch` both have: all that a task may use that is to serve either, see `protocol.task`.

    The tensors that a batch takes and gives have a first dimension more, its clients.
    """

    @property
    def training(self) -> Training: ...
    @property
    def windows(self) -> int: ...
    @property
    def sample_count(self) -> Tensor: ...
    @property
    def train(self) -> Any: ...
    @property
    def lr(self) -> float: ...
    def advance(self) -> int: ...
    def load(self, tensors: Tensors) -> None: ...
    def read(self, *roles: Role) -> Tensors: ...
    def flat(self, role: Role = ..., into: Tensor | None = None) -> Tensor: ...
    def step(self, *roles: Role, on: Any) -> None: ...
    def shift(self, scale: float, direction: Tensor) -> None: ...
    def descend(self, role: Role, gradient: Tensor, at: int | None = None) -> None: ...
    def gradients_at(self, points: Tensors, purpose: str) -> Tensors: ...


def initial_seed(seed: int, role: Role, client: ClientId) -> int:
    """What is shared starts the same everywhere, from the run's seed; what is local starts from the client's own."""
    return mix(seed, "initial", role, client if role in (SPECIALIST, ROUTER) else "")


@dataclass(frozen=True)
class Blueprint:
    """What the server knows of the model: its shapes, from the configuration, and the run's seed. Never backbone weights.

    Args:
        trainable: Makes the trainable part of a model of some layout.
        layouts: Of each client.
        seed: The run's seed.
        clusters: The true cluster of each client, where the data tell: for methods that are given it, as an oracle is.
        anchors: Clients that are tied to an expert each, the q-th to expert q.
    """

    trainable: Callable[[Layout], Trainable]
    layouts: Mapping[ClientId, Layout]
    seed: int
    clusters: Mapping[ClientId, int] | None = None
    anchors: Sequence[ClientId] = ()

    def read(self, *roles: Role) -> Tensors:
        """The initial values of the shared tensors."""
        model = self.trainable(next(iter(self.layouts.values())))
        return {name: t for role in roles for name, t in model.initial(role, initial_seed(self.seed, role, "")).items()}

    def flat(self, role: Role = GENERALIST, start: int = 0) -> Tensor:
        """The initial values of one role as one vector, (d,); `start` 1, 2, ... for others of the same distribution.

        Of the experts of a pool it is one expert, with its running statistics; those of others are in no vector.
        """
        seed = initial_seed(self.seed, role, "") if start == 0 else mix(self.seed, "start", start)
        model = self.trainable(next(iter(self.layouts.values())))
        initial = model.initial(role, seed)
        return torch.cat([initial[name].flatten() for name in (initial if role is EXPERT else model.parameters_by_role()[role])])

    @property
    def ranks(self) -> dict[ClientId, list[int]]:
        """The rank of each of a client's low-rank updates, in the order of their modules' names."""
        updates = {i: self.trainable(layout).loras() for i, layout in self.layouts.items()}
        return {i: [loras[module].A.shape[1] for module in sorted(loras)] for i, loras in updates.items()}

    def loras(self) -> dict[str, LoRA]:
        """The low-rank updates of the client with the largest rank, at their initial values."""
        model = self.trainable(max(self.layouts.values(), key=lambda layout: layout.expert_rank))
        initial = model.initial(GENERALIST, initial_seed(self.seed, GENERALIST, ""))
        for name, parameter in model.parameters_by_role()[GENERALIST].items():
            parameter.data.copy_(initial[name])
        return dict(model.loras())


def count(state: State, key: str, add: int) -> int:
    """A counter of a client's state before `add` is added to it."""
    counter = state.setdefault(key, torch.zeros((), dtype=torch.int64))
    before = int(counter)
    counter += add
    return before


def position(state: State, round: int, steps: int) -> int:
    """Return where the run's schedules stand for a client, in local iterations.

    They run over the run's rounds: the rounds before count whole, whoever took part in them, and of this one the client's own iterations.

    Args:
        state: The client's.
        round: Rounds that the run has done.
        steps: Local iterations of the client in a round.
    """
    then, before = state[BEGAN].tolist() if BEGAN in state else (-1, 0)
    return round * steps + (int(state.get("iteration", 0)) - before if then == round else 0)


def advance(state: State, round: int, iterations: int = 1) -> None:
    """Count local iterations of a client that takes part in a round."""
    if BEGAN not in state or int(state[BEGAN][0]) != round:
        state[BEGAN] = torch.tensor([round, int(state.get("iteration", 0))])
    count(state, "iteration", iterations)


def draw(on: Split, state: State, rows: int) -> Batch:
    """The next batch of a split, whose cursor is in the client's state."""
    batch: Batch = on.batch(count(state, f"cursor/{on.name}", rows), rows)
    return batch


def training_data(data: ClientData, purpose: str = "") -> Split:
    """A client's training data; for another purpose than training itself in another order, with a cursor of its own."""
    return data.train.reordered(f"train-{purpose}") if purpose else data.train


@dataclass
class Client:
    """One client during one task.

    All that it must remember lies in `state`, a flat dict of tensors that the engine keeps between tasks:
    `parameters/<role>` and `optimiser/<role>/...`, one flat tensor each of which the model's parameters are views; `buffers`, likewise
    (running statistics); `experts`, which of a pool's experts it has; `cursor/<split>`, the rows drawn so far; `iteration`, its local
    iterations over the whole run, and `began`, the last round that it trained in with those before that round; `embeddings/<split>`,
    what a common expert made of its data, once.

    Args:
        id: The client's stable name.
        model: The process's model of this client's layout; its parameters are bound to `state` here.
        data: The client's own splits.
        training: Batch size and optimisers.
        state: What it remembers; {} for a client that starts.
        seed: The run's seed.
        total_iterations: T * L, over which the cosine schedule runs.
        sanitizer: Makes the gradients of what is shared, if single examples are protected.
        round: Rounds that the run has done.
        round_steps: L, the client's local iterations in a round.
        frozen: Roles whose tensors no step changes: what is the others' and not sent back, see `Method.iterate`.
    """

    id: ClientId
    model: Model
    data: ClientData
    training: Training
    state: State
    seed: int
    total_iterations: int
    sanitizer: Sanitizer | None = None
    round: int = 0
    round_steps: int = 0
    frozen: frozenset[Role] = frozenset()
    stats: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    tokens: int = 0

    def __post_init__(self) -> None:
        self._parameters = self.model.parameters_by_role()
        self._splits: dict[str, Split] = {}
        self._untouched: dict[frozenset[Role], Tensors] = {}
        self.bind()

    def bind(self) -> None:
        """Make the model this client's: its parameters and buffers become views of `state`. Another client of its layout takes it over."""
        for role in OWNED:
            if named := self._parameters[role]:
                self._bind(role, named)
        self._bind_buffers()
        if places := self.model.places():
            self.state.setdefault(NUMBERS, torch.full((len(places),), ABSENT))
            self.model.hold(self.state[NUMBERS], lambda: self.embeddings(self.data.train))

    def _bind_buffers(self) -> None:
        """Make the model's buffers views of this client's."""
        if buffers := self.model.buffers():
            if "buffers" not in self.state:
                self.state["buffers"] = torch.cat([t.flatten() for t in self.model.initial_buffers().values()])
            flat = self.state["buffers"] = self.state["buffers"].to(self.model.device)
            for buffer, values in zip(buffers.values(), torch.split(flat, [b.numel() for b in buffers.values()]), strict=True):
                buffer.data = values.view_as(buffer)

    def _bind(self, role: Role, named: Mapping[str, nn.Parameter]) -> None:
        """Make the model's parameters of one role views of this client's flat tensor."""
        device = next(iter(named.values())).device
        key, size = f"parameters/{role}", sum(p.numel() for p in named.values())
        if key not in self.state and role in POOLED:
            self.state[key] = torch.zeros(size)
        elif key not in self.state:
            initial = self.model.initial(role, initial_seed(self.seed, role, self.id))
            self.state[key] = torch.cat([initial[name].flatten() for name in named])
        if self.state[key].shape != (size,):
            raise TensorError(
                f"state of client {self.id!r}: {key} has {self.state[key].numel():,} values, the model has {size:,}",
                "The state is from another recipe (rank, experts or base): start afresh.",
            )
        flat = self.state[key] = self.state[key].to(device)
        offset = 0
        for parameter in named.values():
            parameter.data = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()

    @property
    def loras(self) -> Mapping[str, LoRA]:
        """The client's low-rank updates by the name of their module: its own values, so that changing them in place changes it."""
        return self.model.loras()

    @property
    def train(self) -> Split:
        return self._embedded(self.data.train)

    @property
    def windows(self) -> int:
        """Rows of training data."""
        return self.data.train.windows

    @property
    def sample_count(self) -> Tensor:
        """The same as a tensor, (): what a server weighs by."""
        return torch.tensor(self.windows)

    def again(self, purpose: str) -> Split:
        """The training data in another order and with a cursor of its own, for batches beside those that train the client."""
        return training_data(self.data, purpose)

    @property
    def valid(self) -> Split:
        return self._embedded(self.data.valid)

    @property
    def test(self) -> Split:
        return self._embedded(self.data.test)

    def _embedded(self, split: Split) -> Split:
        """A split whose batches hold embeddings, if the model has a common expert."""
        name = split.name
        if name not in self._splits:
            if isinstance(split, ExampleSplit) and self.model.embed is not None:
                split = split.embedded(self.embeddings(split))
            self._splits[name] = split
        return self._splits[name]

    def embeddings(self, split: Split) -> Tensor:
        """(windows, e): what the common expert makes of a split's rows; computed once, and kept in the client's state."""
        key, embed = f"embeddings/{split.name}", self.model.embed
        if key not in self.state:
            assert embed is not None
            self.state[key] = torch.cat([embed(batch) for batch in split.scoring(self._rows)])
        return self.state[key]

    @property
    def _rows(self) -> int:
        """Rows at a time where nothing is trained."""
        return self.training.micro_batch or min(self.training.batch_size, 32)

    @property
    def iteration(self) -> int:
        """The client's own local iterations so far, over the whole run."""
        return int(self.state.get("iteration", 0))

    @property
    def position(self) -> int:
        """Where the run's schedules stand, see `position`."""
        return position(self.state, self.round, self.round_steps)

    def advance(self) -> int:
        """Count a local iteration; returns where the schedules stood before it."""
        before = self.position
        advance(self.state, self.round)
        return before

    def load(self, tensors: Named) -> None:
        """Take over tensors from the server, by name; an empty dict changes nothing.

        Args:
            tensors: By their own names; under a role's name all values of that role as one vector, (d,); or as `expert/<number>`, (d,),
                all that belongs to one expert of a pool, for the next place in the order of the numbers.

        Raises:
            TensorError: A name, shape or dtype that this client's model does not have, or a value that is not finite.
        """
        tensors = self._named(tensors)
        own = {name: t for name, t in self._values(*OWNED).items() if name in tensors}
        check_alike(own, tensors, f"tensors for client {self.id!r}")
        if not all_finite(tensors):
            raise TensorError(f"tensors for client {self.id!r}: not all values are finite", "A client diverged: lower the learning rate.")
        for name, tensor in own.items():
            tensor.detach().copy_(tensors[name])

    def _values(self, *roles: Role) -> dict[str, Tensor]:
        """The client's tensors of these roles by name, running statistics where they travel with one, and a pool's with its experts."""
        found: dict[str, Tensor] = {name: p for role in roles for name, p in self._parameters[role].items()}
        if EXPERT in roles and (places := self.model.places()):
            found |= {name: t for place in places for name, t in place.items()} | {NUMBERS: self.state[NUMBERS]}
        return found | (dict(self.model.buffers()) if self.model.statistics in roles else {})

    def _named(self, tensors: Named) -> Tensors:
        """The same tensors, those that came as one vector under their own names."""
        found = dict(tensors)
        for role in tensors.keys() & set(OWNED):
            found |= self._parted(dict(self._parameters[Role(role)].items()), found.pop(role), role)
        if numbers := sorted(int(name.removeprefix(_EXPERT)) for name in tensors if name.startswith(_EXPERT)):
            places = self.model.places()
            if len(numbers) > len(places):
                raise TensorError(f"{len(numbers)} experts for client {self.id!r}, which has {len(places)} places", "Send at most K.")
            for number, place in zip(numbers, places, strict=False):
                found |= self._parted(place, found.pop(f"{_EXPERT}{number}"), f"{_EXPERT}{number}")
            found[NUMBERS] = torch.tensor(numbers + [ABSENT] * (len(places) - len(numbers)))
        return found

    def _parted(self, own: Named, flat: Tensor, what: str) -> Tensors:
        """One vector, (d,), as tensors of these names and shapes. Raises TensorError if its length is another."""
        sizes = [t.numel() for t in own.values()]
        check_alike({what: torch.empty(sum(sizes), device="meta")}, {what: flat}, f"tensors for client {self.id!r}")
        return {name: part.view_as(t) for (name, t), part in zip(own.items(), torch.split(flat, sizes), strict=True)}

    def read(self, *roles: Role) -> Tensors:
        """Copies of the client's tensors of these roles, by name."""
        return {name: t.detach().clone() for name, t in self._values(*roles).items()}

    def experts(self) -> Tensors:
        """Copies of the experts of a pool that the client has, as `expert/<number>`, (d,) each."""
        numbers = [number for number in self.state[NUMBERS].tolist() if number != ABSENT]
        places = zip(numbers, self.model.places(), strict=False)
        return {f"{_EXPERT}{number}": torch.cat([t.detach().flatten() for t in place.values()]) for number, place in places}

    def flat(self, role: Role = GENERALIST, into: Tensor | None = None) -> Tensor:
        """The values of one role as one vector, (d,): a copy, written to `into` if that is given and on the same device."""
        values = self.state[f"parameters/{role}"]
        return values.clone() if into is None or into.device != values.device else into.copy_(values)

    def shift(self, scale: float, direction: Tensor, role: Role = GENERALIST) -> None:
        """Theta <- theta + scale direction, for all values of one role as one vector, (d,)."""
        check_alike({role: self.state[f"parameters/{role}"]}, {role: direction}, f"direction for client {self.id!r}")
        self.state[f"parameters/{role}"].add_(direction.to(self.model.device), alpha=scale)

    @contextmanager
    def borrowing(self, tensors: Named) -> Iterator[None]:
        """Within the block the client has `tensors` loaded; afterwards its own are back."""
        tensors = self._named(tensors)
        before = {name: t.detach().clone() for name, t in self._values(*OWNED).items() if name in tensors}
        self.load(tensors)
        try:
            yield
        finally:
            self.load(before)

    @property
    def lr(self) -> float:
        """The learning rate of the experts in the next local iteration: eta."""
        return self.training.experts.lr_at(self.position, self.total_iterations)

    def step(self, *roles: Role, on: Split, extra: Callable[[], Named] | None = None) -> None:
        """One optimiser step of the tensors of these roles on the next batch of a split.

        Gradients are taken of these roles alone, so nothing leaks between the levels. A step of anything but the router or gate alone is
        a local iteration.

        Where single examples are protected, gradients of shared roles are made by a `Sanitizer`, on a batch of its own, at a model whose
        other parts have their initial values: those that it has learned were never noised, and what depends on them would tell of them.

        Args:
            roles: Whose tensors are trained.
            on: The split that the batch is drawn from.
            extra: Gives the gradient, by name, of what the objective has beside the loss: a regulariser, a penalty; of shared roles it
                must not depend on the data but through what is shared.
        """
        if self.sanitizer is None or self.sanitizer.roles.isdisjoint(roles):
            return self.step_on(self.draw(on), *roles, extra=extra)
        shared = [role for role in roles if role in self.sanitizer.roles and self._parameters[role]]
        own = [role for role in roles if role not in self.sanitizer.roles and self._parameters[role]]
        at = self.position if UPPER.issuperset(roles) else self.advance()
        with span(f"{STEP} {'+'.join(roles)}"):
            gradients = dict(zip(shared, self._sanitized(self.sanitizer, on, shared), strict=True)) if shared else {}
            if own:  # at the same point, as in a step without privacy
                gradients |= dict(zip(own, self._gradients(self.draw(on), own), strict=True))
            self._descend(gradients, extra, at)
        return None

    def draw(self, on: Split) -> Batch:
        """The next batch of a split."""
        return draw(on, self.state, self.training.batch_size)

    def step_on(self, batch: Batch, *roles: Role, extra: Callable[[], Named] | None = None) -> None:
        """As `step`, on a batch that was drawn before."""
        present = [role for role in roles if self._parameters[role] and role not in self.frozen]
        at = self.position if UPPER.issuperset(roles) else self.advance()
        if not present:  # a single expert has no router to train
            return
        with span(f"{STEP} {'+'.join(roles)}"):
            gradients = self._gradients(batch, present, "+".join(roles))
            self._descend(dict(zip(present, gradients, strict=True)), extra, at)

    def _gradients(self, batch: Batch, roles: Sequence[Role], what: str = "") -> Sequence[list[Tensor]]:
        """The gradients of the tensors of each role on a batch; what was measured is noted under the roles, or `what`."""
        wrt = [p for role in roles for p in self._parameters[role].values()]
        gradients, stats = self.model.gradient(batch, wrt, self.training.micro_batch)
        self._note(what or "+".join(roles), len(batch), stats)
        return self._by_role(gradients, roles)

    def _by_role(self, gradients: Sequence[Tensor], roles: Sequence[Role]) -> Sequence[list[Tensor]]:
        """Gradients of all tensors of some roles, in parts."""
        remaining = iter(gradients)
        return [list(islice(remaining, len(self._parameters[role]))) for role in roles]

    def _descend(self, gradients: Mapping[Role, list[Tensor]], extra: Callable[[], Named] | None, at: int) -> None:
        """One optimiser step of each role, along its gradients and those of `extra`."""
        beside = extra() if extra else {}
        for role, own in gradients.items():
            terms = ((gradient, beside.get(name)) for name, gradient in zip(self._parameters[role], own, strict=True))
            flat = torch.cat([(gradient if other is None else gradient + other).flatten() for gradient, other in terms])
            self.descend(role, flat.float(), at)

    def _sanitized(self, sanitizer: Sanitizer, on: Split, roles: Sequence[Role]) -> Sequence[list[Tensor]]:
        """The gradients of the tensors of each role on a sample of a split, private for each of its examples."""
        wrt = [p for role in roles for p in self._parameters[role].values()]
        size, expected = sum(p.numel() for p in wrt), min(self.training.batch_size, on.windows)
        with self.borrowing(self._initial(frozenset(OWNED) - sanitizer.roles)):
            parts = self._by_example(on, sanitizer.sample(on.windows, expected), wrt, "+".join(roles))
            flat = sanitizer.gradient(parts, size, expected).to(self.model.device)
        self.tokens += expected * self.data.train.context  # how many there were is a secret
        pieces = zip(wrt, torch.split(flat, [p.numel() for p in wrt]), strict=True)
        return self._by_role([piece.view_as(p) for p, piece in pieces], roles)

    def _by_example(self, on: Split, numbers: Numbers, wrt: list[nn.Parameter], what: str) -> Iterator[list[Tensor]]:
        """The gradients of each of some rows of a split, so many at a time as fit."""
        assert self.model.per_example is not None
        rows = self.training.micro_batch or self.training.batch_size
        for part in np.array_split(numbers, math.ceil(len(numbers) / rows)) if len(numbers) else ():
            gradients, stats = self.model.per_example(on.take(part), wrt)
            self._note(what, 0, stats)
            yield gradients

    def _initial(self, roles: frozenset[Role]) -> Tensors:
        """What the client's own tensors of these roles were before any data touched them."""
        if roles not in self._untouched:
            seeds = {role: initial_seed(self.seed, role, self.id) for role in sorted(roles) if self._parameters[role]}
            self._untouched[roles] = {name: t for role, seed in seeds.items() for name, t in self.model.initial(role, seed).items()}
        return self._untouched[roles]

    def _note(self, what: str, rows: int, stats: dict[str, Tensor]) -> None:
        self.stats.setdefault(what, []).append(stats)
        self.tokens += rows * self.data.train.context

    def descend(self, role: Role, gradient: Tensor, at: int | None = None) -> None:
        """One optimiser step of all values of a role along a gradient that is given, (d,).

        Args:
            role: Whose values.
            gradient: Of some objective at them.
            at: Where the schedule stands, see `position`; default: at the last local iteration.
        """
        settings = self.training.optimiser(role)
        lr = settings.lr_at(self.position - 1 if at is None else at, self.total_iterations)
        settings.step(self.state[f"parameters/{role}"], gradient, lr, self.state, f"optimiser/{role}")

    def gradient_at(self, values: Tensor, batch: Batch, role: Role = GENERALIST) -> Tensor:
        """The gradient of the client's loss elsewhere than at its own model: nothing of the client changes, running statistics neither.

        Args:
            values: (d,), all values of one role.
            batch: Of the client's own data.
            role: Which.

        Returns:
            (d,) fp32.
        """
        with self.borrowing({role: values}):
            wrt = list(self._parameters[role].values())
            gradients, stats = self.model.gradient_elsewhere(batch, wrt, self.training.micro_batch)
            self._note("elsewhere", len(batch), stats)
            return torch.cat([gradient.flatten() for gradient in gradients]).float()

    def gradients_at(self, points: Tensors, purpose: str) -> Tensors:
        """The gradients of the client's loss at several models.

        Args:
            points: (d,) each, by the ids of the clients whose models they are, or are halfway to. What is under the client's own id becomes
                its model, and the batch is of those that train it, which its running statistics follow.
            purpose: The other batches are those of `again(purpose)`.

        Returns:
            (d,) fp32 each, under the same names.
        """
        others, found = self.again(purpose), Tensors()
        for name, values in sorted(points.items()):
            if name != self.id:
                found[name] = self.gradient_at(values, self.draw(others))
                continue
            self.load({GENERALIST: values})
            (gradients,) = self._gradients(self.draw(self.train), [GENERALIST])
            found[name] = torch.cat([gradient.flatten() for gradient in gradients]).float()
        return found

    def gradient_to_share(self, values: Tensor, batch: Batch, role: Role = GENERALIST) -> Tensor:
        """As `gradient_at`, of what is shared though it is not the client's own model.

        Where examples are protected it is made by the sanitizer, on a batch of its own.
        """
        if self.sanitizer is None:
            return self.gradient_at(values, batch, role)
        with self.borrowing({role: values}):
            (gradients,) = self._sanitized(self.sanitizer, self.train, [role])
            return torch.cat([gradient.flatten() for gradient in gradients])

    def gradients(self, batch: Batch, *roles: Role) -> Tensors:
        """Return the gradient of the client's loss on a batch at its own model, by the names of all tensors of these roles; fp32."""
        named = {name: p for role in roles for name, p in self._parameters[role].items()}
        if not named:
            return {}
        found, _ = self.model.gradient_elsewhere(batch, list(named.values()), self.training.micro_batch)
        return {name: gradient.float() for name, gradient in zip(named, found, strict=True)}

    def forget(self, role: Role) -> None:
        """Start the optimiser of a role afresh: its moments belong to tensors that are no more."""
        for key in [key for key in self.state if key.startswith(f"optimiser/{role}/")]:
            del self.state[key]

    def score(self, split: Split, batches: int | None = None) -> Tensor:
        """The client's model on a split, or on its first rows.

        Args:
            split: One of the client's own.
            batches: At most so many batches of it; None for the whole split.

        Returns:
            (2,) float64: the total negative log-likelihood in nats and the number of predictions; of a classifier (3,), with how many of
            them were right.
        """
        return self.model.score(islice(self.batches(split), batches))

    def score_part(self, split: Split, windows: int) -> Tensor:
        """As `score`, of so many rows, evenly spaced over the split; of all where it has no more."""
        rows = np.linspace(0, split.windows - 1, min(windows, split.windows)).astype(np.int64)
        return self.model.score(iter(split.take(rows).split(self._rows)))

    def batches(self, split: Split) -> Iterator[Any]:
        """All rows of a split once, in order, in batches for scoring."""
        return split.scoring(self._rows)

    def comparable_loss(self, batch: Batch) -> float:
        """Return `loss` with the batch's own statistics where the model normalises batches: running ones fit one model alone."""
        if not isinstance(self.model, Classifier):
            return self.loss(batch)
        with self.model.comparing():
            return self.loss(batch)

    def loss(self, batch: Batch) -> float:
        """The mean negative log-likelihood of the client's model on one batch, in nats, without a gradient."""
        nll, predictions, *_ = self.model.score(iter(batch.split(self.training.micro_batch or len(batch)))).tolist()
        return float(nll / predictions)

    def metrics(self) -> Metrics:
        """What this task measured: mean loss and balance by trained roles, mean routing weight (blocks, experts), tokens.

        Raises:
            ClientError: A loss was not finite.
        """
        found: Metrics = {"tokens": self.tokens} if self.tokens else {}
        for roles, steps in self.stats.items():
            for name in steps[0]:
                value = torch.stack([stats[name] for stats in steps]).double().mean(dim=0)
                if not torch.isfinite(value).all():
                    raise ClientError(
                        f"client {self.id!r}: {name} is not finite near iteration {self.iteration}",
                        "Training diverged: lower training.experts.lr or training.routers.lr.",
                    )
                found[f"{name}/{roles}"] = value.tolist()
        return found


@dataclass(frozen=True)
class Outbound:
    """What becomes of a reply before it leaves a client.

    Where its owner is protected (by local privacy, by secure aggregation, by limits of the owner) nothing leaves but what its task is
    declared to send, see `Sends`. What is asked with which number decides nothing here: a server chooses those.

    Args:
        seed: The run's seed.
        privacy: Clips updates and adds noise, where that is a client's own business.
        attack: What attackers make of their replies. Only simulated ones lie.
        attackers: Who they are.
        secret: Whether noise is drawn from what only this machine knows, as it must be on devices: whoever has the seed of a run could
            take its noise away. In a simulation it is drawn from the run's seed.
        key: What only this machine knows, and keeps: the same reply to the same request then leaves with the same noise. Otherwise whoever
            asks often enough could average it away.
        secure: Whether updates leave under the masks of secure aggregation alone.
        noisy: Whether updates leave with noise alone.
        by_examples: Whether noise in each step, for single examples, will do for that.
        masked: Whether the reply at hand goes under masks.
        silent: Whether no scores and no measurements leave.
    """

    seed: int
    privacy: Privacy | None = None
    attack: Attack | None = None
    attackers: frozenset[ClientId] = frozenset()
    secret: bool = False
    key: bytes = b""
    secure: bool = False
    noisy: bool = False
    by_examples: bool = False
    masked: bool = False
    silent: bool = False

    @property
    def noise(self) -> Privacy | None:
        """What clips updates and adds noise to them here, if that is private at all."""
        return self.privacy if self.privacy is not None and self.privacy.where == "local" else None

    @property
    def protects(self) -> bool:
        """Whether nothing may leave that is not declared."""
        return self.secure or self.noisy or self.silent or self.noise is not None or self.sanitizes

    @property
    def sanitizes(self) -> bool:
        """Whether single examples are protected, by noise in each step."""
        return self.privacy is not None and self.privacy.unit == "example"

    @property
    def _noised(self) -> bool:
        """Whether updates leave with such noise as the owner wants."""
        found = self.privacy if self.noise is not None or (self.by_examples and self.sanitizes) else None
        return found is not None and found.noise > 0

    def check(self, task: Task) -> None:
        """Refuse, before anything is done, a task whose reply could not leave. Raises Refused."""
        if not self.protects:
            return
        name, sends = task.__name__, declared(task)
        if sends is Sends.PRIVATE:
            raise Refused(f"{name}: nothing says that its reply can be masked or noised, or is harmless; it was not done", PROTECTS)
        if sends is Sends.SCORES and self.silent:
            raise Refused(f"{name}: this device sends no scores", PROTECTS)
        if sends is Sends.UPDATE and self.secure and not self.masked:
            problem = f"{name}: this device lets its updates leave by secure aggregation only"
            raise Refused(problem, "Run the recipe with --set secure=true.")
        if sends is Sends.UPDATE and self.noisy and not self._noised:
            also = ", or privacy.unit: example," if self.by_examples else ""
            remedy = f"Run the recipe with privacy.where: local{also} and the noise that the device wants."
            raise Refused(f"{name}: this device lets its updates leave with noise only", remedy)

    def __call__(self, task: Task, id: ClientId, sent: Named, reply: Tensors, round: int, phase: int) -> Tensors:
        """What leaves the client `id`. Raises Refused for what its task is not declared to send, where its owner is protected."""
        update = declared(task) is Sends.UPDATE
        if self.attack is not None and id in self.attackers and phase >= 0:  # attackers do not lie about their scores
            alike = update and all(name not in sent or sent[name].shape == t.shape for name, t in reply.items())
            generator = torch.Generator().manual_seed(mix(self.seed, "attack", round, phase, id))
            return poisoned(reply, sent, alike, self.attack, generator)
        if self.protects:
            self.check(task)
            check_declared(task, sent, reply)
        if update and self.noise is not None:
            return local(reply, sent, self.noise, self._noise_of(self.noise, id, sent, reply, round, phase))
        return reply

    def measured(self, metrics: Metrics) -> Metrics:
        """What leaves of what a task measured: where the owner is protected a few single numbers, which are means over many tokens."""
        if not self.protects:
            return metrics
        if self.silent:
            return {}
        single = [name for name, value in metrics.items() if isinstance(value, int | float)]
        return {name: metrics[name] for name in single[:_MOST_MEASURED]}

    def _noise_of(self, privacy: Privacy, id: ClientId, sent: Named, reply: Named, round: int, phase: int) -> Source:
        """Return random numbers for the noise of a reply.

        With a key they depend on all that the noise must differ by, and on nothing that a server could change while the reply stays: with
        another seed, run or round the noise is the same, and cannot be averaged away; with another C or z it is another one, since the
        same one in two sizes would tell the reply.
        """
        if not self.key:
            return self.source("noise", round, phase, id)
        contents = (blake2b(to_bytes(named)).hexdigest() for named in (sent, reply))
        return Source.keyed(self.key, "noise", id, repr(privacy.clip), repr(privacy.noise), *contents)

    def sanitizer(self, method: Any, steps: int, round: int, phase: int, id: ClientId) -> Sanitizer | None:
        """What makes the gradients that a client of a method shares, in one task of so many steps; None where no examples are protected.

        On devices it never draws the same twice, not even for the same request: with the same noise on other data, or from another state,
        the difference would have none. Each time counts.
        """
        if self.privacy is None or not self.sanitizes:
            return None
        if not protects_examples(method):
            raise Refused(f"{type(method).__name__} shares what no privacy of single examples covers", "Use another method.")
        secret = self.secret or bool(self.key)
        source = Source.secret() if secret else Source.seeded(self.seed, "examples", round, phase, id)
        return Sanitizer(self.privacy, frozenset(method.shared), source, steps)

    def source(self, *purpose: int | str) -> Source:
        """Return random numbers for the noise of one purpose."""
        return Source.secret() if self.secret else Source.seeded(self.seed, *purpose)


def _seed(seed: int, device: torch.device) -> None:
    """`torch.manual_seed` for the device in use only: for others, which may still come, it would note at length where it was called."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


@dataclass
class Site:
    """What a process needs to be any client of a run: how models are built (on one backbone for all), their data, and how they train.

    Args:
        build: Makes a model of some layout.
        layouts: The shape of each client's model.
        data: The clients' data (of the pool too, where a method trains on it).
        training: Batch size and optimisers.
        seed: The run's seed.
        total_iterations: T * L.
        outbound: What becomes of replies; None: they leave as they are.
    """

    build: Callable[[Layout], Model]
    layouts: Mapping[ClientId, Layout]
    data: Mapping[ClientId, ClientData]
    training: Training
    seed: int
    total_iterations: int
    outbound: Outbound | None = None
    models: dict[Layout, Model] = field(default_factory=dict)
    _known: dict[Layout, tuple[dict[str, Role], dict[Role, int]]] = field(default_factory=dict)

    def model(self, id: ClientId) -> Model:
        """The model that clients of this one's layout take turns in."""
        layout = self.layouts[id]
        if layout not in self.models:
            self.models[layout] = self.build(layout)
        return self.models[layout]

    def client(self, id: ClientId, state: State) -> Client:
        """The client `id` with its remembered state."""
        return Client(id, self.model(id), self.data[id], self.training, state, self.seed, self.total_iterations)

    def _unshared(self, shared: Sequence[Role], id: ClientId, name: str, tensor: Tensor) -> str | None:
        """Say why a tensor of a reply is none of a shared role; None where it is one, or scores or counts.

        What belongs to several models has a prefix for each (`change/<name>`); gradients travel under the names of clients.
        """
        roles, sizes = self._roles_of(id)
        parts = name.split("/")
        suffixes = [".".join(parts[at:]) for at in range(len(parts))]  # the two matrices of a product travel as `<module>/A` and `/B`
        role = next((roles[suffix] for suffix in suffixes if suffix in roles), None)
        whole = {own for own in Role if own in parts and tensor.numel() == sizes[own]}  # a client may be called as a role is
        role = EXPERT if len(parts) == 2 and parts[0] == EXPERT else next(iter(whole), role)
        figures = tensor.dtype in (torch.float64, torch.int64, torch.bool)  # no model's tensors
        if role in shared or (figures and (role is None or tensor.numel() <= MOST_SCORES)):
            return None
        if role is None:
            vector = tensor.numel() in {sizes[own] for own in shared}
            return None if vector else f"it is {tensor.numel():,} numbers that are no tensor of a shared role"
        return f"it is of the {role}"

    def _roles_of(self, id: ClientId) -> tuple[dict[str, Role], dict[Role, int]]:
        """The role of each tensor of a client's model by its name, and how many values each role has."""
        layout = self.layouts[id]
        if layout not in self._known:
            model = self.model(id)
            named = model.parameters_by_role()
            roles = {name: role for role, own in named.items() for name in own}
            if model.statistics is not None:
                roles |= dict.fromkeys(model.buffers(), model.statistics)
            self._known[layout] = roles, {role: sum(p.numel() for p in own.values()) for role, own in named.items()}
        return self._known[layout]

    @property
    def sanitizes(self) -> bool:
        """Whether clients protect their single examples."""
        return self.outbound is not None and self.outbound.sanitizes

    def end(self, state: State, method: Any) -> None:
        """What a client keeps after a task: everything, or of the model nothing."""
        if method.forgetful or self.training.stateless:
            for key in [key for key in state if key.startswith(_OF_THE_MODEL)]:
                del state[key]

    def measured(self, metrics: Metrics) -> Metrics:
        """Metrics as they leave a client."""
        return metrics if self.outbound is None else self.outbound.measured(metrics)

    def leaving(self, method: Any, task: str, id: ClientId, sent: Named, reply: Tensors, round: int, phase: int) -> Tensors:
        """Return a reply as it leaves the client. Raises Refused for a tensor of a role that the method does not share."""
        scores = declared(find_task(method, task)) is Sends.SCORES
        for name, tensor in reply.items():
            if scores and tensor.dtype == torch.float64 and bool((tensor == tensor.floor()).all()):
                continue  # counts, of a pool's choices in each class; an owner who is protected lets few of them out, see `check_declared`
            if problem := self._unshared(method.shared, id, name, tensor):
                shares = ", ".join(method.shared) or "nothing"
                problem = f"{task}: {name!r} does not leave client {id!r}: {problem}, and {type(method).__name__} shares {shares}"
                raise Refused(problem, "Send what is shared alone, or declare its role in the method's `shared`.")
        return reply if self.outbound is None else self.outbound(find_task(method, task), id, sent, reply, round, phase)

    def answer(
        self, method: Any, task: str, id: ClientId, tensors: Tensors, state: State, round: int, phase: int
    ) -> tuple[Tensors, Metrics]:
        """Do one task of one client; `state` is updated in place.

        A stateless client forgets the model afterwards. Learning rates are where the run stands, not where the client itself does.

        The global random generators are seeded from (run seed, round, phase, client id) and put back afterwards.

        Raises:
            ClientError: The task failed; it names the client, the task and the round.
        """
        device = self.model(id).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), span(f"{task} {id}"):
            _seed(mix(self.seed, round, phase, id), device)
            try:
                if self.outbound is not None:
                    self.outbound.check(find_task(method, task))
                client = self.client(id, state)
                client.round, client.round_steps = round, method.steps(client)
                client.total_iterations = method.rounds * client.round_steps
                client.sanitizer = None if self.outbound is None else self.outbound.sanitizer(method, client.round_steps, round, phase, id)
                reply = self.leaving(method, task, id, tensors, find_task(method, task)(client, tensors), round, phase)
                return reply, self.measured(client.metrics())
            except CoterieError as error:
                problem = error.problem.removeprefix(f"client {id!r}: ")
                raise ClientError(f"client {id!r}, task {task}, round {round + 1}: {problem}", error.remedy) from error
            except Exception as error:
                raise ClientError(f"client {id!r}, task {task}, round {round + 1}: {type(error).__name__}: {error}") from error
            finally:
                self.end(state, method)
