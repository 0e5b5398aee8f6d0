"""Clients that do not read, and connections without requests, hold memory and places briefly."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import httpx
import pytest
from ed_esurge.config import ServerLimits
from ed_esurge.server.http.admission import COUNTED_ANSWER, Admission, Budget
from ed_esurge.server.http.auth import ApiKey
from ed_esurge.server.http.connections import (
    IDLE_SECONDS,
    LOWEST_RATE,
    ConnectionSlots,
    WriteWatch,
)
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

DESCRIPTION = "d" * 60_000
TOOLS = [
    {"type": "function", "name": f"f{number}", "description": DESCRIPTION, "parameters": {}}
    for number in range(30)
]
LONG_RESPONSE = {"input": "a", "max_output_tokens": 1, "tools": TOOLS, "tool_choice": "none"}
LENGTH = 2**18
STREAM = {"prompt": "a", "max_tokens": LENGTH - 8, "stream": True}


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Iterator[str]:
    engine = ScriptedEngine(lambda prompt, choice: "x" * LENGTH, max_model_len=LENGTH)
    folder = tmp_path_factory.mktemp("batches")
    with background(engine, limits={"write_timeout": 1.0}, batch_directory=folder) as url:
        yield url.removesuffix("/v1")


def open_slow_reader(root: str, method: str, path: str, body: object = None) -> socket.socket:
    """Send a request over a connection with a small buffer, and do not read the answer."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**14)
    client.settimeout(30)
    client.connect(("127.0.0.1", httpx.URL(root).port))
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def read_answer(client: socket.socket, pause: float = 0.0) -> bytes:
    """Return all bytes until the server closes the connection."""
    answer = b""
    try:
        while part := client.recv(2**16):
            answer += part
            time.sleep(pause)
    except ConnectionError:
        pass
    return answer


def wait_for_reset(client: socket.socket) -> None:
    """Wait until the server has closed the connection, without reading."""
    events = select.poll()
    events.register(client, 0)  # errors and the end are always reported
    assert events.poll(30_000), "the server did not close the connection"


def long_answers(root: str) -> dict[str, tuple[str, str, object]]:
    """Return a request with a long answer of each kind of route."""
    stored = httpx.post(f"{root}/v1/responses", json=LONG_RESPONSE, timeout=60)
    data = json.dumps({"padding": "x" * 2**21}).encode()
    upload = httpx.post(
        f"{root}/v1/files", files={"file": ("a.jsonl", data)}, data={"purpose": "batch"}, timeout=60
    )
    return {
        "stored response": ("GET", f"/v1/responses/{stored.json()['id']}", None),
        "file": ("GET", f"/v1/files/{upload.json()['id']}/content", None),
        "answer": ("POST", "/v1/responses", LONG_RESPONSE),
        "stream": ("POST", "/v1/completions", STREAM),
    }


@pytest.mark.nightly
def test_unread_answers_end_after_the_time_limit(root):
    """Every kind of answer: one part, a file, a stream."""
    cases = long_answers(root)
    readers = {name: open_slow_reader(root, *case) for name, case in cases.items()}
    for name, reader in readers.items():
        wait_for_reset(reader)
        answer = read_answer(reader)
        assert answer.startswith(b"HTTP/1.1 200"), name
        assert len(answer) < 2**20, f"the server waited for the reader of {name}"
        assert b"[DONE]" not in answer
        reader.close()
    assert httpx.get(f"{root}/health").status_code == 200


@pytest.mark.nightly
def test_slow_reader_above_the_lowest_rate_receives_the_complete_answer(root):
    method, path, _ = long_answers(root)["stored response"]
    expected = httpx.get(f"{root}{path}", timeout=60).content
    reader = open_slow_reader(root, method, path)
    answer = read_answer(reader, pause=0.03)
    assert answer.partition(b"\r\n\r\n")[2] == expected


