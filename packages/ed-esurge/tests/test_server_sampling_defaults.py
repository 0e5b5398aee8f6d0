"""Requests that omit sampling options have the model's own values, and those of the operator."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import pytest
from ed_esurge.config import SamplingDefaults
from ed_esurge.model import get_sampling_defaults
from ed_esurge.processes.answer_check import ReplicaMessageError
from ed_esurge.processes.messages import decode_facts, encode_facts
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError

STORED = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.1)
TEXT = {"role": "user", "content": "hi"}
REQUESTS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [TEXT], "max_tokens": 2},
    "/v1/messages": {"messages": [TEXT], "max_tokens": 2, "model": "scripted"},
    "/v1/responses": {"input": "hi", "max_output_tokens": 16},
}
EVERY_ROUTE = pytest.mark.parametrize("route", REQUESTS)


def served(options, stored=STORED):
    engine = ScriptedEngine()
    engine.sampling_defaults = stored
    return engine, background(engine, **options)


def ask(client: httpx.Client, engine: ScriptedEngine, route: str, **more: object):
    body = REQUESTS[route] | {"model": engine.model_name} | more
    answer = client.post(route, json=body)
    assert answer.status_code == 200, answer.text
    params = list(engine.requests.values())[-1]
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: getattr(params, name) for name in names}, answer.json()


@pytest.fixture(scope="module")
def auto():
    engine, server = served({"override_generation_config": {"top_k": 7, "min_p": 0.1}})
    with server as url, httpx.Client(base_url=url.removesuffix("/v1")) as client:
        yield engine, client


@EVERY_ROUTE
def test_omitted_options_are_those_of_the_checkpoint_and_the_operator(auto, route: str) -> None:
    engine, client = auto
    params, answer = ask(client, engine, route)
    assert params == {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
    }
    if route == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)


@EVERY_ROUTE
def test_options_of_the_request_have_precedence(auto, route: str) -> None:
    engine, client = auto
    params, answer = ask(client, engine, route, temperature=1.0, top_p=1.0)
    assert (params["temperature"], params["top_p"], params["top_k"]) == (1.0, 1.0, 7)
    if route == "/v1/responses":
        assert (answer["temperature"], answer["top_p"]) == (1.0, 1.0)


def test_null_is_an_omitted_option(auto) -> None:
    engine, client = auto
    params, _ = ask(client, engine, "/v1/chat/completions", temperature=None)
    assert params["temperature"] == 0.6


def test_beam_search_has_no_defaults_of_samplers(auto) -> None:
    engine, client = auto
    params, _ = ask(client, engine, "/v1/completions", use_beam_search=True, temperature=0)
    assert params["top_k"] != 7


def test_endpoints_of_llama_cpp_and_ollama_have_the_operators_values(auto) -> None:
    engine, client = auto
    for route, body in {
        "/completion": {"prompt": "hi", "n_predict": 2},
        "/api/generate": {"model": engine.model_name, "prompt": "hi", "stream": False},
    }.items():
        answer = client.post(route, json=body)
        assert answer.status_code == 200, answer.text
        params = list(engine.requests.values())[-1]
        assert (params.temperature, params.top_k, params.min_p) == (0.8, 7, 0.1), route


def test_operator_can_select_the_defaults_of_openai() -> None:
    engine, server = served({"generation_config": "none"})
    with server as url, httpx.Client(base_url=url.removesuffix("/v1")) as client:
        params, _ = ask(client, engine, "/v1/completions")
    assert (params["temperature"], params["top_p"]) == (1.0, 1.0)


@pytest.mark.parametrize(
    "values", [{"temperature": 3}, {"top_p": 0}, {"tempature": 1}, {"top_k": 1.5}]
)
def test_invalid_values_of_the_operator_are_refused(values) -> None:
    server = served({"override_generation_config": values})[1]
    with pytest.raises(ConfigError, match=r"override_generation_config|tempature"), server:
        pass


def test_checkpoint_with_invalid_values_keeps_the_valid_ones(caplog) -> None:
    stored = {"temperature": "hot", "top_p": 2, "top_k": 5, "min_p": None, "do_sample": True}
    model = SimpleNamespace(generation_json=json.dumps(stored))
    assert get_sampling_defaults(model).values == {"top_k": 5}  # type: ignore[arg-type]
    assert "temperature='hot'" in caplog.text and "top_p=2" in caplog.text
    assert get_sampling_defaults(SimpleNamespace(generation_json=None)).values == {}  # type: ignore[arg-type]


def test_replica_sends_the_defaults_and_wrong_ones_are_refused(surge) -> None:
    facts = replace(surge.facts, sampling_defaults=STORED)
    values = encode_facts(facts)
    assert decode_facts(values) == facts
    for wrong in ({"temperature": 9}, {"x": 1}, [], None):
        with pytest.raises(ReplicaMessageError):
            decode_facts({**values, "sampling_defaults": wrong})
