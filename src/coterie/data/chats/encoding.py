"""Conversations as streams of token ids in the cache, and as a federation."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from coterie.core.errors import DataError
from coterie.core.protocol import ClientId
from coterie.data.chats.answers import Loss, Rendered
from coterie.data.chats.jinja_process import NO_TEMPLATE
from coterie.data.chats.reading import Conversation
from coterie.data.chats.splits import ChatSplit
from coterie.data.chats.template import ChatTemplate
from coterie.data.refusals import SHOWN, Refusals
from coterie.data.splits import SPLITS, Tokens
from coterie.data.text_streams import RunningText, SeparateDocuments, SplitTexts

Arrays = Mapping[str, Tokens]

_NOTES = "notes"
_COUNTED = {  # of what is counted, by its name in the notes
    "cut": "of them without their oldest turns or tokens, to fit a window or the template",
    "without_tools": "of them have tools, which the chat template does not describe",
    "controls": "control tokens in their texts, see data.control_tokens",
}
_UNANSWERED = (
    "Give each an answer, or have them left out (data.unanswered: leave-out), or train on all "
    "tokens (data.loss: all)."
)


@dataclass(frozen=True)
class Encoder:
    """An encoder of conversations as token ids."""

    template: ChatTemplate  # the base's chat template
    loss: Loss  # which tokens are counted
    packing: bool  # whether rows hold several conversations
    leaves_out: bool  # whether conversations without an answer are left out, otherwise refused
    notes: tuple[str, ...] = ()  # sentences about them for people, beside what is `said`

    @property
    def fingerprint(self) -> Any:
        """What token ids depend on besides texts and tokenizer, as JSON."""
        template = self.template
        return ["chats", 3, template.template, template.with_tools, template.texts.control_tokens]

    def arrays(
        self, documents: Sequence[str], name: str, context: int, limit: int | None = None
    ) -> dict[str, Tokens]:
        """Return one split of a client as arrays, see `ChatSplit`, and notes. Raises DataError for
        conversations that cannot be rendered or have no answer. A conversation has at most C + 1
        tokens. The first one that exceeds `limit` tokens in total and all later ones are left out.
        """
        rendered, unanswered = list[Rendered](), list[str]()
        tokens = 0
        counts = Counter[str]()
        with Refusals(SHOWN) as refusals:
            for document in documents:
                conversation = Conversation.of_document(document)
                if self.loss == "answers" and not conversation.answered:
                    unanswered.append(conversation.where)
                    continue
                parts = list[Rendered]()
                with refusals.gather():
                    parts = self.template.encode(conversation, self.loss, context + 1)
                tokens += sum(len(part.ids) for part in parts)
                if limit is not None and tokens > limit:
                    break
                counts["cut"] += any(part.cut for part in parts)
                counts["without_tools"] += any(part.without_tools for part in parts)
                texts = [conversation.text, conversation.messages, conversation.tools]
                counts["controls"] += self.template.texts.count(texts)
                rendered += [part for part in parts if part.counted.any()]
            if unanswered and not self.leaves_out:
                for where in unanswered:
                    refusals.add(f"{where}: no answer of an assistant to train on", _UNANSWERED)
        return {
            name: _joined([part.ids for part in rendered]),
            f"{name}.counted": _joined([part.counted for part in rendered]),
            f"{name}.lengths": np.array([len(part.ids) for part in rendered], dtype=np.uint32),
            f"{name}.{_NOTES}": _written({**counts, "unanswered": unanswered}),
        }

    def streams(
        self, parts: Iterable[SplitTexts], context: int
    ) -> list[tuple[ClientId, str, list[Tokens]]]:
        """Return the arrays of splits as streams for the cache. Raises DataError."""
        streams: list[tuple[ClientId, str, list[Tokens]]] = []
        parts = list(parts)
        if self.template.template is None:
            first = next((document for part in parts for document in part.documents), None)
            if first is not None and Conversation.of_document(first).text is None:
                raise DataError("the base has no chat template, which messages need", NO_TEMPLATE)
        with Refusals() as refusals:
            for part in parts:
                with refusals.gather(f"client {part.client!r}, {part.name}: "):
                    arrays = self.arrays(part.documents, part.name, context, part.limit)
                    streams += [(part.client, key, [values]) for key, values in arrays.items()]
        return streams

    def split(self, name: str, arrays: Arrays, context: int, seed: int) -> ChatSplit:
        """Return a split of a client's arrays. Raises DataError if it is empty."""
        lengths = arrays[f"{name}.lengths"]
        if not len(lengths):
            remedy = "Give this client more conversations, or use larger fractions or token bounds."
            raise DataError(f"{name}: no conversations; {few(arrays)}", remedy)
        counted = arrays[f"{name}.counted"]
        return ChatSplit(name, arrays[name], counted, lengths, context, seed, self.packing)

    def description(self, arrays: Mapping[ClientId, Arrays]) -> str:
        """Return a phrase about the encoded conversations."""
        named = [pair for client_arrays in arrays.values() for pair in client_arrays.items()]
        count = sum(len(values) for name, values in named if name.endswith(".lengths"))
        notes = [_read(values) for name, values in named if name.endswith(f".{_NOTES}")]
        sentences = [f"{count:,} conversations"]
        if self.loss == "answers":
            sentences.append(f"loss on the answers, found by {self.template.way}")
        for name, text in _COUNTED.items():
            if count := sum(note.get(name, 0) for note in notes):
                sentences.append(f"{count:,} {text}")
        if left := [where for note in notes for where in note["unanswered"]]:
            more = f" and {len(left) - SHOWN:,} more" if len(left) > SHOWN else ""
            sentences.append(f"left out, without an answer: {', '.join(left[:SHOWN])}{more}")
        return "; ".join(sentences)


StreamEncoder = RunningText | SeparateDocuments | Encoder  # of a section's documents


def few(arrays: Arrays) -> str:
    """Return a phrase: how many conversations or documents there are, and how many are needed."""
    count = sum(len(arrays[f"{name}.lengths"]) for name in SPLITS)
    return f"it has {count:,} in all, and three splits need {len(SPLITS)} different ones"


def _joined(parts: Sequence[Any]) -> Tokens:
    return np.concatenate(parts).astype(np.uint32) if parts else np.empty(0, np.uint32)


def _written(notes: Mapping[str, Any]) -> Tokens:
    return np.frombuffer(json.dumps(notes).encode(), dtype=np.uint8).astype(np.uint32)


def merged_notes(notes: Sequence[Tokens]) -> Tokens:
    """Return the notes of several clients as those of one."""
    parsed = [_read(note) for note in notes]
    unanswered = [where for note in parsed for where in note["unanswered"]]
    counts = {name: sum(note.get(name, 0) for note in parsed) for name in _COUNTED}
    return _written({**counts, "unanswered": unanswered})


def _read(notes: Tokens) -> dict[str, Any]:
    return cast(dict[str, Any], json.loads(notes.astype(np.uint8).tobytes()))
