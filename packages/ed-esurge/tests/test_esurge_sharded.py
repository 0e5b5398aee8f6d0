"""The engine on several devices produces the tokens of one device."""

from __future__ import annotations

import pytest
from ed_esurge import SamplingParams, eSurge

PARAMS = SamplingParams(
    temperature=0, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=0, logit_bias={9: 1.0}
)


@pytest.mark.parametrize(
    ("mesh", "stacked", "aot"),
    [
        ((1, 2, 1, 2, 1), True, True),
        pytest.param((1, 1, 1, 4, 1), False, True, marks=pytest.mark.nightly),
        pytest.param((1, 2, 1, 2, 1), False, False, marks=pytest.mark.nightly),
    ],
)
def test_sharded_engine_produces_tokens_of_one_device(
    make_llama, surge, prompts, mesh, stacked, aot, monkeypatch
):
    import jax
    from ed_esurge.engine import assembly as module

    if stacked:
        monkeypatch.setattr(module, "served_model", lambda model: model)
    engine = eSurge(
        make_llama(mesh=mesh),
        max_num_seqs=4,
        page_size=8,
        max_num_batched_tokens=16,
        max_num_seq_buckets=(4,),
        max_model_len=128,
        use_aot_forward=aot,
        silent_mode=True,
    )
    traces = engine.stats()["num_compiled"]
    expected = surge.generate(prompts, PARAMS)
    for _ in range(2):  # the second run has the output arrays of the first as inputs
        found = engine.generate(prompts, PARAMS)
        for ours, other in zip(found, expected, strict=True):
            a, b = ours.outputs[0], other.outputs[0]
            assert a.token_ids == b.token_ids
            assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-4)
            scores = zip(ours.prompt_logprobs[1:], other.prompt_logprobs[1:], strict=True)
            for mine, theirs in scores:
                token = next(iter(mine))
                assert mine[token].logprob == pytest.approx(theirs[token].logprob, abs=1e-5)
    assert engine.stats()["num_compiled"] == traces
    leaf = jax.tree.leaves(engine.loop.runner.memory.cache)[0]
    heads = {shard.data.shape[-3] for shard in leaf.addressable_shards}
    assert heads == {4 // mesh[3]}  # the pages of a head are on the device of its weights
