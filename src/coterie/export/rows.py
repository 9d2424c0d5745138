"""Rows of token ids, whether they are windows of running text or documents, one to a row."""

import torch
from torch import Tensor

from coterie.data.chats.batches import ChatBatch
from coterie.models.windows import TextBatch


def rows_of(batch: TextBatch, width: int | None = None) -> ChatBatch:
    """Return a batch as rows that say which of their tokens are there and which count: of running
    text all.

    Args:
        batch: As a split gives it.
        width: Tokens of a row, at most; None: all.
    """
    if isinstance(batch, Tensor):
        everywhere = torch.ones_like(batch, dtype=torch.bool)
        batch = ChatBatch(batch, everywhere, torch.arange(batch.shape[1]).expand_as(batch))
    parts = (batch.ids, batch.counted, batch.positions)
    return ChatBatch(*(values[:, :width] for values in parts))
