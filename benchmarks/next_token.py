"""What personal models cost in use: next tokens with a cache, and the first pass over prompts,
against the base alone; one model, or many.

    python benchmarks/next_token.py [--shape embedded gpt2] [--threads 1] [--repeats 30] [--many 64]
    [--parts] [--json FILE]

The embedded base, and a GPT-2 of 124M parameters with random weights; adapters are random, only the
shapes matter. The variants take turns within one process, and ratios are taken within each turn,
since the machine may be shared.

Without --many, one personal model: `ratio` is to transformers' own model, `strict ratio` to the
base within the backbone, whose activations are fused: on GPT-2 that one is the faster of the two.
With --parts, two models of one client whose predictions are mixed, against one of them, also with
the shape of SmolLM2-135M: the next token, and the first one after a prompt of 128.
With --many N, N rows of N personal models: `throughput` is that of transformers' own model for as
many rows.
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, in_turns, ratios, report
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import coterie.personal
from coterie.models.architecture import EMBEDDED, locate
from coterie.models.artifact import AboutMixture
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
from coterie.personal import About, PersonalModel
from coterie.personal.mixture import PersonalMixture

ManyModels: Any = getattr(
    coterie.personal, "ManyModels", None
)  # None: as it was before there were batches of many models
LAYOUTS = {"1G1S": Layout(), "1G3S, top 2": Layout(specialists=3)}
PLAIN, BARE = "the base alone", "the base within the backbone"
PREFILL = {"embedded": (8, 128), "gpt2": (2, 128)}  # batch size, tokens
PROMPT = 128  # tokens, for --parts
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
CONTEXT, STEPS = 64, 8  # tokens in the cache, next tokens for each figure
MANY_CONTEXT, MANY_STEPS = 32, 4  # likewise, and the tokens of a prefill
Model = Any  # called as transformers' models are


def base(shape: str) -> nn.Module:
    """The base model of one shape."""
    made: nn.Module
    if shape == "gpt2":
        made = GPT2LMHeadModel(GPT2Config())
    elif shape == "smollm2":
        made = LlamaForCausalLM(LlamaConfig(**SMOLLM2))
    else:
        made = AutoModelForCausalLM.from_pretrained(locate(EMBEDDED), dtype=torch.float32)
    return made.eval()


def plain_and_backbone(shape: str) -> tuple[nn.Module, Backbone]:
    """The base as transformers has it, and as a backbone; they share the weights."""
    model = base(shape)
    plain = copy.deepcopy(model, memo={id(p): p for p in model.parameters()})
    return plain, Backbone(model)


def personal(backbone: Backbone, client: str, layout: Layout, **settings: Any) -> PersonalModel:
    """A random personal model."""
    language = LanguageModel(backbone, layout)
    for parameter in language.adapter.parameters():
        nn.init.normal_(parameter, std=0.02)
    return PersonalModel(
        language,
        About(client, "base", layout, CONTEXT, "comigs-1g1s", "benchmark", 0, 0),
        **settings,
    )


def variants(shape: str) -> dict[str, Model]:
    """The base as transformers has it, the backbone with nothing attached, and personal models
    on that backbone.
    """
    plain, backbone = plain_and_backbone(shape)
    found: dict[str, Model] = {PLAIN: plain, BARE: backbone.model}
    for name, layout in LAYOUTS.items():
        found[name] = personal(backbone, name, layout)
    return found


def next_tokens(model: Model, ids: torch.Tensor, steps: int) -> Callable[[], None]:
    """Some next tokens of every row, each after (B, C) others and the ones before it."""
    cache = DynamicCache()
    model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
    token = ids[:, :1]

    def work() -> None:
        for _ in range(steps):
            model(token, past_key_values=cache, use_cache=True)
        cache.crop(-steps)

    return work


def prefill(model: Model, ids: torch.Tensor) -> Callable[[], Any]:
    """The first pass over a batch of prompts."""
    return lambda: model(ids, use_cache=True, logits_to_keep=1)


@torch.no_grad()
def one(shape: str, repeats: int) -> list[dict[str, Any]]:
    """Rows for one personal model."""
    models = variants(shape)
    vocabulary = int(models[PLAIN].config.vocab_size)
    context, prompts = (
        torch.randint(vocabulary, (1, CONTEXT)),
        torch.randint(vocabulary, PREFILL[shape]),
    )
    work = {
        "next token": (
            {name: next_tokens(model, context, STEPS) for name, model in models.items()},
            repeats,
            STEPS,
        ),
        "prefill": (
            {name: prefill(model, prompts) for name, model in models.items()},
            max(repeats // 2, 5),
            1,
        ),
    }
    rows = []
    for what, (calls, turns, steps) in work.items():
        taken = in_turns(calls, turns, warm=2)
        strict = ratios(taken, BARE)
        for name, found in ratios(taken, PLAIN).items():
            figures = {
                "ms": found["seconds"] / steps * 1e3,
                "ratio": found["ratio"],
                "strict ratio": strict[name]["ratio"],
            }
            rows.append({"shape": shape, "work": what, "variant": name, **figures})
    return rows


@torch.no_grad()
def parts(shape: str, repeats: int) -> list[dict[str, Any]]:
    """Rows for a mixture of two models of FedAvg's layout, and for one of them."""
    backbone = Backbone(base(shape))
    layout = Layout(generalists=2, specialists=0, routing="equal", balance="none")
    each = {name: personal(backbone, "client", layout) for name in ("local", "fedavg")}
    weights = {"local": 0.6, "fedavg": 0.4}
    mixture = PersonalMixture(each, AboutMixture("client", weights, "interpolation", "", 0, 0))
    models = {"one model": each["fedavg"], "two, mixed": mixture}
    ids = torch.randint(int(backbone.config.vocab_size), (1, PROMPT))
    rows = []
    for what, calls, steps in (
        (
            "next token",
            {n: next_tokens(m, ids[:, :CONTEXT], STEPS) for n, m in models.items()},
            STEPS,
        ),
        ("first token", {n: prefill(m, ids) for n, m in models.items()}, 1),
    ):
        for name, taken in ratios(in_turns(calls, repeats, warm=2), "one model").items():
            figures = {"ms": taken["seconds"] / steps * 1e3, "ratio": taken["ratio"]}
            rows.append({"shape": shape, "work": what, "variant": name, **figures})
    return rows


