"""What each format of an export costs on a device: bytes, perplexity, time of a next token.

    python benchmarks/device.py RUN --exports FOLDER [--repeats 30] [--json FILE]

RUN is a run of the quickstart. Its clients are exported in every format whose packages are here,
into FOLDER, where what is there already is kept; perplexity is that of each export's own check.
Then all programs continue the same text in turns within one process, with one thread: 8 next tokens
behind 64 in the cache, of the client that comes first. A figure is the fastest of all turns, since
the machine may be shared.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import in_turns, report
from transformers import DynamicCache

import coterie
from coterie.core.errors import Refused
from coterie.export import FORMATS, Source, export
from coterie.export.format import ClientModel, TorchRuntime, Written
from coterie.export.gguf import LlamaServer
from coterie.export.onnx import OnnxRuntime

CONTEXT, STEPS = 64, 8  # tokens in the cache, next tokens for each figure
EAGER = "coterie"


@dataclass(frozen=True)
class Variant:
    """One export."""

    format: str
    precision: str = "f32"
    base_precision: str | None = None

    @property
    def name(self) -> str:
        """For the table, and for a folder."""
        base = f", base {self.base_precision}" if self.base_precision else ""
        return f"{self.format} {self.precision}{base}"


VARIANTS = (
    Variant("peft"),
    Variant("mixtral"),
    Variant("gguf", "f32"),
    Variant("gguf", "f16"),
    Variant("gguf", "q8_0"),
    Variant("onnx"),
    Variant("onnx", "f16"),
    Variant("onnx", "int8"),
    Variant("onnx", "f16", "w8"),
    Variant("onnx", "f16", "int8"),
    Variant("onnx", "f16", "w4"),
)


def exported(run: Path, folder: Path, variant: Variant) -> Path | None:
    """The folder of an export, written unless it is there; None without the format's packages."""
    out = folder / variant.name.replace(", base ", "-").replace(" ", "-")
    if not (out / "export.json").is_file():
        source = Source(run, everyone=True)
        try:
            export(
                source,
                variant.format,
                out,
                precision=variant.precision,
                base_precision=variant.base_precision,
                say=lambda line: print(f"{variant.name}: {line}", flush=True),
            )
        except Refused as refused:
            print(f"{variant.name} is left out: {refused.problem}")
            return None
    return out


def found(out: Path) -> dict[str, Any]:
    """Bytes, and the change of perplexity, of an export's clients."""
    clients = json.loads((out / "export.json").read_text())["clients"].values()
    names = [set(client["files"]) for client in clients]
    shared = set.intersection(*names)
    sizes = {n: file["bytes"] for client in clients for n, file in client["files"].items()}
    changes = [
        client["check"]["perplexity"] / client["check"]["original"] - 1 for client in clients
    ]
    return {
        "MB shared": sum(sizes[name] for name in shared) / 1e6,
        "MB each": sum(size for n, size in sizes.items() if n not in shared) / len(names) / 1e6,
        "difference": max(client["check"]["difference"] for client in clients),
        "perplexity %": 100 * statistics.mean(changes),
    }


def next_tokens(runtime: Any, ids: torch.Tensor) -> Callable[[], object]:
    """Some next tokens behind (1, C) others, in a program."""
    if isinstance(runtime, OnnxRuntime):
        return _of_graph(runtime, ids)
    if isinstance(runtime, LlamaServer):
        return lambda: runtime.complete(
            ids[0].tolist(), n_predict=STEPS, cache_prompt=True, ignore_eos=True
        )
    model = runtime.model if isinstance(runtime, TorchRuntime) else runtime
    cache = DynamicCache()
    model(ids, past_key_values=cache, use_cache=True)

    def work() -> None:
        for _ in range(STEPS):
            model(ids[:, :1], past_key_values=cache, use_cache=True)
        cache.crop(-STEPS)

    return work


def _of_graph(runtime: OnnxRuntime, ids: torch.Tensor) -> Callable[[], object]:
    first = torch.tensor([0])
    _, *full = runtime.step(ids, first, runtime.empty(1))

    def work() -> None:
        past = full
        for _ in range(STEPS):
            _, *past = runtime.step(ids[:, :1], first, past)

    return work


def loaded(variant: Variant, out: Path, client: ClientModel) -> Any:
    """A context of an export's program, with one client."""
    summary = json.loads((out / "export.json").read_text())
    entries: dict[str, Any] = summary["clients"]
    files = [*entries[client.client]["files"]]
    own = [n for n in files if sum(n in entry["files"] for entry in entries.values()) == 1]
    folder = (out / own[0]).parent
    shared = tuple(name for name in files if name not in own)
    names = tuple(Path(name).name for name in own)
    written = Written(folder, names, client.logits, shared=shared)
    return FORMATS[variant.format].runtime(client, written)


@torch.no_grad()
def times(run: Path, exports: dict[Variant, Path], repeats: int) -> dict[str, float]:
    """Seconds of a next token in every program."""
    client = Source(run, next(iter(coterie.personal.clients_of(run)))).load()[0]
    ids = torch.randint(client.model.backbone.architecture.vocabulary, (1, CONTEXT))
    with ExitStack() as stack:
        calls = {EAGER: next_tokens(client.model, ids)}
        for variant, out in exports.items():
            runtime = stack.enter_context(loaded(variant, out, client))
            calls[variant.name] = next_tokens(runtime, ids)
        taken = in_turns(calls, repeats, warm=2)
    return {name: min(own) / STEPS for name, own in taken.items()}


def rows(run: Path, exports: dict[Variant, Path], repeats: int) -> Iterator[dict[str, Any]]:
    """The table's rows."""
    taken = times(run, exports, repeats)
    nothing = {"MB shared": 0.0, "MB each": 0.0, "difference": 0.0, "perplexity %": 0.0}
    sizes = {EAGER: nothing} | {variant.name: found(out) for variant, out in exports.items()}
    for name, figures in sizes.items():
        yield {
            "format": name,
            **figures,
            "ms": 1e3 * taken[name],
            "ratio": taken[name] / taken[EAGER],
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--exports", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    exports = {
        variant: out
        for variant in VARIANTS
        if (out := exported(options.run, options.exports, variant)) is not None
    }
    report([*rows(options.run, exports, options.repeats)], options.json, repeats=options.repeats)


if __name__ == "__main__":
    main()
