"""Checks of messages: what clients reply, and what leaves a device that protects its owner."""

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar, cast

import torch

from coterie.aggregation.privacy import Privacy
from coterie.client.outbound import Outbound
from coterie.core.errors import Refused
from coterie.core.protocol import (
    PARTS,
    Ask,
    ClientId,
    Replies,
    Sends,
    Task,
    declared,
    drive,
    find_task,
    trains,
)
from coterie.core.tensors import Named, Tensors, under
from coterie.methods import Method
from coterie.testing.run import Run, World, clause, require

# With what was sent, as it was before a client may have used its memory.
Exchanges = list[tuple[Ask, Replies, dict[ClientId, Tensors]]]
T = TypeVar("T")
# Task, client, what was sent, what a device that protects nothing sends back.
Spoken = tuple[str, ClientId, Tensors, Tensors]
NOISY = Outbound(0, Privacy(where="local", clip=1.0, noise=1.0), secret=True, key=bytes(range(32)))
SECURE = Outbound(0, secret=True, secure=True)
FEW = 64  # numbers: too few to contain a model


def exchanges(method: Method, world: World, rounds: int | None = None) -> Exchanges:
    """Return all tasks and replies of a run, and of an adaptation and before scores after it."""
    run, recorded = Run(method, world), Exchanges()

    def answer(ask: Ask, phase: int) -> Replies:
        before = _copied(ask)
        recorded.append((ask, run.answer(ask, phase), before))
        return recorded[-1][1]

    run.rounds(method.rounds if rounds is None else rounds, answer)
    drive(method.adapt(run.server, run.clients), answer)
    drive(method.before_scores(run.models()), answer)
    return recorded


def _copied(ask: Ask) -> dict[ClientId, Tensors]:
    return {i: {name: t.clone() for name, t in sent.items()} for i, sent in ask.to.items()}


def _once(compute: Callable[[Method, World], T], method: Method, world: World) -> T:
    """Return what several checks look at, computed once for each method and world."""
    key = (compute, type(method), repr(method))
    if key not in world.memo:
        world.memo[key] = compute(method, world)
    return cast(T, world.memo[key])


def spoken(method: Method, world: World) -> list[Spoken]:
    """Return clients' replies: in a run, in an adaptation, when scored, and when keeping models."""
    seen = _once(exchanges, method, world)
    spoken = [(a.name, i, sent[i], dict(replies[i])) for a, replies, sent in seen for i in replies]
    run = Run(method, world).rounds(method.rounds)
    tasks = method.score_and_keep, method.recall, method.score, method.score_test, method.keep
    for function in tasks:
        synced = function.__name__ == "score_test" and not method.stateless
        models = method.download(run.server, run.clients) if synced else run.models()
        ask = Ask(function, {i: models[i] for i in run.clients})
        sent = _copied(ask)
        replies = run.engine.answer(Ask(function, sent), method.rounds, -1)
        spoken += [(function.__name__, i, sent[i], dict(replies[i])) for i in replies]
    return spoken


@clause("`Ask.reply_spec` says which tensors a client sends back, and it sends those")
def replies_have_the_form_asked_for(method: Method, world: World) -> None:
    """Check names, shapes, dtypes and values of all replies of honest clients."""
    for ask, replies, _ in _once(exchanges, method, world):
        for i, reply in replies.items():
            ask.check(i, reply)


@clause(
    "a task is declared Sends.UPDATE where, and only where, a model comes and goes back changed"
)
def training_tasks_say_so(method: Method, world: World) -> None:
    """Check that all floating-point tensors of such a reply came by the same names. Exempt are
    changes of a state beside the model (`change/...`), and tensors named after clients, which
    compare these.
    """
    for ask, replies, before in _once(exchanges, method, world):
        if PARTS not in ask.name:
            for i, reply in replies.items():
                _require_declared(ask.task, ask.smaller, before[i], reply, world)
            continue
        parts = zip(method.methods.items(), ask.name.split(PARTS), strict=True)
        for name, function in [(name, find_task(of, its)) for (name, of), its in parts if its]:
            for i, reply in replies.items():
                if sent := under(name, before[i]):  # or the part asks nothing of this client
                    its = under(name, reply)
                    _require_declared(function, ask.smaller, sent, its, world)


