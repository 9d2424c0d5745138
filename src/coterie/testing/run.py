"""Tiny federations and models made in code; a method on them, round by round, without files; and
checks: functions of a method and a world, with the clause of the contract that each checks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import numpy as np
import torch

from coterie.client.blueprint import Blueprint, Model, Trainable
from coterie.client.settings import Training
from coterie.client.site import Site
from coterie.core.errors import ModelError
from coterie.core.protocol import Ask, ClientId, Replies, State, drive
from coterie.core.tensors import Named, Tensors
from coterie.data.examples import ExampleSplit
from coterie.data.federation import CENTRALIZED, ClientData, Federation
from coterie.data.splits import TokenSplit
from coterie.engines.engine import Engine
from coterie.engines.inprocess import ENGINES
from coterie.methods import Method
from coterie.models.adapter import Adapter
from coterie.models.backbone import Backbone
from coterie.models.classifier import Classifier
from coterie.models.common import CommonExpert
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.networks import NetworkShape
from coterie.models.pool import PoolClassifier
from coterie.runs.problems.classification import Classification
from coterie.runs.problems.language import Language
from coterie.runs.recipes.sections import ClassifierSection, LanguageSection

BASE = Layout(rank=2)
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class World:
    """A federation, and the models that its clients can have.

    Args:
        name: What the clients learn, in messages.
        federation: The clients and their data.
        build: Makes a model of a layout.
        trainable: Makes the trainable part of one, as a server has it.
        check: Raises ModelError for a layout that models of this kind cannot have.
        separate: As `build`, of models that are never stacked; None if they never are.
    """

    name: str
    federation: Federation
    build: Callable[[Layout], Model]
    trainable: Callable[[Layout], Trainable]
    check: Callable[[str, Layout], None]
    separate: Callable[[Layout], Model] | None = None
    # What checks computed that others need too.
    memo: dict[object, Any] = field(init=False, repr=False, default_factory=dict)

    def among(self, clients: Mapping[ClientId, ClientData]) -> "World":
        """Return the same world with these clients, in this order."""
        anchors = tuple(q for q in self.federation.anchors if q in clients)
        return replace(self, federation=Federation(clients, "", self.federation.clusters, anchors))

    @property
    def alone(self) -> "World":
        """The same world with its first client alone."""
        id, data = next(iter(self.federation.clients.items()))
        return self.among({id: data})

    @cached_property
    def one_by_one(self) -> "World":
        """The same world without batches of clients, which change the rounding."""
        return self if self.separate is None else replace(self, build=self.separate, separate=None)

    def refuses(self, method: Method) -> str | None:
        """Return why a method has no model here; None if it has."""
        try:
            for position in range(len(self.federation.clients)):
                for layout in method.layout(position, BASE).models:
                    self.check(type(method).__name__, layout)
        except ModelError as error:
            return error.problem.removeprefix("method.name: ")
        return None


class OneByOne(Classifier):
    """A classifier whose clients are never computed in a batch."""

    stacks = False


def write_tiny_base(folder: Path) -> Path:
    """Write a random Llama of two blocks and width 16, with a byte-level tokenizer, to a folder."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|endoftext|>": 0} | {c: i for i, c in enumerate(alphabet, 1)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def tiny_texts() -> Federation:
    """Return three clients with byte tokens of their own range, in windows of 8; two clusters."""
    rng = np.random.default_rng(0)

    def split(name: str, low: int, size: int) -> TokenSplit:
        tokens = rng.integers(low, low + 60, size).astype(np.uint16)
        return TokenSplit(name, tokens, context=8, seed=low)

    sizes = {"train": 400, "valid": 120, "test": 100}
    clients = {
        name: ClientData(name, *(split(part, low, size) for part, size in sizes.items()))
        for name, low in (("ann", 1), ("ben", 60), ("cleo", 120))
    }
    return Federation(clients, "three clients of random bytes", {"ann": 0, "ben": 0, "cleo": 1})


def tiny_pictures() -> Federation:
    """Return three clients with a few digits of 4 x 4 pixels; the third has permuted labels."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.ascontiguousarray(digits.images[:, None, ::2, ::2] / 16, dtype=np.float32)
    bounds = {"train": (0, 20), "valid": (20, 28), "test": (28, 40)}

    def client(name: str, cluster: int, first: int) -> ClientData:
        labels = ((digits.target + 5 * cluster) % 10).astype(np.int64)

        def split(part: str, start: int, end: int) -> ExampleSplit:
            rows = np.arange(first + start, first + end)
            return ExampleSplit(part, images, labels, rows, first + 1, (0.3,), (0.4,), 10)

        return ClientData(name, *(split(part, *ends) for part, ends in bounds.items()))

    clusters = {"ann": 0, "ben": 0, "cleo": 1}
    clients = {i: client(i, k, 40 * place) for place, (i, k) in enumerate(clusters.items())}
    return Federation(clients, "three clients of digits", clusters, ("ann",))


def language_on(base: Path, federation: Federation) -> World:
    """Return the world of language models: LoRA adapters on the base in a folder."""
    backbone = Backbone.load(base)
    kind = Language(LanguageSection(), backbone, federation)
    trainable = partial(Adapter, backbone.architecture)
    return World("language", federation, partial(LanguageModel, backbone), trainable, kind.check)


def pictures_of(federation: Federation) -> World:
    """Return the world of image classifiers: a small network, and a common expert beside it."""
    shape = NetworkShape("mlp", (1, 4, 4), 10, (6,))
    section = ClassifierSection(kind="classifier", gate_width=5)
    common = CommonExpert(shape, shape.initial(3))
    classification = Classification(shape, common, section, torch.device("cpu"), federation)

    def build(kind: type[Classifier], layout: Layout) -> Classifier | PoolClassifier:
        return kind(shape) if type(layout) is Layout else classification.build(layout)

    whole = partial(build, Classifier)
    return World(
        "pictures", federation, whole, whole, classification.check, partial(build, OneByOne)
    )


@cache
def language() -> World:
    """Return the world of language models, on a tiny base made for it."""
    with TemporaryDirectory() as folder:
        return language_on(write_tiny_base(Path(folder)), tiny_texts())


@cache
def pictures() -> World:
    """Return the world of image classifiers, on handwritten digits."""
    return pictures_of(tiny_pictures())


Check = Callable[[Method, World], None]
Answer = Callable[[Ask, int], Replies]
Draw = Callable[[Sequence[ClientId], int], Sequence[ClientId]]


def everybody(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Draw all clients."""
    return clients


def some(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Draw all clients but one, which changes by round and is not the last before the third."""
    if len(clients) < 3:
        return clients
    return [i for i in clients if i != sorted(clients)[2 - round % 3]]


def coming_and_going(clients: Sequence[ClientId], round: int) -> Sequence[ClientId]:
    """Return a round's members: the last client joins in the second, the first misses the third."""
    late, away = max(clients), min(clients)
    return [i for i in clients if not ((i == late and round < 1) or (i == away and round == 2))]


class Run:
    """A run of a method in a world, on one of the engines of this process.

    Attributes:
        server: The server's state.
        initial: The server's state before the first round.
        round: The completed rounds.
        asks: All requests.
    """

    def __init__(self, method: Method, world: World, engine: str = "inprocess") -> None:
        federation = world.federation
        self.method, self.clients = method, tuple(federation.clients)
        data, ids = dict(federation.clients), sorted(federation.clients)
        layouts = {i: method.layout(position, BASE) for position, i in enumerate(ids)}
        if method.centralized:
            data[CENTRALIZED] = federation.centralized()
            layouts[CENTRALIZED] = method.layout(0, BASE)
        training = Training(batch_size=4, micro_batch=None)
        total = method.total_iterations
        self.site = Site(world.build, layouts, data, training, seed=7, total_iterations=total)
        self.engine: Engine = ENGINES[engine](self.site, method)
        blueprint = Blueprint(world.trainable, layouts, 7, federation.clusters, federation.anchors)
        self.server = method.init(blueprint, self.clients)
        self.initial = dict(self.server)
        self.asks: list[Ask] = []
        self.round = 0

    def answer(self, ask: Ask, phase: int) -> Replies:
        """Run the clients' tasks."""
        self.asks.append(ask)
        return self.engine.answer(ask, self.round, phase)

    def rounds(
        self,
        count: int,
        answer: Answer | None = None,
        order: Sequence[ClientId] | None = None,
        draw: Draw = everybody,
        there: Draw = everybody,
    ) -> "Run":
        """Run some rounds, and the final exchanges after the last one.

        Args:
            count: The number of rounds.
            answer: A replacement of the engine.
            order: The clients, in another order.
            draw: (clients, round) -> those that take part in it.
            there: (clients, round) -> those that are members of the federation then.
        """
        clients, answer = order or self.clients, answer or self.answer
        for _ in range(count):
            rng = torch.Generator().manual_seed(self.round)
            members = there(clients, self.round)
            self.server = self.method.members(self.server, members)
            drawn = draw(members, self.round)
            self.server = drive(self.method.round(self.server, drawn, rng), answer)
            if self.round + 1 == self.method.rounds:
                self.server = drive(self.method.finish(self.server, members), answer)
            self.round += 1
        return self

    def client(self, i: ClientId) -> Any:
        """Return a client with its memory: a `Client` or `ClientOfParts`."""
        return self.site.clients(i, dict(self.engine.states()[i]))

    def models(self) -> Mapping[ClientId, Tensors]:
        """Return what clients need to have a model: nothing, unless they keep none."""
        if not self.method.stateless:
            return {i: {} for i in self.clients}
        adaptation = self.method.adapt(self.server, self.clients)
        return drive(adaptation, lambda ask, phase: self.engine.answer(ask, self.round, phase))


def once(compute: Callable[[Method, World], T], method: Method, world: World) -> T:
    """Return what several checks look at, computed once for each method and world."""
    key = (compute, type(method), repr(method))
    if key not in world.memo:
        world.memo[key] = compute(method, world)
    return cast(T, world.memo[key])


def whole(method: Method, world: World) -> Run:
    """Return a run of all rounds, which checks look at and leave as it is."""
    return Run(method, world).rounds(method.rounds)


def of_some(method: Method, world: World) -> Run:
    """Return likewise a run in which not all clients take part in each round."""
    return Run(method, world).rounds(method.rounds, draw=some)


class NotApplicable(Exception):
    """Raised by a check that does not apply to a method, with the reason."""


def clause(text: str) -> Callable[[Check], Check]:
    """Turn a function that tests one clause of the contract into a check, which raises
    AssertionError with the problem and the clause, whatever the method's own code raised (that is
    chained), and NotApplicable if there is nothing to check.
    """

    def mark(function: Check) -> Check:
        @wraps(function)
        def check(method: Method, world: World) -> None:
            try:
                function(method, world)
            except NotApplicable:
                raise
            except Exception as error:
                required = isinstance(error, AssertionError)
                problem = str(error) if required else f"{type(error).__name__}: {error}"
                where = f"{type(method).__name__}, {world.name}, {function.__name__}"
                raise AssertionError(f"{where}: {problem}\n  The contract: {text}") from error

        return check

    return mark


def require(holds: bool, problem: str) -> None:
    """Raise AssertionError with the problem, unless something holds; under -O, too."""
    if not holds:
        raise AssertionError(problem)


def require_same(a: Named, b: Named, what: str) -> None:
    """Raise AssertionError unless two dicts of tensors are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has {sorted(a.keys() ^ b.keys())}")
    differing = [name for name in a if not torch.equal(a[name], b[name])]
    require(not differing, f"{what}: {differing[:5]} differ")


def require_same_states(a: Mapping[str, State], b: Mapping[str, State], what: str) -> None:
    """Raise AssertionError unless the clients' states are equal to the bit."""
    require(a.keys() == b.keys(), f"{what}: only one has a state of {sorted(a.keys() ^ b.keys())}")
    for i, state in a.items():
        require_same(state, b[i], f"{what}, state of client {i!r}")


def require_same_run(a: Run, b: Run, what: str) -> None:
    """Raise AssertionError unless two runs have equal results, to the bit."""
    require_same(a.server, b.server, f"{what}, server's state")
    require_same_states(a.engine.states(), b.engine.states(), what)
