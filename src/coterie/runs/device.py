"""A device: the machine of one client. It has the client's data, and keeps the client's state
and personal model in a folder of its own.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from coterie import personal
from coterie.aggregation import secure
from coterie.aggregation.dpsgd import rate_of, rdp_of_steps
from coterie.aggregation.noise import kept_key
from coterie.client.interfaces import Metrics
from coterie.client.outbound import Outbound
from coterie.client.site import Site
from coterie.core import names
from coterie.core.errors import CoterieError, DataError, Refused, TensorError
from coterie.core.files import load, save
from coterie.core.own import installed, is_own
from coterie.core.protocol import ClientId, Sends, State, declared, find_task
from coterie.core.tensors import Tensors, from_bytes, nbytes, to_bytes
from coterie.data.own import GROUP as DATA_GROUP
from coterie.engines.messages import Member, Reply, Request, failed, parsed
from coterie.methods import GROUP as METHODS_GROUP
from coterie.runs import loading
from coterie.runs import recipe as recipes
from coterie.runs.account import ACCOUNT, Account, Cost, OutgoingReply, Turn
from coterie.runs.limits import EXCHANGES, Limits
from coterie.runs.prepare import Prepared, outbound, prepare
from coterie.runs.recipe import Recipe

_STATE = re.compile(r"round-(\d{5,})-(\d{3,})\.safetensors")
_MOST_NOTE = 2000  # characters, see `Reply`
_INDIFFERENT = {
    "compare_with",
    "description",
    "paper",
    "samples",
    "memory",
}  # what a resumption may have otherwise
_OWN = {
    "data",
    "flwr",
    "secret",
    "secret.lock",
    "secret.new",
    "resident.key",
    "resident.log",
    "resident.sock",
    "supernode.log",
}


@dataclass(frozen=True)
class Memory:
    """A client's states on its device, one file per exchange, each written atomically.

    A request of turn t is answered from the newest state before t. So a device that was killed goes
    on from its last whole state, a request that is repeated is answered alike, and a server that
    went back to a checkpoint finds clients that go back with it. From `before` to `commit` nobody
    else may use it: that is what `alone` is for.

    Args:
        folder: Of one client in one run.
    """

    folder: Path

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Within the block no other process has this memory: one that is late with a former
        request would undo what came after it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / "lock"):
            yield

    def turns(self) -> dict[Turn, Path]:
        """Return the states that there are, from the oldest."""
        found = {
            (int(m[1]), int(m[2])): path
            for path in self.folder.glob("round-*")
            if (m := _STATE.fullmatch(path.name))
        }
        return dict(sorted(found.items()))

    def before(self, turn: Turn, expects: Turn | None) -> tuple[State, str]:
        """Return the newest whole state before a turn, and what the server should know of it; {}
        for a client that starts.

        Args:
            turn: That is to be done.
            expects: The last one that the server has a reply of; None for a client that it has none
                of. Such a client may have done this turn already, and nothing before it: its reply
                was lost, or the server went back.

        Raises:
            TensorError: There are only later states: the server went back further than devices
                keep.
        """
        turns, note = self.turns(), ""
        for then in sorted((then for then in turns if then < turn), reverse=True):
            try:
                state, _ = load(turns[then])
            except CoterieError as error:
                note = f"left out a damaged state ({error.problem}); "
                continue
            older = expects is not None and then < expects
            return state, (
                f"{note}goes on from its state of round {then[0] + 1}"[-_MOST_NOTE:]
                if note or older
                else ""
            )
        if turns and not note and expects is not None:
            oldest = next(iter(turns))[0] + 1
            raise TensorError(
                f"the server is in round {turn[0] + 1}, this device has states from round "
                f"{oldest} on",
                "Resume the run from its newest checkpoint, or start it afresh with another --out.",
            )
        return {}, (
            f"{note}starts afresh: it has no state of this run"[-_MOST_NOTE:]
            if note or expects is not None
            else ""
        )

    def commit(self, turn: Turn, state: State, kept: int) -> None:
        """Write the state after a turn; what is later is no more, and what is older than a server
        may go back to is let go of.

        Args:
            turn: Just done.
            state: After it.
            kept: Rounds since this one may be asked for again.
        """
        save(self.folder / f"round-{turn[0]:05d}-{turn[1]:03d}.safetensors", state)
        turns = self.turns()
        for then in [then for then in turns if then > turn]:
            turns.pop(then).unlink()
        old = [then for then in turns if then < (kept, 0)]
        for path in [
            *(turns[then] for then in old[:-1]),
            *self.folder.glob("round-*.new"),
        ]:  # those of a process that was killed, too
            path.unlink()


@lru_cache(maxsize=2)
def _loaded(section: str, data: str | None, base: str | None, alone: bool) -> Prepared:
    """Return a server's recipe with what is on this machine; the last ones stay, where a process
    lives on.

    Args:
        section: The recipe, as JSON.
        data: Where the data are here.
        base: Where the base model is here.
        alone: Whether it is a device, with one client's layout at a time; otherwise one of many
            that are simulated here.
    """
    found = json.loads(section)
    if not alone:
        return prepare(recipes.validate(found, "of the server"))
    recipe = recipes.validate(_own(found, data, base), "of the server")
    method = recipe.build_method()
    if method.centralized:
        raise Refused(
            f"{recipe.method['name']} trains on the data of all clients in one place",
            "The data of this device never leave it.",
        )
    if recipe.audit is not None:
        raise Refused(
            "audit: the recipe would plant canaries in this device's data",
            "They are for runs whose data are all on one machine.",
        )
    problem = loading.load(recipe)
    leaving = outbound(
        recipe.model_copy(update={"attack": None}), (), secret=True
    )  # a device does not let itself be told to lie
    site = Site(
        problem.build,
        {},
        problem.federation.everyone,
        recipe.training,
        recipe.seed,
        method.total_iterations,
        leaving,
    )
    return Prepared(recipe, method, problem, site, tuple(problem.federation.clients))


def _own(section: dict[str, Any], data: str | None, base: str | None) -> dict[str, Any]:
    """Return a server's recipe with the device's own places in the place of the server's."""
    places = {key: value for key, value in section["data"].items() if key not in ("root", "path")}
    if data is not None:
        places["path" if "path" in section["data"] else "root"] = data
    model = section["model"] | ({"base": base} if base is not None else {})
    return section | {"data": places, "model": model}


