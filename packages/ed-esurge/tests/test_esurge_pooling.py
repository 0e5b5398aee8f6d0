"""Requests without sampling (pooled vectors and scores), batched with requests that sample."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import jax
import numpy as np
import pytest
from ed_esurge import AsyncEngine, PoolingParams, SamplingParams, eSurge
from ed_infra.errors import ConfigError
from flax import nnx
from pydantic import ValidationError

SMALL = {
    "max_num_seqs": 4,
    "page_size": 8,
    "num_pages": 8,
    "max_num_seq_buckets": (4,),
    "max_num_batched_tokens": 16,
    "max_model_len": 64,
    "compile_runner": False,
    "silent_mode": True,
}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def plain(model, read):
    """Return the plain forward pass of up to 64 tokens, [s, x] in float64; compiled once."""
    graphdef, state = nnx.split(model)
    forward = jax.jit(lambda state, ids: read(nnx.merge(graphdef, state)(ids)))

    def of(tokens: list[int]) -> np.ndarray:
        ids = np.zeros((1, 64), np.int32)
        ids[0, : len(tokens)] = tokens  # padding on the right does not change causal values
        return np.asarray(forward(state, ids)[: len(tokens)], np.float64)

    return of


@pytest.fixture(scope="module")
def hidden(llama):
    """Function from a prompt to the last hidden states of the model, [s, d] in float64."""
    return plain(llama, lambda out: out.last_hidden_state[0])


def expected(states: np.ndarray, params: PoolingParams) -> np.ndarray:
    vector = states[-1] if params.pooling == "last" else states.mean(axis=0)
    return vector / np.linalg.norm(vector) if params.normalize else vector


@pytest.mark.daily("mean-False")
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooled_and_sampled_requests_share_chunked_batches(
    surge, prompts, hidden, pooling, normalize
):
    params = PoolingParams(pooling=pooling, normalize=normalize)
    tokens = [output.outputs[0].token_ids for output in surge.generate(prompts, GREEDY)]
    traces = surge.stats()["num_compiled"]
    for index, prompt in enumerate(prompts):  # of up to 40 tokens, in steps of 16
        surge.add_request(f"v{index}", prompt, params)
        surge.add_request(f"t{index}", prompt, GREEDY)
    vectors, texts = {}, {f"t{index}": [] for index in range(len(prompts))}
    while surge.has_unfinished_requests:
        for output in surge.step():
            name = output.request_id
            if name in texts:
                texts[name] += output.outputs[0].token_ids
                assert output.pooled is None
            else:
                assert name not in vectors
                vectors[name] = output.pooled
                assert output.finished
                assert (output.outputs[0].token_ids, output.outputs[0].finish_reason) == (
                    [],
                    "stop",
                )
    assert list(texts.values()) == tokens
    for index, prompt in enumerate(prompts):
        exact = expected(hidden(prompt), params)
        assert vectors[f"v{index}"].dtype == np.float32
        np.testing.assert_allclose(vectors[f"v{index}"], exact, atol=1e-5)
    assert surge.stats()["num_compiled"] == traces


def test_embed_returns_one_vector_per_prompt(surge, prompts, hidden, tokenizer):
    outputs = surge.embed(prompts)
    for prompt, output in zip(prompts, outputs, strict=True):
        np.testing.assert_allclose(
            output.pooled, expected(hidden(prompt), PoolingParams()), atol=1e-5
        )
    text = surge.embed("hello there", PoolingParams(pooling="mean"))[0]
    states = hidden(tokenizer("hello there")["input_ids"])
    np.testing.assert_allclose(
        text.pooled, expected(states, PoolingParams(pooling="mean")), atol=1e-5
    )
    # The last hidden state can be computed from cached pages. The mean requires all hidden states.
    again = [surge.embed(prompts[3], PoolingParams(pooling=p))[0] for p in ("last", "mean")]
    assert [output.metrics.num_cached_tokens for output in again] == [32, 0]
    with pytest.raises(ValidationError, match="last"):
        PoolingParams(pooling="max")


@pytest.mark.nightly
def test_preempted_pooling_request_produces_same_vector(llama, prompts, hidden):
    options = {**SMALL, "long_prefill_token_threshold": 8, "scheduling_policy": "priority"}
    engine = eSurge(llama, **options)
    mean = PoolingParams(pooling="mean")
    engine.add_request("vector", prompts[3] + prompts[4], mean, priority=1)
    engine.step()
    # A request of higher priority grows until no page is free.
    engine.add_request("first", prompts[3], GREEDY)
    vectors = {}
    while engine.has_unfinished_requests:
        for output in engine.step():
            if output.pooled is not None:
                vectors[output.request_id] = output
    assert vectors["vector"].metrics.num_preemptions > 0
    exact = expected(hidden(prompts[3] + prompts[4]), mean)
    np.testing.assert_allclose(vectors["vector"].pooled, exact, atol=1e-5)


def test_pooled_request_can_be_aborted(surge, prompts):
    surge.add_request("a", prompts[3], PoolingParams(pooling="mean"))
    surge.step()  # the first chunk
    assert surge.abort_request("a")
    output = surge.step()[0]
    assert (output.finished, output.pooled) == (True, None)
    assert output.outputs[0].finish_reason == "abort"
    assert not surge.has_unfinished_requests


def test_concurrent_embeddings_match_reference_vectors(surge, prompts, hidden):
    engine = AsyncEngine(surge)
    engine.start()

    async def gather():
        jobs = [
            engine.embed(prompt, PoolingParams(), f"e{index}")
            for index, prompt in enumerate(prompts)
        ]
        return await asyncio.gather(*jobs)

    try:
        for prompt, output in zip(prompts, asyncio.run(gather()), strict=True):
            exact = expected(hidden(prompt), PoolingParams())
            np.testing.assert_allclose(output.pooled, exact, atol=1e-5)
    finally:
        engine.shutdown()


def test_prompt_scoring_samples_no_tokens(surge, prompts):
    scoring = SamplingParams(max_tokens=0, prompt_logprobs=1)
    sampling = scoring.replace(max_tokens=1, temperature=0)
    steps = surge.stats()["num_steps"]
    for prompt in prompts:
        ours, theirs = surge.generate(prompt, scoring)[0], surge.generate(prompt, sampling)[0]
        assert ours.outputs[0].token_ids == []
        assert ours.outputs[0].finish_reason == "length"
        assert ours.prompt_logprobs == theirs.prompt_logprobs
    assert surge.stats()["num_steps"] > steps
    # The prompt fills the context: no room is reserved for a generated token.
    full = list(range(3, 131))
    assert surge.max_model_len == 128
    output = surge.generate(full, scoring)[0]
    assert output.prompt_token_ids == full
    assert len(output.prompt_logprobs) == 128
    with pytest.raises(ValidationError, match="needs prompt_logprobs"):
        SamplingParams(max_tokens=0)


@pytest.mark.nightly
def test_scores_use_the_head_of_the_model(make_llama, prompts):
    """A soft cap and a scale belong to the head, not to its matrix."""
    from ed_models.families.llama import LlamaForCausalLM

    class Capped(LlamaForCausalLM):
        def head(self):
            return replace(super().head(), soft_cap=2.0, scale=0.5)

    model = Capped.create(make_llama().config, seed=1)
    engine = eSurge(model, **SMALL)
    params = SamplingParams(temperature=0, max_tokens=3, logprobs=0, prompt_logprobs=0)
    output = engine.generate(prompts[2], params.replace(ignore_eos=True))[0]
    tokens = output.prompt_token_ids + output.outputs[0].token_ids
    logits = plain(model, lambda out: out.logits[0])(tokens)
    assert np.abs(logits).max() <= 2.0
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    scores = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
    for position, entry in enumerate(scores):
        token = tokens[position + 1]
        assert entry[token].logprob == pytest.approx(exact[position, token], abs=1e-5)


def test_request_with_an_unloaded_adapter_raises_error(surge):
    command = replace(surge.prepare("a", [5], GREEDY), adapter=3)
    with pytest.raises(ConfigError, match="number 3"):
        surge.execute(command)
    assert not surge.has_unfinished_requests
