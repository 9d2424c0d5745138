"""A process that renders chat templates, for `jinja_process`: JSON requests in, JSON answers out.

It is started by path, so that it loads transformers' function but nothing of coterie.
"""

import json
import os
import signal
import sys
from typing import Any

_MEMORY = 1 << 29  # bytes that a template may take beside what Python itself does


def main() -> None:
    """Answer requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # other output must not be read as an answer
    ready: dict[str, Any] = {"ready": True}
    try:
        from transformers.utils.chat_template_utils import render_jinja_template
    except Exception as error:
        ready = {"refused": f"{type(error).__name__}: {error}"}
    _bound_memory()
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        _end_after(request["seconds"])
        try:
            texts = _texts(render_jinja_template, request)
            answer: dict[str, Any] = {"texts": texts}
        except MemoryError:
            answer = {"exceeded": "takes too much memory"}
        _end_after(0)
        print(json.dumps(answer), file=answers, flush=True)


def _texts(render: Any, request: dict[str, Any]) -> list[Any]:
    """Return the text of each excerpt, or a list with the reason why it was refused."""
    texts = list[Any]()
    messages, kept = request["messages"], request["kept"]
    for begin, end, prompt in request["wanted"]:
        part = messages[:end] if begin <= kept else messages[:kept] + messages[begin:end]
        try:
            ((text,), _) = render(
                conversations=[part],
                tools=request["tools"],
                chat_template=request["template"],
                add_generation_prompt=prompt,
                **request["variables"],
            )
        except MemoryError:
            raise
        except Exception as error:  # templates raise whatever they like
            text = [(str(error).strip() or type(error).__name__).splitlines()[0][:2000]]
        if len(text) > request["characters"]:
            raise MemoryError
        texts.append(text)
    return texts


def _bound_memory() -> None:
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:
            size = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + _MEMORY, size + _MEMORY))
    except (ImportError, OSError, ValueError):
        pass


def _end_after(seconds: float) -> None:
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, seconds)


if __name__ == "__main__":
    main()
