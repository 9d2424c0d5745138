"""A summary of a recipe's data before any training."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from coterie.core.errors import Refused
from coterie.core.protocol import ClientId
from coterie.data.by_client import OTHERS
from coterie.data.chats import ChatBatch, Conversation
from coterie.data.section import Section, Texts
from coterie.data.splits import SPLITS, Split
from coterie.data.splitting import where_of
from coterie.data.summary import DataSummary, Token, summarised
from coterie.runs.problems import loading
from coterie.runs.problems.auto import resolved
from coterie.runs.problems.language import Language, pieces
from coterie.runs.recipes.recipe import Recipe

_SHOWN = 8  # clients whose texts are shown


def summary_of(
    recipe: Recipe, examples: int = 0, files: bool = False, client: ClientId | None = None
) -> DataSummary:
    """Load the texts of a language model's recipe as a run does, and return their summary: of
    `client` or all, with so many `examples` of training rows for each of the first eight, and, with
    `files`, the splits of each file or row. Raises Refused for classifiers, or if a run would be
    refused.
    """
    recipe, _ = resolved(recipe)
    if not isinstance(recipe.data, Section):
        remedy = f"`coterie run {recipe.name} --dry-run` counts them."
        raise Refused(f"recipe {recipe.name}: its data are examples with labels, not text", remedy)
    problem = loading.load(recipe)
    assert isinstance(problem, Language)
    tokenizer, federation = problem.backbone.tokenizer, problem.federation
    source = recipe.data.source()
    texts = _as_trained(source.read(), federation.everyone)
    chats = problem.content == "chats"
    skipped = {i: dict(Counter(p.suffix.lower() for p in of)) for i, of in source.skipped.items()}
    plain, content_of = _spoken if chats else str, recipe.data.content_of
    summary = summarised(federation, texts, tokenizer.eos_token_id, content_of, plain, skipped)
    shown = [client] if client is not None else list(federation.everyone)
    if unknown := set(shown) - federation.everyone.keys():
        remedy = f"There are: {', '.join(federation.everyone)}."
        raise Refused(f"no client {unknown.pop()!r}", remedy)
    clients = {id: summary.clients[id] for id in shown}
    for number, id in enumerate(shown):
        count = examples if number < _SHOWN else 0
        clients[id] = replace(
            clients[id],
            examples=_examples(tokenizer, federation.everyone[id].train, count),
            files=_files(texts[id], chats) if files else {},
        )
    return replace(summary, clients=clients)


def _as_trained(texts: Texts, clients: Mapping[ClientId, Any]) -> Texts:
    """Return the texts of clients, with those of small ones together if they were merged."""
    if OTHERS not in clients or OTHERS in texts:
        return texts
    small = [parts for id, parts in texts.items() if id not in clients]
    merged = [list(chain.from_iterable(documents)) for documents in zip(*small, strict=True)]
    return {id: parts for id, parts in texts.items() if id in clients} | {OTHERS: merged}


def _spoken(document: str) -> str:
    conversation = Conversation.of_document(document)
    if conversation.text is not None:
        return "\n".join(conversation.text)
    return "\n".join(str(message.get("content") or "") for message in conversation.messages)


def _files(parts: Sequence[Sequence[str]], chats: bool) -> dict[str, list[str]]:
    """Return the splits of each file or row."""
    places: dict[str, dict[str, None]] = {}
    for split, documents in zip(SPLITS, parts, strict=True):
        for document in documents:
            where = Conversation.of_document(document).where if chats else where_of(document)
            places.setdefault(where, {})[split] = None
    in_order = sorted(places, key=lambda name: (name.rstrip("0123456789"), len(name), name))
    return {name: list(places[name]) for name in in_order}


def _examples(tokenizer: Any, split: Split, count: int) -> list[list[Token]]:
    """Return the first rows of a split, token by token."""
    special, rows = frozenset(tokenizer.all_special_ids), list[list[Token]]()
    for number in range(min(count, split.windows)):
        row = split.take(np.array([number]))
        if isinstance(row, ChatBatch):
            ids, counted = row.ids[0], row.counted[0]
            length = int((row.positions[0] >= 0).sum())
        else:
            ids, counted, length = row[0], torch.arange(row.shape[1]) > 0, row.shape[1]
        chosen, tokens = ids[:length].tolist(), list[Token]()
        counts = map(bool, counted[:length].tolist())
        for id, text, counts_here in zip(chosen, pieces(tokenizer, chosen), counts, strict=True):
            shown = tokenizer.convert_ids_to_tokens(id) if id in special else text
            tokens.append(Token(shown, counts_here, id in special))
        rows.append(tokens)
    return rows