@dataclass(frozen=True)
class Device:
    """A device: one client's side of runs.

    Args:
        home: Its folder: `<run>/states/<client>/` and `<run>/clients/<client>/`, the personal
            model; see `names.encoded`.
        client: Which client of its data it is; None: the only one.
        data: Where its data are: what `data.path` or `data.root` is on this machine; None:
            $COTERIE_DATA.
        base: Where the base model is on this machine; None: where the recipe says.
        index: In a simulation, instead of `client`: its position among all clients of the
            recipe's data, which are all here.
        secure: Whether it lets nothing that was trained leave but by secure aggregation, whatever a
            recipe says.
        limits: What its owner allows.
    """

    home: Path
    client: ClientId | None = None
    data: Path | None = None
    base: str | None = None
    index: int | None = None
    secure: bool = False
    limits: Limits = field(default_factory=Limits)

    def answer(self, text: str, body: bytes) -> tuple[str, bytes]:
        """Do what a request asks. There always is a reply; one with a `problem` has no tensors.

        Args:
            text: A `Request`.
            body: Its tensors, as safetensors bytes; may be empty.
        """
        request: Request | None = None
        try:
            request = parsed(Request, text)
            reply, tensors = self._answered(request, body)
            return reply.model_dump_json(), tensors
        except CoterieError as error:
            problem, remedy = error.problem, error.remedy
        except Exception as error:  # a server must hear of it, whatever it is
            problem, remedy = f"{type(error).__name__}: {error}", ""
        asked = (
            {}
            if request is None
            else {"task": request.task, "round": request.round, "number": request.number}
        )
        return failed(problem, remedy, client=self.client, **asked).model_dump_json(), b""

    def _answered(self, request: Request, body: bytes) -> tuple[Reply, bytes]:
        prepared = self._prepared(request)
        client = self._client(list(prepared.site.data))
        if request.action == "hello":
            return Reply(client=client, member=_member(prepared, client)), b""
        if request.client != client:
            raise Refused(f"asked for client {request.client!r}, this device is {client!r}", "")
        door = self._outbound_check(prepared, request, client)
        door.check()
        folder, turn = self._folder(request), (request.round, request.number)
        memory = Memory(folder / "states" / names.encoded(client))
        tensors = from_bytes(body, f"request to {client!r}") if body else {}
        with memory.alone(), _threads(request.threads or prepared.problem.threads):
            state, note = memory.before(turn, request.expects)
            found, metrics = prepared.site.answer(
                prepared.method,
                request.task,
                client,
                dict(tensors),
                state,
                request.round,
                request.phase,
            )
            found = {secure.UPDATE: secure.update(tensors, found)} if request.masked else found
            encoded = to_bytes(found) if found else b""
            door.record(encoded, metrics)
            memory.commit(turn, state, request.rounds_kept)
            if request.action == "keep":
                _keep(
                    prepared,
                    client,
                    dict(state),
                    tensors,
                    request.round,
                    folder / "clients" / names.encoded(client),
                )
        done = {"task": request.task, "round": request.round, "number": request.number}
        return Reply(
            client=client, metrics=metrics, state_bytes=nbytes(state), note=note, **done
        ), encoded

    def _outbound_check(
        self, prepared: Prepared, request: Request, client: ClientId
    ) -> "_OutboundCheck":
        """Return what watches over a reply. In a simulation, where all are on one machine, it
        counts only what secure aggregation needs.
        """
        if self.index is None:
            return _OutboundCheck(prepared, request, self.limits, Account(self.home / ACCOUNT))
        account = (
            Account(self._folder(request) / "states" / names.encoded(client) / ACCOUNT)
            if prepared.recipe.secure
            else None
        )
        return _OutboundCheck(prepared, request, self.limits, account)

    def _prepared(self, request: Request) -> Prepared:
        section = json.dumps(request.recipe, sort_keys=True)
        if self.index is not None:
            prepared = _loaded(section, None, None, alone=False)
            site = replace(prepared.site)
        else:
            _check_code(request.recipe, self.limits)
            prepared = _loaded(
                section, None if self.data is None else str(self.data), self.base, alone=True
            )
            _check_run(prepared.recipe, self.limits)
            layout = prepared.method.layout(request.position, prepared.problem.base)
            site = replace(prepared.site, layouts=dict.fromkeys(prepared.site.data, layout))
        if site.outbound is not None:
            key = self._key() if self.index is None and site.outbound.noise is not None else b""
            closed = self.secure or self.limits.secure or prepared.recipe.secure
            noisy, by_examples, silent = (
                self.limits.noisy,
                self.limits.unit == "example",
                not self.limits.scores,
            )
            wanted = replace(
                site.outbound, secure=closed, noisy=noisy, by_examples=by_examples, silent=silent
            )
            site.outbound = replace(wanted, key=key, masked=request.masked)
        return replace(prepared, site=site)

    def _key(self) -> bytes:
        """Return what only this device knows: 32 random bytes, made once, that nobody else may
        read.
        """
        return kept_key(self.home / "secret")

    def _client(self, known: Sequence[ClientId]) -> ClientId:
        """Which client this is. Raises DataError where the data do not tell, or do not have it."""
        if self.index is not None:
            return known[self.index]
        if self.client is None and len(known) == 1:
            return known[0]
        if self.client is None or self.client not in known:
            asked = (
                "which client this device is was not said"
                if self.client is None
                else f"the data here have no client {self.client!r}"
            )
            remedy = "Name it: --client ID, or client=ID in the node's configuration."
            raise DataError(f"{asked}; they have {', '.join(known[:10])}", remedy)
        return self.client

    def _folder(self, request: Request) -> Path:
        """Where everything of this run is. Raises Refused for a run with the name of something
        else of the device.
        """
        if self.index is not None and request.folder:
            return Path(request.folder)
        folder = self.home / request.run
        if request.run in _OWN or (folder.exists() and not (folder / "states").is_dir()):
            raise Refused(
                f"a run may not have the name {request.run!r}: {folder} is no folder of a run", ""
            )
        return folder


