"""`GET /v1/prefix/{id}`, and the header with the number of cached tokens."""

from __future__ import annotations

import httpx
import pytest
from ed_esurge import eSurge
from ed_esurge.server.generation.answers import PrefixReport
from ed_esurge.server.generation.models import RECENT_PROMPTS, RECENT_TOKENS
from ed_esurge.server.launch import background
from ed_esurge.testing import byte_tokenizer

TEXT = "The first pages of this prompt are equal in every request. "  # 59 tokens of a byte
SIZES = {"max_num_seqs": 2, "page_size": 8, "max_num_batched_tokens": 64, "max_model_len": 128}


@pytest.fixture(scope="module")
def http(llama):
    engine = eSurge(llama, byte_tokenizer(), num_pages=32, silent_mode=True, **SIZES)
    with background(engine) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


@pytest.fixture(autouse=True)
def _empty_cache(http):
    assert http.post(str(http.base_url).removesuffix("/v1/") + "/reset_prefix_cache").is_success


def send(http, prompt, **fields):
    """Return the id of a request, and its number of cached tokens by the header."""
    fields = {"prompt": prompt, "max_tokens": 1, "add_special_tokens": False, **fields}
    answer = http.post("completions", json=fields)
    assert answer.status_code == 200, answer.text
    cached = int(answer.headers["x-cached-prompt-tokens"])
    if not fields.get("stream"):
        assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
    return answer.headers["x-request-id"], cached


def explain(http, request_id):
    return PrefixReport.model_validate(http.get(f"prefix/{request_id}").json()).data


def test_first_different_token_is_named_with_the_nearest_prompt(http):
    first, _ = send(http, TEXT + "Monday")
    send(http, "Another beginning. " + TEXT)
    asked, cached = send(http, TEXT + "Tuesday")
    (use,) = explain(http, asked)
    assert cached == use.cached_tokens == 56 and use.prompt_tokens == len(TEXT) + 7
    assert (use.nearest.id, use.nearest.equal_tokens) == (f"{first}-0", len(TEXT))
    assert use.text_before == TEXT[-12:] and use.text == "Tuesday"
    assert use.nearest_text.startswith("Monday")
    assert f"token {len(TEXT)} differs" in use.reason and "whole pages of 8" in use.reason


def test_answers_belong_to_the_earlier_prompt(http):
    fields = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    (choice,) = http.post("completions", json={"prompt": TEXT, **fields}).json()["choices"]
    ids = [*choice["prompt_token_ids"], *choice["token_ids"]]
    asked, cached = send(http, [*ids[:-1], 5, 6, 7])
    (use,) = explain(http, asked)
    assert use.nearest.equal_tokens == len(ids) - 1 and cached == use.cached_tokens == 80


@pytest.mark.parametrize(
    ("earlier", "fields", "reason"),
    [
        (None, {}, "no recent prompt begins with the same page"),
        ({}, {}, "all whole pages of 8 tokens"),
        ({}, {"prompt_logprobs": 1}, "log-probabilities of the prompt"),
        ({"cache_salt": "b"}, {}, "has another adapter or cache_salt"),
    ],
)
def test_reason_names_the_cause(http, earlier, fields, reason):
    prompt = f"{reason}, and further text."
    if earlier is not None:
        send(http, prompt, **earlier)
    asked, _ = send(http, prompt, **fields)
    (use,) = explain(http, asked)
    assert reason in use.reason


def test_replaced_pages_are_the_reason_after_other_prompts(http):
    send(http, TEXT + TEXT)
    for letter in "abcdef":
        send(http, letter * 120)
    asked, cached = send(http, TEXT + TEXT)
    (use,) = explain(http, asked)
    assert cached == 0 and use.nearest.equal_tokens == 2 * len(TEXT)
    assert "replaced by those of later prompts" in use.reason


def test_each_prompt_of_a_request_is_explained_and_streams_have_the_header(http):
    send(http, TEXT)
    asked, cached = send(http, [TEXT, "b" * 20], stream=True)
    assert cached in (56, 0)  # the count of the prompts that have an output
    uses = explain(http, asked)
    assert [use.prompt_tokens for use in uses] == [len(TEXT), 20]
    assert [use.cached_tokens for use in uses] == [56, 0]


def test_unknown_id_says_which_id_to_send(http):
    answer = http.get("prefix/cmpl-unknown")
    assert answer.status_code == 404 and "X-Request-Id" in answer.json()["error"]["message"]


def test_memory_of_recent_prompts_is_limited():
    from array import array

    from ed_esurge.server.generation.models import RecentPrompt, RecentPrompts

    def prompt(size):
        tokens = array("i", [1] * size)
        return RecentPrompt("a", "m", "", (None, None), True, (), tokens, size, 0.0)

    recent = RecentPrompts()
    for _ in range(2 * RECENT_PROMPTS):
        recent.add(prompt(4))
    assert len(list(recent)) == RECENT_PROMPTS
    for _ in range(5):
        recent.add(prompt(RECENT_TOKENS // 2))
    assert sum(len(one.tokens) for one in recent) <= RECENT_TOKENS
