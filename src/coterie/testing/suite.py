"""The suite: `check_method`; all checks in their order; and those of messages, of what clients
reply and of what leaves a device that protects its owner.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import torch
from pydantic import TypeAdapter

from coterie.aggregation.privacy import Privacy
from coterie.client.outbound import Outbound
from coterie.core import protocol
from coterie.core.errors import Refused
from coterie.core.tensors import Named, Tensors, under
from coterie.engines.inprocess import ENGINES
from coterie.methods import METHODS, Method
from coterie.methods.section import build_method
from coterie.testing import run, training
from coterie.testing.run import Check, NotApplicable, Run, World, clause, once, require

# With what was sent, as it was before a client may have used its memory.
Exchanges = list[tuple[protocol.Ask, protocol.Replies, dict[protocol.ClientId, Tensors]]]
# Task, client, what was sent, what a device that protects nothing sends back.
Spoken = tuple[str, protocol.ClientId, Tensors, Tensors]
NOISY = Outbound(0, Privacy(where="local", clip=1.0, noise=1.0), secret=True, key=bytes(range(32)))
SECURE = Outbound(0, secret=True, secure=True)
FEW = 64  # numbers: too few to contain a model


def exchanges(method: Method, world: World, rounds: int | None = None) -> Exchanges:
    """Return all tasks and replies of a run, and of an adaptation and before scores after it."""
    run, recorded = Run(method, world), Exchanges()

    def answer(ask: protocol.Ask, phase: int) -> protocol.Replies:
        before = _copied(ask)
        recorded.append((ask, run.answer(ask, phase), before))
        return recorded[-1][1]

    run.rounds(method.rounds if rounds is None else rounds, answer)
    protocol.drive(method.adapt(run.server, run.clients), answer)
    protocol.drive(method.before_scores(run.models()), answer)
    return recorded


def _copied(ask: protocol.Ask) -> dict[protocol.ClientId, Tensors]:
    return {i: {name: t.clone() for name, t in sent.items()} for i, sent in ask.to.items()}


def spoken(method: Method, world: World) -> list[Spoken]:
    """Return clients' replies: in a run, in an adaptation, when scored, and when keeping models."""
    seen = once(exchanges, method, world)
    spoken = [(a.name, i, sent[i], dict(replies[i])) for a, replies, sent in seen for i in replies]
    run = Run(method, world).rounds(method.rounds)
    tasks = method.score_and_keep, method.recall, method.score, method.score_test, method.keep
    for function in tasks:
        synced = function.__name__ == "score_test" and not method.stateless
        models = method.download(run.server, run.clients) if synced else run.models()
        ask = protocol.Ask(function, {i: models[i] for i in run.clients})
        sent = _copied(ask)
        replies = run.engine.answer(protocol.Ask(function, sent), method.rounds, -1)
        spoken += [(function.__name__, i, sent[i], dict(replies[i])) for i in replies]
    return spoken


@clause("`Ask.reply_spec` says which tensors a client sends back, and it sends those")
def replies_have_the_form_asked_for(method: Method, world: World) -> None:
    """Check names, shapes, dtypes and values of all replies of honest clients."""
    for ask, replies, _ in once(exchanges, method, world):
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
    for ask, replies, before in once(exchanges, method, world):
        if protocol.PARTS not in ask.name:
            for i, reply in replies.items():
                _require_declared(ask.task, ask.smaller, before[i], reply, world)
            continue
        parts = zip(method.methods.items(), ask.name.split(protocol.PARTS), strict=True)
        for name, function in [
            (name, protocol.find_task(of, its)) for (name, of), its in parts if its
        ]:
            for i, reply in replies.items():
                if sent := under(name, before[i]):  # or the part asks nothing of this client
                    its = under(name, reply)
                    _require_declared(function, ask.smaller, sent, its, world)


def _require_declared(
    function: protocol.Task, smaller: bool, sent: Named, reply: Named, world: World
) -> None:
    """Require that a task says whether it sends back what a client was sent, changed."""
    numbers = {name for name, t in reply.items() if t.is_floating_point()}
    same = (numbers & sent.keys()) - world.federation.clients.keys()
    says = f"task {function.__name__} is declared to send {protocol.declared(function).value}"
    comes = "a model that came goes back" if same else "no model that came goes back"
    require(protocol.trains(function) == bool(same), f"{says}, but {comes}")
    if protocol.trains(function):
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
            out.append(door(protocol.find_task(method, name), client, sent, dict(reply), 0, phase))
        except Refused:
            out.append(None)
    alike = all((one is None) == (out[0] is None) for one in out)
    require(alike, f"whether a reply to {name} leaves depends on the number of the exchange")
    return out[0]


@clause("a device with local privacy sends only values with noise, and a few scores")
def local_privacy_leaves_only_noise(method: Method, world: World) -> None:
    """Check what a device that adds noise sends of each reply."""
    for message in once(spoken, method, world):
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
        if protocol.declared(protocol.find_task(method, name)) is protocol.Sends.UPDATE:
            trained = {key for key in numbers if key in out and out[key].numel()}
            bare = sorted(key for key in trained if torch.equal(out[key], reply[key]))
            require(not bare, f"{bare[:5]} of the update of {name} leave without noise")