def test_reader_with_a_byte_from_time_to_time_is_late():
    watch = WriteWatch(10.0)
    watch.written = 10**6
    assert not watch.is_late(10**6, 0.0)
    assert not watch.is_late(10**6 - 1, 9.0)
    assert watch.is_late(10**6 - 2, 10.0)
    # A reader at the lowest rate, and one that empties the buffer, are not late.
    watch = WriteWatch(10.0)
    watch.written = 10**6
    waiting = 10**6
    for second in range(100):
        assert not watch.is_late(waiting - LOWEST_RATE * second, float(second))
    assert not watch.is_late(0, 101.0)
    assert not watch.is_late(500, 1000.0)
    assert not watch.is_late(500, 1005.0)


async def answer_with(admission: Admission, *, until: asyncio.Event, seen: list[int]) -> None:
    """Call a middleware with a client that reads its answer after an event."""

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])
        else:
            await until.wait()

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/a", "query_string": b"", "headers": []}
    await admission({**scope, "client": ("10.0.0.1", 1)}, receive, send)


def long_answer_app(size: int):
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x" * size, "more_body": False})

    return app


def create_limited_app(size: int, most: int, requests: int) -> Admission:
    return Admission(long_answer_app(size), None, (), requests, Budget(most))


def test_long_answers_count_as_bytes_in_flight_until_they_are_read():
    size = COUNTED_ANSWER * 2

    async def run() -> list[int]:
        admission = create_limited_app(size, 4 * size, 100)
        read, seen = asyncio.Event(), []
        tasks = [
            asyncio.create_task(answer_with(admission, until=read, seen=seen)) for _ in range(5)
        ]
        await asyncio.sleep(0.1)
        assert sorted(seen) == [200, 200, 503, 503, 503]  # half of the bytes for one client
        assert admission.budget.used == 2 * size
        read.set()
        await asyncio.gather(*tasks)
        assert admission.budget.used == 0
        seen.clear()
        await answer_with(admission, until=read, seen=seen)
        return seen

    assert asyncio.run(run()) == [200]


def test_get_requests_have_a_limit_of_their_own():
    async def run() -> list[int]:
        admission = create_limited_app(10, 2**20, 2)
        read, seen = asyncio.Event(), []
        tasks = [
            asyncio.create_task(answer_with(admission, until=read, seen=seen)) for _ in range(3)
        ]
        await asyncio.sleep(0.1)
        read.set()
        await asyncio.gather(*tasks)
        return seen

    assert sorted(asyncio.run(run())) == [200, 200, 429]


def test_one_of_several_keys_takes_at_most_half_of_the_requests():
    engine = ScriptedEngine(lambda prompt, choice: "x" * 99, delay=0.05)
    keys = [ApiKey.of("a"), ApiKey.of("b")]
    body = {"prompt": "a", "max_tokens": 99, "stream": True}
    with background(engine, api_key=keys, limits=ServerLimits(max_concurrent_requests=4)) as url:

        def post(key: str) -> int:
            answer = httpx.post(
                f"{url}/completions",
                json={"prompt": "a", "max_tokens": 1},
                headers={"Authorization": f"Bearer {key}"},
            )
            return answer.status_code

        with (
            httpx.Client(headers={"Authorization": "Bearer a"}, timeout=30) as client,
            client.stream("POST", f"{url}/completions", json=body) as first,
            client.stream("POST", f"{url}/completions", json=body) as second,
        ):
            streams = [first.iter_lines(), second.iter_lines()]
            assert all(map(next, streams))
            assert post("a") == 429
            assert post("b") == 200
    # A single key may use all.
    with (
        background(engine, api_key="a", limits=ServerLimits(max_concurrent_requests=2)) as url,
        httpx.Client(headers={"Authorization": "Bearer a"}, timeout=30) as client,
        client.stream("POST", f"{url}/completions", json=body) as first,
    ):
        lines = first.iter_lines()
        assert next(lines)
        assert post("a") == 200


