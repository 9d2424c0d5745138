"""An audit of a run: what each observer saw, and what can be inferred from it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from coterie import personal
from coterie.audit import canaries as of_canaries
from coterie.audit import statistics, words
from coterie.audit.observers import ABLE, SharedText, View, calibrated, shared
from coterie.audit.statistics import MembershipScores, Values
from coterie.core.errors import CheckpointError, Refused
from coterie.core.files import read_json, write_json
from coterie.core.importing import require
from coterie.core.isolation import isolated
from coterie.core.protocol import ClientId, derive_seed
from coterie.core.result import RESULT, Result
from coterie.core.result import audit as records
from coterie.core.roles import GENERALIST
from coterie.core.tensors import Tensors, under, weighted_sum
from coterie.data.canaries import PlantedCanaries
from coterie.data.text_encoding import TextEncoder
from coterie.personal import PersonalModel
from coterie.personal.loading import Personal
from coterie.personal.text_inference import Words
from coterie.reports.html import write_report
from coterie.runs.backends import LocalBackend
from coterie.runs.execution import Execution
from coterie.runs.folder import names as files
from coterie.runs.folder.metrics import Exchange
from coterie.runs.problems import loading as modalities
from coterie.runs.problems.language import Language
from coterie.runs.problems.prepare import prepare
from coterie.runs.recipes import recipe as recipes

DELTA = 1e-5  # delta of the bound on epsilon, if the recipe has none
SERVER, OTHERS, USER = "server", "others", "user"
PROGRESS = {
    SERVER: "what the server can tell",
    OTHERS: "what another client can tell",
    USER: "what the user of a mixture can tell",
}


@dataclass(frozen=True)
class Settings:
    """The extent of an audit."""

    clients: Sequence[ClientId] = ()  # whose data it is about; () for all
    windows: int = 200  # at most so many training windows of each client, and as many test windows
    words: int = 50  # at most so many rare words of each client
    top: int = 3  # the suggestions that a word may be among
    # whether the server is assumed to see sums alone, as under secure aggregation
    secure: bool = False
    seed: int = 0  # of all random choices


@isolated()
def audit(
    run: Path, settings: Settings | None = None, say: Callable[[str], None] = lambda text: None
) -> records.AuditResult:
    """Measure what the shared part of a run reveals, by its newest checkpoint, and write it to
    `audit.json` and `report.html` in the run's folder. `say` is called with each progress message.
    Raises Refused: there is no run, no checkpoint or no such client, it shares nothing, or no
    model; SaveError.
    """
    require("coterie audit", "scipy")
    result = _Auditor(run, settings or Settings(), say).measured()
    write_json(run / records.AUDITED, result.to_json())
    if (run / RESULT).exists():
        rows = [*(run / "baselines" / name for name in recipes.resolve(run).compare_with), run]
        results = [Result.read(row) for row in rows if (row / RESULT).exists()]
        write_report(run, results, recipes.resolve(run).description)
    return result


class _Auditor:
    """The audit of one run, with the arguments of `audit`."""

    def __init__(self, run: Path, settings: Settings, say: Callable[[str], None]) -> None:
        self.run, self.settings, self.say = run, settings, say
        self.recipe = recipes.resolve(run)
        self.prepared = prepare(self.recipe)
        self._check()
        self.execution = Execution(self.prepared, run, backend=LocalBackend("inprocess"))
        if not self.execution.restore():
            remedy = "Wait for the first one (checkpoint_every), or resume: coterie run --resume."
            raise CheckpointError(f"{run} has no checkpoint yet", remedy)
        self.part = self._sending()
        if self.part:
            self.prepared = self.prepared.part(self.part)
        self.clients = tuple(settings.clients) or self.prepared.clients
        self.planted: PlantedCanaries | None = None
        if self.prepared.planted is not None:
            listed = read_json(run / files.AUDIT / files.CANARIES)
            self.planted = PlantedCanaries.from_json(listed)
        self.secure = settings.secure or self.recipe.secure
        self.models = {i: shared(self.prepared, i) for i in self.prepared.clients}
        self.views = self._views()
        self.rows = {i: self._rows(i) for i in self.clients}

    def _check(self) -> None:
        method, known = self.prepared.method, self.prepared.clients
        if unknown := [i for i in self.settings.clients if i not in known]:
            problem = f"--client {unknown[0]}: {self.run} has no training client of this id"
            raise Refused(problem, f"There are: {', '.join(known)}.")
        if method.centralized or not method.rounds or not method.shared:
            raise self._nothing_shared()

    def _sending(self) -> str:
        sending = [name for name, part in self.prepared.method.methods.items() if part.shared]
        if len(sending) > 1:
            problem = f"audit: {' and '.join(sending)} send both, and an audit measures one"
            raise Refused(problem, "Audit a run of each method alone, which sends the same.")
        return "".join(sending)

    def _of_part(self, tensors: Tensors) -> Tensors:
        return under(self.part, tensors) if self.part else tensors

    def _nothing_shared(self) -> Refused:
        name = self.recipe.method["name"]
        return Refused(f"audit: {name} shares nothing that clients train", ABLE)

    def _views(self) -> dict[str, dict[ClientId, View]]:
        """Return each observer's views, by target client."""
        execution, everyone = self.execution, self.prepared.clients
        down = self.prepared.method.download(self._of_part(execution.state.server), everyone)
        if not all(down.get(i) for i in everyone):
            raise self._nothing_shared()
        next_one = dict(zip(everyone, (*everyone[1:], everyone[0]), strict=True))
        views: dict[str, dict[ClientId, View]] = {
            OTHERS: {i: [(down[next_one[i]], None)] for i in self.clients}
        }
        observations, round = execution.observations, execution.state.round
        exchanges = [] if observations is None else observations.before(round)
        if exchanges:
            views[SERVER] = {
                i: [pair for e in exchanges if (pair := self._pair(e, i)) is not None]
                for i in self.clients
            }
        if not all(all(of_observer.values()) for of_observer in views.values()):
            raise Refused(
                f"audit: nothing was received from some clients in the last {len(exchanges)} "
                f"exchanges",
                "Choose other clients with --client.",
            )
        encoded = getattr(self.prepared.problem, "encoder", None)  # rows are features, not texts
        if self.part and encoded is None and self.in_use:
            views[USER] = {i: [(self.in_use[i], None)] for i in self.clients}
        return {name: views[name] for name in PROGRESS if name in views}

    @cached_property
    def in_use(self) -> Mapping[ClientId, Personal]:
        """The clients' models as they are used; none before the run has ended."""
        if not (self.run / "clients").is_dir():
            return {}
        backbone = getattr(self.prepared.problem, "backbone", None)
        return personal.load_all(self.run, self.prepared.clients, backbone=backbone)

    def _pair(self, exchange: Exchange, client: ClientId) -> tuple[Tensors, Tensors] | None:
        """Return what the server got of a client and had sent it; of sums the mean of all."""
        if not self.secure:
            pair = self._of_part(exchange.sent(client)), self._of_part(exchange.to(client))
            return pair if pair[0] else None
        if not exchange.to(client):
            return None
        received = [sent for i in self.prepared.clients if (sent := exchange.sent(i))]
        mean = weighted_sum(
            (1 / len(received), {name: t for name, t in sent.items() if t.is_floating_point()})
            for sent in received
        )
        return self._of_part(mean), self._of_part(exchange.to(client))

    def _rows(self, client: ClientId) -> tuple[Any, Any]:
        """Return rows that a client was trained on, and as many of its test split."""
        data = self.prepared.site.data[client]
        rng = np.random.default_rng(derive_seed(self.settings.seed, "audit", "rows", client))
        steps = self.execution.state.round * self.prepared.method.local_steps
        state = self._of_part(self.execution.engine.states().get(client, {}))
        known = state.get(f"cursor/{data.train.name}")
        cursor = steps * self.recipe.training.batch_size if known is None else int(known)
        without = np.empty(0, dtype=np.int64)
        if self.planted is not None:
            without = self.planted.canaries[client].windows
        most = min(self.settings.windows, data.test.windows)
        trained = statistics.drawn(data.train, cursor, without, most, rng)
        if not len(trained):
            remedy = "Resume the run: coterie run --resume."
            raise Refused(f"audit: client {client!r} has not been trained yet", remedy)
        fresh = np.sort(rng.permutation(data.test.windows)[: len(trained)])
        rows = data.train.take(trained), data.test.take(fresh)
        problem = self.prepared.problem
        if not isinstance(problem, Language) or problem.content == "chats":
            return rows
        end = problem.backbone.tokenizer.eos_token_id
        return statistics.without_ends(rows[0], end), statistics.without_ends(rows[1], end)

    def measured(self) -> records.AuditResult:
        """Return the content of `audit.json`."""
        language, settings = isinstance(self.prepared.problem, Language), self.settings
        result = Result.read(self.run) if (self.run / RESULT).exists() else None
        observers = {name: self._observer(name, views) for name, views in self.views.items()}
        self.say("what the data alone tell")
        shift = {i: self._membership(i) for i in self.rows}
        return records.AuditResult(
            recipe=self.recipe.name,
            method=self.recipe.method["name"],
            seed=self.recipe.seed,
            round=self.execution.state.round,
            clients=list(self.clients),
            data="windows" if language else "examples",
            canaries=self._about_canaries(),
            secure=self.secure,
            privacy=None if result is None else result.privacy,
            observers=observers,
            shift=statistics.measured(shift, settings.seed),
            words=self._words(),
            settings=records.AuditSettings(
                windows=settings.windows, words=settings.words, top=settings.top, seed=settings.seed
            ),
        )

    def _about_canaries(self) -> records.CanarySetup | None:
        audit = self.recipe.audit
        if self.planted is None or audit is None:
            return None
        canaries = [self.planted.canaries[i] for i in self.clients]
        return records.CanarySetup(
            candidates=sum(len(c.planted) for c in canaries),
            planted=sum(int(c.planted.sum()) for c in canaries),
            repeats=audit.repeats,
            prefix=audit.prefix,
            length=audit.length,
        )

    def _observer(self, name: str, views: Mapping[ClientId, View]) -> records.ObserverResult:
        self.say(PROGRESS[name])
        details = {i: self._membership(i, views[i]) for i in self.rows}
        texts = {
            i: model
            for i, model in self.models.items()
            if isinstance(model, SharedText) and i in self.rows
        }
        min_k = {i: self._min_k(model, views[i], self.rows[i]) for i, model in texts.items()}
        seed = self.settings.seed
        return records.ObserverResult(
            exchanges=max(map(len, views.values())),
            membership=statistics.measured(details, seed),
            min_k=statistics.measured(min_k, seed) if texts else None,
            canaries=self._found_canaries(texts, views) if texts else None,
        )

    def _found_canaries(
        self, texts: Mapping[ClientId, SharedText], views: Mapping[ClientId, View]
    ) -> records.CanaryResult | None:
        """Return how well an observer finds the canaries; None without any."""
        planted, problem, privacy = self.planted, self.prepared.problem, self.recipe.privacy
        if planted is None:
            return None
        assert isinstance(problem, Language)
        encoder = TextEncoder(problem.backbone.tokenizer)
        references, begin = planted.references, encoder.begin or encoder.end
        scored = {
            i: of_canaries.scored(model, views[i], planted.canaries[i], references, begin)
            for i, model in texts.items()
        }
        delta = (privacy and privacy.delta) or DELTA
        return of_canaries.measured(scored, delta, self.settings.seed)

    def _membership(self, client: ClientId, view: View | None = None) -> MembershipScores:
        """Return the likelihoods of a client's rows by the initial model, or a view's change."""
        model = self.models[client]

        def score(rows: Any) -> Values:
            if view is None:
                return model.likelihoods(rows)
            return calibrated(model, view, lambda shared: shared.likelihoods(rows))

        return MembershipScores(*map(score, self.rows[client]))

    def _min_k(self, model: SharedText, view: View, rows: tuple[Any, Any]) -> MembershipScores:
        """Return Min-K%++ of the last observed model."""
        initial = model.client.read(GENERALIST)
        model.load(view[-1][0])
        try:
            return MembershipScores(*map(model.min_k, rows))
        finally:
            model.load(initial)

    def _words(self) -> records.WordsResult | None:
        """Measure rare words in others' suggestions; None without models or other clients."""
        problem, alone = self.prepared.problem, len(self.prepared.clients) < 2
        if not isinstance(problem, Language) or alone or not self.in_use:
            return None
        self.say("rare words in others' suggestions")
        backbone = problem.backbone
        search = Words(backbone, TextEncoder(backbone.tokenizer, problem.control_tokens))
        # loaded again without canaries, which are no words
        clients = modalities.load(self.recipe.model_copy(update={"audit": None})).federation.clients
        texts = {
            i: {split.name: words.documents(backbone.tokenizer, split) for split in data.splits}
            for i, data in clients.items()
        }
        rng = np.random.default_rng(derive_seed(self.settings.seed, "audit", "words"))
        cases, control = (
            [case for case in some if case.owner in self.clients]
            for some in words.rare(texts, self.settings.words, rng)
        )
        first = self.models[self.prepared.clients[0]]
        assert isinstance(first, SharedText)
        base = self._usable(first)
        first.load(self.views[OTHERS][self.clients[0]][0][0])
        shared_part = self._usable(first)

        def suggest(model: PersonalModel) -> words.Suggest:
            return lambda prompts: [
                [w.word for w in some] for some in search.of(model.fast, prompts, self.settings.top)
            ]

        in_use = self.in_use.items()
        suggests = {i: suggest(m) for i, m in in_use if isinstance(m, PersonalModel)}
        by_base, by_shared = suggest(base), suggest(shared_part)
        return words.measured(cases, control, by_base, by_shared, suggests, self.settings.seed)

    def _usable(self, model: SharedText) -> PersonalModel:
        like = next(iter(self.in_use.values()))
        assert isinstance(like, PersonalModel)
        usable = PersonalModel(model.language, replace(like.about, layout=model.language.layout))
        usable.fast  # noqa: B018 - a copy of the values is made when it is asked for first
        return usable
