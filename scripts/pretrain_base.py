r"""Make the embedded base model again: a small Llama with its own tokenizer, pretrained on English
prose of open licences alone (`pretraining_sources.json`).

    python scripts/pretrain_base.py --sources CLONES --prepared P --work W     # until interrupted
    python scripts/pretrain_base.py --prepared P --work D --from W/checkpoint.pt \
        --decay 3_000_000 --out MODEL                                          # finishes a model
    python scripts/pretrain_base.py --prepared P --evaluate MODEL [MODEL ...]  # bits per byte

The learning rate is warmed up and then constant, so that the first command may go on for ever: it
writes --work/checkpoint.pt every few minutes and goes on from it. The second branches off: the
learning rate falls to nothing over --decay tokens, in a work folder of its own, and a Hugging Face
model folder is written; the constant checkpoint stays as it is. --tokens ends the first command;
with --decay as well it does both in one go.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from pretraining_model import CONTEXT, Muon, build, encode, train_tokenizer, write
from pretraining_text import clients, gather, sources
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

# Share of the training tokens by kind of prose. Conversation is little: much of it is alike.
WEIGHTS = {
    "fiction": 0.34,
    "essays": 0.15,
    "textbooks": 0.22,
    "encyclopedia": 0.14,
    "public service": 0.10,
    "conversation": 0.03,
    "web": 0.02,
}
WARM_UP = 300_000  # tokens
EVALUATED = 120_000  # bytes of each text on which models are compared
RATES = {"muon": 0.02, "adam": 4e-3}


# ---- data ---------------------------------------------------------------------------------------


def prepare(folder: Path, clones: Path, data: Path) -> None:
    """Write the tokenizer, the token streams, the texts held back and a summary, once."""
    if (folder / "summary.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    seen, held, rows = gather(sources(), clones, data)
    tokenizer = train_tokenizer(seen)
    tokenizer.save(str(folder / "tokenizer.json"))
    sizes = {}
    for kind, texts in seen.items():
        stream = encode(tokenizer, texts)
        np.save(folder / f"{kind}.npy", stream)
        sizes[kind] = len(stream)
    (folder / "held.json").write_text(json.dumps(held), encoding="utf-8")
    (folder / "summary.json").write_text(
        json.dumps({"tokens": sizes, "sources": rows}, indent=1), encoding="utf-8"
    )
    print(json.dumps(sizes), flush=True)


class Batches:
    """Batches (rows, CONTEXT + 1) of windows; every kind is walked in a new random order and
    offset each epoch.
    """

    def __init__(self, streams: dict[str, np.ndarray], seed: int) -> None:
        self.streams, self.rng = streams, np.random.default_rng(seed)
        self.order: dict[str, list[int]] = {name: [] for name in streams}
        weights = np.array([WEIGHTS[name] for name in streams])
        self.shares = weights / weights.sum()

    def window(self, name: str) -> np.ndarray:
        """The next window (CONTEXT + 1,) of one kind."""
        stream, order = self.streams[name], self.order[name]
        if not order:
            offset = int(self.rng.integers(CONTEXT))
            starts = np.arange(offset, len(stream) - CONTEXT - 1, CONTEXT)
            order.extend(self.rng.permutation(starts).tolist())
        start = order.pop()
        return np.asarray(stream[start : start + CONTEXT + 1])

    def next(self, rows: int) -> torch.Tensor:
        """Token ids (rows, CONTEXT + 1)."""
        names = list(self.streams)
        chosen = self.rng.choice(len(names), size=rows, p=self.shares)
        return torch.from_numpy(np.stack([self.window(names[c]) for c in chosen]).astype(np.int64))


# ---- training -----------------------------------------------------------------------------------


def schedule(done: int, end: int | None, decay: int) -> float:
    """Factor of the peak learning rate after `done` tokens: warm-up, constant, and a linear fall
    over the last `decay` tokens before `end`, if there is one.
    """
    falling = 1.0 if end is None or not decay else max(0.0, (end - done) / decay) + 0.01
    return min(1.0, (done + 8192) / WARM_UP, falling)


class Training:
    """Model, optimisers and data, and where they are; `save` and `load` are exact."""

    def __init__(
        self, streams: dict[str, np.ndarray], seed: int, device: str, bf16: bool = False
    ) -> None:
        torch.manual_seed(seed)
        self.model = build().to(device)
        named = list(self.model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in named if p.ndim != 2 or "embed" in n]
        precision = torch.bfloat16 if bf16 else torch.float32
        self.muon = Muon(matrices, lr=RATES["muon"], dtype=precision)
        self.adam = torch.optim.AdamW(others, lr=RATES["adam"], betas=(0.9, 0.95), weight_decay=0.0)
        self.batches = Batches(streams, seed)
        self.done, self.loss, self.end = 0, float("nan"), None
        self.device, self.bf16 = device, bf16

    def save(self, path: Path) -> None:
        """Write everything to `path`, which is whole at every moment."""
        state = {
            "model": self.model.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "rng": self.batches.rng,
            "order": self.batches.order,
            "done": self.done,
            "loss": self.loss,
            "end": self.end,
        }
        with open(path.with_suffix(".new"), "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path.with_suffix(".new"), path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote (a pickle: only from one's own runs)."""
        state = torch.load(path, map_location=self.device, weights_only=False)
        self.model.load_state_dict(state["model"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.batches.rng, self.batches.order = state["rng"], state["order"]
        self.done, self.loss, self.end = state["done"], state["loss"], state["end"]
        print(f"goes on from {path} at {self.done:,} tokens", flush=True)

    def objective(self, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
        """Mean cross-entropy in nats of a batch (rows, CONTEXT + 1)."""

        def loss(ids: torch.Tensor) -> torch.Tensor:
            logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits
            return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())

        function = torch.compile(loss) if compiled else loss

        def autocast(ids: torch.Tensor) -> torch.Tensor:
            with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=self.bf16):
                return function(ids)

        return autocast

    def step(self, objective: Callable[[torch.Tensor], torch.Tensor], rows: int, lr: float) -> None:
        """One step of both optimisers at `lr` times their peak rates."""
        self.muon.param_groups[0]["lr"] = RATES["muon"] * lr
        self.adam.param_groups[0]["lr"] = RATES["adam"] * lr
        loss = objective(self.batches.next(rows).to(self.device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step()
        self.adam.step()
        self.model.zero_grad()
        self.done += rows * CONTEXT
        now = loss.item()
        self.loss = now if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * now


def begin(training: Training, args: argparse.Namespace) -> Path:
    """Bring a training to where it stands: at its own checkpoint, else at the one it branches off,
    else at its beginning. Returns its checkpoint's path.
    """
    args.work.mkdir(parents=True, exist_ok=True)
    checkpoint = args.work / "checkpoint.pt"
    if args.branch is not None and args.branch.resolve() == checkpoint.resolve():
        raise SystemExit("--from is --work's own checkpoint: a branch needs a folder of its own")
    if checkpoint.exists():
        training.load(checkpoint)
    elif args.branch is not None:
        training.load(args.branch)
        training.end = training.done + args.decay
    if args.tokens is not None:
        training.end = args.tokens
    if training.end is None and args.decay:
        raise SystemExit("--decay needs --from (to branch off) or --tokens (when to end)")
    return checkpoint


def train(training: Training, args: argparse.Namespace) -> None:
    """Train until the end, if there is one, with a checkpoint every --minutes."""
    checkpoint = begin(training, args)
    objective = training.objective(args.compile)
    start = saved = time.time()
    first, step = training.done, 0
    while training.end is None or training.done < training.end:
        lr = schedule(training.done, training.end, args.decay)
        training.step(objective, args.rows, lr)
        step += 1
        if step % 20 == 0:
            speed = (training.done - first) / (time.time() - start)
            print(
                f"{training.done:,} tokens  loss {training.loss:.4f}  lr x{lr:.3f}  "
                f"{speed:,.0f} tokens/s",
                flush=True,
            )
        if time.time() - saved > 60 * args.minutes:
            training.save(checkpoint)
            saved = time.time()
    training.save(checkpoint)


# ---- evaluation ---------------------------------------------------------------------------------


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, ids: list[int], size: int) -> float:
    """Bits of all tokens but the first of each window (CONTEXT tokens after one of context), by
    the text's bytes: comparable between tokenizers.
    """
    device = next(model.parameters()).device
    total = 0.0
    for start in range(0, len(ids) - 1, CONTEXT):
        row = torch.tensor(ids[start : start + CONTEXT + 1], device=device)[None]
        logits = model(input_ids=row[:, :-1]).logits[0].float()
        total += F.cross_entropy(logits, row[0, 1:], reduction="sum").item()
    return total / math.log(2) / size


def evaluate(folder: Path, texts: dict[str, str], device: str) -> dict[str, float]:
    """Bits per byte of a model folder on each text; a text begins after the end token."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    numbers = {}
    for name, text in texts.items():
        ids = [tokenizer.eos_token_id, *tokenizer(text, add_special_tokens=False)["input_ids"]]
        numbers[name] = bits_per_byte(model, ids, len(text.encode()))
    return numbers


def evaluation_texts(prepared: Path, data: Path) -> dict[str, str]:
    """`EVALUATED` bytes, about, of each kind of prose held back, and of each corpus of clients;
    of every document its beginning, so that many are in it.
    """
    held = json.loads((prepared / "held.json").read_text(encoding="utf-8"))
    texts = {}
    for name, documents in {**held, **clients(data, kept_back=True)}.items():
        share = max(1_000, EVALUATED // max(1, len(documents)))
        chosen = documents[:: max(1, len(documents) * share // EVALUATED)]
        texts[name] = "\n".join(text[:share] for text in chosen)
    return texts


def table(results: dict[str, dict[str, float]]) -> str:
    """Bits per byte as a Markdown table: a row a text, a column a model."""
    names = list(results)
    lines = [f"| text | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for text in next(iter(results.values())):
        cells = " | ".join(f"{results[name][text]:.3f}" for name in names)
        lines.append(f"| {text} | {cells} |")
    return "\n".join(lines)


def card(training: Training, summary: dict, figures: str) -> str:
    """The model card: what it is, what it has read under which licence, how well it reads."""
    sizes = summary["tokens"]
    total = sum(WEIGHTS[kind] for kind in sizes)
    shares = "\n".join(f"| {k} | {n:,} | {WEIGHTS[k] / total:.2f} |" for k, n in sizes.items())
    rows = sorted(summary["sources"], key=lambda row: (row["kind"], row["repository"]))
    listed = "\n".join(
        f"| {r['repository']} | {r['kind']} | {r['licence']} | {r['bytes'] / 1e6:.2f} |"
        for r in rows
        if r["bytes"]
    )
    parameters = sum(p.numel() for p in training.model.parameters())
    return f"""---
license: cc-by-sa-4.0
language: en
library_name: transformers
pipeline_tag: text-generation
---
# coterie-mini

The embedded base model of coterie: a Llama of {parameters / 1e6:.1f} million parameters (4 blocks,
width 256, context {CONTEXT}, tied embeddings) with its own byte-level BPE tokenizer of English. It
exists so that personal language models can be fine-tuned anywhere, without a download, in minutes
on two CPU cores. It is far too small to be useful as an assistant.

Pretrained from nothing by `scripts/pretrain_base.py` on {training.done / 1e6:.1f} million tokens of
English prose (last training loss {training.loss:.3f}), bf16 weights. It has not read what clients
of the shipped recipes hold: no other language, program text, mathematics, question pages, AG News,
nor any work of an author of their novels; paragraphs that share thirteen words in a row with a
client's text are left out.

| kind | distinct training tokens | share of a batch |
| --- | --- | --- |
{shares}

Bits per byte (they do not depend on the tokenizer; windows of {CONTEXT} tokens). Above: works of
each kind that were held back; below: what clients hold.

{figures}

| source | kind | licence | MB |
| --- | --- | --- | --- |
{listed}
"""


def finish(training: Training, args: argparse.Namespace) -> None:
    """Write the model folder and its card, with the figures of the base before it beside."""
    write(training.model, Tokenizer.from_file(str(args.prepared / "tokenizer.json")), args.out)
    texts = evaluation_texts(args.prepared, args.data)
    compared = {"this model": args.out}
    if args.compare is not None:
        compared["the base before it"] = args.compare
    results = {name: evaluate(p, texts, args.device) for name, p in compared.items()}
    summary = json.loads((args.prepared / "summary.json").read_text(encoding="utf-8"))
    (args.out / "README.md").write_text(card(training, summary, table(results)), encoding="utf-8")
    print(table(results), flush=True)


def arguments() -> argparse.ArgumentParser:
    """What the command line takes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=os.environ.get("COTERIE_DATA", "../shared/data"))
    add("--sources", type=Path, default=Path(".pretraining/sources"), help="folder of clones")
    add("--prepared", type=Path, default=Path(".pretraining/prepared"), help="tokens and texts")
    add("--work", type=Path, default=Path(".pretraining/work"), help="folder of the checkpoint")
    add("--from", dest="branch", type=Path, help="checkpoint to branch off, which stays as it is")
    add("--tokens", type=int, help="end after so many tokens (default: never)")
    add("--decay", type=int, default=0, help="tokens over which the learning rate falls at the end")
    add("--out", type=Path, help="folder for the finished model")
    add("--compare", type=Path, help="model folder of the base before it, for the card")
    add("--evaluate", type=Path, nargs="+", help="only print bits per byte of these model folders")
    add("--rows", type=int, default=32, help="windows per optimiser step")
    add("--minutes", type=float, default=3.0, help="between checkpoints")
    add("--seed", type=int, default=0)
    add("--threads", type=int, help="of the CPU (default: PyTorch's choice)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--bf16", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available(),
        help="bf16 autocast; on a CPU only where it has bf16 instructions")  # fmt: skip
    add("--compile", action=argparse.BooleanOptionalAction, default=True)
    return parser


def main() -> None:
    """Prepare, train and finish, or only evaluate."""
    args = arguments().parse_args()
    args.data = Path(args.data)
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.evaluate:
        texts = evaluation_texts(args.prepared, args.data)
        print(table({str(p): evaluate(p, texts, args.device) for p in args.evaluate}))
        return
    prepare(args.prepared, args.sources, args.data)
    kinds = json.loads((args.prepared / "summary.json").read_text(encoding="utf-8"))["tokens"]
    streams = {kind: np.load(args.prepared / f"{kind}.npy") for kind in kinds}
    training = Training(streams, args.seed, args.device, args.bf16)
    train(training, args)
    if args.out is not None:
        finish(training, args)


if __name__ == "__main__":
    main()
