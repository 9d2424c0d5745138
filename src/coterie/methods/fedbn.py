"""FedBN: FedAvg whose normalisation layers stay with the clients.

Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021,
Algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.methods.templates import PartlyLocal
from coterie.models.layout import LocalPart


@dataclass(frozen=True)
class FedBN(PartlyLocal):
    """Scales, shifts and running statistics of every normalisation are local, all else averaged."""

    local_part: ClassVar[LocalPart] = "norms"
