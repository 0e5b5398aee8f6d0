"""Quantized pages: more pages in the same memory, and nearly equal log-probabilities."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_esurge.engine.setup import page_bytes

# Largest difference of a token's log-probability from the unquantized engine's, relative to the
# largest log-probability.
BOUNDS = {"int8": 0.02, "fp8": 0.08}


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", ["int8", pytest.param("fp8", marks=pytest.mark.nightly)])
def test_quantized_pages_use_less_memory_within_error_bound(
    make_llama, surge, prompts, dtype, record_property
):
    model = make_llama(kv_cache_quantization_config={"dtype": dtype})
    plain_bytes, bytes_of_page = (page_bytes(m, 8) for m in (make_llama(), model))
    size = model.config.head_dim
    assert bytes_of_page == plain_bytes * (size + 4) // (4 * size), "a byte each, and a scale"

    engine = eSurge(
        model,
        max_num_seqs=4,
        page_size=8,
        max_num_batched_tokens=16,
        max_num_seq_buckets=(4,),
        max_model_len=128,
        silent_mode=True,
    )
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    ours, other = (
        np.asarray(
            [next(iter(p.values())).logprob for o in outputs for p in (o.prompt_logprobs or ())[1:]]
        )
        for outputs in (engine.generate(prompts, params), surge.generate(prompts, params))
    )
    worst = np.abs(ours - other).max() / np.abs(other).max()
    assert 1e-5 < worst <= BOUNDS[dtype]
    assert (
        engine.loop.runner.memory.cache_bytes()
        == bytes_of_page * engine.loop.runner.num_pages["full"]
    )
    record_property(
        "summary",
        f"engine with pages in {dtype}: log-probabilities off by {worst:.1e} (<= {BOUNDS[dtype]}), "
        f"{np.round(plain_bytes / bytes_of_page, 2)} times the pages",
    )