@clause("a device with secure aggregation sends nothing in the clear except a few scores")
def secure_aggregation_leaves_only_scores(method: Method, world: World) -> None:
    """Check what a device with secure aggregation sends unmasked of each reply."""
    for message in once(spoken, method, world):
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
    for message in once(spoken, method, world):
        name, _, sent, _ = message
        out = leaves(replace(SECURE, masked=True), method, message)
        if out is not None and not few(out):
            numbers = [key for key, t in out.items() if t.is_floating_point()]
            bad = [key for key in numbers if key not in sent or out[key].shape != sent[key].shape]
            require(not bad, f"{bad[:5]} of the reply to {name} are masked but are not updates")


# From the most specific checks to those that many mistakes break.
CHECKS: tuple[Check, ...] = (
    training.only_shared_tensors_travel,
    training.state_keeps_its_form,
    training.two_runs_are_alike,
    replies_have_the_form_asked_for,
    training_tasks_say_so,
    training.training_changes_the_clients,
    training.batch_is_as_one_by_one,
    training.engines_are_alike,
    training.absent_client_keeps_everything,
    training.failing_clients_are_left_out,
    training.resumed_run_ends_the_same,
    training.some_clients_a_round,
    training.clients_come_and_go,
    training.devices_are_alike,
    training.schedules_run_over_the_rounds,
    training.order_changes_nothing,
    training.one_client_alone,
    local_privacy_leaves_only_noise,
    secure_aggregation_leaves_only_scores,
    masked_replies_are_updates,
)
# Settings of small runs: two rounds exercise the whole method.
SMALL = {"rounds": 2, "local_steps": 2, "router_every": 1, "router_steps": 1}


@dataclass(frozen=True)
class Checked:
    """The result of checking a method; `str` of it is a short summary.

    Args:
        method: The method, with its settings.
        engines: The engines that it ran on.
        held: The checks that hold, by the name of the world.
        left_out: The reason why a check does not apply, by the names of the world and the check.
    """

    method: Method
    engines: tuple[str, ...]
    held: Mapping[str, tuple[str, ...]]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        """Return one line for each world, and one for each thing that does not apply."""
        lines = [f"{type(self.method).__name__} keeps the contract, on {', '.join(self.engines)}"]
        lines += [f"  {world}: {len(held)} checks hold" for world, held in self.held.items()]
        lines += [f"  does not apply: {what}: {why}" for what, why in self.left_out.items()]
        return "\n".join(lines)


def check_method(
    method: Method | type[Method] | str,
    *,
    leave_out: Mapping[str, str] | None = None,
    **settings: Any,
) -> Checked:
    """Check that a method keeps the contract: in every world with models for it, on every engine.

    Needs no data, no download and no pytest; a method that holds takes seconds.

    Args:
        method: Its name (`my_package.my_file:MyMethod` is one), its class, or an instance.
        leave_out: Names of checks that cannot hold for this method, and why.
        settings: Fields of the method; those of a name or class not given are as in `SMALL`.

    Raises:
        AssertionError: The first check that fails: what is wrong, and the clause of the contract.
        ValueError: There is no such setting, or no such check to leave out.
        Refused: No world has a model for this method.

    Examples:
        >>> from coterie.testing import check_method
        >>> print(check_method("fedavg"))  # doctest: +SKIP
    """
    built, reasons = build(method, settings), dict(leave_out or {})
    if unknown := reasons.keys() - {check.__name__ for check in CHECKS}:
        raise ValueError(f"leave_out: there is no check {sorted(unknown)[0]!r}")
    held: dict[str, tuple[str, ...]] = {}
    left_out: dict[str, str] = {}
    for world in (run.language(), run.pictures()):
        if why := world.refuses(built):
            left_out[world.name] = why
            continue
        missing = dict(_held_back(built, world, reasons))
        left_out |= {f"{world.name}, {name}": why for name, why in missing.items()}
        held[world.name] = tuple(c.__name__ for c in CHECKS if c.__name__ not in missing)
    if not held:
        problem = f"no kind of model has the layout of {type(built).__name__}"
        raise Refused(problem, "\n".join(left_out.values()))
    engines = (*ENGINES, *(["flower"] if find_spec("flwr") else []))
    return Checked(built, engines, held, left_out)


def _held_back(
    method: Method, world: run.World, leave_out: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Run all checks in a world; yield those that do not apply, and why."""
    for check in CHECKS:
        if check.__name__ in leave_out:
            yield check.__name__, leave_out[check.__name__]
            continue
        try:
            check(method, world)
        except NotApplicable as reason:
            yield check.__name__, str(reason)


def build(method: Method | type[Method] | str, settings: Mapping[str, Any]) -> Method:
    """Return the method of a name, class or instance with settings."""
    if isinstance(method, Method):
        return replace(method, **settings)
    if isinstance(method, str):
        entry = METHODS.get(method)
        small = {} if entry is None else _small(entry.method, entry.fixed)
        return build_method({"name": method, **small, **settings})
    return TypeAdapter(method).validate_python({**_small(method, {}), **settings})


def _small(method: type[Method], fixed: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `SMALL` that a class has as fields and that its name does not fix."""
    # rounds that are 0 by default are always 0: such a method trains nothing
    names = {f.name for f in fields(method) if f.default != 0} - set(fixed)
    return {name: value for name, value in SMALL.items() if name in names}
