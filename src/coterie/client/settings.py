"""How a client trains: batches and optimisers."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from coterie.client.optimizers import AdamW, Optimiser
from coterie.core.roles import GATE, ROUTER, Role

UPPER = {ROUTER, GATE}  # what chooses experts


class Training(BaseModel):
    """The training settings of a client: batches, and one optimiser for each level of the bilevel
    problem.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    batch_size: Annotated[
        int, Field(ge=1, description="sequences or images per optimiser step")
    ] = 64
    micro_batch: Annotated[
        int | None,
        Field(
            ge=1, description="rows per forward pass; gradients are accumulated to the same step"
        ),
    ] = None
    experts: Annotated[
        Optimiser,
        Field(
            description="lower level: LoRA experts and attention; of an image classifier: "
            "everything"
        ),
    ] = AdamW(schedule="cosine")
    routers: Annotated[
        Optimiser, Field(description="upper level: routers, and the gate of a pool")
    ] = AdamW()
    stateless: Annotated[
        bool,
        Field(
            description="clients keep nothing of the model between rounds, and optimisers start "
            "anew; for many clients that rarely take part"
        ),
    ] = False

    def optimiser(self, role: Role) -> Optimiser:
        return self.routers if role in UPPER else self.experts
