"""What watches a server asks /health and /metrics, on this machine, without a key."""

import json
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from coterie.core.errors import Refused
from coterie.deploy.keys import Link
from coterie.deploy.server import Server, health


def asked(port: int, path: str) -> tuple[int, str]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_probes_see_whether_the_superlink_listens(tmp_path: Path) -> None:
    process: Any = None  # is not looked at
    with socket.create_server(("127.0.0.1", 0)) as superlink:
        link = Link(f"127.0.0.1:{superlink.getsockname()[1]}", None)
        server = Server(link, link, None, tmp_path, process, {"key": ("ann", "7")}, starts=3)
        with health(server, 0) as port:
            status, text = asked(port, "/health")
            assert (status, json.loads(text)) == (200, {"status": "ok"})
            lines = asked(port, "/metrics")[1].splitlines()
            figures = dict(line.split() for line in lines if not line.startswith("#"))
            assert figures == {
                "coterie_superlink_up": "1",
                "coterie_superlink_starts_total": "3",
                "coterie_registered_devices": "1",
            }
            assert "ann" not in " ".join(lines)
            assert asked(port, "/")[0] == 404
            superlink.close()
            assert asked(port, "/health")[0] == 503
            assert "coterie_superlink_up 0" in asked(port, "/metrics")[1]
            with pytest.raises(Refused, match=f"port {port} is in use"), health(server, port):
                pass
