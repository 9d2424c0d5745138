"""Batches as rows of token ids, from windows of running text or from documents."""

import torch
from torch import Tensor

from coterie.data.chats.splits import ChatBatch
from coterie.models.windows import TextBatch


def rows_of(batch: TextBatch, width: int | None = None) -> ChatBatch:
    """Return a batch as rows with masks; in running text every token is present and counts.

    Args:
        batch: A batch of a split.
        width: The most tokens of a row; None: all.
    """
    if isinstance(batch, Tensor):
        everywhere = torch.ones_like(batch, dtype=torch.bool)
        batch = ChatBatch(batch, everywhere, torch.arange(batch.shape[1]).expand_as(batch))
    parts = (batch.ids, batch.counted, batch.positions)
    return ChatBatch(*(values[:, :width] for values in parts))
