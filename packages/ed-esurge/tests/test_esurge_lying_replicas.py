"""A replica that holds the secret and lies loses its connection, and harms no other request."""

from __future__ import annotations

import asyncio
import math
import time
from contextlib import suppress

import msgpack
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.core.adapters import LoadedAdapter
from ed_esurge.engine.connection import ConnectionLost
from ed_esurge.outputs import (
    STEP_SIZES,
    CompletionOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from ed_esurge.processes.messages import decode_facts, encode_facts
from ed_esurge.processes.replica_group import ReplicaLostError
from ed_esurge.server.metrics import ServerMetrics
from ed_infra.errors import EasyDeLError
from local_replicas import OPTIONS, LocalReplica, LyingReplica, collect_tokens, serving_replicas

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(llama, tokenizer) -> eSurge:
    return eSurge(llama, tokenizer, **OPTIONS)


@pytest.fixture(scope="module")
def expected(engine, prompts):
    """Return the tokens of each prompt."""
    return [out.outputs[0].token_ids for out in engine.generate(prompts, GREEDY)]


@pytest.fixture(scope="module")
def served(engine, expected, tokenizer):
    """Yield an engine with one honest replica and a free place, and its hub."""
    with serving_replicas(engine.config, tokenizer, 2) as (front, hub, _):
        replica = LocalReplica(hub, engine)
        while front.replicas.num_ready < 1:
            time.sleep(0.01)
        yield front, hub
    replica.end()


def output(message, *completions, **fields):
    """Return the message of an output for a request."""
    first = completions or (CompletionOutput(0, "a", [1]),)
    values = {
        "request_id": message["id"],
        "prompt_token_ids": message["prompt"].token_ids,
        "outputs": list(first),
        "finished": False,
        "metrics": RequestMetrics(time.monotonic()),
        "delta": True,
    }
    return {"do": "output", "id": message["id"], "output": RequestOutput(**{**values, **fields})}


STATS = {
    **dict.fromkeys(("num_requests_running", "num_requests_waiting", "iteration_tokens_sum"), 0.0),
    **{f"iteration_tokens_{bound}": 0.0 for bound in (*STEP_SIZES, "inf")},
}


def state(**fields):
    return {"do": "state", "stats": [STATS], "adapters": [], "sleeping": False, **fields}


def metrics(**fields):
    return RequestMetrics(**{"arrival_time": 0.0, **fields})


def done(*tokens, **fields):
    return CompletionOutput(0, "a", list(tokens), finish_reason="length", **fields)


#: Messages instead of an honest answer, by the kind of the lie.
LIES = {
    "token beyond the vocabulary": lambda m: [output(m, CompletionOutput(0, "a", [10**6]))],
    "negative token": lambda m: [output(m, CompletionOutput(0, "a", [-1]))],
    "token that is no integer": lambda m: [output(m, CompletionOutput(0, "a", [1.0]))],
    "tokens that are no list": lambda m: [output(m, CompletionOutput(0, "a", "abc"))],
    "text that is no text": lambda m: [output(m, CompletionOutput(0, 7, [1]))],
    "long text": lambda m: [output(m, CompletionOutput(0, "a" * 2**21, [1]))],
    "index beyond n": lambda m: [output(m, CompletionOutput(3, "a", [1]))],
    "negative index": lambda m: [output(m, CompletionOutput(-1, "a", [1]))],
    "no completion": lambda m: [output(m, outputs=[])],
    "completion of another type": lambda m: [output(m, outputs=[{"index": 0}])],
    "too many tokens": lambda m: [output(m, CompletionOutput(0, "a", [1] * 13))],
    "too many outputs": lambda m: [output(m, CompletionOutput(0, "", [])) for _ in range(200)],
    "end without reason": lambda m: [output(m, finished=True)],
    "reason without end": lambda m: [output(m, done(1))],
    "unknown reason": lambda m: [output(m, CompletionOutput(0, "a", [1], finish_reason="x"))],
    "reason that is no text": lambda m: [output(m, CompletionOutput(0, "", [], None, None, []))],
    "log-probabilities without a request": lambda m: [
        output(m, CompletionOutput(0, "a", [1], [{1: Logprob(-1.0)}]))
    ],
    "prompt log-probabilities": lambda m: [output(m, prompt_logprobs=[None])],
    "vector": lambda m: [output(m, pooled=np.zeros(3, np.float32))],
    "experts": lambda m: [
        output(m, CompletionOutput(0, "a", [1], routed_experts=np.zeros((1, 1, 1), np.int16)))
    ],
    "metrics of another type": lambda m: [output(m, metrics={"arrival_time": 0})],
    "time that is no number": lambda m: [output(m, metrics=metrics(first_token_time=math.nan))],
    "time that is a text": lambda m: [output(m, metrics=metrics(first_token_time="now"))],
    "huge count": lambda m: [output(m, metrics=metrics(num_generated_tokens=2**60))],
    "negative count": lambda m: [output(m, metrics=metrics(num_cached_tokens=-1))],
    "error that is no text": lambda m: [output(m, error=7)],
    "output of another type": lambda m: [{"do": "output", "id": m["id"], "output": [1]}],
    "output without content": lambda m: [{"do": "output", "id": m["id"]}],
    "message without id": lambda m: [{"do": "output"}],
    "id of another type": lambda m: [{"do": "output", "id": [m["id"]], "output": None}],
    "unknown kind": lambda m: [{"do": "explode", "id": m["id"]}],
    "message that is no dict": lambda m: [1, 2],
    "no list": lambda m: {"do": "state"},
    "list that is too long": lambda m: [state()] * 5000,
    "result of an unknown call": lambda m: [{"do": "called", "id": "call-99", "error": None}],
    "error of an unknown kind": lambda m: [{"do": "failed", "id": m["id"], "error": {"kind": "x"}}],
    "error without values": lambda m: [
        {"do": "failed", "id": m["id"], "error": {"kind": "token_id", "text": "a", "values": [1]}}
    ],
    "error without content": lambda m: [{"do": "failed", "id": m["id"], "error": None}],
    "statistics that are missing": lambda m: [state(stats=[{}])],
    "statistics that are texts": lambda m: [state(stats=[{**STATS, "num_requests_running": "1"}])],
    "statistics that are no number": lambda m: [
        state(stats=[{**STATS, "num_requests_waiting": math.nan}])
    ],
    "more running requests than places": lambda m: [
        state(stats=[{**STATS, "num_requests_running": 1e18}])
    ],
    "many statistics": lambda m: [state(stats=[{**STATS, **{f"s{i}": 0.0 for i in range(10**4)}}])],
    "many engines": lambda m: [state(stats=[STATS] * 2000)],
    "adapters of another type": lambda m: [state(adapters=[{"name": "a"}])],
    "adapter with a number as name": lambda m: [state(adapters=[LoadedAdapter(1, 1, 1, 1)])],
    "sleep that is no boolean": lambda m: [state(sleeping="yes")],
    "head beyond the limit": lambda m: [{"do": "state", "padding": ["a"] * 2**22}],
}


def ask_all(front, prompts, count=2):
    """Return the tokens, or the error of a lost replica, of several requests at once."""

    async def run():
        jobs = [
            collect_tokens(front, prompt, GREEDY, f"r{turn}-{place}-{time.monotonic()}")
            for turn in range(count)
            for place, prompt in enumerate(prompts)
        ]
        return await asyncio.wait_for(asyncio.gather(*jobs, return_exceptions=True), 120)

    return asyncio.run(run())


def lie_in(served, prompts, expected, lie, ready=None, lost=0):
    """Check that all requests are answered, although one replica lies to its requests.

    Args:
        lost: maximum number of requests that received an output of the liar and end with an error.
    """
    front, hub = served
    liar = LyingReplica(hub, front.facts, lie, ready)
    deadline = time.monotonic() + 60
    while front.replicas.num_ready < 2 and liar.thread.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        answers = ask_all(front, prompts)
        errors = [one for one in answers if isinstance(one, ReplicaLostError)]
        assert len(errors) <= lost
        for one, tokens in zip(answers, expected * 2, strict=True):
            assert one in errors or one == tokens
    finally:
        liar.connection.close()
        liar.thread.join(60)
    while front.replicas.num_ready > 1:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not front.replicas._requests and front.is_healthy and not front.is_sleeping
    return liar


@pytest.mark.parametrize(
    "name",  # the default run has every third lie
    [
        pytest.param(name, marks=[] if i % 3 == 0 else pytest.mark.nightly)
        for i, name in enumerate(LIES)
    ],
)
def test_lie_of_a_replica_ends_its_connection_and_no_request(served, prompts, expected, name):
    lost = len(prompts) if name == "too many outputs" else 0
    liar = lie_in(served, prompts, expected, lambda c, m: c.send(LIES[name](m)), lost=lost)
    assert liar.requests, "the liar received no request"


def raw_frame(connection, data: bytes) -> None:
    """Send a frame without a code."""
    connection._stream.sendall(len(data).to_bytes(8, "big") + data)


def nested(depth: int) -> bytes:
    """Return an encoded value of nested extensions."""
    packed = msgpack.packb(1)
    for _ in range(depth):
        packed = msgpack.packb(msgpack.ExtType(0, packed))
    return len(packed).to_bytes(8, "big") + packed


def send_empty_lists(connection, message) -> None:
    count = 2**21
    packed = b"\xdd" + count.to_bytes(4, "big") + b"\x90" * count
    connection.send_encoded(len(packed).to_bytes(8, "big") + packed)


FRAMES = {
    "huge frame": lambda c, m: c._stream.sendall((2**40).to_bytes(8, "big") + b"a" * 100),
    "frame of the largest length": lambda c, m: c._stream.sendall(b"\xff" * 8),
    "frame without a code": lambda c, m: raw_frame(c, b"a" * 100),
    "empty frame": lambda c, m: raw_frame(c, b""),
    "nested extensions": lambda c, m: c.send_encoded(nested(20_000)),
    "short head": lambda c, m: c.send_encoded(b"\0" * 7),
    "head beyond the message": lambda c, m: c.send_encoded((2**62).to_bytes(8, "big")),
    "many empty lists": send_empty_lists,
    "cut message": lambda c, m: c._stream.sendall((1000).to_bytes(8, "big") + b"a"),
}


@pytest.mark.parametrize("name", FRAMES)
def test_hostile_frame_of_a_replica_ends_its_connection(served, prompts, expected, name):
    def lie(connection, message) -> None:
        with suppress(OSError, EasyDeLError):
            FRAMES[name](connection, message)
        if name == "cut message":
            connection.close()

    assert lie_in(served, prompts, expected, lie).requests


def test_replayed_message_ends_the_connection(served, prompts, expected):
    sent = []

    def lie(connection, message) -> None:
        write = connection._write

        def record(data: bytes) -> None:
            sent.append(data)
            write(data)

        with suppress(ConnectionLost, OSError):
            if not sent:
                connection._write = record
                connection._out._broadcast = lambda data: record(data) or data
            connection.send([state()])
            raw_frame(connection, sent[0])  # the recorded message again

    assert lie_in(served, prompts, expected, lie).requests


def test_results_for_other_requests_are_ignored(served, prompts, expected):
    front, _ = served

    def lie(connection, message) -> None:
        wrong = done(1, 2, 3)
        others = [{**message, "id": name} for name in list(front.replicas._requests)]
        honest = [one for one in others if one["id"] not in liar_requests(front)]
        connection.send([output(one, wrong, finished=True) for one in honest])
        connection.send([{"do": "failed", "id": one["id"], "error": None} for one in honest])
        connection.send([output({**message, "id": "unknown"}, wrong, finished=True)])
        connection.close()  # the requests of the liar go to the other replica

    lie_in(served, prompts, expected, lie)


def liar_requests(front) -> set[str]:
    """Return the ids of the requests of the second replica."""
    return {
        name for one in front.replicas.list_replicas() if one.index == 1 for name in one.requests
    }


def test_clock_values_of_a_replica_stay_between_arrival_and_present(served, prompts):
    front, hub = served
    for first, last in ((-1e300, 1e300), (1e300, -1e300), (0.0, 0.0)):

        def lie(connection, message, times=(first, last)) -> None:
            values = metrics(
                first_scheduled_time=times[0],
                first_token_time=times[1],
                last_token_time=times[0],
                finished_time=times[1],
                num_cached_tokens=2**50,
                num_generated_tokens=2**50,
            )
            connection.send([output(message, done(1), finished=True, metrics=values)])

        liar = LyingReplica(hub, front.facts, lie, {"now": 1e12})
        while front.replicas.num_ready < 2:
            time.sleep(0.01)
        outputs = []

        async def run(outputs=outputs):
            from ed_esurge.engine.intake import CheckedPrompt

            for turn in range(6):
                prompt = CheckedPrompt(prompts[0], 1)
                began = time.monotonic()
                items = front.generate(prompt, GREEDY, f"clock-{turn}-{began}")
                outputs.extend([(began, one) async for one in items])

        asyncio.run(run())
        timer = ServerMetrics().of("tiny", list).request(4)
        for began, one in outputs:
            timer.observe(one)
            times = one.metrics
            marks = [times.first_scheduled_time, times.first_token_time, times.last_token_time]
            known = [mark for mark in marks if mark is not None]
            assert known == sorted(known)
            assert all(began <= mark <= time.monotonic() for mark in known)
            assert times.num_cached_tokens <= len(prompts[0])
        assert liar.requests
        assert front.replicas._router._usual < 1000
        liar.connection.close()
        liar.thread.join(60)
        while front.replicas.num_ready > 1:
            time.sleep(0.01)


@pytest.mark.parametrize(
    "change",
    [
        {"now": math.nan},
        {"now": math.inf},
        {"now": "now"},
        {"do": "state"},
        {"facts": None},
        {"facts": {}},
    ],
    ids=str,
)
def test_invalid_first_message_is_rejected(served, prompts, expected, change):
    liar = lie_in(served, prompts, expected, lambda c, m: None, change)
    assert not liar.requests


FACTS = {
    "max_model_len": 10**9,
    "vocab_size": -1,
    "eos_token_ids": (10**9,),
    "input_names": (1,),
    "task": "none",
    "labels": 7,
    "embedding_settings": "x",
    "recording_form": (1,),
    "certificate": 3,
    "model_name": 5,
}


@pytest.mark.parametrize("name", FACTS)
def test_replica_of_another_model_is_rejected(served, prompts, expected, name):
    front, _ = served
    change = {"facts": {**encode_facts(front.facts), name: FACTS[name]}}
    assert not lie_in(served, prompts, expected, lambda c, m: None, change).requests
    assert front.facts.vocab_size > 0 and decode_facts(encode_facts(front.facts)) == front.facts


def test_replica_cannot_claim_to_sleep_for_the_server(served, prompts, expected):
    front, _ = served
    states = []

    def lie(connection, message) -> None:
        connection.send([state(sleeping=True)])
        while not any(one.sleeping for one in front.replicas.list_replicas()):
            time.sleep(0.01)
        states.append(front.is_sleeping)
        connection.close()

    lie_in(served, prompts, expected, lie)
    assert states == [False]


def test_replica_without_a_token_takes_no_place_of_a_local_process(served):
    front, _ = served
    group = front.replicas
    group.reserved = 1
    try:
        assert not group._has_place(None)
        assert group._has_place("token")
    finally:
        group.reserved = 0


def test_answers_that_exceed_the_limit_of_a_message_fail_only_their_request(monkeypatch):
    from ed_esurge.processes.message_writer import MessageWriter

    sent = []

    class Recorder:
        def send_encoded(self, data):
            sent.append(data)

        def close(self):
            pass

    from ed_esurge.engine.wire import decode_message

    writer = MessageWriter(Recorder(), limit=2000)
    for place in range(40):
        writer.put({"do": "output", "id": f"r{place}", "output": "a" * 100})
    writer.put({"do": "output", "id": "large", "output": "a" * 3000})
    writer.close()
    deadline = time.monotonic() + 30
    while not any(b"large" in data for data in sent):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    messages = [message for data in sent for message in decode_message(data)]
    assert [one["id"] for one in messages] == [*(f"r{place}" for place in range(40)), "large"]
    assert all(len(data) <= 2000 for data in sent)
    assert messages[-1]["do"] == "failed" and "3" in messages[-1]["error"]["text"]
