"""The pages of `coterie serve` against whoever has not their link: other people of this machine,
pages of strangers in the owner's browser, and names that were made to point here.
"""

import http.client
import json
import re
import socket
import time
from urllib.parse import urlsplit

import pytest
from browser import opened
from flood import flood

import coterie
from coterie.models.layout import Layout

pytest.importorskip("uvicorn", reason="no uvicorn (pip install -e '.[serve]')")
from coterie.personal.ui.page import served

PATHS = (
    "/",
    "/page.json",
    "/page.css",
    "/keyboard.js",
    "/local.js",
    "/index.html",
    "/words",
    "/v1/models",
    "/openapi.json",
    "/..%2f..%2fetc/hostname",
)
SENT = ("/words", "/chat", "/classes", "/v1/completions", "/none")


@pytest.fixture(scope="module")
def link(bases, tmp_path_factory):
    from random_models import write_models

    folder = write_models(tmp_path_factory.mktemp("guarded"), bases["few"], {"ann": Layout(rank=2)})
    with served(coterie.load_all(folder), 0) as address:
        yield urlsplit(address)


def ask(link, path="/", method="GET", body=None, **headers) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", link.port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.request(method, path, body, named)
    return connection.getresponse()


def cookie(link) -> str:
    """What a browser has once it has opened the link."""
    return ask(link, f"/?{link.query}").headers["Set-Cookie"].partition(";")[0]


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_answered_without_the_token(link, path):
    for given in ("", "coterie=x", f"{cookie(link)}x", cookie(link).partition("=")[2]):
        response = ask(link, path, Cookie=given)
        assert (response.status, response.headers["Connection"]) == (401, "close")
        assert response.read() == (
            b"Open the whole link that coterie serve has printed: it has a token in it."
        )
        assert "Set-Cookie" not in response.headers


@pytest.mark.parametrize("path", SENT)
def test_nothing_is_taken_without_the_token_and_no_body_is_read(link, path):
    with socket.create_connection(("127.0.0.1", link.port), timeout=5) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {10**12}\r\n\r\n".encode()
        )
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 401")


def test_the_link_gives_a_cookie_for_this_server_alone(link):
    response = ask(link, f"/?{link.query}")
    assert (response.status, response.headers["Location"]) == (303, "/")
    name, *attributes = response.headers["Set-Cookie"].split("; ")
    assert name == f"coterie-{link.port}={link.query.removeprefix('token=')}"
    assert {one.lower() for one in attributes} == {"httponly", "samesite=strict", "path=/"}
    for query in ("token=", "token=x", f"{link.query}x", f"x{link.query}"):
        assert ask(link, f"/?{query}").status == 401
    assert ask(link, f"/page.json?{link.query}").status == 401  # this is not the link
    assert ask(link, "/page.json", Cookie=cookie(link)).status == 200


def test_who_follows_the_link_from_a_page_elsewhere_arrives(link):
    """A redirect there would come without the cookie: SameSite=Strict looks at who began."""
    response = ask(link, f"/?{link.query}", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")
    assert (response.status, response.headers["Refresh"]) == (200, "0; url=/")
    assert response.headers["Set-Cookie"].startswith("coterie-")


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "evil.example:{port}"])
@pytest.mark.parametrize("path", [PATHS[0], PATHS[1], PATHS[4], SENT[0], SENT[1]])
def test_a_name_that_is_not_the_servers_is_refused_with_the_token_too(link, path, host):
    """DNS rebinding."""
    host = host.format(port=link.port)
    headers = {"Host": host, "Origin": f"http://{host}", "Cookie": cookie(link)}
    response = ask(link, path, "POST" if path in SENT else "GET", b"{}", **headers)
    assert response.status == 403
    assert "Use its address" in response.read().decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "https://127.0.0.1"},
        {"Origin": "null"},
        {"Origin": ""},
        {"Origin": "http://localhost:{port}"},  # another origin than the address that is asked
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "no-cors"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Mode": "no-cors"},  # another port
    ],
)
@pytest.mark.parametrize("path", ["/", "/page.json", *SENT])
def test_a_page_of_others_is_refused_with_the_cookie_too(link, path, headers):
    named = {name: value.format(port=link.port) for name, value in headers.items()}
    response = ask(link, path, "POST" if path in SENT else "GET", Cookie=cookie(link), **named)
    assert response.status == 403


