"""Several callers of one `eSurge`: alternating streams, threads, and unread streams."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
from ed_esurge import SamplingParams
from ed_infra.errors import ConfigError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


def tokens(deltas):
    return [token for delta in deltas for token in delta.outputs[0].token_ids]


@pytest.fixture(scope="module")
def alone(surge, prompts):
    return [surge.generate(prompt, GREEDY)[0].outputs[0].token_ids for prompt in prompts]


def test_streams_read_alternately_return_their_own_tokens(surge, prompts, alone):
    first, second = surge.stream(prompts[1], GREEDY), surge.stream(prompts[2], GREEDY)
    got = [[next(first)], [next(second)]]
    for deltas in zip_longest(first, second):
        for own, delta in zip(got, deltas, strict=True):
            own += [] if delta is None else [delta]
    assert [tokens(deltas) for deltas in got] == [alone[1], alone[2]]
    assert not surge.has_unfinished_requests


def test_calls_during_a_stream_return_their_own_tokens(surge, prompts, alone):
    stream = surge.stream(prompts[1], GREEDY)
    deltas = [next(stream)]
    surge.add_request("stepped", prompts[3], GREEDY)
    assert surge.generate(prompts[2], GREEDY)[0].outputs[0].token_ids == alone[2]
    deltas += list(stream)
    assert tokens(deltas) == alone[1]
    stepped = []
    while surge.has_unfinished_requests:
        stepped += surge.step()
    assert {out.request_id for out in stepped} == {"stepped"}
    assert tokens(stepped) == alone[3]


def test_concurrent_threads_receive_their_own_tokens(surge, prompts, alone):
    def job(number):
        if number % 2:
            return tokens(surge.stream(prompts[number % 8], GREEDY))
        return surge.generate(prompts[number % 8], GREEDY)[0].outputs[0].token_ids

    with ThreadPoolExecutor(4) as threads:
        got = list(threads.map(job, range(16), timeout=120))
    assert got == [alone[number % 8] for number in range(16)]
    assert not surge.has_unfinished_requests


def test_unread_stream_holds_no_resources(surge, prompts):
    with pytest.raises(ConfigError, match="no tokens"):
        surge.stream([], GREEDY)  # an invalid prompt raises before the first read
    unread = surge.stream(prompts[1], GREEDY)
    assert not surge.has_unfinished_requests
    del unread
    begun = surge.stream(prompts[1], GREEDY)
    next(begun)
    assert surge.has_unfinished_requests
    del begun
    gc.collect()
    surge.step()
    assert not surge.has_unfinished_requests
    assert surge.stats()["kv_cache_usage"] == 0
