"""A client's memory: its model, bound while a task runs, counters, and its best model."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters

from coterie.client.blueprint import Model, initial_seed
from coterie.client.settings import Training
from coterie.core.errors import ClientError, Divergence, TensorError
from coterie.core.metrics import better, metric_of
from coterie.core.protocol import ClientId, State
from coterie.core.roles import BACKBONE, EXPERT, GATE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensor_names import numbers_of_experts, of_expert
from coterie.core.tensors import Named, Tensors, all_finite, check_alike
from coterie.data.examples import ExampleSplit
from coterie.data.federation import ClientData
from coterie.data.splits import Batch, Split
from coterie.models.layout import ABSENT
from coterie.models.mixture import LoRA

# What a client owns, in the order of its parameters. Of BACKBONE an adapter has what a method
# freezes at its initial value.
OWNED = (GENERALIST, SPECIALIST, ROUTER, EXPERT, GATE, BACKBONE)
POOL_ROLES = (EXPERT, GATE)  # zeros at a client until the server sends some
EXPERT_IDS = "experts"  # the numbers of the experts in a client's slots
BEGAN = "began"  # the last round that a client trained in, and its local iterations before that
_BEST, _SCORE, _ROUND = "best/", "best/score/", "best/round"  # the copy of the best model
_MODEL = ("parameters/", "buffers", EXPERT_IDS)  # prefixes of the keys of a model
_SPLITS = ("valid", "test")


@dataclass
class BoundClient:
    """A client's state with a model that is bound to it, see `Client`."""

    id: ClientId
    model: Model
    data: ClientData
    training: Training
    state: State
    seed: int
    total_iterations: int

    def __post_init__(self) -> None:
        self._parameters = self.model.parameters_by_role
        self._splits: dict[str, Split] = {}
        self._untouched: dict[frozenset[Role], Tensors] = {}
        self.bind()

    def bind(self) -> None:
        """Make the model's parameters and buffers views of `state`, until the next is bound."""
        for role in OWNED:
            if named := self._parameters[role]:
                self._bind(role, named)
        if buffers := self.model.buffers:
            if "buffers" not in self.state:
                initial = self.model.initial_buffers()
                self.state["buffers"] = torch.cat([t.flatten() for t in initial.values()])
            self.state["buffers"] = self.state["buffers"].to(self.model.device)
            vector_to_parameters(self.state["buffers"], buffers.values())
        if slots := self.model.expert_slots():
            self.state.setdefault(EXPERT_IDS, torch.full((len(slots),), ABSENT))
            self.model.bind_experts(self.state[EXPERT_IDS])

    def _bind(self, role: Role, named: Mapping[str, nn.Parameter]) -> None:
        """Make the model's parameters of one role views of this client's flat tensor."""
        key, size = f"parameters/{role}", sum(p.numel() for p in named.values())
        if key not in self.state and role in POOL_ROLES:
            self.state[key] = torch.zeros(size)
        elif key not in self.state:
            initial = self.model.initial(role, initial_seed(self.seed, role, self.id))
            self.state[key] = torch.cat([initial[name].flatten() for name in named])
        if self.state[key].shape != (size,):
            raise TensorError(
                f"state of client {self.id!r}: {key} has {self.state[key].numel():,} values, the "
                f"model has {size:,}",
                "The state is from another recipe (rank, experts or base): start a new run.",
            )
        self.state[key] = self.state[key].to(self.model.device)
        vector_to_parameters(self.state[key], named.values())

    @property
    def loras(self) -> Mapping[str, LoRA]:
        """The client's low-rank updates by module name: its own values, not copies."""
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
        """`windows` as a tensor, (): the client's weight in a mean by samples."""
        return torch.tensor(self.windows)

    def independent_stream(self, purpose: str) -> Split:
        """Return the training data in another order, with a cursor of its own."""
        return training_data(self.data, purpose)

    @property
    def valid(self) -> Split:
        return self._embedded(self.data.valid)

    @property
    def test(self) -> Split:
        return self._embedded(self.data.test)

    def _embedded(self, split: Split) -> Split:
        """Return a split whose batches hold embeddings, if the model has a common expert."""
        name = split.name
        if name not in self._splits:
            if isinstance(split, ExampleSplit) and self.model.embed is not None:
                split = split.embedded(self.embeddings(split))
            self._splits[name] = split
        return self._splits[name]

    def embeddings(self, split: Split) -> Tensor:
        """Return a split's embeddings, (windows, e): computed once and kept in the state."""
        key, embed = f"embeddings/{split.name}", self.model.embed
        if key not in self.state:
            assert embed is not None
            self.state[key] = torch.cat([embed(batch) for batch in split.scoring(self._rows)])
        return self.state[key]

    @property
    def _rows(self) -> int:
        return self.training.micro_batch or min(self.training.batch_size, 32)

    def load(self, tensors: Named) -> None:
        """Take over tensors from the server: by their own names; all values of a role, (d,), under
        the role's name; or all values of a pool's expert, (d,), as `expert/<number>`, which fill
        slots in the order of the numbers. Raises TensorError if the client's model has no such
        name, shape or dtype, or a value is not finite.
        """
        tensors = self._named(tensors)
        current = {name: t for name, t in self._values(*OWNED).items() if name in tensors}
        check_loadable(self.id, current, tensors)
        for name, tensor in current.items():
            tensor.detach().copy_(tensors[name])

    def _values(self, *roles: Role) -> dict[str, Tensor]:
        """Return the tensors of these roles by name, and what travels with them."""
        values: dict[str, Tensor] = {
            name: p for role in roles for name, p in self._parameters[role].items()
        }
        if EXPERT in roles and (slots := self.model.expert_slots()):
            values |= {name: t for slot in slots for name, t in slot.items()}
            values[EXPERT_IDS] = self.state[EXPERT_IDS]
        return values | (dict(self.model.buffers) if self.model.statistics in roles else {})

    def _named(self, tensors: Named) -> Tensors:
        """Return the tensors under their own names, also those that came as one vector."""
        named = dict(tensors)
        for role in tensors.keys() & set(OWNED):
            named |= self._unflatten(self._parameters[Role(role)], named.pop(role), role)
        if numbers := numbers_of_experts(tensors):
            slots, pools = self.model.expert_slots(), self.model.pools
            ids = [ABSENT] * len(slots)
            for number in numbers:
                name, places = of_expert(number), range(number % pools, len(slots), pools)
                place = next((place for place in places if ids[place] == ABSENT), None)
                if place is None:
                    raise TensorError(
                        f"{len(numbers)} experts for client {self.id!r}, which has {len(slots)} "
                        "slots",
                        "Send at most K.",
                    )
                named |= self._unflatten(slots[place], named.pop(name), name)
                ids[place] = number
            named[EXPERT_IDS] = torch.tensor(ids)
        return named

    def _unflatten(self, like: Named, flat: Tensor, what: str) -> Tensors:
        """Return one vector, (d,), as tensors of the names and shapes of `like`."""
        sizes = [t.numel() for t in like.values()]
        expected = torch.empty(sum(sizes), device="meta")
        check_alike({what: expected}, {what: flat}, f"tensors for client {self.id!r}")
        pairs = zip(like.items(), torch.split(flat, sizes), strict=True)
        return {name: part.view_as(t) for (name, t), part in pairs}

    def read(self, *roles: Role) -> Tensors:
        """Return copies of the client's tensors of these roles, by name."""
        return {name: t.detach().clone() for name, t in self._values(*roles).items()}

    def experts(self) -> Tensors:
        """Return copies of the client's experts of a pool, as `expert/<number>`, (d,) each."""
        slots = zip(self.state[EXPERT_IDS].tolist(), self.model.expert_slots(), strict=True)
        return {
            of_expert(number): torch.cat([t.detach().flatten() for t in slot.values()])
            for number, slot in slots
            if number != ABSENT
        }

    def flat(self, role: Role = GENERALIST, into: Tensor | None = None) -> Tensor:
        """Return a copy of one role's values, (d,), written to `into` if that is on the device."""
        values = self.state[f"parameters/{role}"]
        return (
            values.clone() if into is None or into.device != values.device else into.copy_(values)
        )

    def shift(self, scale: float, direction: Tensor) -> None:
        """Theta <- theta + scale direction, for all values of GENERALIST as one vector, (d,)."""
        theta, what = self.state[f"parameters/{GENERALIST}"], f"direction for client {self.id!r}"
        check_alike({GENERALIST: theta}, {GENERALIST: direction}, what)
        theta.add_(direction.to(self.model.device), alpha=scale)

    @contextmanager
    def at(self, values: Tensor, role: Role) -> Iterator[None]:
        """Give one role other values, (d,), within the block, without a copy."""
        named, current = self._parameters[role].values(), self.state[f"parameters/{role}"]
        check_loadable(self.id, {role: current}, {role: values})
        vector_to_parameters(values.to(current), named)
        try:
            yield
        finally:
            vector_to_parameters(current, named)

    @contextmanager
    def borrowing(self, tensors: Named) -> Iterator[None]:
        """Load `tensors` within the block; restore the client's own afterwards."""
        tensors = self._named(tensors)
        before = {
            name: t.detach().clone() for name, t in self._values(*OWNED).items() if name in tensors
        }
        self.load(tensors)
        try:
            yield
        finally:
            self.load(before)


