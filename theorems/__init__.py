"""The papers' theorems as small experiments whose claims are checked with numbers:
`THEOREMS[name](seed)`.

`coterie reproduce NAME` finds this package in a checkout, by `coterie.papers.theorems`, which has
the names, too.
"""

from collections.abc import Callable, Mapping

from theorems.cobo import convergence
from theorems.comigs import contraction
from theorems.comigs_experts import linear_experts
from theorems.ddome import disjoint_training
from theorems.experiment import Claim, Curve, Experiment, Panel, Table
from theorems.page import show

THEOREMS: Mapping[str, Callable[[int], Experiment]] = {
    "comigs/theorem-2.1": contraction,
    "comigs/theorem-g.2": linear_experts,
    "cobo/theorem-1": convergence,
    "ddome/theorem-1": disjoint_training,
}

__all__ = ["THEOREMS", "Claim", "Curve", "Experiment", "Panel", "Table", "show"]
