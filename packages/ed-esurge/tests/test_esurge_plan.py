"""A plan is complete: a runner in another process computes the same results from its bytes."""

from __future__ import annotations

import pickle
import struct
import subprocess
import sys
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from ed_esurge import PoolingParams, SamplingParams, eSurge
from ed_esurge.core.commands import Abort, Add, UpdateWeights

OPTIONS: dict[str, Any] = {
    "max_num_seqs": 4,
    "page_size": 8,
    "num_pages": 8,  # requests are preempted
    "max_num_seq_buckets": (4,),
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "compile_runner": False,
    "silent_mode": True,
}

# Program of the other process: reads plans and writes results, each after its length.
CHILD = """
import pickle, struct, sys
from ed_esurge.config import EngineConfig
from ed_esurge.engine.setup import Setup
from ed_esurge.model import served_model
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM

read, write = sys.stdin.buffer, sys.stdout.buffer
options = pickle.loads(read.read(struct.unpack("<I", read.read(4))[0]))
fields = tiny_llama(vocab_size=260, num_hidden_layers=2, initializer_range=0.2)
fields.pop("model_type")
config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
model = served_model(LlamaForCausalLM.create(config, seed=1))
runner = Setup.resolve(model, EngineConfig(**options)).runner()
while size := read.read(4):
    plan = pickle.loads(read.read(struct.unpack("<I", size)[0]))
    result = pickle.dumps(runner.run(plan))
    write.write(struct.pack("<I", len(result)) + result)
    write.flush()
"""


class RemoteRunner:
    """A runner in another process, connected by a pipe."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.num_traces = self.num_pending = 0
        self.sent: list[bytes] = []
        self.send(pickle.dumps(OPTIONS))

    def send(self, data: bytes) -> None:
        self.process.stdin.write(struct.pack("<I", len(data)) + data)
        self.process.stdin.flush()

    def run(self, plan):
        self.sent.append(pickle.dumps(plan))
        self.send(self.sent[-1])
        size = struct.unpack("<I", self.process.stdout.read(4))[0]
        return pickle.loads(self.process.stdout.read(size))

    def hold(self, params):
        """Return None: no request of these tests has a grammar."""


@pytest.fixture(scope="module")
def local(llama):
    return eSurge(llama, **OPTIONS)


@pytest.fixture
def plans(local, monkeypatch):
    """Plans of the local engine."""
    kept: list[Any] = []
    run = local.loop.runner.run
    monkeypatch.setattr(local.loop.runner, "run", lambda plan: kept.append(plan) or run(plan))
    return kept


@pytest.fixture
def remote():
    runner = RemoteRunner()
    yield runner
    runner.process.stdin.close()
    runner.process.stdout.close()
    runner.process.wait(timeout=60)


def requests_of(prompts):
    plain = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    return [
        *((prompt, plain.replace(max_tokens=24)) for prompt in prompts[:3]),
        (prompts[3], SamplingParams(temperature=1, seed=-3, max_tokens=8, top_k=20, logprobs=2)),
        (prompts[4], plain.replace(presence_penalty=1.0, logit_bias={9: 2.0})),
        (prompts[5], PoolingParams(pooling="mean")),
        (prompts[6], plain.replace(prompt_logprobs=1, min_tokens=2)),
        (prompts[7], SamplingParams(n=2, temperature=1, max_tokens=5)),
    ]


def serve(engine: eSurge, commands: list[Add]) -> dict[str, Any]:
    """Execute pickled commands, one before each of the first steps."""
    whole: dict[str, Any] = {}
    pending = list(commands)
    while pending or engine.has_unfinished_requests:
        if pending:
            engine.execute(pickle.loads(pickle.dumps(pending.pop(0))))
        for output in engine.step():
            if output.request_id in whole:
                whole[output.request_id].add(output)
            else:
                whole[output.request_id] = output
    return whole


@pytest.mark.nightly
def test_remote_runner_produces_the_same_output(llama, local, plans, prompts, remote):
    other = eSurge(llama, **OPTIONS)
    other.loop.runner = remote
    commands = [
        local.prepare(str(index), prompt, params)
        for index, (prompt, params) in enumerate(requests_of(prompts))
    ]
    ours, theirs = serve(local, commands), serve(other, commands)
    assert local.stats()["num_preemptions"] > 0
    assert set(ours) == set(theirs) == {str(index) for index in range(8)}
    for name, output in ours.items():
        for mine, far in zip(output.outputs, theirs[name].outputs, strict=True):
            assert (mine.token_ids, mine.finish_reason) == (far.token_ids, far.finish_reason)
            assert mine.logprobs == far.logprobs
        assert output.prompt_logprobs == theirs[name].prompt_logprobs
        if output.pooled is not None:
            np.testing.assert_array_equal(output.pooled, theirs[name].pooled)
    # Engines with the same commands make the same plans.
    assert [pickle.dumps(plan) for plan in plans] == remote.sent


def test_step_plan_contains_only_new_tokens_and_pages(local, plans):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    local.generate(list(range(3, 33)), params)
    prefill, decode = plans[:2], plans[2:]
    assert [len(plan.started) for plan in plans] == [1] + [0] * (len(plans) - 1)
    assert plans[0].started[0].token_ids == list(range(3, 33))
    rows = [plan.rows[0] for plan in plans]
    assert [len(row.token_ids) for row in rows] == [16, 14] + [1] * len(decode)
    assert [row.samples for row in rows] == [0] + [1] * (len(decode) + 1)
    assert [plan.steps for plan in prefill] == [1, 1]
    assert sum(plan.steps for plan in decode) == 19
    pages = [len(row.pages.get("full", ())) for row in rows]
    ends = [plan.rows[0].start + plan.steps for plan in decode]
    held = [-(-end // 8) for end in (30, *ends)]
    assert pages == [2, 2, *(later - earlier for earlier, later in pairwise(held))]


@pytest.mark.nightly
def test_engine_commands_survive_pickling(local, make_llama, prompts):
    import jax
    from flax import nnx

    engine = local
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    before = engine.generate(prompts[2], params)[0].outputs[0].token_ids
    state = nnx.state(make_llama(seed=2).to_layout("leaves"))
    command = pickle.loads(pickle.dumps(UpdateWeights(state)))
    assert jax.tree.structure(command.weights) == jax.tree.structure(state)
    engine.execute(command)
    after = engine.generate(prompts[2], params)[0].outputs[0].token_ids
    expected = make_llama(seed=2).generate(
        np.asarray([prompts[2]]), max_new_tokens=6, eos_token_id=[]
    )
    assert after == expected.sequences[0, len(prompts[2]) :].tolist() != before
    engine.execute(engine.prepare("x", prompts[0], params))
    engine.execute(pickle.loads(pickle.dumps(Abort("x"))))
    assert [output.outputs[0].finish_reason for output in engine.step()] == ["abort"]