def count(state: State, key: str, add: int) -> int:
    """Add to a counter of a client's state; return its value before."""
    counter = state.setdefault(key, torch.zeros((), dtype=torch.int64))
    before = int(counter)
    counter += add
    return before


def position(state: State, round: int, steps: int) -> int:
    """Return a client's position in the run's schedules, in local iterations: of all `round` rounds
    before, of `steps` iterations each, whether or not it took part, plus its own in this round.
    """
    then, before = state[BEGAN].tolist() if BEGAN in state else (-1, 0)
    return round * steps + (int(state.get("iteration", 0)) - before if then == round else 0)


def advance(state: State, round: int) -> None:
    """Count a local iteration of a client that takes part in a round."""
    if BEGAN not in state or int(state[BEGAN][0]) != round:
        state[BEGAN] = torch.tensor([round, int(state.get("iteration", 0))])
    count(state, "iteration", 1)


def draw(on: Split, state: State, rows: int) -> Batch:
    """Return the next batch of a split, whose cursor is in the client's state."""
    batch: Batch = on.batch(count(state, f"cursor/{on.name}", rows), rows)
    return batch


def check_loadable(id: ClientId, expected: Named, tensors: Named) -> None:
    """Raise TensorError for tensors of other forms than a client's, or not finite."""
    what = f"tensors for client {id!r}"
    check_alike(expected, tensors, what)
    if not all_finite(tensors):
        problem = f"{what}: not all values are finite"
        raise Divergence(problem, "A client diverged: lower the learning rate.")


