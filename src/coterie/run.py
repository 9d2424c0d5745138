"""A recipe, executed: rounds, records, results. The only place that knows methods, engines and files at once."""

import json
import math
import os
import platform
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import torch

import coterie
from coterie import evaluation, personal
from coterie import recipe as recipes
from coterie.aggregation import weights_error
from coterie.aggregation.dpsgd import ExampleAccountant
from coterie.aggregation.noise import Source, kept_key
from coterie.aggregation.privacy import Accountant, Privacy, central
from coterie.client import Client, Metrics, Site
from coterie.data.examples import ExampleSplit
from coterie.engines import Engine, Listener
from coterie.errors import CheckpointError, ClientError, Refused, TensorError
from coterie.estimate import Foresight
from coterie.inputs import RESULT, Inputs, Kept
from coterie.methods import METHODS
from coterie.models.layout import Layout
from coterie.names import encoded
from coterie.observations import Observations
from coterie.places import OnThisMachine, Place, choose_threads, computing, computing_threads, kept
from coterie.prepared import Prepared, joined
from coterie.profiling import Profile
from coterie.protocol import Ask, ClientId, Form, Replies, State, drive, mix, nothing, trains
from coterie.recipe import Recipe
from coterie.records import (
    METRICS,
    Checkpoint,
    Checkpoints,
    MetricsFile,
    Released,
    alone,
    check_apart,
    check_metrics,
    read_json,
    write_json,
)
from coterie.reports import Reporter
from coterie.reports.html import write_comparison, write_report
from coterie.tensors import Tensors, nbytes, to_bytes, write_atomically
from coterie.threads import Chosen, Watch

RECIPE, COMPARISON, ROUTING = "recipe.yaml", "comparison.json", "routing.json"
SECRET = "secret"  # the file of the server's key, see `Execution.secret`
AUDIT, CANARIES = "audit", "canaries.json"  # a folder of the run, and the list in it
SAMPLED_S, WATCHED_S = 1.0, 5.0  # seconds between looks at who wants a core, and that make a judgement
AGAIN_S = 10.0  # seconds until clients are asked again, where a quorum is waited for
Json = dict[str, Any]


@dataclass
class Doorman(Listener):
    """Says who was not let in while a server waits for its clients."""

    reporter: Reporter

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        self.reporter.warning(0, client, reason)


