"""Rendering of a base's chat template in another process; control tokens in messages stay text.

Chat templates are programs of strangers. Their process is ended when it takes too long or too much
memory, writes too much, or when nobody waits for it any more.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from coterie.core.errors import DataError
from coterie.data.chats.messages import ASSISTANT, Message, leading, user
from coterie.data.chats.rendering import Excerpt, Renders, as_template
from coterie.data.text_encoding import TextEncoder

SECONDS = 10.0  # for one request
CHARACTERS = 1 << 24  # of a text
_REMEDY = "Use another base, or name a file with another template: data.chat_template."
_WORKER = Path(__file__).with_name("jinja_worker.py")


class JinjaProcess:
    """The process that renders templates, started on first use. Calls may come from any thread."""

    def __init__(self, seconds: float = SECONDS, characters: int = CHARACTERS) -> None:
        self.seconds, self.characters = seconds, characters
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0  # the process that has started it, which may have forked since
        atexit.register(self.end)

    def texts(
        self,
        template: str,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        variables: Mapping[str, Any],
        excerpts: Sequence[Excerpt],
    ) -> list[str | DataError]:
        """Return each excerpt's text, or the template's refusal of it. Raises DataError."""
        request = {
            "template": template,
            "messages": messages,
            "kept": leading(messages),
            "tools": tools,
            "variables": variables,
            "wanted": excerpts,
            "seconds": self.seconds,
            "characters": self.characters,
        }
        with self._lock:
            answer = self._answer(json.dumps(request, default=_plain))
        if "exceeded" in answer:
            raise DataError(f"the chat template {answer['exceeded']}", _REMEDY)
        return [text if isinstance(text, str) else _refusal(*text) for text in answer["texts"]]

    def end(self) -> None:
        """End the process: a waiting caller gets a DataError, the next request starts a new one."""
        if (process := self._process) is not None and self._owner == os.getpid():
            process.kill()
            process.wait()

    def _answer(self, request: str) -> dict[str, Any]:
        process, begun = self._started(), time.monotonic()
        assert process.stdin
        assert process.stdout
        timer = threading.Timer(self.seconds, process.kill)
        if not hasattr(signal, "setitimer"):  # by which it ends itself
            timer.start()
        try:
            process.stdin.write(request + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = ""
        finally:
            timer.cancel()
        if line.endswith("\n"):
            return cast(dict[str, Any], json.loads(line))
        process.kill()
        process.wait()
        if time.monotonic() - begun >= self.seconds:
            return {"exceeded": f"takes longer than {self.seconds:g} seconds"}
        return {"exceeded": "was ended while it ran"}

    def _started(self) -> subprocess.Popen[str]:
        process = self._process if self._owner == os.getpid() else None
        if process is not None and process.poll() is None:
            return process
        process = subprocess.Popen(
            [sys.executable, "-P", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="utf-8",
        )
        assert process.stdout
        ready = json.loads(process.stdout.readline() or '{"refused": "it ended"}')
        if "refused" in ready:
            process.kill()
            problem = f"the process that writes chats does not start: {ready['refused']}"
            raise DataError(problem, "Install transformers again.")
        self._process, self._owner = process, os.getpid()
        return process


def _refusal(reason: str) -> DataError:
    remedy = "Change the roles or their order, or use another base or data.chat_template."
    return DataError(f"the chat template refuses the messages: {reason}", remedy)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


shared = JinjaProcess()


NO_TEMPLATE = (
    "Use a base that has one (their names often end in -Instruct or -chat), or name a file: "
    "--set data.chat_template=FILE."
)
_CALL: Message = {"function": {"name": "add", "arguments": {"summand": "two"}}}


class Writer:
    """Writes messages with a base's chat template, if any, or its other template for tools."""

    def __init__(self, template: str | None, with_tools: str | None, texts: TextEncoder) -> None:
        self._template, self._with_tools, self._texts = template, with_tools, texts

    def template_for(self, tools: Sequence[Any] | None) -> str:
        """Return the template for messages with or without tools."""
        return str(self._with_tools if tools else self._template)

    def text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        prompt: bool = False,
        template: str | None = None,
    ) -> str:
        """Return the text of normal messages by the base's or the given template; with `prompt`,
        with the beginning of an answer. Raises DataError.
        """
        part = Excerpt(0, len(messages), prompt)
        (text,) = self._texts_of(*self._shown(messages, tools), [part], template)
        if isinstance(text, DataError):
            raise text
        return text

    def renders(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> Renders:
        """Return the texts of messages and their parts, each rendered on first use."""
        return Renders(self._texts_of, *self._shown(messages, tools))

    def _texts_of(
        self,
        shown: Sequence[Message],
        tools: Sequence[Any] | None,
        excerpts: Sequence[Excerpt],
        template: str | None = None,
    ) -> list[str | DataError]:
        """Return the rendered excerpts, or refusals of them. Raises DataError beyond the bounds."""
        if self._template is None:
            raise DataError("the base has no chat template", NO_TEMPLATE)
        variables = self._texts.tokenizer.special_tokens_map
        template = template or self.template_for(tools)
        texts = shared.texts(template, shown, tools, variables, excerpts)
        return [self._texts.marked(text) if isinstance(text, str) else text for text in texts]

    def _shown(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        arguments_as_text: bool | None = None,
    ) -> tuple[list[Message], Any]:
        if arguments_as_text is None:
            arguments_as_text = self._arguments_as_text
        shown = [as_template(message, arguments_as_text) for message in messages]
        if self._texts.control_tokens == "tokens":
            return shown, tools
        shield = self._texts.shield
        return [shield(message, message["role"] == ASSISTANT) for message in shown], shield(tools)

    @cached_property
    def _arguments_as_text(self) -> bool:
        """Whether the template takes a call's arguments as JSON text only."""
        example = [user("Which?"), {"role": ASSISTANT, "content": "", "tool_calls": [_CALL]}]

        def written(as_text: bool) -> bool:
            shown = self._shown(example, None, as_text)
            (text,) = self._texts_of(*shown, [Excerpt(0, len(example))])
            return isinstance(text, str) and "two" in text.partition("?")[2]

        return written(True) and not written(False)
