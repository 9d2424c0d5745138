"""The processing of replies that leave a client: clipping, noise, masks, or an attack."""

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch

from coterie.aggregation.dpsgd import Sanitizer
from coterie.aggregation.noise import Source
from coterie.aggregation.privacy import Privacy, local
from coterie.aggregation.robust import Attack, poisoned
from coterie.client.blueprint import Metrics
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

    If its owner is protected (by local privacy, secure aggregation or the owner's limits), only
    what the task is declared to send leaves, see `Sends`. The numbers of requests decide nothing
    here, since a server chooses them.
    """

    seed: int
    privacy: Privacy | None = None  # clips updates and adds noise, if clients do so
    attack: Attack | None = None  # what attackers, simulated ones only, make of their replies
    attackers: frozenset[ClientId] = frozenset()
    # Whether noise comes from this machine's secret, as on devices: whoever knows the seed could
    # remove noise that comes from it, as in simulations.
    secret: bool = False
    # This machine's secret: equal replies to equal requests get equal noise, which cannot be
    # averaged away by repeated requests.
    key: bytes = b""
    secure: bool = False  # whether updates leave only under masks
    noisy: bool = False  # whether updates leave only with noise
    by_examples: bool = False  # whether noise in each step, for examples, is enough for that
    masked: bool = False  # whether the current reply is masked
    silent: bool = False  # whether scores and measurements never leave

    @property
    def noise(self) -> Privacy | None:
        """What clips updates and adds noise to them here, if anything."""
        return self.privacy if self.privacy is not None and self.privacy.where == "local" else None

    @property
    def protects(self) -> bool:
        """Whether only declared content may leave."""
        return self.secure or self.noisy or self.silent or self.noise is not None or self.sanitizes

    @property
    def sanitizes(self) -> bool:
        """Whether single examples are protected, by noise in each step."""
        return self.privacy is not None and self.privacy.unit == "example"

    def check(self, task: Task) -> None:
        """Raise Refused for a task whose reply could not leave, before it starts."""
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
            problem = f"{name}: this device sends its updates by secure aggregation only"
            raise Refused(problem, "Run the recipe with --set secure=true.")
        applies = self.noise is not None or (self.by_examples and self.sanitizes)
        noised = applies and self.privacy is not None and self.privacy.noise > 0
        if sends is Sends.UPDATE and self.noisy and not noised:
            also = ", or privacy.unit: example," if self.by_examples else ""
            remedy = f"Run the recipe with privacy.where: local{also} and the noise it requires."
            raise Refused(f"{name}: this device sends its updates with noise only", remedy)

    def __call__(
        self, task: Task, id: ClientId, sent: Named, reply: Tensors, round: int, phase: int
    ) -> Tensors:
        """Return what leaves the client `id`. Raises Refused for content that is not declared."""
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
        """Return the metrics that leave; of a protected owner a few means."""
        if not self.protects:
            return metrics
        if self.silent:
            return {}
        single = [name for name, value in metrics.items() if isinstance(value, int | float)]
        return {name: metrics[name] for name in single[:_MOST_MEASURED]}

    def _noise_of(
        self, privacy: Privacy, id: ClientId, sent: Named, reply: Named, round: int, phase: int
    ) -> Source:
        """Return random numbers for a reply's noise. With a key they depend on all that the noise
        must differ by, and on nothing that a server could change without changing the reply. With
        another seed, run or round the noise is equal, and cannot be averaged away; with another C
        or z it differs, since the same noise in two sizes would reveal the reply.
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
        """Return the maker of a client's shared gradients in one task of so many steps; None if
        examples are not protected. On devices it never draws noise twice, even for equal requests:
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
