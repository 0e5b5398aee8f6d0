"""A sleeping server rejects new requests, and requests in flight continue after waking up."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import openai
import pytest
from ed_esurge import SamplingParams
from ed_esurge.config import EngineConfig
from ed_esurge.engine import AsyncEngine
from ed_esurge.server.launch import background
from ed_esurge.testing import ScriptedEngine
from ed_infra.errors import ConfigError

pytestmark = pytest.mark.xdist_group("engine-behind-a-server")

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def served():
    engines = {"a": ScriptedEngine(), "b": ScriptedEngine()}
    with background(engines, enable_sleep_mode=True) as url:
        yield engines, httpx.Client(base_url=url.removesuffix("/v1")), url


def test_sleep_endpoints_are_disabled_by_default():
    with background(ScriptedEngine()) as url, httpx.Client(base_url=url[:-3]) as http:
        for answer in (http.post("/sleep"), http.post("/wake_up"), http.get("/is_sleeping")):
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "sleep_off")
            assert "enable_sleep_mode" in answer.json()["error"]["message"]


def test_requests_to_sleeping_server_return_503(served):
    engines, http, url = served
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert http.post("/sleep").json() == {"is_sleeping": True}
    assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    hello = [{"role": "user", "content": "hi"}]
    for ask in (
        lambda: client.completions.create(model="a", prompt="x"),
        lambda: client.chat.completions.create(model="a", messages=hello),
        lambda: client.chat.completions.create(model="a", messages=hello, stream=True),
        lambda: client.responses.create(model="a", input="x"),
        lambda: client.embeddings.create(model="a", input="x"),
    ):
        with pytest.raises(openai.InternalServerError) as caught:
            ask()
        assert (caught.value.status_code, caught.value.code) == (503, "engine_sleeping")
        assert caught.value.response.headers["retry-after"] == "1"
    assert http.get("/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        answer = http.get(path)
        assert (answer.status_code, answer.json()["status"]) == (503, "sleeping")
    assert http.get("/health/decode").status_code == 503
    assert http.post("/wake_up").json() == {"is_sleeping": False}
    assert client.completions.create(model="a", prompt="x").choices[0].text
    # One of several models.
    assert http.post("/sleep", params={"model": "b", "level": "2"}).json()["is_sleeping"]
    assert http.get("/is_sleeping").json() == {"is_sleeping": False}
    assert (engines["a"].is_sleeping, engines["b"].is_sleeping) == (False, True)
    assert http.post("/wake_up", params={"model": "b"}).json() == {"is_sleeping": False}


@pytest.mark.parametrize(
    ("path", "status", "param"),
    [
        ("/sleep?level=3", 400, "level"),
        ("/sleep?level=", 400, "level"),
        ("/sleep?mode=abort", 400, "mode"),
        ("/wake_up?tags=weights", 400, "tags"),
        ("/sleep?model=c", 404, "model"),
    ],
)
def test_errors_of_sleep_parameters_name_the_parameter(served, path, status, param):
    answer = served[1].post(path)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


def test_requests_in_flight_continue_after_sleep_and_wake_up(engine_behind, llama):
    engine = engine_behind
    expected = engine.generate("The cat", GREEDY)[0].outputs[0].text
    traces = engine.stats()["num_compiled"]
    with background(engine, enable_sleep_mode=True) as url:
        http = httpx.Client(base_url=url.removesuffix("/v1"), timeout=60)
        body = {"prompt": "The cat", "temperature": 0, "max_tokens": 20, "ignore_eos": True}
        found: list[httpx.Response] = []
        asking = threading.Thread(
            target=lambda: found.append(http.post("/v1/completions", json=body))
        )
        asking.start()
        while not engine.has_unfinished_requests:
            time.sleep(0.001)
        assert http.post("/sleep").json() == {"is_sleeping": True}
        assert engine.is_sleeping
        assert not engine.loop.runner.allocated
        answer = http.post("/v1/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_sleeping")
        assert http.post("/wake_up").json() == {"is_sleeping": False}
        asking.join(60)
        assert (
            found[0].json()["choices"][0]["text"] == expected
        )  # the request in flight has continued
        assert http.post("/sleep?level=2").status_code == 200
        answer = http.post("/wake_up")
        assert answer.status_code == 409
        assert "call update_model_weights" in answer.json()["error"]["message"]
        assert http.get("/is_sleeping").json() == {"is_sleeping": True}
    engine.update_model_weights(llama)
    engine.wake_up()
    assert engine.generate("The cat", GREEDY)[0].outputs[0].text == expected
    assert engine.stats()["num_compiled"] == traces


def test_is_sleeping_is_true_immediately_after_sleep_call():
    """The flag is set before the engine executes the command."""

    class Slow:
        is_sleeping = paused = has_unfinished_requests = False
        config = EngineConfig()

        def execute(self, command):
            time.sleep(0.2)

        def unfinished_requests(self):
            return []

        def step(self):
            return []

        def beat(self):
            pass

        def store_pages(self):
            return 0

        def claim(self, driver):
            return True

        def release(self, driver):
            pass

    async def main():
        engine = AsyncEngine(Slow())
        engine.start()
        with pytest.raises(ConfigError, match=r"use 1 .* or 2"):
            await engine.sleep(3)
        task = asyncio.create_task(engine.sleep())
        await asyncio.sleep(0.05)
        assert engine.is_sleeping
        await task
        assert not engine.is_sleeping  # the state of the real engine, which is awake
        engine.shutdown()

    asyncio.run(main())
