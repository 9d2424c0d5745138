"""A personal model as a standard PEFT adapter: its fold, or one of its experts.

Programs differ in what they read: llama.cpp's converter ignores `use_rslora`, others ignore
`rank_pattern`. So there is one rank, alpha equals it, and B holds the scale.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.core.errors import Refused
from coterie.core.files import save, write_atomically
from coterie.export.format import (
    ClientModel,
    Format,
    Options,
    Runtime,
    TorchRuntime,
    Written,
    filled_readme,
)
from coterie.export.layers import check_text, folded, mean_weights, pair
from coterie.models import gguf_base
from coterie.models.adapter import AdapterBlock
from coterie.models.architecture import EMBEDDED, locate, trusted
from coterie.models.families import Family, is_transposed
from coterie.models.language import LanguageModel
from coterie.personal import PersonalModel

PREFIX = "base_model.model."  # PEFT's prefix of every module of the base
DTYPES = {"f32": torch.float32, "f16": torch.float16}
WEIGHTS, CONFIG, README = "adapter_model.safetensors", "adapter_config.json", "README.md"


class Peft(Format):
    """A PEFT adapter, which `PeftModel.from_pretrained(base, folder)` loads."""

    name = "peft"
    about = "an adapter for PEFT, vLLM and llama.cpp's converter, of every base; routing is folded"
    packages = ("peft",)
    extra = "export"
    parts = ("fold", "generalist")

    def check(self, client: ClientModel, options: Options) -> None:
        if (bits := client.model.about.quantise) is not None:
            raise Refused(
                f"{client.client} was trained on a base in {bits}, and PEFT would load the base "
                f"itself",
                "Choose a format that holds the base (onnx, mixtral, gguf), or train with "
                "model.quantise: null.",
            )
        if options.part == "generalist":
            _expert(client.model, options.expert)
        else:
            check_text(client)

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        model = client.model
        if options.part == "generalist":
            index, likeness = _expert(model, options.expert), "the expert in coterie"
            weights = torch.zeros(len(model.adapter.blocks), model.layout.experts)
            weights[:, index], used = 1, [index]
            kept = f"expert {model.experts[index]} of every MLP and the attention's updates"
            left_out = _left_out(model, index)
        else:
            weights, likeness = mean_weights(client), "the fold in coterie"
            used = [*range(model.layout.experts)]
            kept = "all experts of every MLP with fixed weights, and the attention's updates"
            left_out = _folded_away(model)
        whole, rank = write_adapter(folder, model, weights, used, options.precision)
        missing = [*filter(None, [client.note]), *left_out]
        write_atomically(folder / README, _readme(client, kept, missing).encode())
        if client.chats:
            client.serving.save(folder)
        return Written(
            folder,
            tuple(sorted(path.name for path in folder.iterdir())),
            torch.no_grad()(whole.forward),
            likeness if left_out else "the personal model",
            tuple(left_out),
            {"rank": rank, "weights": weights.tolist(), "experts": model.experts},
        )

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[Runtime]:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM, GenerationConfig

        base = AutoModelForCausalLM.from_pretrained(
            locate(client.model.about.base),
            dtype=torch.float32,
            trust_remote_code=trusted(),
            weights_only=True,
        )
        if client.chats:
            base.generation_config = GenerationConfig.from_pretrained(str(written.folder))
        yield TorchRuntime(PeftModel.from_pretrained(base, str(written.folder)))


def write_adapter(
    folder: Path, model: PersonalModel, weights: Tensor, used: list[int], precision: str = "f32"
) -> tuple[LanguageModel, int]:
    """Write the fold of the `used` experts of a model, with weights (blocks, experts), as a PEFT
    adapter into a folder; return the fold and the adapter's rank.
    """
    family = model.backbone.family
    # if gate and up are one layer, its update holds both
    whole, ranks = folded(model, weights, used), 2 if family.fused else 1
    rank = whole.layout.rank * ranks
    save(folder / WEIGHTS, tensors_of(whole, rank, precision), {"format": "pt"})
    config(model, family, rank).save_pretrained(str(folder))
    return whole, rank


def _expert(model: PersonalModel, name: str | None) -> int:
    """Return an expert's index by name, or the first generalist's or only one's. Raises Refused."""
    if name is None and (model.layout.generalists or len(model.experts) == 1):
        return 0
    if name in model.experts:
        return model.experts.index(name)
    client = model.about.client
    problem = f"{client} has no expert {name!r}" if name else f"{client} has specialists only"
    raise Refused(problem, f"Name one by --expert: {', '.join(model.experts)}.")


