"""The papers' theorems as small experiments whose claims are checked with numbers:
`THEOREMS[name](seed)`.
"""

from collections.abc import Callable, Mapping

from coterie.papers.theory.cobo import convergence
from coterie.papers.theory.comigs import contraction
from coterie.papers.theory.comigs_experts import linear_experts
from coterie.papers.theory.ddome import disjoint_training
from coterie.papers.theory.experiment import Claim, Curve, Experiment, Panel, Table

THEOREMS: Mapping[str, Callable[[int], Experiment]] = {
    "comigs/theorem-2.1": contraction,
    "comigs/theorem-g.2": linear_experts,
    "cobo/theorem-1": convergence,
    "ddome/theorem-1": disjoint_training,
}

__all__ = ["THEOREMS", "Claim", "Curve", "Experiment", "Panel", "Table"]
