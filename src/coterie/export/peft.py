"""A personal model as a standard PEFT adapter: its fold, or one of its experts.

Programs read PEFT adapters differently: llama.cpp's converter ignores `use_rslora`, others know no
`rank_pattern`. So there is one rank, alpha is that rank, and B holds the scale.
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
from coterie.models.architecture import EMBEDDED, FAMILIES, Family, locate, trusted
from coterie.models.language import LanguageModel
from coterie.personal import About, PersonalModel

PREFIX = "base_model.model."  # PEFT's, of every module of the base
DTYPES = {"f32": torch.float32, "f16": torch.float16}
WEIGHTS, CONFIG, README = "adapter_model.safetensors", "adapter_config.json", "README.md"


class Peft(Format):
    """A PEFT adapter, which `PeftModel.from_pretrained(base, folder)` loads."""

    name = "peft"
    about = "an adapter for PEFT, vLLM and llama.cpp's converter, of every base; routing is folded"
    parts = ("fold", "generalist")

    def check(self, client: ClientModel, options: Options) -> None:
        if options.part == "generalist":
            _expert(client.model, options.expert)
        else:
            check_text(client)

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        model, family = client.model, _family(client.model)
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
        config(model.about, family, whole.layout.rank).save_pretrained(str(folder))
        readme = _readme(model.about, kept, left_out)
        write_atomically(folder / README, readme.encode())
        expected = f"the {'fold' if options.part == 'fold' else 'expert'} in coterie"
        return Written(
            folder,
            (WEIGHTS, CONFIG, README),
            torch.no_grad()(whole.forward),
            expected if left_out else "the personal model",
            tuple(left_out),
            {"rank": whole.layout.rank, "weights": weights.tolist(), "experts": model.experts},
        )

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[Runtime]:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(
            locate(client.model.about.base),
            dtype=torch.float32,
            trust_remote_code=trusted(),
            weights_only=True,
        )
        yield TorchRuntime(PeftModel.from_pretrained(base, str(written.folder)))

    def interface(self, client: ClientModel) -> dict[str, Any]:
        return interface(client.model.backbone.architecture.vocabulary)


def _family(model: PersonalModel) -> Family:
    name = model.backbone.architecture.family
    return next(family for family in FAMILIES if family.name == name)


def _expert(model: PersonalModel, wanted: str | None) -> int:
    """Return the number of an expert: the one asked for, the first generalist, or the only one.
    Raises Refused.
    """
    if wanted is None and (model.layout.generalists or len(model.experts) == 1):
        return 0
    if wanted in model.experts:
        return model.experts.index(wanted)
    client = model.about.client
    problem = f"{client} has no expert {wanted!r}" if wanted else f"{client} has specialists only"
    raise Refused(problem, f"Name one by --expert: {', '.join(model.experts)}.")


def tensors_of(model: LanguageModel, family: Family, precision: str) -> dict[str, Tensor]:
    """Return the tensors of a model of one expert, by PEFT's names."""
    found: dict[str, Tensor] = {}
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        loras = {f"{family.attention}.{name}": block.attention[name] for name in family.linears}
        experts = cast(nn.ModuleDict, block.mlp.generalist)
        loras |= {f"mlp.{theirs}": experts[ours] for ours, theirs in family.mlp.items()}
        for name, lora in loras.items():
            path = f"{PREFIX}{family.blocks}.{i}.{name}"
            for matrix in "AB":
                value = getattr(lora, matrix)[0].to(DTYPES[precision])
                found[f"{path}.lora_{matrix}.weight"] = value.contiguous()
    return found


def config(about: About, family: Family, rank: int) -> Any:
    """Return PEFT's configuration of one rank everywhere and a scale of 1."""
    from peft import LoraConfig, TaskType

    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=portable(about.base),
        r=rank,
        lora_alpha=rank,
        target_modules=[f"{family.attention}.{name}" for name in family.linears]
        + [f"mlp.{name}" for name in family.mlp.values()],
        fan_in_fan_out=family.name == "GPT-2",  # its Conv1D keeps the weight transposed
        inference_mode=True,
    )


def _folded_away(model: PersonalModel) -> list[str]:
    """Return what a fold cannot hold, sentence by sentence."""
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
    """Return what an export of one expert leaves out, sentence by sentence."""
    layout = model.layout
    others = [name for j, name in enumerate(model.experts) if j != index]
    if not others:
        return []
    found = [
        f"The other experts ({', '.join(others)}) are left out: a PEFT adapter holds one update "
        f"for each layer, always in use."
    ]
    if layout.routed:
        found.append("The router is left out: every token uses the exported expert with weight 1.")
    else:
        found.append(
            f"The model gives each of its {layout.experts} experts the weight "
            f"1/{layout.experts}; the mean of their outputs is no single "
            "update, because an activation lies between the layers."
        )
    found.append("So the exported model is not the personal model: see its perplexity.")
    return found


def portable(base: str) -> str:
    """Return the name of a base that says the same on every machine: "embedded", a Hub id, or of a
    local folder its last part.
    """
    return (
        Path(base).expanduser().name if base != EMBEDDED and Path(locate(base)).is_dir() else base
    )


def _loading(base: str) -> tuple[str, str]:
    """Python for where the base is, and what has to be imported for it."""
    if base == EMBEDDED:
        return (
            'locate("embedded")',
            "\nfrom coterie.models.architecture import locate  # the base comes with coterie",
        )
    if portable(base) != base:
        return f'"path/to/{portable(base)}"', ""
    return repr(base), ""


def _readme(about: About, kept: str, left_out: list[str]) -> str:
    missing = (
        "\n".join(f"- {sentence}" for sentence in left_out)
        or "Nothing: this is the whole personal model."
    )
    where, imported = _loading(about.base)
    return f"""---
library_name: peft
---
# {about.client}, exported from coterie

A PEFT adapter for the base model `{portable(about.base)}`: {kept},
of the client `{about.client}` after {about.round} rounds of `{about.method}`
(recipe `{about.recipe}`, seed {about.seed}).

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM{imported}

base = AutoModelForCausalLM.from_pretrained({where}, dtype="float32")
model = PeftModel.from_pretrained(base, "this folder")
```

`export.json` says how far it is from the personal model.

## What is not in it

{missing}
"""