def test_a_request_to_become_a_websocket_is_an_ordinary_one(link):
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec_WebSocket_Key": "a" * 22}
    assert ask(link, "/words", **upgrade).status == 401
    assert ask(link, "/", Cookie=cookie(link), **upgrade).status == 200


def test_every_answer_says_what_browsers_may_do_with_it(link):
    token = cookie(link)
    for response in (
        ask(link),
        ask(link, Cookie=token),
        ask(link, "/page.json", Cookie=token),
        ask(link, "/none", Cookie=token),
        ask(link, f"/?{link.query}"),
        ask(link, Host="evil.example"),
    ):
        headers = response.headers
        policy = dict(part.split(" ", 1) for part in headers["Content-Security-Policy"].split("; "))
        assert policy["default-src"] == "'self'"
        assert policy["frame-ancestors"] == policy["form-action"] == "'none'"
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert not re.search(r"https?:|\*", headers["Content-Security-Policy"])
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Referrer-Policy"] == "no-referrer"


def test_nothing_of_a_page_comes_from_elsewhere_and_no_strangers_script_runs(link):
    """In a browser, which refuses and reports what the policy forbids."""
    with opened() as page:
        complaints: list[str] = []
        page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
        page.goto(link.geturl())
        page.wait_for_selector("button.word.unrouted")
        assert page.url == f"http://127.0.0.1:{link.port}/"  # the token is in no address bar
        assert page.evaluate("document.cookie") == ""
        page.locator("#text").fill("cab")
        page.wait_for_timeout(300)
        assert not [text for text in complaints if "Content Security Policy" in text]
        page.evaluate(
            """document.body.insertAdjacentHTML("beforeend",
            "<img src=x onerror='window.harmed = 1'>");
            const script = document.createElement("script");
            script.text = "window.harmed = 2";
            document.body.append(script)"""
        )
        page.wait_for_timeout(300)
        assert page.evaluate("window.harmed") is None
        assert len([text for text in complaints if "Content Security Policy" in text]) >= 2


def test_texts_are_kept_nowhere(link):
    with opened() as page:
        page.goto(link.geturl())
        page.wait_for_selector("button.word.unrouted")
        page.locator("#text").fill("cab")
        page.wait_for_timeout(300)
        kept = "JSON.stringify([{...localStorage}, {...sessionStorage}])"
        assert page.evaluate(kept) == "[{},{}]"
    for path in PATHS[:5]:
        assert ask(link, path, Cookie=cookie(link)).headers["Cache-Control"] == "no-store"


@pytest.mark.parametrize(
    ("body", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b"{}", "application/json", 400),
        (b'{"chats": []}', "application/json", 400),
        (b'{"chats": [{"client": "zoe"}]}', "application/json", 404),
        (b'{"chats": [{"client": "ann"}], "more": 1}', "application/json", 400),
        (b'{"chats": [{"client": "ann"}]}', "text/plain", 415),
        (b'{"chats": [{"client": "ann", "messages": [{"role": 1}]}]}', "application/json", 400),
        (b"x" * (2 << 20), "application/json", 413),
    ],
)
def test_what_is_no_request_of_the_page_is_refused(link, body, kind, status):
    response = ask(link, "/words", "POST", body, Cookie=cookie(link), Content_Type=kind)
    assert response.status == status
    assert json.loads(response.read())["error"]["message"]


def test_a_kept_connection_is_quick(link):
    token = cookie(link)
    connection, times = http.client.HTTPConnection("127.0.0.1", link.port, timeout=10), []
    for _ in range(40):
        start = time.perf_counter()
        connection.request("GET", "/page.json", headers={"Cookie": token})
        assert b"ann" in connection.getresponse().read()
        times.append(time.perf_counter() - start)
    assert sorted(times)[10] < 0.02


@pytest.mark.parametrize("sent", [b"", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: "])
def test_the_owner_is_answered_while_a_stranger_holds_connections(link, sent):
    """From the owner's own address, and each is opened again that is closed."""
    token = cookie(link)
    with flood(link.port, 512, sent):
        for _ in range(10):
            begun = time.monotonic()
            assert ask(link, "/page.json", Cookie=token).status == 200
            assert time.monotonic() - begun < 5
            time.sleep(0.1)
