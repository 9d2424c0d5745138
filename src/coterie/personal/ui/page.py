"""The frame of the local web pages: Gradio without logs, telemetry or history."""

import os
import re
import string
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from coterie.core.errors import Refused, extra
from coterie.core.printing import printable

STYLE = """
footer { display: none !important }
.gradio-container { width: 100%; max-width: 60rem !important; margin: auto !important }
.client { min-width: 9rem !important; align-self: center; overflow-wrap: anywhere }
.client p { font-weight: 600; margin: 0 }
"""
HOST = "127.0.0.1"
MOST = "16mb"  # the largest file to upload
_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
# the settings of every event: requests are answered one at a time, and are not a public API
QUIET = {
    "show_progress": "hidden",
    "concurrency_id": "models",
    "concurrency_limit": 1,
    "api_visibility": "private",
}


@contextmanager
def served(page: Any, style: str, port: int) -> Iterator[str]:
    """Serve a page, a Gradio `Blocks`, on this machine only, while the block runs; yield its link
    with the token that the page requires. Raises Refused without Gradio, or if the port is taken; 0
    is any free one.
    """
    from coterie.personal.api.guard import Limits, PageGuard, listening, new_token, running

    with listening(HOST, port) as listener:
        port = listener.getsockname()[1]
        guard = PageGuard(_app(page, STYLE + style), HOST, port, new_token())
        with running(guard, listener, Limits()):
            try:
                yield f"http://{HOST}:{port}{guard.link}"
            finally:
                page.close(verbose=False)


def _app(page: Any, style: str) -> Any:
    """Return the page as an application that stores no texts and loads nothing from the network."""
    from fastapi import FastAPI

    # fonts of the machine, since Gradio's are loaded from the network
    font = ["system-ui", "sans-serif"]
    return gradio().mount_gradio_app(
        FastAPI(openapi_url=None),
        page,
        "/",
        footer_links=[],
        run_history=False,
        show_error=False,
        ssr_mode=False,
        pwa=False,
        mcp_server=False,
        enable_monitoring=False,
        max_file_size=MOST,
        theme=gradio().themes.Default(font=font, font_mono=["monospace"]),
        css=style,
    )


def plain(text: str) -> str:
    """Return a text as Markdown that shows it unchanged, with no link, image, HTML or heading."""
    return _PUNCTUATION.sub(r"\\\1", " ".join(printable(text).split()))


def gradio() -> Any:
    """Import Gradio, an optional extra, with its telemetry off. Raises Refused if it is missing."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise Refused("the page needs Gradio, which is not installed", extra("serve")) from None
    return gradio
