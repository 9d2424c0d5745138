"""A device: one client's machine, which holds its data, state and personal model; and its checks by
its owner's limits and its account: before it loads a server's recipe, before it works, and before
it sends a reply.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from coterie.aggregation import secure
from coterie.aggregation.dpsgd import rate_of, rdp_of_steps
from coterie.aggregation.noise import kept_key
from coterie.client.blueprint import Metrics
from coterie.client.outbound import Outbound
from coterie.client.site import Site
from coterie.core import names
from coterie.core.errors import CoterieError, DataError, Refused
from coterie.core.foreign import json_of
from coterie.core.importing import installed, is_own
from coterie.core.protocol import ClientId, Sends, declared, find_task
from coterie.core.tensors import from_bytes, nbytes, to_bytes
from coterie.core.threads import computing
from coterie.data import GROUP as DATA_GROUP
from coterie.data.chats.fields import is_template
from coterie.engines.messages import Member, Reply, Request, failed, parsed
from coterie.methods import GROUP as METHODS_GROUP
from coterie.runs.device.account import ACCOUNT, Account, OutgoingReply
from coterie.runs.device.ledger import Cost
from coterie.runs.device.limits import EXCHANGES, Limits
from coterie.runs.device.states import Memory
from coterie.runs.problems import loading
from coterie.runs.problems.auto import with_dtype
from coterie.runs.problems.prepare import Prepared, outbound, prepare
from coterie.runs.recipes import recipe as recipes
from coterie.runs.recipes.recipe import Recipe

# what may differ when a run is resumed
_INDIFFERENT = {"compare_with", "description", "paper", "samples", "words", "memory"}


@dataclass(frozen=True)
class OutboundCheck:
    """The last check before a reply is sent: the owner's limits and the account of replies."""

    prepared: Prepared  # its `Outbound` checks the tensors themselves
    request: Request
    limits: Limits
    account: Account | None  # None: nothing is counted

    def check(self) -> None:
        """Refuse, before any work, what could not be sent. Raises Refused."""
        self.limits.check_task(self.request.task, self.request.round, self.prepared.method.rounds)
        if self.request.masked != (self._updates and self.prepared.recipe.secure):
            how = "under masks" if self.request.masked else "in the clear"
            raise Refused(
                f"{self.request.task} of a recipe with secure: {self.prepared.recipe.secure} was "
                f"asked for {how}",
                "The device refused it.",
            )
        if self._outbound is not None:
            self._outbound.check(find_task(self.prepared.method, self.request.task))
        if self.account is not None:
            self.account.check(self._leaving("", None), self.limits)

    def record(self, encoded: bytes, metrics: Metrics) -> None:
        """Record what is about to be sent. Raises Refused or SaveError if it must not be."""
        if self.account is None:
            return
        header = json.dumps([self.request.task, metrics], sort_keys=True).encode()
        header = b"" if self.request.masked else header
        contents = blake2b(header + encoded, digest_size=16).hexdigest()
        protects = self._outbound is not None and self._outbound.protects
        most = self.limits.exchanges or (EXCHANGES if protects else None)  # different answers
        self.account.record(self._leaving(contents, self._cost), self.limits, most)

    def _leaving(self, contents: str, cost: Cost | None) -> OutgoingReply:
        request = self.request
        section = {k: v for k, v in request.recipe.items() if k not in _INDIFFERENT}
        recipe = blake2b(json.dumps(section, sort_keys=True).encode(), digest_size=16).hexdigest()
        return OutgoingReply(
            request.run, recipe, (request.round, request.number), contents, cost, request.masked
        )

    @property
    def _cost(self) -> Cost | None:
        """The privacy that the reply spends; None if it has no noise, or needs none."""
        privacy = None if self._outbound is None or not self._updates else self._outbound.privacy
        if privacy is None or not privacy.noise or privacy.where == "central":
            return None
        if privacy.unit == "client":
            mu = 2 / privacy.noise  # any two updates are up to 2C apart
            return Cost(squared=mu * mu)
        windows = self.prepared.site.data[str(self.request.client)].train.windows
        expected = self.prepared.recipe.training.batch_size
        steps = self.prepared.method.steps_of(windows, expected)
        divergences = rdp_of_steps(rate_of(windows, expected), privacy.noise, steps)
        return Cost(renyi=tuple(divergences.tolist()))

    @property
    def _outbound(self) -> Outbound | None:
        return self.prepared.site.outbound

    @property
    def _updates(self) -> bool:
        return declared(find_task(self.prepared.method, self.request.task)) is Sends.UPDATE