def tensors_of(model: LanguageModel, rank: int, precision: str) -> dict[str, Tensor]:
    """Return the tensors of a model of one expert by PEFT's names, filled up with 0 to one rank."""
    tensors: dict[str, Tensor] = {}
    family = model.backbone.family
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        for name, (A, B) in _factors(block, family).items():
            if not model.layout.targets(name):
                continue
            more = rank - len(A)
            padded = {
                "A": nn.functional.pad(A, (0, 0, 0, more)),
                "B": nn.functional.pad(B, (0, more)),
            }
            for matrix, value in padded.items():
                path = f"{PREFIX}{family.blocks}.{i}.{name}.lora_{matrix}.weight"
                tensors[path] = value.to(DTYPES[precision]).contiguous()
    return tensors


def _factors(block: AdapterBlock, family: Family) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (r, in) and B (out, r) of each layer of a block by the family's names."""
    attention = {f"{family.attention}.{name}": block.attention[name] for name in family.linears}
    experts = cast(nn.ModuleDict, block.mlp.generalist)
    factors = {name: pair(lora) for name, lora in attention.items()}
    factors |= {family.within(theirs): pair(experts[ours]) for ours, theirs in family.mlp.items()}
    if family.fused:
        (A1, B1), (A2, B2) = pair(experts["gate"]), pair(experts["up"])
        both = torch.cat([A1, A2]), torch.block_diag(B1, B2)  # type: ignore[no-untyped-call]
        factors[family.within(family.fused)] = both
    return factors


def config(model: PersonalModel, family: Family, rank: int) -> Any:
    """Return PEFT's configuration with one rank everywhere and a scale of 1."""
    from peft import LoraConfig, TaskType

    paths = dict.fromkeys(family.paths.values())
    first = getattr(model.backbone.attentions[0], family.linears[0]).base
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=portable(model.about.base),
        r=rank,
        lora_alpha=rank,
        target_modules=[path for path in paths if model.layout.targets(path)],
        fan_in_fan_out=is_transposed(first),
        inference_mode=True,
    )


def _folded_away(model: PersonalModel) -> list[str]:
    """Return sentences on what a fold cannot hold."""
    if model.layout.experts == 1:
        return []
    how = f"1/{model.layout.experts} each."
    if model.layout.routed:
        how = "their mean routing weights over the client's validation text, in each block; the "
        how += "router is left out."
    return [
        f"The experts ({', '.join(model.experts)}) are folded into one update for each layer, "
        f"weighted by {how}",
        "An activation lies between the layers, so the fold is not the mixture: see its "
        "perplexity.",
    ]


def _left_out(model: PersonalModel, index: int) -> list[str]:
    """Return sentences on what an export of one expert leaves out."""
    n = model.layout.experts
    others = [name for j, name in enumerate(model.experts) if j != index]
    if not others:
        return []
    return [
        f"The other experts ({', '.join(others)}) are left out: a PEFT adapter holds one update "
        f"for each layer, always in use.",
        "The router is left out: every token uses the exported expert with weight 1."
        if model.layout.routed
        else f"The model gives each of its {n} experts the weight 1/{n}; the mean of their outputs "
        f"is no single update, because an activation lies between the layers.",
        "So the exported model is not the personal model: see its perplexity.",
    ]


def portable(base: str) -> str:
    """Return a base's name for other machines: "embedded", a Hub id, or the last part of a path."""
    local = base != EMBEDDED and Path(base if gguf_base.names_file(base) else locate(base)).exists()
    return Path(base).expanduser().name if local else base


def _location(base: str) -> tuple[str, str]:
    """Return Python code for the base's location, and the import that it needs."""
    if base == EMBEDDED:
        imported = "\nfrom coterie.models.architecture import locate  # the base comes with coterie"
        return 'locate("embedded")', imported
    if gguf_base.names_file(base):
        folder, _, file = base.rpartition("/")
        return f'"{folder if portable(base) == base else "path/to"}", gguf_file="{file}"', ""
    if portable(base) != base:
        return f'"path/to/{portable(base)}"', ""
    return repr(base), ""


def _readme(client: ClientModel, kept: str, left_out: list[str]) -> str:
    about, serving = client.model.about, client.serving
    missing = "\n".join(f"- {sentence}" for sentence in left_out)
    where, imported = _location(about.base)
    settings, loading = "", f"tokenizer = AutoTokenizer.from_pretrained({where})"
    if client.chats:
        settings = ", GenerationConfig"
        loading = (
            'model.generation_config = GenerationConfig.from_pretrained("this folder")\n'
            'tokenizer = AutoTokenizer.from_pretrained("this folder")'
        )
    return filled_readme(
        "peft",
        about=about,
        serving=serving,
        base=portable(about.base),
        kept=kept,
        settings=settings,
        imported=imported,
        where=where,
        loading=loading,
        missing=missing or "Nothing: this is the whole personal model.",
    )
