"""Requests that run together, for the tests of images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ed_esurge import SamplingParams, eSurge

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


def answers(engine: eSurge, cases: Sequence[tuple[list[int], Any, Any]]) -> list[list[int]]:
    """Return the tokens of requests that run together.

    Args:
        cases: token ids, arrays, and encoder inputs of each request.
    """
    for name, (ids, _, items) in enumerate(cases):
        engine.add_request(str(name), ids, GREEDY, encoder_inputs=items)
    tokens: dict[str, list[int]] = {}
    while engine.has_unfinished_requests:
        for out in engine.step():
            assert out.error is None
            tokens.setdefault(out.request_id, []).extend(out.outputs[0].token_ids)
    return [tokens[str(name)] for name in range(len(cases))]


def engine_of(model: Any, **options: Any) -> eSurge:
    """Return an engine whose chunks split the images, and whose pages do not hold all requests."""
    given: dict[str, Any] = {
        "max_num_seqs": 3,
        "max_num_seq_buckets": (3,),
        "page_size": 8,
        "num_pages": 14,
        "max_num_batched_tokens": 24,
        "max_model_len": 80,
        "compile_runner": False,
        "silent_mode": True,
    }
    return eSurge(model, **{**given, **options})
