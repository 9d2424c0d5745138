"""`serve --api` against who means harm: every attack is answered or cut off, and others are served
meanwhile.
"""

import gzip
import http.client
import json
import socket
import time
from contextlib import ExitStack, contextmanager

import openai
import pytest
from flood import closed, flood
from random_models import write_models
from test_openai_protocol import TOKEN

import coterie
from coterie.models.layout import Layout
from coterie.personal.api import server
from coterie.personal.api.guard import Guard, Limits
from coterie.personal.api.server import Settings

LIMITS = Limits(body=10_000, head_s=1.0, body_s=1.0, write_s=1.0, connections=20, of_an_address=8)
ASKED = {"model": "ann", "prompt": "a", "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(bases, tmp_path_factory):
    where = tmp_path_factory.mktemp("attacked")
    return write_models(where, bases["few"], {"ann": Layout(rank=2)})


@contextmanager
def served(folder, limits: Limits):
    problems: list[str] = []
    settings = Settings(0, token=TOKEN, limits=limits)
    with server.served(coterie.load_all(folder), settings, problems.append) as address:
        yield int(address.split(":")[2].partition("/")[0])
    assert problems == []


@pytest.fixture(scope="module")
def port(folder):
    with served(folder, LIMITS) as port:
        yield port


@pytest.fixture(scope="module")
def usual_port(folder):
    with served(folder, Limits()) as port:
        yield port


@pytest.fixture(autouse=True)
def still_serves(port):
    """Whatever was done, the next caller is answered."""
    yield
    address = f"http://127.0.0.1:{port}/v1"
    with openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0) as client:
        assert client.completions.create(**ASKED).choices


@contextmanager
def connected(port: int):
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        yield connection


def answer(connection: socket.socket) -> tuple[int, dict]:
    """The status and the JSON of a response; 0 where the connection was closed without one."""
    received = b""
    try:
        while chunk := connection.recv(1 << 16):
            received += chunk
    except ConnectionError:
        pass
    if not received:
        return 0, {}
    head, _, body = received.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body)


def request(
    body: bytes,
    path: str = "/v1/completions",
    length: int | None = None,
    method: str = "POST",
    **headers: str,
) -> bytes:
    sent = {
        "Host": "127.0.0.1",
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Length": str(len(body) if length is None else length),
    } | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = [f"{method} {path} HTTP/1.1", *(f"{n}: {v}" for n, v in sent.items() if v)]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def asked(port: int, body: bytes, **how) -> tuple[int, str]:
    with connected(port) as connection:
        connection.sendall(request(body, **how))
        status, found = answer(connection)
    assert set(found["error"]) == {"message", "type", "param", "code"}
    return status, found["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 9000,
        b'{"a":' * 1500,
        b'{"model": "ann", "temperature": NaN}',
        b'{"model": "ann", "temperature": Infinity}',
        b'{"model": "ann", "temperature": 1e999}',
        b'{"model": "ann", "top_p": -1e-300}',
        b'{"model": "ann", "max_tokens": -0.0}',
        b'{"model": "ann", "max_tokens": ' + b"9" * 9000 + b"}",
        b'{"model": "ann", "prompt": "\\ud800"}',
        b'{"model": "ann", "prompt": {"a": 1}}',
        b'{"model": ["ann"]}',
        b'{"model": "ann", "stop": ' + json.dumps(["ab"] * 1500).encode() + b"}",
        b'{"model": "ann", "logit_bias": {"1": NaN}}',
        b'{"model": "ann", "logit_bias": {"-1": 1}}',
        b'{"model": "ann", "logit_bias": {"\xd9\xa1": 1}}',  # a digit, but not of ASCII
        b'{"model": "ann", "prompt": [1e3]}',
        b'{"model": "ann", "stream_options": {"include_usage": 1}}',
        b'{"model": "ann", "n": 1e9}',
    ],
)
def test_bodies_that_are_no_requests(port, body):
    status, _ = asked(port, body)
    assert status == 400


def test_a_temperature_that_is_almost_nothing_is_greedy(port):
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN)
    settings = {"model": "ann", "prompt": "cab", "max_tokens": 9}
    texts = {
        client.completions.create(**settings, temperature=t).choices[0].text
        for t in (0, 1e-12, 5e-324)
    }
    assert len(texts) == 1


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_forms_and_texts_of_web_pages_are_no_requests(port, kind):
    status, message = asked(port, json.dumps(ASKED).encode(), Content_Type=kind)
    assert status == 415
    assert "must be application/json" in message


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7860",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.1@evil.example",
        "[::1].evil.example",
        "0x7f.1",
        "xn--lclhst-9ya",
    ],
)
def test_a_name_that_is_not_the_servers_is_refused(port, host):
    """A page of a stranger whose name points to this machine: DNS rebinding."""
    status, message = asked(port, json.dumps(ASKED).encode(), Host=host)
    assert status == 403
    assert "Use its address" in message


