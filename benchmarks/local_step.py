"""What a mixture of experts costs: the gradient of a local expert step, without the optimiser,
against a single LoRA of equal active rank.

    python benchmarks/local_step.py [--shape embedded|gpt2|llama1b|smollm2] [--blocks N]
    [--threads 1] [--device cpu] [--dtype fp32] [--json FILE]

Random weights; only the shapes matter. `step`: the whole model, head and loss included. `layer`:
the MLP of one block with its experts, forward and backward, which is where the naive formula
differs. At SmolLM2's shape instead PEFT's step, LoRA of equal active rank on all linear layers, and
that of 1G1S, each in fp32 and in bf16. Everything takes turns in one process, and ratios are taken
within each repeat, since the machine may be shared (`best_ratio`: of the fastest repeats, which
neighbours disturbed least). `kept_mb` is what the forward pass keeps for the backward pass,
`peak_mb` the most that a step has allocated at once, both without parameters. The floor is the
frozen base alone: forward, and backward to the activations.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, in_turns, ratios, report
from torch import Tensor, nn

from coterie.core.roles import GENERALIST, SPECIALIST
from coterie.models.backbone import DTYPES, Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.models.mixture import Mixture
from coterie.models.mixture_kernel import FrozenMLP
from coterie.models.routing import Routing
from coterie.models.windows import head_loss

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

SHAPES = {
    "embedded": (16, 128, 4),
    "gpt2": (2, 128, 12),
    "llama1b": (1, 128, 2),
    "smollm2": (4, 128, 10),
}  # batch size, context, blocks
REFERENCE = "single LoRA, rank 16"
FLOOR = "frozen base (floor)"
PEFT = "PEFT, rank 16"
ALL_LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
Forward = Callable[[Tensor, FrozenMLP, list[Routing] | None], Tensor]


def base(shape: str, blocks: int) -> nn.Module:
    """The base model of one shape, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config(n_layer=blocks))
    sizes = {
        "embedded": {
            "vocab_size": 4096,
            "hidden_size": 256,
            "intermediate_size": 704,
            "num_attention_heads": 4,
        },
        "smollm2": {  # SmolLM2-135M
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "tie_word_embeddings": True,
        },
        "llama1b": {  # Llama 3.2 1B
            "vocab_size": 128256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes[shape], num_hidden_layers=blocks, max_position_embeddings=256)
    )


def experts(module: Mixture, dtype: torch.dtype) -> list[dict[str, tuple[Tensor, Tensor]]]:
    """The experts' A and B by layer, in the dtype that the base computes in."""
    stacks = [
        getattr(module, role) for role in ("generalist", "specialist") if hasattr(module, role)
    ]
    return [
        {name: (lora.A[j].to(dtype), lora.B[j].to(dtype)) for name, lora in stack.items()}
        for stack in stacks
        for j in range(len(stack["down"].A))
    ]


def weight(layer: Any) -> tuple[Tensor, Tensor | None]:
    return (layer.weight.T if hasattr(layer, "nf") else layer.weight), layer.bias


