"""The client as a task sees it: its model, its data, its optimisers, its state, and nothing of anybody else's."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Literal, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn

from coterie.data.federation import ClientData
from coterie.data.splits import Split
from coterie.errors import ClientError, CoterieError, TensorError
from coterie.models.adapter import Adapter, Architecture, Layout
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.lora import LoRA
from coterie.protocol import ClientId, State, find_task, mix
from coterie.roles import BACKBONE, GENERALIST, ROUTER, SPECIALIST, Role
from coterie.tensors import Named, Tensors, all_finite, check_alike

# Of a language model; also the order of a client's parameters. Of BACKBONE an adapter has what a method freezes at its initial value.
OWNED = (GENERALIST, SPECIALIST, ROUTER, BACKBONE)
Metrics = dict[str, object]


class AdamW(BaseModel):
    """An optimiser and its schedule (Section B.1.2)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lr: Annotated[float, Field(gt=0, description="peak learning rate")] = 2e-3
    betas: Annotated[tuple[float, float], Field(description="decay of the first and second moments")] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0, description="decoupled weight decay")] = 0.01
    schedule: Annotated[Literal["cosine", "constant"], Field(description="one cosine over the whole run, or constant")] = "constant"
    final: Annotated[float, Field(ge=0, le=1, description="last learning rate of the cosine, as a share of the peak")] = 0.1

    @model_validator(mode="after")
    def _betas_below_one(self) -> "AdamW":
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas {list(self.betas)} must lie in [0, 1)")
        return self

    def lr_at(self, iteration: int, total: int) -> float:
        """The learning rate of the step after `iteration` of `total` local iterations."""
        if self.schedule == "constant":
            return self.lr
        progress = min(iteration / max(total, 1), 1.0)
        return self.lr * (self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2)


class Training(BaseModel):
    """How a client trains: batches, and one optimiser for each level of the bilevel problem."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: Annotated[int, Field(ge=1, description="sequences per optimiser step")] = 64
    micro_batch: Annotated[int | None, Field(ge=1, description="sequences per forward pass; gradients accumulate to the same step")] = None
    experts: Annotated[AdamW, Field(description="lower level: LoRA experts and attention")] = AdamW(schedule="cosine")
    routers: Annotated[AdamW, Field(description="upper level: routers")] = AdamW()

    def optimiser(self, role: Role) -> AdamW:
        return self.routers if role is ROUTER else self.experts


class Model(Protocol):
    """What a client needs of a model. Trainable parameters are grouped by role and owned by the client's state."""

    def parameters_by_role(self) -> Mapping[Role, Mapping[str, nn.Parameter]]: ...
    def loras(self) -> Mapping[str, LoRA]: ...
    def initial(self, role: Role, seed: int) -> Tensors: ...
    def gradient(
        self, batch: Tensor, wrt: list[nn.Parameter], micro_batch: int | None = None
    ) -> tuple[list[Tensor], dict[str, Tensor]]: ...
    def score(self, batches: Iterator[Tensor]) -> tuple[float, int]: ...


def initial_seed(seed: int, role: Role, client: ClientId) -> int:
    """What is shared starts the same everywhere, from the run's seed; what is local starts from the client's own."""
    return mix(seed, "initial", role, "" if role in (GENERALIST, BACKBONE) else client)


@dataclass(frozen=True)
class Blueprint:
    """What the server knows of the model: its shapes, from the configuration, and the run's seed. Never backbone weights."""

    architecture: Architecture
    layouts: Mapping[ClientId, Layout]
    seed: int

    def read(self, *roles: Role) -> Tensors:
        """The initial values of the shared tensors."""
        adapter = Adapter(self.architecture, next(iter(self.layouts.values())))
        return {name: t for role in roles for name, t in adapter.initial(role, initial_seed(self.seed, role, "")).items()}

    @property
    def ranks(self) -> dict[ClientId, list[int]]:
        """The rank of each of a client's low-rank updates, in the order of their modules' names."""
        adapters = {i: Adapter(self.architecture, layout).loras() for i, layout in self.layouts.items()}
        return {i: [loras[module].A.shape[1] for module in sorted(loras)] for i, loras in adapters.items()}

    def loras(self) -> dict[str, LoRA]:
        """The low-rank updates of the client with the largest rank, at their initial values."""
        adapter = Adapter(self.architecture, max(self.layouts.values(), key=lambda layout: layout.expert_rank))
        adapter.load_state_dict(adapter.initial(GENERALIST, initial_seed(self.seed, GENERALIST, "")), strict=False)
        return adapter.loras()


