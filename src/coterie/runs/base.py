"""The requests of a run to its clients: who answered, what is accepted, what is logged."""

import time
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from coterie.aggregation.accountant import Accountant
from coterie.aggregation.dpsgd import ExampleAccountant
from coterie.aggregation.privacy import Privacy
from coterie.client.interfaces import Metrics
from coterie.core.callback import Callback
from coterie.core.errors import ClientError, Divergence, SpoiltSum, TensorError
from coterie.core.metrics import check_scores
from coterie.core.profiling import Profile
from coterie.core.protocol import Ask, ClientId, Replies, ReplySpec
from coterie.core.result import Evaluation, Json, Scores
from coterie.core.tensors import Tensors
from coterie.core.threads import Watch
from coterie.engines import Engine, Listener
from coterie.models.layout import Layout
from coterie.runs.backends import Backend, LocalBackend, computing_threads
from coterie.runs.checkpoints import Checkpoints
from coterie.runs.files import AUDIT
from coterie.runs.metrics import METRICS, MetricsFile, Released
from coterie.runs.observations import Observations
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes.sampling import evaluated

SAMPLED_S, WATCHED_S = (
    1.0,
    5.0,
)  # seconds between looks at who wants a core, and that make a judgement
AGAIN_S = 10.0  # seconds until clients are asked again, where a quorum is waited for


