"""What the output head costs: its loss and the gradient of hidden states, in processor time.

    python benchmarks/head.py [--tokens 1024] [--width 768] [--words 50257] [--threads 1]
    [--repeats 7] [--json FILE]

Random weights of GPT-2's shape; eight windows of 128 tokens. `products`: the two matrix products
that every way needs, in their fastest order, and nothing else. `whole logits`: cross-entropy by
autograd. `tokens in chunks`: the softmax of some tokens over the whole vocabulary at a time.
`words in blocks`: `coterie.models.windows`. `peak_mb` is the most that a call allocated at once.
"""

import argparse
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from common import RESULTS, in_turns, ratios, report
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from coterie.models.windows import head_loss

FLOOR = "products"
CHUNK = 128  # tokens
BLOCK = 2048  # words


def products(hidden: Tensor, weight: Tensor) -> None:
    gradient, logits = torch.zeros_like(hidden), hidden.new_empty(len(hidden), BLOCK)
    for rows in torch.split(weight, BLOCK):
        block = logits[:, : len(rows)]
        torch.mm(hidden, rows.T, out=block)
        gradient.addmm_(block, rows)


def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    loss = cross_entropy(linear(hidden, weight), targets, reduction="sum")
    torch.autograd.grad(loss, hidden)


def chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    total, gradient = hidden.new_zeros(()), torch.empty_like(hidden)
    parts = zip(*(torch.split(t, CHUNK) for t in (hidden, targets, gradient)), strict=True)
    for own, wanted, found in parts:
        log_p = torch.log_softmax(linear(own, weight), dim=-1)
        total -= log_p.gather(1, wanted[:, None]).sum()
        residual = log_p.exp_()
        residual.scatter_add_(1, wanted[:, None], residual.new_full((len(wanted), 1), -1.0))
        torch.mm(residual, weight, out=found)


def blocks(hidden: Tensor, weight: Tensor, targets: Tensor) -> None:
    torch.autograd.grad(head_loss(hidden, weight, None, targets), hidden)


def peak(go: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at once beyond what was there."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        go()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()  # the public list lacks operators' own
    allocated = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(size for _, size in allocated))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--words", type=int, default=50257)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, default=RESULTS / "head.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.width, requires_grad=True)
    weight = 0.02 * torch.randn(args.words, args.width)
    targets = torch.randint(args.words, (args.tokens,))
    work: dict[str, Callable[[], object]] = {
        FLOOR: lambda: products(hidden.detach(), weight),
        "whole logits": lambda: whole(hidden, weight, targets),
        "tokens in chunks": lambda: chunks(hidden.detach(), weight, targets),
        "words in blocks": lambda: blocks(hidden, weight, targets),
    }
    found = ratios(in_turns(work, args.repeats, clock=time.process_time), FLOOR)
    report(
        [{"variant": n, **row, "peak_mb": peak(work[n]) / 1e6} for n, row in found.items()],
        args.json,
        tokens=args.tokens,
        width=args.width,
        words=args.words,
    )


if __name__ == "__main__":
    main()