def test_the_servers_own_names_and_addresses_are_taken(port):
    def app(*_):
        raise AssertionError

    guard = Guard(app, "127.0.0.1", TOKEN)
    for host in ("127.0.0.1", f"127.0.0.1:{port}", "localhost:1", "LOCALHOST", "[::1]:7860"):
        assert guard._is_own(host)
        assert _status(port, request(json.dumps(ASKED).encode(), Host=host)) == 200
    for host in ("", ":", "[]", "evil.example:80:80"):
        assert not guard._is_own(host)


def _status(port: int, sent: bytes) -> int:
    with connected(port) as connection:
        connection.sendall(sent)
        return int(connection.recv(1 << 16).split()[1])


def test_the_token_is_asked_for_before_anything_else(port):
    for given in ("", "Bearer", f"Basic {TOKEN}", f"Bearer {TOKEN} x", "\xe9"):
        for path, method in (("/v1/completions", "POST"), ("/v1/models", "GET"), ("/no", "PUT")):
            how = {"path": path, "method": method, "Authorization": given}
            assert asked(port, b"x", length=10**9, **how)[0] == 401


def test_a_body_that_is_said_to_be_huge_is_not_waited_for(port):
    start = time.monotonic()
    status, message = asked(port, b"{", length=10**12)
    assert status == 413
    assert "10,000 bytes" in message
    assert time.monotonic() - start < LIMITS.body_s


@pytest.mark.parametrize("size", [10_001, 100_000])
def test_a_body_that_is_too_large(port, size):
    status, _ = asked(port, b" " * size)
    assert status == 413


def test_a_body_in_chunks_without_end(port):
    with connected(port) as connection:
        connection.sendall(request(b"", Content_Length="", Transfer_Encoding="chunked"))
        try:
            for _ in range(1000):
                connection.sendall(b"1000\r\n" + b"x" * 0x1000 + b"\r\n")
        except ConnectionError:  # cut off within 4 MB
            return
        assert answer(connection)[0] == 413


def test_a_body_that_trickles(port):
    with connected(port) as connection:
        connection.sendall(request(b"{", length=5000))
        start = time.monotonic()
        try:
            while time.monotonic() - start < 3:
                connection.sendall(b" ")
                time.sleep(0.1)
        except ConnectionError:
            pass
        assert answer(connection)[0] in (408, 0)  # 0: it was told, and then the caller went on
        assert time.monotonic() - start < 5
    with connected(port) as connection:
        connection.sendall(request(b"{", length=5000))
        assert answer(connection)[0] == 408


