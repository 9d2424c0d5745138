"""A plain server of static files on this machine, which remembers what it was asked for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Served:
    """A folder that is served.

    Args:
        address: Of the folder.
        asked: What was asked for, in order.
    """

    address: str = ""
    asked: list[str] = field(default_factory=list)


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """Within the block the folder is served, as `python -m http.server` does."""
    served = Served()

    class Handler(SimpleHTTPRequestHandler):
        def log_request(self, *_: object) -> None:
            served.asked.append(self.path)

        def log_error(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        served.address = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