class Owners(Mapping[ClientId, Client]):
    """Clients with their states, each made anew when it is asked for: together they may be too large.

    Args:
        site: Makes them.
        states: All there are, in order.
        among: Whose count.
    """

    def __init__(self, site: Site, states: Mapping[ClientId, State], among: Collection[ClientId]) -> None:
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
class Execution(Listener):
    """One method on one federation, from a checkpoint or from the start, to its result.

    Args:
        prepared: What `prepare` made.
        folder: The run's folder.
        reporter: Is told of what happens.
        title: What the reporter calls it.
        place: Where the clients are.
        profile: Records one round of it, see `execute`.
    """

    prepared: Prepared
    folder: Path
    reporter: Reporter
    title: str
    place: Place = field(default_factory=OnThisMachine)
    profile: Profile = field(default_factory=Profile)

    def __post_init__(self) -> None:
        self.recipe, self.method = self.prepared.recipe, self.prepared.method
        self.modality, self.metric = self.prepared.modality, self.prepared.modality.metric
        self._take_in(self.prepared)
        self.threads = computing_threads(self.prepared)
        self.metrics: MetricsFile | None = None
        decisive = self.recipe.model_dump(mode="json", exclude={"compare_with", "samples", "memory", "curve_every", "curve_windows"})
        decisive |= {"common_expert": known} if (known := self.modality.fingerprint) else {}
        self.checkpoints = Checkpoints(self.folder / "checkpoints", decisive)
        self._sizes: dict[Layout, dict[str, int]] = {}
        self.answered: set[ClientId] = set()  # in this round
        self.round, self.server = 0, self.method.init(self.prepared.blueprint, self.recipe.present(self.clients, 0))
        self.progress: Json = {
            "up": dict.fromkeys(self.federation.everyone, 0),
            "down": dict.fromkeys(self.federation.everyone, 0),
            "evaluations": [],
            "curve": [],
            "seconds": 0.0,
            "position": 0,
            "lost": {},
            "took_part": {},
        }
        privacy = self.recipe.privacy
        self.accountant = None if privacy is None else self._accountant(privacy)
        self.released = Released(self.folder / "released.jsonl")
        if privacy is not None:
            self.progress |= {"clip": privacy.clip, "spent": []}
        audit = self.recipe.audit
        self.seen = None if audit is None else Observations(self.folder / AUDIT, audit.exchanges)
        self.engine: Engine = self.place.engine(self.prepared, self.folder, self)
        self.cores, self.sampled = Watch(), 0.0
        self.left_out = range(0)  # rounds that were lost when the run was resumed

    def _accountant(self, privacy: Privacy) -> Accountant | ExampleAccountant:
        """What counts what clients, or their examples, spend."""
        if privacy.unit == "client":
            return Accountant(privacy, len(self.clients), experiment=not self.place.devices)
        largest = max(data.train.windows for data in self.federation.clients.values())
        return ExampleAccountant(privacy, largest, self.recipe.training.batch_size, experiment=not self.place.devices)

    def _take_in(self, prepared: Prepared) -> None:
        """Who takes part, and who is scored."""
        self.prepared, self.clients, self.federation = prepared, prepared.clients, prepared.modality.federation
        self.groups = {i: group for group, members in self.federation.unseen.items() for i in members}
        self.scored = tuple(self.groups) or self.clients

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
        self.round, self.server, self.progress = found.round, found.server, {"curve": []} | found.progress
        if self.accountant is not None:
            self.accountant = replace(self.accountant, runs=self.progress["spent"])
            self._count_released()
        self.engine.restore(found.clients, self.progress.pop("engine", {}))
        self._check_clients(self.progress["up"])
        self._count_traffic()
        self._welcome()
        self._leave_out()
        return True

    def _leave_out(self) -> None:
        """Go on with a later round than one in which clients have answered under masks already, as they do so once: it is lost."""
        begun = self.engine.begun(self.round)
        for _ in begun[len(list(self.released.since(self.round))) :]:  # those before them came to an end, and were counted
            if isinstance(self.accountant, ExampleAccountant):
                self.accountant.spend(*self._examples(self.clients))
            elif self.accountant is not None:
                self.accountant.spend(len(self.clients), len(self.clients))
        self.left_out = range(self.round, max(begun, default=self.round - 1) + 1)
        self.round = self.left_out.stop

    def _count_released(self) -> None:
        """Count what left a server on devices after the checkpoint that it goes back to."""
        for result in self.released.since(self.round):
            if isinstance(self.accountant, ExampleAccountant):
                self.accountant.spend(result["windows"], result["steps"])
            elif self.accountant is not None:
                self.accountant.spend(result["drawn"], result["population"])

    def _check_clients(self, before: Mapping[ClientId, int]) -> None:
        """Refuse to go on with other clients than before where that cannot be."""
        gone, new = before.keys() - self.federation.everyone.keys(), self.federation.everyone.keys() - before.keys()
        if self.method.elastic or not gone | new:
            return
        problem = f"{self.recipe.method['name']} needs the clients that it started with: "
        lacking = [f"{', '.join(sorted(gone))} not there"] if gone else []
        raise Refused(
            problem + "; ".join(lacking + ([f"{', '.join(sorted(new))} new"] if new else [])),
            "Start the devices of those that are not there, and those that are new after the run has begun."
            if self.engine.distant
            else "Put back the data that the run began with, or choose another --out.",
        )

    def check_metrics(self) -> None:
        """Refuse to go on behind a checkpoint whose metrics are lost. Raises CheckpointError."""
        check_metrics(self.folder, self.progress["position"], self.progress.get("metrics"))

    def _count_traffic(self) -> None:
        """Have a place for the bytes of every client."""
        for i in self.federation.everyone:
            self.progress["up"].setdefault(i, 0)
            self.progress["down"].setdefault(i, 0)

    def execute(self) -> Json:
        """Run the rounds that are left; returns what is in result.json.

        What is profiled is the second of them, as the first one warms up; else the only one; else the scoring of a method without rounds.

        Raises:
            ClientError: A client failed; the last checkpoint can be resumed.
            SaveError: Something could not be written; likewise.
        """
        self.started = time.monotonic() - self.progress["seconds"]
        self.metrics = MetricsFile(self.folder, self.progress["position"], self.iteration)
        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        self.cores = Watch()
        self._keep_canaries()
        try:
            self.reporter.begin(self.title, self.method.rounds, self.round, self.clients, self.metric.about)
            for round in self.left_out:
                self.noted(
                    "the server",
                    f"round {round + 1} is lost: clients answer an exchange of secure aggregation once, and it had begun before",
                )
            if self.round == 0:
                self._add_to_curve()
            recorded = min(self.round + 1, self.method.rounds - 1)
            while self.round < self.method.rounds:
                self.profile.begin(self.round == recorded)
                self._one_round()
            if not self.progress["evaluations"] or self.progress["evaluations"][-1]["round"] != self.round:
                self.profile.begin(True)
                self._evaluate()
                self.profile.end()
            result = self._result()
            self._keep_personal_models()
            self._look_at_routing()
        finally:
            self.profile.leave()
            self.metrics.close()
            torch.set_num_threads(threads)
        write_json(self.folder / RESULT, result)
        Kept(self.folder).end()
        self.reporter.end(result)
        return result

    def _keep_canaries(self) -> None:
        """Write down which canaries were planted: for whoever audits the run, and never sent. Raises SaveError."""
        if (planted := self.prepared.planted) is not None:
            about = {"clients": {i: own.to_json() for i, own in planted.canaries.items()}, "references": planted.references.tolist()}
            write_json(self.folder / AUDIT / CANARIES, about)

    @property
    def iteration(self) -> int:
        return self.round * self.method.local_steps

    def _one_round(self) -> None:
        rng = torch.Generator().manual_seed(mix(self.recipe.seed, "round", self.round))
        self._welcome()
        self.answered.clear()
        there = self.recipe.present(self.clients, self.round)
        self.server = drive(self.method.round(self.method.members(self.server, there), self._active(), rng), self._exchange)
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
            self.progress |= {"seconds": time.monotonic() - self.started, "position": position, "metrics": digest}
            progress = self.progress | {"engine": self.engine.memo(), "threads": self.threads}
            self.checkpoints.save(Checkpoint(self.round, self.server, self.engine.states(), progress))
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
        self._count_traffic()

    def _active(self) -> tuple[ClientId, ...]:
        """Who takes part in the round: those drawn that can be reached now, unless so few can that the quorum must decide."""
        active, present = self.recipe.active(self.federation, self.round, self.secret), self.engine.present()
        if present is None:
            return active
        here = tuple(i for i in active if i in present)
        return here if len(here) >= min(self.recipe.quorum.min_clients, len(active)) else active

    def _check(self, ask: Ask, client: ClientId, reply: Tensors) -> None:
        """Refuse an answer that is not of the form asked for, and scores that cannot be all the same. Raises TensorError."""
        ask.check(client, reply)
        if ask.task in (self.method.score, self.method.score_test):
            evaluation.check_scores(reply)

    def _answer(self, ask: Ask, phase: int) -> Replies:
        """What the clients answered of which the server believes something, in the order asked.

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
        raise ClientError(
            f"round {self.round + 1}, {ask.name}: {len(believed)} of {len(ask.to)} clients answered, quorum.min_clients is {needed}",
            f"Why is in {self.folder / METRICS}, lines of kind `lost`. When they are back, --resume goes on from the last checkpoint.",
        )

    def _awaited(self, clients: Set[ClientId]) -> Set[ClientId]:
        """Those of the clients that are there after a while; somebody is."""
        while True:
            time.sleep(AGAIN_S)
            present = self.engine.present()
            if back := clients if present is None else clients & present:
                return back

    def _exchange(self, ask: Ask, phase: int) -> Replies:
        """One exchange of a round, its tensors counted. The pool is no client: it has no line."""
        self.profile.enter(ask.name)
        answers = self._answer(ask, phase)
        self.profile.enter("aggregation")
        if self.seen is not None and trains(ask.task):
            self.seen.keep(self.round, phase, ask.to, answers)
        replies = self._protected(ask, answers, phase)
        for direction, messages in (("down", ask.to), ("up", replies)):
            for i in self.clients & messages.keys():
                self.progress[direction][i] += nbytes(messages[i])
        return replies

    def _protected(self, ask: Ask, replies: Replies, phase: int) -> Replies:
        """The replies as the method gets them, and what privacy that spends."""
        if self.accountant is None or not trains(ask.task):
            return replies
        if isinstance(self.accountant, ExampleAccountant):
            self._of_examples(self.accountant, ask, phase)
        else:
            replies = self._of_clients(self.accountant, ask, replies, phase)
        self.progress["spent"] = self.accountant.runs
        spent = {"epsilon": self.accountant.epsilon(self.accountant.delta), "delta": self.accountant.delta, "clip": self.progress["clip"]}
        self._write("privacy", self.round + 1, self.iteration, "", {k: v for k, v in spent.items() if math.isfinite(v)})
        self.reporter.spent(self.round, spent["epsilon"], spent["delta"])
        return replies

    def _of_examples(self, accountant: ExampleAccountant, ask: Ask, phase: int) -> None:
        """Count what privacy of single examples an exchange has spent; on devices also if the server goes back to before it."""
        windows, steps = self._examples(ask.to)
        accountant.spend(windows, steps)
        if self.place.devices:  # who is asked again draws other noise
            result = {"round": self.round, "phase": phase, "content": uuid4().hex, "windows": windows, "steps": steps}
            self.released.add(result, kept(self.round, self.recipe.checkpoint_every))

    def _examples(self, clients: Iterable[ClientId]) -> tuple[dict[ClientId, int], dict[ClientId, int]]:
        """How many examples and local iterations in a round clients have."""
        windows = {i: self.federation.clients[i].train.windows for i in clients}
        return windows, {i: self.method.steps_of(n, self.recipe.training.batch_size) for i, n in windows.items()}

    def _of_clients(self, accountant: Accountant, ask: Ask, replies: Replies, phase: int) -> Replies:
        """The replies with the server's noise, if that is its business; what privacy of whole clients that spends is counted."""
        drawn = self.recipe.drawn(self.federation, self.round) or (len(ask.to), len(ask.to))
        source, new = self._noise(ask, replies, phase, drawn)
        if new:
            accountant.spend(*drawn)
        if accountant.privacy.where == "central":
            replies, self.progress["clip"] = central(replies, ask.to, accountant.privacy, self.progress["clip"], source)
        return replies

    @cached_property
    def secret(self) -> bytes | None:
        """The key of what devices must not be able to predict; None where nothing is kept from anybody.

        It stays in the run's folder, so that a run that is resumed draws the same.
        """
        privacy = self.recipe.privacy
        return kept_key(self.folder / SECRET) if self.place.devices and privacy is not None and privacy.where == "central" else None

    def _noise(self, ask: Ask, replies: Replies, phase: int, drawn: tuple[int, int]) -> tuple[Source, bool]:
        """Return random numbers for the server's noise, and whether this is an exchange whose result has not left yet.

        On devices they depend on all that the noise is added to: the same result leaves with the same noise, however often a server goes
        back to a checkpoint, and another one with other noise; so does the same with another C or z, as one noise in two sizes would tell.
        """
        if self.secret is None:
            return Source.seeded(self.recipe.seed, "noise", self.round, phase), True
        content = blake2b(f"{self.recipe.privacy!r} {self.progress['clip']!r}".encode(), key=self.secret)
        for i in sorted(replies):
            for part in (i.encode(), to_bytes(ask.to[i]), to_bytes(replies[i])):
                content.update(len(part).to_bytes(8, "little") + part)
        result = {"round": self.round, "phase": phase, "content": content.hexdigest(), "drawn": drawn[0], "population": drawn[1]}
        new = self.released.add(result, kept(self.round, self.recipe.checkpoint_every))
        return Source.keyed(self.secret, "noise", self.round, phase, content.hexdigest()), new

    def lost(self, client: ClientId, task: str, reason: str) -> None:
        self.progress["lost"][client] = self.progress["lost"].get(client, 0) + 1
        why = reason.removeprefix(f"reply of client {client!r}").removeprefix(f" to {task}").removeprefix(": ")  # said beside it
        self._say("lost", client, {"task": task, "reason": why})

    def noted(self, client: ClientId, note: str) -> None:
        self._say("note", client, {"note": note})

    def _say(self, kind: str, client: ClientId, said: Mapping[str, str]) -> None:
        """A line of metrics.jsonl, and for whoever looks on."""
        self._write(kind, self.round + 1, self.iteration, client, said)
        self.reporter.warning(self.round, client, said.get("reason") or said["note"])

    def _write(self, kind: str, round: int, iteration: int, client: ClientId, values: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl, while that is open."""
        if self.metrics is not None:
            self.metrics.write(kind, round, iteration, client, values)

    def _look_at_cores(self) -> None:
        """Tell the reporter, now and then, how many others compute while this process lacks cores, if it is this one that computes."""
        if self.engine.distant or self.modality.device.type != "cpu":
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
            self._write("train", self.round + 1, self.iteration + self.method.local_steps, client, metrics)
        self.reporter.client(self.round, client, metrics)

    def _ask(self, task: Callable[..., Tensors], to: Mapping[ClientId, Tensors], back: Form) -> Replies:
        """A question outside of the rounds. Its phase is -1: no round has that."""
        return self._answer(Ask(task, to, back), -1)

    def _personal(self) -> Mapping[ClientId, Tensors]:
        """What each client that is scored needs beyond its own state to have its personal model; of one that keeps none: all of it."""
        if self._with_models:
            own = self.method.personal(self.server, self.clients)
            synchronised = self.method.download(self.server, absent) if (absent := self._absent()) else {}
            return {i: own[i] or synchronised.get(i, {}) for i in own}
        found, up, down = self.adapt(self.scored)
        for i in self.groups.keys() & found.keys():  # what it takes once, however often it is scored
            self.progress["up"][i], self.progress["down"][i] = up[i], down[i]
        return found

    @property
    def _with_models(self) -> bool:
        """Whether those who are scored keep models of their own between rounds."""
        return not (self.groups or self.recipe.training.stateless or self.method.forgetful)

    def _absent(self) -> tuple[ClientId, ...]:
        """The clients that took part in no round so far: they have no model of their own, and are scored with what they would get."""
        if not self.round or self.method.pooled or not self._with_models:
            return ()
        return tuple(i for i in self.clients if i not in self.progress["took_part"])

    def adapt(self, clients: Sequence[ClientId]) -> tuple[Mapping[ClientId, Tensors], dict[ClientId, int], dict[ClientId, int]]:
        """What each of these clients gets, which have no model, and how many bytes each sends and gets until it has one."""
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
        found: dict[ClientId, Json] = {i: dict(self.metric.scores(score)) for i, score in scores.items()}
        for i, values in found.items():
            self._write("score", self.round, self.iteration, i, values)
        everyone = {group: tuple(of) for group, of in self.federation.unseen.items()} or {"": self.clients}
        members = {group: [i for i in of if i in found] for group, of in everyone.items()}
        if silent := [group for group, of in members.items() if not of]:
            raise ClientError(
                f"after round {self.round}: nobody of {silent[0] or 'the clients'} could be scored", f"See {self.folder / METRICS}."
            )
        groups = {g: {s: evaluation.mean(found[i][s] for i in of) for s in ("valid", "test")} for g, of in members.items()}
        means = next(iter(groups.values()))
        entry = {"round": self.round, "iteration": self.iteration, **means, "clients": found}
        if self.groups:
            entry["groups"] = {group: values["test"] for group, values in groups.items()}
        if (weights := self.method.collaboration(self.server, self.clients)) is not None:
            entry["weights"] = [[round(w, 5) for w in row] for row in weights.tolist()]
        if all("choices" in score for score in scores.values()):
            anchored = [self.federation.labels[q] for q in self.federation.anchors]
            entry["choices"] = {g: evaluation.choices([scores[i]["choices"] for i in of], anchored) for g, of in members.items()}
            for i, score in scores.items():
                found[i]["gate_accuracy"] = evaluation.choices([score["choices"]], anchored)["gate_accuracy"]
                found[i]["experts"] = sorted(int(n.removeprefix("expert/")) for n in tensors[i] if n.startswith("expert/"))
        self.progress["evaluations"].append(entry)
        self.reporter.evaluated(self.round, means)

    def _add_to_curve(self) -> None:
        """Score a part of each test set: a point of the curves, which says how training goes, and is no part of the figures.

        Clients elsewhere are not asked: each exchange with them takes seconds, and tells something of their data.
        """
        if self.recipe.curve_every is None or self.engine.distant:
            return
        self.profile.enter("evaluation")
        tensors, states = self._personal(), self.engine.states()
        if not self.round and self._with_models:  # nobody has anything yet, and of a pool nobody could predict
            start = self.method.download(self.server, self.clients)
            tensors = {i: own or start.get(i, {}) for i, own in tensors.items()}
        found = {i: {"test": self._of_part(i, states.get(i, {}), tensors[i])} for i in self.scored if i in tensors}
        everyone = {group: tuple(of) for group, of in self.federation.unseen.items()} or {"": self.clients}
        means = {group: evaluation.mean(found[i]["test"] for i in of if i in found) for group, of in everyone.items()}
        point: Json = {"round": self.round, "iteration": self.iteration, "test": next(iter(means.values())), "clients": found}
        self.progress["curve"].append(point | ({"groups": means} if self.groups else {}))
        for i, values in found.items():
            self._write("curve", self.round, self.iteration, i, values)
        self.reporter.point(self.round, point["test"], self.recipe.curve_windows)

    def _of_part(self, id: ClientId, state: State, tensors: Tensors) -> float:
        """Return the metric of a client on a part of its test set; of what it remembers nothing changes."""
        client = self.prepared.site.client(id, dict(state))
        with torch.random.fork_rng(devices=[]), client.borrowing(self.method.loadable(client, tensors)):
            return self.metric.of(client.score_part(client.test, self.recipe.curve_windows))

    def _form(self, *names: str) -> Form:
        """The form of what comes back from scoring: these of all that there may be."""
        scores = self.modality.scores(self.prepared.site.layouts[self.scored[0]])
        return lambda sent: {name: tensor for name, tensor in scores.items() if name in names}

    def _synced(self) -> dict[ClientId, float]:
        """The test metric of each client after one more synchronisation; nothing is computed where that changes nothing."""
        own = self.progress["evaluations"][-1]["clients"]
        down = {} if self.groups else {i: t for i, t in self.method.download(self.server, self.clients).items() if i in own}
        if not any(down.values()):
            return {i: scores["test"] for i, scores in own.items()}
        scores = self._ask(self.method.score_test, down, self._form("test"))
        return {i: self.metric.of(score["test"]) for i, score in scores.items()}

    def _result(self) -> Json:
        last, synced = self.progress["evaluations"][-1], self._synced()
        about = self.metric.about
        valid = evaluation.best((e["valid"] for e in self.progress["evaluations"]), about)
        best = next(e for e in self.progress["evaluations"] if e["valid"] == valid)
        about_groups = {i: {"group": group} for i, group in self.groups.items()}
        costs = self._costs()
        clients = {
            i: {**scores, "test_synced": synced.get(i), **costs[i], **about_groups.get(i, {})}
            for i, scores in last["clients"].items()
            if i in costs  # one that was scored before a resumption may not be there now
        }
        headline = evaluation.headline({"clients": clients, "groups": last.get("groups")}).values()
        tests = [e["test"] for e in self.progress["evaluations"]]
        return {
            "method": self.recipe.method["name"],
            "recipe": self.recipe.name,
            "seed": self.recipe.seed,
            "rounds": self.round,
            "metric": about,
            "mean": last["test"],
            "mean_loss": evaluation.mean(found["test_loss"] for found in headline),
            "mean_synced": evaluation.mean(found["test_synced"] for found in headline if found["test_synced"] is not None),
            "best": evaluation.best(tests, about),
            "best_of_last_ten": evaluation.best(tests[-10:], about),
            "best_by_valid": {"round": best["round"], "valid": best["valid"], "test": best["test"]},
            "clients": clients,
            "training": {i: costs[i] for i in self.clients} if self.groups else None,
            "groups": last.get("groups"),
            "labels": {i: list(classes) for i, classes in self.federation.labels.items()} or None,
            "label_counts": self._label_counts(),
            "anchors": list(self.federation.anchors) or None,
            "once_bytes": self.modality.once_bytes,
            "clusters": self.federation.clusters,
            "weights_error": self._weights_error(last),
            "evaluations": self.progress["evaluations"],
            "curve": {"windows": self.recipe.curve_windows, "points": self.progress["curve"]} if self.progress["curve"] else None,
            "lost": self.progress["lost"],
            "rounds_taken_part": {i: self.progress["took_part"].get(i, 0) for i in self.clients},
            "never_took_part": list(self._absent()),
            "privacy": None if self.accountant is None else self.accountant.summary(),
            "wall_s": time.monotonic() - self.started,
            "peak_memory_bytes": evaluation.peak_memory(),
            "versions": {"coterie": coterie.__version__, "torch": torch.__version__, "python": platform.python_version()},
            "machine": {
                "device": "elsewhere" if self.modality.device.type == "meta" else str(self.modality.device),
                "dtype": str(self.modality.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
            },
        }

    def _label_counts(self) -> dict[ClientId, list[int]] | None:
        """Examples of each class that each client trains on or, if it is unseen, is tested on; None where nobody is unseen."""
        held = {i: data.test if i in self.groups else data.train for i, data in self.federation.everyone.items()} if self.groups else {}
        labelled = {i: split for i, split in held.items() if isinstance(split, ExampleSplit)}
        return {i: np.bincount(s.labels[s.rows], minlength=s.classes).tolist() for i, s in labelled.items()} or None

    def _weights_error(self, evaluated: Json) -> float | None:
        clusters = self.federation.clusters
        if clusters is None or "weights" not in evaluated:
            return None
        return weights_error(evaluated["weights"], [clusters[i] for i in self.clients], self.method.shares)

    def _costs(self) -> dict[ClientId, Json]:
        """What each client sends, gets, trains and remembers."""
        remembered, layouts = self.engine.state_bytes(), self.prepared.site.layouts
        return {
            i: {
                **self._size(layouts[i]),
                "bytes_up": self.progress["up"][i],
                "bytes_down": self.progress["down"][i],
                "state_bytes": remembered.get(i, 0) if self.method.total_iterations else 0,
                "generalists": layouts[i].generalists,
                "specialists": layouts[i].specialists,
            }
            for i in self.federation.everyone
        }

    def _size(self, layout: Layout) -> dict[str, int]:
        """Parameters, and the work of one prediction's forward pass. Layouts repeat, and a model must be built to count."""
        if layout not in self._sizes:
            trained = self.method.total_iterations > 0
            model = self.modality.trainable(layout)
            self._sizes[layout] = {
                "trainable_parameters": model.trainable_parameters if trained else 0,
                "active_parameters": model.active_parameters if trained else 0,
                "flops_per_token": self.modality.flops(layout, trained),
            }
        return self._sizes[layout]

    def _owners(self) -> Mapping[ClientId, Client]:
        """Every client that is scored with its state of now."""
        return Owners(self.prepared.site, self.engine.states(), self.scored)

    def _keep_personal_models(self) -> None:
        ask = Ask(self.method.keep, self._personal(), nothing)
        self.engine.keep(ask, self.round, lambda client, tensors: self.keep(client, tensors, self.folder / "clients" / encoded(client.id)))

    def keep(self, client: Client, tensors: Tensors, folder: Path) -> None:
        """Write a client's personal model to a folder: what it remembers, and `tensors`. Raises SaveError."""
        client.bind()  # clients of one layout take turns in one model
        client.load(self.method.loadable(client, tensors))  # one that keeps nothing has forgotten it
        origin = personal.Origin(self.recipe.method["name"], self.recipe.name, self.round, self.recipe.seed)
        self.modality.keep(folder, client, self.prepared.site.layouts[client.id], origin)

    def _look_at_routing(self) -> None:
        """Write `routing.json`: what every client's router does with the beginnings of all test texts, which are all on this machine."""
        if self.recipe.samples and (found := self.modality.look(self._owners())) is not None:
            write_atomically(self.folder / ROUTING, json.dumps(found, ensure_ascii=False).encode())


def run(
    recipe: Recipe,
    folder: Path,
    *,
    resume: bool = False,
    changed: bool = False,
    reporter: Reporter | None = None,
    place: Place | None = None,
    profile: Profile | None = None,
) -> list[Json]:
    """Run a recipe and the methods of its `compare_with` into a folder; what is there already is not done again.

    Args:
        recipe: What to run.
        folder: Made if it is missing. The methods of `compare_with` go to its `baselines/<name>/`.
        resume: Go on with the run that is in `folder`.
        changed: Go on with it even though base, data or clients have changed, or metrics were lost.
        reporter: Is told of what happens; default: nobody.
        place: Where the clients are; default: on this machine.
        profile: Records a round of the recipe's own method; default: nothing.

    Returns:
        The results, the recipe's own method last.

    Raises:
        Refused: Something is wrong with the recipe, the base, the data or the folder; nothing was started.
        CoterieError: It failed while running and can be resumed.
    """
    rows = [(recipe.with_method(name), folder / "baselines" / name) for name in recipe.compare_with]
    rows.append((recipe, folder))
    if not (resume or changed) and (folder / RECIPE).exists():
        raise Refused(f"{folder} already holds a run", "Go on with it by --resume, or choose another --out.")
    if resume or changed:
        _check_begun(folder, rows)
    results = execute_all(rows, reporter or Reporter(), place=place, profile=profile, changed=changed, within=folder)
    write_report(folder, results, recipe.description)
    return results


def execute_all(
    rows: Sequence[tuple[Recipe, Path]],
    reporter: Reporter,
    titles: Sequence[str] = (),
    place: Place | None = None,
    profile: Profile | None = None,
    changed: bool = False,
    within: Path | None = None,
) -> list[Json]:
    """Every row in its folder, from where it stands; returns their results.

    All are prepared before the first one starts, so that what is refused is refused at once.

    Args:
        rows: Recipes and the folders of their runs.
        reporter: Is told of what happens.
        titles: What the reporter calls each row; default: its method.
        place: Where the clients are; default: on this machine.
        profile: Records a round of the last row; default: nothing.
        changed: Whether unfinished rows go on with what base, data, clients and metrics are now, whatever they were.
        within: The folder of all of them, in which nobody else works meanwhile; None where only each row's own must be left alone.
    """
    place = place or OnThisMachine()
    if not place.devices:
        for recipe, folder in rows:
            _check_apart(recipe, within or folder)
    reporter.preparing()
    threads, foresight = _Threads(rows, place, reporter), Foresight()
    for recipe, folder in rows:
        prepared = place.prepare(recipe)
        if not changed and Kept(folder).begun() and _same(recipe, folder):  # of another recipe, `_executed` says more
            Kept(folder).check(Inputs.of(prepared))
        if reporter.foretells and not place.devices and recipe.engine != "flower":
            with computing(threads.given(prepared, folder)):
                foresight.add(prepared, (folder / RESULT).exists())
    reporter.expects(foresight.seconds())
    results = []
    with ExitStack() as stack:
        if within is not None:
            stack.enter_context(alone(within))
        for _, folder in rows:
            with alone(folder):
                pass  # it can be written to, and nobody else is at it
        for k, (recipe, folder) in enumerate(rows):
            title = titles[k] if titles else METHODS[recipe.method["name"]].title
            recorder = profile if profile is not None and k == len(rows) - 1 else Profile()
            with alone(folder):
                prepared = threads.given(place.prepare(recipe), folder)
                results.append(_executed(Execution(prepared, folder, reporter, title, place, recorder), changed))
    return results


class _Threads:
    """With how many threads the rows of a command compute: all alike, so that what differs between them is no matter of arithmetic.

    A row that has begun goes on with its own number, because sums of floating-point numbers depend on how many threads share them: with
    another one it would not end bit-equal to the same run without an interruption. New rows take that of one that has begun; otherwise
    the first row that needs a number has it found out, see `choose_threads`.
    """

    def __init__(self, rows: Sequence[tuple[Recipe, Path]], place: Place, reporter: Reporter) -> None:
        self._place, self._reporter = place, reporter
        self._kept = {folder: kept_threads(folder) for _, folder in rows}
        self._common = next((number for number in self._kept.values() if number), None)

    def given(self, prepared: Prepared, folder: Path) -> Prepared:
        """The same with a number of threads; as it is where others compute, or PyTorch's own number was good enough before."""
        if self._place.devices or prepared.recipe.threads or prepared.modality.threads:
            return replace(prepared, threads=prepared.recipe.threads)
        kept = self._kept[folder]
        if kept is None and self._common is None:
            self._common = self._found(choose_threads(prepared))
        return replace(prepared, threads=self._common if kept is None else kept or None)

    def _found(self, chosen: Chosen) -> int:
        if chosen.others:
            self._reporter.cores(chosen.others)
        return chosen.threads


def kept_threads(folder: Path) -> int | None:
    """Return with how many threads the run in a folder computes: 0 if it has begun and does not say, as older versions; None if it has not.

    What is damaged says nothing here: whoever goes on from it is told.
    """
    begun = sorted((folder / "checkpoints").glob("round-*/checkpoint.json"))
    try:
        return int(read_json(begun[-1])["progress"].get("threads", 0)) if begun else None
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError):
        return 0


