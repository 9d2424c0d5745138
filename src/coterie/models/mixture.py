"""The mixture of LoRA experts of one MLP, evaluated exactly and cheaply (CoMiGS, Section 3).

Every expert j is the whole MLP with its own low-rank updates, and the block's output is y = sum_j w_j MLP_j(x). The frozen projections
are shared by all experts: the first is applied once per token, and because the last one is linear,

    y = W2 m + b2 + gamma sum_j B2_j c_j,    m = sum_j w_j h_j,    c_j = w_j A2_j h_j,
    h_j = act(p_j)  or, gated,  act(p_j) * r_j,    p_j = b + gamma B1_j z_j,    b = W1 x + b1,    z_j = A1_j x,

so is it. Only b, the codes z and the weights w are kept for the backward pass; p_j and h_j are computed again there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coterie.models.architecture import MLPShape
from coterie.models.layout import Layout
from coterie.models.lora import LoRA, gamma, project
from coterie.models.routing import Router, Routing
from coterie.roles import Role

Rows = slice | Tensor  # which tokens: consecutive ones, or (t,) indices
# Of one piece's hidden-width tensor: on a CPU tokens are taken in chunks, so that the pieces of a chunk stay in its cache.
CACHED_VALUES = 2**18


@dataclass(frozen=True)
class Activation:
    """An elementwise function, and (dL/da, p) -> dL/dp for a = act(p)."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "Activation":
        """The fused derivative where torch has one, otherwise autograd's."""
        if isinstance(module, nn.SiLU):
            return cls(nn.functional.silu, torch.ops.aten.silu_backward)
        if isinstance(module, nn.GELU):
            how = module.approximate
            return cls(module.forward, lambda grad, p: torch.ops.aten.gelu_backward(grad, p, approximate=how))

        def derive(grad: Tensor, p: Tensor) -> Tensor:
            with torch.enable_grad():
                p = p.detach().requires_grad_()
                return torch.autograd.grad(module(p), p, grad)[0]

        return cls(module, derive)


@dataclass(frozen=True)
class FrozenMLP:
    """The base's MLP, alike for all families.

    Args:
        first: The layers d_model -> f: (up,) or (gate, up).
        down: The layer f -> d_model.
        activation: On the first of `first`.
    """

    first: tuple[nn.Module, ...]
    down: nn.Module
    activation: Activation


