"""Every family with recurrent states: answers from saved states equal answers without them.

Three conversations with a common beginning run together, with fewer places and pages than they
need. With one order of sums (`batch_invariant`), log-probabilities are equal in every bit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_esurge import RequestOutput, SamplingParams, eSurge
from ed_esurge.engine import setup
from ed_esurge.model import is_recurrent
from ed_infra.enums import TaskType

from tests.conformance.bits import create
from tests.conformance.cases import subjects
from tools.bits_table import read

FAMILIES = (
    "bamba",
    "falcon_h1",
    "falcon_mamba",
    "granitemoehybrid",
    "jamba",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "mamba",
    "mamba2",
    "minimax",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
)
PAGE = 8
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_seq_buckets": (4,),
    "max_num_batched_tokens": 32,
    "min_input_pad": 32,
    "page_size": PAGE,
    "max_model_len": 96,
    "compile_runner": False,
    "silent_mode": True,
    "num_scheduler_steps": 1,
    "num_states": 6,
    "num_pages": 20,
}


def has_equal_bits(model_type: str) -> bool:
    """Return whether the engine has one order of sums for the family."""
    row = read().get(model_type, {}).get("float32", {})
    return row.get("chunks") == "equal"


def converse(engine: eSurge, *, alone: bool = False) -> list[RequestOutput]:
    """Return the outputs of three turns of three conversations, of which one has two answers.

    Args:
        engine: the engine.
        alone: whether each request runs alone and shares nothing, as without a prefix cache.
    """
    rng = np.random.default_rng(3)
    system = rng.integers(3, 90, 19).tolist()
    prompts = [[*system, *rng.integers(3, 90, 5 + 4 * i).tolist()] for i in range(3)]
    outputs: list[RequestOutput] = []
    for turn in range(3):
        for i, prompt in enumerate(prompts):
            params = SamplingParams(
                temperature=float(i > 0),
                seed=i,
                n=1 + i // 2,
                max_tokens=9,
                logprobs=0,
                ignore_eos=True,
            )
            salt = f"alone {turn} {i}" if alone else None
            engine.add_request(f"{alone} {turn} {i}", prompt, params, cache_salt=salt)
            if alone:
                outputs += finish(engine)
        if not alone:
            outputs += finish(engine)
        prompts = [
            [
                *output.prompt_token_ids,
                *output.outputs[0].token_ids,
                *rng.integers(3, 90, 4 + turn).tolist(),
            ]
            for output in outputs[-3:]
        ]
    return outputs


def finish(engine: eSurge) -> list[RequestOutput]:
    """Run all requests and return their outputs, in order of their ids."""
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished_requests:
        for delta in engine.step():
            if delta.request_id in outputs:
                outputs[delta.request_id].add(delta)
            else:
                outputs[delta.request_id] = delta
    return [outputs[name] for name in sorted(outputs)]


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
def test_answers_from_saved_states_equal_answers_without_them(
    model_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(setup, "STATE_SPACING", PAGE)
    monkeypatch.setattr(setup, "STATE_INTERVAL", 2 * PAGE)
    exact = has_equal_bits(model_type)
    model = create(model_type, "float32", batch_invariant=exact)
    engine = eSurge(model, **OPTIONS)
    expected = converse(engine, alone=True)
    assert not any(output.metrics.num_cached_tokens for output in expected)
    outputs, cached, worst = converse(engine), 0, 0.0
    for turn, (output, other) in enumerate(zip(outputs, expected, strict=True)):
        cached += output.metrics.num_cached_tokens
        assert turn < 3 or output.metrics.num_cached_tokens >= 2 * PAGE
        for answer, alone in zip(output.outputs, other.outputs, strict=True):
            assert answer.token_ids == alone.token_ids
            for token, found, right in zip(
                answer.token_ids, answer.logprobs or (), alone.logprobs or (), strict=True
            ):
                worst = max(worst, abs(found[token].logprob - right[token].logprob))
    assert worst <= (0 if exact else 1e-5)
    states = engine.loop.scheduler.states
    assert states is not None
    assert states.num_evicted > 0
    summary = f"{cached} cached tokens, log-probabilities within {worst:.1e}"
    record_property("summary", f"{model_type}: {summary}")


@pytest.mark.nightly
def test_families_are_all_families_with_recurrent_states() -> None:
    recurrent = {
        subject.model_type
        for subject in subjects()
        if subject.task == TaskType.CAUSAL_LM and is_recurrent(subject.model)
    }
    assert recurrent == set(FAMILIES)


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["qwen3_next", "lfm2"])
def test_many_requests_that_end_early_leave_nothing_behind(
    model_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """2,000 requests with clients that leave, preemption and eviction."""
    monkeypatch.setattr(setup, "STATE_SPACING", PAGE)
    monkeypatch.setattr(setup, "STATE_INTERVAL", 2 * PAGE)
    engine = eSurge(create(model_type, "float32"), **{**OPTIONS, "num_pages": 12})
    scheduler = engine.loop.scheduler
    assert scheduler.states is not None
    rng = np.random.default_rng(5)
    system = rng.integers(3, 90, 2 * PAGE + 3).tolist()
    asked = [
        (
            [*system[: PAGE * rng.integers(0, 4)], *rng.integers(3, 90, rng.integers(3, 30))],
            SamplingParams(temperature=i % 2, seed=i, max_tokens=1 + 9 * (i % 4), logprobs=0),
        )
        for i in range(40)
    ]
    expected = []
    for i, (prompt, params) in enumerate(asked):
        engine.add_request(f"alone {i}", prompt, params, cache_salt=f"alone {i}")
        expected += finish(engine)

    waiting = [(f"{i}", int(rng.integers(len(asked)))) for i in range(2000)]
    running: dict[str, int] = {}
    outputs: dict[str, RequestOutput] = {}
    aborted, compared = 0, 0
    while waiting or engine.has_unfinished_requests:
        while waiting and len(running) < 12:
            name, which = waiting.pop()
            engine.add_request(name, *asked[which])
            running[name] = which
        for delta in engine.step():
            name = delta.request_id
            if name not in running:
                continue
            output = outputs.setdefault(name, delta)
            if output is not delta:
                output.add(delta)
            if delta.finished:
                (answer,), (alone,) = output.outputs, expected[running.pop(name)].outputs
                assert (answer.token_ids, answer.logprobs) == (alone.token_ids, alone.logprobs)
                compared += 1
        if running and rng.random() < 0.15:
            name = str(rng.choice(list(running)))
            engine.abort_request(name)
            del running[name]
            aborted += 1
    assert not scheduler.running and not scheduler.waiting and scheduler.pages.usage == 0
    states = scheduler.states
    assert not states._uncommitted and len(states) + len(states._blank) == states.places
    counts = f"{compared} equal, {aborted} aborted, {scheduler.num_preemptions} preemptions"
    record_property("summary", f"{model_type}: {counts}, {states.num_evicted} evicted")
    assert compared + aborted == 2000 and min(aborted, scheduler.num_preemptions) > 100
    assert states.num_evicted > 100
