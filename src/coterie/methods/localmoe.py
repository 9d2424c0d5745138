"""Local-MoE: every client alone, with two experts and a router (CoMiGS, Table 5)."""

from dataclasses import dataclass

from coterie.methods.templates import Alone, TwoExperts


@dataclass(frozen=True)
class LocalMoE(Alone, TwoExperts):
    """Each client trains two experts and a router on its own data; nothing is sent."""

    by_examples = True
