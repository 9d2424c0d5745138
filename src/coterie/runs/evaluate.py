"""Results of a run: scores, costs, personal models, `result.json`."""

import json
import platform
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from coterie.aggregation import weights_error
from coterie.client.best import kept_round, recall
from coterie.client.client import Client
from coterie.client.site import Site
from coterie.core import metrics
from coterie.core.files import write_atomically
from coterie.core.names import encoded
from coterie.core.protocol import Ask, ClientId, State, empty_reply
from coterie.core.result import (
    ROUTING,
    BestByValid,
    ClientResult,
    Costs,
    Curve,
    Evaluation,
    Machine,
    Result,
    Versions,
    headline,
)
from coterie.core.tensors import Tensors
from coterie.core.version import __version__
from coterie.data.examples import ExampleSplit
from coterie.models import artifact
from coterie.models.layout import Layout
from coterie.runs.scoring import ScoredExecution


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
class EvaluatedExecution(ScoredExecution):
    """A run's result: scores, costs and personal models; see `Execution`."""

    def _result(self) -> Result:
        last, about = self.evaluations[-1], self.metric.about
        tests = [e.test for e in self.evaluations]
        clients = self._clients_kept() if self.keeps_best else self._clients_of(last)
        first = headline(clients, last.groups).values()
        everyone = len(self.groups or self.clients)
        drawn_of = everyone if len(self.scored) < everyone else None
        return Result(
            method=self.recipe.method["name"],
            recipe=self.recipe.name,
            seed=self.recipe.seed,
            rounds=self.round,
            metric=about,
            mean=metrics.mean(own.test for own in first) if self.keeps_best else last.test,
            mean_loss=metrics.mean(own.test_loss for own in first if own.test_loss is not None),
            mean_synced=metrics.mean(
                own.test_synced for own in first if own.test_synced is not None
            ),
            best=metrics.best(tests, about),
            best_of_last_ten=metrics.best(tests[-10:], about),
            best_by_valid=self._best_by_valid(),
            clients=clients,
            training=self._costs_of_training() if self.groups or drawn_of else None,
            drawn_of=drawn_of,
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

    def _clients_of(self, last: Evaluation) -> dict[ClientId, ClientResult]:
        """Return the figures of each client after the last round."""
        synced, costs = self._synced(), self._costs()
        return {
            i: ClientResult(
                **vars(scores),
                test_synced=synced.get(i),
                **vars(costs[i]),
                group=self.groups.get(i),
            )
            for i, scores in last.clients.items()
            if i in costs  # one that was scored before a resumption may not be there now
        }

    def _clients_kept(self) -> dict[ClientId, ClientResult]:
        """Return the figures of the model that each client has kept. What is kept is synchronised
        no more.
        """
        self.recalled, costs = self._recalled(), self._costs()
        return {
            i: ClientResult(
                **vars(scores), test_synced=scores.test, kept_round=round, **vars(costs[i])
            )
            for i, (round, scores) in self.recalled.items()
            if i in costs
        }

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
        """Return what each client sends, receives, trains and stores."""
        remembered, layouts = self.engine.state_bytes(), self.prepared.site.layouts
        return {
            i: Costs(
                **self._size(layouts[i]),
                bytes_up=self.progress["up"].get(i, 0),
                bytes_down=self.progress["down"].get(i, 0),
                state_bytes=remembered.get(i, 0) if self.method.total_iterations else 0,
                generalists=layouts[i].generalists,
                specialists=layouts[i].specialists,
            )
            for i in self.federation.everyone
        }

    def _costs_of_training(self) -> dict[ClientId, Costs]:
        """Return the costs of those that train, where not all of them are scored."""
        costs = self._costs()
        return {i: costs[i] for i in self.clients}

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
        own = dict(
            dict.fromkeys(self.recalled, Tensors())
            if self.keeps_best
            else self._personal(self.scored)
        )
        scored = set(self.scored)
        others = [i for i in self.clients if i not in scored]
        if self.engine.distant and not self.groups and others:  # every device keeps its own
            own |= self._personal(others)
        ask = Ask(self.method.keep, own, empty_reply)
        self.reporter.asking(ask.name, len(own))
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
        round = kept_round(client)
        if round is None:  # no model was kept: load the current one
            client.load(self.method.loadable(client, tensors))
        else:
            recall(client)
        origin = artifact.Origin(
            self.recipe.method["name"],
            self.recipe.name,
            self.round if round is None else round,
            self.recipe.seed,
        )
        self.problem.keep(folder, client, self.prepared.site.layouts[client.id], origin)

    def _look_at_routing(self) -> None:
        """Write `routing.json`: what every client's router does with the beginnings of all test
        texts, which are all on this machine.
        """
        if self.recipe.samples and (found := self.problem.look(self._owners())) is not None:
            text = json.dumps(found.to_json(), ensure_ascii=False)
            write_atomically(self.folder / ROUTING, text.encode())
