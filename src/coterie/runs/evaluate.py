"""What a run is worth: scores, costs, personal models, `result.json`."""

import json
import platform
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from coterie import personal
from coterie.aggregation import weights_error
from coterie.client.client import Client
from coterie.client.site import Site
from coterie.core import metrics
from coterie.core.errors import ClientError
from coterie.core.files import write_atomically
from coterie.core.names import encoded
from coterie.core.protocol import Ask, ClientId, Replies, ReplySpec, State, drive, empty_reply
from coterie.core.result import (
    ROUTING,
    BestByValid,
    Choices,
    ClientResult,
    Costs,
    Curve,
    Evaluation,
    Machine,
    Result,
    Scores,
    Versions,
    headline,
)
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, nbytes
from coterie.core.version import __version__
from coterie.data.examples import ExampleSplit
from coterie.models.layout import Layout
from coterie.runs.base import ExecutionBase
from coterie.runs.metrics import METRICS


class LazyClients(Mapping[ClientId, Client]):
    """A mapping of clients, each built when it is looked up: together they may be too large for
    memory.

    Args:
        site: Builds them.
        states: All states, in order.
        among: The clients of the mapping.
    """

    def __init__(
        self, site: Site, states: Mapping[ClientId, State], among: Collection[ClientId]
    ) -> None:
        self._site, self._states, chosen = site, states, set(among)
        self._clients = dict.fromkeys(i for i in states if i in chosen)

    def __getitem__(self, client: ClientId) -> Client:
        if client not in self._clients:
            raise KeyError(client)
        return self._site.client(client, dict(self._states[client]))

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)


