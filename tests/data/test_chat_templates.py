"""The same conversation trained and then asked has the same ids, whatever the template."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from chat_templates import ADDED, SPECIAL, STYLES, tokenizer_of
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.core.errors import DataError
from coterie.data.chats import ChatTemplate, Conversation, rendering
from coterie.data.chats.messages import normal_messages, normal_tools

TOOLS = [{"name": "look_up", "description": "Look it up.", "parameters": {"type": "object"}}]


@cache
def template_of(style: str, control_tokens: Any = "text") -> ChatTemplate:
    return ChatTemplate(tokenizer_of(style), control_tokens=control_tokens)


words = st.sampled_from(
    ["hello", "a b", "two\nlines", "\n\nbehind", "ends ", " begins", "Größe 你好", '{"a": 1}', "7"]
)
contents = st.lists(words | st.sampled_from([*SPECIAL, *ADDED]), min_size=1, max_size=4).map(
    "".join
)
arguments = st.dictionaries(st.sampled_from(["city", "day"]), contents | st.integers(0, 9))


@st.composite
def conversations(draw: Any, style: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Messages in the forms that people write them, with tools or without."""
    knows, messages = STYLES[style], list[dict[str, Any]]()
    tools = TOOLS if knows.tools and draw(st.booleans()) else None
    if draw(st.booleans()):
        messages.append({"role": "system", "content": draw(contents)})
    if knows.greeting and draw(st.integers(0, 4)) == 0:
        messages.append({"role": "assistant", "content": draw(contents)})
    for _ in range(draw(st.integers(1, 3))):
        text = draw(contents)
        parts = [{"type": "text", "text": text[:3]}, {"type": "text", "text": text[3:]}]
        messages.append({"role": "user", "content": draw(st.sampled_from([text, parts]))})
        if tools and draw(st.booleans()):
            call = {"name": "look_up", "arguments": draw(arguments)}
            if draw(st.booleans()):
                call["arguments"] = json.dumps(call["arguments"])
            said = draw(contents) if knows.both and draw(st.booleans()) else None
            calls = [{"id": None, "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": said, "tool_calls": calls})
            messages.append({"role": "tool", "content": draw(contents)})
        answer = {"role": "assistant", "content": draw(contents), "tool_calls": []}
        if knows.reasoning and draw(st.booleans()):
            answer["reasoning"] = draw(words)
        messages.append(answer)
    return messages, tools


def runs(counted: Any) -> list[tuple[int, int]]:
    """The first token and the end of each run of those that count."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], counted.astype(int), [0]])))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def blank(value: str) -> bool:
    return not value.strip()


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_trained_begins_with_what_is_asked(style: str, data: Any) -> None:
    raw, tools = data.draw(conversations(style))
    template, messages = template_of(style), normal_messages(raw)
    conversation = Conversation("row 1", messages, tools=normal_tools(tools))
    parts = template.encode(conversation)
    answers = [(part, start, end) for part in parts for start, end in runs(part.counted)]
    numbers = conversation.trained
    if len(answers) < len(numbers):  # a greeting may be context, or left out
        assert raw[numbers[0] - 1 if numbers[0] else 0]["role"] in ("system", "assistant")
        numbers = numbers[1:]
    for number, (part, start, end) in zip(numbers, answers, strict=True):
        if number:
            assert part.ids[:start].tolist() == template.prompt(raw[:number], tools)
        text = template.tokenizer.decode(part.ids[start:end])
        assert messages[number]["content"].strip() in text
        assert all(
            call["function"]["name"] in text for call in messages[number].get("tool_calls", [])
        )
        assert int(part.ids[end - 1]) in template.stops


@st.composite
def long_conversations(draw: Any, style: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Several conversations in one."""
    messages, tools = draw(conversations(style))
    for _ in range(draw(st.integers(2, 5))):
        more, _ = draw(conversations(style))
        start = next(i for i, own in enumerate(more) if own["role"] == "user")
        messages += more[start:]
    return messages, tools


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_answers_of_long_conversations_are_found_as_by_writing_all_before_each(
    style: str, data: Any
) -> None:
    raw, tools = data.draw(long_conversations(style))
    conversation = Conversation("row 1", normal_messages(raw), tools=normal_tools(tools))

    ends = [i + 1 for i, own in enumerate(raw) if own["role"] == "user"]

    def encoded(window: int) -> Any:
        template = ChatTemplate(tokenizer_of(style))
        decode = template.tokenizer.decode
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rendering, "_WINDOW", window)
            parts = template.encode(conversation) + template.encode(conversation, room=60)
            asked = [decode(template.prompt(raw[:end], tools)) for end in ends[len(ends) // 2 :]]
        return [(decode(own.ids), decode(own.ids[own.counted])) for own in parts], asked

    assert encoded(3) == encoded(10**9)


def harmless(value: Any) -> Any:
    """The same messages with no control token in what people wrote."""
    if isinstance(value, str):
        for token in (*SPECIAL, *ADDED):
            value = value.replace(token, "x")
        return value
    if isinstance(value, dict):
        return {key: harmless(part) for key, part in value.items()}
    return [harmless(part) for part in value] if isinstance(value, Sequence) else value


@pytest.mark.parametrize("style", STYLES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_control_tokens_in_messages_are_text(style: str, data: Any) -> None:
    raw, tools = data.draw(conversations(style))
    template = template_of(style)
    users = [own for own in raw if own["role"] != "assistant"]  # who may not write thoughts
    raw = users if STYLES[style].greeting else raw[:2] if raw[0]["role"] == "system" else raw[:1]
    special = set(template.tokenizer.all_special_ids)

    def controls(messages: Any) -> list[int]:
        return [i for i in template.prompt(messages, tools) if i in special]

    assert controls(raw) == controls(harmless(raw))
    written = template.tokenizer.decode(template.prompt(raw, tools))
    assert written == template.render(normal_messages(raw), normal_tools(tools), prompt=True)


def test_control_tokens_become_tokens_or_are_refused_if_a_field_says_so() -> None:
    messages = [{"role": "user", "content": "a<|im_end|>b"}]
    ends = template_of("chatml").tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert template_of("chatml").prompt(messages).count(ends) == 1
    assert template_of("chatml", "tokens").prompt(messages).count(ends) == 2
    with pytest.raises(DataError, match=r"control tokens in the text: '<\|im_end\|>'"):
        template_of("chatml", "refuse").prompt(messages)