def check_code(section: Mapping[str, Any], limits: Limits) -> None:
    """Refuse a module, before it is imported, that the owner neither installed nor allows."""
    named = (
        ("method", "name", METHODS_GROUP, "methods", limits.methods),
        ("data", "kind", DATA_GROUP, "data", limits.data),
    )
    for part, key, group, limit, allowed in named:
        value = section.get(part)
        name = value.get(key) if isinstance(value, Mapping) else None
        here = {point.value for point in installed(group).values()}
        if is_own(name) and name not in here | set(allowed or ()):
            raise Refused(
                f"{part}.{key}: this device does not import modules that a server names, here "
                f"{name!r}",
                f"The owner of the device can allow it: limits.{limit}.",
            )


def check_run(recipe: Recipe, limits: Limits) -> None:
    """Refuse a run that the owner does not allow. Raises Refused."""
    method = recipe.build_method()
    common = getattr(recipe.model, "common", None)
    for base in {getattr(of, "base", None) for of in (recipe.model, common)}:
        limits.check_run(recipe.method["name"], base, method.rounds)
    if recipe.keep == "best":
        limits.check_keeping([task.__name__ for task in (method.score_and_keep, method.recall)])
    privacy = recipe.privacy
    if privacy is not None and (privacy.where == "local" or privacy.unit == "example"):
        limits.check_noise(privacy.noise, privacy.clip)


# a data set that `datasets` reads from the Hub alone; a common expert below or beside $COTERIE_DATA
_HUB = re.compile(r"hf://[\w./@*-]+|\w[\w.-]*/\w[\w.-]*")
_BESIDE = re.compile(r"(\w[\w.-]*/)*[\w.-]*\.safetensors")
# files of a device that are no runs
_NO_RUNS = {"data", "flwr", "secret", "secret.lock", "secret.new", "supernode.log"}
_NO_RUNS |= {"resident.key", "resident.log", "resident.sock"}


@lru_cache(maxsize=2)
def _loaded(section: str, data: str | None, base: str | None, limits: Limits | None) -> Prepared:
    """Return a server's recipe, prepared here; by the owner's limits (None: simulated clients)."""
    values = json_of(section, finite=False)
    if limits is None:
        return prepare(recipes.validate(values, "of the server"))
    recipe = recipes.validate(_with_own_paths(values, data, base), "of the server")
    check_run(recipe, limits)
    method = recipe.build_method()
    if method.centralized:
        remedy = "The data of this device never leave it."
        raise Refused(f"{recipe.method['name']} needs the data of all clients in one place", remedy)
    if recipe.audit is not None:
        remedy = "Canaries are only for runs whose data are all on one machine."
        raise Refused("audit: the recipe would plant canaries in this device's data", remedy)
    problem = loading.load(with_dtype(recipe)[0])
    # a device does not let itself be told to lie
    leaving = outbound(recipe.model_copy(update={"attack": None}), (), secret=True)
    everyone = problem.federation.everyone
    site = Site(
        problem.build, {}, everyone, recipe.training, recipe.seed, method.total_iterations, leaving
    )
    return Prepared(recipe, method, problem, site, tuple(problem.federation.clients))


def _with_own_paths(section: dict[str, Any], data: str | None, base: str | None) -> dict[str, Any]:
    """Return a server's recipe with the device's paths in place of the server's. Raises Refused if
    it names other files, of which replies would tell.
    """
    places = {key: value for key, value in section["data"].items() if key not in ("root", "path")}
    template = places.get("chat_template")
    if template is not None and not is_template(str(template)):
        problem = "data.chat_template: the server's recipe names a file, which is not read here"
        raise Refused(problem, "A recipe that was loaded at the server holds the template itself.")
    clients = places.get("clients")
    of = [places, *(clients.values() if isinstance(clients, dict) else ())]
    for dataset in [str(part["dataset"]) for part in of if "dataset" in part]:
        if not _HUB.fullmatch(dataset) or Path(dataset).exists():
            problem = f"dataset: {dataset!r} is no data set of the Hub, and files are not read here"
            raise Refused(problem, "The owner of a device names its data, see `coterie client`.")
    path = (section["model"].get("common") or {}).get("path") or ".safetensors"
    if not _BESIDE.fullmatch(path):
        problem = "model.common.path: the server's recipe names a file outside of the device's data"
        raise Refused(problem, "Put it below or beside $COTERIE_DATA, and name it from there.")
    if data is not None:
        places["path" if "path" in section["data"] else "root"] = data
    model = section["model"] | ({"base": base} if base is not None else {})
    return section | {"data": places, "model": model}