def _check_apart(recipe: Recipe, folder: Path) -> None:
    """Refuse a folder for results among the data of a recipe, or around them. Raises Refused."""
    found = getattr(recipe.data, "path", None) or getattr(recipe.data, "root", None) or getattr(recipe.data, "dataset", None)
    if found is None and hasattr(recipe.data, "root"):
        found = os.environ.get("COTERIE_DATA")
    if found:
        check_apart(folder, Path(found))


def _begun(folder: Path) -> bool:
    """Whether a run has written anything that it could go on from."""
    return (folder / RECIPE).exists() or (folder / "checkpoints").exists() or Kept(folder).begun()


def _check_begun(folder: Path, rows: Sequence[tuple[Recipe, Path]]) -> None:
    """Refuse to go on with what has never begun. Raises Refused."""
    if not (folder / "lock").exists() and not any(_begun(path) for _, path in rows):
        raise Refused(
            f"{folder} {'holds' if folder.is_dir() else 'does not exist, so there is'} nothing to go on with",
            "Check --out; or start from the beginning: the same command without --resume.",
        )


def _executed(execution: Execution, changed: bool) -> Json:
    """A row from where it stands to its result."""
    folder, kept = execution.folder, Kept(execution.folder)
    execution.restore()
    execution.checkpoints.tidy()
    inputs = Inputs.of(execution.prepared)
    if changed and kept.begun():
        kept.accept(inputs)
    elif kept.begun():
        kept.check(inputs)
        execution.check_metrics()
    else:
        kept.begin(inputs)
    if not execution.recipe.samples:
        (folder / ROUTING).unlink(missing_ok=True)
    if kept.done():
        execution.reporter.known(execution.title)
        found: Json = read_json(folder / RESULT)
        return found
    write_atomically(folder / RECIPE, recipes.dump(execution.recipe).encode())
    return execution.execute()


