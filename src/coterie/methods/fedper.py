"""FedPer: the head of every client's model is personal, its body is averaged.

Arivazhagan et al., "Federated Learning with Personalization Layers", 2019 (arXiv:1912.00818),
Algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.methods.templates import WithHead
from coterie.models.layout import LocalPart


@dataclass(frozen=True)
class FedPer(WithHead):
    """Both parts take every step together; heads start at values of their clients' own."""

    local_part: ClassVar[LocalPart] = "head"

    by_examples = True