@dataclass(frozen=True)
class Plan:
    """Which (expert, tokens) pairs to compute, in which order.

    Args:
        pieces: Expert and tokens; all pieces of a chunk of tokens follow each other.
        activation: The MLP's.
        gamma: The scale of the updates.
        dense: Whether every token meets every expert, in order.
    """

    pieces: tuple[tuple[int, Rows], ...]
    activation: Activation
    gamma: float
    dense: bool

    def empty(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """A contiguous tensor that the pieces fill: they reach all of it if they are dense."""
        return (like.new_empty if self.dense else like.new_zeros)(shape)


def dense_pieces(tokens: int, experts: int, chunk: int) -> Iterator[tuple[int, Rows]]:
    """Every token with every expert."""
    for start in range(0, tokens, chunk):
        for j in range(experts):
            yield j, slice(start, min(start + chunk, tokens))


def grouped_pieces(selected: Tensor, experts: int, chunk: int) -> Iterator[tuple[int, Rows]]:
    """The selected pairs only, (T, k): tokens sorted by chunk, then by expert. On a GPU this waits for the group sizes."""
    tokens, active = selected.shape
    chunks = -(-tokens // chunk)
    token = torch.arange(tokens, device=selected.device)
    key = ((token // chunk)[:, None] * experts + selected).flatten()
    order = key.argsort(stable=True)
    rows = torch.split(order // active, torch.bincount(key, minlength=chunks * experts).tolist())
    for i, group in enumerate(rows):
        if len(group):
            yield i % experts, group


class _Hidden(torch.autograd.Function):
    """(b, z, w, B1, A2) -> (m, A2 h): everything between the frozen projections. Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, weights: Tensor | None, codes: Tensor, A2: Tensor, *bases_and_B1: Tensor) -> tuple[Tensor, Tensor]:
        """One or two bases b (T, f) and as many B1 (n, f, r), codes (T, linears n, r), weights (T, n, 1) or None for 1, A2 (n, r, f).

        Returns:
            m (T, f) and the codes of the last layer before they are weighted, A2_j h_j, (T, n, r), 0 where a token does not use j.
        """
        ctx.plan = plan
        ctx.save_for_backward(weights, codes, A2, *bases_and_B1)
        half = len(bases_and_B1) // 2
        bases, B1 = bases_and_B1[:half], bases_and_B1[half:]
        m = plan.empty(bases[0].shape, codes)
        c = plan.empty((len(codes), *A2.shape[:2]), codes)
        for j, rows in plan.pieces:
            p = _first(plan, j, rows, bases, codes, B1)
            h = plan.activation.forward(p[0])
            if half == 2:
                h.mul_(p[1])
            _put_column(c, rows, j, h @ A2[j].T)
            _accumulate(m, j, rows, h, None if weights is None else _column(weights, rows, j))
        return m, c

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dm: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        """q_j = dL/dh_j * act'(p_j), with dL/dh_j = w_j dm + A2_j^T dL/d(A2_j h_j), and dL/dw_j = <dm, h_j>; autograd does the rest."""
        plan: Plan = ctx.plan
        weights, codes, A2, *bases_and_B1 = ctx.saved_tensors
        half = len(bases_and_B1) // 2
        bases, B1 = bases_and_B1[:half], bases_and_B1[half:]
        _, of_weights, of_codes, of_A2, *of_first = ctx.needs_input_grad
        d_weights = plan.empty(weights.shape, weights) if of_weights else None
        d_codes = plan.empty(codes.shape, codes) if of_codes else None
        d_A2 = torch.zeros_like(A2) if of_A2 else None
        d_bases = [plan.empty(b.shape, b) if needed else None for b, needed in zip(bases, of_first[:half], strict=True)]
        # (n, r, f): a product with so narrow a matrix is more than twice as fast with the long side last
        d_B1 = [B.new_zeros(B.mT.shape) if needed else None for B, needed in zip(B1, of_first[half:], strict=True)]
        dc = dc.contiguous()
        for j, rows in plan.pieces:
            p = _first(plan, j, rows, bases, codes, B1)
            a = plan.activation.forward(p[0])
            h = a * p[1] if half == 2 else a  # its memory is used again below
            dm_j, dc_j = _rows(dm, rows), _column(dc, rows, j)
            if d_A2 is not None:
                d_A2[j].addmm_(dc_j.T, h)
            if d_weights is not None:
                _put_column(d_weights, rows, j, h.mul_(dm_j).sum(dim=1, keepdim=True))
            dh = torch.addmm(dm_j, dc_j, A2[j]) if weights is None else (dm_j * _column(weights, rows, j)).addmm_(dc_j, A2[j])
            q = [plan.activation.backward(dh if half == 1 else torch.mul(dh, p[1], out=h), p[0])]
            if half == 2:
                q.append(dh.mul_(a))
            for i, q_i in enumerate(q):
                column = i * len(A2) + j
                if (d_B := d_B1[i]) is not None:
                    d_B[j].addmm_(_column(codes, rows, column).T, q_i, alpha=plan.gamma)
                if d_codes is not None:
                    _put_column(d_codes, rows, column, (q_i @ B1[i][j]).mul_(plan.gamma))
                if (d_base := d_bases[i]) is not None:
                    _accumulate(d_base, j, rows, q_i)
        return None, d_weights, d_codes, d_A2, *d_bases, *(None if d_B is None else d_B.mT for d_B in d_B1)


def _first(plan: Plan, j: int, rows: Rows, bases: Sequence[Tensor], codes: Tensor, B1: Sequence[Tensor]) -> list[Tensor]:
    """The pre-activations b + gamma B1_j z_j of one piece, (t, f) for each first layer."""
    updates = [(_column(codes, rows, i * len(B) + j), B[j].T) for i, B in enumerate(B1)]
    if isinstance(rows, slice):
        return [torch.addmm(b[rows], z, B, alpha=plan.gamma) for b, (z, B) in zip(bases, updates, strict=True)]
    return [b.index_select(0, rows).addmm_(z, B, alpha=plan.gamma) for b, (z, B) in zip(bases, updates, strict=True)]


def _rows(tensor: Tensor, rows: Rows) -> Tensor:
    """`tensor[rows]`; indexing by a tensor would be several times slower than selecting."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _column(tensor: Tensor, rows: Rows, column: int) -> Tensor:
    """`tensor[rows, column]` of a contiguous (T, columns, r): selecting from its strided columns would be slow as well."""
    if isinstance(rows, slice):
        return tensor[rows, column]
    return tensor.flatten(0, 1).index_select(0, rows * tensor.shape[1] + column)


def _put_column(tensor: Tensor, rows: Rows, column: int, values: Tensor) -> None:
    """`tensor[rows, column] = values`."""
    if isinstance(rows, slice):
        tensor[rows, column] = values
    else:
        tensor.flatten(0, 1).index_copy_(0, rows * tensor.shape[1] + column, values)


def _accumulate(total: Tensor, j: int, rows: Rows, term: Tensor, weight: Tensor | None = None) -> None:
    """total[rows] += weight * term, where the first of all experts of consecutive rows writes instead. May overwrite `term`."""
    if not isinstance(rows, slice):
        total.index_add_(0, rows, term if weight is None else term.mul_(weight))
        return
    target = total[rows]
    if j == 0:
        target.copy_(term) if weight is None else torch.mul(term, weight, out=target)
    else:
        target.add_(term) if weight is None else target.addcmul_(term, weight)


class Mixture(nn.Module):
    """The adapter of one MLP: its experts by role, stacked, and its router.

    Args:
        shape: The MLP's sizes.
        layout: Numbers of experts, rank, routing.
    """

    def __init__(self, shape: MLPShape, layout: Layout) -> None:
        super().__init__()
        self.layout, self.gamma = layout, gamma(layout.alpha, layout.expert_rank)
        self.first = tuple(linear.name for linear in shape.linears if linear.name != "down")
        shared = Role.EXPERT if layout.members else Role.GENERALIST
        for name, role, count in (("generalist", shared, layout.generalists), ("specialist", Role.SPECIALIST, layout.specialists)):
            loras = {
                linear.name: LoRA(layout.factors(role), count, linear.inputs, linear.outputs, layout.expert_rank, layout.alpha)
                for linear in shape.linears
            }
            if count:
                self.add_module(name, nn.ModuleDict(loras))
        self.router = Router(shape.width, layout.experts, layout.active, layout.biased) if layout.routed else None

    def _stack(self, linear: str, matrix: str, dtype: torch.dtype) -> Tensor:
        """(n, ., .) one matrix of all experts, generalists first."""
        stacks = [getattr(self.get_submodule(f"{role}.{linear}"), matrix) for role in ("generalist", "specialist") if hasattr(self, role)]
        return (stacks[0] if len(stacks) == 1 else torch.cat(stacks)).to(dtype)

    def forward(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """(..., d_model) -> (..., d_model) in the dtype of x; the routing decision is appended to `record`."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens) if self.router is not None else None
        if record is not None and routing is not None:
            record.append(routing)
        weights = self._weights(tokens, routing)
        bases = [project(linear, tokens) for linear in base.first]
        B1 = [self._stack(name, "B", x.dtype) for name in self.first]
        A1 = torch.stack([self._stack(name, "A", x.dtype) for name in self.first])  # (linears, n, r, d_model)
        A2, B2 = self._stack("down", "A", x.dtype), self._stack("down", "B", x.dtype)
        if self.training and self.layout.dropout > 0:
            m, c = self._with_dropout(tokens, bases, weights, A1, B1, A2, base.activation)
        else:
            codes = nn.functional.linear(tokens, A1.flatten(0, 2)).view(len(tokens), len(A1) * self.layout.experts, A1.shape[2])
            plan = self._plan(bases[0], routing, base.activation)
            m, c = _Hidden.apply(plan, weights, codes, A2, *bases, *B1)  # type: ignore[no-untyped-call]
        if weights is not None:
            c = c * weights
        y = project(base.down, m).addmm_(c.flatten(1), B2.transpose(1, 2).flatten(0, 1), alpha=self.gamma)
        return y.view_as(x)

    def _weights(self, x: Tensor, routing: Routing | None) -> Tensor | None:
        """(T, n, 1) in the dtype of x; None for a single expert."""
        if routing is not None:
            return routing.weights.to(x.dtype)[..., None]
        n = self.layout.experts
        return None if n == 1 else x.new_full((1, n, 1), 1 / n).expand(len(x), n, 1)

    def _plan(self, b: Tensor, routing: Routing | None, activation: Activation) -> Plan:
        n, selected = self.layout.experts, None if routing is None else routing.selected
        cached = CACHED_VALUES * torch.get_num_threads()  # each thread has a cache of its own
        chunk = max(len(b), 1) if b.is_cuda else max(cached // b.shape[1], 16) * n // self.layout.active
        if selected is None:
            return Plan(tuple(dense_pieces(len(b), n, chunk)), activation, self.gamma, dense=True)
        return Plan(tuple(grouped_pieces(selected, n, chunk)), activation, self.gamma, dense=False)

    def _with_dropout(
        self, x: Tensor, bases: list[Tensor], weights: Tensor | None, A1: Tensor, B1: list[Tensor], A2: Tensor, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """The same m and A2 h with a dropout mask of its own on the input of every LoRA: by autograd, all experts for all tokens."""
        m, c = torch.zeros_like(bases[0]), []
        for j in range(self.layout.experts):
            p = [
                b + self.gamma * nn.functional.linear(nn.functional.linear(nn.functional.dropout(x, self.layout.dropout), A[j]), B[j])
                for b, A, B in zip(bases, A1, B1, strict=True)
            ]
            h = activation.forward(p[0]) * p[1] if len(p) == 2 else activation.forward(p[0])
            m = m + (h if weights is None else weights[:, j] * h)
            c.append(nn.functional.linear(nn.functional.dropout(h, self.layout.dropout), A2[j]))
        return m, torch.stack(c, dim=1)
