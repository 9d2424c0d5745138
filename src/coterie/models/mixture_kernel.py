"""The products of a mixture of LoRA experts on a frozen MLP, forward and backward."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Rows = slice | Tensor  # which tokens: consecutive ones, or (t,) indices
# values behind each row of the scratch: rows that are a multiple of 4 KiB apart would share the
# same few places of a cache
PADDING = 16


@dataclass(frozen=True)
class Activation:
    """An elementwise a = act(p), and (dL/da, p) -> dL/dp; both may write to an input as `out`."""

    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]

    @classmethod
    def of(cls, module: nn.Module) -> "Activation":
        """Return torch's fused derivative if there is one, otherwise autograd's."""
        if isinstance(module, nn.SiLU):
            return cls._fused(torch.ops.aten.silu, torch.ops.aten.silu_backward)
        if isinstance(module, nn.GELU):
            return cls._fused(
                torch.ops.aten.gelu, torch.ops.aten.gelu_backward, approximate=module.approximate
            )

        def forward(p: Tensor, out: Tensor | None = None) -> Tensor:
            a: Tensor = module(p)
            return a if out is None else out.copy_(a)

        def derive(grad: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
            with torch.enable_grad():
                p = p.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(module(p), p, grad)
            return gradient if out is None else out.copy_(gradient)

        return cls(forward, derive)

    @classmethod
    def _fused(cls, forward: Any, backward: Any, **how: Any) -> "Activation":
        def apply(p: Tensor, out: Tensor | None = None) -> Tensor:
            to = {} if out is None else {"out": out}
            return cast(Tensor, (forward.out if to else forward)(p, **how, **to))

        def derive(grad: Tensor, p: Tensor, out: Tensor | None = None) -> Tensor:
            to = {} if out is None else {"grad_input": out}
            return cast(Tensor, (backward.grad_input if to else backward)(grad, p, **how, **to))

        return cls(apply, derive)


@dataclass(frozen=True)
class FrozenMLP:
    """The base's MLP, in the same form for all families."""

    first: tuple[nn.Module, ...]  # layers d_model -> f: (up,) or (gate, up)
    down: nn.Module  # layer f -> d_model
    activation: Activation  # applied to the first of `first`


@dataclass(frozen=True)
class Plan:
    """Which experts to compute for which tokens, in which order.

    `pieces` are experts with the tokens that use them one after the other. If these are
    consecutive, the experts are all that they use, and the pieces cover every token.
    """

    pieces: tuple[tuple[Sequence[int], Rows], ...]
    activation: Activation
    gamma: float  # scale of the updates

    def sums(self, like: Tensor) -> Tensor:
        """Return the buffer for `_accumulate`, uninitialised if each row's first expert writes."""
        if all(isinstance(rows, slice) for _, rows in self.pieces):
            return torch.empty_like(like)
        return torch.zeros_like(like)

    def scratch(self, like: Tensor, count: int) -> Callable[[int], list[Tensor]]:
        """Return a function from t to `count` tensors (t, f), which every piece overwrites."""
        longest = max((_length(rows) for _, rows in self.pieces), default=0)
        whole = like.new_empty((count, longest, like.shape[1] + PADDING))
        return lambda tokens: list(whole[:, :tokens, : like.shape[1]])


def consecutive_pieces(
    sets: Iterable[tuple[Sequence[int], int, int]], chunk: int
) -> Iterator[tuple[Sequence[int], Rows]]:
    """Yield consecutive tokens with all their experts, of sets as from `by_experts`."""
    for experts, first, last in sets:
        for start in range(first, last, chunk):
            yield experts, slice(start, min(start + chunk, last))


