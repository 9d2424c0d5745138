"""What a personal model costs in use: one next token with a cache, and the prefill of a batch, against the base alone.

    python benchmarks/next_token.py [--shape embedded gpt2] [--threads 1] [--repeats 30] [--json FILE]

The embedded base, and a GPT-2 of 124M parameters with random weights; adapters are random, only the shapes matter. The variants take turns
within one process, and ratios are taken within each turn, since the machine may be shared. `ratio` is to transformers' own model,
`strict` to the base within the backbone, whose activations are fused: on GPT-2 that one is the faster of the two.
"""

import argparse
import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, GPT2Config, GPT2LMHeadModel

from coterie.models.architecture import EMBEDDED, locate
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import About, PersonalModel

LAYOUTS = {"1G1S": Layout(), "1G3S, top 2": Layout(specialists=3)}
PLAIN, BARE = "the base alone", "the base within the backbone"
PREFILL = {"embedded": (8, 128), "gpt2": (2, 128)}  # batch size, tokens
CONTEXT, STEPS = 64, 8  # tokens in the cache, next tokens for each figure
RESULTS = Path(__file__).parent / "results/next_token.json"
Model = Callable[..., Any]


def base(shape: str) -> nn.Module:
    """The base model of one shape."""
    if shape == "gpt2":
        return GPT2LMHeadModel(GPT2Config()).eval()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(locate(EMBEDDED), dtype=torch.float32).eval()
    return model


def variants(shape: str) -> dict[str, Model]:
    """The base as transformers has it, the backbone with nothing attached, and personal models on that backbone; all share the weights."""
    model = base(shape)
    plain = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    backbone = Backbone(model)
    found: dict[str, Model] = {PLAIN: plain, BARE: backbone.model}
    for name, layout in LAYOUTS.items():
        language = LanguageModel(backbone, layout)
        for parameter in language.adapter.parameters():
            nn.init.normal_(parameter, std=0.02)
        found[name] = PersonalModel(language, About(name, shape, layout, CONTEXT, "comigs-1g1s", "benchmark", 0, 0))
    return found


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def next_tokens(model: Model, vocabulary: int) -> Callable[[], float]:
    """A function that measures one next token after `CONTEXT` others: the median of some."""
    cache = DynamicCache()
    model(torch.randint(vocabulary, (1, CONTEXT)), past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = torch.randint(vocabulary, (1, 1))

    def measure() -> float:
        taken = [seconds(lambda: model(token, past_key_values=cache, use_cache=True)) for _ in range(STEPS)]
        cache.crop(-STEPS)
        return statistics.median(taken)

    return measure


def prefill(model: Model, vocabulary: int, shape: tuple[int, int]) -> Callable[[], float]:
    """A function that measures the first pass over a batch of prompts."""
    ids = torch.randint(vocabulary, shape)
    return lambda: seconds(lambda: model(ids, use_cache=True, logits_to_keep=1))


def compare(measures: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, float]]:
    """Medians of interleaved repeats, and the medians of the ratios within each repeat."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for repeat in range(repeats + 2):
        order = list(measures)
        for name in order[repeat % len(order) :] + order[: repeat % len(order)]:  # nobody is always first
            elapsed = measures[name]()
            if repeat > 1:  # the first two warm up
                taken[name].append(elapsed)
    return {
        name: {
            "seconds": statistics.median(own),
            "ratio": statistics.median(a / b for a, b in zip(own, taken[PLAIN], strict=True)),
            "strict_ratio": statistics.median(a / b for a, b in zip(own, taken[BARE], strict=True)),
        }
        for name, own in taken.items()
    }


@torch.no_grad()
def measure(shape: str, repeats: int) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    models = variants(shape)
    vocabulary = int(models[PLAIN].config.vocab_size)
    work = {
        "next token": {name: next_tokens(model, vocabulary) for name, model in models.items()},
        "prefill": {name: prefill(model, vocabulary, PREFILL[shape]) for name, model in models.items()},
    }
    turns = {"next token": repeats, "prefill": max(repeats // 2, 5)}
    return [
        {"shape": shape, "work": what, "variant": name, **row}
        for what, measures in work.items()
        for name, row in compare(measures, turns[what]).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=PREFILL, nargs="+", default=list(PREFILL))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    rows = [row for shape in args.shape for row in measure(shape, args.repeats)]
    print(f"{'shape':10} {'work':11} {'variant':28} {'ms':>8} {'ratio':>6} {'strict':>6}")
    for row in rows:
        numbers = f"{row['seconds'] * 1e3:>8.2f} {row['ratio']:>6.2f} {row['strict_ratio']:>6.2f}"
        print(f"{row['shape']:10} {row['work']:11} {row['variant']:28} {numbers}")
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    machine = {"processor": platform.machine(), "threads": args.threads} | versions
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({"machine": machine, "repeats": args.repeats, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
