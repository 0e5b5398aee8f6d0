"""The engine with 64 concurrent prompts, for six families with different caches and for options.

Greedy tokens equal those of `generate` and of torch; log-probabilities equal torch's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_esurge import RequestOutput, SamplingParams, eSurge
from ed_models.conformance import Subject

from tests.conformance import cases

#: Full attention; experts; a window; latents; a state; a state in addition to attention.
FAMILIES = ("llama", "mixtral", "gemma3_text", "deepseek_v3", "mamba", "jamba")
NEW = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, logprobs=0)
BASE = {
    "max_num_seqs": 8,
    "max_num_seq_buckets": (8,),
    "max_num_batched_tokens": 24,
    "min_input_pad": 24,
    "page_size": 4,
    "max_model_len": 40,
    "compile_runner": False,
    "silent_mode": True,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "chunks": {"long_prefill_token_threshold": 7, "enable_prefix_caching": False},
    "preempted": {"num_pages": 26, "overlap_execution": True},
    "speculated": {
        "overlap_execution": True,
        "speculative_config": {"num_speculative_tokens": 3, "prompt_lookup_min": 1},
    },
    "offloaded": {"num_pages": 26, "kv_offloading_size": 2.0**-6},
    "invariant": {"batch_invariant": True},
}
RECURRENT = ("mamba", "jamba")
NOT_RECURRENT = ("offloaded", "invariant")


def subjects() -> list[Any]:
    first: dict[str, Subject] = {}
    for subject in cases.subjects(*FAMILIES):
        first.setdefault(subject.model_type, subject)
    assert len(first) == len(FAMILIES), f"only {list(first)} are there"
    return [pytest.param(subject, id=name) for name, subject in first.items()]


def compare(subject: Subject, outputs: list[RequestOutput]) -> float:
    """The largest difference of a log-probability from torch's; every token is its best one."""
    torch, worst = pytest.importorskip("torch"), 0.0
    for output in outputs:
        done = output.outputs[0]
        ids = torch.tensor([[*output.prompt_token_ids, *done.token_ids]])
        with torch.no_grad():
            logits = subject.torch_model(ids).logits[0, -NEW - 1 : -1].double()
        assert logits.argmax(-1).tolist() == done.token_ids
        lines = torch.log_softmax(logits, -1).numpy()
        for line, token, entries in zip(lines, done.token_ids, done.logprobs or (), strict=True):
            worst = max(worst, abs(line[token] - entries[token].logprob))
    return worst


@pytest.mark.nightly
@pytest.mark.torch
@pytest.mark.parametrize("subject", subjects())
def test_serving_options_produce_same_tokens_for_64_prompts(
    subject: Subject, record_property: Any
) -> None:
    rng = np.random.default_rng(11)
    vocab = subject.fields["vocab_size"]
    common = rng.integers(3, vocab, 9).tolist()
    prompts = [rng.integers(3, vocab, int(n)).tolist() for n in rng.integers(1, 22, 64)]
    prompts = [common + p if i % 4 == 0 else p for i, p in enumerate(prompts)]
    width = max(map(len, prompts))
    ids = np.asarray([[0] * (width - len(p)) + p for p in prompts], np.int32)
    mask = np.asarray([[0] * (width - len(p)) + [1] * len(p) for p in prompts], np.int32)
    alone = subject.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, eos_token_id=[])
    expected = alone.sequences[:, width:].tolist()
    worst = 0.0
    for name, options in OPTIONS.items():
        if subject.model_type in RECURRENT and name in NOT_RECURRENT:
            continue
        engine = eSurge(subject.model, **{**BASE, **options})
        for turn in range(2):  # the second time from the prefix cache, where there is one
            outputs = engine.generate(prompts, GREEDY)
            assert [out.outputs[0].token_ids for out in outputs] == expected, name
            worst = worst if turn else max(worst, compare(subject, outputs))
        stats = engine.stats()
        assert name != "preempted" or stats["num_preemptions"] or not engine.loop.runner.num_pages
        assert name != "offloaded" or stats["external_prefix_cache_hits"] > 0
        assert name != "speculated" or stats["spec_decode_num_drafts"] > 0
        engine.terminate()
    assert worst < 1e-4
    record_property("summary", f"{subject.model_type}: log-probabilities within {worst:.1e}")
