"""The mixture of LoRA experts of one MLP, evaluated exactly and cheaply (CoMiGS, Section 3).

Every expert j is the whole MLP with its own low-rank updates, and the block's output is y = sum_j w_j MLP_j(x). The frozen projections
are shared by all experts: the first is applied once per token, and because the last one is linear,

    y = W2 m + b2 + gamma sum_j B2_j c_j,    m = sum_j w_j h_j,    c_j = w_j A2_j h_j,
    h_j = act(p_j)  or, gated,  act(p_j) * r_j,    p_j = b + gamma B1_j z_j,    b = W1 x + b1,    z_j = A1_j x,

so is it. Only b, the codes z and the weights w are kept for the backward pass; p_j and h_j are computed again there. Tensors as wide as
the hidden layer are what costs, so they are few, and live in a scratch that stays in the cache; codes lie with the tokens last, since thin
products are up to three times as fast that way round.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from coterie.models.architecture import MLPShape
from coterie.models.layout import Layout
from coterie.models.lora import LoRA, gamma, project
from coterie.models.routing import Router, Routing, by_experts
from coterie.roles import Role

Rows = slice | Tensor  # which tokens: consecutive ones, or (t,) indices
# Of one piece's hidden-width tensor: on a CPU tokens are taken in chunks, so that the pieces of a chunk stay in its cache.
CACHED_VALUES = 2**17
TOKENS_PER_SET = 8  # on average, from which on a CPU sorts tokens by the set of their experts
PADDING = 16  # values behind each row of the scratch: rows that are a multiple of 4 KiB apart would share the same few places of a cache


@dataclass(frozen=True)
class Activation:
    """An elementwise function, and (dL/da, p) -> dL/dp for a = act(p); both may write to `out`, which may be one of the inputs."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "Activation":
        """The fused derivative where torch has one, otherwise autograd's."""
        if isinstance(module, nn.SiLU):
            return cls._fused(torch.ops.aten.silu, torch.ops.aten.silu_backward)
        if isinstance(module, nn.GELU):
            return cls._fused(torch.ops.aten.gelu, torch.ops.aten.gelu_backward, approximate=module.approximate)

        def forward(p: Tensor, out: Tensor | None = None) -> Tensor:
            a: Tensor = module(p)
            return a if out is None else out.copy_(a)

        def derive(grad: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
            with torch.enable_grad():
                p = p.detach().requires_grad_()
                (found,) = torch.autograd.grad(module(p), p, grad)
            return found if out is None else out.copy_(found)

        return cls(forward, derive)

    @classmethod
    def _fused(cls, forward: Any, backward: Any, **how: Any) -> "Activation":
        def apply(p: Tensor, out: Tensor | None = None) -> Tensor:
            found: Tensor = forward(p, **how) if out is None else forward.out(p, **how, out=out)
            return found

        def derive(grad: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
            found: Tensor = backward(grad, p, **how) if out is None else backward.grad_input(grad, p, **how, grad_input=out)
            return found

        return cls(apply, derive)


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
    """Which experts to compute for which tokens, in which order.

    Args:
        pieces: Experts that the same tokens meet one after the other, and those tokens. If they are consecutive, the experts are all that
            they use, and the pieces together reach every token.
        activation: The MLP's.
        gamma: The scale of the updates.
    """

    pieces: tuple[tuple[Sequence[int], Rows], ...]
    activation: Activation
    gamma: float

    def sums(self, like: Tensor) -> Tensor:
        """What `_accumulate` fills, of the shape of `like`: where tokens are consecutive, the first of their experts writes."""
        return torch.empty_like(like) if all(isinstance(rows, slice) for _, rows in self.pieces) else torch.zeros_like(like)

    def scratch(self, like: Tensor, count: int) -> Callable[[int], list[Tensor]]:
        """For t tokens of a piece, `count` tensors (t, f) that every piece overwrites."""
        longest = max((_length(rows) for _, rows in self.pieces), default=0)
        whole = like.new_empty((count, longest, like.shape[1] + PADDING))
        return lambda tokens: list(whole[:, :tokens, : like.shape[1]])


def dense_pieces(tokens: int, experts: int, chunk: int) -> Iterator[tuple[Sequence[int], Rows]]:
    """Every token with every expert."""
    for start in range(0, tokens, chunk):
        yield range(experts), slice(start, min(start + chunk, tokens))


def sorted_pieces(sets: Sequence[tuple[list[int], int, int]], chunk: int) -> Iterator[tuple[Sequence[int], Rows]]:
    """Tokens that were sorted by the set of their experts, see `by_experts`."""
    for experts, first, last in sets:
        for start in range(first, last, chunk):
            yield experts, slice(start, min(start + chunk, last))


def grouped_pieces(selected: Tensor, experts: int, chunk: int) -> Iterator[tuple[Sequence[int], Rows]]:
    """The selected pairs only, (T, k): tokens sorted by chunk, then by expert. On a GPU this waits for the group sizes."""
    tokens, active = selected.shape
    chunks = -(-tokens // chunk)
    token = torch.arange(tokens, device=selected.device)
    key = ((token // chunk)[:, None] * experts + selected).flatten()
    order = key.argsort(stable=True)
    rows = torch.split(order // active, torch.bincount(key, minlength=chunks * experts).tolist())
    for i, group in enumerate(rows):
        if len(group):
            yield (i % experts,), group


class _Hidden(torch.autograd.Function):
    """(b, z, w, B1, A2) -> (m, c): everything between the frozen projections. Keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, weights: Tensor | None, codes: Tensor, *wide: Tensor) -> tuple[Tensor, Tensor]:
        """Weights (n, T), or None for 1; codes (linears, n, r, T); and what is wide, see `_sorted`: bases b, A2 and B1.

        Returns:
            m (T, f), and the codes of the last layer c_j = w_j A2_j h_j, (n, r, T), 0 where a token does not use j.
        """
        ctx.plan = plan
        ctx.save_for_backward(weights, codes, *wide)
        bases, A2, B1 = _stacks(wide, codes)
        half = len(bases)
        m, c = plan.sums(bases[0]), codes.new_zeros((*A2.shape[:2], codes.shape[-1]))
        scratch = plan.scratch(m, half)
        for experts, rows in plan.pieces:
            b, p = [_rows(base, rows) for base in bases], scratch(_length(rows))
            for k, j in enumerate(experts):
                _first(plan.gamma, b, codes[:, j], rows, [B[j] for B in B1], p)
                h = plan.activation.forward(p[0], out=p[0])
                if half == 2:
                    h.mul_(p[1])
                _put(c[j], rows, A2[j] @ h.T)
                _accumulate(m, rows, h, None if weights is None else _columns(weights[j], rows), k == 0)
        return m, c if weights is None else c.mul_(weights[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dm: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        """With u_j = dm + A2_j^T dL/dc_j: dL/dh_j = w_j u_j, dL/dw_j = <u_j, h_j>, and q_j = u_j * act'(p_j) is dL/dp_j / w_j."""
        plan: Plan = ctx.plan
        weights, codes, *wide = ctx.saved_tensors
        bases, A2, B1 = _stacks(wide, codes)
        half = len(bases)
        _, of_weights, of_codes, *of_wide = ctx.needs_input_grad
        of_bases, of_A2, of_B1 = _sorted(of_wide, half)
        d_weights = torch.zeros_like(weights) if of_weights else None
        d_codes = torch.zeros_like(codes) if of_codes else None
        d_A2 = torch.zeros_like(A2) if any(of_A2) else None
        d_bases = [plan.sums(b) if needed else None for b, needed in zip(bases, of_bases, strict=True)]
        d_B1 = [torch.zeros_like(B) if any(needed) else None for B, needed in zip(B1, of_B1, strict=True)]
        weighted_codes, weighted_dc = (codes, dc) if weights is None else (codes * weights[:, None], dc * weights[:, None])
        scratch = plan.scratch(bases[0], half + 4)
        for experts, rows in plan.pieces:
            b, dm_rows = [_rows(base, rows) for base in bases], _rows(dm, rows)
            *p, a, h, u, product = scratch(_length(rows))
            for k, j in enumerate(experts):
                _first(plan.gamma, b, codes[:, j], rows, [B[j] for B in B1], p)
                plan.activation.forward(p[0], out=a)
                h = a if half == 1 else torch.mul(a, p[1], out=h)
                torch.addmm(dm_rows, _columns(dc[j], rows).T, A2[j], out=u)
                if d_weights is not None:
                    _put(d_weights[j], rows, torch.mul(u, h, out=product).sum(dim=1))
                if d_A2 is not None:
                    d_A2[j].addmm_(_columns(weighted_dc[j], rows), h)
                q = [plan.activation.backward(u if half == 1 else torch.mul(u, p[1], out=product), p[0], out=product)]
                if half == 2:
                    q.append(u.mul_(a))
                w = None if weights is None else _columns(weights[j], rows)
                for i, q_i in enumerate(q):
                    if (d_B := d_B1[i]) is not None:
                        d_B[j].addmm_(_columns(weighted_codes[i, j], rows), q_i, alpha=plan.gamma)
                    if d_codes is not None:
                        _put(d_codes[i, j], rows, B1[i][j] @ q_i.T)
                    if (d_base := d_bases[i]) is not None:
                        _accumulate(d_base, rows, q_i, w, k == 0)
        if d_codes is not None:
            d_codes.mul_(plan.gamma if weights is None else plan.gamma * weights[:, None])
        _, A2_by_role, B1_by_role = _sorted(wide, half)
        by_role = [_unstacked(d_A2, A2_by_role)]
        by_role += [_unstacked(None if d is None else d.mT, roles) for d, roles in zip(d_B1, B1_by_role, strict=True)]
        return None, d_weights, d_codes, *d_bases, *(gradient for gradients in by_role for gradient in gradients)


def _sorted(wide: Sequence[Any], linears: int) -> tuple[Sequence[Any], Sequence[Any], list[Sequence[Any]]]:
    """Bases (T, f), one for each first layer; A2 (n, r, f) in parts by role; and B1 (n, f, r) likewise, for each first layer."""
    parts = wide[linears:]
    roles = len(parts) // (1 + linears)
    A2, *B1 = (parts[start : start + roles] for start in range(0, len(parts), roles))
    return wide[:linears], A2, B1


def _stacks(wide: Sequence[Tensor], codes: Tensor) -> tuple[Sequence[Tensor], Tensor, list[Tensor]]:
    """Bases; A2 (n, r, f); B1 (n, r, f) of each first layer. They are made anew for the backward pass: kept, they would be copies."""
    bases, A2, B1 = _sorted(wide, len(codes))
    return bases, stacked(A2, codes.dtype), [stacked(parts, codes.dtype).mT.contiguous() for parts in B1]


def stacked(by_role: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """(n, ., .) one matrix of all experts, of which those of each role are given."""
    return (by_role[0] if len(by_role) == 1 else torch.cat(list(by_role))).to(dtype)


def _unstacked(gradient: Tensor | None, by_role: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of each role's, where there is one."""
    if gradient is None:
        return [None] * len(by_role)
    return [own.to(t.dtype) for own, t in zip(torch.split(gradient, [len(t) for t in by_role]), by_role, strict=True)]


class _Reordered(torch.autograd.Function):
    """Rows in another order: (T, ...), and the order with its inverse, (T,) each -> (T, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """The inverse; autograd would add up what it does not know to be a permutation."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _first(gamma: float, bases: Sequence[Tensor], codes: Tensor, rows: Rows, B1: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """The pre-activations b + gamma B1_j z_j of one piece, (t, f) for each first layer, of all codes of its expert, (linears, r, T)."""
    for b, z, B, p in zip(bases, _columns(codes, rows), B1, out, strict=True):
        torch.addmm(b, z.T, B, alpha=gamma, out=p)


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _rows(tensor: Tensor, rows: Rows) -> Tensor:
    """`tensor[rows]`; indexing by a tensor would be several times slower than selecting."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _columns(tensor: Tensor, rows: Rows) -> Tensor:
    """`tensor[..., rows]`."""
    return tensor[..., rows] if isinstance(rows, slice) else tensor.index_select(-1, rows)


def _put(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    """`tensor[..., rows] = values`."""
    if isinstance(rows, slice):
        tensor[..., rows] = values
    else:
        tensor.index_copy_(-1, rows, values)


def _accumulate(total: Tensor, rows: Rows, term: Tensor, weight: Tensor | None, first: bool) -> None:
    """total[rows] += weight * term, with a weight (t,) for each row; the first of all experts of consecutive rows writes instead.

    May overwrite `term`.
    """
    if not isinstance(rows, slice):
        total.index_add_(0, rows, term if weight is None else term.mul_(weight[:, None]))
    elif weight is None:
        total[rows] = term
    elif first:
        torch.mul(term, weight[:, None], out=total[rows])
    else:
        total[rows].addcmul_(term, weight[:, None])


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
        self.hidden = shape.linears[0].outputs  # f
        shared = Role.EXPERT if layout.members else Role.GENERALIST
        for name, role, count in (("generalist", shared, layout.generalists), ("specialist", Role.SPECIALIST, layout.specialists)):
            loras = {
                linear.name: LoRA(layout.factors(role), count, linear.inputs, linear.outputs, layout.expert_rank, layout.alpha)
                for linear in shape.linears
            }
            if count:
                self.add_module(name, nn.ModuleDict(loras))
        self.router = Router(shape.width, layout.experts, layout.active, layout.biased) if layout.routed else None

    def _by_role(self, linear: str, matrix: str) -> list[Tensor]:
        """One matrix of the experts of each role, (., ., .), generalists first."""
        return [getattr(self.get_submodule(f"{role}.{linear}"), matrix) for role in ("generalist", "specialist") if hasattr(self, role)]

    def _stack(self, linear: str, matrix: str, dtype: torch.dtype) -> Tensor:
        """(n, ., .) one matrix of all experts."""
        return stacked(self._by_role(linear, matrix), dtype)

    def forward(self, x: Tensor, base: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        """(..., d_model) -> (..., d_model) in the dtype of x; the routing decision is appended to `record`."""
        tokens = x.flatten(0, -2)
        routing = self.router(tokens) if self.router is not None else None
        if record is not None and routing is not None:
            record.append(routing)
        weights = self._weights(tokens, routing)
        if self.training and self.layout.dropout > 0:
            return self._experts(tokens, weights, base, None).view_as(x)
        plan, order = self._plan(tokens, None if routing is None else routing.selected, base.activation)
        if order is None or weights is None:
            return self._experts(tokens, weights, base, plan).view_as(x)
        inverse = order.argsort()
        y = self._experts(_reordered(tokens, order, inverse), _reordered(weights, order, inverse), base, plan)
        return _reordered(y, inverse, order).view_as(x)

    def _experts(self, x: Tensor, weights: Tensor | None, base: FrozenMLP, plan: Plan | None) -> Tensor:
        """(T, d_model) -> (T, d_model), with weights (T, n), or None for 1; without a plan, with dropout."""
        bases = [project(linear, x) for linear in base.first]
        A1 = torch.stack([self._stack(name, "A", x.dtype) for name in self.first])  # (linears, n, r, d_model)
        B2 = self._stack("down", "B", x.dtype)
        weights = None if weights is None else weights.T.contiguous()
        if plan is None:
            m, c = self._with_dropout(x, bases, weights, A1, base.activation)
        else:
            codes = (A1.flatten(0, 2) @ x.T).view(*A1.shape[:3], len(x))
            by_role = [*self._by_role("down", "A"), *(B for name in self.first for B in self._by_role(name, "B"))]
            m, c = _Hidden.apply(plan, weights, codes, *bases, *by_role)  # type: ignore[no-untyped-call]
        return project(base.down, m).addmm_(c.flatten(0, 1).T, B2.mT.flatten(0, 1), alpha=self.gamma)

    def _weights(self, x: Tensor, routing: Routing | None) -> Tensor | None:
        """(T, n) in the dtype of x; None for a single expert."""
        if routing is not None:
            return routing.weights.to(x.dtype)
        n = self.layout.experts
        return None if n == 1 else x.new_full((1, n), 1 / n).expand(len(x), n)

    def _plan(self, x: Tensor, selected: Tensor | None, activation: Activation) -> tuple[Plan, Tensor | None]:
        """The plan for T tokens that use the selected experts, (T, k), or all; and the order of the tokens that it is made for, if another.

        Sorted by the set of their experts, tokens are consecutive, and nothing as wide as the hidden layer is gathered or scattered. A GPU
        would have too little to do for each of so many sets, and has fewer but larger groups.
        """
        n, active = self.layout.experts, self.layout.active
        cached = CACHED_VALUES * torch.get_num_threads()  # each thread has a cache of its own
        chunk = max(len(x), 1) if x.is_cuda else max(cached // self.hidden, 16)
        if selected is None or x.is_meta:  # where there are no values, any k experts do: only operations are counted
            return Plan(tuple(dense_pieces(len(x), n if selected is None else active, chunk)), activation, self.gamma), None
        if not x.is_cuda and n < 63 and math.comb(n, active) * TOKENS_PER_SET <= len(x):
            order, sets = by_experts(selected)
            return Plan(tuple(sorted_pieces(sets, chunk)), activation, self.gamma), order
        return Plan(tuple(grouped_pieces(selected, n, chunk * n // active)), activation, self.gamma), None

    def _with_dropout(
        self, x: Tensor, bases: list[Tensor], weights: Tensor | None, A1: Tensor, activation: Activation
    ) -> tuple[Tensor, Tensor]:
        """The same m and c with a dropout mask of its own on the input of every LoRA: by autograd, all experts for all tokens."""
        A2, B1 = self._stack("down", "A", x.dtype), [self._stack(name, "B", x.dtype).mT for name in self.first]
        m, c = torch.zeros_like(bases[0]), []
        for j in range(self.layout.experts):
            p = [
                b + self.gamma * nn.functional.linear(nn.functional.dropout(x, self.layout.dropout), A[j]) @ B[j]
                for b, A, B in zip(bases, A1, B1, strict=True)
            ]
            h = activation.forward(p[0]) * p[1] if len(p) == 2 else activation.forward(p[0])
            codes = nn.functional.linear(nn.functional.dropout(h, self.layout.dropout), A2[j]).T
            m = m + (h if weights is None else weights[j, :, None] * h)
            c.append(codes if weights is None else weights[j] * codes)
        return m, torch.stack(c)


def _reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    found: Tensor = _Reordered.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return found
