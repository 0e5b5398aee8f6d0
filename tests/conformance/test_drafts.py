"""Every family with recurrent states: drafted tokens do not change a bit of the answers.

Random requests with common beginnings run together, with fewer pages and places than they need. The
answers equal those of an engine without drafts that computes each request alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from ed_esurge import RequestOutput, SamplingParams, eSurge
from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request
from ed_esurge.engine import setup
from ed_esurge.model import is_recurrent
from ed_esurge.runner.drafts import create_proposer

from tests.conformance.bits import create
from tests.conformance.test_saved_states import FAMILIES, OPTIONS, PAGE, has_equal_bits

#: Options of the requests, in turn.
FEATURES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.0, "frequency_penalty": 0.8, "presence_penalty": 0.3},
    {"temperature": 1.0, "repetition_penalty": 1.2, "logit_bias": {5: 2.0, 9: -5.0}},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(5, 40)), "min_tokens": 4},
    {"temperature": 0.0, "dry_multiplier": 1.0, "dry_allowed_length": 1},
    {"temperature": 0.8, "logprobs": 3, "logprobs_mode": "processed_logprobs"},
    {"temperature": 1.0, "top_n_sigma": 2.0},
)


class Oracle(Proposer):
    """Proposes the known answers, with a wrong token with a probability of a fifth."""

    def __init__(self, most: int, outputs: Sequence[RequestOutput]) -> None:
        super().__init__(most)
        self._rng = random.Random(0)
        self._answers = {
            (output.request_id, tuple(output.prompt_token_ids)): output.outputs[0].token_ids
            for output in outputs
        }

    def propose(self, request: Request, most: int) -> Sequence[int]:
        name = request.request_id.partition("#")[0]
        answer = self._answers[name, tuple(request.prompt)][len(request.output) :][:most]
        return [3 + token % 80 if self._rng.random() < 0.2 else token for token in answer]


def ask(engine: eSurge, seed: int, *, alone: bool = False) -> list[RequestOutput]:
    """Return the outputs of random requests: two turns of each of nine conversations.

    Args:
        engine: the engine.
        seed: seed of the requests.
        alone: whether each request runs alone and shares nothing.
    """
    rng = np.random.default_rng(seed)
    system = rng.integers(3, 90, 2 * PAGE + 3).tolist()
    prompts = [
        [*system, *np.tile(rng.integers(3, 90, 3), 2 + i % 3).tolist()]
        for i in range(len(FEATURES))
    ]
    outputs: list[RequestOutput] = []
    for turn in range(2):
        for i, prompt in enumerate(prompts):
            options = {"logprobs": 0, "max_tokens": 9 + i % 4, "ignore_eos": True, **FEATURES[i]}
            params = SamplingParams(seed=seed + i, detokenize=False, **options)
            salt = f"alone {turn} {i}" if alone else None
            engine.add_request(f"{turn} {i:02}", prompt, params, cache_salt=salt)
            if alone:
                outputs += finish(engine)
        if not alone:
            outputs += finish(engine)
        prompts = [
            [*output.prompt_token_ids, *output.outputs[0].token_ids, *prompt[-4:]]
            for output, prompt in zip(outputs[-len(prompts) :], prompts, strict=True)
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


def compare(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> float:
    """Check that the tokens are equal; return the largest difference of a log-probability."""
    worst = 0.0
    for output, other in zip(outputs, expected, strict=True):
        answer, right = output.outputs[0], other.outputs[0]
        assert answer.token_ids == right.token_ids, (output.request_id, output.prompt_token_ids)
        pairs = zip(answer.logprobs or (), right.logprobs or (), strict=True)
        for found, entries in pairs:
            assert found.keys() == entries.keys()
            worst = max(worst, *(abs(found[t].logprob - entries[t].logprob) for t in found))
    return worst


def start(model: Any, **more: Any) -> eSurge:
    """Return an engine with drafts."""
    sizes = {"max_num_seqs": 16, "max_num_seq_buckets": (16,), "num_pages": 40, "num_states": 8}
    config = {"num_speculative_tokens": 4, "prompt_lookup_min": 1}
    return eSurge(model, **{**OPTIONS, **sizes, "speculative_config": config, **more})


def use_small_states(patch: pytest.MonkeyPatch) -> None:
    """Save states at every page end."""
    patch.setattr(setup, "STATE_SPACING", PAGE)
    patch.setattr(setup, "STATE_INTERVAL", 2 * PAGE)


def create_proposers(expected: Sequence[RequestOutput]) -> dict[str, Proposer]:
    """Return a proposer of each kind without a model, and one of the expected answers."""
    suffix = SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=2.0)
    ngram = SpeculativeConfig(prompt_lookup_min=1)
    proposers = [create_proposer(ngram), create_proposer(suffix), Oracle(4, expected)]
    return dict(zip(("ngram", "suffix", "oracle"), proposers, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
def test_drafts_return_the_bits_of_plain_decoding(
    model_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    use_small_states(monkeypatch)
    exact = has_equal_bits(model_type)
    engine = start(create(model_type, "float32", batch_invariant=exact))
    scheduler = engine.loop.scheduler
    scheduler.proposer = None
    expected = ask(engine, 0, alone=True)
    lines: list[str] = []
    for kind, proposer in create_proposers(expected).items():
        engine.reset_prefix_cache()
        scheduler.proposer = proposer
        worst = compare(ask(engine, 0), expected)
        assert worst <= (0 if exact else 1e-5)
        assert kind != "oracle" or 20 < proposer.num_accepted_tokens < proposer.num_draft_tokens
        lines.append(f"{kind} {proposer.num_accepted_tokens} of {proposer.num_draft_tokens}")
    assert engine.stats()["prefix_cache_hits"] > 0
    record_property("summary", f"{model_type}: accepted {', '.join(lines)}")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["mamba2", "qwen3_next", "recurrent_gemma"])
def test_draft_model_drafts_for_layers_without_pages(
    model_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    """No attention, some attention, and attention in windows only."""
    use_small_states(monkeypatch)
    model = create(model_type, "float32")
    draft = create("llama", "float32", vocab_size=model.config.vocab_size)
    config = {"method": "draft_model", "num_speculative_tokens": 3, "adaptive_length": False}
    engine = start(model, draft_model=draft, speculative_config=config)
    scheduler = engine.loop.scheduler
    proposer, scheduler.proposer = scheduler.proposer, None
    assert proposer is not None
    expected = ask(engine, 0, alone=True)
    engine.reset_prefix_cache()
    scheduler.proposer = proposer
    assert compare(ask(engine, 0), expected) == 0
    assert proposer.num_draft_tokens > 20
    summary = f"accepted {proposer.num_accepted_tokens} of {proposer.num_draft_tokens}"
    record_property("summary", f"{model_type}: {summary}")


@pytest.mark.nightly
@pytest.mark.parametrize("model_type", ["llama", "qwen3_5_text", "qwen3_next"])
def test_mtp_layer_drafts_return_the_bits_of_plain_decoding(
    model_type: str, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    use_small_states(monkeypatch)
    exact = has_equal_bits(model_type)
    model = create(model_type, "float32", batch_invariant=exact, mtp_head="new")
    config = {"method": "mtp", "num_speculative_tokens": 3, "adaptive_length": False}
    states = {} if is_recurrent(model) else {"num_states": None}
    engine = start(model, speculative_config=config, **states)
    scheduler = engine.loop.scheduler
    proposer, scheduler.proposer = scheduler.proposer, None
    assert proposer is not None
    expected = ask(engine, 0, alone=True)
    engine.reset_prefix_cache()
    scheduler.proposer = proposer
    assert compare(ask(engine, 0), expected) <= (0 if exact else 1e-5)
    assert proposer.num_draft_tokens > 20
    summary = f"accepted {proposer.num_accepted_tokens} of {proposer.num_draft_tokens}"
    record_property("summary", f"{model_type}: {summary}")
