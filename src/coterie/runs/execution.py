"""The loop: one method on one federation, from the start or a checkpoint to its result."""

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from coterie.core.callback import Callback
from coterie.core.errors import Refused, SpoiltSum
from coterie.core.files import write_atomically, write_json
from coterie.core.protocol import Ask, ClientId, Replies, derive_seed, drive, remarked, trains
from coterie.core.result import RESULT, Evaluation, Result
from coterie.core.tensors import under
from coterie.core.threads import computing
from coterie.methods import Method
from coterie.methods.parts import OfParts
from coterie.runs.backends import Backend, LocalBackend
from coterie.runs.folder.checkpoints import Checkpoint, Checkpoints
from coterie.runs.folder.inputs import Inputs, RecordedInputs
from coterie.runs.folder.metrics import MetricsFile, Observations
from coterie.runs.folder.names import AUDIT, CANARIES, RECIPE
from coterie.runs.privacy import PrivacySpending
from coterie.runs.problems.members import joined
from coterie.runs.problems.prepare import Prepared
from coterie.runs.problems.problem import LearningProblem
from coterie.runs.recipes.recipe import Recipe, dump
from coterie.runs.requests import Requests, RunState
from coterie.runs.results import ResultWriter
from coterie.runs.scoring import Scorer

# of the personal models in a run's folder: fields of `ClientResult` by client
ScoreTexts = Callable[[Path, LearningProblem, Recipe], Mapping[ClientId, Mapping[str, Any]]]
# fields of a recipe that decide nothing of what a run computes
UNDECISIVE = {"compare_with", "samples", "words", "memory", "curve_every", "auto", "time"}


