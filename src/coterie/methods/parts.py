"""The base class of methods that are several methods at once."""

from abc import abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch
from torch import Tensor

from coterie.client.blueprint import Blueprint
from coterie.client.client import Client
from coterie.client.settings import Training
from coterie.client.site import WEIGHTS, ClientOfParts
from coterie.client.state import improves, recall, remember
from coterie.core.protocol import (
    PARTS,
    Adaptation,
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
from coterie.models.interpolation import interpolate
from coterie.models.layout import Layout, PartsLayout
from coterie.models.predictions import joined, likelihoods, score_of

R = TypeVar("R")
_WIDEST = (Sends.NOTHING, Sends.SCORES, Sends.UPDATE, Sends.PRIVATE)


@dataclass(frozen=True)
class OfParts(Method):
    """A method that trains the models of several methods, its parts, in the same rounds on the same
    batches.

    Every part is exactly that method alone. What leaves a client is what the parts send, named
    `<part>/<tensor>`, as is all of the server's and the clients' state.
    """

    def __post_init__(self) -> None:
        methods = self.methods.values()
        of_all = {
            "dynamic_membership": all(part.dynamic_membership for part in methods),
            "stateless": any(part.stateless for part in methods),
            "server_steps": any(part.server_steps for part in methods),
            "shared": tuple(dict.fromkeys(role for part in methods for role in part.shared)),
            "packages": tuple(dict.fromkeys(name for part in methods for name in part.packages)),
        }
        for name, value in of_all.items():
            object.__setattr__(self, name, value)
        if any(part.centralized for part in methods):
            raise ValueError("parts: a method that trains on all clients' data is no part")

    stateful: ClassVar[bool] = True  # the weights of the parts

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

    def for_absent(self, state: State, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return what parts with models of clients give; `adapt` gives those of the others."""
        others = {k: m for k, m in self.methods.items() if not m.stateless}
        parts = {k: m.for_absent(under(k, state), clients) for k, m in others.items()}
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
        return state | self._joined((yield from self._in_step(rounds)))

    def finish(self, state: State, clients: Sequence[ClientId]) -> Round:
        parts = {k: m.finish(under(k, state), clients) for k, m in self.methods.items()}
        return state | self._joined((yield from self._in_step(parts)))

    def adapt(self, state: State, clients: Sequence[ClientId]) -> Adaptation:
        """Give clients the models of parts that leave none with them; see `Method.adapt`."""
        stateless = {k: m for k, m in self.methods.items() if m.stateless}
        served = {k: m.adapt(under(k, state), clients) for k, m in stateless.items()}
        parts = self._by_client((yield from self._in_step(served)))
        return {i: {**of, **parts.get(i, {})} for i, of in self.personal(state, clients).items()}

    def _in_step(
        self, parts: Mapping[str, Generator[Ask, Replies, R]]
    ) -> Generator[Ask, Replies, dict[str, R]]:
        """Do all parts' rounds or adaptations, each exchange of all of them in one; return what
        each comes to.
        """
        results: dict[str, R] = {}
        replies: dict[str, Replies | None] = dict.fromkeys(parts)
        while len(results) < len(parts):
            asks: dict[str, Ask] = {}
            for name in [name for name in parts if name not in results]:
                try:
                    before = replies[name]
                    asks[name] = next(parts[name]) if before is None else parts[name].send(before)
                except StopIteration as end:
                    results[name] = end.value
            if asks:
                answers = yield self._ask(asks)
                for name, ask in asks.items():
                    its = {i: under(name, reply) for i, reply in answers.items() if i in ask.to}
                    replies[name] = its
        return results

    def _ask(self, asks: Mapping[str, Ask]) -> Ask:
        """Return the exchange that has every part's. A client that not all of them ask gets the
        numbers of those that do, as the tensor `+`.
        """
        to = self._by_client({name: ask.to for name, ask in asks.items()})
        names = list(self.methods)
        for i, tensors in to.items():
            of = [names.index(name) for name, ask in asks.items() if i in ask.to]
            if len(of) < len(asks):
                tensors[PARTS] = torch.tensor(of)

        def reply_spec(sent: Named) -> Named:
            addressed = [k for k in self._addressed(sent) if k in asks]
            return self._joined({k: asks[k].reply_spec(under(k, sent)) for k in addressed})

        tasks = PARTS.join(asks[name].name if name in asks else "" for name in names)
        smaller = any(ask.smaller for ask in asks.values())
        return Ask(getattr(self, tasks), to, reply_spec, smaller)

    def _addressed(self, sent: Named) -> list[str]:
        """Return the parts that ask a client, by what it is sent."""
        names = list(self.methods)
        return [names[k] for k in sent[PARTS].tolist()] if PARTS in sent else names

    def __getattr__(self, name: str) -> Task:
        """Return the task in which a client does one task of each part; "" for none."""
        if name.count(PARTS) != len(self.methods) - 1:
            raise AttributeError(name)
        named = zip(self.methods.items(), name.split(PARTS), strict=True)
        tasks = {part: find_task(method, its) for (part, method), its in named if its}

        def all_parts(client: ClientOfParts, tensors: Tensors) -> Tensors:
            replies = Tensors()
            for part in [part for part in self._addressed(tensors) if part in tasks]:
                with client.part(part) as one:
                    replies |= prefixed(part, tasks[part](one, under(part, tensors)))
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
        tensors = self.loadable(client, tensors)
        for name, part in self.methods.items():
            with client.part(name) as one:
                part.keep(one, under(name, tensors))
        return {}

    # Scores of the mixture of the parts' predictions

    @abstractmethod
    def weights(self, client: ClientOfParts, tensors: Tensors, valid: Tensor) -> Tensor:
        """Return the weight of each part's predictions at a client, (P,) float64.

        Args:
            client: The client.
            tensors: What it was sent to be scored.
            valid: The parts' log-probabilities of what is right in its validation data, (P, T).
        """

    def score_spec(self, scores: Tensors) -> Tensors:
        sums = torch.stack([scores["valid"], scores["test"]]).expand(len(self.methods), -1, -1)
        weights = torch.empty(len(self.methods), dtype=torch.float64)
        whole = {name: scores[name] for name in ("valid", "test")}  # no choices of a pool's gate
        return whole | {"parts": sums, WEIGHTS: weights}

    @task(Sends.SCORES)
    def score(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        return self._scored(client, tensors, keep=False)

    @task(Sends.SCORES)
    def score_and_keep(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        """Return `score`; of each part, keep the model that is the best on validation."""
        return self._scored(client, tensors, keep=True)

    def _each(self, client: ClientOfParts, tensors: Tensors) -> Iterator[Client]:
        """Yield the client of each part, with that part's tensors on loan."""
        tensors = self.loadable(client, tensors)
        for name, part in self.methods.items():
            with client.part(name) as one, one.borrowing(part.loadable(one, under(name, tensors))):
                yield one

    def _scored(self, client: ClientOfParts, tensors: Tensors, keep: bool) -> Tensors:
        """Choose the weights by validation data; return scores of the mixture and of each part."""
        by_part, scores = [], []
        for one in self._each(client, tensors):
            with one.scoring(one.scored_rows[0 if keep else 1]):
                by_part.append((one.predictions(one.valid), one.predictions(one.test)))
            its = dict(zip(("valid", "test"), map(score_of, by_part[-1]), strict=True))
            if keep and improves(one, its["valid"]):
                remember(one, its, one.round)
            scores.append(torch.stack(list(its.values())))
        valid, test = map(joined, zip(*by_part, strict=True))
        client.state[WEIGHTS] = weights = self.weights(client, tensors, likelihoods(*valid))
        return {
            "valid": score_of([(interpolate(valid[0], weights), valid[1])]),
            "test": score_of([(interpolate(test[0], weights), test[1])]),
            "parts": torch.stack(scores),
            WEIGHTS: weights,
        }

    @task(Sends.SCORES)
    def score_test(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        return {"test": self.score_part(client, tensors, None)["test"]}

    def score_part(self, client: ClientOfParts, tensors: Tensors, rows: int | None) -> Tensors:
        """Return the scores on so many rows of test data, and each part's with its weight."""
        by_part = [one.predictions(one.test, rows) for one in self._each(client, tensors)]
        log_probs, right = joined(by_part)
        weights = client.shares
        return {
            "test": score_of([(interpolate(log_probs, weights), right)]),
            "parts": torch.stack([score_of(predictions)[None] for predictions in by_part]),
            WEIGHTS: weights,
        }

    @task(Sends.SCORES)
    def recall(self, client: ClientOfParts, tensors: Tensors) -> Tensors:  # type: ignore[override]
        """Make each part's best model the client's; return the scores of their mixture, and the
        last of the parts' rounds.
        """
        rounds = []
        for name in self.methods:
            with client.part(name) as one:
                rounds.append(recall(one)["round"])
        return self._scored(client, {}, keep=False) | {"round": max(rounds)}
