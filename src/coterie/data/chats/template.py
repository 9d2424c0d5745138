"""A base's chat template: conversations become token ids, and which of them are the assistant's.

Where the template says by `{% generation %}` what the assistant writes, that is taken. Otherwise an
answer is the text by which the conversation up to it is longer than the prompt for it, if the one
begins with the other and the whole conversation with both: then these are the very characters that
the model is to write. Where a template rewrites what came before (Qwen3 leaves out earlier
thoughts), each answer becomes a conversation of its own, as the model would see it. A template for
which none of this holds is refused.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from coterie.core.errors import DataError
from coterie.data.chats.reading import Conversation, Message, is_answer
from coterie.data.chats.shortening import answers_apart, without_oldest

Loss = Literal["answers", "all"]
Ids = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
Span = tuple[int, int]  # characters

GENERATION = "its {% generation %} marks"
DIFFERENCE = "what each answer adds to its prompt"
APART = "what each answer adds to its prompt, each in a conversation of its own"

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EXAMPLE: list[Message] = [
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And three and three?"},
    {"role": "assistant", "content": "That is six."},
]
_REMEDY = (
    "Name a file with another template: --set data.chat_template=FILE. It must write a special "
    "token behind every answer, and either mark answers by {% generation %} or add each message to "
    "what it wrote before."
)
NO_TEMPLATE = (
    "Use a base that has one (their names often end in -Instruct or -chat), or name a file: "
    "--set data.chat_template=FILE."
)


@dataclass(frozen=True)
class Rendered:
    """A conversation as token ids.

    Args:
        ids: (T,).
        counted: (T,) which of them the loss counts; never the first.
        cut: Whether something of the conversation was left out.
    """

    ids: Ids
    counted: Flags
    cut: bool = False


class _Rewritten(Exception):
    """The template rewrites what came before an answer."""


class ChatTemplate:
    """A tokenizer's chat template, or another one in its place.

    Args:
        tokenizer: A fast tokenizer of transformers.
        template: Jinja; None: the tokenizer's own, which it may lack: then only prompts and
            completions of plain text can be encoded.
    """

    def __init__(self, tokenizer: Any, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        own = getattr(tokenizer, "chat_template", None)
        if isinstance(own, Mapping):  # several, by their names
            own = own.get("default")
        self.template: str | None = own if template is None else template
        self.marked = self.template is not None and _MARKED.search(self.template) is not None

    @cached_property
    def way(self) -> str:
        """How answers are found, in words.

        Raises:
            DataError: It cannot be found out exactly which tokens are the assistant's, or nothing
                ends its answers.
        """
        return self._checked() if self.template is not None else "completions"

    @cached_property
    def stops(self) -> tuple[int, ...]:
        """The ids that end an answer: the template's, and the tokenizer's end token."""
        end = self.tokenizer.eos_token_id
        ends = [] if end is None else [int(end)]
        try:
            found = [] if self.template is None else self.encode(Conversation("example", _EXAMPLE))
        except DataError:  # nothing else does
            found = []
        for rendered in found:
            behind = rendered.counted & ~np.append(rendered.counted[1:], False)
            ends += rendered.ids[behind].tolist()
        return tuple(dict.fromkeys(ends))

    @cached_property
    def _special(self) -> frozenset[int]:
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        return frozenset(self.tokenizer.all_special_ids) | {
            id for id, token in added.items() if token.special
        }

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, prompt: bool = False
    ) -> str:
        """Return messages as text; as a prompt, with the beginning of the assistant's answer.

        Raises:
            DataError: The base has no template, or it refuses these messages.
        """
        if self.template is None:
            raise DataError("the base has no chat template", NO_TEMPLATE)
        try:
            text = self.tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                tokenize=False,
            )
        except Exception as error:  # templates raise whatever they like
            reason = str(error).strip().split("\n")[0] or type(error).__name__
            raise DataError(
                f"the chat template refuses the messages: {reason}",
                "Change the roles or their order, or use another base or data.chat_template.",
            ) from None
        return str(text)

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> list[int]:
        """Return the token ids that a model continues with its answer. Raises DataError."""
        text = self.render(messages, tools, prompt=True)
        found: list[int] = self._tokens(text, self._starts(messages, tools, text))[0].tolist()
        return found

    def opening(self, messages: Sequence[Message], answer: str = "") -> str:
        """Return the text of `prompt` and of an answer so far, for who encodes it as text: without
        the first token that the tokenizer itself puts before texts. Raises DataError.
        """
        text, first = self.render(messages, prompt=True), self.tokenizer.bos_token
        adds = bool(first) and self.tokenizer("a")["input_ids"][:1] == [self.tokenizer.bos_token_id]
        return (text.removeprefix(first) if adds else text) + answer

    def encode(self, conversation: Conversation, loss: Loss = "answers") -> list[Rendered]:
        """Return a conversation as token ids, or as several, where the template rewrites what came
        before an answer.

        Raises:
            DataError: It cannot be rendered, or nothing ends an answer.
        """
        try:
            return [self._whole(conversation, loss)]
        except _Rewritten:
            pass
        try:
            return [self._whole(part, loss) for part in answers_apart(conversation)]
        except _Rewritten:
            raise DataError(
                f"{conversation.where}: the chat template writes an answer otherwise than behind "
                f"its own prompt",
                _REMEDY,
            ) from None

    def fitted(
        self, conversation: Conversation, room: int, loss: Loss = "answers"
    ) -> list[Rendered]:
        """As `encode`, each of at most `room` tokens: the oldest messages are left out, but for a
        system's; if the last exchange alone is too long, its beginning is cut.
        """
        found = self.encode(conversation, loss)
        if all(len(own.ids) <= room for own in found):
            return found
        parts = answers_apart(conversation) if len(found) > 1 else [conversation]
        return [self._shortened(part, room, loss) for part in parts]

    def _shortened(self, conversation: Conversation, room: int, loss: Loss) -> Rendered:
        whole = self._whole(conversation, loss)
        if len(whole.ids) <= room:
            return whole
        for part in without_oldest(conversation):
            whole = self._whole(part, loss)
            if len(whole.ids) <= room:
                return replace(whole, cut=True)
        counted = whole.counted[-room:].copy()
        counted[0] = False
        return Rendered(whole.ids[-room:], counted, cut=True)

    def _whole(self, conversation: Conversation, loss: Loss) -> Rendered:
        """Return a conversation in one piece. Raises _Rewritten or DataError."""
        try:
            if conversation.text is not None:
                return self._plain(*conversation.text, loss)
            if loss == "all":
                said, tools = conversation.messages, conversation.tools
                text = self.render(said, tools)
                ids, _ = self._tokens(text, self._starts(said, tools, text))
                return _ending(ids, np.ones(len(ids), dtype=bool))
            said, tools = conversation.messages, conversation.tools
            whole = self.render(said, tools)
            starts = self._starts(said, tools, whole)
            if self.marked and not _within(self._encoded(whole)[1], starts):
                return _ending(*self._by_marks(conversation))
            text, spans = self._spans(conversation)
            ids, offsets = self._tokens(text, starts)
            return _ending(ids, self._counted(ids, offsets, spans))
        except DataError as error:
            if error.problem.startswith(conversation.where):
                raise
            raise DataError(f"{conversation.where}: {error.problem}", error.remedy) from None

    def _plain(self, prompt: str, completion: str, loss: Loss) -> Rendered:
        """Return a prompt, its completion and the tokenizer's end token."""
        end = self.tokenizer.eos_token_id
        if end is None:
            raise DataError(
                "the tokenizer has no end token, so that completions would not end",
                "Set eos_token in the base's tokenizer_config.json.",
            )
        ids, offsets = self._tokens(prompt + completion, [len(prompt)])
        counted = offsets[:, 1] > len(prompt) if loss == "answers" else np.ones(len(ids), bool)
        return _ending(np.append(ids, end), np.append(counted, True))

    def _tokens(self, text: str, starts: Sequence[int] = ()) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Return the ids of a text, (T,), and the first character and the end of each, (T, 2).

        Where a token would begin before an answer and end in it, as " I" behind a prompt that ends
        in a space, prompt and answer are encoded apart: so does whoever answers that prompt.

        Args:
            text: All of it.
            starts: The first characters of answers.
        """
        ids, offsets = self._encoded(text)
        if not (within := _within(offsets, starts)):
            return ids, offsets
        edges = [0, *within, len(text)]
        pieces = [(first, *self._encoded(text[first:end])) for first, end in pairwise(edges)]
        apart = np.concatenate([own for _, own, _ in pieces])
        if self.tokenizer.decode(apart) != self.tokenizer.decode(ids):
            return ids, offsets  # its tokens depend on what is before them
        return apart, np.concatenate([first + own for first, _, own in pieces])

    def _encoded(self, text: str) -> tuple[Ids, npt.NDArray[np.int64]]:
        found = self.tokenizer(
            [text], add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        ids = np.array(found["input_ids"][0], dtype=np.int64)
        return ids, np.array(found["offset_mapping"][0], dtype=np.int64).reshape(-1, 2)

    def _starts(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, text: str
    ) -> list[int]:
        """Return the first characters of the answers in a text, as far as they can be told."""
        prompts = [
            self.render(messages[:i], tools, prompt=True)
            for i, message in enumerate(messages)
            if i and is_answer(message)
        ]
        return [len(prompt) for prompt in prompts if text.startswith(prompt)]

    def _spans(self, conversation: Conversation) -> tuple[str, list[Span]]:
        """Return the text and the characters that each trained answer adds to its prompt. Raises
        _Rewritten where they cannot be told.
        """
        messages, tools = conversation.messages, conversation.tools
        text, spans = self.render(messages, tools), list[Span]()
        for i, message in enumerate(messages):
            if i < conversation.given or not is_answer(message):
                continue
            before = self.render(messages[:i], tools, prompt=True)
            behind = self.render(messages[: i + 1], tools)
            if not (behind.startswith(before) and text.startswith(behind)):
                raise _Rewritten
            spans.append((len(before), len(behind)))
        return text, spans

    def _counted(self, ids: Ids, offsets: npt.NDArray[np.int64], spans: Sequence[Span]) -> Flags:
        """Return which tokens are of answers, each up to the special token that ends it."""
        counted = np.zeros(len(ids), dtype=bool)
        special = np.isin(ids, list(self._special))
        for start, end in spans:
            own = np.flatnonzero((offsets[:, 0] < end) & (offsets[:, 1] > start))
            ends = own[special[own]]
            if not len(ends):
                raise DataError("no special token ends an answer of the chat template", _REMEDY)
            counted[own[own <= ends[-1]]] = True
        return counted

    def _by_marks(self, conversation: Conversation) -> tuple[Ids, Flags]:
        """Return the ids and which of them the template marks, each answer with the special token
        behind it.
        """
        found = self.tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=conversation.tools,
            chat_template=self.template,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids = np.array(found["input_ids"], dtype=np.int64)
        counted = np.array(found["assistant_masks"], dtype=bool)
        special = np.isin(ids, list(self._special))
        last = counted & ~np.append(counted[1:], False)
        behind = np.flatnonzero(last & ~special) + 1
        if len(behind) and (behind[-1] == len(ids) or not special[behind].all()):
            raise DataError("no special token ends an answer of the chat template", _REMEDY)
        counted[behind] = True
        return ids, self._trained(counted, conversation)

    def _trained(self, counted: Flags, conversation: Conversation) -> Flags:
        """Return the marks of those answers that are trained: the last ones, of a prompt with
        others.
        """
        answers = [i for i, own in enumerate(conversation.messages) if own["role"] == "assistant"]
        trained = [i >= conversation.given for i in answers]
        if all(trained):
            return counted
        runs = np.flatnonzero(counted & ~np.insert(counted[:-1], 0, False)).tolist()
        if len(runs) != len(answers):
            raise DataError(
                f"the chat template marks {len(runs)} of {len(answers)} answers by "
                f"{{% generation %}}, so that those of the prompt cannot be told",
                _REMEDY,
            )
        kept = counted.copy()
        kept[: runs[trained.index(True)] if any(trained) else len(kept)] = False
        return kept

    def _checked(self) -> str:
        """Return how answers are found, in words. Raises DataError for a template whose answers
        cannot be told, or do not end.
        """
        found = self.encode(Conversation("chat template", _EXAMPLE))
        for rendered in found:
            ends = rendered.counted & ~np.append(rendered.counted[1:], False)
            if not ends.any() or not np.isin(rendered.ids[ends], list(self._special)).all():
                raise DataError("chat template: nothing of it is marked as an answer", _REMEDY)
        prompt = self.prompt(_EXAMPLE[:-1])
        if found[-1].ids[: len(prompt)].tolist() != prompt:
            raise DataError("chat template: its prompt ends within a token", _REMEDY)
        if self.marked:
            return GENERATION
        return DIFFERENCE if len(found) == 1 else APART


def _within(offsets: npt.NDArray[np.int64], starts: Sequence[int]) -> list[int]:
    """Return those first characters of answers that are within a token."""
    first, end = offsets.T
    return [start for start in starts if ((first < start) & (end > start)).any()]


def _ending(ids: Ids, counted: Flags) -> Rendered:
    """Return what there is up to the last token that counts; the first has nothing before it."""
    counted[:1] = False
    end = int(np.flatnonzero(counted)[-1]) + 1 if counted.any() else 0
    return Rendered(ids[:end], counted[:end])