@dataclass(frozen=True)
class Device:
    """A device: one client's side of runs."""

    # its folder, with <run>/states/<client>/ and a personal model in <run>/clients/<client>/
    home: Path
    client: ClientId | None = None  # which client of its data it is; None: the only one
    data: Path | None = None  # `data.path` or `data.root` on this machine; None: $COTERIE_DATA
    base: str | None = None  # the base model on this machine; None: as in the recipe
    index: int | None = None  # instead of `client`, in a simulation: its position in all data
    # trained values are sent by secure aggregation only, whatever a recipe says
    secure: bool = False
    limits: Limits = field(default_factory=Limits)  # the owner's

    def answer(self, text: str, body: bytes) -> tuple[str, bytes]:
        """Answer a request: the text of a `Request`, and its tensors as safetensors bytes, or b"".
        Returns a reply in any case; one with a `problem` has no tensors.
        """
        request: Request | None = None
        try:
            request = parsed(Request, text)
            reply, tensors = self._answered(request, body)
            return reply.model_dump_json(), tensors
        except CoterieError as error:
            problem, remedy = error.problem, error.remedy
        except Exception as error:  # the server gets any error as a reply
            problem, remedy = f"{type(error).__name__}: {error}", ""
        turn = {} if request is None else _turn_of(request)
        return failed(problem, remedy, client=self.client, **turn).model_dump_json(), b""

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
        threads = request.threads or prepared.problem.threads or torch.get_num_threads()
        with memory.alone(), computing(threads):
            state, note = memory.before(turn, request.expects)
            method = prepared.method
            reply_tensors, metrics = prepared.site.answer(
                method, request.task, client, dict(tensors), state, request.round, request.phase
            )
            if request.masked:
                reply_tensors = {secure.UPDATE: secure.update(tensors, reply_tensors)}
            encoded = to_bytes(reply_tensors) if reply_tensors else b""
            door.record(encoded, metrics)
            memory.commit(turn, state, request.rounds_kept)
            if request.action == "keep":
                owner = prepared.site.clients(client, dict(state))
                models = folder / "clients" / names.encoded(client)
                prepared.keep(owner, tensors, request.round, models)
        about = {"metrics": metrics, "state_bytes": nbytes(state), "note": note}
        return Reply(client=client, **about, **_turn_of(request)), encoded

    def _outbound_check(
        self, prepared: Prepared, request: Request, client: ClientId
    ) -> OutboundCheck:
        """Return the last check of a reply; simulated devices need an account for masks only."""
        account: Account | None = Account(self.home / ACCOUNT)
        if self.index is not None:
            states = self._folder(request) / "states" / names.encoded(client)
            account = Account(states / ACCOUNT) if prepared.recipe.secure else None
        return OutboundCheck(prepared, request, self.limits, account)

    def _prepared(self, request: Request) -> Prepared:
        section = json.dumps(request.recipe, sort_keys=True)
        if self.index is not None:
            prepared = _loaded(section, None, None, None)
            site = replace(prepared.site)
        else:
            check_code(request.recipe, self.limits)
            data = None if self.data is None else str(self.data)
            prepared = _loaded(section, data, self.base, self.limits)
            layout = prepared.method.layout(request.position, prepared.problem.base)
            site = replace(prepared.site, layouts=dict.fromkeys(prepared.site.data, layout))
        if site.outbound is not None:
            drawn_here = self.index is None and site.outbound.noise is not None
            site.outbound = replace(
                site.outbound,
                secure=self.secure or self.limits.secure or prepared.recipe.secure,
                noisy=self.limits.noisy,
                by_examples=self.limits.unit == "example",
                silent=not self.limits.scores,
                # what only this device knows: made once, and nobody else may read it
                key=kept_key(self.home / "secret") if drawn_here else b"",
                masked=request.masked,
            )
        return replace(prepared, site=site)

    def _client(self, known: Sequence[ClientId]) -> ClientId:
        """Return which client this is. Raises DataError if the data lack it or do not tell."""
        if self.index is not None:
            return known[self.index]
        if self.client is None and len(known) == 1:
            return known[0]
        if self.client is None or self.client not in known:
            problem = "this device does not know which client it is"
            if self.client is not None:
                problem = f"the data of this device have no client {self.client!r}"
            remedy = "Name it: --client ID, or client=ID in the node's configuration."
            raise DataError(f"{problem}; they have {', '.join(known[:10])}", remedy)
        return self.client

    def _folder(self, request: Request) -> Path:
        """Return the folder of this run. Raises Refused if its name is taken by another file."""
        if self.index is not None and request.folder:
            return Path(request.folder)
        folder = self.home / request.run
        if request.run in _NO_RUNS or (folder.exists() and not (folder / "states").is_dir()):
            raise Refused(
                f"the name {request.run!r} cannot be used for a run: {folder} exists and is "
                f"not a run",
                "",
            )
        return folder


def _turn_of(request: Request) -> dict[str, Any]:
    return {"task": request.task, "round": request.round, "number": request.number}


def _member(prepared: Prepared, client: ClientId) -> Member:
    """Return the description of a client that is sent to the server."""
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