@dataclass
class Client:
    """One client during one task.

    All that it must remember lies in `state`, a flat dict of tensors that the engine keeps between tasks:
    `parameters/<role>` and `adam/<role>/{first,second,step}`, one flat tensor each of which the model's parameters are views;
    `cursor/<split>`, the windows drawn so far; `iteration`, the local iterations done over the whole run.

    Args:
        id: The client's stable name.
        model: The process's model of this client's layout; its parameters are bound to `state` here.
        data: The client's own splits.
        training: Batch size and optimisers.
        state: What it remembers; {} for a client that starts.
        seed: The run's seed.
        total_iterations: T * L, over which the cosine schedule runs.
    """

    id: ClientId
    model: Model
    data: ClientData
    training: Training
    state: State
    seed: int
    total_iterations: int
    stats: dict[str, list[dict[str, Tensor]]] = field(default_factory=dict)
    tokens: int = 0

    def __post_init__(self) -> None:
        self._parameters = self.model.parameters_by_role()
        for role in OWNED:
            if named := self._parameters[role]:
                self._bind(role, named)

    def _bind(self, role: Role, named: Mapping[str, nn.Parameter]) -> None:
        """Make the model's parameters of one role views of this client's flat tensor."""
        device = next(iter(named.values())).device
        key, size = f"parameters/{role}", sum(p.numel() for p in named.values())
        if key not in self.state:
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
        return self.data.train

    @property
    def valid(self) -> Split:
        return self.data.valid

    @property
    def test(self) -> Split:
        return self.data.test

    @property
    def iteration(self) -> int:
        """Local iterations done so far, over the whole run."""
        return self._count("iteration")

    def _count(self, key: str, add: int = 0) -> int:
        """The counter before `add` is added to it."""
        counter = self.state.setdefault(key, torch.zeros((), dtype=torch.int64))
        before = int(counter)
        counter += add
        return before

    def load(self, tensors: Named) -> None:
        """Take over tensors from the server, by name; an empty dict changes nothing.

        Raises:
            TensorError: A name, shape or dtype that this client's model does not have, or a value that is not finite.
        """
        own = {name: p for role in OWNED for name, p in self._parameters[role].items() if name in tensors}
        check_alike(own, tensors, f"tensors for client {self.id!r}")
        if not all_finite(tensors):
            raise TensorError(f"tensors for client {self.id!r}: not all values are finite", "A client diverged: lower the learning rate.")
        for name, parameter in own.items():
            parameter.data.copy_(tensors[name])

    def read(self, *roles: Role) -> Tensors:
        """Copies of the client's tensors of these roles, by name."""
        return {name: p.detach().clone() for role in roles for name, p in self._parameters[role].items()}

    @contextmanager
    def borrowing(self, tensors: Named) -> Iterator[None]:
        """Within the block the client has `tensors` loaded; afterwards its own are back."""
        before = {name: p.detach().clone() for role in OWNED for name, p in self._parameters[role].items() if name in tensors}
        self.load(tensors)
        try:
            yield
        finally:
            self.load(before)

    def step(self, *roles: Role, on: Split, extra: Callable[[], Named] | None = None) -> None:
        """One optimiser step of the tensors of these roles on the next batch of a split.

        Gradients are taken of these roles alone, so nothing leaks between the levels. A step of anything but the router alone is a
        local iteration.

        Args:
            roles: Whose tensors are trained.
            on: The split that the batch is drawn from.
            extra: Gives the gradient, by name, of what the objective has beside the loss: a regulariser, a penalty.
        """
        batch = on.batch(self._count(f"cursor/{on.name}", self.training.batch_size), self.training.batch_size)
        present = [role for role in roles if self._parameters[role]]
        wrt = [p for role in present for p in self._parameters[role].values()]
        iteration = self._count("iteration", 0 if set(roles) == {ROUTER} else 1)
        if not wrt:  # a single expert has no router to train
            return
        gradients, stats = self.model.gradient(batch, wrt, self.training.micro_batch)
        self.stats.setdefault("+".join(roles), []).append(stats)
        self.tokens += batch.shape[0] * (batch.shape[1] - 1)
        beside = extra() if extra else {}
        remaining = iter(gradients)
        for role in present:
            terms = ((next(remaining), beside.get(name)) for name in self._parameters[role])
            flat = torch.cat([(own if other is None else own + other).flatten() for own, other in terms])
            self._descend(role, flat.float(), iteration)

    def _descend(self, role: Role, gradient: Tensor, iteration: int) -> None:
        """One AdamW step of the flat tensor of a role: elementwise, so that one kernel does for all of its parameters."""
        settings = self.training.optimiser(role)
        flat, prefix = self.state[f"parameters/{role}"], f"adam/{role}"
        first = self.state.setdefault(f"{prefix}/first", torch.zeros_like(flat))
        second = self.state.setdefault(f"{prefix}/second", torch.zeros_like(flat))
        step = self.state.setdefault(f"{prefix}/step", torch.zeros((), dtype=torch.float32))
        adamw = torch.optim.AdamW(
            [flat],
            lr=settings.lr_at(iteration, self.total_iterations),
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        moments = {"exp_avg": first.to(flat.device), "exp_avg_sq": second.to(flat.device), "step": step.to(flat.device)}
        adamw.state[flat] = moments
        flat.grad = gradient
        adamw.step()
        flat.grad = None
        self.state |= {f"{prefix}/first": moments["exp_avg"], f"{prefix}/second": moments["exp_avg_sq"], f"{prefix}/step": moments["step"]}

    def forget(self, role: Role) -> None:
        """Start the optimiser of a role afresh: its moments belong to tensors that are no more."""
        for key in ("first", "second", "step"):
            self.state.pop(f"adam/{role}/{key}", None)

    def score(self, split: Split, batches: int | None = None) -> Tensor:
        """The client's model on a split, or on its first windows.

        Args:
            split: One of the client's own.
            batches: At most so many batches of it; None for the whole split.

        Returns:
            (2,) float64: the total negative log-likelihood in nats, and the number of predicted tokens.
        """
        rows = self.training.micro_batch or min(self.training.batch_size, 32)
        nll, tokens = self.model.score(islice(split.scoring(rows), batches))
        return torch.tensor([nll, tokens], dtype=torch.float64)

    def loss(self, batch: Tensor) -> float:
        """The mean next-token cross-entropy of the client's model on one batch, in nats, without a gradient."""
        nll, tokens = self.model.score(iter(torch.split(batch, self.training.micro_batch or len(batch))))
        return nll / tokens

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


@dataclass
class Site:
    """What a process needs to be any client of a run: one backbone for all, their data, and how they train.

    Args:
        backbone: The frozen base, shared by all clients.
        layouts: The shape of each client's adapter.
        data: The clients' data (of the pool too, where a method trains on it).
        training: Batch size and optimisers.
        seed: The run's seed.
        total_iterations: T * L.
    """

    backbone: Backbone
    layouts: Mapping[ClientId, Layout]
    data: Mapping[ClientId, ClientData]
    training: Training
    seed: int
    total_iterations: int
    models: dict[Layout, LanguageModel] = field(default_factory=dict)

    def client(self, id: ClientId, state: State) -> Client:
        """The client `id` with its remembered state. Clients of one layout take turns in one model."""
        layout = self.layouts[id]
        if layout not in self.models:
            self.models[layout] = LanguageModel(self.backbone, layout)
        return Client(id, self.models[layout], self.data[id], self.training, state, self.seed, self.total_iterations)

    def answer(
        self, method: object, task: str, id: ClientId, tensors: Tensors, state: State, round: int, phase: int
    ) -> tuple[Tensors, Metrics]:
        """Do one task of one client; `state` is updated in place.

        The global random generators are seeded from (run seed, round, phase, client id) and put back afterwards.

        Raises:
            ClientError: The task failed; it names the client, the task and the round.
        """
        devices = [self.backbone.device] if self.backbone.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(mix(self.seed, round, phase, id))
            try:
                client = self.client(id, state)
                reply = find_task(method, task)(client, tensors)
                return reply, client.metrics()
            except CoterieError as error:
                raise ClientError(f"client {id!r}, task {task}, round {round + 1}: {error.problem}", error.remedy) from error
            except Exception as error:
                raise ClientError(f"client {id!r}, task {task}, round {round + 1}: {type(error).__name__}: {error}") from error
