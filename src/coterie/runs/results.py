"""Results of a run: scores, costs, personal models, `result.json`."""

import json
import platform
from collections.abc import Mapping

import numpy as np
import torch

from coterie.aggregation.collaboration import weights_error
from coterie.core import devices, metrics
from coterie.core.files import write_atomically
from coterie.core.names import encoded
from coterie.core.protocol import Ask, ClientId, empty_reply
from coterie.core.result import (
    ROUTING,
    BestByValid,
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
from coterie.core.tensors import Tensors
from coterie.core.version import __version__
from coterie.data.examples import ExampleSplit
from coterie.models.layout import Layout
from coterie.runs.privacy import PrivacySpending
from coterie.runs.requests import Requests, RunState
from coterie.runs.scoring import CURVE_ROWS, Scorer


class ResultWriter:
    """Builds the result of a run, and has clients keep their personal models."""

    def __init__(
        self, state: RunState, requests: Requests, scorer: Scorer, spending: PrivacySpending | None
    ) -> None:
        self.state, self.requests, self.scorer, self.spending = state, requests, scorer, spending
        self._recalled: dict[ClientId, tuple[int, Scores]] = {}
        self._sizes: dict[Layout, dict[str, int]] = {}

    def result(self, seconds: float) -> Result:
        """Return the result of the run, which took `seconds`."""
        state, progress = self.state, self.state.progress
        recipe, problem, last = state.recipe, state.prepared.problem, state.evaluations[-1]
        metric, costs = problem.metric.about, self._costs()
        tests = [evaluation.test for evaluation in state.evaluations]
        clients = self._clients(last, costs)
        first = headline(clients, last.groups).values()
        everyone = len(state.groups or state.clients)
        drawn_of = everyone if len(state.scored) < everyone else None
        best = self.scorer.keeps_best
        return Result(
            method=recipe.method["name"],
            recipe=recipe.name,
            seed=recipe.seed,
            rounds=state.round,
            metric=metric,
            mean=metrics.mean(c.test for c in first) if best else last.test,
            mean_loss=metrics.mean(c.test_loss for c in first if c.test_loss is not None),
            mean_synced=metrics.mean(c.test_synced for c in first if c.test_synced is not None),
            best=metrics.best(tests, metric),
            best_of_last_ten=metrics.best(tests[-10:], metric),
            best_by_valid=self._best_by_valid(),
            clients=clients,
            training={i: costs[i] for i in state.clients} if state.groups or drawn_of else None,
            drawn_of=drawn_of,
            groups=last.groups,
            labels={i: list(classes) for i, classes in state.federation.labels.items()} or None,
            label_counts=self._label_counts(),
            anchors=list(state.federation.anchors) or None,
            once_bytes=problem.once_bytes,
            clusters=state.federation.clusters,
            weights_error=self._weights_error(last),
            evaluations=tuple(state.evaluations),
            curve=Curve(CURVE_ROWS, tuple(state.points)) if state.points else None,
            lost=progress["lost"],
            rounds_taken_part={i: progress["took_part"].get(i, 0) for i in state.clients},
            never_took_part=list(state.absent(state.clients)),
            privacy=None if self.spending is None else self.spending.accountant.summary(),
            wall_s=seconds,
            part_of=progress.get("part_of"),
            peak_memory_bytes=devices.peak_memory(),
            versions=Versions(__version__, torch.__version__, platform.python_version()),
            machine=Machine(
                # on a server whose clients are on devices the model has no memory
                device="elsewhere" if problem.device.type == "meta" else str(problem.device),
                dtype=str(problem.dtype).removeprefix("torch."),
                threads=torch.get_num_threads(),
            ),
        )

    def _clients(
        self, last: Evaluation, costs: Mapping[ClientId, Costs]
    ) -> dict[ClientId, ClientResult]:
        """Return each client's figures, of its last model or of the one that it kept."""
        figures: dict[ClientId, tuple[Scores, float | None, int | None]]
        if self.scorer.keeps_best:
            self._recalled = self.scorer.recalled()
            figures = {i: (of, of.test, round) for i, (round, of) in self._recalled.items()}
        else:
            synced = self.scorer.synced()
            figures = {i: (of, synced.get(i), None) for i, of in last.clients.items()}
        return {
            i: ClientResult(
                **vars(scores),
                test_synced=test_synced,
                kept_round=round,
                **vars(costs[i]),
                group=self.state.groups.get(i),
            )
            for i, (scores, test_synced, round) in figures.items()
            if i in costs  # one that was scored before a resumption may be missing now
        }

    def _best_by_valid(self) -> BestByValid:
        scored = [(e.valid, e) for e in self.state.evaluations if e.valid is not None]
        valid = metrics.best((v for v, _ in scored), self.state.prepared.problem.metric.about)
        best = next(evaluation for value, evaluation in scored if value == valid)
        return BestByValid(best.round, valid, best.test)

    def _label_counts(self) -> dict[ClientId, list[int]] | None:
        """Return clients' examples per class (unseen: of tests); None if nobody is unseen."""
        groups, counts = self.state.groups, {}
        if not groups:
            return None
        for i, data in self.state.federation.everyone.items():
            split = data.test if i in groups else data.train
            if isinstance(split, ExampleSplit):
                counts[i] = np.bincount(split.labels[split.rows], minlength=split.classes).tolist()
        return counts or None

    def _weights_error(self, evaluated: Evaluation) -> float | None:
        clusters = self.state.federation.clusters
        if clusters is None or evaluated.weights is None:
            return None
        numbers = [clusters[i] for i in self.state.clients]
        return weights_error(evaluated.weights, numbers, self.state.method.row_stochastic)

    def _costs(self) -> dict[ClientId, Costs]:
        """Return what each client sends, receives, trains and stores."""
        state, progress = self.state, self.state.progress
        state_bytes, layouts = self.requests.engine.state_bytes(), state.prepared.site.layouts
        return {
            i: Costs(
                **self._size(layouts[i]),
                bytes_up=progress["up"].get(i, 0),
                bytes_down=progress["down"].get(i, 0),
                state_bytes=state_bytes.get(i, 0) if state.method.total_iterations else 0,
                generalists=layouts[i].generalists,
                specialists=layouts[i].specialists,
            )
            for i in state.federation.everyone
        }

    def _size(self, layout: Layout) -> dict[str, int]:
        """Return parameters and work of one prediction; a model is built once per layout."""
        problem, trained = self.state.prepared.problem, self.state.method.total_iterations > 0
        if layout not in self._sizes:
            models = [problem.trainable(one) for one in layout.models]
            self._sizes[layout] = {
                "trainable_parameters": sum(m.trainable_parameters for m in models) * trained,
                "active_parameters": sum(m.active_parameters for m in models) * trained,
                "flops_per_token": sum(problem.flops(one, trained) for one in layout.models),
            }
        return self._sizes[layout]

    def keep_personal_models(self) -> None:
        """Have every scored client write its personal model; on devices, every client."""
        state, engine = self.state, self.requests.engine
        received = dict.fromkeys(self._recalled, Tensors())
        if not self.scorer.keeps_best:
            received = dict(self.scorer.personal(state.scored))
        scored = set(state.scored)
        others = [i for i in state.clients if i not in scored]
        if engine.distant and not state.groups and others:
            received |= self.scorer.personal(others)
        ask = Ask(state.method.keep, received, empty_reply)
        self.requests.reporter.asking(ask.name, len(received))
        clients, keep, last = self.requests.folder / "clients", state.prepared.keep, state.round
        engine.keep(ask, last, lambda one, kept: keep(one, kept, last, clients / encoded(one.id)))

    def write_routing(self) -> None:
        """Write `routing.json`, see `LearningProblem.look`."""
        state = self.state
        if not state.recipe.samples or state.method.methods:
            return
        states, scored, site = self.requests.engine.states(), set(state.scored), state.prepared.site
        clients = [i for i in states if i in scored]
        routing = state.prepared.problem.look(clients, lambda i: site.client(i, dict(states[i])))
        if routing is not None:
            text = json.dumps(routing.to_json(), ensure_ascii=False)
            write_atomically(self.requests.folder / ROUTING, text.encode())
