"""Batches of packed conversations: token ids with what is a target and where each one begins."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ChatBatch:
    """One batch, whose rows hold one or several conversations each, one behind the other.

    Args:
        ids: (B, C + 1) int64 token ids; 0 behind the end of a row.
        counted: (B, C + 1) bool: which tokens the loss and every score count, as targets. Never the
            first of a conversation.
        positions: (B, C + 1) int64: each token's place in its conversation; -1 behind the end.
    """

    ids: Tensor
    counted: Tensor
    positions: Tensor

    def __len__(self) -> int:
        return len(self.ids)

    def at(self, rows: slice | Tensor) -> "ChatBatch":
        """Return some rows."""
        return ChatBatch(self.ids[rows], self.counted[rows], self.positions[rows])

    def split(self, rows: int) -> "list[ChatBatch]":
        """Return batches of at most `rows` rows each, in order."""
        return [self.at(slice(start, start + rows)) for start in range(0, len(self), rows)]

    @property
    def predictions(self) -> int:
        """Targets that count."""
        return int(self.counted[:, 1:].sum())

    @property
    def packed(self) -> bool:
        """Whether a row holds more than one conversation."""
        return bool(((self.positions == 0).sum(dim=1) > 1).any())

    @classmethod
    def joined(cls, batches: Sequence["ChatBatch"]) -> "ChatBatch":
        """Return the rows of several batches, padded to the widest."""
        width = max(batch.ids.shape[1] for batch in batches)

        def wide(values: Tensor, behind: int) -> Tensor:
            return torch.nn.functional.pad(values, (0, width - values.shape[1]), value=behind)

        return cls(
            torch.cat([wide(batch.ids, 0) for batch in batches]),
            torch.cat([wide(batch.counted, False) for batch in batches]),
            torch.cat([wide(batch.positions, -1) for batch in batches]),
        )
