"""The server with the real engine: clients receive the output of the model."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest
from ed_esurge.engine import AsyncEngine, eSurge
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer

pytestmark = pytest.mark.xdist_group("engine-behind-a-server")

PROMPTS = ["a", "The cat", "Grüße 世界", "x" * 20, "1 2 3 4 5 6 7", "??", "The cat sat", "y" * 50]


def build(model):
    """An engine that compiles at first use."""
    return eSurge(model, byte_tokenizer(), compile_runner=False, silent_mode=True, page_size=16)


@pytest.fixture(scope="module")
def model(llama):
    return llama


@pytest.fixture(scope="module")
def engine(engine_behind):
    return engine_behind


@pytest.fixture(scope="module")
def url(engine):
    with background(engine) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def greedy(model, prompts, count):
    """Tokens of the model's greedy generate: one left-padded batch."""
    longest = max(len(prompt) for prompt in prompts)
    ids = np.zeros((len(prompts), longest), np.int32)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    out = model.generate(
        jnp.asarray(ids),
        attention_mask=jnp.asarray(mask),
        max_new_tokens=count,
        eos_token_id=257,
        pad_token_id=0,
    )
    return np.asarray(out.sequences)[:, longest:].tolist()


@pytest.mark.nightly
def test_eight_concurrent_requests_produce_tokens_of_model_generate(model, engine, url):
    tokenizer = engine.tokenizer
    lengths = [4, 9, 16, 7, 12, 20, 5, 10]

    async def one(client, prompt, count):
        answer = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=count, temperature=0, logprobs=0
        )
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=count, temperature=0, stream=True
        )
        joined = "".join([chunk.choices[0].text async for chunk in stream])
        return answer, joined

    async def everyone():
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            jobs = [one(client, *pair) for pair in zip(PROMPTS, lengths, strict=True)]
            return await asyncio.gather(*jobs)

    answers = asyncio.run(everyone())
    whole = greedy(model, [tokenizer(prompt)["input_ids"] for prompt in PROMPTS], max(lengths))
    for expected, count, (answer, joined) in zip(whole, lengths, answers, strict=True):
        expected = expected[:count]
        if 257 in expected:
            expected = expected[: expected.index(257) + 1]
        choice = answer.choices[0]
        assert answer.usage.completion_tokens == len(expected)
        assert choice.text == tokenizer.decode(expected, skip_special_tokens=True)
        assert joined == choice.text
        assert choice.finish_reason == ("stop" if expected[-1] == 257 else "length")
        assert len(choice.logprobs.tokens) == len(expected)


@pytest.mark.nightly
def test_streamed_chat_produces_same_texts_as_unstreamed(client):
    messages = [{"role": "user", "content": "hello"}]
    options = {"model": "tiny", "messages": messages, "max_tokens": 24, "seed": 3, "n": 2}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]


@pytest.mark.nightly
def test_echo_logprobs_equal_logprobs_of_the_engine(client, engine, model):
    answer = client.completions.create(
        model="tiny", prompt="The cat sat", max_tokens=0, echo=True, logprobs=1
    )
    tokens = byte_tokenizer()("The cat sat")["input_ids"]
    logits = model(jnp.asarray([tokens])).logits[0].astype(jnp.float32)
    rows = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    expected = rows[np.arange(len(tokens) - 1), tokens[1:]]
    scores = answer.choices[0].logprobs.token_logprobs
    assert scores[0] is None
    np.testing.assert_allclose(scores[1:], expected, atol=1e-5)


def test_engine_config_error_returns_400(client):
    with pytest.raises(openai.BadRequestError, match="min_tokens"):
        client.completions.create(
            model="tiny", prompt="a" * 248, extra_body={"min_tokens": 16}, max_tokens=None
        )


@pytest.mark.nightly
def test_disconnected_client_frees_its_slot(client, engine):
    stream = client.completions.create(
        model="tiny", prompt="a", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 60
    while engine.stats()["num_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_metrics_contain_queue_and_cache_figures_of_the_engine(client, url):
    client.completions.create(model="tiny", prompt="The cat" * 4, max_tokens=2)
    text = httpx.get(url.replace("/v1", "/metrics")).text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
    ):
        assert f'{name}{{engine="0",model_name="tiny"}}' in text


def test_metrics_count_the_tokens_of_each_step(client, engine, url):
    """The sum of the steps of a request is the number of its computed tokens."""

    def read():
        lines = httpx.get(url.replace("/v1", "/metrics")).text.splitlines()
        known = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        labels = '{engine="0",model_name="tiny"}'
        return [
            float(known[f"vllm:iteration_tokens_total_{end}{labels}"]) for end in ("sum", "count")
        ]

    before = read()
    prompt = list(range(3, 40))
    answer = client.completions.create(
        model="tiny", prompt=prompt, max_tokens=6, extra_body={"ignore_eos": True}
    )
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (37, 6)
    deadline = time.monotonic() + 60
    while engine.stats()["num_requests_running"]:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    after = read()
    # The last sampled token is not an input of a step.
    assert after[0] - before[0] == 37 + 5
    assert after[1] - before[1] >= 1 + 5  # a prompt can take several steps
    text = httpx.get(url.replace("/v1", "/metrics")).text
    assert f'block_size="{engine.config.page_size}"' in text
    assert f'num_gpu_blocks="{engine.stats()["num_pages"]}"' in text


def test_health_reports_state_of_the_engine_thread(model):
    engine = AsyncEngine(build(model))
    with background(engine) as url:
        health = url.replace("/v1", "/health")
        assert httpx.get(health).status_code == 200
        engine.shutdown()
        assert httpx.get(health).status_code == 503
        answer = httpx.post(f"{url}/completions", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "engine_unavailable"
        engine.start()
        assert httpx.get(health).status_code == 200
        engine.shutdown()


def test_stuck_and_failed_steps_make_the_server_unhealthy(model, monkeypatch):
    release = threading.Event()

    def step():
        release.wait(120)
        raise RuntimeError("the device is gone")

    inner = build(model)
    monkeypatch.setattr(inner, "step", step)
    engine = AsyncEngine(inner, stuck_after=0.2)
    with background(engine) as url:
        health = url.replace("/v1", "/health/live")
        assert httpx.get(health).status_code == 200
        with ThreadPoolExecutor() as pool:
            body = {"prompt": "a", "stream": True}
            asked = pool.submit(httpx.post, f"{url}/completions", json=body, timeout=20)
            time.sleep(0.5)
            assert httpx.get(health).status_code == 503
            release.set()
            answer = asked.result()
        assert answer.status_code == 503
        assert "the device is gone" in answer.json()["error"]["message"]
        assert httpx.get(health).status_code == 503


def test_prefix_cache_reset_clears_prefixes_without_changing_tokens(client, url):
    def ask():
        answer = client.completions.create(
            model="tiny", prompt="z" * 60, max_tokens=4, temperature=0
        )
        return answer.choices[0].text, answer.usage.prompt_tokens_details.cached_tokens

    text, _ = ask()
    assert ask() == (text, 48)
    assert httpx.post(url.replace("/v1", "/reset_prefix_cache")).status_code == 200
    assert ask() == (text, 0)
    # A running request has the same tokens as without a reset.
    options = {"model": "tiny", "prompt": "zz", "max_tokens": 40, "temperature": 0}
    whole = client.completions.create(**options).choices[0].text
    pieces = []
    for chunk in client.completions.create(**options, stream=True):
        pieces.append(chunk.choices[0].text)
        if len(pieces) == 5:
            httpx.post(url.replace("/v1", "/reset_prefix_cache"))
    assert "".join(pieces) == whole
