"""Measure the server under hostile requests: time per byte of every route, and /health latency.

    python -m tools.bench.attacks
    python -m tools.bench.attacks --only attacks --senders 4

The server runs in a separate process with a scripted engine, so the times are those of the server.
The first table contains the milliseconds per megabyte for bodies of growing length. A linear route
has the same figure in every column. The second table contains the worst latency of `GET /health`
while several clients repeat one attack.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tools.bench.measure import command_line, cores, cpu_name, table

LIMIT = 2**23
SIZES = (2**14, 2**17, 2**20, LIMIT - 2**12)
MAX_MODEL_LEN = 2**17
SERVER = f"""
import tempfile
from ed_esurge.server import serve
from ed_esurge.testing import ScriptedEngine
with tempfile.TemporaryDirectory() as folder:
    serve(ScriptedEngine(max_model_len={MAX_MODEL_LEN}), port=0, batch_directory=folder)
"""
Ask = tuple[str, str, bytes]  # Path, content type, body.
USER = {"role": "user", "content": "hi"}
#: A small request of each route.
ROUTES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1, "store": False},
    "/v1/messages": {"model": "scripted", "max_tokens": 1, "messages": [USER]},
    "/v1/messages/count_tokens": {"model": "scripted", "messages": [USER]},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [65]},
}


def as_json(path: str, body: object) -> Ask:
    """Return a request with a JSON body."""
    return path, "application/json", json.dumps(body).encode()


def long_body(path: str, size: int) -> Ask:
    """Return a request of about `size` bytes with an unknown field that the engine never sees."""
    if path == "/v1/files":
        return upload(b"", b"x" * size)
    return as_json(path, {**ROUTES[path], "padding": ["a" * 60] * (size // 64)})


def long_text(path: str, size: int) -> Ask:
    """Return a request whose prompt, messages or documents have about `size` bytes."""
    text = "word " * (size // 5)
    messages = [{"role": "user", "content": text}]
    fields = {
        "/v1/responses": {"input": text},
        "/v1/embeddings": {"input": text},
        "/v1/score": {"text_2": text},
        "/v1/rerank": {"documents": [text]},
        "/detokenize": {"tokens": [65] * (min(size, LIMIT // 2) // 4)},
    }.get(path, {"messages": messages} if "messages" in ROUTES[path] else {"prompt": text})
    return as_json(path, {**ROUTES[path], **fields})


def upload(header: bytes, data: bytes) -> Ask:
    """Return a form upload with a file."""
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n' + header
    body += b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + data
    return "/v1/files", "multipart/form-data; boundary=b", body + b"\r\n--b--\r\n"


def chained_schema(count: int) -> dict[str, object]:
    """Return a schema of objects, each with a property that refers to the next object."""
    definitions: dict[str, object] = {
        f"d{i}": {"type": "object", "properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}}
        for i in range(count)
    }
    definitions[f"d{count}"] = {"type": "string"}
    return {"$ref": "#/$defs/d0", "$defs": definitions}


def chained_rules(count: int) -> str:
    """Return a grammar of rules, each of which refers to the next rule."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(count)]
    return "\n".join(["start: r0", *rules, f'r{count}: "x"'])


def grammars() -> dict[str, Ask]:
    """Return the attacks on the grammar compiler by name."""
    chat = ROUTES["/v1/chat/completions"]
    schema = {"name": "a", "schema": chained_schema(1000)}
    wide = {"properties": {f"k{place}": {"type": "string"} for place in range(7000)}}
    fields: dict[str, dict[str, object]] = {
        "references": {"response_format": {"type": "json_schema", "json_schema": schema}},
        "schema as text": {"guided_json": json.dumps(chained_schema(1000))},
        "wide schema": {"guided_json": wide},
        "rules": {"guided_grammar": chained_rules(3000)},
        "endless rule": {"guided_grammar": "start: a\na: a"},
        "parentheses": {"guided_regex": "(" * 20_000 + "a" + ")" * 20_000},
        "long choice": {"guided_choice": ["a" * 60_000]},
    }
    return {
        f"grammar: {name}": as_json("/v1/chat/completions", {**chat, **more})
        for name, more in fields.items()
    }


