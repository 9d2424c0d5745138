"""The structure of a client's model: experts by role, ranks, and routing."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from coterie.core.errors import ModelError
from coterie.core.roles import BACKBONE, SPECIALIST, Role

# the largest number of half precision, in which bases are computed and exports written
MOST_ALPHA = 65504.0

Balance = Literal["none", "uniform", "generalist", "generalist-printed"]
Mixture = Literal["logits", "probabilities", "scores", "mean"]
LocalPart = Literal["none", "head", "body", "norms"]
ABSENT = -1  # the number of an expert in a place where there is none


@dataclass(frozen=True)
class Layout:
    """The shape of one client's adapter (CoMiGS, Section 3 and B.1.2).

    Args:
        generalists: g, shared experts per MLP.
        specialists: s_i, local experts per MLP; g + s_i >= 1.
        biased: Whether routers add constants to logits: of parts whose predictions were mixed.
        rank: r of the attention LoRAs.
        alpha: LoRA scale; an update is gamma B A, see `gamma`.
        use_rslora: Whether gamma is alpha / sqrt(r), or else alpha / r.
        target_modules: Names of the base's layers that have updates, or ends of their paths, as of
            PEFT; None: all linear layers of attention and MLPs.
        mlp_rank: r of the experts; `rank` unless given.
        dropout: Probability of dropping a value of any LoRA's input while training.
        top_k: Experts that a token uses, at most all of them.
        frozen_a: Whether every A stays at its initial value, the same for all clients (FFA-LoRA).
        frozen_generalists: Whether steps leave the experts of the generalist's place as they came
            (FedALT).
        frozen_sum: Whether each adapted layer adds a frozen matrix to its weights, in which a
            server puts more than factors can hold (FedEx-LoRA, FLoRA).
        repeated: Whether the generalists are other clusters' experts, as many as a server sends,
            which no client trains, and the one specialist has as many of a router's places as there
            are experts, so that a token may use few others or none (FedLEASE).
        projected: Whether the one generalist serves every token with half of the weight, and the
            specialists, members of a server's pool of experts for each block, are chosen by
            projections of the token (FedAMoLE).
        held: How many of its specialists each block of a kept model has; (): those that a server
            sends.
        local_a: Whether every A is local, whatever its expert is.
        local_b: Whether every B is local, whatever its expert is (FedSA-LoRA).
        local_part: What of the model is local: the head, of a language model the adapters of its
            last `head_blocks` blocks, of a classifier its last layer; the body, all else; or the
            norms of a classifier (FedPer, LG-FedAvg, FedBN).
        routing: "learned" by a router; "equal": the fixed weights 1/n over all n experts, without a
            router (the equal-budget baseline).
        balance: Load balancing: "none", "uniform" (n sum_j f_j P_j), "generalist" (eq. 6, to the
            scale of the uniform loss), or "generalist-printed" (eq. 6 to its own scale).
        balance_weight: lambda, the weight of load balancing in the objective.

    Raises:
        ModelError: A value is out of its range.
    """

    generalists: int = 1
    specialists: int = 1
    biased: bool = False
    rank: int = 8
    alpha: float = 16.0
    mlp_rank: int | None = None
    dropout: float = 0.0
    frozen_a: bool = False
    frozen_generalists: bool = False
    frozen_sum: bool = False
    repeated: bool = False
    projected: bool = False
    held: tuple[int, ...] = ()
    local_a: bool = False
    local_b: bool = False
    local_part: LocalPart = "none"
    head_blocks: int = 1
    top_k: int = 2
    routing: Literal["learned", "equal"] = "learned"
    balance: Balance = "uniform"
    balance_weight: float = 0.01
    use_rslora: bool = True
    target_modules: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        limits = {
            "generalists": (self.generalists >= 0, "at least 0"),
            "specialists": (self.specialists >= 0, "at least 0"),
            "generalists + specialists": (self.generalists + self.specialists >= 1, "at least 1"),
            "repeated": (not self.repeated or self.specialists == 1, "false without a specialist"),
            "projected": (not self.projected or self.generalists == 1, "with one generalist"),
            "held": (all(0 <= h <= self.specialists for h in self.held), "at most specialists"),
            "rank": (self.rank >= 1, "at least 1"),
            "mlp_rank": (self.mlp_rank is None or self.mlp_rank >= 1, "at least 1"),
            "alpha": (abs(self.alpha) <= MOST_ALPHA, f"within ±{MOST_ALPHA:,.0f}"),
            "dropout": (0 <= self.dropout < 1, "in [0, 1)"),
            "top_k": (self.top_k >= 1, "at least 1"),
            "head_blocks": (self.head_blocks >= 1, "at least 1"),
            "routing": (self.routing in ("learned", "equal"), "'learned' or 'equal'"),
            "balance": (
                self.balance in get_args(Balance),
                " or ".join(map(repr, get_args(Balance))),
            ),
            "balance_weight": (
                self.balance_weight >= 0 and math.isfinite(self.balance_weight),
                "finite and at least 0",
            ),
        }
        if mistakes := [
            f"{name} must be {limit}" for name, (kept, limit) in limits.items() if not kept
        ]:
            raise ModelError(f"adapter layout: {'; '.join(mistakes)}", f"Found {self}.")

    @property
    def models(self) -> "tuple[Layout, ...]":
        """The layouts of the client's models: one, unless a method trains several."""
        return (self,)

    def gamma(self, rank: int) -> float:
        """Return an update's scale: alpha / sqrt(r) (rsLoRA) or alpha / r (Hu et al. 2021)."""
        return self.alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def targets(self, path: str) -> bool:
        """Return whether a base's layer, by its path within a block, has an update."""
        names = self.target_modules
        return names is None or any(path == x or path.endswith(f".{x}") for x in names)

    def factors(self, role: Role) -> tuple[Role, Role]:
        """Return the roles of A and B of a low-rank update of an expert with this role."""
        a = BACKBONE if self.frozen_a else SPECIALIST if self.local_a else role
        return a, SPECIALIST if self.local_b else role

    def of_block(self, number: int, blocks: int) -> "Layout":
        """Return the layout of one of a language model's blocks."""
        part = "head" if number >= blocks - self.head_blocks else "body"
        return replace(self, local_a=True, local_b=True) if part == self.local_part else self

    @property
    def experts(self) -> int:
        """n, the number of experts of an MLP."""
        return self.generalists + self.specialists

    @property
    def active(self) -> int:
        """k, the number of experts that each token uses: min(top_k, n), or n with equal weights."""
        return self.experts if self.routing == "equal" else min(self.top_k, self.experts)

    @property
    def routed(self) -> bool:
        """Whether MLPs have a router: not with a single expert or equal weights."""
        return self.routing == "learned" and self.experts > 1

    @property
    def plain(self) -> bool:
        """Whether no setting of LoRA experts is used, so that any kind of model fits."""
        special = (self.specialists, self.frozen_a, self.local_b, self.mlp_rank)
        return not self.routed and not any(special)

    @property
    def expert_rank(self) -> int:
        """The experts' r."""
        return self.mlp_rank or self.rank

    @property
    def balance_coefficients(self) -> tuple[float, ...]:
        """a_j of the load-balancing loss sum_j a_j f_j P_j, generalists first; () if there is none.

        Uniform: n. Generalist (eq. 6, for any g and s): 2 g for a generalist, 2 s for a specialist,
        so that at its target, where generalists have half of the probability, the loss is k, as the
        uniform one is at its own. As printed it is 2 (g^2 + s^2) times smaller: with three
        specialists a twentieth, which has no effect. With one kind alone it is uniform.
        """
        g, s = self.generalists, self.specialists
        if not self.routed or self.balance == "none":
            return ()
        if self.balance == "uniform":
            return (float(self.experts),) * self.experts
        if self.balance == "generalist-printed":
            return (g / (g**2 + s**2),) * g + (s / (g**2 + s**2),) * s
        return (2.0 * g,) * g + (2.0 * s,) * s if g and s else (float(self.experts),) * self.experts

    @property
    def balance_has_gradient(self) -> bool:
        """Whether load balancing has an effect: with k = n all f_j are 1, and sum_j P_j = 1."""
        if not self.balance_coefficients or self.balance_weight == 0:
            return False
        return len(set(self.balance_coefficients)) > 1 or self.active < self.experts


