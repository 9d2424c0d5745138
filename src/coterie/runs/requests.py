"""The state of a run between two rounds, and its requests to clients: who answers, which replies
are valid, and logging.
"""

import time
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from coterie.client.blueprint import Metrics
from coterie.core.callback import Callback
from coterie.core.errors import ClientError, Divergence, SpoiltSum, TensorError
from coterie.core.metrics import check_scores
from coterie.core.protocol import Ask, ClientId, Replies, ReplySpec
from coterie.core.result import Evaluation
from coterie.core.tensors import Named, Tensors, nbytes, under
from coterie.engines.engine import Engine, Listener
from coterie.methods import Method
from coterie.runs.backends import Backend, computing_threads
from coterie.runs.folder.metrics import METRICS, MetricsFile
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import evaluated


class RunState:
    """The state of a run between two rounds."""

    def __init__(self, prepared: Prepared) -> None:
        self.recipe: Recipe = prepared.recipe
        self.method: Method = prepared.method
        self.take_in(prepared)
        self.round = 0  # rounds done
        present = self.recipe.present(self.clients, 0)
        self.server: Tensors = self.method.init(prepared.blueprint, present)
        self.evaluations: list[Evaluation] = []
        self.points: list[Evaluation] = []
        # as JSON: bytes by client, lost replies, rounds taken part in, seconds, the privacy spent
        counts: dict[str, Any] = {name: {} for name in ("up", "down", "lost", "took_part")}
        self.progress = counts | {"seconds": 0.0, "position": 0}
        if not self.method.dynamic_membership:
            self.progress["clients"] = list(self.federation.everyone)

    def take_in(self, prepared: Prepared) -> None:
        """Set participants and scored clients, at the start and when a client joins."""
        self.prepared, self.clients = prepared, prepared.clients
        self.steps = prepared.iterations  # of a round
        self.federation = prepared.problem.federation
        unseen = self.federation.unseen.items()
        self.groups = {i: group for group, members in unseen for i in members}
        self.evaluated = evaluated(self.federation, self.recipe.evaluate_clients, self.recipe.seed)
        self.scored = tuple(i for group in self.evaluated.values() for i in group)

    @property
    def iteration(self) -> int:
        """The number of local iterations done, see `Prepared.iterations`."""
        return round(self.round * self.steps)

    @property
    def keeps_models(self) -> bool:
        """Whether scored clients keep models of their own between rounds."""
        return not (self.groups or self.recipe.training.stateless or self.method.stateless)

    def count(self, direction: str, client: ClientId, message: Named) -> None:
        """Add the bytes that a client sent (`up`) or received (`down`), and those of each part."""
        of_parts = {f"{direction}/{part}": under(part, message) for part in self.method.methods}
        for key, named in {direction: message, **of_parts}.items():
            counts = self.progress.setdefault(key, {})
            counts[client] = counts.get(client, 0) + nbytes(named)

    def absent(self, clients: Sequence[ClientId]) -> Sequence[ClientId]:
        """Return those clients that have not taken part yet and have no model of their own."""
        kept = self.keeps_models or self.method.stateful  # of parts, some may leave no model
        if not self.round or self.method.centralized or not kept:
            return ()
        return tuple(i for i in clients if i not in self.progress["took_part"])


AGAIN_S = 10.0  # seconds until missing clients are asked again, where a quorum is waited for


class Requests(Listener):
    """The requests of a run to its clients; owns the engine and listens to it."""

    def __init__(self, state: RunState, backend: Backend, folder: Path, reporter: Callback) -> None:
        self.state, self.folder, self.reporter = state, folder, reporter
        self.metrics: MetricsFile | None = None  # open while the run continues
        self.answered: set[ClientId] = set()  # in this round
        self.threads = computing_threads(state.prepared)
        self.engine: Engine = backend.engine(state.prepared, folder, self)

    def ask(
        self, task: Callable[..., Tensors], to: Mapping[ClientId, Tensors], reply_spec: ReplySpec
    ) -> Replies:
        """Ask clients outside a round; return their replies."""
        return self.answer(Ask(task, to, reply_spec), -1)  # no exchange of a round has phase -1

    def answer(self, ask: Ask, phase: int) -> Replies:
        """Return the valid replies of the clients, in the order asked. Raises ClientError, or
        Divergence if all clients are on this machine, if fewer than the quorum answered.
        """
        replies: dict[ClientId, Tensors] = {}
        quorum, method, pending = self.state.recipe.quorum, self.state.method, ask
        scoring = (method.score, method.score_test, method.score_and_keep, method.recall)
        needed = min(quorum.min_clients, len(ask.to))
        self.reporter.asking(ask.name, len(ask.to))
        while True:
            for i, reply in self.engine.answer(pending, self.state.round, phase).items():
                self.answered.add(i)
                try:
                    ask.check(i, reply)
                    if ask.task in scoring:
                        check_scores(reply)
                    replies[i] = reply
                except TensorError as error:
                    self.lost(i, ask.name, error.problem)
            if len(replies) >= needed:
                return {i: replies[i] for i in ask.to if i in replies}
            if not self.engine.distant or quorum.otherwise == "stop":
                break
            back = self._awaited(ask.to.keys() - replies.keys())
            pending = replace(ask, to={i: tensors for i, tensors in ask.to.items() if i in back})
        # on this machine only values that are not finite make a reply unfit
        failure = SpoiltSum if self.engine.spoilt else ClientError
        raise (failure if self.engine.distant else Divergence)(
            f"round {self.state.round + 1}, {ask.name}: {len(replies)} of {len(ask.to)} clients "
            f"answered, quorum.min_clients is {needed}",
            f"{self.folder / METRICS} says why, in lines of kind `lost`. When they are back, "
            f"continue from the last checkpoint with --resume.",
        )

    def _awaited(self, clients: Set[ClientId]) -> Set[ClientId]:
        """Wait until some of these clients can be reached, and return them."""
        while True:
            time.sleep(AGAIN_S)
            present = self.engine.present()
            if back := clients if present is None else clients & present:
                return back

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        lost = self.state.progress["lost"]
        lost[client] = lost.get(client, 0) + 1
        # client and task stand beside the reason already
        for beginning in (f"reply of client {client!r}", f" to {task}", ": "):
            reason = reason.removeprefix(beginning)
        self._log("lost", client, {"task": task, "reason": reason}, reason)

    def noted(self, client: ClientId, note: str) -> None:
        self._log("note", client, {"note": note}, note)

    def _log(self, kind: str, client: ClientId, values: Mapping[str, str], warning: str) -> None:
        self.write(kind, client, values, ahead=1)
        self.reporter.warning(self.state.round, client, warning)

    def write(
        self, kind: str, client: ClientId, values: Mapping[str, Any], ahead: int = 0, steps: int = 0
    ) -> None:
        """Write a line about a client ("": none) to metrics.jsonl, if open, and report it."""
        if self.metrics is not None:
            round = self.state.round + ahead
            self.metrics.write(kind, round, self.state.iteration + steps, client, values)
            self.reporter.recorded(kind, round, client, values)

    def measured(self, client: ClientId, metrics: Metrics) -> None:
        if "tokens" not in metrics:
            self.reporter.answered(client)
            return
        if self.state.round % self.state.recipe.metrics_every == 0:
            self.write("train", client, metrics, 1, round(self.state.steps))
        self.reporter.client(self.state.round, client, metrics)
