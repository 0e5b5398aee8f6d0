"""Requests and objects of one API key cannot be read, ended or guessed with another key."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
import time

import httpx
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.engine import AsyncEngine
from ed_esurge.sampling import SamplingParams
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.http.auth import ApiKey
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from starlette.applications import Starlette

ANN, BOB, ADMIN = ({"Authorization": f"Bearer {key}"} for key in ("ann", "bob", "admin"))
ADMIN_CODE = "admin_key_required"
NOBODY = {"Authorization": "Bearer wrong"}

#: Access of each route of a server with keys. Add new routes here.
ACCESS = {
    **dict.fromkeys(
        (
            "GET /",
            "GET /health",
            "GET /v1/health",
            "GET /health/ready",
            "GET /health/live",
            "GET /health/decode",
            "GET /ping",
            "POST /ping",
            "GET /load",
            "GET /metrics",
            "GET /version",
            "GET /api/version",
        ),
        "open",
    ),
    **dict.fromkeys(
        (
            "POST /v1/completions",
            "POST /v1/chat/completions",
            "POST /v1/responses",
            "POST /v1/responses/input_tokens",
            "POST /v1/responses/{response_id}/cancel",
            "GET /v1/responses/{response_id}/input_items",
            "GET /v1/responses/{response_id}",
            "DELETE /v1/responses/{response_id}",
            "POST /v1/messages",
            "POST /v1/messages/count_tokens",
            "POST /v1/embeddings",
            "POST /v1/score",
            "POST /score",
            "POST /v1/rerank",
            "POST /v2/rerank",
            "POST /rerank",
            "POST /classify",
            "POST /pooling",
            "POST /v1/audio/transcriptions",
            "POST /v1/audio/translations",
            "POST /loglikelihood",
            "POST /loglikelihood-rolling",
            "POST /generate",
            "POST /greedy-until",
            "POST /chat",
            "GET /ready",
            "POST /v1/files",
            "GET /v1/files",
            "GET /v1/files/{file_id}",
            "GET /v1/files/{file_id}/content",
            "DELETE /v1/files/{file_id}",
            "POST /v1/batches",
            "GET /v1/batches",
            "GET /v1/batches/{batch_id}",
            "POST /v1/batches/{batch_id}/cancel",
            "GET /v1/models",
            "GET /v1/models/{model}",
            "POST /tokenize",
            "POST /detokenize",
            "GET /tokenizer_info",
            "GET /v1/prefix/{id}",
            "GET /is_sleeping",
            "GET /openapi.json",
            "GET /props",
            "GET /slots",
            "POST /infill",
            "POST /completion",
            "POST /chat/completions",
            "POST /chat/completions/input_tokens",
            "POST /v1/chat/completions/input_tokens",
            "POST /responses",
            "POST /responses/input_tokens",
            "POST /audio/transcriptions",
            "POST /reranking",
            "POST /v1/reranking",
            "GET /models",
            "POST /apply-template",
            "POST /api/chat",
            "POST /api/generate",
            "POST /api/embed",
            "POST /api/embeddings",
            "GET /api/tags",
            "POST /api/show",
            "GET /api/ps",
            "POST /api/pull",
            "POST /api/push",
            "POST /api/blobs/{digest}",
        ),
        "key",
    ),
    **dict.fromkeys(
        (
            "POST /v1/load_lora_adapter",
            "POST /v1/unload_lora_adapter",
            "POST /reset_prefix_cache",
            "POST /update_weights_from_disk",
            "POST /sleep",
            "POST /wake_up",
            "POST /api/create",
            "POST /api/copy",
            "DELETE /api/delete",
        ),
        "admin",
    ),
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("stored")


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(strict_context=True, max_loras=2)
    return ScriptedEngine(lambda prompt, choice: "fine", config=config)


@pytest.fixture(scope="module")
def url(engine, directory):
    (directory / "adapters" / "mine").mkdir(parents=True)
    (directory / "adapters" / "mine" / "adapter_config.json").write_text("{}")
    ann = ApiKey(sha256=hashlib.sha256(b"ann").hexdigest(), name="Ann")
    with background(
        engine,
        api_key=[ann, "bob"],
        admin_api_key="admin",
        batch_directory=directory / "batches",
        lora_directory=directory / "adapters",
        enable_sleep_mode=True,
        limits={"max_batches": 1, "max_files": 8, "max_stored_bytes": 2000},
    ) as url:
        yield url.removesuffix("/v1")


@pytest.fixture
def http(url):
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client


def routes(url) -> set[str]:
    """Return every route of the application as `METHOD /path`."""
    from ed_esurge.server import create_app

    app: Starlette = create_app(ScriptedEngine())
    return {
        f"{method} {re.sub(':path}', '}', route.path)}"
        for route in app.routes
        for method in route.methods - {"HEAD", "OPTIONS"}
    }


def put_file(http, key, data=b"{}"):
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", data)}
    return http.post("/v1/files", files=form, headers=key)


# ---- the matrix


def test_every_route_declares_its_access(url):
    assert routes(url) == set(ACCESS)
    declared = {f"{one.method} {one.path}": one.access for one in list_endpoints()}
    assert declared == {name: access for name, access in ACCESS.items() if name in declared}


@pytest.mark.parametrize("route", ACCESS)
def test_routes_reject_requests_without_the_required_key(http, route):
    method, path = route.split()
    path = re.sub("{.*?}", "none", path)
    sent: dict = {} if method != "POST" else {"json": {}}
    by_key = {
        name: http.request(method, path, headers=headers, **sent)
        for name, headers in (("nobody", NOBODY), ("key", BOB))
    }
    refused = {name: answer.status_code in (401, 403) for name, answer in by_key.items()}
    assert (
        refused
        == {
            "open": {"nobody": False, "key": False},
            "key": {"nobody": True, "key": False},
            "admin": {"nobody": True, "key": True},
        }[ACCESS[route]]
    )
    if ACCESS[route] == "admin":
        error = by_key["key"].json()["error"]  # Ollama's errors are texts
        assert "administrator" in error if isinstance(error, str) else error["code"] == ADMIN_CODE
        if path not in ("/sleep", "/wake_up"):
            assert http.request(method, path, headers=ADMIN, **sent).status_code not in (401, 403)


def test_objects_of_other_keys_are_not_found(http):
    """Tests every kind of stored object with every route that accepts its id."""
    stored = http.post("/v1/responses", json={"input": "a"}, headers=ANN).json()["id"]
    asked = http.post("/v1/completions", json={"prompt": "a"}, headers=ANN).headers["x-request-id"]
    assert http.get(f"/v1/prefix/{asked}", headers=ANN).status_code == 200
    body = {"prompt": "a", "max_tokens": 2}
    row = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = put_file(http, ANN, json.dumps(row).encode()).json()["id"]
    order = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=order, headers=ANN).json()["id"]
    load = {"lora_name": "private", "lora_path": "mine", "owner": "Ann"}
    assert http.post("/v1/load_lora_adapter", json=load, headers=ADMIN).status_code == 200
    foreign = {
        "prompt": [("GET", f"/v1/prefix/{asked}", {})],
        "response": [
            ("GET", f"/v1/responses/{stored}", {}),
            ("DELETE", f"/v1/responses/{stored}", {}),
            ("POST", "/v1/responses", {"input": "b", "previous_response_id": stored}),
        ],
        "file": [
            ("GET", f"/v1/files/{file}", {}),
            ("GET", f"/v1/files/{file}/content", {}),
            ("DELETE", f"/v1/files/{file}", {}),
            ("POST", "/v1/batches", order),
        ],
        "batch": [
            ("GET", f"/v1/batches/{batch}", {}),
            ("POST", f"/v1/batches/{batch}/cancel", {}),
        ],
        "adapter": [
            ("GET", "/v1/models/private", {}),
            ("POST", "/v1/completions", {**body, "model": "private"}),
            (
                "POST",
                "/v1/chat/completions",
                {"messages": [{"role": "user", "content": "a"}], "model": "private"},
            ),
            ("GET", "/tokenizer_info?model=private", {}),
        ],
    }
    names = f"{stored}|{asked}|{file}|{batch}|private"
    for kind, calls in foreign.items():
        for method, path, sent in calls:
            known = {"headers": BOB} | ({"json": sent} if method == "POST" else {})
            answer = http.request(method, path, **known)
            assert answer.status_code == 404, (kind, path, answer.text)
            # The answer equals the answer for an unknown id.
            unknown = re.sub(names, "none", json.dumps([path, sent]))
            path, sent = json.loads(unknown)
            known = {"headers": BOB} | ({"json": sent} if method == "POST" else {})
            other = http.request(method, path, **known)
            name = re.compile(f"{names}|none")
            assert name.sub("X", answer.text) == name.sub("X", other.text)
    assert "private" not in http.get("/v1/models", headers=BOB).text
    for path in ("/v1/files", "/v1/batches"):
        assert http.get(path, headers=BOB).json()["data"] == []
        assert len(http.get(path, headers=ANN).json()["data"]) > 0
    for path in (f"/v1/responses/{stored}", f"/v1/files/{file}", f"/v1/batches/{batch}"):
        assert http.get(path, headers=ANN).status_code == 200
    assert http.get("/v1/models/private", headers=ANN).status_code == 200
    assert http.post(
        "/v1/completions", json={**body, "model": "private"}, headers=ANN
    ).status_code == 200  # fmt: skip
    drop = {"lora_name": "private"}
    assert http.post("/v1/unload_lora_adapter", json=drop, headers=ADMIN).status_code == 200


def test_adapter_for_an_unknown_owner_returns_400(http):
    load = {"lora_name": "x", "lora_path": "mine", "owner": "nobody"}
    refused = http.post("/v1/load_lora_adapter", json=load, headers=ADMIN)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "owner")


def test_batch_lines_have_the_permissions_of_the_batch_owner(http, engine):
    bobs = http.post("/v1/responses", json={"input": "a"}, headers=BOB).json()["id"]
    row = {
        "custom_id": "a",
        "method": "POST",
        "url": "/v1/responses",
        "body": {"input": "a", "previous_response_id": bobs},
    }
    stored = {}
    for key, headers in (("ann", ANN), ("bob", BOB)):
        file = put_file(http, headers, json.dumps(row).encode()).json()["id"]
        order = {"input_file_id": file, "endpoint": "/v1/responses", "completion_window": "24h"}
        batch = http.post("/v1/batches", json=order, headers=headers).json()
        for _ in range(500):
            batch = http.get(f"/v1/batches/{batch['id']}", headers=headers).json()
            if batch["status"] == "completed":
                break
            time.sleep(0.01)
        counts = batch["request_counts"]
        stored[key] = counts["completed"], counts["failed"]
    assert stored == {"ann": (0, 1), "bob": (1, 0)}


def test_batches_and_stored_bytes_are_limited_per_key(http):
    keep = [put_file(http, BOB, b"x" * 600) for _ in range(4)]
    statuses = [one.status_code for one in keep]
    assert statuses[-1] == 413
    assert keep[-1].json()["error"]["code"] == "storage_quota_exceeded"
    assert put_file(http, ADMIN, b"x" * 600).status_code == 200
    for one in keep:
        if one.status_code == 200:
            http.delete(f"/v1/files/{one.json()['id']}", headers=BOB)


def test_stored_responses_do_not_evict_responses_of_another_key():
    limits = {"max_stored_responses": 2}
    with background(ScriptedEngine(), api_key=["ann", "bob"], limits=limits) as url:
        ask = {"json": {"input": "a"}}
        kept = httpx.post(f"{url}/responses", headers=ANN, **ask).json()["id"]
        bobs = [httpx.post(f"{url}/responses", headers=BOB, **ask).json()["id"] for _ in range(3)]
        assert httpx.get(f"{url}/responses/{kept}", headers=ANN).status_code == 200
        statuses = [httpx.get(f"{url}/responses/{i}", headers=BOB).status_code for i in bobs]
        assert statuses == [404, 200, 200]


# ---- administrators


def test_administrative_routes_require_an_admin_key():
    with background(ScriptedEngine(), api_key="ann", enable_sleep_mode=True) as url:
        root = url.removesuffix("/v1")
        refused = httpx.post(f"{root}/sleep", headers=ANN)
        assert refused.status_code == 403
        assert "admin_api_key" in refused.json()["error"]["message"]


def test_server_without_keys_allows_every_route():
    with background(ScriptedEngine(), enable_sleep_mode=True) as url:
        root = url.removesuffix("/v1")
        assert httpx.post(f"{root}/sleep").status_code == 200


def test_admin_key_alone_leaves_other_routes_open():
    with background(ScriptedEngine(), admin_api_key="admin", enable_sleep_mode=True) as url:
        root = url.removesuffix("/v1")
        assert httpx.post(f"{url}/completions", json={"prompt": "a"}).status_code == 200
        assert httpx.post(f"{root}/sleep").status_code == 403
        assert httpx.post(f"{root}/sleep", headers=NOBODY).status_code == 403
        assert httpx.post(f"{root}/sleep", headers=ADMIN).status_code == 200


# ---- request ids


def test_equal_request_ids_of_two_clients_do_not_interfere(engine_behind):
    """One client streams to the end, and another with the same id disconnects during its stream."""
    body = {
        "prompt": "a",
        "max_tokens": 40,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "request_id": "same",
    }

    async def whole(client, url, first_came):
        async with client.stream("POST", f"{url}/completions", json=body, headers=ANN) as answer:
            assert answer.headers["x-request-id"] == "cmpl-same"
            async for line in answer.aiter_lines():
                first_came.set()
                if line.startswith("data: {"):
                    last = json.loads(line[6:])
        return last["usage"]["completion_tokens"]

    async def leaves(client, url, first_came):
        await first_came.wait()
        for _ in range(3):
            async with client.stream("POST", f"{url}/completions", json=body, headers=BOB) as other:
                assert other.status_code == 200
                await anext(other.aiter_lines())

    async def both(url):
        first_came = asyncio.Event()
        async with httpx.AsyncClient(timeout=60) as client:
            count, _ = await asyncio.gather(
                whole(client, url, first_came), leaves(client, url, first_came)
            )
        return count

    with background(engine_behind, api_key=["ann", "bob"]) as url:
        assert asyncio.run(both(url)) == 40


def test_rejected_request_does_not_end_request_with_the_same_id(engine_behind):
    async def main(engine):
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        first = engine.generate([5, 6, 7], params, "same")
        tokens = list((await anext(first)).outputs[0].token_ids)
        second = engine.generate([8, 9], params, "same")
        waiting = asyncio.ensure_future(anext(second))
        await asyncio.sleep(0)  # the second request has not reached the engine yet
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await second.aclose()
        async for delta in first:
            tokens += delta.outputs[0].token_ids
            reason = delta.outputs[0].finish_reason
        return len(tokens), reason

    engine = AsyncEngine(engine_behind)
    engine.start()
    try:
        assert asyncio.run(main(engine)) == (24, "length")
    finally:
        engine.shutdown()


# ---- the prefix cache


def cached(url, key, prompt, **more):
    body = {"prompt": prompt, "max_tokens": 1, **more}
    answer = httpx.post(f"{url}/completions", json=body, headers=key, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("shared", [False, True])
def test_cached_tokens_reveal_prompts_only_with_shared_prefixes(engine_behind, shared):
    # Falling ids, which no other test of this engine sends.
    prompt = [*range(42, 2, -1)] if shared else [*range(89, 49, -1)]
    with background(engine_behind, api_key=["ann", "bob"], share_prefix_cache=shared) as url:
        assert cached(url, ANN, prompt) == 0
        assert cached(url, ANN, prompt) == 32
        assert cached(url, BOB, prompt) == (32 if shared else 0)
        assert cached(url, BOB, prompt, cache_salt="own") == 0
        digest = hashlib.sha256(b"ann").hexdigest()
        assert cached(url, BOB, prompt, cache_salt=f"{digest}:") == 0


def test_embedding_prefixes_are_salted_per_key(engine, http):
    before = len(engine.options)
    http.post("/v1/embeddings", json={"input": "a"}, headers=ANN)
    (options,) = list(engine.options.values())[before:]
    assert options["cache_salt"].startswith(hashlib.sha256(b"ann").hexdigest())
