"""CoMiGS as its published code runs it, for reproductions: gradients of one level leak into steps
of the other.

The published loop (epfml/CoMiGS, collab_utils/clients.py) computes the gradients of all tensors in
each backward pass and clears only those of the optimiser that steps. So the s validation gradients
of experts are added to their next training step, and tau training gradients of routers to their
next validation step. Algorithm 1 has neither: `comigs` is the method.
"""

from dataclasses import dataclass

from coterie.client.client import Client
from coterie.core.roles import GENERALIST, ROUTER, SPECIALIST, Role
from coterie.core.tensors import prefixed, under, weighted_sum
from coterie.data.splits import Batch
from coterie.methods.comigs import CoMiGS

LOWER, UPPER = (GENERALIST, SPECIALIST), (ROUTER,)  # roles that each level trains
LEAK = "leak"  # gradients that were not cleared, in a client's state


@dataclass(frozen=True)
class CoMiGSPublished(CoMiGS):
    """CoMiGS with both halves of the gradient leak of its published code."""

    def lower_step(self, client: Client) -> None:
        self._step(client, client.draw(client.train), LOWER, UPPER)

    def upper_step(self, client: Client) -> None:
        self._step(client, client.draw(self.upper_data(client)), UPPER, LOWER)

    def _step(
        self, client: Client, batch: Batch, trained: tuple[Role, ...], others: tuple[Role, ...]
    ) -> None:
        """Step some roles along all gradients since their last step; add this batch's to the
        others.
        """
        left, added = under(LEAK, client.state), client.gradients(batch, *others)
        client.step_on(batch, *trained, extra=lambda: left)
        held = {name: left[name] for name in added.keys() & left.keys()}
        for name in left:
            del client.state[f"{LEAK}/{name}"]
        client.state |= prefixed(LEAK, weighted_sum([(1.0, added), (1.0, held)]) if held else added)
