"""The tensors of a personal model for export: its base's, the factors of each update, the routers;
and a fold, one update for each layer in place of several experts and a router, for programs without
routing. As the experts' hidden layers are not linear, the fold only approximates their mixture.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from coterie.adapt.distillation import distil
from coterie.core.errors import Refused
from coterie.export.format import ClientModel, rows_of
from coterie.models.adapter import AdapterBlock
from coterie.models.families import FAMILIES
from coterie.models.language import LanguageModel
from coterie.models.mixture import LoRA
from coterie.personal import PersonalModel
from coterie.personal.inference.packing import experts_of
from coterie.personal.mixture import PersonalMixture, mixed_parameters

FAMILY = next(family for family in FAMILIES if family.name == "Llama-like")
ROWS = 16  # windows in a batch


def base_tensors(model: PersonalModel) -> dict[str, Tensor]:
    """Return the base's tensors by its own names, without the `base` of a backbone's slots."""
    state: dict[str, Tensor] = model.backbone.model.state_dict()
    return {name.replace(".base.", "."): tensor for name, tensor in state.items()}


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(width)


def pair(lora: nn.Module) -> tuple[Tensor, Tensor]:
    """Return A (r, in) and B (out, r) of an update, B multiplied by the scale."""
    update = cast(LoRA, lora)
    return update.A.detach()[0], update.gamma * update.B.detach()[0]


def updates(block: AdapterBlock) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of each layer by the base's names, B multiplied by the scale: (r, in) and
    (out, r) in the attention, (n, r, in) and (n, out, r) of all experts in the MLP.
    """
    attention = {f"{FAMILY.attention}.{n}": pair(block.attention[n]) for n in FAMILY.linears}
    experts = {theirs: experts_of(block.mlp, ours) for ours, theirs in FAMILY.mlp.items()}
    return attention | {f"mlp.{n}": (A, block.mlp.gamma * B) for n, (A, B) in experts.items()}


def gate_of(block: AdapterBlock, experts: int) -> Tensor:
    """Return a router's weight, (n, d_model); zeros if all experts have the same weight."""
    router = block.mlp.router
    if router is not None:
        return router.weight.detach()
    down = experts_of(block.mlp, "down")[1]
    return down.new_zeros((experts, down.shape[1]))


def check_text(client: ClientModel) -> None:
    """Refuse a model with a router if the client's validation text is absent."""
    if client.model.layout.routed and client.valid is None:
        raise Refused(
            f"{client.client}: a fold needs the client's validation text, which is not here: "
            f"{client.absent}",
            "Give the client's own text by --data, or export one expert by --part generalist.",
        )


def mean_weights(client: ClientModel) -> Tensor:
    """Return (blocks, n) fp32: the mean routing weights on the validation text; no router: 1/n."""
    model = client.model
    blocks, experts = len(model.adapter.blocks), model.layout.experts
    if not model.layout.routed:
        return torch.full((blocks, experts), 1 / experts)
    check_text(client)
    assert client.valid is not None
    total, tokens = torch.zeros(blocks, experts, dtype=torch.float64), 0
    for rows in map(rows_of, client.valid.scoring(ROWS)):
        present = rows.positions[:, 1:] > 0  # inputs that have a next token
        weights = model.routing(rows.ids[:, :-1]).cpu().double()  # (blocks, B, C, n)
        total += weights[:, present].sum(dim=1)
        tokens += int(present.sum())
    return (total / tokens).float()


def folded(model: PersonalModel, weights: Tensor, experts: Sequence[int]) -> LanguageModel:
    """Return a model of one expert, always in use, whose updates are sum_j w_j gamma B_j A_j, with
    w (blocks, n) and j in `experts`.

    The experts' factors are concatenated, so their ranks add up. All updates, the attention's too,
    have one rank, and gamma = 1: other programs only multiply A and B.
    """
    rank = max(model.layout.rank, len(experts) * model.layout.expert_rank)
    layout = replace(
        model.layout,
        generalists=1,
        specialists=0,
        biased=False,
        rank=rank,
        mlp_rank=None,
        alpha=math.sqrt(rank),
        use_rslora=True,
        balance="none",
    )
    fold, updates = LanguageModel(model.backbone, layout), model.adapter.updates()
    for path, lora in fold.adapter.requires_grad_(False).loras().items():
        A, B = updates[path.replace(".generalist", "")]
        if ".mlp." in path:
            w = weights[int(path.split(".")[1]), [*experts], None, None]
            A, B = A[[*experts]], w * B[[*experts]]
        A, B = A.flatten(0, 1), torch.cat([*B], dim=1)
        lora.A.zero_()[0, : len(A)], lora.B.zero_()[0, :, : len(A)] = A, B
    return fold


def single(client: ClientModel, say: Callable[[str], None]) -> ClientModel:
    """Return a client with one adapter in place of a mixture, if it has one: the fold of the parts'
    parameters, mixed, and distilled from the mixture if the client's own text is here. Raises
    Refused if a part has a router and that text is absent.
    """
    mixture = client.model
    if not isinstance(mixture, PersonalMixture):
        return client
    parts = [replace(client, model=part) for part in mixture.parts.values()]
    constants = [w * mean_weights(part) for w, part in zip(mixture.weights, parts, strict=True)]
    mixed = mixed_parameters(mixture, constants)
    fold = folded(mixed, torch.cat(constants, dim=1), range(mixed.layout.experts))
    model = PersonalModel(fold, replace(mixture.about, layout=fold.layout))
    shares = ", ".join(f"{share:.0%} {name}" for name, share in mixture.shares.items())
    note = f"{client.client}: one adapter in place of a mixture of predictions ({shares}), "
    if client.train is None or client.valid is None:
        note += f"their parameters mixed; what that costs is unknown: {client.absent}."
    else:
        say(f"{client.client}: distilled from its mixture ...")
        whole, before, after = distil(mixture, model, client.train, client.valid)
        note += f"distilled on the client's own text: validation perplexity {after:.2f}, of the "
        note += f"mixture {whole:.2f} ({after / whole - 1:+.1%}), of parameters mixed {before:.2f}."
    return replace(client, model=model, mixture=mixture, note=note)
