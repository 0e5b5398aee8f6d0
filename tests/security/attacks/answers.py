"""Attacks with answers: sizes beyond all memory, and responses that stay in memory."""

from __future__ import annotations

import http.client
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.security.attacks.requests import ROUTES, USER, Ask, as_json

_SCORES = {"logprobs": True, "top_logprobs": 20}


def large_answers() -> dict[str, Ask]:
    """Return the requests whose answers would have hundreds of megabytes, by name."""
    completion = ROUTES["/v1/completions"]
    chat = {**ROUTES["/v1/chat/completions"], "max_tokens": 4000}
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    ollama = {"model": "scripted", "prompt": "a", "options": {"num_predict": 10**6}, **_SCORES}
    bodies: dict[str, tuple[str, dict[str, object]]] = {
        "prompt scores": (
            "/v1/completions",
            {**completion, "prompt": "a" * 2**17, "prompt_logprobs": 20},
        ),
        "prompts with scores": (
            "/v1/completions",
            {**completion, "prompt": ["a" * 200] * 1024, "prompt_logprobs": 20, "n": 1},
        ),
        "echoed scores": (
            "/v1/completions",
            {**completion, "prompt": "a" * 3000, "echo": True, "logprobs": 20, "n": 128},
        ),
        "streamed echoed scores": (
            "/v1/completions",
            {"prompt": "a" * 3000, "echo": True, "logprobs": 20, "n": 128, "stream": True},
        ),
        "1,024 prompts": ("/v1/completions", {"prompt": ["a"] * 1024, "max_tokens": 4000}),
        "128 choices": ("/v1/chat/completions", {**chat, **_SCORES, "n": 128}),
        "128 streamed choices": (
            "/v1/chat/completions",
            {**chat, **_SCORES, "n": 128, "stream": True},
        ),
        "response with scores": ("/v1/responses", {"input": "hi", "store": False, **include}),
        "token vectors": ("/pooling", {"input": ["a" * 3000] * 64, "task": "token_embed"}),
        "vectors": ("/v1/embeddings", {"input": ["a"] * 2048}),
        "n_probs": ("/completion", {"prompt": "a", "n_predict": 10**6, "n_probs": 20}),
        "Ollama scores": ("/api/generate", {**ollama, "stream": False}),
        "token texts": ("/tokenize", {"prompt": "\u1234" * 10**6, "return_token_strs": True}),
    }
    return {f"answer: {name}": as_json(*request) for name, request in bodies.items()}


class _Client:
    """A client that keeps one connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def send(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        """Return status and JSON of an answer."""
        data = None if body is None else json.dumps(body)
        self._connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


def race_background_responses(port: int) -> None:
    """Start many background responses at once. No more than the limit may be accepted."""
    body = {"input": "a" * 20_000, "background": True, "max_output_tokens": 1}

    def start(_: int) -> tuple[int, Any]:
        return _Client(port).send("POST", "/v1/responses", body)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(start, range(96)))
    assert {status for status, _ in answers} <= {200, 400, 429, 503}, answers
    client = _Client(port)
    for status, answer in answers:
        if status == 200:
            client.send("POST", f"/v1/responses/{answer['id']}/cancel")
            client.send("DELETE", f"/v1/responses/{answer['id']}")


def cancel_large_responses(port: int) -> None:
    """Cancel background responses with long inputs. Other requests are answered afterwards."""
    client = _Client(port)
    body = {"input": "hi", "instructions": "a" * 2**21, "background": True}
    for _ in range(8):
        status, answer = client.send("POST", "/v1/responses", body)
        assert status in (200, 400, 503), answer
        if status == 200:
            status, ended = client.send("POST", f"/v1/responses/{answer['id']}/cancel")
            assert ended["status"] in ("cancelled", "completed", "incomplete"), ended
    status, answer = client.send("POST", "/v1/responses", {"input": "hi", "store": False})
    assert status == 200, answer


def grow_conversation(port: int) -> None:
    """Continue a conversation with calls of megabytes, which the template does not write."""
    client, previous = _Client(port), None
    call = {"type": "function_call", "call_id": "c", "name": "f"}
    arguments = json.dumps({"a": "b" * (2**23 - 2**12)})
    output = {"type": "function_call_output", "call_id": "c", "output": "d"}
    items = [{**USER}, {**call, "arguments": arguments}, output]
    for _ in range(6):
        body = {"input": items, "previous_response_id": previous, "max_output_tokens": 1}
        status, answer = client.send("POST", "/v1/responses", body)
        if status != 200:
            break
        previous = answer["id"]
    assert status in (400, 413), "a conversation of 48 MB was accepted"
    body = {"input": "hi", "previous_response_id": previous, "max_output_tokens": 1}
    status, answer = client.send("POST", "/v1/responses", body)
    assert status in (200, 400), answer
