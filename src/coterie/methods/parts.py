"""The base class of methods that are several methods at once."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.parts import ClientOfParts
from coterie.client.settings import Training
from coterie.core.protocol import (
    PARTS,
    Ask,
    ClientId,
    Replies,
    Round,
    Sends,
    State,
    Task,
    declared,
    find_task,
    protects_examples,
    task,
)
from coterie.core.tensors import Named, Tensors, prefixed, under
from coterie.methods.base import Method
from coterie.methods.section import build_method
from coterie.models.layout import Layout, PartsLayout

_WIDEST = (Sends.NOTHING, Sends.SCORES, Sends.UPDATE, Sends.PRIVATE)


@dataclass(frozen=True)
class OfParts(Method):
    """A method that trains the models of several methods, its parts, in the same rounds on the same
    batches.

    Every part is exactly that method alone. What leaves a client is what the parts send, named
    `<part>/<tensor>`, as is all of the server's and the clients' state.
    """

    parts: Annotated[
        tuple[str | dict[str, Any], ...],
        Field(
            min_length=2,
            description="the methods whose models are mixed: names, or sections with a `name` and "
            "settings of its own",
        ),
    ] = ("local", "fedavg")

    def __post_init__(self) -> None:
        methods = self.methods.values()
        together = {
            name: all(getattr(part, name) for part in methods)
            for name in ("dynamic_membership", "stateless")
        } | {
            name: any(getattr(part, name) for part in methods)
            for name in ("server_steps", "centralized")
        }
        shared = tuple(dict.fromkeys(role for part in methods for role in part.shared))
        packages = tuple(dict.fromkeys(name for part in methods for name in part.packages))
        for name, value in (together | {"shared": shared, "packages": packages}).items():
            object.__setattr__(self, name, value)
        if self.centralized:
            raise ValueError("parts: a method that trains on all clients' data is no part")

    stateful: ClassVar[bool] = True  # the weights of the parts

    @cached_property
    def methods(self) -> Mapping[str, Method]:
        methods: dict[str, Method] = {}
        common = {name: getattr(self, name) for name in ("rounds", "local_steps", "local_epochs")}
        for part in self.parts:
            section = {"name": part} if isinstance(part, str) else part
            method = build_method(common | section)
            name = str(section["name"])
            if name in methods or method.methods or not method.total_iterations:
                raise ValueError(f"parts: {name} is in them twice, or trains no single model")
            methods[name] = method
        return methods

    @property
    def by_examples(self) -> bool:
        return all(protects_examples(part) for part in self.methods.values())

    @property
    def needs_only_mean(self) -> bool:
        return all(part.needs_only_mean or not part.shared for part in self.methods.values())

    @property
    def row_stochastic(self) -> bool:
        return all(part.row_stochastic for part in self.methods.values())

    def layout(self, position: int, base: Layout) -> PartsLayout:
        layouts = {name: part.layout(position, base) for name, part in self.methods.items()}
        return PartsLayout.of(layouts)

    def check(self, model: Blueprint, clients: Sequence[ClientId], training: Training) -> None:
        for name, part in self.methods.items():
            part.check(model.part(name), clients, training)

    def init(self, model: Blueprint, clients: Sequence[ClientId]) -> State:
        return self._joined({k: m.init(model.part(k), clients) for k, m in self.methods.items()})

    def members(self, state: State, clients: Sequence[ClientId]) -> State:
        parts = self.methods.items()
        return self._joined({k: m.members(under(k, state), clients) for k, m in parts})

    def download(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        parts = {k: m.download(under(k, state), clients) for k, m in self.methods.items()}
        return self._by_client(parts)

    def personal(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        parts = {k: m.personal(under(k, state), clients) for k, m in self.methods.items()}
        return self._by_client(parts)

    def collaboration(self, state: State, clients: Sequence[ClientId]) -> Tensor | None:
        weights = (m.collaboration(under(k, state), clients) for k, m in self.methods.items())
        return next((w for w in weights if w is not None), None)

    def round(self, state: State, clients: Sequence[ClientId], rng: torch.Generator) -> Round:
        rounds = {}
        for name, part in self.methods.items():
            same = torch.Generator().set_state(rng.get_state())  # as that method alone draws
            rounds[name] = part.round(under(name, state), clients, same)
        return (yield from self._in_step(rounds))

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        parts = {k: m.finish(under(k, state), clients) for k, m in self.methods.items()}
        return (yield from self._in_step(parts))

    def _in_step(self, parts: Mapping[str, Round]) -> Round:
        """Do all parts' rounds, each exchange of all parts in one; return the next state."""
        states: dict[str, State] = {}
        replies: dict[str, Replies | None] = dict.fromkeys(parts)
        while len(states) < len(parts):
            asks: dict[str, Ask] = {}
            for name in parts.keys() - states.keys():
                try:
                    before = replies[name]
                    asks[name] = next(parts[name]) if before is None else parts[name].send(before)
                except StopIteration as end:
                    states[name] = end.value
            if asks:
                together = yield self._ask(asks)
                for name, ask in asks.items():
                    its = {i: under(name, reply) for i, reply in together.items() if i in ask.to}
                    replies[name] = its
        return self._joined(states)

    def _ask(self, asks: Mapping[str, Ask]) -> Ask:
        """Return the exchange that has every part's."""
        tasks = PARTS.join(asks[name].name if name in asks else "" for name in self.methods)
        to = self._by_client({name: ask.to for name, ask in asks.items()})

        def reply_spec(sent: Named) -> Named:
            specs = {name: ask.reply_spec(under(name, sent)) for name, ask in asks.items()}
            return self._joined(specs)

        smaller = any(ask.smaller for ask in asks.values())
        return Ask(getattr(self, tasks), to, reply_spec, smaller)

    def __getattr__(self, name: str) -> Task:
        """Return the task in which a client does one task of each part; "" for none."""
        if name.count(PARTS) != len(self.parts) - 1:
            raise AttributeError(name)
        named = zip(self.methods.items(), name.split(PARTS), strict=True)
        tasks = {part: find_task(method, its) for (part, method), its in named if its}

        def all_parts(client: ClientOfParts, tensors: Tensors) -> Tensors:
            replies = Tensors()
            for part, its in tasks.items():
                with client.part(part) as one:
                    replies |= prefixed(part, its(one, under(part, tensors)))
            return replies

        all_parts.__name__ = name
        return task(max(map(declared, tasks.values()), key=_WIDEST.index))(all_parts)

    @staticmethod
    def _joined(parts: Mapping[str, Named]) -> Tensors:
        """Return the tensors of all parts in one set."""
        return {k: t for name, named in parts.items() for k, t in prefixed(name, named).items()}

    def _by_client(self, parts: Mapping[str, Mapping[ClientId, Named]]) -> dict[ClientId, Tensors]:
        """Return the tensors of all parts by client."""
        clients = dict.fromkeys(i for to in parts.values() for i in to)
        return {i: self._joined({k: to.get(i, {}) for k, to in parts.items()}) for i in clients}

    @task(Sends.NOTHING)
    def keep(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        for name, part in self.methods.items():
            with client.part(name) as one:
                part.keep(one, under(name, tensors))
        return {}
