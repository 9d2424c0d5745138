"""The state of a run between two rounds: participants, the server's tensors, scores and counts."""

from collections.abc import Sequence
from typing import Any

from coterie.core.protocol import ClientId
from coterie.core.result import Evaluation
from coterie.core.tensors import Named, Tensors, nbytes, under
from coterie.methods import Method
from coterie.runs.problems.prepare import Prepared
from coterie.runs.recipes.recipe import Recipe
from coterie.runs.recipes.sections import evaluated


class RunState:
    """The state of a run between two rounds."""

    def __init__(self, prepared: Prepared) -> None:
        self.recipe: Recipe = prepared.recipe
        self.method: Method = prepared.method
        self.take_in(prepared)
        self.round = 0  # rounds done
        self.server: Tensors = self.method.init(
            prepared.blueprint, self.recipe.present(self.clients, 0)
        )
        self.evaluations: list[Evaluation] = []
        self.points: list[Evaluation] = []
        # as JSON: bytes by client, lost replies, rounds taken part in, seconds, the privacy spent
        counts: dict[str, Any] = {name: {} for name in ("up", "down", "lost", "took_part")}
        self.progress = counts | {"seconds": 0.0, "position": 0}
        if not self.method.dynamic_membership:
            self.progress["clients"] = list(self.federation.everyone)

    def take_in(self, prepared: Prepared) -> None:
        """Set participants and scored clients, at the start and when a client joins."""
        self.prepared, self.clients = prepared, prepared.clients
        self.federation = prepared.problem.federation
        self.groups = {
            i: group for group, members in self.federation.unseen.items() for i in members
        }
        self.evaluated = evaluated(self.federation, self.recipe.evaluate_clients, self.recipe.seed)
        self.scored = tuple(i for group in self.evaluated.values() for i in group)

    @property
    def iteration(self) -> int:
        """The number of local iterations done."""
        return self.round * self.method.local_steps

    @property
    def keeps_models(self) -> bool:
        """Whether scored clients keep models of their own between rounds."""
        return not (self.groups or self.recipe.training.stateless or self.method.stateless)

    def count(self, direction: str, client: ClientId, message: Named) -> None:
        """Add the bytes that a client sent (`up`) or received (`down`), and those of each part."""
        of_parts = {f"{direction}/{part}": under(part, message) for part in self.method.methods}
        for key, named in {direction: message, **of_parts}.items():
            counts = self.progress.setdefault(key, {})
            counts[client] = counts.get(client, 0) + nbytes(named)

    def absent(self) -> Sequence[ClientId]:
        """Return clients that have not taken part yet and have no model of their own."""
        if not self.round or self.method.centralized or not self.keeps_models:
            return ()
        return tuple(i for i in self.clients if i not in self.progress["took_part"])
