"""Make the embedded base model again: a small Llama with its own tokenizer, pretrained on real
text.

    python scripts/pretrain_base.py --data ../shared/data --tokens 20_000_000

Writes a Hugging Face model folder (bf16 weights, tokenizer, model card) to --out, which is what the
package ships. Interrupted, it goes on from the last checkpoint in --work. The schedule is warm-up,
constant, then a linear decay over the last part, so that a run in its constant phase may be resumed
with another --tokens.
"""

import argparse
import gzip
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from coterie.data.pretraining import seen_in_pretraining

VOCABULARY, CONTEXT, END = 4096, 256, "<|endoftext|>"
LANGUAGES = ("de", "fr", "it", "nl", "es", "ca")
# Share of the training tokens: English and Python first, since most federations of the embedded
# base speak them.
WEIGHTS = {
    "dbpedia": 0.18,
    "books": 0.10,
    "arxiv": 0.09,
    "stackexchange": 0.10,
    "code": 0.20,
} | dict.fromkeys(LANGUAGES, 0.055)


def read(path: Path) -> Iterator[dict]:
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        yield from map(json.loads, lines)


def documents(data: Path) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """The texts by corpus: those for pretraining, and those kept back for clients (on which the
    card's perplexities are taken).
    """
    seen: dict[str, list[str]] = {name: [] for name in WEIGHTS}
    kept: dict[str, list[str]] = {name: [] for name in (*WEIGHTS, "ag_news")}
    for row in read(data / "dbpedia14/train.jsonl.gz"):
        seen["dbpedia"].append(row["text"])
    for row in read(data / "topics/train.jsonl.gz"):
        part = seen if seen_in_pretraining(f"topics/{row['topic']}", row["id"]) else kept
        part[row["topic"]].append(row["text"])
    for row in read(data / "multilingual/train.jsonl.gz"):
        part = seen if seen_in_pretraining("multilingual", row["text"]) else kept
        part[row["language"]].append(row["text"])
    kept["dbpedia"] = [row["text"] for row in read(data / "dbpedia14/test.jsonl.gz")]
    kept["ag_news"] = [row["text"] for row in read(data / "ag_news/test.jsonl.gz")]
    return seen, kept


