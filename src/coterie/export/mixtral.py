"""A personal model as a stock checkpoint of a mixture of experts: each expert is a whole MLP plus
its update, and the router is the checkpoint's gate. Nothing is approximated.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from coterie.core.errors import Refused
from coterie.core.files import write_atomically
from coterie.export.format import (
    ClientModel,
    Format,
    Options,
    Runtime,
    TorchRuntime,
    Written,
    filled_readme,
)
from coterie.export.layers import FAMILY, base_tensors, gate_of, head_width, updates
from coterie.models.adapter import AdapterBlock
from coterie.personal import PersonalModel

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
README = "README.md"
OTHERS = (
    "Use --format onnx, which is exact for any base, or --format peft, which holds a fold of the "
    "router."
)


@dataclass(frozen=True)
class Relative:
    """A mixture of experts whose blocks equal those of a family except for the MLP."""

    kind: str  # its `model_type`
    experts: str  # the setting for the number of experts
    width: str  # the setting for the width of an expert
    # settings with which it computes the same as a personal model
    fixed: Mapping[str, Any] = field(default_factory=dict)
    # settings of the family that it lacks, with the values that turn them off
    plain: Mapping[str, Any] = field(default_factory=dict)
    zeros: tuple[str, ...] = ()  # tensors of its MLP that a personal model lacks; zeros add nothing


_MIXTRAL = Relative(
    "mixtral", "num_local_experts", "intermediate_size", {"router_jitter_noise": 0.0}
)
_EVERY_BLOCK = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
_QWEN3_MOE = Relative(
    "qwen3_moe", "num_experts", "moe_intermediate_size", _EVERY_BLOCK, {"use_sliding_window": False}
)
_SHARED = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
_QWEN2_MOE = replace(
    _QWEN3_MOE,
    kind="qwen2_moe",
    # the smallest width that blocks of 32 divide
    fixed=_EVERY_BLOCK | {"shared_expert_intermediate_size": 32},
    zeros=("shared_expert_gate.weight", *(f"shared_expert.{name}" for name in _SHARED)),
)
RELATIVES = {"llama": _MIXTRAL, "mistral": _MIXTRAL, "qwen2": _QWEN2_MOE, "qwen3": _QWEN3_MOE}


class Mixtral(Format):
    """A checkpoint that `AutoModelForCausalLM.from_pretrained(folder)` loads without coterie."""

    name = "mixtral"
    about = "a checkpoint of transformers with the router, of Llama, Mistral, Qwen2 and Qwen3"
    precisions = ("f32", "bf16", "f16")

    def check(self, client: ClientModel, options: Options) -> None:
        relative_of(client, self.name)
        model = client.model
        with torch.device("meta"):
            blank = _blank(model).state_dict()
        tensors = _tensors(model, _no_update, blank)
        for name in sorted(blank.keys() ^ tensors.keys()):
            whose = "the base has" if name in tensors else "the base lacks"
            raise refused(client, f"{whose} {name}, unlike the {_kind(model)}", self.name)

    def write(self, client: ClientModel, folder: Path, options: Options) -> Written:
        model, dtype = client.model, DTYPES[options.precision]
        with torch.device("meta"):
            blank = _blank(model)
        tensors = _tensors(model, _updated, blank.state_dict())
        blank.load_state_dict({n: t.to(dtype) for n, t in tensors.items()}, assign=True)
        blank.tie_weights()
        blank.config.dtype = dtype
        blank.generation_config = client.serving.generation
        blank.save_pretrained(folder)
        client.serving.save(folder)
        write_atomically(folder / README, _readme(client, options.precision).encode())
        files = sorted(path.name for path in folder.iterdir())
        return Written(folder, tuple(files), client.logits)

    @contextmanager
    def runtime(self, client: ClientModel, written: Written) -> Iterator[Runtime]:
        from transformers import AutoModelForCausalLM

        yield TorchRuntime(
            AutoModelForCausalLM.from_pretrained(
                str(written.folder), dtype=torch.float32, trust_remote_code=False
            )
        )


def _kind(model: PersonalModel) -> str:
    return RELATIVES[model.config.model_type].kind


def refused(client: ClientModel, problem: str, format: str) -> Refused:
    """Return the refusal of a model that a format cannot hold."""
    return Refused(f"{client.client}: --format {format}: {problem}", OTHERS)


def relative_of(client: ClientModel, format: str, kinds: Collection[str] = RELATIVES) -> Relative:
    """Return the mixture of experts that can hold a personal model. Raises Refused if the base's
    `model_type` is not among `kinds`, or the mixture lacks a part of the model.
    """
    model = client.model
    kind = model.config.model_type
    if kind not in kinds:
        known = ", ".join(kinds)
        problem = f"{kind} has no relative with experts whose gate is a router (have: {known})"
        raise refused(client, problem, format)
    if any(router.bias is not None for router in model.adapter.routers()):
        problem = "its routers have biases, and gates of such models none"
        raise refused(client, problem, format)
    for name, plain in RELATIVES[kind].plain.items():
        if getattr(model.config, name, plain) != plain:
            raise refused(client, f"{name} of the base is not {plain}", format)
    return RELATIVES[kind]


def _blank(model: PersonalModel) -> Any:
    """Return the mixture of experts with the base's configuration, on the current device."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    relative, layout = RELATIVES[model.config.model_type], model.layout
    kind: Any = CONFIG_MAPPING[relative.kind]
    config, others = model.config, ("model_type", "architectures", "transformers_version", "dtype")
    known = kind().to_dict().keys() - {*others}
    settings = {name: value for name, value in config.to_dict().items() if name in known}
    settings |= {
        **relative.fixed,
        "head_dim": head_width(config),
        relative.experts: layout.experts,
        relative.width: config.intermediate_size,
        "num_experts_per_tok": layout.active,
    }
    return AutoModelForCausalLM.from_config(kind(**settings), trust_remote_code=False)


