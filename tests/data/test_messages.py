"""Messages as others write them, in one normal form, and what a template makes of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chat_bases import CHATML, MARKED, chat_tokenizer, turns
from chat_templates import STYLES, tokenizer_of

from coterie.core.errors import DataError
from coterie.data.chats import ChatTemplate, Conversation
from coterie.data.chats.messages import Mistake, normal_messages, normal_tools
from coterie.data.chats.reading import read_conversations
from coterie.data.rows import rows_of
from coterie.data.values import uncolumned

CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome"}}}


@pytest.mark.parametrize(
    "calls",
    [
        {"tool_calls": [CALL]},
        {"tool_calls": [{"function": {"name": "weather", "arguments": '{"city": "Rome"}'}}]},
        {"tool_calls": [{"name": "weather", "arguments": {"city": "Rome"}, "id": None}]},
        {"tool_calls": json.dumps([CALL])},
        {"function_call": {"name": "weather", "arguments": '{"city": "Rome"}'}},
    ],
)
def test_calls_have_one_form(calls: Any) -> None:
    (message,) = normal_messages([{"role": "assistant", "content": None, **calls}])
    assert message == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_messages_have_one_form() -> None:
    wanted = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": "Why?", "name": "ann"},
        {"role": "assistant", "content": "So.", "reasoning_content": "Hm."},
    ]
    written = [
        {"role": "developer", "content": "Be kind.", "tool_calls": [], "refusal": None},
        {"role": "human", "content": [{"type": "text", "text": "Wh"}, "y?"], "name": "ann"},
        {"from": "gpt", "value": "So.", "thinking": "Hm.", "weight": 1, "annotations": []},
    ]
    assert normal_messages(written) == wanted
    assert normal_messages(json.dumps(written)) == wanted
    assert normal_messages(wanted) == wanted


def test_tools_have_one_form() -> None:
    function = {"name": "weather", "parameters": {"type": "object"}}
    wrapped = [{"type": "function", "function": function}]
    for tools in ([function], wrapped, json.dumps(wrapped), [json.dumps(function)]):
        assert normal_tools(tools) == wrapped
    for none in (None, [], "[]", "", " "):
        assert normal_tools(none) is None


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "names no function"),
        (
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "x"}]},
            "arguments is text, not an object",
        ),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": [1]}]}, "are list"),
        ({"role": "assistant", "content": "a", "weight": 0.5}, "weight 0.5; it can be 0"),
        ({"role": "assistant", "reasoning": "a", "thinking": "b"}, "several texts of reasoning"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "not text (image_url)"),
        ({"role": "user", "content": "\ud800"}, "half of a surrogate pair"),
        ({"role": "user", "text": "hi"}, "has no content (but role, text)"),
        ({"from": "human", "parts": ["hi"]}, "has no content (but from, parts)"),
    ],
)
def test_what_cannot_be_read_is_refused(message: Any, problem: str) -> None:
    with pytest.raises(Mistake) as error:
        normal_messages([message])
    assert problem in error.value.problem
    assert "messages[0]" in error.value.problem


def test_columns_beside_a_conversation_belong_to_it() -> None:
    asked, answer = turns("hello", "good day")
    tools = [{"name": "weather"}]
    rows: list[dict[str, Any]] = [
        {"messages": [asked, answer]},
        {"conversations": [asked, answer]},
        {"prompt": [asked], "completion": [answer]},
        {"prompt": json.dumps([asked]), "completion": json.dumps([answer])},
    ]
    for row in rows:
        (found,) = read_conversations([("1", row | {"system": "Be kind.", "tools": tools})])
        assert found.messages == [{"role": "system", "content": "Be kind."}, asked, answer]
        assert found.tools == [{"type": "function", "function": tools[0]}]
        assert found.trained == [2]
    (former,) = read_conversations([("1", {"messages": [asked, answer], "functions": tools})])
    assert former.tools == found.tools
    with pytest.raises(DataError, match="which one is meant"):
        read_conversations(
            [("1", {"messages": [{"role": "system", "content": "a"}, asked], "system": "b"})]
        )
    with pytest.raises(DataError, match="system beside a prompt"):
        read_conversations([("1", {"prompt": "a", "completion": "b", "system": "c"})])


@pytest.mark.parametrize("key", ["weight", "loss_weight", "loss_mask", "train", "trainable"])
@pytest.mark.parametrize("template", [CHATML, MARKED])
@pytest.mark.parametrize("loss", ["answers", "all"])
def test_a_message_of_no_weight_is_context(key: str, template: str, loss: Any) -> None:
    messages = turns("hello", "WRONG", "no", "right")
    messages[1][key] = 0 if "train" not in key else False
    (conversation,) = read_conversations([("1", {"messages": messages})])
    chats = ChatTemplate(chat_tokenizer(template))
    (rendered,) = chats.encode(conversation, loss)
    counted = chats.tokenizer.decode(rendered.ids[rendered.counted])
    assert "WRONG" not in counted
    assert "right" in counted
    assert "WRONG" in chats.tokenizer.decode(rendered.ids)
    assert ("hello" in counted) == (loss == "all")


def test_an_assistant_may_begin() -> None:
    messages = [{"role": "assistant", "content": "Welcome!"}, *turns("hello", "good day")]
    for style in STYLES:
        chats = ChatTemplate(tokenizer_of(style))
        (rendered,) = chats.encode(Conversation("1", messages))
        counted = chats.tokenizer.decode(rendered.ids[rendered.counted])
        assert "good day" in counted
        assert rendered.cut == (not STYLES[style].greeting)
        assert ("Welcome!" in chats.tokenizer.decode(rendered.ids)) == STYLES[style].greeting
        asked = chats.prompt(messages[:-1])
        assert rendered.ids[: len(asked)].tolist() == asked
    chats = ChatTemplate(tokenizer_of("chatml"))
    (rendered,) = chats.encode(Conversation("1", messages))
    assert "Welcome!" in chats.tokenizer.decode(rendered.ids[rendered.counted])


@pytest.mark.parametrize(
    ("messages", "part"),
    [
        ([{"role": "user", "content": "w?"}, {"role": "assistant", "tool_calls": [CALL]}], "name"),
        ([{"role": "developer", "content": "Be kind."}, *turns("a", "b")], "messages[0] (dev"),
        ([*turns("a"), {"role": "assistant", "content": "b", "thinking": "hm"}], "the reasoning"),
    ],
)
def test_what_a_template_leaves_out_is_refused(messages: Any, part: str) -> None:
    three_roles = (
        "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
        "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chats = ChatTemplate(chat_tokenizer(three_roles))
    conversation = Conversation("f.jsonl:3", normal_messages(messages))
    with pytest.raises(DataError, match=r"f\.jsonl:3: the chat template leaves out") as error:
        chats.encode(conversation)
    assert part in error.value.problem


def test_content_beside_a_call_that_a_template_passes_over_is_refused() -> None:
    call = {"role": "assistant", "content": "Let me look.", "tool_calls": [CALL]}
    conversation = Conversation("1", normal_messages([*turns("a"), call]))
    with pytest.raises(DataError, match=r"leaves out the content of messages\[1\] \(assistant\)"):
        ChatTemplate(tokenizer_of("llama3.1")).encode(conversation)
    (rendered,) = ChatTemplate(tokenizer_of("qwen2.5")).encode(conversation)
    assert rendered.counted.any()


MARKED_TURN = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endgeneration %}{% else %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("template", [CHATML, MARKED, MARKED_TURN])
def test_marks_change_nothing_and_empty_turns_do_not_count(template: str) -> None:
    chats = ChatTemplate(chat_tokenizer(template))
    messages = turns("a", "", "b", "yes", "c", " ", "d", "no")
    (rendered,) = chats.encode(Conversation("1", messages))
    counted = chats.tokenizer.decode(rendered.ids[rendered.counted])
    assert counted == "yes<|im_end|>no<|im_end|>"


@pytest.mark.parametrize("trims", [True, False])
def test_offsets_of_tokenizers_that_trim_them_are_not_believed(trims: bool) -> None:
    from tokenizers import processors

    tokenizer = chat_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
    chats = ChatTemplate(tokenizer)
    for prompt, completion in (("Q: the ", "and so"), ("Q:", " the end"), ("the\n\n", "he")):
        (rendered,) = chats.encode(Conversation("1", text=(prompt, completion)))
        asked = tokenizer(prompt)["input_ids"]
        assert rendered.ids[: len(asked)].tolist() == asked
        assert np.flatnonzero(rendered.counted)[0] == len(asked)
        assert tokenizer.decode(rendered.ids[rendered.counted]) == f"{completion}<|endoftext|>"


@pytest.mark.parametrize("room", [20, 40, 60, 90, 130, 200, 400])
def test_as_few_old_turns_as_possible_are_left_out(room: int) -> None:
    messages = [
        {"role": "system", "content": "s"},
        *turns(*("word " * (i % 4 + 1) for i in range(20))),
    ]
    chats = ChatTemplate(chat_tokenizer())
    (found,) = chats.encode(Conversation("1", messages), room=room)
    later = [[messages[0], *messages[start:]] for start in range(1, 21, 2)]
    ids = [chats.encode(Conversation("1", part))[0].ids for part in later]
    fitting = [own for own in ids if len(own) <= room]
    wanted = fitting[0] if fitting else ids[-1][-room:]
    assert found.ids.tolist() == wanted.tolist()
    assert found.cut == (len(ids[0]) > room)


def test_objects_of_columnar_files_have_no_nulls_that_these_made_up(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    def call(name: str, arguments: dict[str, str]) -> dict[str, Any]:
        return {
            "role": "assistant",
            "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        }

    rows = [
        {"messages": [*turns("rain?"), call("weather", {"city": "Rome"})]},
        {"messages": [*turns("late?"), call("clock", {"zone": "UTC"})]},
    ]
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(rows), path)
    read = read_conversations(rows_of([path]))
    wanted = read_conversations((str(i), row) for i, row in enumerate(rows))
    assert [one.messages for one in read] == [one.messages for one in wanted]
    assert list(uncolumned({"tools": [{"a": None, "b": 1}], "client": None}).items()) == [
        ("tools", [{"b": 1}]),
        ("client", None),
    ]
