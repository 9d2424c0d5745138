"""What a mixture of experts costs: one local expert step's gradient (without the optimiser), against a single LoRA of equal active rank.

    python benchmarks/local_step.py [--shape embedded|gpt2] [--threads 1] [--device cpu] [--dtype fp32] [--json FILE]

Random weights; only the shapes matter. Medians of interleaved repeats in one process, ratios taken within each repeat, since the machine
may be shared (`best`: of the fastest repeats, which neighbours disturbed least); memory is what the forward pass keeps for the backward
pass, parameters apart, and on CUDA the peak that the allocator saw.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from coterie.models.adapter import Layout
from coterie.models.backbone import DTYPES, Backbone
from coterie.models.language import LanguageModel
from coterie.models.mixture import FrozenMLP, Mixture
from coterie.models.routing import Routing
from coterie.roles import GENERALIST, SPECIALIST

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SHAPES = {"embedded": (16, 128), "gpt2": (2, 128)}  # batch size, context
REFERENCE = "single LoRA, rank 16"


def base(shape: str, blocks: int | None) -> nn.Module:
    """The base model of one shape, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=blocks or 2))
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=4096,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=blocks or 4,
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )


def experts(module: Mixture) -> list[dict[str, tuple[Tensor, Tensor]]]:
    stacks = [getattr(module, role) for role in ("generalist", "specialist") if hasattr(module, role)]
    return [{name: (lora.A[j], lora.B[j]) for name, lora in stack.items()} for stack in stacks for j in range(len(stack["down"].A))]


def weight(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    return (layer.weight.T if hasattr(layer, "nf") else layer.weight), layer.bias  # type: ignore[return-value,union-attr]


def naive(module: Mixture) -> Callable[[Tensor, FrozenMLP, list[Routing] | None], Tensor]:
    """The oracle in the place of the cheap evaluation: every expert runs the full MLP."""
    from oracle import mixture as oracle

    def forward(x: Tensor, frozen: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = module.router(tokens).weights.to(x.dtype)
        layers = dict(zip((*module.first, "down"), map(weight, (*frozen.first, frozen.down)), strict=True))
        return oracle.mixture(tokens, layers, experts(module), weights, module.gamma, frozen.activation.forward).view_as(x)

    return forward


def autograd(module: Mixture) -> Callable[[Tensor, FrozenMLP, list[Routing] | None], Tensor]:
    """One LoRA beside each layer, as every LoRA library writes it: nothing is recomputed, everything is kept."""

    def forward(x: Tensor, frozen: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        (loras,) = experts(module)

        def layer(frozen: nn.Module, name: str, x: Tensor) -> Tensor:
            A, B = loras[name]
            return frozen(x) + module.gamma * nn.functional.linear(nn.functional.linear(x, A.to(x.dtype)), B.to(x.dtype))

        h = [layer(frozen, name, x) for frozen, name in zip(frozen.first, module.first, strict=True)]
        hidden = frozen.activation.forward(h[0])
        return layer(frozen.down, "down", hidden * h[1] if len(h) == 2 else hidden)

    return forward


def variants(backbone: Backbone) -> dict[str, LanguageModel]:
    single = Layout(generalists=1, specialists=0, mlp_rank=16)
    layouts = {
        REFERENCE: (single, None),
        "the same by plain autograd": (single, autograd),
        "1G1S": (Layout(), None),
        "1G3S, top 2": (Layout(specialists=3), None),
        "1G3S, top 4": (Layout(specialists=3, top_k=4), None),
        "1G1S, naive formula": (Layout(), naive),
    }
    models = {}
    for name, (layout, replaced) in layouts.items():
        models[name] = model = LanguageModel(backbone, layout)
        for parameter in model.adapter.parameters():
            nn.init.normal_(parameter, std=0.02)
        for module in model.adapter.modules():
            if isinstance(module, Mixture) and replaced is not None:
                module.forward = replaced(module)  # type: ignore[method-assign]
    return models


def step(model: LanguageModel, batch: Tensor) -> None:
    roles = model.parameters_by_role()
    model.gradient(batch, [*roles[GENERALIST].values(), *roles[SPECIALIST].values()])
    if batch.is_cuda:
        torch.cuda.synchronize()


def seconds(model: LanguageModel, batch: Tensor) -> float:
    start = time.perf_counter()
    step(model, batch)
    return time.perf_counter() - start


def kept(model: LanguageModel, batch: Tensor) -> int:
    """Bytes that autograd keeps, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in (*model.adapter.parameters(), *model.backbone.model.parameters())}
    seen: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is used twice
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        step(model, batch)
    return sum(size for address, size in seen.items() if address not in own)


def peak(model: LanguageModel, batch: Tensor) -> int | None:
    if not batch.is_cuda:
        return None
    torch.cuda.reset_peak_memory_stats()
    step(model, batch)
    return torch.cuda.max_memory_allocated()


def measure(args: argparse.Namespace, threads: int) -> list[dict[str, object]]:
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    backbone = Backbone(base(args.shape, args.blocks).to(args.device, DTYPES[args.dtype]))
    rows, context = SHAPES[args.shape]
    batch = torch.randint(backbone.architecture.vocabulary, (args.rows or rows, context + 1), device=args.device)
    models = variants(backbone)
    times: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(args.repeats + 1):
        for name, model in models.items():
            elapsed = seconds(model, batch)
            if repeat:  # the first warms up
                times[name].append(elapsed)
    memory = {name: kept(model, batch) for name, model in models.items()}
    return [
        {
            "variant": name,
            "shape": args.shape,
            "device": args.device,
            "dtype": args.dtype,
            "threads": threads,
            "seconds": statistics.median(taken),
            "ratio": statistics.median(a / b for a, b in zip(taken, times[REFERENCE], strict=True)),
            "best_ratio": min(taken) / min(times[REFERENCE]),
            "kept_bytes": memory[name],
            "kept_ratio": memory[name] / memory[REFERENCE],
            "peak_bytes": peak(models[name], batch),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="embedded")
    parser.add_argument("--blocks", type=int, help="transformer blocks (embedded 4, gpt2 2 of its 12)")
    parser.add_argument("--rows", type=int, help="sequences per batch")
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = [row for threads in args.threads for row in measure(args, threads)]
    print(f"{'variant':28} {'threads':>7} {'ms':>8} {'ratio':>6} {'best':>6} {'kept MB':>8} {'ratio':>6}")
    for row in rows:
        numbers = f"{row['threads']:>7} {row['seconds'] * 1e3:>8.0f} {row['ratio']:>6.2f} {row['best_ratio']:>6.2f}"  # type: ignore[operator]
        memory = f"{row['kept_bytes'] / 1e6:>8.1f} {row['kept_ratio']:>6.2f}"  # type: ignore[operator]
        peak_memory = f"  peak {row['peak_bytes'] / 1e6:.0f} MB" if row["peak_bytes"] else ""  # type: ignore[operator]
        print(f"{row['variant']:28} {numbers} {memory}{peak_memory}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
