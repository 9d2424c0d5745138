"""Templates of strangers: as transformers writes them, within bounds, and none outlives its use."""

import os
import signal
import subprocess
import sys
import threading
import time

import pytest
from chat_templates import STYLES, tokenizer_of

from coterie.core.errors import DataError
from coterie.data.chats.jinja_process import JinjaProcess, shared
from coterie.data.chats.rendering import Excerpt

MESSAGES = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "Größe", "reasoning_content": "a thought"},
    {"role": "user", "content": "and"},
]
WHOLE = Excerpt(0, 3)


@pytest.mark.parametrize("style", STYLES)
def test_texts_are_those_of_transformers(style):
    tokenizer = tokenizer_of(style)
    parts = [Excerpt(0, end, prompt) for end in (1, 2, 3) for prompt in (False, True)]
    texts = shared.texts(
        tokenizer.chat_template, MESSAGES, None, tokenizer.special_tokens_map, parts
    )
    assert texts == [
        tokenizer.apply_chat_template(
            MESSAGES[: part.end], add_generation_prompt=part.prompt, tokenize=False
        )
        for part in parts
    ]


def test_a_part_keeps_the_systems_message():
    messages = [{"role": "system", "content": "s"}, *MESSAGES]
    template = "{% for m in messages %}{{ m.role[0] }}{% endfor %}"
    parts = [Excerpt(0, 3), Excerpt(3, 4), Excerpt(1, 2)]
    assert shared.texts(template, messages, None, {}, parts) == ["sua", "su", "su"]


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = "{% set ns = namespace(s='a') %}" + "{% set ns.s = ns.s ~ ns.s %}" * 40


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 'a' * 6000000000 }}", "too much memory"),
        ("{{ 'a' * 90000000 }}", "too much memory|longer"),
        (DOUBLED, "too much memory|longer"),
        (LOOPS, "longer"),
        ("{{ (9 ** (9 ** 9)) is odd }}", "longer"),
    ],
)
def test_templates_end_within_their_bounds(template, reason):
    process, begun = JinjaProcess(seconds=2.0), time.monotonic()
    with pytest.raises(DataError, match=reason):
        process.texts(template, MESSAGES, None, {}, [WHOLE])
    assert process.texts("{{ messages | length }}", MESSAGES, None, {}, [WHOLE]) == ["3"]
    process.end()
    assert time.monotonic() - begun < 60


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('not so') }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ messages[9].content.x }}",
        "{% for %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    ],
)
def test_what_a_template_raises_is_told(template):
    (refusal,) = shared.texts(template, MESSAGES, None, {}, [WHOLE])
    assert isinstance(refusal, DataError)
    assert "the chat template refuses the messages" in refusal.problem


def test_who_ends_it_is_not_kept_waiting():
    process = JinjaProcess(seconds=60.0)
    process.texts("", MESSAGES, None, {}, [WHOLE])
    threading.Timer(0.3, process.end).start()
    begun = time.monotonic()
    with pytest.raises(DataError, match="ended while it ran"):
        process.texts(LOOPS, MESSAGES, None, {}, [WHOLE])
    assert time.monotonic() - begun < 10
    assert process.texts("x", MESSAGES, None, {}, [WHOLE]) == ["x"]
    process.end()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers of the system")
def test_a_template_that_runs_ends_though_nobody_waits():
    code = (
        "import threading, os\n"
        "from coterie.data.chats.jinja_process import JinjaProcess\n"
        "from coterie.data.chats.rendering import Excerpt\n"
        "p = JinjaProcess(seconds=3.0)\n"
        "p.texts('', [], None, {}, [Excerpt(0, 0)])\n"
        "print(p._process.pid, flush=True)\n"
        "threading.Timer(0.3, os._exit, (0,)).start()\n"
        "p.texts('{{ (9 ** (9 ** 9)) is odd }}', [], None, {}, [Excerpt(0, 0)])\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            os.kill(int(found.stdout), 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("it runs on")
