"""An error of one request ends only that request; only failures of the device end the engine."""

from __future__ import annotations

import asyncio

import jax
import jax.numpy as jnp
import pytest
from ed_esurge import AsyncEngine, PoolingParams, SamplingParams, eSurge
from ed_esurge.runner.slots import Adjustment
from ed_esurge.tokenizer import Detokenizer
from ed_infra.errors import ConfigError, EasyDeLError
from flax import nnx
from pydantic import ValidationError

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**31},
        {"stop_token_ids": [2**40]},
        {"seed": 2**64},
        {"repetition_penalty": float("inf")},
        {"repetition_penalty": 1e-46},
        {"max_tokens": 2**31},
        {"n": 10**9},
        {"bad_words": ["x" * 100_000]},
        {"stop": ["x"] * 100_000},
    ],
)
def test_sampling_params_reject_out_of_range_values(options):
    with pytest.raises(ValidationError):
        SamplingParams(**options)


@pytest.mark.parametrize("options", [{"priority": 2**31}, {"priority": 0.5}, {"cache_salt": 3}])
def test_invalid_request_options_raise_config_error(surge, options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        surge.add_request("x", [5], GREEDY, **options)
    assert not surge.has_unfinished_requests


@pytest.mark.nightly
def test_end_tokens_outside_the_vocabulary_are_ignored(make_llama, prompts):
    model = make_llama(eos_token_id=999)
    engine = eSurge(model, max_model_len=64, page_size=8, compile_runner=False, silent_mode=True)
    output = engine.generate(prompts[1], SamplingParams(max_tokens=4, min_tokens=2))[0]
    assert len(output.outputs[0].token_ids) == 4


def breaks(monkeypatch, owner, name, when):
    """Make a method raise an exception for some arguments."""
    real = getattr(owner, name)

    def method(self, *args):
        if when(self, *args):
            raise ZeroDivisionError("broken")
        return real(self, *args)

    monkeypatch.setattr(owner, name, method)


@pytest.mark.parametrize("part", ["text", "logits"])
def test_exception_of_one_request_does_not_affect_others(surge, prompts, monkeypatch, part):
    alone = surge.generate(prompts[1], GREEDY)[0].outputs[0].token_ids
    victim = GREEDY.replace(max_tokens=11, logit_bias={7: 0.5})
    if part == "text":
        breaks(monkeypatch, Detokenizer, "push", lambda self, token: self.marked)
        real = Detokenizer.__init__

        def init(self, tokenizer, prompt, **options):
            real(self, tokenizer, prompt, **options)
            self.marked = len(prompt) == len(prompts[2])

        monkeypatch.setattr(Detokenizer, "__init__", init)
    else:
        breaks(monkeypatch, Adjustment, "update", lambda self: len(self._tokens) > 19)
    engine = AsyncEngine(surge)
    engine.start()

    async def one(prompt, params, name):
        return [delta async for delta in engine.generate(prompt, params, name)]

    async def both():
        jobs = one(prompts[1], GREEDY, "a"), one(prompts[2], victim, "b")
        return await asyncio.gather(*jobs, return_exceptions=True)

    try:
        fine, broken = asyncio.run(both())
        assert engine.is_healthy
    finally:
        engine.shutdown()
    assert [token for delta in fine for token in delta.outputs[0].token_ids] == alone
    assert broken[-1].outputs[0].finish_reason == "error"
    assert "broken" in broken[-1].error
    assert surge.stats()["kv_cache_usage"] == 0
    monkeypatch.undo()
    assert surge.generate(prompts[1], GREEDY)[0].outputs[0].token_ids == alone


def with_nan(model, name):
    """Return the state of the model with NaN in one weight."""
    state = nnx.state(model)
    hit = [path for path, _ in nnx.to_flat_state(state) if name in path]
    flat = dict(nnx.to_flat_state(state))
    leaf = flat[hit[0]]
    flat[hit[0]] = leaf.replace(jnp.asarray(leaf[...]).at[..., 0].set(jnp.nan))
    return nnx.from_flat_state(flat)


def test_weights_with_nan_fail_every_request(surge, llama, prompts):
    model = surge.loop.runner.model
    before = surge.generate(prompts[2], GREEDY)[0].outputs[0].token_ids
    surge.update_model_weights(with_nan(llama.to_layout(model.layout), "norm"))
    try:
        with pytest.raises(EasyDeLError, match="not finite"):
            surge.generate(prompts[2], GREEDY)
        with pytest.raises(EasyDeLError, match="not finite"):
            surge.embed(prompts[2], PoolingParams())
    finally:
        surge.update_model_weights(llama)
    assert surge.generate(prompts[2], GREEDY)[0].outputs[0].token_ids == before
    assert surge.stats()["kv_cache_usage"] == 0


def test_request_with_non_finite_logits_fails_alone_and_its_pages_are_cleared(surge, prompts):
    """Its pages contain NaN, which a mask does not remove, because 0 * NaN is NaN."""
    expected = [out.outputs[0].token_ids for out in surge.generate(prompts, GREEDY)]
    runner = surge.loop.runner
    surge.add_request("bad", prompts[2], GREEDY.replace(max_tokens=40))
    surge.add_request("good", prompts[1], GREEDY)
    outputs = [*surge.step(), *surge.step()]
    page = surge.loop.scheduler.requests["bad#0"].pages["full"][0]

    def spoil(pool):
        axis = pool.shape.index(runner.num_pages["full"])
        return pool.at[(slice(None),) * axis + (page,)].set(jnp.nan)

    runner.memory.cache = jax.tree.map(spoil, runner.memory.cache)
    while surge.has_unfinished_requests:
        outputs += surge.step()
    last = {out.request_id: out for out in outputs if out.finished}
    assert last["bad"].outputs[0].finish_reason == "error"
    assert "not finite" in last["bad"].error
    good = [t for out in outputs if out.request_id == "good" for t in out.outputs[0].token_ids]
    assert good == expected[1]
    again = [out.outputs[0].token_ids for out in surge.generate(prompts, GREEDY)]
    assert again == expected
