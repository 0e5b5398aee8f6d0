"""Attacks of strangers: heads and connections of clients without a key."""

from __future__ import annotations

import http.client
import json
import socket
from contextlib import ExitStack

#: Maximum growth of the answer of `/metrics` in bytes by one attack.
METRICS_GROWTH = 2**16
JSON = "application/json"


def send_raw(port: int, data: bytes) -> bytes:
    """Return the first bytes of the answer to raw bytes; empty after a cut connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        try:
            connection.sendall(data)
            return connection.recv(65536)
        except OSError:
            return b""


def count_bytes(port: int, path: str) -> int:
    """Return the length of the answer to a GET request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return len(connection.getresponse().read())
    finally:
        connection.close()


def send_method_labels(port: int) -> None:
    """Send methods of 40 KB, and many short ones, to routes. No method may become a label."""
    before = count_bytes(port, "/metrics")
    for path in ("/health", "/v1/models", "/nowhere"):
        for number in range(30):
            for size in (3, 40_000):
                head = f"M{number}{'X' * size} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
                send_raw(port, head.encode())
    growth = count_bytes(port, "/metrics") - before
    assert growth < METRICS_GROWTH, f"/metrics has grown by {growth} bytes"


def send_long_targets(port: int) -> None:
    """Send URLs and headers of 60 KB. The server answers with a short error."""
    for target in ("/" + "a" * 60_000, "/v1/models?" + "a" * 60_000, "/%00" * 15_000):
        answer = send_raw(port, f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert len(answer) < 4096, target[:20]
        assert answer[9:12] in (b"", b"400", b"414", b"431"), answer[:80]


def hold_silent_connections(port: int) -> None:
    """Open connections without a request. Other clients are answered meanwhile."""
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=30))
        assert count_bytes(port, "/health") > 0


def leave_answers_unread(port: int) -> None:
    """Request long answers and do not read them. Other clients are answered meanwhile."""
    tool = {"type": "function", "description": "d" * 60_000, "parameters": {"type": "object"}}
    tools = [{**tool, "name": f"f{number}"} for number in range(20)]
    body = {"input": "a", "max_output_tokens": 1, "tools": tools, "tool_choice": "none"}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/v1/responses", json.dumps(body), {"Content-Type": JSON})
    name = json.loads(connection.getresponse().read())["id"]
    connection.close()
    head = f"GET /v1/responses/{name} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
    with ExitStack() as stack:
        for _ in range(40):
            reader = stack.enter_context(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**12)
            reader.connect(("127.0.0.1", port))
            reader.sendall(head)
        assert count_bytes(port, "/health") > 0


def request_documents(port: int) -> None:
    """Request the longest documents again and again."""
    for path in ("/openapi.json", "/metrics", "/"):
        for _ in range(30):
            assert count_bytes(port, path) > 0


def send_extreme_fields(port: int) -> None:
    """Send integers of 400 digits, metadata of 100 KB, and gaps of a few bytes."""
    digits = "9" * 400
    message = '"messages": [{"role": "user", "content": "a"}], "max_tokens": 1'
    bodies = {
        "/api/generate": f'{{"model": "scripted", "prompt": "a", "keep_alive": {digits}}}',
        "/api/embed": f'{{"model": "scripted", "input": "a", "keep_alive": -{digits}}}',
        "/v1/messages": f'{{"model": "m", {message}, "metadata": {{"k": "{"v" * 100_000}"}}}}',
        "/v1/chat/completions": f'{{{message}, "metadata": {{"{"k" * 100_000}": "v"}}}}',
        "/infill": '{"input_prefix": "a", "input_suffix": "b", "n_predict": 1}',
    }
    for path, body in bodies.items():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("POST", path, body, {"Content-Type": JSON})
        answer = connection.getresponse()
        assert answer.status < 500, path
        assert len(answer.read()) < 4096
        connection.close()