def attacks() -> dict[str, Ask]:
    """Return all attacks by name."""
    chat, anthropic = ROUTES["/v1/chat/completions"], ROUTES["/v1/messages"]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    keys = {f"temperatur{number}": 0 for number in range(30_000)}
    marks = "".join(f"\ufdd0{number}." for number in range(10_000))
    nested = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    lists = b'{"prompt": [' + b"[]," * (LIMIT // 3 - 20) + b"0]}"
    many = b"{" + b",".join(b'"k%x":0' % n for n in range(LIMIT // 11)) + b"}"
    texts = {"role": "user", "content": [{"type": "text", "text": "a"}] * 500}
    wrong = {"role": "user", "content": [{"type": "text"}] * 1000}
    kwargs = {"k": {f"k{n}": n for n in range(60_000)}}
    return {
        **{
            f"unknown keys {path}": as_json(path, {**body, **keys}) for path, body in ROUTES.items()
        },
        **{f"long text {path}": long_text(path, LIMIT - 2**12) for path in ROUTES},
        "4 MB key": as_json("/v1/completions", {"prompt": "a", "k" * 2**22: 0}),
        "4 MB model": as_json("/v1/completions", {"prompt": "a", "model": "m" * 2**22}),
        "nesting": ("/v1/completions", "application/json", nested),
        "empty lists": ("/v1/completions", "application/json", lists),
        "700,000 keys": ("/v1/completions", "application/json", many),
        "digits": ("/v1/completions", "application/json", b'{"prompt": ' + b"9" * 10**6 + b"}"),
        "many messages": as_json("/v1/chat/completions", {**chat, "messages": [USER] * 4096}),
        "many parts": as_json("/v1/chat/completions", {**chat, "messages": [texts] * 80}),
        "wrong blocks": as_json("/v1/messages", {**anthropic, "messages": [wrong] * 120}),
        "marks": as_json(
            "/v1/chat/completions", {**chat, "messages": [{"role": "user", "content": marks}]}
        ),
        "template variables": as_json(
            "/v1/chat/completions", {**chat, "chat_template_kwargs": kwargs}
        ),
        "tools": as_json("/v1/chat/completions", {**chat, "tools": [tool] * 100}),
        "bad words": as_json(
            "/v1/completions", {"prompt": "a", "bad_words": ["a b " * 900] * 1000}
        ),
        "allowed tokens": as_json(
            "/v1/completions", {"prompt": "a", "allowed_token_ids": [65] * 2**18}
        ),
        "many prompts": as_json("/v1/completions", {"prompt": ["a"] * 2000, "n": 100}),
        "part header": upload(b"X: " + b"a" * 10**6 + b"\r\n", b"{}"),
        "part headers": upload(b"X: a\r\n" * 10**6, b"{}"),
        "boundaries": upload(b"", b"\r\n--" * (LIMIT // 4)),
        **grammars(),
    }


class Client:
    """A client that sends each request to one server over a new connection."""

    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, request: Ask) -> tuple[int, float, int]:
        """Return status, seconds and bytes of a response; status 0 means a cut connection."""
        path, kind, body = request
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began = time.perf_counter()
        try:
            connection.request("POST", path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, time.perf_counter() - began, len(content)
        except OSError:
            return 0, time.perf_counter() - began, 0
        finally:
            connection.close()

    def health(self) -> float:
        """Return the seconds of one `GET /health`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        return time.perf_counter() - began


@contextmanager
def running() -> Iterator[Client]:
    """Run a server in a separate process and yield a client."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        yield Client(int(url.split(":")[2].split("/")[0]))
    finally:
        process.terminate()
        process.wait(60)


def canary(client: Client, seconds: float, attack: Callable[[], object] | None) -> list[float]:
    """Return the sorted latencies of `/health` while an attack is repeated."""
    over = threading.Event()
    sender = threading.Thread(target=_repeat, args=(attack, over))
    sender.start()
    latencies = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        latencies.append(client.health())
        time.sleep(0.01)
    over.set()
    sender.join()
    return sorted(latencies)


def _repeat(attack: Callable[[], object] | None, over: threading.Event) -> None:
    while attack is not None and not over.is_set():
        attack()


def routes(client: Client) -> str:
    """Return the table of milliseconds per megabyte."""
    rows = []
    for path in (*ROUTES, "/v1/files"):
        shapes = {"unknown field": long_body} | ({"text": long_text} if path in ROUTES else {})
        for name, make in shapes.items():
            cells, status = [], 0
            for size in SIZES:
                request = make(path, size)
                results = [client.ask(request) for _ in range(3)]
                status = results[0][0]
                cells.append(f"{min(r[1] for r in results) * 1e3 / len(request[2]) * 1e6:.0f}")
            rows.append([path, name, *cells, str(status)])
    return table(["route", "body", *(f"{size >> 10} KiB" for size in SIZES), "last status"], rows)


def latencies(client: Client, seconds: float, senders: int) -> str:
    """Return the table of latencies of `/health`."""
    idle = canary(client, seconds, None)
    rows = [["none", "", "", "", f"{idle[len(idle) // 2] * 1e3:.0f}", f"{idle[-1] * 1e3:.0f}"]]
    for name, request in attacks().items():
        status, took, size = client.ask(request)

        def together(request: Ask = request) -> None:
            threads = [threading.Thread(target=client.ask, args=(request,)) for _ in range(senders)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        found = canary(client, seconds, together)
        median, worst = found[len(found) // 2] * 1e3, found[-1] * 1e3
        rows.append([name, str(status), str(size), f"{took:.2f}", f"{median:.0f}", f"{worst:.0f}"])
    head = ["attack", "status", "bytes of answer", "seconds", "/health median ms", "worst ms"]
    return table(head, rows)


def main() -> None:
    """Print both tables."""
    parser = command_line("attacks", __doc__)
    parser.add_argument("--only", choices=("routes", "attacks"))
    parser.add_argument("--senders", type=int, default=2, help="clients that attack together")
    parser.add_argument("--seconds", type=float, default=2.0, help="length of each attack")
    values = parser.parse_args()
    print(f"{cpu_name()}, {cores()} cores, {values.senders} clients attack together\n")
    with running() as client:
        if values.only != "attacks":
            print(routes(client), "\n", flush=True)
        if values.only != "routes":
            print(latencies(client, values.seconds, values.senders))


if __name__ == "__main__":
    main()