def training_data(data: ClientData, purpose: str = "") -> Split:
    """Return a client's training data; for a purpose in another order, with its own cursor."""
    return data.train.reordered(f"train-{purpose}") if purpose else data.train


def improves(client: BoundClient, valid: Tensor) -> bool:
    """Return whether a validation score is strictly better than that of the kept copy."""
    if not all_finite({"valid": valid}):
        return False
    kept, metric = client.state.get(f"{_SCORE}valid"), metric_of(valid)
    return kept is None or better(metric.of(valid), metric.of(kept), metric.about)


def remember(client: BoundClient, scores: Mapping[str, Tensor], round: int) -> None:
    """Keep a copy of the client's model, its scores, and the number of rounds done."""
    model = {key: t for key, t in client.state.items() if key.startswith(_MODEL)}
    client.state.update({f"{_BEST}{key}": t.detach().clone() for key, t in model.items()})
    client.state.update({f"{_SCORE}{name}": scores[name].clone() for name in _SPLITS})
    client.state[_ROUND] = torch.tensor(round)


def kept_round(client: BoundClient) -> int | None:
    """Return the round of the kept copy, or None."""
    return int(client.state[_ROUND]) if _ROUND in client.state else None


def recall(client: BoundClient) -> Tensors:
    """Make the kept copy the client's model; return its scores `valid` and `test`, see
    `Client.score`, and its `round`, (). Raises ClientError: there is none.
    """
    if _ROUND not in client.state:
        raise ClientError(
            f"client {client.id!r} has no best model: it was never scored on its validation data",
            "Connect it while clients are scored, or use keep: last, which needs no scores.",
        )
    for key, tensor in client.state.items():
        if key.startswith(_MODEL):
            tensor.copy_(client.state[f"{_BEST}{key}"])
    scores = {name: client.state[f"{_SCORE}{name}"].clone() for name in _SPLITS}
    return scores | {"round": client.state[_ROUND].clone()}
