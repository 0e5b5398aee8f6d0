"""`metadata` has OpenAI's limits on every route."""

from __future__ import annotations

import httpx
import pytest
from ed_esurge.frontends.llama_cpp.endpoints import ALIASES
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.http.fields import MAX_KEY_CHARACTERS, MAX_PAIRS, MAX_VALUE_CHARACTERS
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

USER = {"role": "user", "content": "a"}
BODIES: dict[str, dict[str, object]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 1},
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 1},
    "/v1/responses": {"input": "a", "max_output_tokens": 1},
    "/v1/messages": {"model": "scripted", "messages": [USER], "max_tokens": 1},
    "/v1/chat/completions/input_tokens": {"messages": [USER]},
    "/apply-template": {"messages": [USER]},
    "/v1/batches": {"input_file_id": "x", "endpoint": "/v1/responses", "completion_window": "24h"},
}
LONGEST = {f"{number:064d}": "v" * MAX_VALUE_CHARACTERS for number in range(MAX_PAIRS)}
REFUSED = {
    "pairs": {str(number): "v" for number in range(MAX_PAIRS + 1)},
    "forty pairs": {str(number): "v" for number in range(40)},
    "key": {"k" * (MAX_KEY_CHARACTERS + 1): "v"},
    "value": {"k": "v" * (MAX_VALUE_CHARACTERS + 1)},
    "long value": {"k": "v" * 100_000},
    "number": {"k": 5},
    "object": {"k": {"k": "v"}},
    "list": ["k"],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batches")
    with background(ScriptedEngine(), batch_directory=folder) as url:
        yield url.removesuffix("/v1")


def test_every_route_with_metadata_is_tested():
    paths = {
        endpoint.path
        for endpoint in list_endpoints()
        if endpoint.accepts is not None and "metadata" in endpoint.accepts.model_fields
    }
    assert paths - set(ALIASES) == set(BODIES)


@pytest.mark.parametrize("path", BODIES)
def test_metadata_within_the_limits_is_accepted(root, path):
    answer = httpx.post(f"{root}{path}", json={**BODIES[path], "metadata": LONGEST})
    assert answer.status_code == (404 if path == "/v1/batches" else 200), answer.text


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("path", BODIES)
def test_metadata_beyond_the_limits_is_refused(root, path, kind):
    answer = httpx.post(f"{root}{path}", json={**BODIES[path], "metadata": REFUSED[kind]})
    assert answer.status_code == 400, answer.text
    assert "metadata" in answer.json()["error"]["message"]
    assert len(answer.content) < 4096
