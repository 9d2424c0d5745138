"""Chat templates are programs of strangers: they run in a process of their own, which is ended when
they take too long, too much memory, or write too much, and when nobody waits for them any more.
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
from pathlib import Path
from typing import Any

from coterie.core.errors import DataError
from coterie.data.chats.messages import Message, leading
from coterie.data.chats.rendering import Excerpt

SECONDS = 10.0  # for one request
CHARACTERS = 1 << 24  # of a text
_REMEDY = "Use another base, or name a file with another template: data.chat_template."
_WORKER = Path(__file__).with_name("jinja_worker.py")


class JinjaProcess:
    """The process that renders templates, started on first use. Calls may come from any thread.

    Args:
        seconds: Most seconds for one request.
        characters: Most characters of a text.
    """

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
        """Return the text of each excerpt of messages, or the template's refusal of it.

        Args:
            template: Jinja.
            messages: The messages for the template.
            tools: The template's variable `tools`.
            variables: Its other variables.
            excerpts: The parts of the messages.

        Raises:
            DataError: The template goes beyond the bounds.
        """
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
        """End the process: a waiting caller gets a DataError. The next request starts another."""
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
            answer: dict[str, Any] = json.loads(line)
            return answer
        process.kill()
        process.wait()
        if time.monotonic() - begun >= self.seconds:
            return {"exceeded": f"takes longer than {self.seconds:g} seconds"}
        return {"exceeded": "was ended while it ran"}

    def _started(self) -> subprocess.Popen[str]:
        """Return the process, a new one if there is none or this process was forked since. Raises
        DataError if it cannot be started.
        """
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
            raise DataError(
                f"the process that writes chats does not start: {ready['refused']}",
                "Install transformers again.",
            )
        self._process, self._owner = process, os.getpid()
        return process


def _refusal(reason: str) -> DataError:
    return DataError(
        f"the chat template refuses the messages: {reason}",
        "Change the roles or their order, or use another base or data.chat_template.",
    )


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


shared = JinjaProcess()
