"""Low-rank updates, W = W0 + gamma B A (see `Layout.gamma`), and a mixture of LoRA experts on a
frozen MLP: router, experts, and their computation.
"""

import math
from collections.abc import Collection, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear

from coterie.core.errors import ModelError
from coterie.core.roles import BACKBONE, GENERALIST, Role
from coterie.models import mixture_kernel as kernel
from coterie.models.families import LinearShape
from coterie.models.layout import Layout
from coterie.models.routing import ProjectedRouter, RepeatedRouter, Router, Routing, by_experts


def project(base: nn.Module, x: Tensor) -> Tensor:
    """Return a frozen linear layer's (T, out) of (T, in), in a tensor that may be updated in place.

    GPT-2's Conv1D returns a view; updating that in place costs autograd copies of the whole tensor.
    """
    if hasattr(base, "nf"):
        return torch.addmm(base.bias, x, base.weight)  # type: ignore[arg-type]
    return cast(Tensor, base(x))


class LoRA(nn.Module):
    """A stack of `count` updates of one linear layer: A (count, r, in), B (count, out, r), both
    fp32. With a `frozen_sum`, W (out, in) is added to the frozen weights, whatever the expert.

    `roles` are those of A and of B; `count` is 1 for attention, otherwise the experts of that role.
    Of a layer that is no target, A and B are no parameters and stay 0.
    """

    A: Tensor
    B: Tensor

    def __init__(
        self,
        shape: LinearShape,
        roles: tuple[Role, Role],
        count: int,
        rank: int,
        gamma: float,
        target: bool,
        frozen_sum: bool,
    ) -> None:
        super().__init__()
        self.gamma, self.target, inputs, outputs = gamma, target, shape.inputs, shape.outputs
        self.W = nn.Parameter(torch.zeros(outputs, inputs)) if frozen_sum and target else None
        A, B = torch.zeros(count, rank, inputs), torch.zeros(count, outputs, rank)
        for name, matrix in (("A", A), ("B", B)):
            if target:
                self.register_parameter(name, nn.Parameter(matrix))
            else:
                self.register_buffer(name, matrix, persistent=False)
        self.roles = dict(zip("ABW", (*roles, BACKBONE), strict=True))

    def frozen(self, x: Tensor, base: nn.Module) -> Tensor:
        """Return the output of the frozen weights, (T, out), of (T, in), as `project`."""
        y = project(base, x)
        return y if self.W is None else torch.addmm(y, x, self.W.to(x.dtype).T)

    def whole(self) -> tuple[Tensor, Tensor]:
        """Return A and B, exact in fp32, of which B A is the whole update with W, of least rank."""
        update = self.gamma * self.B.double() @ self.A.double()
        U, S, Vh = torch.linalg.svd(update if self.W is None else update + self.W.double())
        rank = max(int((1e-8 * S[:, :1] < S).sum(dim=1).max()), 1)
        return Vh[:, :rank].float(), (U[..., :rank] * S[:, None, :rank]).float()


class SingleLoRA(LoRA):
    """The one update of an attention layer, a generalist's in every variant of CoMiGS."""

    def __init__(self, shape: LinearShape, layout: Layout, target: bool) -> None:
        roles, rank, frozen = layout.factors(GENERALIST), layout.rank, layout.frozen_sum
        super().__init__(shape, roles, 1, rank, layout.gamma(rank), target, frozen)
        self.dropout = layout.dropout

    def forward(self, x: Tensor, base: nn.Module) -> Tensor:
        """Return base(x) + gamma B A x, (..., in) -> (..., out), in the dtype of x.

        The long side comes last in every thin product, also in the backward pass: on CPUs that is
        up to four times as fast.
        """
        tokens = x.flatten(0, -2)
        if not self.target:
            return project(base, tokens).view(*x.shape[:-1], -1)
        codes = (
            self.A[0].to(x.dtype) @ nn.functional.dropout(tokens, self.dropout, self.training).T
        )  # (r, T)
        y = self.frozen(tokens, base).addmm_(
            codes.T, self.B[0].to(x.dtype).T.contiguous(), alpha=self.gamma
        )
        return y.view(*x.shape[:-1], -1)


