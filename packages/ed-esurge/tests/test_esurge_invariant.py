"""`batch_invariant`: tokens and log-probabilities are bitwise equal in any batch."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from ed_esurge import LoggedRequest, SamplingParams, eSurge
from ed_esurge.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from ed_infra.errors import ConfigError

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


def test_logged_request_keeps_every_bit():
    params = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=2, logprobs=0)
    logprobs = [{5: Logprob(-0.1234567890123456, 1)}, {6: Logprob(-1 / 3, 1)}]
    done = CompletionOutput(0, token_ids=[5, 6], logprobs=logprobs, finish_reason="length")
    output = RequestOutput("a", [1, 2], [done], True, RequestMetrics(0.0), seed=9)
    logged = LoggedRequest.from_json(LoggedRequest.of(output, params).to_json())
    assert logged == LoggedRequest.of(output, params)
    assert logged.equals(output)
    logprobs[1][6] = Logprob(np.nextafter(-1 / 3, 0), 1)
    assert not logged.equals(output)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"sampling_params": {"no": 1}}), "[" * 9999]
)
def test_damaged_log_is_refused(text):
    with pytest.raises(ConfigError):
        LoggedRequest.from_json(text)


REPLAY = """
import sys
from ed_esurge import LoggedRequest, eSurge
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

fields = tiny_llama(vocab_size=300)
del fields["model_type"]
config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
model = LlamaForCausalLM.create(config, seed=3)
options = dict(max_num_seqs=4, page_size=8, max_model_len=64, silent_mode=True)
engine = eSurge(model, batch_invariant=True, compile_runner=False, **options)
"""
RECORD = """
from ed_esurge import SamplingParams
params = SamplingParams(temperature=1.0, max_tokens=8, logprobs=0, ignore_eos=True)
for output in engine.generate([[*range(3, 3 + n)] for n in (4, 9, 17)], params):
    print(LoggedRequest.of(output, params).to_json())
"""
AGAIN = """
logged = [LoggedRequest.from_json(line) for line in sys.stdin]
print([one.equals(engine.replay(one)) for one in reversed(logged)])
"""


@pytest.mark.nightly
def test_another_process_replays_a_log_with_equal_bits():
    def run(code: str, given: str = "") -> str:
        command = [sys.executable, "-c", REPLAY + code]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    log = run(RECORD)
    assert len(log.splitlines()) == 3
    assert run(AGAIN, log).strip() == "[True, True, True]"
