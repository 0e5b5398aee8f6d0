"""The engine returns the experts of each token, and the tokens from which it was sampled."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.config import Records
from ed_infra.errors import ConfigError
from ed_models.families.mixtral import MixtralConfig, MixtralForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from flax import nnx

FIELDS = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "num_experts_per_tok": 2,
}
OPTIONS = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "page_size": 4,
    "num_pages": 16,
    "max_model_len": 64,
    "silent_mode": True,
    "compile_runner": False,
    "records": Records(experts=True),
}


def mixtral(**more):
    config = MixtralConfig(**FIELDS, num_local_experts=8, **more)
    return MixtralForCausalLM.create(config, seed=1)


def qwen(**more):
    """Layer 1 of three is dense."""
    fields = {**FIELDS, "num_experts": 8, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
    return Qwen3MoeForCausalLM.create(Qwen3MoeConfig(**fields, **more), seed=1)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("make", "more"),
    [
        pytest.param(mixtral, {}, id="mixtral"),
        pytest.param(qwen, {}, id="a_dense_layer"),
        pytest.param(mixtral, {"batch_invariant": True}, id="batch_invariant"),
        pytest.param(mixtral, {"sharding_axis_dims": (1, 1, 4, 2, 1)}, id="sharded"),
        pytest.param(mixtral, {"sharding_axis_dims": (2, 1, 1, 1, 1)}, id="replicas"),
    ],
)
def test_returned_experts_are_those_of_a_forward_pass(make, more):
    """Prompts are computed in chunks, and sequences preempt each other."""
    model = make(**more)
    engine = eSurge(model, **OPTIONS)
    rng = np.random.default_rng(2)
    prompts = [rng.integers(3, 250, n).tolist() for n in (1, 30, 7, 18, 30)]
    params = [
        SamplingParams(temperature=n % 2, seed=n, max_tokens=20 + n, ignore_eos=True)
        for n in range(len(prompts))
    ]
    outputs = engine.generate([*prompts, prompts[1]], [*params, params[1]])
    if "sharding_axis_dims" not in more:
        assert engine.stats()["num_preemptions"] > 0
    graphdef, state = nnx.split(make())

    @jax.jit
    def run(ids, mask):
        out = nnx.merge(graphdef, state)(
            ids, attention_mask=mask, logits_at="none", output_routed_experts=True
        )
        return out.routed_experts

    for output in outputs:
        (completion,) = output.outputs
        tokens = [*output.prompt_token_ids, *completion.token_ids]
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(tokens)] = tokens
        expected = np.asarray(run(padded, (np.arange(64) < len(tokens))[None].astype(np.int32)))
        found = completion.routed_experts
        assert found.dtype == np.int16
        np.testing.assert_array_equal(found, expected[0, : len(tokens) - 1])
    dense = [n for n in range(3) if found[:, n].max() < 0]
    assert dense == ([1] if make is qwen else [])


@pytest.mark.nightly
def test_engine_that_cannot_return_experts_names_the_reason(llama):
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no experts"):
        eSurge(llama, **OPTIONS)
    with pytest.raises(ConfigError, match="kv_offloading_size is not possible"):
        eSurge(mixtral(), kv_offloading_size=1, **OPTIONS)


@pytest.mark.nightly
def test_masks_contain_the_tokens_that_the_filters_keep(llama):
    engine = eSurge(llama, **{**OPTIONS, "records": Records(masks=True)})
    more = {"ignore_eos": True, "max_tokens": 12, "logprobs": 20}
    params = [
        SamplingParams(seed=1, top_k=4, **more),
        SamplingParams(seed=2, top_p=0.3, **more),
        SamplingParams(seed=3, min_p=0.2, logprobs_mode="processed_logprobs", **more),
        SamplingParams(seed=4, allowed_token_ids=[5, 9, 40], top_k=2, **more),
        SamplingParams(seed=5, **more),
        SamplingParams(temperature=0, **more),
    ]
    prompts = [[*range(3 + n, 20 + n)] for n in range(len(params))]
    outputs = [output.outputs[0] for output in engine.generate(prompts, params)]
    for one in outputs:
        assert len(one.sampling_masks) == len(one.token_ids) == 12
        for token, mask in zip(one.token_ids, one.sampling_masks, strict=True):
            assert token in mask and (np.diff(mask) > 0).all()
    top_k, top_p, min_p, allowed, free, greedy = outputs

    def ranked(scores, least):
        """The tokens that are at least as probable, relative to the most probable token."""
        best = max(score.logprob for score in scores.values())
        return {t for t, score in scores.items() if score.logprob >= best + least}

    for mask, scores in zip(top_k.sampling_masks, top_k.logprobs, strict=True):
        best = sorted(scores, key=lambda token: -scores[token].logprob)[:4]
        assert sorted(best) == mask.tolist()
    for mask, scores in zip(top_p.sampling_masks, top_p.logprobs, strict=True):
        order = sorted(scores.values(), key=lambda score: -score.logprob)
        before = np.cumsum([np.exp(score.logprob) for score in order])
        assert len(mask) == 1 + np.searchsorted(before, 0.3)
    for mask, scores in zip(min_p.sampling_masks, min_p.logprobs, strict=True):
        kept = ranked(scores, np.log(0.2) - 1e-6)
        assert kept == set(mask.tolist()) or len(mask) > 20
    assert all(len(mask) == 2 and {*mask} < {5, 9, 40} for mask in allowed.sampling_masks)
    assert all(len(mask) == engine.vocab_size for mask in free.sampling_masks)
    assert all(len(mask) == engine.vocab_size for mask in greedy.sampling_masks)