def _require_declared(
    function: Task, smaller: bool, sent: Named, reply: Named, world: World
) -> None:
    """Require that a task says whether it sends back what a client was sent, changed."""
    numbers = {name for name, t in reply.items() if t.is_floating_point()}
    same = (numbers & sent.keys()) - world.federation.clients.keys()
    says = f"task {function.__name__} is declared to send {declared(function).value}"
    comes = "a model that came goes back" if same else "no model that came goes back"
    require(trains(function) == bool(same), f"{says}, but {comes}")
    if trains(function):
        foreign = sorted(n for n in numbers - same if not n.startswith("change/"))
        require(not foreign, f"{says}, but {foreign[:5]} did not come to the client")
        moved = any(not torch.equal(reply[name], sent[name]) for name in same)
        require(smaller or moved, f"{says}, but it sends back what came, unchanged")


def few(reply: Named) -> bool:
    """Return whether a reply is too small for a model."""
    return sum(t.numel() for t in reply.values()) <= FEW


def leaves(door: Outbound, method: Method, message: Spoken) -> Tensors | None:
    """Return the tensors that a device sends in any exchange; None if it refuses."""
    name, client, sent, reply = message
    out: list[Tensors | None] = []
    for phase in (0, -1, -2):
        try:
            out.append(door(find_task(method, name), client, sent, dict(reply), 0, phase))
        except Refused:
            out.append(None)
    alike = all((one is None) == (out[0] is None) for one in out)
    require(alike, f"whether a reply to {name} leaves depends on the number of the exchange")
    return out[0]


@clause("a device with local privacy sends only values with noise, and a few scores")
def local_privacy_leaves_only_noise(method: Method, world: World) -> None:
    """Check what a device that adds noise sends of each reply."""
    for message in _once(spoken, method, world):
        name, _, sent, reply = message
        out = leaves(NOISY, method, message)
        if out is None:
            continue
        numbers = {key for key, t in reply.items() if t.is_floating_point()}
        large = {key for key in numbers if key in sent and not few({key: reply[key]})}
        bare = sorted(key for key in large if torch.equal(out[key], reply[key]))
        require(not bare, f"{bare[:5]} of the reply to {name} leave without noise")
        untouched = {key: t for key, t in out.items() if torch.equal(t, reply[key])}
        require(
            few(untouched), f"in the reply to {name} a model could hide in {sorted(untouched)[:5]}"
        )
        if declared(find_task(method, name)) is Sends.UPDATE:
            trained = {key for key in numbers if key in out and out[key].numel()}
            bare = sorted(key for key in trained if torch.equal(out[key], reply[key]))
            require(not bare, f"{bare[:5]} of the update of {name} leave without noise")


@clause("a device with secure aggregation sends nothing in the clear except a few scores")
def secure_aggregation_leaves_only_scores(method: Method, world: World) -> None:
    """Check what a device with secure aggregation sends unmasked of each reply."""
    for message in _once(spoken, method, world):
        out = leaves(SECURE, method, message)
        if out is None:
            continue
        require(
            few(out), f"more than {FEW} numbers of the reply to {message[0]} leave in the clear"
        )
        vectors = [key for key, t in out.items() if t.dtype == torch.float32 and t.numel() > 1]
        require(not vectors, f"{vectors[:5]} of the reply to {message[0]} leave in the clear")


@clause("masked replies are updates: tensors of the shapes that were sent")
def masked_replies_are_updates(method: Method, world: World) -> None:
    """Check the shapes of a device's tensors under the masks of secure aggregation."""
    for message in _once(spoken, method, world):
        name, _, sent, _ = message
        out = leaves(replace(SECURE, masked=True), method, message)
        if out is not None and not few(out):
            numbers = [key for key, t in out.items() if t.is_floating_point()]
            bad = [key for key in numbers if key not in sent or out[key].shape != sent[key].shape]
            require(not bad, f"{bad[:5]} of the reply to {name} are masked but are not updates")
