"""What a run reveals about its clients: the server's noise, and the privacy spent so far."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from uuid import uuid4

from coterie.aggregation.accountant import Accountant
from coterie.aggregation.dpsgd import ExampleAccountant
from coterie.aggregation.noise import Source, kept_key
from coterie.aggregation.privacy import Privacy, central
from coterie.core.protocol import Ask, ClientId, Replies
from coterie.core.tensors import to_bytes
from coterie.runs.backends import kept
from coterie.runs.folder.metrics import Released
from coterie.runs.folder.names import SECRET
from coterie.runs.requests import RunState


class PrivacySpending:
    """The privacy that a run has spent, and the server's noise if privacy is central. With
    `devices`, clients are on devices, which must not be able to predict the noise.
    """

    def __init__(self, privacy: Privacy, state: RunState, folder: Path, devices: bool) -> None:
        self.state, self.folder, self.devices = state, folder, devices
        self.accountant: Accountant | ExampleAccountant
        if privacy.unit == "client":
            self.accountant = Accountant(privacy, len(state.clients), experiment=not devices)
        else:
            largest = max(data.train.windows for data in state.federation.clients.values())
            batch_size = state.recipe.training.batch_size
            self.accountant = ExampleAccountant(
                privacy, largest, batch_size, experiment=not devices
            )
        self.released = Released(folder / "released.jsonl")
        state.progress |= {"clip": privacy.clip, "spent": []}

    @cached_property
    def secret(self) -> bytes | None:
        """The key of what devices must not predict, in the run's folder; None if they may."""
        central = self.accountant.privacy.where == "central"
        return kept_key(self.folder / SECRET) if self.devices and central else None

    def restore(self) -> None:
        """Restore the spending at a checkpoint."""
        self.accountant = replace(self.accountant, runs=self.state.progress["spent"])

    def count_released(self) -> None:
        """Count what left the server after the resumed checkpoint."""
        for result in self.released.since(self.state.round):
            if isinstance(self.accountant, ExampleAccountant):
                self.accountant.spend(result["windows"], result["steps"])
            else:
                self.accountant.spend(result["drawn"], result["population"])

    def count_discarded(self) -> None:
        """Count a discarded exchange whose sum the server may have seen."""
        clients = self.state.clients
        if isinstance(self.accountant, ExampleAccountant):
            self.accountant.spend(*self._examples(clients))
        else:
            self.accountant.spend(len(clients), len(clients))

    def protect(self, ask: Ask, replies: Replies, phase: int) -> Replies:
        """Count the cost of an exchange; return the replies, with noise if privacy is central."""
        accountant = self.accountant
        if isinstance(accountant, ExampleAccountant):  # by noise of the clients' own
            windows, steps = self._examples(ask.to)
            accountant.spend(windows, steps)
            if self.devices:
                # A device that is asked again draws other noise: every exchange counts, also those
                # that a server does again after it went back to a checkpoint.
                self._release(phase, uuid4().hex, windows=windows, steps=steps)
        else:
            drawn = self.state.recipe.drawn(self.state.federation, self.state.round)
            drawn = drawn or (len(ask.to), len(ask.to))
            source, new = self._noise(ask, replies, phase, drawn)
            if new:
                accountant.spend(*drawn)
            if accountant.privacy.where == "central":
                replies, self.state.progress["clip"] = central(
                    replies, ask.to, accountant.privacy, self.state.progress["clip"], source
                )
        self.state.progress["spent"] = accountant.runs
        return replies

    def spent(self) -> dict[str, float]:
        """Return epsilon and delta spent so far, and the current clipping bound."""
        delta = self.accountant.delta
        epsilon = self.accountant.epsilon(delta)
        return {"epsilon": epsilon, "delta": delta, "clip": self.state.progress["clip"]}

    def _examples(
        self, clients: Iterable[ClientId]
    ) -> tuple[dict[ClientId, int], dict[ClientId, int]]:
        state = self.state
        windows = {i: state.federation.clients[i].train.windows for i in clients}
        batch_size = state.recipe.training.batch_size
        return windows, {i: state.method.steps_of(n, batch_size) for i, n in windows.items()}

    def _noise(
        self, ask: Ask, replies: Replies, phase: int, drawn: tuple[int, int]
    ) -> tuple[Source, bool]:
        """Return random numbers for the server's noise, and whether this result is new. On devices
        they depend on all that the noise is added to: the same result always gets the same noise,
        however often a server goes back to a checkpoint, and any other result gets other noise,
        also one of another C or z, as the same noise in two sizes would reveal it.
        """
        state = self.state
        if self.secret is None:
            return Source.seeded(state.recipe.seed, "noise", state.round, phase), True
        settings = f"{state.recipe.privacy!r} {state.progress['clip']!r}"
        content = blake2b(settings.encode(), key=self.secret)
        for i in sorted(replies):
            for part in (i.encode(), to_bytes(ask.to[i]), to_bytes(replies[i])):
                content.update(len(part).to_bytes(8, "little") + part)
        new = self._release(phase, content.hexdigest(), drawn=drawn[0], population=drawn[1])
        return Source.keyed(self.secret, "noise", state.round, phase, content.hexdigest()), new

    def _release(self, phase: int, content: str, **counts: object) -> bool:
        """Record a result before it leaves the server; return whether it is new."""
        round = self.state.round
        result = {"round": round, "phase": phase, "content": content, **counts}
        return self.released.add(result, kept(round, self.state.recipe.checkpoint_every))
