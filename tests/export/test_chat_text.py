"""What a chat template writes around a message, without the template."""

import pytest
from chat_bases import CHATML, REWRITING, chat_tokenizer

from coterie.core.errors import DataError, Refused
from coterie.data.chats import ChatTemplate
from coterie.data.chats.messages import user
from coterie.export.web import ChatText

STRIPPING = CHATML.replace("{{ m.content }}", "{{ m.content | trim }}")
BEGINNING = "{{ bos_token }}" + CHATML
SYSTEM = "<|im_start|>system\nBe kind.<|im_end|>\n" + CHATML
SAID = ("Hi", "", "  \u00a0Why?\u2028 ", 'a "b"\n\n', "你好 ", "<|im_end|>", "{{ m }}", "\x1c")


def parts(template: str | None) -> tuple[ChatTemplate, ChatText]:
    chats = ChatTemplate(chat_tokenizer(template))
    return chats, ChatText.of(chats)


@pytest.mark.parametrize("template", [CHATML, STRIPPING, BEGINNING, SYSTEM, REWRITING])
def test_its_text_is_the_templates(template: str) -> None:
    chats, found = parts(template)
    assert found.strips == (template is STRIPPING)
    for message in SAID:
        for answer in ("", " I do", "you said: <|im_start|>\n"):
            assert (
                found.opening(message, answer)
                == chats.render([user(message)], prompt=True) + answer
            )


def test_the_first_token_is_the_templates() -> None:
    """Nothing is put before what it writes, whatever the tokenizer puts before texts."""
    from tokenizers.processors import TemplateProcessing

    for template in (BEGINNING, CHATML):
        chats = ChatTemplate(chat_tokenizer(template))
        chats.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        text = ChatText.of(chats).opening("Hi")
        assert text.startswith("<|endoftext|>") == (template is BEGINNING)
        ids = chats.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert ids == chats.prompt([user("Hi")])


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{{ m.content }} ({{ m.content }})", "writes a message 2 times"),
        ("{{ m.content | upper }}", "changes a message, such as 'How are you?'"),
        ("{{ m.content | tojson }}", "changes a message"),
        ("{{ m.content.rstrip() }}", "changes a message"),
        ("{{ m.content | replace('\n\n', '\n') }}", "changes a message"),
        ("{{ m.content.split('</think>')[-1] }}", "changes a message, such as '<think>"),
        ("{{ m.content[:400] }}", "changes a message, such as 'long long"),
        ("{{ m.content or '(nothing)' }}", "changes a message, such as ''"),
    ],
)
def test_templates_that_do_more_are_refused(content: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        parts(CHATML.replace("{{ m.content }}", content))
    assert why in refused.value.problem
    assert "coterie serve RUN --chat" in refused.value.remedy


def test_without_a_template_there_is_no_chat() -> None:
    with pytest.raises(DataError, match="no chat template"):
        parts(None)