@dataclass
class ExecutionBase(Listener):
    """The requests of a run to its clients, and the files that it writes; see `Execution`."""

    prepared: Prepared
    folder: Path
    reporter: Callback
    title: str
    backend: Backend = field(default_factory=LocalBackend)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        self.recipe, self.method = self.prepared.recipe, self.prepared.method
        self.problem, self.metric = self.prepared.problem, self.prepared.problem.metric
        self._take_in(self.prepared)
        self.threads = computing_threads(self.prepared)
        self.metrics: MetricsFile | None = None
        self.started = 0.0  # by the monotonic clock
        decisive = self.recipe.model_dump(
            mode="json",
            exclude={"compare_with", "samples", "memory", "curve_every", "curve_windows", "auto"},
        )
        if decisive["keep"] == "last":  # as in checkpoints of before there was a choice
            del decisive["keep"]
        decisive |= {"common_expert": known} if (known := self.problem.fingerprint) else {}
        self.checkpoints = Checkpoints(self.folder / "checkpoints", decisive)
        self._sizes: dict[Layout, dict[str, int]] = {}
        self.answered: set[ClientId] = set()  # in this round
        self.round, self.server = (
            0,
            self.method.init(self.prepared.blueprint, self.recipe.present(self.clients, 0)),
        )
        self.evaluations: list[Evaluation] = []
        self.points: list[Evaluation] = []  # of the curve
        # of models that clients kept: round and scores, known at the end
        self.recalled: dict[ClientId, tuple[int, Scores]] = {}
        self.progress: Json = {
            "up": {},  # bytes, of those who sent any
            "down": {},
            "seconds": 0.0,
            "position": 0,
            "lost": {},
            "took_part": {},
        }
        if not self.method.dynamic_membership:
            self.progress["clients"] = list(self.federation.everyone)
        privacy = self.recipe.privacy
        self.accountant = None if privacy is None else self._accountant(privacy)
        self.released = Released(self.folder / "released.jsonl")
        if privacy is not None:
            self.progress |= {"clip": privacy.clip, "spent": []}
        audit = self.recipe.audit
        self.seen = None if audit is None else Observations(self.folder / AUDIT, audit.exchanges)
        self.engine: Engine = self.backend.engine(self.prepared, self.folder, self)
        self.cores, self.sampled = Watch(), 0.0
        self.left_out = range(0)  # rounds that were lost when the run was resumed

    def _accountant(self, privacy: Privacy) -> Accountant | ExampleAccountant:
        """Return what counts what clients, or their examples, spend."""
        if privacy.unit == "client":
            return Accountant(privacy, len(self.clients), experiment=not self.backend.devices)
        largest = max(data.train.windows for data in self.federation.clients.values())
        return ExampleAccountant(
            privacy, largest, self.recipe.training.batch_size, experiment=not self.backend.devices
        )

    def _take_in(self, prepared: Prepared) -> None:
        """Who takes part, and who is scored."""
        self.prepared, self.clients, self.federation = (
            prepared,
            prepared.clients,
            prepared.problem.federation,
        )
        self.groups = {
            i: group for group, members in self.federation.unseen.items() for i in members
        }
        self.evaluated = evaluated(self.federation, self.recipe.evaluate_clients, self.recipe.seed)
        self.scored = tuple(i for group in self.evaluated.values() for i in group)

    @property
    def iteration(self) -> int:
        return self.round * self.method.local_steps

    def _check(self, ask: Ask, client: ClientId, reply: Tensors) -> None:
        """Refuse an answer that is not of the form asked for, and scores that cannot be all the
        same. Raises TensorError.
        """
        ask.check(client, reply)
        own = self.method
        if ask.task in (own.score, own.score_test, own.score_and_keep, own.recall):
            check_scores(reply)

    def _answer(self, ask: Ask, phase: int) -> Replies:
        """Return what the clients answered of which the server believes something, in the order
        asked.

        Raises:
            ClientError: Fewer answered than the recipe wants.
        """
        believed: dict[ClientId, Tensors] = {}
        quorum = self.recipe.quorum
        needed, asked = min(quorum.min_clients, len(ask.to)), ask
        self.reporter.asking(ask.name, len(ask.to))
        while True:
            for i, reply in self.engine.answer(asked, self.round, phase).items():
                self.answered.add(i)
                try:
                    self._check(ask, i, reply)
                    believed[i] = reply
                except TensorError as error:
                    self.lost(i, ask.name, error.problem)
            if len(believed) >= needed:
                return {i: believed[i] for i in ask.to if i in believed}
            if not self.engine.distant or quorum.otherwise == "stop":
                break
            back = self._awaited(ask.to.keys() - believed.keys())
            asked = replace(ask, to={i: tensors for i, tensors in ask.to.items() if i in back})
        # on this machine only values that are not finite make a reply unfit
        failure = SpoiltSum if self.engine.spoilt else ClientError
        raise (failure if self.engine.distant else Divergence)(
            f"round {self.round + 1}, {ask.name}: {len(believed)} of {len(ask.to)} clients "
            f"answered, quorum.min_clients is {needed}",
            f"{self.folder / METRICS} says why, in lines of kind `lost`. When they are back, "
            f"continue from the last checkpoint with --resume.",
        )

    def _awaited(self, clients: Set[ClientId]) -> Set[ClientId]:
        """Those of the clients that are there after a while; somebody is."""
        while True:
            time.sleep(AGAIN_S)
            present = self.engine.present()
            if back := clients if present is None else clients & present:
                return back

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        self.progress["lost"][client] = self.progress["lost"].get(client, 0) + 1
        why = (
            reason.removeprefix(f"reply of client {client!r}")
            .removeprefix(f" to {task}")
            .removeprefix(": ")
        )  # said beside it
        self._say("lost", client, {"task": task, "reason": why})

    def noted(self, client: ClientId, note: str) -> None:
        self._say("note", client, {"note": note})

    def _say(self, kind: str, client: ClientId, said: Mapping[str, str]) -> None:
        """Write a line of metrics.jsonl, and warn of it."""
        self._write(kind, self.round + 1, self.iteration, client, said)
        self.reporter.warning(self.round, client, said.get("reason") or said["note"])

    def _write(
        self, kind: str, round: int, iteration: int, client: ClientId, values: Mapping[str, Any]
    ) -> None:
        """Write a line of metrics.jsonl, while that is open, and tell whoever looks on."""
        if self.metrics is not None:
            self.metrics.write(kind, round, iteration, client, values)
            self.reporter.recorded(kind, round, client, values)

    def _look_at_cores(self) -> None:
        """Tell the reporter, now and then, how many others compute while this process lacks
        cores, if it is this one that computes.
        """
        if self.engine.distant or self.problem.device.type != "cpu":
            return
        now = time.monotonic()
        if now - self.sampled >= SAMPLED_S:
            self.sampled = now
            self.cores.sample(self.threads)
        if self.cores.seconds >= WATCHED_S:
            self.reporter.cores(self.cores.look().lacking(self.threads))

    def measured(self, client: ClientId, metrics: Metrics) -> None:
        self._look_at_cores()
        if "tokens" not in metrics:
            self.reporter.answered(client)
            return
        if self.round % self.recipe.metrics_every == 0:
            self._write(
                "train", self.round + 1, self.iteration + self.method.local_steps, client, metrics
            )
        self.reporter.client(self.round, client, metrics)

    def _ask(
        self, task: Callable[..., Tensors], to: Mapping[ClientId, Tensors], reply_spec: ReplySpec
    ) -> Replies:
        """Return a question outside of the rounds. Its phase is -1: no round has that."""
        return self._answer(Ask(task, to, reply_spec), -1)
