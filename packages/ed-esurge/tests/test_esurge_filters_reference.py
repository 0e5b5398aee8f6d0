"""The samplers keep the tokens that the samplers of llama.cpp keep for the same logits.

llama.cpp is a library in another environment:

    python -m venv llama && llama/bin/pip install llama-cpp-python
    EASYDEL_LLAMA_CPP_PYTHON=llama/bin/python pytest -m "" packages/ed-esurge -k of_llama_cpp
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
from ed_esurge.repetition import RepetitionPenalty, Repetitions
from other_python import answer_of
from test_esurge_filters import VOCAB, mask, numpy_mirostat, some_logits, tokens_of

PYTHON = os.environ.get("EASYDEL_LLAMA_CPP_PYTHON")
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(PYTHON is None, reason="EASYDEL_LLAMA_CPP_PYTHON names no Python"),
]
#: Sampler of llama.cpp and its arguments -> the fields here.
FILTERS = [
    *(("typical", [p, 1], {"typical_p": p}) for p in (0.1, 0.5, 0.9, 0.99)),
    *(("top_n_sigma", [n], {"top_n_sigma": n}) for n in (0.5, 1.0, 2.0)),
    *(
        ("xtc", [1.0, t, 1, 7], {"xtc_probability": 1.0, "xtc_threshold": t})
        for t in (0.02, 0.05, 0.2)
    ),
    *(("top_k", [k], {"top_k": k}) for k in (1, 7, 40)),
    *(("top_p", [p, 1], {"top_p": p}) for p in (0.3, 0.9)),
    *(("min_p", [p, 1], {"min_p": p}) for p in (0.01, 0.2)),
]


def reference(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the results of llama.cpp."""
    return answer_of(PYTHON, "llama_samplers.py", cases, 120)


def test_filters_equal_the_samplers_of_llama_cpp() -> None:
    cases = [
        (some_logits(seed, spread), filter_) for seed in range(8) for spread in (1.0, 3.0)
        for filter_ in FILTERS
    ]  # fmt: skip
    results = reference(
        [
            {"sampler": name, "arguments": arguments, "logits": logits.tolist()}
            for logits, (name, arguments, _) in cases
        ]
    )
    for (logits, (name, arguments, fields)), theirs in zip(cases, results, strict=True):
        # The sampler of sigma marks tokens instead of removing them.
        kept = {token for token in theirs["kept"] if theirs["logits"][str(token)] > -1e30}
        assert tokens_of(mask(logits, **fields)) == kept, (name, arguments)


def test_mirostat_equals_the_samplers_of_llama_cpp() -> None:
    """The first step, in which the limit is twice the target."""
    cases = [(seed, tau) for seed in range(8) for tau in (1.0, 2.0, 3.0, 5.0)]
    asked: list[dict[str, Any]] = []
    for seed, tau in cases:
        logits = some_logits(seed).tolist()
        first = {"sampler": "mirostat", "arguments": [VOCAB, 3, tau, 0.1, 100], "logits": logits}
        asked += [first, {**first, "sampler": "mirostat_v2", "arguments": [3, tau, 0.1]}]
    results = iter(reference(asked))
    for seed, tau in cases:
        logits = some_logits(seed).astype(np.float64)
        for version in (1, 2):
            kept = set(next(results)["kept"])
            assert numpy_mirostat(logits, 2 * tau, version) == kept, (seed, tau, version)


def test_dry_penalties_equal_the_samplers_of_llama_cpp() -> None:
    draw = np.random.default_rng(1)
    cases = []
    for _ in range(100):
        tokens = draw.integers(0, 4, draw.integers(1, 60)).tolist()
        cases.append((tokens, int(draw.integers(1, 4)), 4096 if draw.random() < 0.5 else 12))
    results = reference(
        [
            {
                "sampler": "dry",
                "arguments": [0.8, 1.75, allowed, last],
                "logits": [0.0] * 5,
                "accepted": tokens,
            }
            for tokens, allowed, last in cases
        ]
    )
    for (tokens, allowed, last), theirs in zip(cases, results, strict=True):
        penalty = RepetitionPenalty(0.8, 1.75, allowed, last, frozenset())
        found = Repetitions(penalty, tokens).penalties()
        ours = dict(zip(*(values.tolist() for values in found), strict=True))
        known = {int(token): -value for token, value in theirs["logits"].items() if value}
        assert ours == pytest.approx(known, rel=1e-5), (tokens, allowed, last)
