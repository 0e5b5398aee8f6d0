"""The endpoints of EasyLM: scores equal those of lm-evaluation-harness on the same engine."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from ed_esurge import eSurge, eSurgeLM
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer
from lm_eval.api.instance import Instance

PREFIXES = ["The cat sat", "", "one, two, "]
TEXTS = [" on the mat.", "A sentence alone.", "three"]


@pytest.fixture(scope="module")
def engine(llama: Any) -> Any:
    options = {"max_model_len": 64, "max_num_seqs": 4, "page_size": 8, "compile_runner": False}
    with eSurge(llama, byte_tokenizer(), silent_mode=True, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Any) -> Any:
    with background(engine) as url:
        yield str(url).removesuffix("/v1")


def sent(url: str, path: str, **body: Any) -> dict[str, Any]:
    reply = httpx.post(f"{url}{path}", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.nightly
def test_scores_equal_those_of_lm_eval(engine: Any, url: str) -> None:
    asked = [Instance("loglikelihood", {}, pair, 0) for pair in zip(PREFIXES, TEXTS, strict=True)]
    expected = eSurgeLM(engine).loglikelihood(asked, disable_tqdm=True)
    answer = sent(url, "/loglikelihood", prefix_text=PREFIXES, text=TEXTS)
    assert answer["log_likelihood"] == pytest.approx([score for score, _ in expected], rel=1e-5)
    assert answer["is_greedy"] == [greedy for _, greedy in expected]
    alone = sent(url, "/loglikelihood", text=TEXTS[1:2])
    assert alone["log_likelihood"][0] == pytest.approx(expected[1][0], rel=1e-5)


@pytest.mark.nightly
def test_rolling_scores_equal_those_of_lm_eval(engine: Any, url: str) -> None:
    texts = ["A short text.", "A text that is longer than the context of the engine. " * 3]
    asked = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    expected = eSurgeLM(engine).loglikelihood_rolling(asked, disable_tqdm=True)
    answer = sent(url, "/loglikelihood-rolling", text=texts)
    assert answer["log_likelihood"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.nightly
def test_greedy_text_equals_that_of_the_completions_endpoint(url: str) -> None:
    body = {"prompt": PREFIXES[0], "max_tokens": 8, "temperature": 0}
    expected = sent(url, "/v1/completions", **body)["choices"][0]["text"]
    answer = sent(url, "/greedy-until", prefix_text=PREFIXES[:1], until=["\\n\\n"], max_tokens=8)
    assert answer["output_text"] == [expected]
    sampled = sent(url, "/generate", prefix_text=PREFIXES[:1], temperature=0.0, max_tokens=8)
    assert sampled["output_text"] == [expected]


@pytest.mark.nightly
def test_chat_returns_the_context_of_the_next_turn(url: str) -> None:
    first = sent(url, "/chat", prompt="Hello", temperature=0.0, max_tokens=4)
    assert first["context"] == "Hello" + first["response"]
    second = sent(
        url, "/chat", prompt=" again", context=first["context"], temperature=0.0, max_tokens=4
    )
    assert second["context"].startswith(first["context"] + " again")


def test_server_reports_readiness_and_refuses_unequal_lists(url: str) -> None:
    assert httpx.get(f"{url}/ready").text == "Ready!\n"
    reply = httpx.post(f"{url}/loglikelihood", json={"prefix_text": ["a"], "text": ["b", "c"]})
    assert reply.status_code == 400
    assert "prefix_text has 1 entries, and text has 2" in reply.text
    reply = httpx.post(f"{url}/greedy-until", json={"prefix_text": ["a"]})
    assert reply.status_code == 400
    assert "until is missing" in reply.text
