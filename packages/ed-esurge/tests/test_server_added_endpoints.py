"""Endpoints of entry points: added by installed packages, absent without them."""

from __future__ import annotations

import importlib
import logging
from importlib.metadata import EntryPoint

import httpx
import pytest
from ed_esurge.server import create_app, endpoints, openapi
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError

FILE = """
from ed_esurge.server.generation.abilities import GENERATES
from ed_esurge.server.generation.answers import AnswerBody
from ed_esurge.server.http.fields import RequestBody
from ed_esurge.server.routing import post
from starlette.responses import JSONResponse


class CountRequest(RequestBody):
    model: str | None = None
    text: str


class Count(AnswerBody):
    model: str
    count: int


async def count(model, body, request):
    (tokens,) = await model.prompts.encode([body.text], add_special_tokens=False)
    return JSONResponse({"model": model.name, "count": len(tokens)})


COUNT = post("/count", "Count tokens.", count, CountRequest, Count, ability=GENERATES)
"""
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}


@pytest.fixture
def clear():
    """Forget the endpoints and the document of the installed packages."""
    caches = (endpoints.list_endpoints, openapi._render)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def point(value: str, name: str = "count") -> EntryPoint:
    return EntryPoint(name, value, endpoints.ENDPOINT_GROUP)


def replace_points(monkeypatch, *points: EntryPoint) -> None:
    monkeypatch.setattr(endpoints, "entry_points", lambda group: points)


def test_installed_package_adds_an_endpoint(clear, tmp_path, monkeypatch):
    (tmp_path / "count_package.py").write_text(FILE)
    info = tmp_path / "count_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: count-package\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[easydel.endpoints]\ncount = count_package:COUNT\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with background(ScriptedEngine()) as url:
        root = url.removesuffix("/v1")
        answer = httpx.post(f"{root}/count", json={"text": "abc"})
        assert answer.json() == {"model": "scripted", "count": 3}
        assert httpx.post(f"{root}/count", json={}).status_code == 400
        assert httpx.get(f"{root}/api/version").status_code == 200
    assert "/count" in openapi.document("1")["paths"]


def test_server_without_frontends_answers_both_apis(clear, monkeypatch):
    replace_points(monkeypatch)
    with background(ScriptedEngine()) as url:
        root = url.removesuffix("/v1")
        assert httpx.post(f"{url}/chat/completions", json=CHAT).status_code == 200
        messages = {**CHAT, "model": "scripted"}
        assert httpx.post(f"{url}/messages", json=messages).status_code == 200
        for path in ("/", "/api/tags", "/props", "/greedy_until"):
            answer = httpx.get(f"{root}{path}")
            assert answer.status_code == 404
            assert answer.json()["error"]["code"] == "unknown_url"
        assert "/api/tags" not in httpx.get(f"{root}/openapi.json").json()["paths"]


def test_entry_point_that_cannot_be_imported_is_omitted(clear, monkeypatch, caplog):
    good = point("ed_esurge.frontends.playground:ENDPOINTS", "page")
    replace_points(monkeypatch, point("ed_esurge.frontends.absent:ENDPOINTS"), good)
    with caplog.at_level(logging.WARNING):
        paths = {endpoint.path for endpoint in endpoints.list_endpoints()}
    assert {"/", "/v1/chat/completions"} <= paths
    assert "'count' = 'ed_esurge.frontends.absent:ENDPOINTS'" in caplog.text


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("ed_esurge.testing:CHAT_TEMPLATE", "it must be an Endpoint"),
        ("ed_esurge.server.openai.chat:ENDPOINTS", "POST /v1/chat/completions, which the server"),
    ],
)
def test_entry_point_without_new_endpoints_raises_config_error(clear, monkeypatch, value, problem):
    replace_points(monkeypatch, point(value))
    with pytest.raises(ConfigError, match=problem):
        create_app(ScriptedEngine())
