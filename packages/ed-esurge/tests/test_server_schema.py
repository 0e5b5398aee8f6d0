"""Valid and invalid requests from the OpenAPI document never cause a status 5xx or a timeout."""

from __future__ import annotations

import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.server import openapi
from ed_esurge.server.launch import background
from ed_esurge.testing import TOOL_TEMPLATE, ScriptedEngine, byte_tokenizer
from hypothesis import HealthCheck, given, settings

schemathesis = pytest.importorskip("schemathesis")
METHODS = {one.path: one.method for one in openapi.list_endpoints() if one.accepts is not None}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    config = EngineConfig(max_loras=2)
    engine = ScriptedEngine(
        tokenizer=byte_tokenizer(TOOL_TEMPLATE), max_model_len=4096, config=config
    )
    folder = tmp_path_factory.mktemp("server")
    with background(engine, lora_directory=folder, batch_directory=folder / "batches") as url:
        yield url.removesuffix("/v1")


def ask(root, path, examples):
    """Send this number of requests with valid and invalid bodies."""
    schema = schemathesis.openapi.from_url(f"{root}/openapi.json")
    operation = schema[path][METHODS[path]]
    for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.as_strategy(generation_mode=mode))
        def once(case):
            answer = case.call(base_url=root, timeout=20)
            assert answer.status_code in (200, 400, 403, 404), answer.text
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error if path.startswith("/api/") else error["message"]

        once()


@pytest.mark.nightly
@pytest.mark.parametrize("path", METHODS)
def test_fuzzed_requests_never_cause_server_errors(root, path):
    ask(root, path, examples=40)


@pytest.mark.nightly
def test_completions_endpoint_survives_schema_fuzzing(root):
    ask(root, "/v1/completions", examples=8)