class Execution:
    """One method on one federation, from the start or a checkpoint to its result, in a run's
    folder, reported to `reporter` under a title. `parts` are recipes and folders of rows that are
    one part of this method each, see `leave`; `score_texts` scores the personal models by what they
    write; a round begins only if it would end before `until`, by `time.monotonic`.
    """

    def __init__(
        self,
        prepared: Prepared,
        folder: Path,
        reporter: Callback | None = None,
        title: str = "",
        backend: Backend | None = None,
        parts: Sequence[tuple[Recipe, Path]] = (),
        score_texts: ScoreTexts | None = None,
        until: float | None = None,
    ) -> None:
        self.folder, self.title, self.parts, self.until = folder, title, parts, until
        self._score_texts = score_texts
        self.reporter = reporter or Callback()
        backend = backend or LocalBackend()
        self.recipe = recipe = prepared.recipe
        self.state = RunState(prepared)
        self.spending: PrivacySpending | None = None
        if recipe.privacy is not None:
            self.spending = PrivacySpending(recipe.privacy, self.state, folder, backend.devices)
        self.requests = Requests(self.state, backend, folder, self.reporter)
        self.engine = self.requests.engine
        self.scorer = Scorer(self.state, self.requests)
        self.results = ResultWriter(self.state, self.requests, self.scorer, self.spending)
        # what decides the values of a run: a checkpoint is of one of these alone
        decisive = recipe.model_dump(mode="json", exclude=UNDECISIVE)
        if fingerprint := prepared.problem.fingerprint:
            decisive["common_expert"] = fingerprint
        self.checkpoints = Checkpoints(folder / "checkpoints", decisive)
        self.observations = (
            None if recipe.audit is None else Observations(folder / AUDIT, recipe.audit.exchanges)
        )
        self.skipped = range(0)  # rounds that were lost when the run was resumed

    # The loop

    def execute(self) -> Result:
        """Run the remaining rounds; return their result. After an error it can be resumed."""
        state, rounds = self.state, self.state.method.rounds
        with self.running():
            self._begin()
            # What the clients start from: the first point of the curves, and the score that the
            # best round is compared with.
            if state.round == 0:
                self.scorer.add_point()
            if self.scorer.keeps_best and not state.evaluations and rounds:
                self.scorer.evaluate()
            self._first, self._rounds_began = state.round, time.monotonic()
            if "part_of" in state.progress:  # it was trained with the whole, to the same round
                rounds = state.round
            while state.round < rounds and not self.scorer.turned() and not self._late():
                self.one_round()
            if state.round < rounds:
                self._end_early()
            if not state.evaluations or state.evaluations[-1].round != state.round:
                self.scorer.evaluate()
            for row, folder in self.parts:
                self.leave(row, folder)
            result = self.results.result(time.monotonic() - self.started)
            self.results.keep_personal_models()
            self.results.write_routing()
            if self._score_texts is not None:
                scores = self._score_texts(self.folder, state.prepared.problem, self.recipe)
                clients = {i: replace(of, **scores.get(i, {})) for i, of in result.clients.items()}
                result = replace(result, clients=clients)
        write_json(self.folder / RESULT, result.to_json())
        RecordedInputs(self.folder).end()
        self.reporter.end(result)
        return result

    def one_round(self) -> None:
        """Run one round of the method; score and save if due."""
        state, method = self.state, self.state.method
        self._welcome()
        self.requests.answered.clear()
        present = self.recipe.present(state.clients, state.round)
        rng = torch.Generator().manual_seed(derive_seed(self.recipe.seed, "round", state.round))
        members = method.members(state.server, present)
        # The method's half of the round is a generator: it yields what to ask of which client, gets
        # the replies, and returns the server's next state.
        exchanges = method.round(members, self._active(), rng)
        try:
            with remarked() as remarks:
                state.server = drive(exchanges, self._exchange)
            for text in remarks:
                self.requests.noted("the server", f"round {state.round + 1}: {text}")
        except SpoiltSum:  # the server's state is as it was
            if self.spending is not None:
                self.spending.count_discarded()
            self.requests.noted(
                "the server",
                f"round {state.round + 1} is dropped: one client spoilt the sum of the updates; "
                f"until it is found, half of the suspects are left out in turn",
            )
        for i in sorted(self.requests.answered):
            state.progress["took_part"][i] = state.progress["took_part"].get(i, 0) + 1
        if state.round + 1 == method.rounds:
            self._finish()
        state.round += 1
        if self._due(self.recipe.curve_every):
            self.scorer.add_point()
        if self._due(self.recipe.evaluate_every) or state.round == method.rounds:
            self.scorer.evaluate()
        if self._due(self.recipe.checkpoint_every):
            self._save()
        self.reporter.round(state.round)

    def _late(self) -> bool:
        """Whether another round would end after the time that the run has."""
        done, now = self.state.round - self._first, time.monotonic()
        if self.until is None or not done:
            return False
        return now + (now - self._rounds_began) / done > self.until

    def _end_early(self) -> None:
        """Do what follows the last round, and score it, if the method has anything to do then."""
        state = self.state
        why = f"no validation score was better in the last {self.recipe.patience} evaluations"
        self.requests.noted(
            "the server",
            f"training ends after round {state.round} of at most {state.method.rounds}: "
            f"{'the time is over' if self._late() else why}",
        )
        methods = (state.method, *state.method.methods.values())
        if any(type(method).finish not in (Method.finish, OfParts.finish) for method in methods):
            self._finish()
            self.scorer.evaluate()

    def _finish(self) -> None:
        state = self.state
        present = self.recipe.present(state.clients, state.round)
        state.server = drive(state.method.finish(state.server, present), self._exchange)

    def _exchange(self, ask: Ask, phase: int) -> Replies:
        """Carry out one exchange of a round and count its bytes."""
        state = self.state
        answers = self.requests.answer(ask, phase)
        if self.observations is not None and trains(ask.task):
            self.observations.keep(state.round, phase, ask.to, answers)
        replies = answers
        if self.spending is not None and trains(ask.task):
            replies = self.spending.protect(ask, answers, phase)
            spent = self.spending.spent()
            finite = {name: value for name, value in spent.items() if math.isfinite(value)}
            self.requests.write("privacy", "", finite, ahead=1)
            self.reporter.spent(state.round, spent["epsilon"], spent["delta"])
        for direction, messages in (("down", ask.to), ("up", replies)):
            for i in state.clients & messages.keys():
                state.count(direction, i, messages[i])
        return replies

    def _active(self) -> tuple[ClientId, ...]:
        """Return a round's participants: those drawn that can be reached, or all if too few can."""
        state, reachable = self.state, self.engine.present()
        secret = None if self.spending is None else self.spending.secret
        active = self.recipe.active(state.federation, state.round, secret)
        if reachable is None:
            return active
        here = tuple(i for i in active if i in reachable)
        return here if len(here) >= min(self.recipe.quorum.min_clients, len(active)) else active

    def _due(self, every: int | None) -> bool:
        """Whether an action of every `every` rounds, and after the last one, is due."""
        if not every:
            return False
        return self.state.round % every == 0 or self.state.round == self.state.method.rounds

    # Beginning, joining, saving, resuming

    @contextmanager
    def running(self) -> Iterator[None]:
        """Open the metrics and set the number of threads for rounds in the block."""
        state = self.state
        self.started = time.monotonic() - state.progress["seconds"]
        metrics = MetricsFile(self.folder, state.progress["position"], state.iteration)
        self.requests.metrics = metrics
        with computing(self.requests.threads):
            try:
                yield
            finally:
                metrics.close()
                self.engine.close()

    def _begin(self) -> None:
        """Notify the reporter, and save the planted canaries for audits. Raises SaveError."""
        state = self.state
        if (planted := state.prepared.planted) is not None:
            write_json(self.folder / AUDIT / CANARIES, planted.to_json())
        self.reporter.opened(self.folder, self.recipe.model_dump(mode="json"))
        metric = state.prepared.problem.metric.about
        # a part of another method has its last round behind it
        rounds = state.round if "part_of" in state.progress else state.method.rounds
        self.reporter.begin(self.title, rounds, state.round, state.clients, metric)
        for round in self.skipped:
            self.requests.noted(
                "the server",
                f"round {round + 1} is skipped: clients answer an exchange of secure "
                f"aggregation only once, and this one had already begun",
            )

    def _welcome(self) -> None:
        """Add clients that came after the start, if the method allows it."""
        for member in self.engine.members():
            if member.client in self.state.federation.everyone:
                continue
            try:
                self.state.take_in(joined(self.state.prepared, member))
            except Refused as error:
                self.requests.noted(member.client, error.problem)

    def _save(self) -> None:
        """Write a checkpoint. Raises SaveError."""
        state, metrics = self.state, self.requests.metrics
        position, digest = metrics.flush() if metrics is not None else (0, None)
        seconds = time.monotonic() - self.started
        state.progress |= {"seconds": seconds, "position": position, "metrics": digest}
        progress = state.progress | {
            "evaluations": [evaluation.to_json() for evaluation in state.evaluations],
            "curve": [point.to_json() for point in state.points],
            "engine": self.engine.memo(),
            "threads": self.requests.threads,
        }
        checkpoint = Checkpoint(state.round, state.server, self.engine.states(), progress)
        self.reporter.checkpoint(state.round, self.checkpoints.save(checkpoint))

    def leave(self, row: Recipe, folder: Path) -> None:
        """Write the end of one part's training as a checkpoint of that method alone, whose row then
        only has to be scored; not if its run has begun. Raises SaveError.
        """
        state, method, name = self.state, self.state.method, row.method["name"]
        server, progress = under(name, state.server), state.progress
        # evaluations have the collaboration weights of one part alone
        collaborates = method.methods[name].collaboration(server, state.clients) is not None
        if RecordedInputs(folder).begun() or collaborates or not state.keeps_models:
            return
        progress = progress | {key: progress.get(f"{key}/{name}", {}) for key in ("up", "down")}
        progress |= {
            "evaluations": [evaluation.of_part(name).to_json() for evaluation in state.evaluations],
            "curve": [point.of_part(name).to_json() for point in state.points],
            "seconds": (time.monotonic() - self.started) / len(method.methods),
            "threads": self.requests.threads,
            "part_of": self.recipe.method["name"],
        } | {"position": 0, "metrics": None}  # which are in this run's folder
        states = {i: under(name, of) for i, of in self.engine.states().items()}
        RecordedInputs(folder).begin(Inputs.of(state.prepared))
        write_atomically(folder / RECIPE, dump(row).encode())
        decisive = self.checkpoints.recipe | row.model_dump(mode="json", include={"method"})
        checkpoint = Checkpoint(state.round, server, states, progress)
        Checkpoints(folder / "checkpoints", decisive).save(checkpoint)

    def restore(self) -> bool:
        """Restore the newest checkpoint; return whether there was one. Raises CheckpointError if it
        is damaged or of another recipe; Refused if its clients differ and the method needs all from
        the start.
        """
        state, checkpoint = self.state, self.checkpoints.latest()
        if checkpoint is not None:
            progress = checkpoint.progress
            state.round, state.server = checkpoint.round, checkpoint.server
            state.progress = progress
            state.evaluations = [*map(Evaluation.from_json, progress.pop("evaluations", ()))]
            state.points = [*map(Evaluation.from_json, progress.pop("curve", ()))]
            if self.spending is not None:
                self.spending.restore()
            self.engine.restore(checkpoint.clients, progress.pop("engine", {}))
            self._check_clients(progress.get("clients"))
            self._welcome()
        if self.spending is not None:
            self.spending.count_released()
        self._skip_begun()
        return checkpoint is not None

    def _skip_begun(self) -> None:
        """Skip rounds already answered under masks, as clients answer each such exchange once."""
        state, begun = self.state, self.engine.begun(self.state.round)
        if self.spending is not None:
            # The first of them came to an end, and were counted when they did.
            ended = len(self.spending.released.since(state.round))
            for _ in begun[ended:]:
                self.spending.count_discarded()
        self.skipped = range(state.round, max(begun, default=state.round - 1) + 1)
        state.round = self.skipped.stop

    def _check_clients(self, before: Collection[ClientId] | None) -> None:
        """Refuse to continue with clients other than `before`; None: the method allows it."""
        everyone = self.state.federation.everyone.keys()
        if before is None or everyone == set(before):
            return
        kinds = {"missing": set(before) - everyone, "new": everyone - set(before)}
        changes = [f"{', '.join(sorted(of))} {kind}" for kind, of in kinds.items() if of]
        raise Refused(
            f"{self.recipe.method['name']} needs the clients that it started with: "
            f"{'; '.join(changes)}",
            "Start the devices of the missing clients, and new devices only after the run "
            "has begun."
            if self.engine.distant
            else "Restore the data that the run began with, or choose another --out.",
        )
