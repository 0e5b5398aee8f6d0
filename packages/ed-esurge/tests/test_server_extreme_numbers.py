"""Numbers of any size in any field are answered or rejected, and never fail in the server."""

from __future__ import annotations

import json
from collections.abc import Iterator

import httpx
import pytest
from ed_esurge.frontends.library.parameters import SamplingOptions
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

# Python writes at most 4,300 digits, and JSON has no limit.
NUMBERS = ("9" * 400, "-" + "9" * 400, "9" * 4000, "1e308", "-1e308", "1e999", "1e-400")
USER = {"role": "user", "content": "hi"}
OPTIONS = {"num_predict": 1}
#: A valid body of each route whose fields depend on each other.
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "hi", "max_output_tokens": 1},
    "/v1/messages": {"model": "scripted", "max_tokens": 1, "messages": [USER]},
    "/api/chat": {"messages": [USER], "options": OPTIONS, "stream": False},
    "/api/generate": {"prompt": "a", "options": OPTIONS, "stream": False},
    "/api/embed": {"input": "a"},
    "/api/embeddings": {"prompt": "a"},
    "/completion": {"prompt": "a", "n_predict": 1},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 1},
}


def bodies(path: str, fields: dict[str, object]) -> Iterator[bytes]:
    """Yield bodies with an extreme number in one of the fields, or in a list or object of it."""
    base = {"model": "scripted"} if path.startswith("/api/") else {}
    for field in fields:
        for number in NUMBERS:
            for shape in ("{}", "[{}]", '{{"a": {}}}', '"{}"'):
                known = {**base, **BODIES.get(path, {}), field: "NUMBER"}
                yield json.dumps(known).replace('"NUMBER"', shape.format(number)).encode()


def check(url: str, path: str, content: Iterator[bytes]) -> None:
    address = url.removesuffix("/v1") + path.replace("{model}", "scripted")
    with httpx.Client(headers={"Content-Type": "application/json"}, timeout=60) as client:
        for body in content:
            status = client.post(address, content=body).status_code
            assert status < 500 or status in (501, 503), (path, body[:200], status)


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    with background(ScriptedEngine(max_model_len=512), batch_directory=folder) as address:
        yield address


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate", "/api/embed", "/api/embeddings"])
def test_extreme_keep_alive_is_answered_or_rejected(url, path):
    check(url, path, bodies(path, {"keep_alive": None}))


def test_extreme_options_of_ollama_are_answered_or_rejected(url):
    content = (
        json.dumps({"model": "scripted", "prompt": "a", "stream": False, "options": {name: "N"}})
        .replace('"N"', number)
        .encode()
        for name in SamplingOptions.model_fields
        for number in NUMBERS[:2]
    )
    check(url, "/api/generate", content)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "endpoint",
    [each for each in list_endpoints() if each.accepts is not None and not each.form],
    ids=lambda endpoint: f"{endpoint.method} {endpoint.path}",
)
def test_extreme_numbers_in_any_field_are_answered_or_rejected(url, endpoint):
    check(url, endpoint.path, bodies(endpoint.path, endpoint.accepts.model_fields))
