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
from coterie.export.fold import check_text, folded, mean_weights
from coterie.export.format import (
    ClientModel,
    Format,
    Options,
    Runtime,
    TorchRuntime,
    Written,
    interface,
)
from coterie.models.adapter import AdapterBlock
from coterie.models.architecture import EMBEDDED, locate, trusted
from coterie.models.families import Family, is_transposed
from coterie.models.language import LanguageModel
from coterie.models.lora import LoRA
from coterie.personal import PersonalModel

# PEFT's prefix of every module of the base
PREFIX = "base_model.model."
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
        model, family = client.model, client.model.backbone.family
        if options.part == "generalist":
            index = _expert(model, options.expert)
            weights = torch.zeros(len(model.adapter.blocks), model.layout.experts)
            weights[:, index], used = 1, [index]
            kept = f"expert {model.experts[index]} of every MLP and the attention's updates"
            left_out = _left_out(model, index)
        else:
            weights, used = mean_weights(client), [*range(model.layout.experts)]
            kept = "all experts of every MLP with fixed weights, and the attention's updates"
            left_out = _folded_away(model)
        whole = folded(model, weights, used)
        save(folder / WEIGHTS, tensors_of(whole, family, options.precision), {"format": "pt"})
        config(model, family, rank := rank_of(whole, family)).save_pretrained(str(folder))
        readme = _readme(client, kept, left_out)
        write_atomically(folder / README, readme.encode())
        if client.chats:
            client.serving.save(folder)
        expected = f"the {'fold' if options.part == 'fold' else 'expert'} in coterie"
        return Written(
            folder,
            tuple(sorted(path.name for path in folder.iterdir())),
            torch.no_grad()(whole.forward),
            expected if left_out else "the personal model",
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

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return interface(client.model.backbone.architecture.vocabulary)


def _expert(model: PersonalModel, name: str | None) -> int:
    """Return the index of the expert with a name; of None, the first generalist or the only expert.
    Raises Refused.
    """
    if name is None and (model.layout.generalists or len(model.experts) == 1):
        return 0
    if name in model.experts:
        return model.experts.index(name)
    client = model.about.client
    problem = f"{client} has no expert {name!r}" if name else f"{client} has specialists only"
    raise Refused(problem, f"Name one by --expert: {', '.join(model.experts)}.")


def tensors_of(model: LanguageModel, family: Family, precision: str) -> dict[str, Tensor]:
    """Return the tensors of a model of one expert by PEFT's names, all of rank `rank_of`."""
    tensors: dict[str, Tensor] = {}
    rank = rank_of(model, family)
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        for name, factors in _factors(block, family).items():
            A, B = _padded(*factors, rank)
            for matrix, value in (("A", A), ("B", B)):
                path = f"{PREFIX}{family.blocks}.{i}.{name}.lora_{matrix}.weight"
                tensors[path] = value.to(DTYPES[precision]).contiguous()
    return tensors


def rank_of(model: LanguageModel, family: Family) -> int:
    """Return the rank of the adapter: twice the model's if gate and up are one layer, whose update
    holds both.
    """
    return model.layout.rank * (2 if family.fused else 1)


def _factors(block: AdapterBlock, family: Family) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A (r, in) and B (out, r) of each layer of a block by the family's names."""
    attention = {f"{family.attention}.{name}": block.attention[name] for name in family.linears}
    experts = cast(nn.ModuleDict, block.mlp.generalist)
    factors = {name: _of(lora) for name, lora in attention.items()}
    factors |= {family.within(theirs): _of(experts[ours]) for ours, theirs in family.mlp.items()}
    if family.fused:
        (A1, B1), (A2, B2) = _of(experts["gate"]), _of(experts["up"])
        both = torch.cat([A1, A2]), torch.block_diag(B1, B2)  # type: ignore[no-untyped-call]
        factors[family.within(family.fused)] = both
    return factors


def _of(lora: nn.Module) -> tuple[Tensor, Tensor]:
    return cast(LoRA, lora).A.detach()[0], cast(LoRA, lora).B.detach()[0]


def _padded(A: Tensor, B: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of a higher rank with the same product."""
    more = rank - len(A)
    return nn.functional.pad(A, (0, 0, 0, more)), nn.functional.pad(B, (0, more))


def config(model: PersonalModel, family: Family, rank: int) -> Any:
    """Return PEFT's configuration with one rank everywhere and a scale of 1."""
    from peft import LoraConfig, TaskType

    first = getattr(model.backbone.attentions[0], family.linears[0]).base
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=portable(model.about.base),
        r=rank,
        lora_alpha=rank,
        target_modules=[f"{family.attention}.{name}" for name in family.linears]
        + [family.within(name) for name in dict.fromkeys(family.mlp.values())],
        fan_in_fan_out=is_transposed(first),
        inference_mode=True,
    )


def _folded_away(model: PersonalModel) -> list[str]:
    """Return sentences on what a fold cannot hold."""
    if model.layout.experts == 1:
        return []
    routed = model.layout.routed
    how = (
        "their mean routing weights over the client's validation text, in each block"
        if routed
        else f"1/{model.layout.experts} each"
    )
    return [
        f"The experts ({', '.join(model.experts)}) are folded into one update for each layer, "
        f"weighted by {how}" + ("; the router is left out." if routed else "."),
        "An activation lies between the layers, so the fold is not the mixture: see its "
        "perplexity.",
    ]


def _left_out(model: PersonalModel, index: int) -> list[str]:
    """Return sentences on what an export of one expert leaves out."""
    layout = model.layout
    others = [name for j, name in enumerate(model.experts) if j != index]
    if not others:
        return []
    sentences = [
        f"The other experts ({', '.join(others)}) are left out: a PEFT adapter holds one update "
        f"for each layer, always in use."
    ]
    if layout.routed:
        sentences.append(
            "The router is left out: every token uses the exported expert with weight 1."
        )
    else:
        sentences.append(
            f"The model gives each of its {layout.experts} experts the weight "
            f"1/{layout.experts}; the mean of their outputs is no single "
            "update, because an activation lies between the layers."
        )
    sentences.append("So the exported model is not the personal model: see its perplexity.")
    return sentences


def portable(base: str) -> str:
    """Return the name of a base for other machines: "embedded", a Hub id, or the last part of a
    local folder.
    """
    return (
        Path(base).expanduser().name if base != EMBEDDED and Path(locate(base)).is_dir() else base
    )


def _location(base: str) -> tuple[str, str]:
    """Return Python code for the base's location, and the import that it needs."""
    if base == EMBEDDED:
        return (
            'locate("embedded")',
            "\nfrom coterie.models.architecture import locate  # the base comes with coterie",
        )
    if portable(base) != base:
        return f'"path/to/{portable(base)}"', ""
    return repr(base), ""


def _readme(client: ClientModel, kept: str, left_out: list[str]) -> str:
    about, serving = client.model.about, client.serving
    missing = (
        "\n".join(f"- {sentence}" for sentence in left_out)
        or "Nothing: this is the whole personal model."
    )
    where, imported = _location(about.base)
    settings, loading = "", f"tokenizer = AutoTokenizer.from_pretrained({where})"
    if client.chats:
        settings = ", GenerationConfig"
        loading = (
            'model.generation_config = GenerationConfig.from_pretrained("this folder")\n'
            'tokenizer = AutoTokenizer.from_pretrained("this folder")'
        )
    return f"""---
library_name: peft
---
# {about.client}, exported from coterie

A PEFT adapter for the base model `{portable(about.base)}`: {kept},
of the client `{about.client}` after {about.round} rounds of `{about.method}`
(recipe `{about.recipe}`, seed {about.seed}).

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer{settings}{imported}

base = AutoModelForCausalLM.from_pretrained({where}, dtype="float32")
model = PeftModel.from_pretrained(base, "this folder")
{loading}
{serving.transformers_program}```

{serving.usage}

`export.json` says how far it is from the personal model.

## What is not in it

{missing}
"""