@dataclass(frozen=True)
class _OutboundCheck:
    """The last check before a reply leaves: the owner's limits, and the account of earlier replies.

    Args:
        prepared: What the reply is made with; its `Outbound` has the last word on the tensors
            themselves.
        request: What is asked.
        limits: Of the owner.
        account: Of the device; None: nothing is counted.
    """

    prepared: Prepared
    request: Request
    limits: Limits
    account: Account | None

    def check(self) -> None:
        """Refuse, before any work, what could not leave. Raises Refused."""
        self.limits.check_task(self.request.task, self.request.round, self.prepared.method.rounds)
        if self.request.masked != (self._updates and self.prepared.recipe.secure):
            how = "under masks" if self.request.masked else "in the clear"
            raise Refused(
                f"{self.request.task} of a recipe with secure: {self.prepared.recipe.secure} was "
                f"asked for {how}",
                "It was not done.",
            )
        if self._outbound is not None:
            self._outbound.check(find_task(self.prepared.method, self.request.task))
        if self.account is not None:
            self.account.check(self._leaving("", None), self.limits)

    def record(self, encoded: bytes, metrics: Metrics) -> None:
        """Write down what is about to leave. Raises Refused: it may not leave; SaveError: it
        could not be written down.
        """
        if self.account is None:
            return
        said = (
            b""
            if self.request.masked
            else json.dumps([self.request.task, metrics], sort_keys=True).encode()
        )
        contents = blake2b(said + encoded, digest_size=16).hexdigest()
        self.account.record(self._leaving(contents, self._cost), self.limits, self._exchanges)

    def _leaving(self, contents: str, cost: Cost | None) -> OutgoingReply:
        request = self.request
        return OutgoingReply(
            request.run,
            _same_recipe(request.recipe),
            (request.round, request.number),
            contents,
            cost,
            request.masked,
        )

    @property
    def _cost(self) -> Cost | None:
        """What the reply spends of the privacy of the client, or of each of its examples; None
        where it has no noise, or needs none.
        """
        privacy = None if self._outbound is None or not self._updates else self._outbound.privacy
        if privacy is None or not privacy.noise or privacy.where == "central":
            return None
        if privacy.unit == "client":
            mu = 2 / privacy.noise  # any two updates are up to 2C apart
            return Cost(squared=mu * mu)
        windows, expected = (
            self.prepared.site.data[str(self.request.client)].train.windows,
            self.prepared.recipe.training.batch_size,
        )
        steps = self.prepared.method.steps_of(windows, expected)
        return Cost(
            renyi=tuple(rdp_of_steps(rate_of(windows, expected), privacy.noise, steps).tolist())
        )

    @property
    def _exchanges(self) -> int | None:
        """The most unlike answers in a round."""
        protects = self._outbound is not None and self._outbound.protects
        return self.limits.exchanges or (EXCHANGES if protects else None)

    @property
    def _outbound(self) -> Outbound | None:
        return self.prepared.site.outbound

    @property
    def _updates(self) -> bool:
        return declared(find_task(self.prepared.method, self.request.task)) is Sends.UPDATE


