"""Write the table of docs/bases.md: the memory of a local step by base and window, foreseen from
configurations, and measured where benchmarks/results/memory.json says so.

python scripts/memory_table.py [--measure NAME ...]
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, MEASURED = ROOT / "docs/bases.md", ROOT / "benchmarks/results/memory.json"
WINDOWS = (256, 1024, 4096)
MARKS = "<!-- memory -->\n", "<!-- end of memory -->\n"


def _config(
    width: int, hidden: int, blocks: int, heads: int, keys: int, head: int, words: int, tied: bool,
    kind: str = "llama",
) -> dict[str, Any]:  # fmt: skip
    return {
        "model_type": kind,
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head,
        "vocab_size": words,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
    }


# from the bases' own config.json
BASES = {
    "SmolLM2-135M": _config(576, 1536, 30, 9, 3, 64, 49_152, True),
    "SmolLM2-360M": _config(960, 2560, 32, 15, 5, 64, 49_152, True),
    "SmolLM2-1.7B": _config(2048, 8192, 24, 32, 32, 64, 49_152, True),
    "Gemma-3-270M": _config(640, 2048, 18, 4, 1, 256, 262_144, True, "gemma3_text"),
    "Gemma-3-1B": _config(1152, 6912, 26, 4, 1, 256, 262_144, True, "gemma3_text"),
    "Gemma-3-4B": _config(2560, 10_240, 34, 8, 4, 256, 262_208, True, "gemma3_text"),
    "Qwen3-0.6B": _config(1024, 3072, 28, 16, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-1.7B": _config(2048, 6144, 28, 16, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-4B": _config(2560, 9728, 36, 32, 8, 128, 151_936, True, "qwen3"),
    "Qwen3-8B": _config(4096, 12_288, 36, 32, 8, 128, 151_936, False, "qwen3"),
    "Llama-3.2-1B": _config(2048, 8192, 16, 32, 8, 64, 128_256, True),
    "Llama-3.2-3B": _config(3072, 8192, 28, 24, 8, 128, 128_256, True),
    "Llama-3.1-8B": _config(4096, 14_336, 32, 32, 8, 128, 128_256, False),
}
# Prints the peak since the base was loaded: what loading maps from its file can be dropped.
MEASURE = """
import sys, torch
from pathlib import Path
from coterie.models.backbone import Backbone
from coterie.models.language import LanguageModel
from coterie.models.layout import Layout
base, rows, context, bits, again, dtype = sys.argv[1:]
backbone = Backbone.load(base, dtype=dtype, quantised=bits or None)
backbone.attached.checkpointing = bool(int(again))
model = LanguageModel(backbone, Layout())
moments = [torch.ones_like(p) for p in model.adapter.parameters() for _ in range(2)]
ids = torch.randint(backbone.architecture.vocabulary, (int(rows), int(context) + 1))
Path("/proc/self/clear_refs").write_text("5")
model.gradient(ids, list(model.adapter.parameters()))
lines = Path("/proc/self/status").read_text().splitlines()
print(next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")))
"""


def random_base(folder: Path, settings: dict[str, Any], dtype: str = "fp32") -> str:
    """Write a base with random weights into a folder; return the folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    config = AutoConfig.for_model(**settings)
    AutoModelForCausalLM.from_config(config, dtype=kind).save_pretrained(folder)
    return str(folder)


def peak(base: str, rows: int, context: int, bits: str, again: bool, dtype: str) -> int:
    """Return the bytes of a step on this machine's CPU (Linux), in a process of its own."""
    arguments = map(str, [base, rows, context, bits, int(again), dtype])
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *arguments], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1])


def _measure(name: str) -> None:
    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        base = random_base(Path(folder) / "base", BASES[name])
        known[name] = {
            str(context): peak(base, 1, context, "", True, "fp32") for context in WINDOWS[:2]
        }
    MEASURED.write_text(json.dumps(known, indent=2) + "\n")


def _row(name: str, folder: Path, measured: dict[str, int]) -> str:
    from coterie.models.layout import Layout
    from coterie.models.memory import Step

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(BASES[name]))
    cells = [name]
    for dtype, bits, on_cpu in (
        ("fp32", None, True),
        ("bf16", None, False),
        ("bf16", "nf4", False),
    ):
        for context in WINDOWS[:2] if on_cpu else WINDOWS:
            step = Step(str(folder), context, Layout(), dtype, bits, on_cpu)
            cell = f"{step.footprint(True).of(1) / 1e9:.1f}"
            if on_cpu and str(context) in measured:
                cell += f" ({measured[str(context)] / 1e9:.1f} measured)"
            cells.append(cell)
    return f"| {' | '.join(cells)} |"


def table() -> str:
    """Return the table in Markdown."""
    known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
    kinds = [f"CPU, fp32, {n}" for n in WINDOWS[:2]]
    kinds += [f"{kind}, {n}" for kind in ("bf16", "`nf4`") for n in WINDOWS]
    lines = [f"| base | {' | '.join(kinds)} |", "| --- " + "| ---: " * len(kinds) + "|"]
    with tempfile.TemporaryDirectory() as folder:
        lines += [_row(name, Path(folder) / name, known.get(name, {})) for name in BASES]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure what is named, and write the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--measure", nargs="*", default=[], choices=list(BASES))
    for name in parser.parse_args().measure:
        _measure(name)
    first, last = map(re.escape, MARKS)
    text, new = PAGE.read_text(), MARKS[0] + table() + MARKS[1]
    PAGE.write_text(re.sub(f"{first}.*{last}", lambda _: new, text, flags=re.DOTALL))


if __name__ == "__main__":
    main()