class Place:
    """A connection of `ConnectionSlots`."""

    def __init__(self) -> None:
        self.evicted = False

    def evict(self) -> None:
        self.evicted = True


def test_idle_connections_make_room_and_busy_connections_do_not():
    slots = ConnectionSlots(2)
    stranger, busy, new, other = Place(), Place(), Place(), Place()
    assert slots.enter(busy, 0.0)
    slots.begin_request(busy)
    assert slots.enter(stranger, 0.0)
    assert not slots.enter(new, IDLE_SECONDS / 2)
    assert slots.enter(new, IDLE_SECONDS)
    assert (stranger.evicted, busy.evicted) == (True, False)
    slots.begin_request(new)
    assert not slots.enter(other, 100.0)
    slots.end_request(new, 100.0)
    assert slots.enter(other, 100.0 + IDLE_SECONDS)
    assert (new.evicted, busy.evicted) == (True, False)
    assert len(slots) == 2
    slots.leave(other)
    slots.leave(busy)
    assert len(slots) == 0


@pytest.mark.nightly
def test_silent_connections_do_not_lock_out_other_clients():
    limits = ServerLimits(max_connections=8, body_timeout=60)
    with background(ScriptedEngine(), limits=limits) as url:
        port = httpx.URL(url).port
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(30)]
        time.sleep(IDLE_SECONDS + 0.3)
        for _ in range(8):
            assert httpx.get(f"{url}/models").status_code == 200
        for client in silent:
            client.close()


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and a self-signed certificate of localhost."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        .sign(key, hashes.SHA256())
    )
    folder = tmp_path_factory.mktemp("tls")
    pem = serialization.Encoding.PEM
    (folder / "certificate").write_bytes(signed.public_bytes(pem))
    (folder / "key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture
def secure(certificate):
    """A server with TLS and eight connections, and the context of its clients."""
    limits = ServerLimits(max_connections=8, body_timeout=2, write_timeout=1)
    context = ssl.create_default_context(cafile=certificate / "certificate")
    with background(
        ScriptedEngine(),
        ssl_keyfile=str(certificate / "key"),
        ssl_certfile=str(certificate / "certificate"),
        limits=limits,
    ) as url:
        yield url.replace("127.0.0.1", "localhost"), context


def count_open(clients: list[socket.socket]) -> int:
    """Return the number of connections that the server has not closed."""
    count = 0
    for client in clients:
        client.setblocking(False)
        try:
            count += bool(client.recv(1))
        except BlockingIOError:
            count += 1
        except OSError:
            pass
    return count


@pytest.mark.nightly
def test_connections_without_a_tls_handshake_count_and_end(secure):
    url, context = secure
    port = httpx.URL(url).port
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(40)]
    time.sleep(0.5)
    assert count_open(silent) <= 8
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{url}/models", verify=context)
    time.sleep(IDLE_SECONDS)
    for _ in range(3):
        assert httpx.get(f"{url}/models", verify=context).status_code == 200
    half = b"\x16\x03\x01\x02\x00\x01\x00"  # the beginning of a handshake
    for client in silent:
        client.setblocking(True)
        with suppress(OSError):
            client.sendall(half)
    time.sleep(2.5)
    assert count_open(silent) == 0
    assert httpx.get(f"{url}/models", verify=context).status_code == 200


def test_requests_over_tls_have_the_same_answers(secure):
    url, context = secure
    with httpx.Client(base_url=url, verify=context, timeout=30) as client:
        body = {"prompt": "abc", "max_tokens": 5}
        whole = client.post("/completions", json=body).json()["choices"][0]["text"]
        stream = client.post("/completions", json={**body, "stream": True}).text
        events = [line[6:] for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        stored = client.post("/responses", json=LONG_RESPONSE).json()
        assert client.get(f"/responses/{stored['id']}").json() == stored
    with pytest.raises(httpx.TransportError):
        httpx.get(url.replace("https", "http") + "/models")