def naive(module: Mixture) -> Forward:
    """The oracle in the place of the cheap evaluation: every expert runs the full MLP, as the
    published code does.
    """
    from oracle import mixture as oracle

    def forward(x: Tensor, frozen: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        tokens = x.flatten(0, -2)
        weights = module.router(tokens).weights.to(x.dtype)  # type: ignore[misc]
        layers = dict(
            zip((*module.first, "down"), map(weight, (*frozen.first, frozen.down)), strict=True)
        )
        y: Tensor = oracle.mixture(
            tokens,
            layers,
            experts(module, x.dtype),
            weights,
            module.gamma,
            frozen.activation.forward,
        )
        return y.view_as(x)

    return forward


def autograd(module: Mixture) -> Forward:
    """One LoRA beside each layer, as every LoRA library writes it: nothing is recomputed,
    everything is kept.
    """

    def forward(x: Tensor, frozen: FrozenMLP, record: list[Routing] | None = None) -> Tensor:
        (loras,) = experts(module, x.dtype)

        def layer(frozen: nn.Module, name: str, x: Tensor) -> Tensor:
            A, B = loras[name]
            y: Tensor = frozen(x) + module.gamma * nn.functional.linear(
                nn.functional.linear(x, A), B
            )
            return y

        h = [
            layer(frozen, name, x) for frozen, name in zip(frozen.first, module.first, strict=True)
        ]
        hidden = frozen.activation.forward(h[0])
        return layer(frozen.down, "down", hidden * h[1] if len(h) == 2 else hidden)

    return forward


LAYOUTS: dict[str, tuple[Layout, Callable[[Mixture], Forward] | None]] = {
    REFERENCE: (Layout(generalists=1, specialists=0, mlp_rank=16), None),
    "the same by plain autograd": (Layout(generalists=1, specialists=0, mlp_rank=16), autograd),
    "1G1S": (Layout(), None),
    "1G3S, top 2": (Layout(specialists=3), None),
    "1G7S, top 2": (Layout(specialists=7), None),
    "1G3S, top 4": (Layout(specialists=3, top_k=4), None),
    "1G1S, naive formula": (Layout(), naive),
    "1G3S, top 4, naive formula": (Layout(specialists=3, top_k=4), naive),
}


@dataclass(frozen=True)
class Work:
    """Something to measure, and whether its parameters count as its own memory."""

    go: Callable[[], object]
    parameters: Sequence[Tensor]


def prepare(module: nn.Module, replaced: Callable[[Mixture], Forward] | None) -> None:
    """Random values, and another forward pass of the mixtures where one is given."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.02)
    for mixture in module.modules():
        if isinstance(mixture, Mixture) and replaced is not None:
            mixture.forward = replaced(mixture)  # type: ignore[method-assign,assignment]


def peft_step(model: nn.Module, batch: Tensor) -> Work:
    """The gradient of PEFT's LoRA on all linear layers of a base."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=16, target_modules=ALL_LINEAR)
    lora: Any = get_peft_model(model, config)  # type: ignore[arg-type]

    def go() -> None:
        lora.zero_grad()
        lora(input_ids=batch[:, :-1], labels=batch[:, :-1]).loss.backward()

    return Work(go, list(lora.parameters()))


def beside_peft(model: nn.Module, batch: Tensor) -> Iterator[tuple[str, Work]]:
    """Steps of PEFT and of 1G1S on copies of a base in each dtype."""
    for name, dtype in DTYPES.items():
        yield f"{PEFT}, {name}", peft_step(deepcopy(model).to(dtype), batch)
        yield (
            f"1G1S, {name}",
            dict(steps(Backbone(deepcopy(model).to(dtype)), batch, ["1G1S"]))["1G1S"],
        )


def steps(
    backbone: Backbone, batch: Tensor, layouts: Sequence[str] = ()
) -> Iterator[tuple[str, Work]]:
    """Expert steps of the whole model, by variant."""
    frozen = list(backbone.model.parameters())

    def floor() -> None:
        embeddings = backbone.model.get_input_embeddings()(batch[:, :-1]).detach().requires_grad_()
        hidden = backbone.model.base_model(
            inputs_embeds=embeddings, use_cache=False
        ).last_hidden_state.flatten(0, 1)
        assert backbone.head is not None
        torch.autograd.grad(head_loss(hidden, *backbone.head, batch[:, 1:].flatten()), embeddings)

    yield FLOOR, Work(floor, frozen)
    for name in layouts or LAYOUTS:
        layout, replaced = LAYOUTS[name]
        model = LanguageModel(backbone, layout)
        prepare(model.adapter, replaced)
        roles = model.parameters_by_role
        own = [*roles[GENERALIST].values(), *roles[SPECIALIST].values()]
        yield (
            name,
            Work(
                lambda model=model, own=own: model.gradient(batch, own),
                [*frozen, *model.adapter.parameters()],
            ),
        )  # type: ignore[misc]


def layers(backbone: Backbone, tokens: int) -> Iterator[tuple[str, Work]]:
    """One MLP with its experts, forward and backward, by variant."""
    slot = next(
        module
        for module in backbone.model.modules()
        if isinstance(getattr(module, "frozen", None), FrozenMLP)
    )
    shape = backbone.architecture.blocks[0].mlp
    x, grad = (
        torch.randn(tokens, shape[0].inputs, device=backbone.device, dtype=backbone.dtype)
        for _ in range(2)
    )
    x.requires_grad_()
    yield (
        FLOOR,
        Work(lambda: torch.autograd.grad(slot.base(x), x, grad), list(backbone.model.parameters())),
    )
    for name, (layout, replaced) in LAYOUTS.items():
        mixture = Mixture(shape, layout).to(backbone.device).eval()
        prepare(mixture, replaced)
        trained = [p for name, p in mixture.named_parameters() if not name.startswith("router")]

        def go(mixture: Mixture = mixture, trained: Sequence[Tensor] = trained) -> None:
            torch.autograd.grad(mixture(x, slot.frozen), [x, *trained], grad)

        yield name, Work(go, [*backbone.model.parameters(), *mixture.parameters()])


def kept(work: Work) -> int:
    """Bytes that autograd keeps, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in work.parameters}
    seen: dict[int, int] = {}
    alive = []

    def note(tensor: Tensor) -> Tensor:
        alive.append(tensor)  # so that no address is used twice
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        work.go()
    return sum(size for address, size in seen.items() if address not in own)


def profiled(work: Work) -> tuple[int | None, int]:
    """The most bytes that one call has allocated at once beyond what was there, and operations
    of its matrix products. Some accelerators (`mps`) do not tell the bytes.
    """
    device, before = work.parameters[0].device, 0
    on_cpu = device.type == "cpu"
    tells = not on_cpu and hasattr(torch.get_device_module(device), "max_memory_allocated")
    if tells:
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
    with torch.profiler.profile(
        profile_memory=True, record_shapes=True, with_flops=True
    ) as profiler:
        work.go()
    events = profiler.events() or ()
    operations = sum(event.flops or 0 for event in events if event.name in PRODUCTS)
    if not on_cpu:
        most = torch.accelerator.max_memory_allocated(device) - before if tells else None
        return most, operations
    found = (
        profiler.profiler.kineto_results.events() if profiler.profiler else ()
    )  # the public list lacks what operators allocate
    allocated = sorted(
        (event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]"
    )
    return max(accumulate(size for _, size in allocated)), operations


def matrix_speed(backbone: Backbone) -> float | None:
    """Operations per second of a product of large matrices in the base's dtype, taken for the
    accelerator's peak; None on a CPU.
    """
    if backbone.device.type == "cpu":
        return None
    a, b = (torch.randn(8192, 8192, device=backbone.device, dtype=backbone.dtype) for _ in range(2))
    return 2 * 8192**3 / min(in_turns({"": lambda: a @ b}, 10)[""])


def compare(
    what: str,
    work: dict[str, Work],
    repeats: int,
    speed: float | None,
    reference: str = REFERENCE,
) -> list[dict[str, Any]]:
    """The rows of one kind of work; speed: of the accelerator's matrix products, operations per
    second; reference: what ratios are to.
    """
    found = ratios(in_turns({name: w.go for name, w in work.items()}, repeats, warm=2), reference)
    memory, profiles = (
        {name: kept(w) for name, w in work.items()},
        {name: profiled(w) for name, w in work.items()},
    )
    return [
        {
            "variant": name,
            "work": what,
            **row,
            "kept_mb": memory[name] / 1e6,
            "kept_ratio": memory[name] / memory[reference],
            "peak_mb": _ratio(profiles[name][0], 1e6),
            "peak_ratio": _ratio(profiles[name][0], profiles[reference][0]),
            "gflop": profiles[name][1] / 1e9,
            "share_of_peak": None if speed is None else profiles[name][1] / row["seconds"] / speed,
        }
        for name, row in found.items()
    ]


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, default="embedded")
    parser.add_argument(
        "--blocks",
        type=int,
        help="transformer blocks (embedded 4, gpt2 12, llama1b 2 of its 16, smollm2 10 of its 30)",
    )
    parser.add_argument("--rows", type=int, help="sequences per batch")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument(
        "--json", type=Path, help="default: results/local_step_SHAPE_DEVICE_THREADS.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows, context, blocks = SHAPES[args.shape]
    with torch.device(args.device):
        model = base(args.shape, args.blocks or blocks)
    backbone = Backbone(deepcopy(model).to(DTYPES[args.dtype]))
    batch = torch.randint(
        backbone.architecture.vocabulary, (args.rows or rows, context + 1), device=args.device
    )
    speed = matrix_speed(backbone)
    if args.shape == "smollm2":
        work = dict(beside_peft(model, batch))
        found = compare("step", work, args.repeats, speed, f"{PEFT}, fp32")
    else:
        work = dict(steps(backbone, batch))
        found = compare("step", work, args.repeats, speed)
        work = dict(layers(backbone, batch[:, 1:].numel()))
        found += compare("layer", work, 2 * args.repeats, speed)
    about = {
        "shape": args.shape,
        "blocks": args.blocks or blocks,
        "batch": list(batch.shape),
        "device": args.device,
        "dtype": args.dtype,
    }
    report(
        found,
        args.json or RESULTS / f"local_step_{args.shape}_{args.device}_{args.threads}.json",
        **about,
    )


if __name__ == "__main__":
    main()