@dataclass(frozen=True)
class PartsLayout(Layout):
    """The layouts of a client's models, by the parts of the method that trains several."""

    parts: tuple[tuple[str, Layout], ...] = ()

    @classmethod
    def of(cls, parts: Mapping[str, Layout]) -> "PartsLayout":
        """Return the layout that counts the experts of all parts."""
        counts = [(part.generalists, part.specialists) for part in parts.values()]
        generalists, specialists = map(sum, zip(*counts, strict=True))
        return cls(generalists, specialists, routing="equal", parts=tuple(parts.items()))

    @property
    def models(self) -> tuple[Layout, ...]:
        return tuple(layout for _, layout in self.parts)


def parts_of(name: str, layouts: Mapping[str, Layout]) -> dict[str, Layout]:
    """Return the layout of one part of each client's."""
    return {i: dict(of.parts)[name] for i, of in layouts.items() if isinstance(of, PartsLayout)}


@dataclass(frozen=True)
class NetworkLayout(Layout):
    """Whole networks, without an adapter's experts."""

    specialists: int = 0
    routing: Literal["learned", "equal"] = "equal"
    balance: Balance = "none"


@dataclass(frozen=True)
class CommonLayout(NetworkLayout):
    """Nothing to train: the model is the common expert itself (DDOME)."""


@dataclass(frozen=True)
class PoolLayout(NetworkLayout):
    """The size of a pool, the number of experts at a client, and how their outputs are combined.
    Raises ModelError for a value out of its range.
    """

    pool: int = 5  # M, experts at the server
    chosen: int = 2  # K, experts that a client trains
    slots: int | None = None  # experts that a client has room for; K if None
    # what a client trains: "logits", sum_i p_i f_i(x) of the experts' logits with p renormalised
    # over its experts; "probabilities", the same of their softmax; "scores", of logits with p as
    # the gate gives it over all M; "mean", equal weights of probabilities, without a gate
    mixture: Mixture = "logits"
    # what classifies a sample: "best", the client's expert with the highest score, or the
    # "mixture"
    answer: Literal["best", "mixture"] = "best"
    # whether experts start at random, each from values of its own, all from the common expert's,
    # or from those where they fit
    start: Literal["random", "common", "auto"] = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.chosen <= self.pool:
            problem = f"{self.chosen} experts at a client of a pool of {self.pool}"
            raise ModelError(problem, "Choose at least one, at most all of them.")

    @property
    def gated(self) -> bool:
        """Whether a gate weights the experts."""
        return self.mixture != "mean"


@dataclass(frozen=True)
class GateTarget:
    """A batch that teaches the gate to recognise an anchor's data."""

    embedding: Tensor  # (B, e)
    expert: int  # the number of the expert that all of it should go to

    def __len__(self) -> int:
        return len(self.embedding)

    def split(self, rows: int) -> "list[GateTarget]":
        """Return batches of at most `rows` examples each, in order."""
        return [
            GateTarget(embedding, self.expert) for embedding in torch.split(self.embedding, rows)
        ]