def grouped_pieces(
    selected: Tensor, experts: int, chunk: int
) -> Iterator[tuple[Sequence[int], Rows]]:
    """Yield (T, k) pairs sorted by chunk and expert. On a GPU this waits for the group sizes."""
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
    """(b, z, w, B1, A2) -> (m, c): all between the frozen projections. Keeps its inputs only."""

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, weights: Tensor | None, codes: Tensor, *wide: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return m (T, f), and the codes of the last layer, w_j A2_j h_j, (n, r, T), 0 where a
        token does not use j.

        Takes weights (n, T), or None for 1; codes (linears, n, r, T); and `wide`: bases b, A2, B1.
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
                _accumulate(
                    m, rows, h, None if weights is None else _columns(weights[j], rows), k == 0
                )
        return m, c if weights is None else c.mul_(weights[:, None])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dm: Tensor, dc: Tensor) -> tuple[Tensor | None, ...]:
        """With u_j = dm + A2_j^T dL/dc_j: dL/dh_j = w_j u_j, dL/dw_j = <u_j, h_j>, and q_j = u_j
        * act'(p_j) is dL/dp_j / w_j.
        """
        plan: Plan = ctx.plan
        weights, codes, *wide = ctx.saved_tensors
        bases, A2, B1 = _stacks(wide, codes)
        half = len(bases)
        _, of_weights, of_codes, *of_wide = ctx.needs_input_grad
        of_bases, of_A2, of_B1 = _sorted(of_wide, half)
        d_weights = torch.zeros_like(weights) if of_weights else None
        d_codes = torch.zeros_like(codes) if of_codes else None
        d_A2 = torch.zeros_like(A2) if any(of_A2) else None
        d_bases = [
            plan.sums(b) if needed else None for b, needed in zip(bases, of_bases, strict=True)
        ]
        d_B1 = [
            torch.zeros_like(B) if any(needed) else None
            for B, needed in zip(B1, of_B1, strict=True)
        ]
        weighted_codes, weighted_dc = (
            (codes, dc) if weights is None else (codes * weights[:, None], dc * weights[:, None])
        )
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
                q = [
                    plan.activation.backward(
                        u if half == 1 else torch.mul(u, p[1], out=product), p[0], out=product
                    )
                ]
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
        by_role += [
            _unstacked(None if d is None else d.mT, roles)
            for d, roles in zip(d_B1, B1_by_role, strict=True)
        ]
        return (
            None,
            d_weights,
            d_codes,
            *d_bases,
            *(gradient for gradients in by_role for gradient in gradients),
        )


def _sorted(
    wide: Sequence[Any], linears: int
) -> tuple[Sequence[Any], Sequence[Any], list[Sequence[Any]]]:
    """Return bases (T, f) per first layer; A2 (n, r, f) by role; B1 (n, f, r) by layer and role."""
    parts = wide[linears:]
    roles = len(parts) // (1 + linears)
    A2, *B1 = (parts[start : start + roles] for start in range(0, len(parts), roles))
    return wide[:linears], A2, B1


def _stacks(wide: Sequence[Tensor], codes: Tensor) -> tuple[Sequence[Tensor], Tensor, list[Tensor]]:
    """Return bases; A2 (n, r, f); B1 (n, r, f) per first layer, made for one pass and not kept."""
    bases, A2, B1 = _sorted(wide, len(codes))
    return (
        bases,
        stacked(A2, codes.dtype),
        [stacked(parts, codes.dtype).mT.contiguous() for parts in B1],
    )


def stacked(by_role: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return one matrix of all experts, (n, ., .), given those of each role."""
    return (by_role[0] if len(by_role) == 1 else torch.cat(list(by_role))).to(dtype)


def _unstacked(gradient: Tensor | None, by_role: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return the gradient of each role's matrix, if it has one."""
    if gradient is None:
        return [None] * len(by_role)
    return [
        part.to(t.dtype)
        for part, t in zip(torch.split(gradient, [len(t) for t in by_role]), by_role, strict=True)
    ]


class _Reordered(torch.autograd.Function):
    """Rows in another order: (T, ...), and the order with its inverse, (T,) each -> (T, ...)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient in the inverse order; autograd would sum, unaware of permutations."""
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


def _first(
    gamma: float,
    bases: Sequence[Tensor],
    codes: Tensor,
    rows: Rows,
    B1: Sequence[Tensor],
    out: Sequence[Tensor],
) -> None:
    """Compute b + gamma B1_j z_j of a piece, (t, f) per layer, of codes (linears, r, T)."""
    for b, z, B, p in zip(bases, _columns(codes, rows), B1, out, strict=True):
        torch.addmm(b, z.T, B, alpha=gamma, out=p)


def _length(rows: Rows) -> int:
    return rows.stop - rows.start if isinstance(rows, slice) else len(rows)


def _rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Return `tensor[rows]`; indexing by a tensor is several times slower than selecting."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _columns(tensor: Tensor, rows: Rows) -> Tensor:
    return tensor[..., rows] if isinstance(rows, slice) else tensor.index_select(-1, rows)


def _put(tensor: Tensor, rows: Rows, values: Tensor) -> None:
    if isinstance(rows, slice):
        tensor[..., rows] = values
    else:
        tensor.index_copy_(-1, rows, values)


def _accumulate(
    total: Tensor, rows: Rows, term: Tensor, weight: Tensor | None, first: bool
) -> None:
    """Compute total[rows] += weight * term with weights (t,) per row, or write it for the first of
    all experts of consecutive rows. May overwrite `term`.
    """
    if not isinstance(rows, slice):
        total.index_add_(0, rows, term if weight is None else term.mul_(weight[:, None]))
    elif weight is None:
        total[rows] = term
    elif first:
        torch.mul(term, weight[:, None], out=total[rows])
    else:
        total[rows].addcmul_(term, weight[:, None])


def _reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    rows: Tensor = _Reordered.apply(x, order, inverse)  # type: ignore[no-untyped-call]
    return rows
