"""A device's checks by its owner's limits and its account: before it loads a server's recipe,
before it works, and before it sends a reply.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from coterie.aggregation.dpsgd import rate_of, rdp_of_steps
from coterie.client.blueprint import Metrics
from coterie.client.outbound import Outbound
from coterie.core.errors import Refused
from coterie.core.own import installed, is_own
from coterie.core.protocol import Sends, declared, find_task
from coterie.data import GROUP as DATA_GROUP
from coterie.engines.messages import Request
from coterie.methods import GROUP as METHODS_GROUP
from coterie.runs.device.account import Account, OutgoingReply
from coterie.runs.device.ledger import Cost
from coterie.runs.device.limits import EXCHANGES, Limits
from coterie.runs.problems.prepare import Prepared
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
        self.account.record(self._leaving(contents, self._cost), self.limits, self._exchanges)

    def _leaving(self, contents: str, cost: Cost | None) -> OutgoingReply:
        request = self.request
        section = {k: v for k, v in request.recipe.items() if k not in _INDIFFERENT}
        decisive = json.dumps(section, sort_keys=True).encode()
        recipe = blake2b(decisive, digest_size=16).hexdigest()
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
    def _exchanges(self) -> int | None:
        """The most different answers in a round."""
        protects = self._outbound is not None and self._outbound.protects
        return self.limits.exchanges or (EXCHANGES if protects else None)

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
    limits.check_run(recipe.method["name"], getattr(recipe.model, "base", None), method.rounds)
    if recipe.keep == "best":
        limits.check_keeping([task.__name__ for task in (method.score_and_keep, method.recall)])
    privacy = recipe.privacy
    if privacy is not None and (privacy.where == "local" or privacy.unit == "example"):
        limits.check_noise(privacy.noise, privacy.clip)