def _no_update(weight: Tensor, lora: tuple[Tensor, Tensor]) -> Tensor:
    """Return the shape of a layer's updated weight, on the meta device."""
    return torch.empty(*lora[1].shape[:-1], weight.shape[-1], device="meta")


def _updated(weight: Tensor, lora: tuple[Tensor, Tensor]) -> Tensor:
    """Return W + B A, (..., out, in), for one update or a stack of updates."""
    return weight.float() + lora[1] @ lora[0]


def _tensors(model: PersonalModel, updated: Any, blank: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the checkpoint's tensors by name: the base's, with experts in place of each MLP, each
    weight through `updated`. Of the tensors in `blank` only the shapes are used.
    """
    tensors = base_tensors(model)
    for i, block in enumerate(cast(Iterable[AdapterBlock], model.adapter.blocks)):
        path = f"{FAMILY.blocks}.{i}"
        new = {
            name: updated(tensors.pop(f"{path}.{name}.weight"), update)
            for name, update in updates(block).items()
        }
        # (n, out, in)
        first, up, down = (new.pop(f"mlp.{FAMILY.mlp[name]}") for name in ("gate", "up", "down"))
        tensors |= {f"{path}.{name}.weight": weight for name, weight in new.items()}
        gate = gate_of(block, model.layout.experts)
        tensors[f"{path}.mlp.experts.gate_up_proj"] = torch.cat([first, up], dim=1)
        tensors[f"{path}.mlp.experts.down_proj"] = down
        tensors[f"{path}.mlp.gate.weight"] = gate
        for name in RELATIVES[model.config.model_type].zeros:
            key = f"{path}.mlp.{name}"
            tensors[key] = gate.new_zeros(blank[key].shape)
    return tensors


def _readme(client: ClientModel, precision: str) -> str:
    return filled_readme(
        "mixtral",
        model=client.model,
        serving=client.serving,
        kind=_kind(client.model),
        precision=precision,
        note=client.note,
    )
