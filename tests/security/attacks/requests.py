"""The requests of the attack suite: a small request of each route, and long ones."""

from __future__ import annotations

import json

#: Default limit of the length of a body in bytes.
LIMIT = 2**23
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