@torch.no_grad()
def many(shape: str, count: int, repeats: int) -> list[dict[str, Any]]:
    """Rows for as many personal models as there are rows in a batch."""
    plain, backbone = plain_and_backbone(shape)
    ids = torch.randint(int(backbone.config.vocab_size), (count, MANY_CONTEXT))
    rows = []
    for layout_name, layout in LAYOUTS.items():
        models = {str(i): personal(backbone, str(i), layout) for i in range(count)}
        next_work, first_work = (
            {PLAIN: next_tokens(plain, ids, MANY_STEPS)},
            {PLAIN: prefill(plain, ids)},
        )
        if ManyModels is not None:
            together, clients = ManyModels(models), list(models)

            def batch(ids, together=together, clients=clients, **inputs):
                return together(ids, clients, **inputs)

            next_work["in one batch"], first_work["in one batch"] = (
                next_tokens(batch, ids, MANY_STEPS),
                prefill(batch, ids),
            )
        after = "one after the other"
        singles = [(model, row[None]) for model, row in zip(models.values(), ids, strict=True)]
        next_work[after] = _in_sequence([next_tokens(*single, MANY_STEPS) for single in singles])
        first_work[after] = _in_sequence([prefill(*single) for single in singles])
        for what, calls, tokens in (
            ("next token", next_work, MANY_STEPS),
            ("prefill", first_work, MANY_CONTEXT),
        ):
            for name, found in ratios(in_turns(calls, repeats), PLAIN).items():
                figures = {
                    "tokens/s": count * tokens / found["seconds"],
                    "throughput": 1 / found["ratio"],
                }
                rows.append(
                    {
                        "shape": shape,
                        "layout": layout_name,
                        "work": what,
                        "variant": name,
                        "models": count,
                        **figures,
                    }
                )
    return rows


def _in_sequence(calls: list[Callable[[], Any]]) -> Callable[[], None]:
    def work() -> None:
        for call in calls:
            call()

    return work


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=(*PREFILL, "smollm2"), nargs="+", default=list(PREFILL))
    parser.add_argument("--parts", action="store_true", help="measure a mixture of two models")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument(
        "--many",
        type=int,
        default=0,
        metavar="N",
        help="measure N personal models in a batch of N rows instead of one",
    )
    parser.add_argument(
        "--json", type=Path, help="default: results/next_token.json, or results/many_models.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    found = [
        parts(shape, args.repeats)
        if args.parts
        else many(shape, args.many, max(args.repeats // 5, 3))
        if args.many
        else one(shape, args.repeats)
        for shape in args.shape
    ]
    name = "many_models" if args.many else "two_parts" if args.parts else "next_token"
    path = args.json or RESULTS / f"{name}.json"
    report([row for rows in found for row in rows], path, repeats=args.repeats)


if __name__ == "__main__":
    main()
