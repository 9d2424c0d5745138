"""Scores of a run's clients: evaluations, points of curves, and models of their best rounds."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from coterie.core import metrics
from coterie.core.errors import ClientError, Divergence
from coterie.core.protocol import Ask, ClientId, Replies, ReplySpec, State, drive
from coterie.core.result import Choices, Evaluation, Scores
from coterie.core.tensor_names import numbers_of_experts
from coterie.core.tensors import Tensors, nbytes
from coterie.runs.folder.metrics import METRICS
from coterie.runs.requests import Requests, RunState

CURVE_ROWS = 8  # windows of text, or examples, of each client for a point of a curve
Values = Mapping[ClientId, Mapping[str, float]]  # by split, in the metric of the problem


class Scorer:
    """Scores the clients of a run; adds evaluations and points of curves to its state."""

    def __init__(self, state: RunState, requests: Requests) -> None:
        self.state, self.requests = state, requests

    @property
    def keeps_best(self) -> bool:
        """Whether each client keeps its model of the round with its best validation score."""
        return self.state.recipe.keep == "best"

    def evaluate(self) -> None:
        """Score the personal models of all scored clients on their valid and test sets."""
        state, method = self.state, self.state.method
        self.requests.reporter.evaluating(state.round)
        exchange = method.before_scores(self._to_score(state.round > 0 or not method.rounds))
        received = drive(exchange, lambda ask, phase: self.requests.answer(ask, -1))
        task = method.score_and_keep if self.keeps_best else method.score
        spec = self._spec("valid", "test", "choices", "parts", "weights")
        replies = self.requests.ask(task, received, spec)
        values = {i: state.prepared.problem.metric.scores(reply) for i, reply in replies.items()}
        for i, by_split in values.items():
            self.requests.write("score", i, by_split)
        members = {g: [i for i in group if i in values] for g, group in state.evaluated.items()}
        groups = self._means(members, values)
        means = next(iter(groups.values()))
        matrix = method.collaboration(state.server, state.clients)
        weights = None if matrix is None else [[round(w, 5) for w in r] for r in matrix.tolist()]
        tests = {g: by_split["test"] for g, by_split in groups.items()}
        gated = all("choices" in reply for reply in replies.values())
        clients = {
            i: self._scores(
                reply,
                gate_accuracy=self._choices(replies, [i]).gate_accuracy if gated else None,
                experts=numbers_of_experts(received[i]) if gated else None,
            )
            for i, reply in replies.items()
        }
        evaluation = Evaluation(
            round=state.round,
            iteration=state.iteration,
            **means,
            clients=clients,
            groups=tests if state.groups else None,
            weights=weights,
            choices={g: self._choices(replies, of) for g, of in members.items()} if gated else None,
        )
        state.evaluations.append(evaluation)
        self.requests.reporter.evaluated(state.round, means)

    def _scores(self, reply: Tensors, **gate: Any) -> Scores:
        values: dict[str, Any] = self.state.prepared.problem.metric.scores(reply)
        parts, predictions = self._parts(reply), int(reply["test"][1])
        return Scores(**values, **gate, parts=parts, predictions=predictions)

    def turned(self) -> bool:
        """Return whether no validation score or part's was better in `patience` evaluations."""
        patience, series = self.state.recipe.patience, dict[tuple[ClientId, str], list[float]]()
        if patience is None or self.state.round == 0:
            return False
        for evaluation in self.state.evaluations:
            for i, scores in evaluation.clients.items():
                for name, part in (scores.parts or {"": scores}).items():
                    valid = math.nan if part.valid is None else part.valid
                    series.setdefault((i, name), []).append(valid)
        metric = self.state.prepared.problem.metric.about
        if any(len(values) <= patience for values in series.values()):
            return False
        parts_of = ((of[-patience:], of[:-patience]) for of in series.values())
        bests = ([metrics.best(part, metric) for part in parts] for parts in parts_of)
        return not any(metrics.better(now, before, metric) for now, before in bests)

    def _means(
        self, members: Mapping[str, Sequence[ClientId]], values: Values
    ) -> dict[str, dict[str, float]]:
        """Return the means of each group by split. Raises ClientError or Divergence."""
        if silent := [group for group, of in members.items() if not of]:
            raise (ClientError if self.requests.engine.distant else Divergence)(
                f"after round {self.state.round}: nobody of {silent[0] or 'the clients'} could be "
                f"scored",
                f"See {self.requests.folder / METRICS}.",
            )
        return {
            g: {split: metrics.mean(values[i][split] for i in of) for split in ("valid", "test")}
            for g, of in members.items()
        }

    def _parts(self, reply: Tensors) -> dict[str, Scores] | None:
        """Return the scores and weights of the parts of a client's model, if it has any."""
        if "parts" not in reply:
            return None
        metric, splits = self.state.prepared.problem.metric, ("valid", "test")
        by_part = zip(self.state.method.methods, reply["weights"], reply["parts"], strict=True)
        scores = {}
        for name, weight, sums in by_part:
            of = metric.scores(dict(zip(splits[-len(sums) :], sums, strict=True)))
            scores[name] = Scores.from_json({"weight": float(weight)} | of)
        return scores

    def _choices(self, replies: Replies, clients: Iterable[ClientId]) -> Choices:
        """Return the experts chosen by clients' gates, next to those of the anchors' classes."""
        federation = self.state.federation
        anchors = [federation.labels[anchor] for anchor in federation.anchors]
        return metrics.choices([replies[i]["choices"] for i in clients], anchors)

    def _to_score(self, trained: bool) -> Mapping[ClientId, Tensors]:
        """Return what each scored client must receive to be scored, even before training."""
        state = self.state
        received = self.personal(state.scored)
        if trained or not state.keeps_models:
            return received
        start = state.method.download(state.server, state.scored)
        return {i: tensors or start.get(i, {}) for i, tensors in received.items()}

    def personal(self, clients: Sequence[ClientId]) -> Mapping[ClientId, Tensors]:
        """Return what each client needs besides its state for its personal model."""
        state = self.state
        if state.keeps_models:
            received = state.method.personal(state.server, clients)
        else:
            received, up, down = self.adapt(clients)
            for i in state.groups.keys() & received.keys():
                # set, not added: a client is counted once, however often it is scored
                state.progress["up"][i], state.progress["down"][i] = up[i], down[i]
        absent = state.method.for_absent(state.server, state.absent(clients))
        return {i: {**absent.get(i, {}), **of} for i, of in received.items()}

    def adapt(
        self, clients: Sequence[ClientId]
    ) -> tuple[Mapping[ClientId, Tensors], dict[ClientId, int], dict[ClientId, int]]:
        """Give a personal model to clients without one, by the method's exchange. Return what each
        receives, and the bytes that each sends and receives for it.
        """
        up, down = (dict.fromkeys(clients, 0) for _ in range(2))

        def exchange(ask: Ask, phase: int) -> Replies:
            replies = self.requests.answer(ask, -2 - phase)  # no phases of a round or of `ask`
            for sizes, messages in ((down, ask.to), (up, replies)):
                sizes.update({i: sizes[i] + nbytes(tensors) for i, tensors in messages.items()})
            return replies

        received = drive(self.state.method.adapt(self.state.server, clients), exchange)
        return received, up, {i: down[i] + nbytes(tensors) for i, tensors in received.items()}

    def recalled(self) -> dict[ClientId, tuple[int, Scores]]:
        """Have each client restore the model that it kept; return its round and scores."""
        state = self.state
        spec = self._spec("valid", "test", "parts", "weights")
        by_round = {evaluation.round: evaluation.clients for evaluation in state.evaluations}
        scored = [i for i in state.scored if any(i in of for of in by_round.values())]
        replies = self.requests.ask(
            state.method.recall,
            dict.fromkeys(scored, Tensors()),
            lambda sent: {**spec(sent), "round": torch.tensor(state.round)},
        )
        recalled = {}
        for i, reply in replies.items():
            round = int(reply["round"])
            before = by_round.get(round, {}).get(i)
            gate = {name: getattr(before, name, None) for name in ("gate_accuracy", "experts")}
            recalled[i] = round, self._scores(reply, **gate)
        return recalled

    def synced(self) -> dict[ClientId, float]:
        """Return the test metric of each client after one more synchronisation."""
        state = self.state
        scores = state.evaluations[-1].clients
        scored = tuple(i for i in state.scored if i in scores)
        down = state.method.download(state.server, scored) if state.keeps_models else {}
        absent = state.method.for_absent(state.server, state.absent(scored)) if down else {}
        down = {i: tensors for i, tensors in {**down, **absent}.items() if tensors}
        of, spec = state.prepared.problem.metric.of, self._spec("test")
        replies = self.requests.ask(state.method.score_test, down, spec) if down else {}
        synced = {i: of(reply["test"]) for i, reply in replies.items()}
        return {i: score.test for i, score in scores.items() if i not in down} | synced

    def add_point(self) -> None:
        """Score a part of each test set: a point of the curves, which decides nothing. Clients
        elsewhere are not asked: an exchange takes seconds and reveals something of their data.
        """
        state = self.state
        if state.recipe.curve_every is None or self.requests.engine.distant:
            return
        received, states = self._to_score(state.round > 0), self.requests.engine.states()
        clients = [i for i in state.scored if i in received]
        scores = {i: self._score_part(i, states.get(i, {}), received[i]) for i in clients}
        of_groups = state.evaluated.items()
        means = {g: metrics.mean(scores[i].test for i in of if i in scores) for g, of in of_groups}
        test = next(iter(means.values()))
        done, at, groups = state.round, state.iteration, means if state.groups else None
        point = Evaluation(round=done, iteration=at, test=test, clients=scores, groups=groups)
        state.points.append(point)
        for i, score in scores.items():
            self.requests.write("curve", i, {"test": score.test})
        self.requests.reporter.point(state.round, test, CURVE_ROWS)

    def _score_part(self, id: ClientId, memory: State, received: Tensors) -> Scores:
        """Return a client's scores on a part of its test set, without side effects on it."""
        prepared = self.state.prepared
        client = prepared.site.clients(id, dict(memory))
        with torch.random.fork_rng(devices=[]):
            reply = prepared.method.score_part(client, received, CURVE_ROWS)
            scores = Scores.from_json(prepared.problem.metric.scores(reply))
            return replace(scores, parts=self._parts(reply))

    def _spec(self, *names: str) -> ReplySpec:
        prepared = self.state.prepared
        layout = prepared.site.layouts[self.state.scored[0]]
        scores = prepared.method.score_spec(prepared.problem.scores(layout))
        return lambda sent: {name: tensor for name, tensor in scores.items() if name in names}
