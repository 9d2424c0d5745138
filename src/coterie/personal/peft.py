"""One expert and the attention of a personal model as a standard PEFT adapter, which any program
that knows PEFT can load.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor

from coterie.core.errors import Refused
from coterie.core.files import load, make_folder, save, write_atomically
from coterie.models.adapter import Adapter
from coterie.models.architecture import EMBEDDED, FAMILIES, Architecture, Family, locate
from coterie.models.lora import LoRA
from coterie.personal.artifact import WEIGHTS, About, check_size, expert_names, fill, read_about
from coterie.personal.loading import folder_of

PREFIX = "base_model.model."  # PEFT's, of every module of the base


def export(
    run: Path | str,
    client: str | None,
    out: Path,
    expert: str | None = None,
    base: str | None = None,
) -> list[str]:
    """Write `adapter_model.safetensors`, `adapter_config.json` and a `README.md` that says what a
    PEFT adapter cannot hold.

    Args:
        run: A run's folder, or a client's folder in it.
        client: The client's id.
        out: An empty or new folder.
        expert: G, G2, S1 ... (see `PersonalModel.experts`); the first generalist by default, or the
            only expert.
        base: Path or Hub id of the base; default: as in the client's JSON.

    Returns:
        What the adapter leaves out, sentence by sentence; nothing if it is the whole model.

    Raises:
        CheckpointError: There is no such client, or its files are damaged.
        Refused: There is no such expert, or `out` is not empty.
        SaveError: The adapter could not be written.
    """
    folder = folder_of(run, client)
    about = read_about(folder)
    about = about if base is None else replace(about, base=base)
    role, index, label = _expert(about, expert)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refused(f"{out} is not an empty folder", "Give --out a new folder.")
    architecture = Architecture.from_base(about.base)
    tensors_of, _ = load(folder / WEIGHTS)
    check_size(architecture, about, tensors_of, str(folder / WEIGHTS))
    adapter = Adapter(architecture, about.layout)
    fill(dict(adapter.named_parameters()), tensors_of, str(folder / WEIGHTS))
    family = next(family for family in FAMILIES if family.name == architecture.family)
    tensors: dict[str, Tensor] = {}
    for i, block in enumerate(adapter.blocks):
        path = f"{PREFIX}{family.blocks}.{i}"
        for name, lora in _of_block(block, family, role):
            at = index if name.startswith("mlp.") else 0
            tensors[f"{path}.{name}.lora_A.weight"] = lora.A.detach()[at].contiguous()
            tensors[f"{path}.{name}.lora_B.weight"] = lora.B.detach()[at].contiguous()
    left_out = _left_out(about, label)
    make_folder(out)
    save(out / "adapter_model.safetensors", tensors, {"format": "pt"})
    _config(about, family).save_pretrained(str(out))
    write_atomically(out / "README.md", _readme(about, label, left_out).encode())
    return left_out


def _expert(about: About, wanted: str | None) -> tuple[str, int, str]:
    """Role, place among the experts of that role, and name of an expert."""
    names = [
        (role, j, name)
        for role, of_role in expert_names(about.layout).items()
        for j, name in enumerate(of_role)
    ]
    if wanted is None and (about.layout.generalists or len(names) == 1):
        return names[0]
    for found in names:
        if found[2] == wanted:
            return found
    problem = (
        f"{about.client} has no expert {wanted!r}"
        if wanted
        else f"{about.client} has specialists only"
    )
    raise Refused(problem, f"Name one by --expert: {', '.join(name for _, _, name in names)}.")


def _of_block(block: Any, family: Family, role: str) -> list[tuple[str, LoRA]]:
    """Return the updates of one transformer block by the path of the base's layer within it."""
    experts = getattr(block.mlp, role)
    attention = [(f"{family.attention}.{name}", block.attention[name]) for name in family.linears]
    return attention + [(f"mlp.{theirs}", experts[ours]) for ours, theirs in family.mlp.items()]


def _config(about: About, family: Family) -> Any:
    from peft import LoraConfig, TaskType

    layout = about.layout
    return LoraConfig(
        task_type=TaskType.CAUSAL_LM,
        base_model_name_or_path=portable(about.base),
        r=layout.rank,
        rank_pattern={}
        if layout.expert_rank == layout.rank
        else {f"mlp.{name}": layout.expert_rank for name in family.mlp.values()},
        lora_alpha=layout.alpha,
        use_rslora=True,
        target_modules=[f"{family.attention}.{name}" for name in family.linears]
        + [f"mlp.{name}" for name in family.mlp.values()],
        fan_in_fan_out=family.name == "GPT-2",  # its Conv1D keeps the weight transposed
        inference_mode=True,
    )


def _left_out(about: About, label: str) -> list[str]:
    layout = about.layout
    names = chain.from_iterable(expert_names(layout).values())
    others = [name for name in names if name != label]
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
    found.append(
        "So the exported model is not the personal model, and its perplexity is another one: "
        "measure it before use."
    )
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


def _readme(about: About, label: str, left_out: list[str]) -> str:
    kept = f"expert {label} of every MLP and the attention's updates"
    missing = (
        "\n".join(f"- {sentence}" for sentence in left_out)
        or "Nothing: this is the whole personal model."
    )
    where, imported = _loading(about.base)
    return f"""---
library_name: peft
---
# {about.client}, exported from coterie

A PEFT adapter for the base model `{portable(about.base)}`: {kept}, rank-stabilised LoRA,
of the client `{about.client}` after {about.round} rounds of `{about.method}`
(recipe `{about.recipe}`, seed {about.seed}).

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM{imported}

base = AutoModelForCausalLM.from_pretrained({where}, dtype="float32")
model = PeftModel.from_pretrained(base, "this folder")
```

## What is not in it

{missing}
"""
