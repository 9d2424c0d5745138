"""One update for each layer in place of several experts and a router: what programs without
routing can hold.

The experts' hidden layers are not linear, so the update with the mean weights is an approximation
of their mixture.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from coterie.core.errors import Refused
from coterie.export.format import ClientModel
from coterie.export.rows import rows_of
from coterie.models.adapter import AdapterBlock
from coterie.models.language import LanguageModel
from coterie.models.lora import LoRA
from coterie.personal import PersonalModel
from coterie.personal.inference.packing import experts_of

ROWS = 16  # windows at a time


def check_text(client: ClientModel) -> None:
    """Refuse a model with a router whose client's validation text is not here."""
    if client.model.layout.routed and client.valid is None:
        raise Refused(
            f"{client.client}: a fold needs the client's validation text, which is not here: "
            f"{client.absent}",
            "Give the client's own text by --data, or export one expert by --part generalist.",
        )


def mean_weights(client: ClientModel) -> Tensor:
    """Return the mean routing weight of each expert over the client's validation text, (blocks, n)
    fp32; without a router, 1/n.
    """
    model = client.model
    blocks, experts = len(model.adapter.blocks), model.layout.experts
    if not model.layout.routed:
        return torch.full((blocks, experts), 1 / experts)
    assert client.valid is not None
    total, tokens = torch.zeros(blocks, experts, dtype=torch.float64), 0
    for rows in map(rows_of, client.valid.scoring(ROWS)):
        present = rows.positions[:, 1:] > 0  # inputs that have a next token
        weights = model.routing(rows.ids[:, :-1]).cpu().double()  # (blocks, B, C, n)
        total += weights[:, present].sum(dim=1)
        tokens += int(present.sum())
    return (total / tokens).float()


def folded(model: PersonalModel, weights: Tensor, experts: Sequence[int]) -> LanguageModel:
    """Return a model of one expert, always in use, whose updates are sum_j w_j gamma B_j A_j.

    Every update, those of the attention included, has one rank: that of all its experts together,
    one behind the other. Its gamma is 1, so A and B are what other programs multiply.

    Args:
        model: The personal model.
        weights: w, (blocks, n).
        experts: Those j that it is made of.
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
        balance="none",
    )
    fold = LanguageModel(model.backbone, layout)
    for parameter in fold.adapter.parameters():
        parameter.requires_grad_(False).zero_()
    olds = cast(Iterable[AdapterBlock], model.adapter.blocks)
    news = cast(Iterable[AdapterBlock], fold.adapter.blocks)
    for old, new, w in zip(olds, news, weights, strict=True):
        for name, lora in new.attention.items():
            theirs = cast(LoRA, old.attention[name])
            _place(cast(LoRA, lora), theirs.A[0], theirs.gamma * theirs.B[0])
        for name, lora in cast(nn.ModuleDict, new.mlp.generalist).items():
            A, B = experts_of(old.mlp, name)  # (n, r, in), (n, out, r)
            scaled = torch.cat([w[j] * old.mlp.gamma * B[j] for j in experts], dim=1)
            _place(cast(LoRA, lora), A[list(experts)].flatten(0, 1), scaled)
    return fold


def _place(lora: LoRA, A: Tensor, B: Tensor) -> None:
    """Write (r, in) and (out, r) into an update of at least this rank; the rest stays 0."""
    lora.A[0, : len(A)], lora.B[0, :, : len(A)] = A, B
