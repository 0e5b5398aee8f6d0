"""`batch_invariant`: tokens and log-probabilities are bitwise equal in any batch."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge

OPTIONS = {
    "max_num_seqs": 8,
    "page_size": 8,
    "max_model_len": 64,
    "batch_invariant": True,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def requests():
    """Twenty-four prompts of different lengths, greedy and sampled, some with a common prefix."""
    rng = np.random.default_rng(5)
    common = rng.integers(3, 250, 20).tolist()
    prompts = [rng.integers(3, 250, size=1 + 3 * (i % 12)).tolist() for i in range(24)]
    prompts = [common + prompt if i % 3 == 0 else prompt for i, prompt in enumerate(prompts)]
    params = [
        SamplingParams(
            temperature=i % 2, seed=i, top_p=0.9, max_tokens=12, logprobs=2, ignore_eos=True
        )
        for i in range(24)
    ]
    return prompts, params


def bits(outputs) -> list[tuple]:
    """Return the exact tokens and log-probabilities."""
    return [
        (
            tuple(out.outputs[0].token_ids),
            tuple(
                (token, entry.logprob, entry.rank)
                for position in out.outputs[0].logprobs
                for token, entry in position.items()
            ),
        )
        for out in outputs
    ]


@pytest.fixture(scope="module")
def alone(llama, requests):
    """Outputs of each request alone, without cached prefixes."""
    engine = eSurge(llama, **OPTIONS, enable_prefix_caching=False)
    return [engine.generate([p], s)[0] for p, s in zip(*requests, strict=True)]


@pytest.mark.nightly
@pytest.mark.proves("batch_invariant")
@pytest.mark.parametrize(
    "changes",
    [
        {},  # one batch of all requests, with shared prefixes
        {"long_prefill_token_threshold": 3},  # chunks of other sizes
        {"num_pages": 8, "enable_prefix_caching": False},  # preempted
        {"speculative_config": {"num_speculative_tokens": 3}, "overlap_execution": True},
    ],
    ids=["crowd", "chunks", "preempted", "speculated"],
)
def test_invariant_outputs_are_bitwise_equal(llama, requests, alone, oracle, changes):
    engine = eSurge(llama, **OPTIONS, **changes)
    scheduler = engine.loop.scheduler
    assert len(engine.loop.runner.buckets.shapes) == 1
    if scheduler.proposer is not None:
        scheduler.proposer = oracle(3, alone)
    for _ in range(2):  # the second run uses the prefix cache
        assert bits(engine.generate(*requests)) == bits(alone)
    if "num_pages" in changes:
        assert scheduler.num_preemptions > 0
    if scheduler.proposer is not None:
        assert scheduler.proposer.num_accepted_tokens > 0


@pytest.mark.nightly
def test_replay_reproduces_a_recorded_request(llama, requests):
    """The engine derives the seed of the request from its order of arrival."""
    engine = eSurge(llama, **OPTIONS)
    params = SamplingParams(temperature=1.0, n=2, max_tokens=8, logprobs=1, ignore_eos=True)
    recorded = engine.generate(requests[0][:6], params)
    assert len({output.seed for output in recorded}) == 6
    again = [engine.replay(output, params) for output in reversed(recorded)]
    assert bits(reversed(again)) == bits(recorded)
    assert [o.outputs[1].token_ids for o in reversed(again)] == [
        o.outputs[1].token_ids for o in recorded
    ]