def train_tokenizer(texts: dict[str, list[str]]) -> Tokenizer:
    """Byte-level BPE, trained on at most 1.2 million characters of each corpus so that none
    dominates the merges.
    """

    def sample() -> Iterator[str]:
        for name in sorted(texts):
            left = 1_200_000 if name not in LANGUAGES else 400_000
            for text in texts[name]:
                if left <= 0:
                    break
                left -= len(text)
                yield text

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample(), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of token ids, (tokens,), documents separated by the end token, which is id 0."""
    encoded = tokenizer.encode_batch(texts)
    return np.concatenate([np.array([*e.ids, 0], dtype=np.uint16) for e in encoded])


class Batches:
    """Batches (rows, CONTEXT + 1) of windows; every corpus is walked in a new random order and
    offset each epoch.
    """

    def __init__(self, streams: dict[str, np.ndarray], seed: int) -> None:
        self.streams, self.rng = streams, np.random.default_rng(seed)
        self.order: dict[str, list[int]] = {name: [] for name in streams}

    def window(self, name: str) -> np.ndarray:
        stream, order = self.streams[name], self.order[name]
        if not order:
            offset = int(self.rng.integers(CONTEXT))
            starts = np.arange(offset, len(stream) - CONTEXT - 1, CONTEXT)
            order.extend(self.rng.permutation(starts).tolist())
        start = order.pop()
        return stream[start : start + CONTEXT + 1]

    def next(self, rows: int) -> torch.Tensor:
        names = list(self.streams)
        chosen = self.rng.choice(len(names), size=rows, p=[WEIGHTS[n] for n in names])
        return torch.from_numpy(np.stack([self.window(names[c]) for c in chosen]).astype(np.int64))


class Muon(torch.optim.Optimizer):
    """Momentum orthogonalised by Newton-Schulz (Jordan et al., 2024), in fp32:
    `torch.optim.Muon` uses bf16, slow on a CPU.
    """

    def __init__(
        self, params, lr: float, momentum: float = 0.95, weight_decay: float = 0.02
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                x = p.grad.lerp(buffer, group["momentum"])
                tall = x.shape[0] > x.shape[1]
                x = x.T if tall else x
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = torch.addmm(
                        x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445
                    )
                x = x.T if tall else x
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(x, alpha=-group["lr"] * math.sqrt(max(1.0, p.shape[0] / p.shape[1])))


def schedule(done: float, decay: float) -> float:
    """Factor of the peak learning rate when the share `done` of the tokens is behind us."""
    return min(1.0, done / 0.02 + 0.02, (1 - done) / decay + 0.01)


@torch.no_grad()
def perplexity(model: LlamaForCausalLM, stream: np.ndarray, limit: int = 40_000) -> float:
    """exp(mean token NLL) over non-overlapping windows of CONTEXT tokens of at most `limit`
    tokens.
    """
    model.eval()
    total = count = 0
    for start in range(0, min(len(stream), limit) - 1, CONTEXT * 8):
        rows = [
            stream[s : s + CONTEXT + 1].astype(np.int64)
            for s in range(start, start + CONTEXT * 8, CONTEXT)
        ]
        for row in (r for r in rows if len(r) > 1):
            ids = torch.from_numpy(row)[None].to(model.device)
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits[0].float()
            total += F.cross_entropy(logits, ids[0, 1:], reduction="sum").item()
            count += len(row) - 1
    model.train()
    return math.exp(total / count)


def card(
    numbers: dict[str, tuple[float, float]],
    tokens: int,
    loss: float,
    sizes: dict[str, int],
    parameters: int,
) -> str:
    rows = "\n".join(f"| {name} | {a:.1f} | {b:.2f} |" for name, (a, b) in numbers.items())
    data = "\n".join(f"| {name} | {sizes[name]:,} | {WEIGHTS[name]:.3f} |" for name in WEIGHTS)
    return f"""---
license: cc-by-sa-4.0
library_name: transformers
pipeline_tag: text-generation
---
# coterie-mini

The embedded base model of coterie: a Llama of {parameters / 1e6:.1f} million parameters (4 blocks,
width 256, context {CONTEXT}, tied embeddings) with its own byte-level BPE tokenizer of
{VOCABULARY:,} tokens. It exists so that personal language models can be fine-tuned anywhere,
without a download, in minutes on two CPU cores. It is far too small to be useful as an assistant.

Pretrained from nothing by `scripts/pretrain_base.py` on {tokens / 1e6:.1f} million tokens (last
training loss {loss:.3f}), bf16 weights.

| corpus | distinct training tokens | share of a batch |
| --- | --- | --- |
{data}

dbpedia: DBpedia abstracts (CC BY-SA). books: ELTeC novels (public domain). arxiv: the Stacks
project (GFDL). stackexchange: Quantum Computing Stack Exchange (CC BY-SA). code: CPython's standard
library (PSF). de, fr, it, nl, es: Wikipedia sentences (CC BY-SA). ca: Softcatala articles (CC
BY-SA) and Common Voice prompts (CC0).

About 40 % of the documents of every corpus but dbpedia were kept back for clients, and so were all
the standard-library modules that the quickstart's clients hold and the whole of AG News
(`coterie.data.pretraining.seen_in_pretraining` is the rule). Perplexity on text that was kept back
(at most 40,000 tokens each, windows of {CONTEXT} tokens), per token and as bits per byte, which
does not depend on the tokenizer:

| text | perplexity | bits per byte |
| --- | --- | --- |
{rows}
"""


def main() -> None:  # noqa: PLR0915 - a script reads best from top to bottom
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, default=os.environ.get("COTERIE_DATA", "../shared/data")
    )
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parents[1] / "src/coterie/models/mini"
    )
    parser.add_argument("--work", type=Path, default=Path(".pretraining"), help="checkpoint folder")
    parser.add_argument("--tokens", type=int, default=20_000_000)
    parser.add_argument("--rows", type=int, default=32, help="windows per optimiser step")
    parser.add_argument(
        "--decay",
        type=float,
        default=0.35,
        help="share of the tokens over which the learning rate decays",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(args.seed)

    seen, kept = documents(args.data)
    tokenizer_file = args.work / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(seen).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    streams = {name: encode(tokenizer, texts) for name, texts in seen.items()}
    sizes = {name: len(stream) for name, stream in streams.items()}
    held = {name: encode(tokenizer, texts[:400]) for name, texts in kept.items() if texts}
    print(
        {name: f"{n:,}" for name, n in sizes.items()},
        {name: f"{len(s):,}" for name, s in held.items()},
        flush=True,
    )

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
        num_attention_heads=4, max_position_embeddings=1024, tie_word_embeddings=True,
        bos_token_id=0, eos_token_id=0, initializer_range=0.02,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(args.device)
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    muon, adam = (
        Muon(matrices, lr=0.02),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.95), weight_decay=0.0),
    )
    batches, done, loss_mean = Batches(streams, args.seed), 0, float("nan")
    checkpoint = args.work / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=args.device, weights_only=False)
        model.load_state_dict(state["model"])
        muon.load_state_dict(state["muon"])
        adam.load_state_dict(state["adam"])
        done, loss_mean, batches.rng, batches.order = (
            state["done"],
            state["loss"],
            state["rng"],
            state["order"],
        )
        print(f"resumed at {done:,} tokens", flush=True)

    def objective(ids: torch.Tensor) -> torch.Tensor:
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

    step_loss = torch.compile(objective) if args.compile else objective
    start, first, step = time.time(), done, 0
    while done < args.tokens:
        factor = schedule(done / args.tokens, args.decay)
        muon.param_groups[0]["lr"], adam.param_groups[0]["lr"] = 0.02 * factor, 4e-3 * factor
        loss = step_loss(batches.next(args.rows).to(args.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        muon.step()
        adam.step()
        model.zero_grad()
        done, step = done + args.rows * CONTEXT, step + 1
        loss_mean = loss.item() if math.isnan(loss_mean) else 0.97 * loss_mean + 0.03 * loss.item()
        if step % 20 == 0:
            speed = (done - first) / (time.time() - start)
            print(
                f"{done:,} tokens  loss {loss_mean:.4f}  lr x{factor:.3f}  {speed:,.0f} tokens/s",
                flush=True,
            )
        if step % 60 == 0 or done >= args.tokens:
            state = {
                "model": model.state_dict(),
                "muon": muon.state_dict(),
                "adam": adam.state_dict(),
                "done": done,
                "loss": loss_mean,
            }
            torch.save(
                state | {"rng": batches.rng, "order": batches.order}, checkpoint.with_suffix(".new")
            )
            os.replace(checkpoint.with_suffix(".new"), checkpoint)

    model.to(torch.bfloat16).to(
        torch.float32
    )  # the perplexities are those of the weights that are shipped
    numbers = {}
    for name, stream in held.items():
        ppl = perplexity(model, stream)
        size = len(tokenizer.decode(stream.tolist(), skip_special_tokens=True).encode())
        numbers[name] = (ppl, math.log2(ppl) * len(stream) / size)
        print(f"{name}: perplexity {ppl:.1f}, {numbers[name][1]:.2f} bits per byte", flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16)
    weights = {
        name: tensor.contiguous().cpu()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures, model.config.dtype = ["LlamaForCausalLM"], "bfloat16"
    model.config.save_pretrained(args.out)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=None,
        model_max_length=1024,
    )
    fast.save_pretrained(args.out)
    parameters = sum(p.numel() for p in model.parameters())
    (args.out / "README.md").write_text(
        card(numbers, done, loss_mean, sizes, parameters), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
