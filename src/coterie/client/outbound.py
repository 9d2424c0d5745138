"""What leaves a client: clipped, noised, masked or poisoned as the recipe says."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from coterie.aggregation.attacks import Attack, poisoned
from coterie.aggregation.dpsgd import Sanitizer
from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Privacy, local
from coterie.client.interfaces import Metrics
from coterie.core.errors import Refused
from coterie.core.protocol import (
    PROTECTS,
    ClientId,
    Sends,
    Task,
    check_declared,
    declared,
    derive_seed,
    protects_examples,
)
from coterie.core.tensors import Named, Tensors, to_bytes

_MOST_MEASURED = 16  # numbers that a device which protects its owner measures aloud


@dataclass(frozen=True)
class Outbound:
    """The processing of a reply before it leaves a client.

    Where its owner is protected (by local privacy, by secure aggregation, by limits of the owner)
    nothing leaves but what its task is declared to send, see `Sends`. What is asked with which
    number decides nothing here: a server chooses those.

    Args:
        seed: The run's seed.
        privacy: Clips updates and adds noise, where that is a client's own business.
        attack: What attackers make of their replies. Only simulated ones lie.
        attackers: The ids of the attackers.
        secret: Whether noise is drawn from what only this machine knows, as it must be on devices:
            whoever has the seed of a run could take its noise away. In a simulation it is drawn
            from the run's seed.
        key: What only this machine knows, and keeps: the same reply to the same request then leaves
            with the same noise. Otherwise whoever asks often enough could average it away.
        secure: Whether updates are sent only under the masks of secure aggregation.
        noisy: Whether updates are sent only with noise.
        by_examples: Whether noise in each step, for single examples, is sufficient for that.
        masked: Whether the current reply is masked.
        silent: Whether scores and measurements are never sent.
    """

    seed: int
    privacy: Privacy | None = None
    attack: Attack | None = None
    attackers: frozenset[ClientId] = frozenset()
    secret: bool = False
    key: bytes = b""
    secure: bool = False
    noisy: bool = False
    by_examples: bool = False
    masked: bool = False
    silent: bool = False

    @property
    def noise(self) -> Privacy | None:
        """What clips updates and adds noise to them here, if that is private at all."""
        return self.privacy if self.privacy is not None and self.privacy.where == "local" else None

    @property
    def protects(self) -> bool:
        """Whether nothing may leave that is not declared."""
        return self.secure or self.noisy or self.silent or self.noise is not None or self.sanitizes

    @property
    def sanitizes(self) -> bool:
        """Whether single examples are protected, by noise in each step."""
        return self.privacy is not None and self.privacy.unit == "example"

    @property
    def _noised(self) -> bool:
        """Whether updates leave with such noise as the owner wants."""
        applies = self.noise is not None or (self.by_examples and self.sanitizes)
        return applies and self.privacy is not None and self.privacy.noise > 0

    def check(self, task: Task) -> None:
        """Refuse, before anything is done, a task whose reply could not leave. Raises Refused."""
        if not self.protects:
            return
        name, sends = task.__name__, declared(task)
        if sends is Sends.PRIVATE:
            raise Refused(
                f"{name}: the task does not declare that its reply can be masked or noised, or is "
                f"harmless; it was not run",
                PROTECTS,
            )
        if sends is Sends.SCORES and self.silent:
            raise Refused(f"{name}: this device sends no scores", PROTECTS)
        if sends is Sends.UPDATE and self.secure and not self.masked:
            raise Refused(
                f"{name}: this device sends its updates by secure aggregation only",
                "Run the recipe with --set secure=true.",
            )
        if sends is Sends.UPDATE and self.noisy and not self._noised:
            also = ", or privacy.unit: example," if self.by_examples else ""
            raise Refused(
                f"{name}: this device sends its updates with noise only",
                f"Run the recipe with privacy.where: local{also} and the noise it requires.",
            )

    def __call__(
        self, task: Task, id: ClientId, sent: Named, reply: Tensors, round: int, phase: int
    ) -> Tensors:
        """Return what leaves the client `id`. Raises Refused for what its task is not declared to
        send, where its owner is protected.
        """
        update = declared(task) is Sends.UPDATE
        # attackers do not lie about their scores
        if self.attack is not None and id in self.attackers and phase >= 0:
            alike = update and all(
                name not in sent or sent[name].shape == t.shape for name, t in reply.items()
            )
            seed = derive_seed(self.seed, "attack", round, phase, id)
            generator = torch.Generator().manual_seed(seed)
            return poisoned(reply, sent, alike, self.attack, generator)
        if self.protects:
            self.check(task)
            check_declared(task, sent, reply)
        if update and self.noise is not None:
            noise = self._noise_of(self.noise, id, sent, reply, round, phase)
            return local(reply, sent, self.noise, noise)
        return reply

    def measured(self, metrics: Metrics) -> Metrics:
        """Return the metrics that leave: of a protected owner a few single numbers, all means."""
        if not self.protects:
            return metrics
        if self.silent:
            return {}
        single = [name for name, value in metrics.items() if isinstance(value, int | float)]
        return {name: metrics[name] for name in single[:_MOST_MEASURED]}

    def _noise_of(
        self, privacy: Privacy, id: ClientId, sent: Named, reply: Named, round: int, phase: int
    ) -> Source:
        """Return random numbers for the noise of a reply.

        With a key they depend on all that the noise must differ by, and on nothing that a server
        could change while the reply stays: with another seed, run or round the noise is the same,
        and cannot be averaged away; with another C or z it is another one, since the same one in
        two sizes would tell the reply.
        """
        if not self.key:
            return self.source("noise", round, phase, id)
        contents = (blake2b(to_bytes(named)).hexdigest() for named in (sent, reply))
        return Source.keyed(
            self.key, "noise", id, repr(privacy.clip), repr(privacy.noise), *contents
        )

    def sanitizer(
        self, method: Any, steps: int, round: int, phase: int, id: ClientId
    ) -> Sanitizer | None:
        """Return what makes the gradients that a client of a method shares, in one task of so many
        steps; None where no examples are protected.

        On devices it never draws the same twice, not even for the same request: with the same noise
        on other data, or from another state, the difference would have none. Each time counts.
        """
        if self.privacy is None or not self.sanitizes:
            return None
        if not protects_examples(method):
            raise Refused(
                f"privacy of single examples does not cover what {type(method).__name__} shares",
                "Use another method.",
            )
        source = Source.secret() if self.key else self.source("examples", round, phase, id)
        return Sanitizer(self.privacy, frozenset(method.shared), source, steps)

    def source(self, *purpose: int | str) -> Source:
        """Return random numbers for the noise of one purpose."""
        return Source.secret() if self.secret else Source.seeded(self.seed, *purpose)
