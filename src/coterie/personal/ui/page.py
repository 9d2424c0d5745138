"""What the local web pages share: Gradio without log output, telemetry and history, on this machine
only, for whoever has the link.
"""

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
MOST = "16mb"  # of a file
_PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")
# Of every event: models answer one at a time, and nobody else may ask them
QUIET = {
    "show_progress": "hidden",
    "concurrency_id": "models",
    "concurrency_limit": 1,
    "api_visibility": "private",
}


@contextmanager
def served(page: Any, style: str, port: int) -> Iterator[str]:
    """Show a page on this machine only, while the block runs; yields its link, which has a token
    in it: nobody else is shown the page.

    Args:
        page: A Gradio `Blocks` that is not started yet.
        style: CSS of its own.
        port: A free port; 0: any.

    Raises:
        Refused: Gradio is not installed, or the port is taken.
    """
    from coterie.personal.api.guard import Limits, new_token
    from coterie.personal.api.listener import listening, running
    from coterie.personal.ui.guard import PageGuard

    with listening(HOST, port) as listener:
        port = listener.getsockname()[1]
        guard = PageGuard(_app(page, STYLE + style), HOST, port, new_token())
        with running(guard, listener, Limits()):
            try:
                yield f"http://{HOST}:{port}{guard.link}"
            finally:
                page.close(verbose=False)


def _app(page: Any, style: str) -> Any:
    """Return the page as an application that keeps no texts and asks nothing of the network."""
    from fastapi import FastAPI

    font = ["system-ui", "sans-serif"]  # of the machine itself: Gradio's are in the network
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
    r"""Return any text as Markdown that shows it unchanged: no links, no pictures from elsewhere,
    no HTML, no headings.
    """
    return _PUNCTUATION.sub(r"\\\1", " ".join(printable(text).split()))


def gradio() -> Any:
    """Import Gradio, an optional extra, with its telemetry off. Raises Refused if it is not
    installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    try:
        import gradio
    except ImportError:
        raise Refused("the page needs Gradio, which is not installed", extra("serve")) from None
    return gradio
