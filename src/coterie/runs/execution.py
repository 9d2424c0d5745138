"""The rounds of one method on one federation, from a checkpoint or from the start, to its
result.
"""

import math
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from uuid import uuid4

import torch

from coterie.aggregation.accountant import Accountant
from coterie.aggregation.dpsgd import ExampleAccountant
from coterie.aggregation.noise import Source, kept_key
from coterie.aggregation.privacy import central
from coterie.core.errors import Refused, SpoiltSum
from coterie.core.files import write_json
from coterie.core.protocol import Ask, ClientId, Replies, derive_seed, drive, trains
from coterie.core.result import RESULT, Evaluation, Result
from coterie.core.tensors import nbytes, to_bytes
from coterie.core.threads import Watch
from coterie.runs.backends import kept
from coterie.runs.checkpoints import Checkpoint
from coterie.runs.evaluate import EvaluatedExecution
from coterie.runs.files import AUDIT, CANARIES, SECRET
from coterie.runs.inputs import RecordedInputs
from coterie.runs.metrics import MetricsFile, check_metrics
from coterie.runs.problems.members import joined


@dataclass
class Execution(EvaluatedExecution):
    """One method on one federation, from a checkpoint or from the start, to its result.

    Args:
        prepared: What `prepare` made.
        folder: The run's folder.
        reporter: Called at the events of the run.
        title: What the reporter calls it.
        backend: Where the clients are.
        profile: Records one round of it, see `execute`.
    """

    def restore(self) -> bool:
        """Go back to the newest checkpoint; whether there was one.

        Raises:
            CheckpointError: It is damaged, or of another recipe.
            Refused: It is of other clients, and the method needs all of them from the start.
        """
        found = self.checkpoints.latest()
        if found is None:
            self._count_released()
            self._leave_out()
            return False
        self.round, self.server, self.progress = found.round, found.server, found.progress
        self.evaluations, self.points = (
            [Evaluation.from_json(own) for own in self.progress.pop(name, ())]
            for name in ("evaluations", "curve")
        )
        if self.accountant is not None:
            self.accountant = replace(self.accountant, runs=self.progress["spent"])
            self._count_released()
        self.engine.restore(found.clients, self.progress.pop("engine", {}))
        self._check_clients(self.progress.get("clients"))
        self._welcome()
        self._leave_out()
        return True

    def _leave_out(self) -> None:
        """Go on with a later round than one in which clients have answered under masks already,
        as they do so once: it is lost.
        """
        begun = self.engine.begun(self.round)
        for _ in begun[
            len(list(self.released.since(self.round))) :
        ]:  # those before them came to an end, and were counted
            self._spend_unused()
        self.left_out = range(self.round, max(begun, default=self.round - 1) + 1)
        self.round = self.left_out.stop

    def _spend_unused(self) -> None:
        """Count an exchange of which a server may have seen the sum, though nothing was made of
        it.
        """
        if isinstance(self.accountant, ExampleAccountant):
            self.accountant.spend(*self._examples(self.clients))
        elif self.accountant is not None:
            self.accountant.spend(len(self.clients), len(self.clients))

    def _count_released(self) -> None:
        """Count what left a server on devices after the checkpoint that it goes back to."""
        for result in self.released.since(self.round):
            if isinstance(self.accountant, ExampleAccountant):
                self.accountant.spend(result["windows"], result["steps"])
            elif self.accountant is not None:
                self.accountant.spend(result["drawn"], result["population"])

    def _check_clients(self, before: Collection[ClientId] | None) -> None:
        """Refuse to continue with other clients than before; None: the method can do so."""
        everyone = self.federation.everyone.keys()
        if before is None or everyone == set(before):
            return
        gone, new = set(before) - everyone, everyone - set(before)
        problem = f"{self.recipe.method['name']} needs the clients that it started with: "
        lacking = [f"{', '.join(sorted(gone))} missing"] if gone else []
        raise Refused(
            problem + "; ".join(lacking + ([f"{', '.join(sorted(new))} new"] if new else [])),
            "Start the devices of the missing clients, and new devices only after the run "
            "has begun."
            if self.engine.distant
            else "Restore the data that the run began with, or choose another --out.",
        )

    def check_metrics(self) -> None:
        """Refuse to continue from a checkpoint whose metrics are lost. Raises CheckpointError."""
        check_metrics(self.folder, self.progress["position"], self.progress.get("metrics"))

    def execute(self) -> Result:
        """Run the rounds that are left; returns their result.

        What is profiled is the second of them, as the first one warms up; else the only one; else
        the scoring of a method without rounds.

        Raises:
            ClientError: A client failed; the last checkpoint can be resumed.
            SaveError: A file could not be written; the last checkpoint can be resumed.
        """
        self.started = time.monotonic() - self.progress["seconds"]
        self.metrics = MetricsFile(self.folder, self.progress["position"], self.iteration)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.cores = Watch()
        self._keep_canaries()
        try:
            self.reporter.opened(self.folder, self.recipe.model_dump(mode="json"))
            self.reporter.begin(
                self.title, self.method.rounds, self.round, self.clients, self.metric.about
            )
            for round in self.left_out:
                self.noted(
                    "the server",
                    f"round {round + 1} is skipped: clients answer an exchange of secure "
                    f"aggregation only once, and this one had already begun",
                )
            if self.round == 0:
                self._add_to_curve()
            if self.keeps_best and not self.evaluations and self.method.rounds:
                self._evaluate()
            recorded = min(self.round + 1, self.method.rounds - 1)
            while self.round < self.method.rounds:
                self.profile.begin(self.round == recorded)
                self._one_round()
            if not self.evaluations or self.evaluations[-1].round != self.round:
                self.profile.begin(True)
                self._evaluate()
                self.profile.end()
            result = self._result()
            self._keep_personal_models()
            self._look_at_routing()
        finally:
            self.profile.leave()
            self.metrics.close()
            self.engine.close()
            torch.set_num_threads(threads)
        write_json(self.folder / RESULT, result.to_json())
        RecordedInputs(self.folder).end()
        self.reporter.end(result)
        return result

    def _keep_canaries(self) -> None:
        """Write down which canaries were planted: for whoever audits the run, and never sent.
        Raises SaveError.
        """
        if (planted := self.prepared.planted) is not None:
            write_json(self.folder / AUDIT / CANARIES, planted.to_json())

    def _one_round(self) -> None:
        rng = torch.Generator().manual_seed(derive_seed(self.recipe.seed, "round", self.round))
        self._welcome()
        self.answered.clear()
        there = self.recipe.present(self.clients, self.round)
        steps = self.method.round(self.method.members(self.server, there), self._active(), rng)
        try:
            self.server = drive(steps, self._exchange)
        except SpoiltSum:
            self._spend_unused()
            self.noted(
                "the server",
                f"round {self.round + 1} is dropped: one client spoilt the sum of the updates; "
                f"until it is found, half of the suspects are left out in turn",
            )
        for i in sorted(self.answered):
            self.progress["took_part"][i] = self.progress["took_part"].get(i, 0) + 1
        if self.round + 1 == self.method.rounds:
            self.server = drive(self.method.finish(self.server, there), self._exchange)
        self.round += 1
        every, between = self.recipe.evaluate_every, self.recipe.curve_every
        if between and (self.round % between == 0 or self.round == self.method.rounds):
            self._add_to_curve()
        if (every and self.round % every == 0) or self.round == self.method.rounds:
            self._evaluate()
        if self.round % self.recipe.checkpoint_every == 0 or self.round == self.method.rounds:
            self.profile.enter("checkpoint")
            position, digest = self.metrics.flush() if self.metrics is not None else (0, None)
            self.progress |= {
                "seconds": time.monotonic() - self.started,
                "position": position,
                "metrics": digest,
            }
            progress = self.progress | {
                "evaluations": [evaluation.to_json() for evaluation in self.evaluations],
                "curve": [point.to_json() for point in self.points],
                "engine": self.engine.memo(),
                "threads": self.threads,
            }
            saved = self.checkpoints.save(
                Checkpoint(self.round, self.server, self.engine.states(), progress)
            )
            self.reporter.checkpoint(self.round, saved)
        self.profile.end()
        self.reporter.round(self.round)

    def _welcome(self) -> None:
        """Take in clients that came after the start, where the method can do with that."""
        for member in self.engine.members():
            if member.client in self.federation.everyone:
                continue
            try:
                self._take_in(joined(self.prepared, member))
            except Refused as error:
                self.noted(member.client, error.problem)

    def _active(self) -> tuple[ClientId, ...]:
        """Who takes part in the round: those drawn that can be reached now, unless so few can
        that the quorum must decide.
        """
        active, present = (
            self.recipe.active(self.federation, self.round, self.secret),
            self.engine.present(),
        )
        if present is None:
            return active
        here = tuple(i for i in active if i in present)
        return here if len(here) >= min(self.recipe.quorum.min_clients, len(active)) else active

    def _exchange(self, ask: Ask, phase: int) -> Replies:
        """One exchange of a round, its tensors counted. The pool is no client: it has no line."""
        self.profile.enter(ask.name)
        answers = self._answer(ask, phase)
        self.profile.enter("aggregation")
        if self.seen is not None and trains(ask.task):
            self.seen.keep(self.round, phase, ask.to, answers)
        replies = self._protected(ask, answers, phase)
        for direction, messages in (("down", ask.to), ("up", replies)):
            counted = self.progress[direction]
            for i in self.clients & messages.keys():
                counted[i] = counted.get(i, 0) + nbytes(messages[i])
        return replies

    def _protected(self, ask: Ask, replies: Replies, phase: int) -> Replies:
        """Return the replies as the method gets them, and what privacy that spends."""
        if self.accountant is None or not trains(ask.task):
            return replies
        if isinstance(self.accountant, ExampleAccountant):
            self._of_examples(self.accountant, ask, phase)
        else:
            replies = self._of_clients(self.accountant, ask, replies, phase)
        self.progress["spent"] = self.accountant.runs
        spent = {
            "epsilon": self.accountant.epsilon(self.accountant.delta),
            "delta": self.accountant.delta,
            "clip": self.progress["clip"],
        }
        self._write(
            "privacy",
            self.round + 1,
            self.iteration,
            "",
            {k: v for k, v in spent.items() if math.isfinite(v)},
        )
        self.reporter.spent(self.round, spent["epsilon"], spent["delta"])
        return replies

    def _of_examples(self, accountant: ExampleAccountant, ask: Ask, phase: int) -> None:
        """Count what privacy of single examples an exchange has spent; on devices also if the
        server goes back to before it.
        """
        windows, steps = self._examples(ask.to)
        accountant.spend(windows, steps)
        if self.backend.devices:  # who is asked again draws other noise
            result = {
                "round": self.round,
                "phase": phase,
                "content": uuid4().hex,
                "windows": windows,
                "steps": steps,
            }
            self.released.add(result, kept(self.round, self.recipe.checkpoint_every))

    def _examples(
        self, clients: Iterable[ClientId]
    ) -> tuple[dict[ClientId, int], dict[ClientId, int]]:
        """How many examples and local iterations in a round clients have."""
        windows = {i: self.federation.clients[i].train.windows for i in clients}
        return windows, {
            i: self.method.steps_of(n, self.recipe.training.batch_size) for i, n in windows.items()
        }

    def _of_clients(
        self, accountant: Accountant, ask: Ask, replies: Replies, phase: int
    ) -> Replies:
        """Return the replies with the server's noise, if that is its business; what privacy of
        whole clients that spends is counted.
        """
        drawn = self.recipe.drawn(self.federation, self.round) or (len(ask.to), len(ask.to))
        source, new = self._noise(ask, replies, phase, drawn)
        if new:
            accountant.spend(*drawn)
        if accountant.privacy.where == "central":
            replies, self.progress["clip"] = central(
                replies, ask.to, accountant.privacy, self.progress["clip"], source
            )
        return replies

    @cached_property
    def secret(self) -> bytes | None:
        """The key of what devices must not be able to predict; None where nothing is kept from
        anybody.

        It stays in the run's folder, so that a run that is resumed draws the same.
        """
        privacy = self.recipe.privacy
        return (
            kept_key(self.folder / SECRET)
            if self.backend.devices and privacy is not None and privacy.where == "central"
            else None
        )

    def _noise(
        self, ask: Ask, replies: Replies, phase: int, drawn: tuple[int, int]
    ) -> tuple[Source, bool]:
        """Return random numbers for the server's noise, and whether this is an exchange whose
        result has not left yet.

        On devices they depend on all that the noise is added to: the same result leaves with the
        same noise, however often a server goes back to a checkpoint, and another one with other
        noise; so does the same with another C or z, as one noise in two sizes would tell.
        """
        if self.secret is None:
            return Source.seeded(self.recipe.seed, "noise", self.round, phase), True
        content = blake2b(
            f"{self.recipe.privacy!r} {self.progress['clip']!r}".encode(), key=self.secret
        )
        for i in sorted(replies):
            for part in (i.encode(), to_bytes(ask.to[i]), to_bytes(replies[i])):
                content.update(len(part).to_bytes(8, "little") + part)
        result = {
            "round": self.round,
            "phase": phase,
            "content": content.hexdigest(),
            "drawn": drawn[0],
            "population": drawn[1],
        }
        new = self.released.add(result, kept(self.round, self.recipe.checkpoint_every))
        return Source.keyed(self.secret, "noise", self.round, phase, content.hexdigest()), new
