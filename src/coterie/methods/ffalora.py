"""FFA-LoRA: federated freeze-A LoRA.

Sun et al., "Improving LoRA in Privacy-preserving Federated Learning", ICLR 2024, Section 4.
"""

from dataclasses import dataclass, replace

from coterie.methods.fedavg import FedAvg
from coterie.models.layout import Layout


@dataclass(frozen=True)
class FFALoRA(FedAvg):
    """Every A stays at a shared initial value; only the Bs are trained and averaged, so that the
    mean of the updates B_i A is the update of the mean, exactly.
    """

    by_examples = True

    def layout(self, position: int, base: Layout) -> Layout:
        return replace(super().layout(position, base), frozen_a=True)