@dataclass
class EvaluatedExecution(ExecutionBase):
    """A run's scores, costs and personal models; see `Execution`."""

    def _personal(self) -> Mapping[ClientId, Tensors]:
        """Return what each client that is scored needs beyond its own state to have its personal
        model; of one that keeps none: all of it.
        """
        if self._with_models:
            own = self.method.personal(self.server, self.clients)
            synchronised = (
                self.method.download(self.server, absent) if (absent := self._absent()) else {}
            )
            return {i: own[i] or synchronised.get(i, {}) for i in own}
        found, up, down = self.adapt(self.scored)
        for i in (
            self.groups.keys() & found.keys()
        ):  # what it takes once, however often it is scored
            self.progress["up"][i], self.progress["down"][i] = up[i], down[i]
        return found

    @property
    def _with_models(self) -> bool:
        """Whether those who are scored keep models of their own between rounds."""
        return not (self.groups or self.recipe.training.stateless or self.method.stateless)

    def _absent(self) -> tuple[ClientId, ...]:
        """Return the clients that took part in no round so far: they have no model of their own,
        and are scored with what they would get.
        """
        if not self.round or self.method.centralized or not self._with_models:
            return ()
        return tuple(i for i in self.clients if i not in self.progress["took_part"])

    def adapt(
        self, clients: Sequence[ClientId]
    ) -> tuple[Mapping[ClientId, Tensors], dict[ClientId, int], dict[ClientId, int]]:
        """Return what each of these clients gets, which have no model, and how many bytes each
        sends and gets until it has one.
        """
        up, down = (dict.fromkeys(clients, 0) for _ in range(2))

        def exchange(ask: Ask, phase: int) -> Replies:
            replies = self._answer(ask, -2 - phase)
            for counted, messages in ((down, ask.to), (up, replies)):
                counted.update({i: counted[i] + nbytes(tensors) for i, tensors in messages.items()})
            return replies

        found = drive(self.method.adapt(self.server, clients), exchange)
        return found, up, {i: down[i] + nbytes(tensors) for i, tensors in found.items()}

    def _evaluate(self) -> None:
        self.profile.enter("evaluation")
        self.reporter.evaluating(self.round)
        tensors = self._personal()
        scores = self._ask(self.method.score, tensors, self._form("valid", "test", "choices"))
        found = {i: self.metric.scores(score) for i, score in scores.items()}
        for i, values in found.items():
            self._write("score", self.round, self.iteration, i, values)
        members = {group: [i for i in of if i in found] for group, of in self._everyone.items()}
        if silent := [group for group, of in members.items() if not of]:
            raise ClientError(
                f"after round {self.round}: nobody of {silent[0] or 'the clients'} could be scored",
                f"See {self.folder / METRICS}.",
            )
        groups = {
            g: {s: metrics.mean(found[i][s] for i in of) for s in ("valid", "test")}
            for g, of in members.items()
        }
        means, weights = (
            next(iter(groups.values())),
            self.method.collaboration(self.server, self.clients),
        )
        gated = all("choices" in score for score in scores.values())
        anchored = [self.federation.labels[q] for q in self.federation.anchors] if gated else []

        def chosen(clients: Iterable[ClientId]) -> Choices:
            return metrics.choices([scores[i]["choices"] for i in clients], anchored)

        clients = {
            i: Scores(
                valid=values["valid"],
                test=values["test"],
                valid_loss=values["valid_loss"],
                test_loss=values["test_loss"],
                gate_accuracy=chosen([i]).gate_accuracy if gated else None,
                experts=numbers_of_experts(tensors[i]) if gated else None,
            )
            for i, values in found.items()
        }
        self.evaluations.append(
            Evaluation(
                round=self.round,
                iteration=self.iteration,
                **means,
                clients=clients,
                groups={g: values["test"] for g, values in groups.items()} if self.groups else None,
                weights=None
                if weights is None
                else [[round(w, 5) for w in row] for row in weights.tolist()],
                choices={g: chosen(of) for g, of in members.items()} if gated else None,
            )
        )
        self.reporter.evaluated(self.round, means)

    @property
    def _everyone(self) -> dict[str, tuple[ClientId, ...]]:
        """The clients of each group of unseen ones; of "" all, where none is unseen."""
        unseen = {group: tuple(of) for group, of in self.federation.unseen.items()}
        return unseen or {"": self.clients}

    def _add_to_curve(self) -> None:
        """Score a part of each test set: a point of the curves, which says how training goes, and
        is no part of the figures.

        Clients elsewhere are not asked: each exchange with them takes seconds, and tells something
        of their data.
        """
        if self.recipe.curve_every is None or self.engine.distant:
            return
        self.profile.enter("evaluation")
        tensors, states = self._personal(), self.engine.states()
        if (
            not self.round and self._with_models
        ):  # nobody has anything yet, and of a pool nobody could predict
            start = self.method.download(self.server, self.clients)
            tensors = {i: own or start.get(i, {}) for i, own in tensors.items()}
        found = {
            i: self._of_part(i, states.get(i, {}), tensors[i]) for i in self.scored if i in tensors
        }
        means = {
            group: metrics.mean(found[i] for i in of if i in found)
            for group, of in self._everyone.items()
        }
        test = next(iter(means.values()))
        self.points.append(
            Evaluation(
                round=self.round,
                iteration=self.iteration,
                test=test,
                clients={i: Scores(test=own) for i, own in found.items()},
                groups=means if self.groups else None,
            )
        )
        for i, own in found.items():
            self._write("curve", self.round, self.iteration, i, {"test": own})
        self.reporter.point(self.round, test, self.recipe.curve_windows)

    def _of_part(self, id: ClientId, state: State, tensors: Tensors) -> float:
        """Return the metric of a client on a part of its test set; of what it remembers nothing
        changes.
        """
        client = self.prepared.site.client(id, dict(state))
        with (
            torch.random.fork_rng(devices=[]),
            client.borrowing(self.method.loadable(client, tensors)),
        ):
            return self.metric.of(client.score_part(client.test, self.recipe.curve_windows))

    def _form(self, *names: str) -> ReplySpec:
        """Return the form of what comes back from scoring: these of all that there may be."""
        scores = self.problem.scores(self.prepared.site.layouts[self.scored[0]])
        return lambda sent: {name: tensor for name, tensor in scores.items() if name in names}

    def _synced(self) -> dict[ClientId, float]:
        """Return the test metric of each client after one more synchronisation; nothing is computed
        where that changes nothing.
        """
        own = self.evaluations[-1].clients
        down = (
            {}
            if self.groups
            else {
                i: t for i, t in self.method.download(self.server, self.clients).items() if i in own
            }
        )
        if not any(down.values()):
            return {i: scores.test for i, scores in own.items()}
        scores = self._ask(self.method.score_test, down, self._form("test"))
        return {i: self.metric.of(score["test"]) for i, score in scores.items()}

    def _result(self) -> Result:
        last, synced = self.evaluations[-1], self._synced()
        about, tests = self.metric.about, [e.test for e in self.evaluations]
        costs = self._costs()
        clients = {
            i: ClientResult(
                **vars(scores),
                test_synced=synced.get(i),
                **vars(costs[i]),
                group=self.groups.get(i),
            )
            for i, scores in last.clients.items()
            if i in costs  # one that was scored before a resumption may not be there now
        }
        first = headline(clients, last.groups).values()
        return Result(
            method=self.recipe.method["name"],
            recipe=self.recipe.name,
            seed=self.recipe.seed,
            rounds=self.round,
            metric=about,
            mean=last.test,
            mean_loss=metrics.mean(own.test_loss for own in first if own.test_loss is not None),
            mean_synced=metrics.mean(
                own.test_synced for own in first if own.test_synced is not None
            ),
            best=metrics.best(tests, about),
            best_of_last_ten=metrics.best(tests[-10:], about),
            best_by_valid=self._best_by_valid(),
            clients=clients,
            training={i: costs[i] for i in self.clients} if self.groups else None,
            groups=last.groups,
            labels={i: list(classes) for i, classes in self.federation.labels.items()} or None,
            label_counts=self._label_counts(),
            anchors=list(self.federation.anchors) or None,
            once_bytes=self.problem.once_bytes,
            clusters=self.federation.clusters,
            weights_error=self._weights_error(last),
            evaluations=tuple(self.evaluations),
            curve=Curve(self.recipe.curve_windows, tuple(self.points)) if self.points else None,
            lost=self.progress["lost"],
            rounds_taken_part={i: self.progress["took_part"].get(i, 0) for i in self.clients},
            never_took_part=list(self._absent()),
            privacy=None if self.accountant is None else self.accountant.summary(),
            wall_s=time.monotonic() - self.started,
            peak_memory_bytes=metrics.peak_memory(),
            versions=Versions(__version__, torch.__version__, platform.python_version()),
            machine=self._machine(),
        )

    def _best_by_valid(self) -> BestByValid:
        known = [(e.valid, e) for e in self.evaluations if e.valid is not None]
        valid = metrics.best((value for value, _ in known), self.metric.about)
        best = next(e for value, e in known if value == valid)
        return BestByValid(best.round, valid, best.test)

    def _machine(self) -> Machine:
        device = self.problem.device
        return Machine(
            device="elsewhere" if device.type == "meta" else str(device),
            dtype=str(self.problem.dtype).removeprefix("torch."),
            threads=torch.get_num_threads(),
        )

    def _label_counts(self) -> dict[ClientId, list[int]] | None:
        """Examples of each class that each client trains on or, if it is unseen, is tested on;
        None where nobody is unseen.
        """
        held = (
            {
                i: data.test if i in self.groups else data.train
                for i, data in self.federation.everyone.items()
            }
            if self.groups
            else {}
        )
        labelled = {i: split for i, split in held.items() if isinstance(split, ExampleSplit)}
        return {
            i: np.bincount(s.labels[s.rows], minlength=s.classes).tolist()
            for i, s in labelled.items()
        } or None

    def _weights_error(self, evaluated: Evaluation) -> float | None:
        clusters = self.federation.clusters
        if clusters is None or evaluated.weights is None:
            return None
        return weights_error(
            evaluated.weights, [clusters[i] for i in self.clients], self.method.row_stochastic
        )

    def _costs(self) -> dict[ClientId, Costs]:
        """Return what each client sends, gets, trains and remembers."""
        remembered, layouts = self.engine.state_bytes(), self.prepared.site.layouts
        return {
            i: Costs(
                **self._size(layouts[i]),
                bytes_up=self.progress["up"][i],
                bytes_down=self.progress["down"][i],
                state_bytes=remembered.get(i, 0) if self.method.total_iterations else 0,
                generalists=layouts[i].generalists,
                specialists=layouts[i].specialists,
            )
            for i in self.federation.everyone
        }

    def _size(self, layout: Layout) -> dict[str, int]:
        """Parameters, and the work of one prediction's forward pass. Layouts repeat, and a model
        must be built to count.
        """
        if layout not in self._sizes:
            trained = self.method.total_iterations > 0
            model = self.problem.trainable(layout)
            self._sizes[layout] = {
                "trainable_parameters": model.trainable_parameters if trained else 0,
                "active_parameters": model.active_parameters if trained else 0,
                "flops_per_token": self.problem.flops(layout, trained),
            }
        return self._sizes[layout]

    def _owners(self) -> Mapping[ClientId, Client]:
        """Every client that is scored with its state of now."""
        return LazyClients(self.prepared.site, self.engine.states(), self.scored)

    def _keep_personal_models(self) -> None:
        ask = Ask(self.method.keep, self._personal(), empty_reply)
        self.engine.keep(
            ask,
            self.round,
            lambda client, tensors: self.keep(
                client, tensors, self.folder / "clients" / encoded(client.id)
            ),
        )

    def keep(self, client: Client, tensors: Tensors, folder: Path) -> None:
        """Write a client's personal model to a folder: what it remembers, and `tensors`. Raises
        SaveError.
        """
        client.bind()  # clients of one layout take turns in one model
        client.load(
            self.method.loadable(client, tensors)
        )  # one that keeps nothing has forgotten it
        origin = personal.Origin(
            self.recipe.method["name"], self.recipe.name, self.round, self.recipe.seed
        )
        self.problem.keep(folder, client, self.prepared.site.layouts[client.id], origin)

    def _look_at_routing(self) -> None:
        """Write `routing.json`: what every client's router does with the beginnings of all test
        texts, which are all on this machine.
        """
        if self.recipe.samples and (found := self.problem.look(self._owners())) is not None:
            text = json.dumps(found.to_json(), ensure_ascii=False)
            write_atomically(self.folder / ROUTING, text.encode())