@pytest.mark.parametrize("head", [b"", b"POST /v1/comp", b"POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(port, head):
    start = time.monotonic()
    with connected(port) as connection:
        try:
            while time.monotonic() - start < 4:
                connection.sendall(head[:1] if head else b"")
                head = head[1:]
                connection.settimeout(0.1)
                try:
                    if connection.recv(1) == b"":
                        break
                except TimeoutError:
                    pass
        except ConnectionError:
            pass
    assert time.monotonic() - start < 2.5


def test_a_head_without_end(port):
    with connected(port) as connection:
        try:
            connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 100_000)
            assert connection.recv(1 << 16).split()[1] == b"400"
        except ConnectionError:
            pass


def test_what_is_no_http(port):
    for sent in (b"\x16\x03\x01\x02\x00", b"SSH-2.0-x\r\n\r\n", b"GET\r\n\r\n", b"\x00" * 1000):
        with connected(port) as connection:
            connection.sendall(sent)
            received = connection.recv(1 << 16)
            assert not received or received.split()[1] == b"400"


@pytest.mark.parametrize("count", [512, 1100])
@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", b"GET /v1/models HTTP/1.1\r\n\r\n"])
def test_the_owner_is_answered_while_a_stranger_holds_connections(usual_port, count, sent):
    """From the owner's own address, and each is opened again that is closed. With the usual limits
    and the usual retries: on a busy machine many strangers may come before the owner has asked.
    """
    with flood(usual_port, count, sent):
        for _ in range(5):
            begun = time.monotonic()
            with openai.OpenAI(
                base_url=f"http://127.0.0.1:{usual_port}/v1", api_key=TOKEN, timeout=10
            ) as client:  # a new connection
                assert client.completions.create(**ASKED).choices
            assert time.monotonic() - begun < 5


@pytest.mark.parametrize("addresses", [1, 40])
def test_strangers_hold_as_many_connections_as_the_limits_say(port, addresses):
    """The first to come are the first to go."""
    most = LIMITS.of_an_address if addresses == 1 else LIMITS.connections
    begun = time.monotonic()
    with ExitStack() as stack:
        silent = [
            stack.enter_context(
                socket.create_connection(
                    ("127.0.0.1", port), 5, (f"127.0.2.{1 + number % addresses}", 0)
                )
            )
            for number in range(60)
        ]
        for connection in silent:
            connection.setblocking(False)
        gone: list[bool] = []
        while sum(gone) < len(silent) - most:
            assert time.monotonic() - begun < 10
            time.sleep(0.1)
            gone = [closed(connection) for connection in silent]
        assert gone == sorted(gone, reverse=True)
        if time.monotonic() - begun < LIMITS.head_s:  # after which all go
            assert sum(gone) == len(silent) - most


def test_who_has_shown_the_token_keeps_the_connection(port):
    """Neither strangers cost it its place, nor the time since it began: that of heads is counted
    from the last answer on.
    """
    owner = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    owner.connect()
    connection = owner.sock
    with ExitStack() as stack:
        for _ in range(6):
            owner.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
            assert b"ann" in owner.getresponse().read()
            assert owner.sock is connection  # it was not opened again
            for _ in range(10):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
            time.sleep(LIMITS.head_s * 0.4)
    owner.close()


def test_a_kept_connection_in_steady_use_is_quick_and_never_cut(port):
    """Without TCP_NODELAY a caller that acknowledges late waits 40 ms for each answer; and the time
    for a request's head must not run out between two requests.
    """
    owner = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    owner.connect()
    connection, times, begun = owner.sock, [], time.monotonic()
    while time.monotonic() - begun < 3 * LIMITS.head_s:
        start = time.perf_counter()
        owner.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        assert b"ann" in owner.getresponse().read()
        times.append(time.perf_counter() - start)
        assert owner.sock is connection  # it was not opened again
        time.sleep(0.02)
    owner.close()
    assert len(times) > 20
    assert sorted(times)[len(times) // 4] < 0.02


def test_a_page_of_others_is_refused_with_the_token_too(port):
    body = json.dumps(ASKED).encode()
    for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
        assert asked(port, body, Origin=origin)[0] == 403
    assert asked(port, body, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="cors")[0] == 403
    assert _status(port, request(body, Origin="http://127.0.0.1")) == 200


def test_a_caller_who_does_not_read_is_cut_off(bases, tmp_path):
    """With echoes of a large prompt there is more to send than the buffers of the network take."""
    folder = write_models(tmp_path, bases["few"], {"ann": Layout(rank=2)})
    limits = Limits(write_s=0.5)
    settings = Settings(0, token=TOKEN, queue=500, limits=limits)
    problems: list[str] = []
    with server.served(coterie.load_all(folder), settings, problems.append) as address:
        port = int(address.split(":")[2].partition("/")[0])
        asked = {"model": "ann", "max_tokens": 1, "echo": True, "logprobs": 5, "stream": True}
        body = json.dumps(asked | {"prompt": [[5] * 60] * 400}).encode()
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", port))
            connection.sendall(request(body))
            client = openai.OpenAI(base_url=address, api_key=TOKEN, max_retries=0)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                time.sleep(0.2)
                try:  # there is room as soon as the work is dropped
                    prompts = ["a"] * 516
                    client.completions.create(model="ann", prompt=prompts, max_tokens=1)
                    break
                except openai.RateLimitError:
                    continue
            else:
                pytest.fail("the work of a caller who does not read goes on")
    assert problems == []


def gzipped(port: int, body: bytes, encoding: str = "gzip") -> tuple[int, str]:
    """The status and text of the answer to a body of this encoding."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    headers = {
        "Authorization": f"Bearer {TOKEN}",
        "Content-Type": "application/json",
        "Content-Encoding": encoding,
    }
    connection.request("POST", "/v1/completions", body, headers)
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_gzip_is_taken_within_the_bounds_of_plain_bodies(port):
    packed = gzip.compress(json.dumps(ASKED).encode())
    assert gzipped(port, packed)[0] == gzipped(port, packed, "GZIP")[0] == 200
    bomb = gzip.compress(json.dumps(ASKED | {"prompt": "a" * 1_000_000}).encode())
    assert len(bomb) < LIMITS.body
    for body, encoding, status, said in (
        (bomb, "gzip", 413, "10,000 bytes"),
        (packed[:-9], "gzip", 400, "ends too early"),
        (b"{}", "gzip", 400, "is not gzip"),
        (packed, "br", 415, "'br'"),
        (packed, "gzip, gzip", 415, "gzip, gzip"),
    ):
        answered = gzipped(port, body, encoding)
        assert answered[0] == status
        assert said in answered[1]


def test_a_connection_in_steady_use_is_kept_and_answered_at_once(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    sockets, seconds, begin = set(), [], time.monotonic()
    while time.monotonic() < begin + 3 * LIMITS.head_s:
        asked_at = time.perf_counter()
        connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {TOKEN}"})
        response = connection.getresponse()
        assert response.status == 200
        assert response.read()
        seconds.append(time.perf_counter() - asked_at)
        sockets.add(connection.sock)
        time.sleep(0.05)
    assert len(sockets) == 1
    assert sorted(seconds)[len(seconds) // 2] < 0.03
