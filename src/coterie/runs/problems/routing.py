"""How trained routers treat real text, token by token, for reports (CoMiGS, Fig. 3 and 12-17)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.core.protocol import ClientId
from coterie.core.result import Mixture, Routing
from coterie.data.chats.splits import ChatSplit
from coterie.data.splits import Split
from coterie.models.language import LanguageModel

TOKENS = 80  # of each text
CLIENTS = 8  # at most: every model reads every text, and nobody looks at more pictures
END, PART = "¶", "◌"  # the end of a document, and a token that is but a part of a character


def look(
    clients: Sequence[ClientId],
    model: Callable[[ClientId], LanguageModel],
    splits: Mapping[ClientId, Split],
    tokenizer: Any,
) -> Routing:
    """Return the routing of the first `CLIENTS` clients' models at the beginnings of all their
    splits; a `model` is valid until the next one is requested.
    """
    clients = clients[:CLIENTS]
    windows = {i: beginning(splits[i]) for i in clients}
    texts = {i: pieces(tokenizer, rows.flatten().tolist()[:TOKENS]) for i, rows in windows.items()}
    experts, weights, depth, blocks = {}, {}, None, None
    for i in clients:
        reader = model(i)
        if reader.layout.routed:
            depth = len(reader.backbone.architecture.blocks)
            blocks = sorted({0, (depth - 1) // 2, depth - 1})
            experts[i] = Mixture(reader.layout.generalists, reader.layout.specialists)
            weights[i] = {text: _weights(reader, rows, blocks) for text, rows in windows.items()}
    return Routing(texts, experts, weights, depth, blocks)


def _weights(
    model: LanguageModel, windows: Tensor, blocks: Sequence[int]
) -> list[list[list[float]]]:
    """Return weights (blocks, tokens, n), rounded to three places."""
    weights = model.routing(windows)[list(blocks)].flatten(1, 2)[:, :TOKENS]
    return [[[round(w, 3) for w in token] for token in block] for block in weights.tolist()]


def beginning(split: Split) -> Tensor:
    """Return (W, C) int64: the split's first windows with `TOKENS` tokens, or all; or the first
    conversation or document with as many, or the longest.
    """
    if isinstance(split, ChatSplit):
        number = int(np.minimum(split.lengths, TOKENS).argmax())
        return torch.from_numpy(split.conversation(number))[None]
    count = min(-(-TOKENS // split.context), split.windows)
    windows: Tensor = split.take(np.arange(count))[:, :-1].to(torch.int64)
    return windows


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """Return each token's share of the decoded text, with its spaces.

    A character of several byte-level tokens is assigned to the last of them; the others are `PART`.
    The end token is `END`.
    """
    texts: list[str] = []
    start, read = 0, ""  # of the document, and what is decoded of it so far
    for k, id in enumerate(ids):
        if id == tokenizer.eos_token_id:
            texts.append(END)
            start, read = k + 1, ""
            continue
        now = tokenizer.decode(
            ids[start : k + 1], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        if now.endswith("\ufffd"):
            texts.append(PART)
        else:
            texts.append(now.removeprefix(read))
            read = now
    return texts