def _same(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder's recipe is this one, word for word."""
    try:
        return (folder / RECIPE).read_text(encoding="utf-8") == recipes.dump(recipe)
    except (OSError, ValueError):
        return False


def compare(
    methods: Sequence[str],
    recipe: Recipe,
    folder: Path,
    *,
    seeds: int = 3,
    resume: bool = False,
    changed: bool = False,
    reporter: Reporter | None = None,
) -> Json:
    """One table: every method on the same data, base and budget, over seeds `recipe.seed`, `recipe.seed + 1`, ...

    `resume` and `changed` are those of `run`.

    Returns:
        What is in comparison.json.

    Raises:
        Refused: As `run`.
        CoterieError: As `run`.
    """
    if not methods:
        raise Refused("no methods to compare", "Name at least one: see `coterie methods`.")
    if (folder / COMPARISON).exists() and not (resume or changed):
        raise Refused(f"{folder} already holds a comparison", "Go on with it by --resume, or choose another --out.")
    rows = [
        (recipe.with_method(name).model_copy(update={"seed": recipe.seed + k}), folder / name / f"seed-{recipe.seed + k}")
        for name in dict.fromkeys(methods)
        for k in range(seeds)
    ]
    if resume or changed:
        _check_begun(folder, rows)
    titles = [METHODS[row.method["name"]].title + (f", seed {row.seed}" if seeds > 1 else "") for row, _ in rows]
    results = execute_all(rows, reporter or Reporter(), titles, changed=changed, within=folder)
    table = evaluation.rows(results)
    comparison = {
        "recipe": recipe.name,
        "own": recipe.method["name"],
        "seeds": [recipe.seed + k for k in range(seeds)],
        "metric": results[0]["metric"],
        "scored": "each client's model right after its last local iteration; mean_synced: after one more synchronisation",
        "rows": table,
        "notes": evaluation.comparability(table, recipe.method["name"]),
        "versions": results[0]["versions"],
        "machine": results[0]["machine"],
    }
    write_json(folder / COMPARISON, comparison)
    write_comparison(folder, comparison, recipe.description)
    return comparison
