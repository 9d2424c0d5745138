"""LG-FedAvg: local representations under a shared head.

Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global
Representations", 2020 (arXiv:2001.01523), Algorithm 1.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.methods.templates import WithHead
from coterie.models.layout import LocalPart


@dataclass(frozen=True)
class LGFedAvg(WithHead):
    """The body stays with its client, the head is averaged. The authors start from a model trained
    by FedAvg; here `model.start` may be a common expert.
    """

    local_part: ClassVar[LocalPart] = "body"

    by_examples = True
