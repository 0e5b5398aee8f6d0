"""Every attack of the suite returns a short error or an answer, and the server continues to run."""

from __future__ import annotations

import httpx
import pytest
from ed_esurge.server.http.errors import MAX_MESSAGE, MAX_PROBLEMS
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine

from tests.security.attacks import ROUTES, attacks, long_text, scenarios, tenants

SUITE = attacks()
SCENARIOS = scenarios()


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    engine = ScriptedEngine(max_model_len=2**12)
    options = {
        **tenants.options(tmp_path_factory.mktemp("server")),
        "unknown_fields": "refuse",
        "trust_request_chat_template": True,
    }
    with background(engine, **options) as url:
        yield url.removesuffix("/v1")


@pytest.mark.parametrize("name", SUITE)
def test_attacks_return_short_errors_or_answers(root, name):
    path, kind, body = SUITE[name]
    answer = httpx.post(f"{root}{path}", content=body, headers={"Content-Type": kind}, timeout=120)
    assert answer.status_code in (200, 400, 404, 413), answer.text[:300]
    if answer.status_code != 200:
        assert len(answer.content) < 2 * MAX_MESSAGE
        error = answer.json()["error"]
        message = error if path.startswith("/api/") else error["message"]
        assert message.count("unknown key") <= MAX_PROBLEMS
    assert httpx.get(f"{root}/health").status_code == 200


@pytest.mark.parametrize("name", SCENARIOS)
def test_server_withstands_attacks_with_many_connections(root, name):
    SCENARIOS[name](int(root.rpartition(":")[2]))
    assert httpx.get(f"{root}/health").status_code == 200


def test_attack_suite_covers_every_route_with_a_body(root):
    document = httpx.get(f"{root}/openapi.json").json()
    posts = {path for path, methods in document["paths"].items() if "post" in methods}
    assert set(ROUTES) < posts
    for path in ROUTES:
        assert long_text(path, 2**12)[0] == path
