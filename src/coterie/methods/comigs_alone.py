"""CoMiGS without any sharing, the row 2S as the authors of CoMiGS released it: their script runs a
single round, after which nothing is averaged (epfml/CoMiGS, collab_runscripts/table1/comigs_2s.sh).
In Algorithm 1 attention LoRAs are averaged in every round, which is `comigs-2s`.
"""

from dataclasses import dataclass
from typing import ClassVar

from coterie.core.roles import Role
from coterie.methods.comigs import CoMiGS
from coterie.methods.templates import Alone


@dataclass(frozen=True)
class CoMiGSAlone(Alone, CoMiGS):
    """Experts on training data, routers on validation data, own attention LoRAs; sends nothing."""

    shared: ClassVar[tuple[Role, ...]] = CoMiGS.shared
    serves_unseen_clients: ClassVar[bool] = False
    needs_only_mean = False
    download = Alone.download
