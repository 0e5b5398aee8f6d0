"""Number of recomputed tokens when the pages do not fit all sequences. No jax."""

from __future__ import annotations

import random

import pytest
from ed_esurge.core.pages import PageGroup
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits
from ed_esurge.sampling import SamplingParams

BOUND = 1.2  # computed tokens for each useful token


def simulate(limits, groups, size, requests, *, caching):
    """Return the numbers of computed tokens, useful tokens and steps."""
    scheduler = Scheduler(limits, num_pages=groups, page_size=size, prefix_caching=caching)
    for request in requests:
        scheduler.add(request)
    computed = steps = 0
    ends = {request.request_id: request.seed for request in requests}
    while (plan := scheduler.schedule()) is not None:
        computed += plan.total
        steps += 1
        sampled = {}
        for row in plan.rows:
            if row.samples:
                done = len(scheduler.requests[row.request_id].output) + 1 >= ends[row.request_id]
                sampled[row.request_id] = [0 if done else 3]
        scheduler.advance(plan, sampled)
    assert scheduler.idle
    return computed, sum(len(r.prompt) + len(r.output) - 1 for r in requests), steps


@pytest.mark.daily("32-16-*", "2048-None-shapes5-*-True")
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("lengths", ["short", "long", "unknown", "growing"])
@pytest.mark.parametrize(
    ("budget", "chunk", "shapes"),
    [
        (256, None, ()),
        (256, 16, ()),
        (32, None, ()),
        (32, 16, ()),
        (2048, None, ()),
        (2048, None, ((16, 8), (64, 32), (256, 32), (2048, 32))),
    ],
)
def test_computed_tokens_stay_within_waste_bound(budget, chunk, shapes, lengths, caching):
    rng = random.Random(0)
    size, context, seqs = 16, 512, 32
    requests = []
    for number in range(150):
        longest = 60 if lengths == "growing" else 384
        prompt = [rng.randrange(9, 999) for _ in range(rng.randint(16, longest))]
        most = {"growing": 400, "long": 128}.get(lengths, 32)
        end = rng.randint(most // 2, most)
        # `max_tokens` of a request can be far larger than its output.
        asked = context - len(prompt) if lengths in ("unknown", "growing") else end
        requests.append(
            Request(
                str(number),
                prompt,
                SamplingParams(),
                eos_token_ids=frozenset({0}),
                max_tokens=asked,
                arrival=number,
                seed=end,
            )
        )
    limits = StepLimits(seqs, budget, context, chunk, shapes=shapes)
    computed, useful, _ = simulate(
        limits, {"full": PageGroup(128)}, size, requests, caching=caching
    )
    assert computed <= BOUND * useful, f"{computed / useful:.2f} tokens computed for a useful one"


def test_fitting_sequences_run_concurrently_without_waste():
    """Fitting sequences run concurrently, and a group with a window reserves only usable pages."""
    groups = {"full": PageGroup(64), "window": PageGroup(64, window=16)}
    requests = [
        Request(str(i), [9] * 40, SamplingParams(), max_tokens=24, arrival=i, seed=24)
        for i in range(16)
    ]
    limits = StepLimits(16, 1024, 64)
    computed, useful, steps = simulate(limits, groups, 16, requests, caching=False)
    assert (computed, steps) == (useful, 24)
