"""What the local web pages share: Gradio without log output and telemetry, on this machine only."""

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
    """Show a page on this machine only, while the block runs; yields its address.

    Args:
        page: A Gradio `Blocks` that is not started yet.
        style: CSS of its own.
        port: A free port.

    Raises:
        Refused: Gradio is not installed, or the port is taken.
    """
    themes = gradio().themes
    font = [
        "system-ui",
        "sans-serif",
    ]  # names of the machine's own: Gradio's would come from the network
    try:
        page.launch(
            server_name="127.0.0.1",
            server_port=port,
            share=False,
            quiet=True,
            prevent_thread_lock=True,
            theme=themes.Default(font=font, font_mono=["monospace"]),
            css=STYLE + style,
            footer_links=[],
        )
    except OSError:
        raise Refused(
            f"port {port} is taken", f"Give another one, for example --port {port + 1}."
        ) from None
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        page.close(verbose=False)


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
