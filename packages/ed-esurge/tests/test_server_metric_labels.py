"""Label values are of closed sets, so clients cannot make `/metrics` grow."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest
from ed_esurge.server.endpoints import list_endpoints
from ed_esurge.server.http.admission import HTTP_METHODS, MAX_HEAD_BYTES, MAX_TARGET_BYTES
from ed_esurge.server.launch import background
from ed_esurge.server.metrics import (
    MAX_LISTED_ADAPTERS,
    HTTPMetrics,
    ServerMetrics,
)
from ed_esurge.server.routing import REFUSALS
from ed_esurge.testing import ScriptedEngine
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

#: Limit of the answer of `/metrics` with one model, in bytes.
MAX_METRICS = 2**21
#: Limit of the answer after requests with methods of which no route has any.
MAX_GROWTH = 2**14
UNKNOWN = ("get", "BREW", "M" * 4000, "M" * 40_000, "A" * 60_000, "TRACE", "X-METHOD", "PROPFIND")


@pytest.fixture
def url(tmp_path):
    with background(ScriptedEngine(), api_key="k", batch_directory=tmp_path) as address:
        yield address


def send_head(url: str, head: bytes) -> int:
    """Return the status of the answer to the head of a request."""
    port = httpx.URL(url).port
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(head)
        return int(connection.recv(65536).split(b" ", 2)[1])


def read_metrics(url: str) -> str:
    address = url.replace("/v1", "/metrics")
    return httpx.get(address, headers={"Authorization": "Bearer k"}).text


def label_values(page: str, label: str) -> set[str]:
    families = text_string_to_metric_families(page)
    return {
        sample.labels[label]
        for family in families
        for sample in family.samples
        if label in sample.labels and sample.name.startswith("http_")
    }


def test_methods_of_strangers_are_no_labels(url):
    before = len(read_metrics(url))
    known = sorted(HTTP_METHODS)
    for path in ("/health", "/v1/models", "/v1/chat/completions", "/openapi.json", "/nowhere"):
        for method in (*UNKNOWN, *known):
            head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n"
            assert send_head(url, head.encode()) in (200, 400, 401, 404, 405, 431), method[:20]
    page = read_metrics(url)
    assert label_values(page, "method") <= {"GET", "HEAD", "POST", "DELETE", "none"}
    paths = {endpoint.path.replace("{model}", "{model:path}") for endpoint in list_endpoints()}
    assert label_values(page, "handler") <= {*paths, "/openapi.json", "none"}
    assert len(page) - before < MAX_GROWTH


def test_partial_match_is_not_counted_as_its_route(url):
    """A route with another method answers 405, and has the label of no route."""
    for method in ("PUT", "PATCH", "DELETE", "POST"):
        response = httpx.request(method, url.replace("/v1", "/health"))
        assert response.status_code == 405
    page = read_metrics(url)
    assert "/health" not in label_values(page, "handler")
    assert 'http_requests_total{handler="none",method="none",status="405"} 4.0' in page


@pytest.mark.parametrize("method", ["M" * 20, "M" * 10_000, "get"])
def test_unknown_methods_are_refused_before_the_key_is_checked(url, method):
    head = f"{method} /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    assert send_head(url, head.encode()) in (400, 405)


def test_long_targets_and_heads_are_refused(url):
    long = "a" * (MAX_TARGET_BYTES + 1)
    for target in (f"/{long}", f"/v1/models?{long}", f"/v1/models/{long}"):
        head = f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert send_head(url, head.encode()) == 414
    header = f"X: {'a' * MAX_HEAD_BYTES}\r\n"
    head = f"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n{header}\r\n"
    assert send_head(url, head.encode()) in (400, 431)
    assert httpx.get(url.replace("/v1", "/health")).status_code == 200


def test_metrics_have_a_limited_size_after_every_possible_request():
    """All combinations of routes, methods and statuses, and others that no server sends."""
    metrics = ServerMetrics()
    metrics.of("scripted", lambda: [{}])

    async def request(route: Route | None, method: str, status: int) -> None:
        async def app(scope, receive, send):
            await send({"type": "http.response.start", "status": status})

        async def send(_: object) -> None:
            pass

        scope = {"type": "http", "method": method, "route": route}
        await HTTPMetrics(app, metrics)(scope, None, send)

    async def every() -> None:
        for endpoint in list_endpoints():
            methods = ["GET", "HEAD"] if endpoint.method == "GET" else [endpoint.method]
            route = Route(endpoint.path, lambda _: None, methods=methods)
            statuses = {200, *endpoint.error_statuses, 404, 405, 414, 431, 499, 500, 503}
            for method in (*HTTP_METHODS, "BREW", "X" * 40_000):
                for status in statuses:
                    await request(route, method, status)
        for number in range(5000):
            await request(None, f"METHOD{number}", 100 + number)

    asyncio.run(every())
    page = metrics.render()
    assert len(page) < MAX_METRICS
    statuses = label_values(page.decode(), "status")
    assert statuses >= {*map(str, REFUSALS), "other"}
    assert len(statuses) < 80


def test_names_of_adapters_leave_no_labels_and_no_memory():
    metrics = ServerMetrics()
    model = metrics.of("scripted", lambda: [{}], {"max_loras": 4})
    timers = [model.request(1, adapter=f"{number:04d}{'a' * 252}") for number in range(2000)]
    assert len(metrics.render()) < 2**15 + MAX_LISTED_ADAPTERS * 260
    for timer in timers:
        timer.over()
    assert not model.adapters.waiting
    assert not model.adapters.running