def _check_code(section: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a method or data that a server names by a module, before it is imported: a device
    runs only what its owner installed or allows.
    """
    named = (
        ("method", "name", METHODS_GROUP, "methods", limits.methods),
        ("data", "kind", DATA_GROUP, "data", limits.data),
    )
    for part, key, group, limit, allowed in named:
        found = section.get(part)
        name = found.get(key) if isinstance(found, Mapping) else None
        here = {point.value for point in installed(group).values()}
        if is_own(name) and name not in here | set(allowed or ()):
            raise Refused(
                f"{part}.{key}: this device imports no module that a server names, {name!r}",
                f"Its owner may allow it: limits.{limit}.",
            )


def _check_run(recipe: Recipe, limits: Limits) -> None:
    """Refuse a run that the owner does not allow. Raises Refused."""
    limits.check_run(
        recipe.method["name"], getattr(recipe.model, "base", None), recipe.build_method().rounds
    )
    if recipe.privacy is not None and (
        recipe.privacy.where == "local" or recipe.privacy.unit == "example"
    ):
        limits.check_noise(recipe.privacy.noise, recipe.privacy.clip)


def _same_recipe(section: Mapping[str, Any]) -> str:
    """Digest of what of a recipe decides what a device does: it stays the same over a run,
    however often that is resumed.
    """
    decisive = {key: value for key, value in section.items() if key not in _INDIFFERENT}
    return blake2b(json.dumps(decisive, sort_keys=True).encode(), digest_size=16).hexdigest()


def _keep(
    prepared: Prepared, client: ClientId, state: State, tensors: Tensors, round: int, folder: Path
) -> None:
    """Write the personal model that a client has with these tensors."""
    owner = prepared.site.client(client, state)
    owner.load(prepared.method.loadable(owner, tensors))
    recipe = prepared.recipe
    origin = personal.Origin(recipe.method["name"], recipe.name, round, recipe.seed)
    prepared.problem.keep(folder, owner, prepared.site.layouts[client], origin)


def _member(prepared: Prepared, client: ClientId) -> Member:
    """Return what the server is told of a client."""
    federation, data = prepared.problem.federation, prepared.site.data[client]
    group = next((name for name, members in federation.unseen.items() if client in members), "")
    train, valid, test = (split.windows for split in data.splits)
    return Member(
        client=client,
        position=list(prepared.site.data).index(client),
        windows=(train, valid, test),
        group=group,
        cluster=(federation.clusters or {}).get(client),
        anchor=federation.anchors.index(client) if client in federation.anchors else None,
        labels=federation.labels.get(client),
    )


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    """Within the block PyTorch computes with so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
