"""Estimate the cost of a run before it starts: a few steps of a few clients are measured, bytes are
counted, time and memory extrapolated. Where a step is long, a part of one is measured for all
methods, and the rows that each method computes are counted.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from coterie.core import devices
from coterie.core.errors import CoterieError
from coterie.core.protocol import Ask, ClientId, Replies, derive_seed, drive
from coterie.core.tensors import Tensors, nbytes, under
from coterie.core.threads import computing
from coterie.engines.engine import Listener
from coterie.engines.inprocess import InProcess
from coterie.models.windows import shortened, tokens_in
from coterie.runs.backends import SHORT, CommonThreads, LocalBackend, SharedData, computing_threads
from coterie.runs.problems.auto import resolved
from coterie.runs.problems.language import Language
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import evaluated
from coterie.runs.scoring import CURVE_ROWS

FEW = 2  # clients that are measured
STEPS = 2  # local iterations of each
LONG_S = 2.0  # where a round of one client takes longer, it is not measured with more
STEP_S = 0.5  # a step that takes no longer is measured whole, and for each method
PART_S = 3.0  # of a longer step, parts are measured, at last one that takes about as long:
PARTS = 4  # the first is slow as it is the first, and the shorter the slower for each token
WHOLE_S = 0.5  # a round, of all clients or a few, that takes no longer is measured as it is
LONGEST_S = 10.0  # a round that takes longer is not repeated: loading libraries matters no more
BATCHES = 2  # of a test set that are scored
MEASURED = 0.01  # of a comparison's time, for which its methods are measured before it
# seconds to type a word with a model's suggestions, and for each operation of a forward pass: 4 s
# for 20 words with the embedded base, 20 s with one of 135 M parameters (docs/own-text.md)
WORD_S, OPERATION_S = 0.15, 3e-9


@dataclass(frozen=True)
class Estimate:
    """The time and memory that one method will take on this machine as it is now.

    Examples:
        >>> import coterie
        >>> found = coterie.dry_run("cobo-digits", compare_with=["fedavg"])
        >>> list(found), found["cobo"].seconds > 0, found["fedavg"].up > 0
        (['fedavg', 'cobo'], True, True)

    Args:
        seconds: Of all rounds and evaluations; of a part that another row trains only the last
            evaluation.
        once: Seconds that the number of rounds does not change: final scores, a method's `finish`.
        up: Bytes that a client sends in a round.
        down: Bytes that a client receives in a round.
        memory: Bytes: the peak of the process so far, and the states of all clients.
    """

    seconds: float
    once: float  # of these
    up: float
    down: float
    memory: float | None
    part_of: str | None = None  # the method that trains this one as a part, which takes no time


def estimate(prepared: Prepared, speed: "Speed | None" = None) -> Estimate:
    """Measure a round of a few clients in memory and extrapolate; no model is kept. `speed` is that
    of the base, where other methods on it are estimated too.
    """
    method, recipe = prepared.method, prepared.recipe
    steps = min(method.local_steps, STEPS)
    with (speed or Speed()).counting(prepared) as counted:
        trial = _Trial(prepared, steps, counted)
        if method.rounds and counted:
            trial.measure(steps, FEW)
        elif method.rounds and trial.measure(min(1, steps), 1) < LONG_S:
            took = trial.measure(steps, FEW) / FEW
            # small networks of many clients compute as one batch: fewer cost more for each
            whole, clients = max(round(prepared.iterations), 1), len(prepared.clients)
            few = clients if took * whole / steps * clients < WHOLE_S else FEW
            if took * whole / steps * few < WHOLE_S:
                trial.measure(whole, few)
        scoring = trial.scoring()
    per_step = trial.seconds / trial.steps * _router(prepared, trial.steps)
    seconds = method.rounds * prepared.iterations * per_step
    every, share = recipe.evaluate_every, share_of(prepared, recipe.evaluate_rows)
    evaluations = max(math.ceil(method.rounds / every), 1) if every else 1
    evaluations += recipe.keep == "best" and method.rounds > 0  # that before the first round
    points = 1 + math.ceil(method.rounds / recipe.curve_every) if recipe.curve_every else 0
    curve = points * share_of(prepared, CURVE_ROWS, ("test",))  # in evaluations
    seconds += (evaluations * share + curve) * scoring
    # of the kept models; or once more, synchronised, of the test sets alone
    end = share_of(prepared, recipe.final_rows) if recipe.evaluate_rows else 0.5
    once = (scoring * end + trial.last) / prepared.at_once + (recipe.words or 0) * word(prepared)
    peak = devices.peak_memory()
    memory = None if peak is None else peak + trial.state_bytes * len(prepared.site.data)
    seconds = seconds / prepared.at_once + once
    return Estimate(seconds, once if method.rounds else seconds, trial.up, trial.down, memory)


def share_of(
    prepared: Prepared, rows: int | None, splits: Sequence[str] = ("valid", "test")
) -> float:
    """Return the share of all rows that so many of each of these splits are."""
    everyone = list(prepared.problem.federation.everyone.values())
    sizes: list[int] = [getattr(data, name).windows for data in everyone for name in splits]
    scored = sum(size if rows is None else min(rows, size) for size in sizes)
    return scored / sum(data.valid.windows + data.test.windows for data in everyone)


def word(prepared: Prepared) -> float:
    """Return about how long a word of each client takes to be typed."""
    if not isinstance(prepared.problem, Language):
        return 0.0
    layouts = [prepared.site.layouts[i] for i in prepared.clients]
    of_models = (prepared.problem.flops(layout, True) for layout in layouts[0].models)
    return len(layouts) * sum(WORD_S + OPERATION_S * flops for flops in of_models)


def work(prepared: Prepared) -> float:
    """Return the rows trained on, and a third of the rows scored: a proxy for time."""
    federation, recipe = prepared.problem.federation, prepared.recipe
    iterations = prepared.method.rounds * len(recipe.active(federation, 0)) * prepared.iterations
    scored = sum(data.valid.windows + data.test.windows for data in federation.everyone.values())
    return iterations * recipe.training.batch_size + scored / 3


def estimates(recipe: Recipe, speed: "Speed | None" = None) -> Iterator[tuple[Prepared, Estimate]]:
    """Yield the cost of each method of a recipe here, its own last. Raises Refused."""
    recipe, _ = resolved(recipe)
    backend, data, speed = LocalBackend(), SharedData(), speed or Speed()
    threads = CommonThreads((), backend)
    rows = [*map(recipe.with_method, recipe.compare_with), recipe]
    for row in rows:
        prepared = threads.assign(data.prepared(row, backend))
        with computing(computing_threads(prepared)):
            cost = estimate(prepared, speed)
        whole = next((of.method["name"] for of in rows if of.trains(row)), None)
        last = cost.once if row.evaluate_rows else 0.0  # a part is only scored on everything
        yield prepared, replace(cost, seconds=last, once=last, part_of=whole) if whole else cost


@dataclass
class Counted:
    """The seconds of steps and scores that are counted, not computed."""

    step: float  # seconds of a row per forward operation of a prediction
    score: float  # likewise, of a row that is scored
    seconds: float = 0.0

    def model(self, flops: int) -> dict[str, Callable[..., Any]]:
        """Return what stands in for the methods of a model that compute."""

        def gradient(batch: Any, wrt: Sequence[nn.Parameter], *_: Any) -> Any:
            self.seconds += len(batch) * flops * self.step
            return [torch.zeros_like(p) for p in wrt], {"loss": torch.zeros(())}

        def per_example(batch: Any, wrt: Sequence[nn.Parameter]) -> Any:
            rows = [p.new_zeros(len(batch), *p.shape) for p in wrt]
            return rows, gradient(batch, ())[1]

        def predictions(batches: Iterable[Any]) -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                self.seconds += len(batch) * flops * self.score
                shape = len(batch), 1
                yield torch.full(shape, -1.0), torch.zeros(shape[0], dtype=torch.int64)

        stands_in = {"gradient": gradient, "gradient_elsewhere": gradient}
        return stands_in | {"per_example": per_example, "predictions": predictions}


@dataclass
class Speed:
    """How long a base takes for a row, where a step is long: measured once for all methods on it,
    and proportional to their operations. Each of their steps would take seconds.
    """

    known: dict[tuple[int, ...], tuple[float, float] | None] = field(default_factory=dict)

    @contextmanager
    def counting(self, prepared: Prepared) -> Iterator[Counted | None]:
        """Count in the block what models would compute; None: they do, as their steps are short."""
        problem, site = prepared.problem, prepared.site
        if not isinstance(problem, Language):
            yield None
            return
        # other windows have other steps, long or short
        base = id(problem.backbone), prepared.recipe.training.batch_size, problem.section.context
        if base not in self.known:
            self.known[base] = _pace(prepared)
        if (pace := self.known[base]) is None:
            yield None
            return
        counted, patched = Counted(*pace), list[tuple[Any, str]]()
        for layout in dict.fromkeys(each for of in site.layouts.values() for each in of.models):
            model, flops = site.built(layout), problem.flops(layout, True)
            for name, stands_in in counted.model(flops).items():
                setattr(model, name, stands_in)
                patched.append((model, name))
        try:
            yield counted
        finally:
            for model, name in patched:
                delattr(model, name)


def _pace(prepared: Prepared) -> tuple[float, float] | None:
    """Return the seconds of a row per forward operation of a prediction, in a step and scored, from
    a part of one step of a plain adapter; None where a whole step is short.
    """
    training, problem = prepared.recipe.training, prepared.problem
    model: Any = problem.build(problem.base)
    wrt = [p for named in model.parameters_by_role.values() for p in named.values()]
    train = problem.federation.clients[prepared.clients[0]].train
    batch: Any = train.batch(0, training.micro_batch or training.batch_size)

    def seconds(compute: Callable[[Any], object], part: Any) -> float:
        begun = time.monotonic()
        compute(part)
        devices.synchronise(problem.device)
        return (time.monotonic() - begun) / tokens_in(part)

    whole, part = tokens_in(batch), shortened(batch, SHORT)
    for k in range(PARTS):
        tokens, of_step = tokens_in(part), seconds(lambda rows: model.gradient(rows, wrt), part)
        part = shortened(batch, max(int(PART_S / of_step), SHORT))
        if k and tokens_in(part) <= tokens:
            break
    if of_step * whole < STEP_S:
        return None
    per_row = whole / len(batch) / problem.flops(problem.base, True)
    return of_step * per_row, seconds(lambda rows: model.score(iter([rows])), part) * per_row


class RunEstimator:
    """Estimates methods' times: measures what the seconds, or a hundredth of the time that they
    will take, allow, and extrapolates to the others.
    """

    def __init__(self, seconds: float = 1.5) -> None:
        self._allowed, self._spent, self._speed = seconds, 0.0, Speed()
        # seconds, of these those after the last round, and work, by method
        self._known: dict[str, tuple[float, float, float]] = {}
        self._rows: list[tuple[str, float, bool]] = []

    def add(self, prepared: Prepared, done: bool, part: bool = False) -> None:
        """Add a method; one that is done takes no time, a part of another only its last scores."""
        name = f"{prepared.recipe.name}, {prepared.recipe.method['name']}"
        begun, size = time.monotonic(), 0.0 if done else work(prepared)
        self._rows.append((name, size, part))
        allowed = max(self._allowed, MEASURED * sum(seconds for seconds, _ in self.costs()))
        if size and self._spent < allowed and name not in self._known:
            cost = estimate(prepared, self._speed)
            self._known[name] = cost.seconds, cost.once, size
            self._spent += time.monotonic() - begun

    def costs(self) -> list[tuple[float, float]]:
        """Return each method's seconds, and of these those after its last round, in the order of
        `add`.
        """
        measured, once, sizes = (sum(of[k] for of in self._known.values()) for k in range(3))
        usual = (measured / sizes, once / sizes) if sizes else (0.0, 0.0)
        rates = {name: (of[0] / of[2], of[1] / of[2]) for name, of in self._known.items()}
        ends = [[size * rate for rate in rates.get(name, usual)] for name, size, _ in self._rows]
        parts = [part for *_, part in self._rows]
        return [(end if p else all_of, end) for p, (all_of, end) in zip(parts, ends, strict=True)]


def _router(prepared: Prepared, steps: int) -> float:
    """Return how much longer router steps make iterations, if too few were measured."""
    method, every = prepared.method, getattr(prepared.method, "router_every", 0)
    if every <= steps or getattr(method, "updates", "alternating") != "alternating":
        return 1.0
    return 1 + getattr(method, "router_steps", 0) / every


class _Trial:
    """A round of few clients and few local iterations, scaled up to all clients."""

    def __init__(self, prepared: Prepared, steps: int, counted: Counted | None) -> None:
        self.prepared, self.steps, self.counted = prepared, max(steps, 1), counted
        self.seconds = self.up = self.down = self.state_bytes = 0.0
        self.last = 0.0  # seconds of what follows the last round

    def measure(self, steps: int, few: int) -> float:
        """Measure the third round of a run; return its seconds."""
        recipe, prepared = self.prepared.recipe, self.prepared
        # a stage in which clients train alone is the shorter one
        stage: dict[str, Any] = {"alone": 0.0} if hasattr(prepared.method, "alone") else {}
        method = replace(prepared.method, local_steps=steps, local_epochs=None, **stage)
        engine = InProcess(prepared.site, method, Listener())
        clients = recipe.active(prepared.problem.federation, 0)
        server = method.init(prepared.blueprint, recipe.present(prepared.clients, 0))
        self.steps, whole = steps, (0.0, 0.0, 0.0)

        def answer(ask: Ask, phase: int) -> Replies:
            chosen = dict(islice(ask.to.items(), few))
            begun = self._now()
            replies = engine.answer(replace(ask, to=chosen), number, phase)
            devices.synchronise(prepared.problem.device)
            if chosen:
                share = len(ask.to) / len(chosen)
                self.seconds += share * (self._now() - begun)
                self.down += share * sum(map(nbytes, chosen.values())) / len(clients)
                self.up += share * sum(map(nbytes, replies.values())) / len(clients)
            return replies

        # the first loads libraries; in the second, methods begin what they do with earlier models
        for number in range(min(method.rounds, 3)):
            begun, self.seconds, self.up, self.down = time.monotonic(), 0.0, 0.0, 0.0
            rng = torch.Generator().manual_seed(derive_seed(recipe.seed, "round", number))
            # a method that needs the other clients fails: what was measured before still counts
            with suppress(CoterieError, KeyError, IndexError):
                server = drive(method.round(server, clients, rng), answer)
                whole = self.seconds, self.up, self.down
            if (took := time.monotonic() - begun) > LONGEST_S:
                break
        of_round = whole if any(whole) else (self.seconds, self.up, self.down)
        if not self.last:  # once, as it may be long
            self.seconds = 0.0
            with suppress(CoterieError, KeyError, IndexError):
                drive(method.finish(server, clients), answer)
            self.last = self.seconds
        self.seconds, self.up, self.down = of_round
        self.state_bytes = max(engine.state_bytes().values(), default=0)
        return took

    def _now(self) -> float:
        return self.counted.seconds if self.counted else time.monotonic()

    def scoring(self) -> float:
        """Return the seconds of one evaluation."""
        federation, recipe = self.prepared.problem.federation, self.prepared.recipe
        groups = evaluated(federation, recipe.evaluate_clients, recipe.seed)
        scored = [federation.everyone[i] for group in groups.values() for i in group]
        id = scored[0].id
        prepared, sent = self.prepared, self._download(id)
        for first in islice(prepared.method.methods, 1):
            prepared, sent = prepared.part(first), under(first, sent)
        client = prepared.site.client(id, {})
        rows = sum(len(batch) for batch in islice(client.batches(client.test), BATCHES))
        with client.borrowing(prepared.method.loadable(client, sent)):
            for _ in range(2):  # the first loads libraries
                begun = self._now()
                client.score(client.test, BATCHES)
                devices.synchronise(client.model.device)
                seconds = self._now() - begun
        windows = sum(data.valid.windows + data.test.windows for data in scored)
        return len(self.prepared.site.layouts[id].models) * seconds * windows / max(rows, 1)

    def _download(self, client: ClientId) -> Tensors:
        """Return what a client receives before it is scored."""
        method, prepared = self.prepared.method, self.prepared
        if not method.serves_unseen_clients:
            return {}
        server = method.init(prepared.blueprint, prepared.recipe.present(prepared.clients, 0))
        engine = InProcess(prepared.site, method, Listener())
        received = drive(method.adapt(server, (client,)), lambda ask, at: engine.answer(ask, 0, at))
        return dict(received[client])