# Of one piece's hidden-width tensor: on a CPU tokens are taken in chunks, so that the pieces of a
# chunk stay in its cache.
CACHED_VALUES = 2**17
MORE_IN_BF16 = 4  # times as many: a layer of SmolLM2 took 47 ms in place of 53, its base alone 31
TOKENS_PER_SET = 8  # on average, from which on a CPU sorts tokens by the set of their experts


class Mixture(nn.Module):
    """The adapter of one MLP: stacked experts by role, and a router."""

    def __init__(
        self, shape: Sequence[LinearShape], layout: Layout, targets: Collection[str] | None = None
    ) -> None:
        super().__init__()
        self.layout, self.gamma = layout, layout.gamma(layout.expert_rank)
        self.first = tuple(layer.name for layer in shape if layer.name != "down")
        self.hidden = shape[0].outputs  # f
        shared = Role.EXPERT if layout.repeated else Role.GENERALIST
        shared = Role.BACKBONE if layout.frozen_generalists else shared
        individual = Role.EXPERT if layout.projected and not layout.held else Role.SPECIALIST
        for name, role, count in (
            ("generalist", shared, layout.generalists),
            ("specialist", individual, layout.specialists),
        ):
            if count:
                how = layout.factors(role), count, layout.expert_rank, self.gamma
                frozen, loras = layout.frozen_sum and name == "generalist", nn.ModuleDict()
                for layer in shape:
                    target = targets is None or layer.name in targets
                    loras[layer.name] = LoRA(layer, *how, target, frozen)
                self.add_module(name, loras)
        if layout.projected and targets is not None and self.first[0] not in targets:
            raise ModelError(
                f"model.target_modules: leaves out {self.first[0]}, by which tokens choose experts",
                f"Add the MLP's {self.first[0]}.",
            )
        n, k = layout.experts, layout.active
        self.router: Router | None = None
        if layout.routed and layout.projected:
            self.router = ProjectedRouter(shape[0].inputs, layout.expert_rank, k - 1)
        elif layout.routed:
            router = RepeatedRouter if layout.repeated else Router
            self.router = router(shape[0].inputs, n, k, layout.biased)

    def _by_role(self, layer: str, matrix: str) -> list[Tensor]:
        """Return one matrix of the experts of each role, (., ., .), generalists first."""
        return [
            getattr(self.get_submodule(f"{role}.{layer}"), matrix)
            for role in ("generalist", "specialist")
            if hasattr(self, role)
        ]

    def _stack(self, layer: str, matrix: str, dtype: torch.dtype) -> Tensor:
        return kernel.stacked(self._by_role(layer, matrix), dtype)

    @property
    def keys(self) -> Tensor | None:
        """A of the first layer of the experts that a `ProjectedRouter` chooses from, (S, r, d)."""
        path = f"specialist.{self.first[0]}.A"
        return self.get_parameter(path) if self.layout.projected else None

    def forward(
        self, x: Tensor, base: kernel.FrozenMLP, record: list[Routing] | None = None
    ) -> Tensor:
        """Return (..., d_model) in the dtype and shape of x; append the decision to `record`."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens, self.keys) if self.router is not None else None
        if record is not None and routing is not None:
            record.append(routing)
        weights = self._weights(tokens, routing)
        if self.training and self.layout.dropout > 0:
            return self._experts(tokens, weights, base, None).view_as(x)
        selected = None if routing is None else routing.selected
        plan, order = self._plan(tokens, selected, base.activation)
        if order is None or weights is None:
            return self._experts(tokens, weights, base, plan).view_as(x)
        inverse = order.argsort()
        y = self._experts(
            kernel._reordered(tokens, order, inverse),
            kernel._reordered(weights, order, inverse),
            base,
            plan,
        )
        return kernel._reordered(y, inverse, order).view_as(x)

    def _experts(
        self, x: Tensor, weights: Tensor | None, base: kernel.FrozenMLP, plan: kernel.Plan | None
    ) -> Tensor:
        """Return (T, d_model) with weights (T, n), or None for 1; without a plan, with dropout."""
        named = zip(self.first, base.first, strict=True)
        bases = [self._frozen(name, x, layer) for name, layer in named]
        # (linears, n, r, d_model)
        A1 = torch.stack([self._stack(name, "A", x.dtype) for name in self.first])
        B2 = self._stack("down", "B", x.dtype)
        weights = None if weights is None else weights.T.contiguous()
        if plan is None:
            m, c = self._with_dropout(x, bases, weights, A1, base.activation)
        else:
            codes = (A1.flatten(0, 2) @ x.T).view(*A1.shape[:3], len(x))
            by_role = [
                *self._by_role("down", "A"),
                *(B for name in self.first for B in self._by_role(name, "B")),
            ]
            m, c = kernel._Hidden.apply(plan, weights, codes, *bases, *by_role)  # type: ignore[no-untyped-call]
        return self._frozen("down", m, base.down).addmm_(
            c.flatten(0, 1).T, B2.mT.flatten(0, 1), alpha=self.gamma
        )

    def _frozen(self, name: str, x: Tensor, base: nn.Module) -> Tensor:
        """Return the output of a layer's frozen weights, (T, out), of (T, in)."""
        if not self.layout.frozen_sum:
            return project(base, x)
        lora: LoRA = self.get_submodule(f"generalist.{name}")  # type: ignore[assignment]
        return lora.frozen(x, base)

    def _weights(self, x: Tensor, routing: Routing | None) -> Tensor | None:
        """Return (T, n) weights in the dtype of x; None for a single expert."""
        if routing is not None:
            return routing.weights.to(x.dtype)
        n = self.layout.experts
        return None if n == 1 else x.new_full((1, n), 1 / n).expand(len(x), n)

    def _plan(
        self, x: Tensor, selected: Tensor | None, activation: kernel.Activation
    ) -> tuple[kernel.Plan, Tensor | None]:
        """Return the plan for T tokens that use the selected experts, (T, k), or all; and the order
        of tokens that it is made for, if changed.

        Sorted by their sets of experts, tokens are consecutive, and nothing as wide as the hidden
        layer is gathered or scattered. A GPU would have too little work for each of so many sets,
        so it gets fewer, larger groups.
        """
        n, active = self.layout.experts, self.layout.active
        cached = CACHED_VALUES * torch.get_num_threads()  # each thread has a cache of its own
        if x.dtype.itemsize < 4:
            cached *= MORE_IN_BF16
        on_cpu = x.device.type == "cpu"
        chunk = max(cached // self.hidden, 16) if on_cpu else max(len(x), 1)
        order = None
        # where there are no values, any k experts do: only operations are counted
        if selected is None or x.is_meta:
            experts = range(n if selected is None else active)
            pieces = kernel.consecutive_pieces([(experts, 0, len(x))], chunk)
        elif on_cpu and n < 63 and math.comb(n, active) * TOKENS_PER_SET <= len(x):
            order, sets = by_experts(selected)
            pieces = kernel.consecutive_pieces(sets, chunk)
        else:
            pieces = kernel.grouped_pieces(selected, n, chunk * n // active)
        return kernel.Plan(tuple(pieces), activation, self.gamma), order

    def _with_dropout(
        self,
        x: Tensor,
        bases: list[Tensor],
        weights: Tensor | None,
        A1: Tensor,
        activation: kernel.Activation,
    ) -> tuple[Tensor, Tensor]:
        """Return the same m and c by autograd, with dropout on the input of every LoRA."""
        A2 = self._stack("down", "A", x.dtype)
        B1 = [self._stack(name, "B", x.dtype).mT for name in self.first]
        m, c = torch.zeros_like(bases[0]), []
        for j in range(self.layout.experts):
            p = [
                b + self.gamma * linear(dropout(x, self.layout.dropout), A[j]) @ B[j]
                for b, A, B in zip(bases, A1, B1, strict=True)
            ]
            h = activation.forward(p[0]) * p[1] if len(p) == 2 else activation.forward(p[0])
            codes = linear(dropout(h, self.layout.dropout), A2[j]).T
            m = m + (h if weights is None else weights[j, :, None] * h)
            c.append(codes if weights is None else weights[j] * codes)
        return m, torch.stack(c)
