"""How the clients of a run score: evaluations, points of curves, and the copies that clients keep
of what was best.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from coterie.core import metrics
from coterie.core.errors import ClientError, Divergence
from coterie.core.protocol import Ask, ClientId, Replies, ReplySpec, State, drive
from coterie.core.result import (
    Choices,
    Evaluation,
    Scores,
)
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, nbytes
from coterie.runs.base import ExecutionBase
from coterie.runs.metrics import METRICS


@dataclass
class ScoredExecution(ExecutionBase):
    """A run's scores; see `Execution`."""

    def _personal(self, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return what each of these clients needs beyond its own state to have its personal model;
        of one that keeps none: all of it.
        """
        if self._with_models:
            own = self.method.personal(self.server, clients)
            never = set(self._absent())
            absent = tuple(i for i in clients if i in never)
            synchronised = self.method.download(self.server, absent) if absent else {}
            return {i: own[i] or synchronised.get(i, {}) for i in own}
        found, up, down = self.adapt(clients)
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

    @property
    def keeps_best(self) -> bool:
        """Whether a client's personal model is that of the round that was best on its validation
        set, and not that of the last one.
        """
        return self.recipe.keep == "best"

    def _evaluate(self) -> None:
        self.profile.enter("evaluation")
        self.reporter.evaluating(self.round)
        started = self.round or not self.method.rounds
        tensors = self._personal(self.scored) if started else self._untrained()
        task = self.method.score_and_keep if self.keeps_best else self.method.score
        scores = self._ask(task, tensors, self._form("valid", "test", "choices"))
        found = {i: self.metric.scores(score) for i, score in scores.items()}
        for i, values in found.items():
            self._write("score", self.round, self.iteration, i, values)
        members = {group: [i for i in of if i in found] for group, of in self.evaluated.items()}
        if silent := [group for group, of in members.items() if not of]:
            raise (ClientError if self.engine.distant else Divergence)(
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

    def _untrained(self) -> Mapping[ClientId, Tensors]:
        """As `_personal`, before the first round: nobody has anything yet, and of a pool nobody
        could predict.
        """
        tensors = self._personal(self.scored)
        if not self._with_models:
            return tensors
        start = self.method.download(self.server, self.scored)
        return {i: own or start.get(i, {}) for i, own in tensors.items()}

    def _recalled(self) -> dict[ClientId, tuple[int, Scores]]:
        """Have each client take the model that it kept; return its round and scores. Clients that
        cannot be reached for it are not in the result.
        """
        form = self._form("valid", "test")
        known = {evaluation.round: evaluation.clients for evaluation in self.evaluations}
        scored = [i for i in self.scored if any(i in of for of in known.values())]
        replies = self._ask(
            self.method.recall,
            dict.fromkeys(scored, Tensors()),
            lambda sent: {**form(sent), "round": torch.tensor(self.round)},
        )
        recalled = {}
        for i, reply in replies.items():
            round = int(reply["round"])
            then = known.get(round, {}).get(i)
            found = self.metric.scores(reply)
            scores = Scores(
                valid=found["valid"],
                test=found["test"],
                valid_loss=found["valid_loss"],
                test_loss=found["test_loss"],
            )
            if then is not None:
                scores = replace(scores, gate_accuracy=then.gate_accuracy, experts=then.experts)
            recalled[i] = round, scores
        return recalled

    def _add_to_curve(self) -> None:
        """Score a part of each test set: a point of the curves, which says how training goes, and
        is no part of the figures.

        Clients elsewhere are not asked: each exchange with them takes seconds, and tells something
        of their data.
        """
        if self.recipe.curve_every is None or self.engine.distant:
            return
        self.profile.enter("evaluation")
        tensors = self._personal(self.scored) if self.round else self._untrained()
        states = self.engine.states()
        found = {
            i: self._of_part(i, states.get(i, {}), tensors[i]) for i in self.scored if i in tensors
        }
        means = {
            group: metrics.mean(found[i] for i in of if i in found)
            for group, of in self.evaluated.items()
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
        here = tuple(i for i in self.scored if i in own)
        down = {} if self.groups else self.method.download(self.server, here)
        if not any(down.values()):
            return {i: scores.test for i, scores in own.items()}
        scores = self._ask(self.method.score_test, down, self._form("test"))
        return {i: self.metric.of(score["test"]) for i, score in scores.items()}
