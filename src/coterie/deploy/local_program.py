"""Runs a program of Flower's whose port is for this machine: it answers under its names only.

    python local_program.py PROGRAM ARGUMENT ...

Without TLS, Flower answers under any name, so that a web page whose name was made to point to this
machine (DNS rebinding) could submit runs.
"""

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import uvicorn
from starlette.middleware.trustedhost import TrustedHostMiddleware

NAMES = ("127.0.0.1", "localhost")


def _check_names() -> None:
    """Have every server of this process refuse requests under other names, and log no requests:
    strangers would fill the disk.
    """
    configure = uvicorn.Config.__init__

    def with_names(self: uvicorn.Config, app: Any, *args: Any, **settings: Any) -> None:
        settings["access_log"] = False
        configure(self, TrustedHostMiddleware(app, NAMES, www_redirect=False), *args, **settings)

    uvicorn.Config.__init__ = with_names  # type: ignore[method-assign]


if __name__ == "__main__":
    _check_names()
    sys.argv = sys.argv[1:]
    (program,) = entry_points(group="console_scripts", name=Path(sys.argv[0]).name)
    sys.exit(program.load()())
