"""Steps that start before the tokens of the last step are read do not change the output."""

from __future__ import annotations

from collections import Counter

import pytest
from ed_esurge import SamplingParams, StructuredOutputs, eSurge
from ed_esurge.core.plan import UNREAD, StepPlan
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits, plan_ahead

FREE = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GUIDED = SamplingParams(
    temperature=0.0, max_tokens=10, structured_outputs=StructuredOutputs(regex="[ab]{6}")
)


@pytest.fixture(scope="module")
def surge(llama, tokenizer, surge):
    """An engine with one decode step in a program."""
    return eSurge(
        llama, tokenizer, surge.config.replace(compile_runner=False, num_scheduler_steps=1)
    )


@pytest.fixture(scope="module")
def waiting(llama, tokenizer, surge):
    """An engine like `surge` that reads the tokens of a step before it starts the next step."""
    config = surge.config.replace(async_scheduling=False)
    return eSurge(llama, tokenizer, config)


@pytest.fixture
def started(surge, monkeypatch):
    """Numbers of steps of `surge` that started ahead, and of other steps."""
    counts: Counter[bool] = Counter()
    run = surge.loop.runner.run

    def counted(plan):
        counts[plan.ahead] += 1
        return run(plan)

    monkeypatch.setattr(surge.loop.runner, "run", counted)
    return counts


def mixture(whole) -> list[SamplingParams]:
    """Return requests of every kind. The ends of some depend on the sampled tokens.

    Args:
        whole: output of the first prompt.
    """
    token = next(t for i, t in enumerate(whole.token_ids) if i > 3 and t not in whole.token_ids[:i])
    drawn = FREE.replace(temperature=1.0, seed=5, top_p=0.9)
    return [
        FREE.replace(stop_token_ids=(token,)),
        drawn.replace(logprobs=2),
        FREE.replace(stop=whole.text[4:6] or "e", max_tokens=20),
        drawn.replace(n=2, max_tokens=9),
        FREE.replace(repetition_penalty=1.3, max_tokens=7),
        GUIDED,
        FREE.replace(min_tokens=3, stop_token_ids=(token,)),
        drawn.replace(prompt_logprobs=1, max_tokens=30),
    ]


def told(outputs) -> list:
    """Return the outputs without times."""
    return [
        (one.token_ids, one.text, one.finish_reason, one.stop_reason)
        for out in outputs
        for one in out.outputs
    ]


@pytest.mark.nightly
def test_steps_started_ahead_produce_the_same_answers(surge, waiting, prompts, started):
    params = mixture(waiting.generate(prompts[0], FREE)[0].outputs[0])
    expected = told(waiting.generate(prompts, params))
    assert told(surge.generate(prompts, params)) == expected
    assert {reason for _, _, reason, _ in expected} == {"stop", "length"}
    assert started[True] > 5
    assert surge.stats()["kv_cache_usage"] == 0
    # Nearly all steps of a single request start ahead.
    for prompt, one in zip(prompts, params, strict=True):
        assert told(surge.generate(prompt, one)) == told(waiting.generate(prompt, one))


@pytest.mark.nightly
def test_unexpected_end_of_a_request_wastes_one_row(surge, prompts, started):
    whole = surge.generate(prompts[4], FREE)[0].outputs[0].token_ids
    steps = sum(started.values())
    index = next(i for i, t in enumerate(whole) if i > 0 and t not in whole[:i])
    ended = surge.generate(prompts[4], FREE.replace(stop_token_ids=(whole[index],)))[0]
    assert ended.outputs[0].token_ids == whole[: index + 1]
    assert sum(started.values()) - steps <= index + 2
    # The length is known in advance: no row is wasted.
    started.clear()
    surge.generate(prompts[4], FREE)
    assert sum(started.values()) == 12 + surge.loop.in_flight
    assert started[True] > started[False]


@pytest.mark.nightly
def test_no_step_starts_while_a_prompt_is_computed(surge):
    surge.add_request("a", [*range(90, 80, -1)], FREE)
    surge.step()
    assert not surge.loop.in_flight
    surge.step()
    assert surge.loop.in_flight
    while surge.has_unfinished_requests:
        surge.step()


@pytest.mark.nightly
def test_pages_filled_by_steps_ahead_are_shared(surge, waiting):
    cached = []
    for engine in (waiting, surge):
        first = engine.generate([*range(50, 90)], FREE.replace(max_tokens=30))[0]
        again = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
        cached.append(engine.generate(again, FREE)[0].metrics.num_cached_tokens)
    assert cached == [64, 64]


@pytest.mark.nightly
def test_aborted_request_discards_steps_in_flight(surge, waiting, prompts):
    surge.add_request("a", prompts[0], FREE.replace(max_tokens=100))
    surge.add_request("b", prompts[4], FREE)
    outputs = surge.step() + surge.step()
    assert surge.loop.in_flight
    surge.abort_request("a")
    surge.add_request("a", prompts[5], FREE)  # the id can be reused
    while surge.has_unfinished_requests:
        outputs += surge.step()
    ended = next(i for i, out in enumerate(outputs) if out.finished and out.request_id == "a")
    later = {"b": outputs, "a": outputs[ended + 1 :]}
    for name, prompt in (("b", prompts[4]), ("a", prompts[5])):
        tokens = [t for o in later[name] if o.request_id == name for t in o.outputs[0].token_ids]
        assert tokens == waiting.generate(prompt, FREE)[0].outputs[0].token_ids
    assert surge.stats()["kv_cache_usage"] == 0


def scheduler_with(*requests: Request) -> Scheduler:
    scheduler = Scheduler(StepLimits(4, 64, 128), num_pages=32, page_size=8)
    for one in requests:
        scheduler.add(one)
    return scheduler


def planned(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def request(number: int, length: int, params: SamplingParams = FREE, max_tokens: int = 9):
    return Request(str(number), [5] * length, params, max_tokens=max_tokens, arrival=number)


def test_plan_ahead_has_one_token_per_sequence():
    scheduler = scheduler_with(request(0, 3), request(1, 11), request(2, 3, max_tokens=1))
    plan = planned(scheduler)
    ahead = plan_ahead(plan, scheduler)
    assert ahead is not None
    rows = [(row.request_id, row.start, row.token_ids, row.samples) for row in ahead.rows]
    assert rows == [("0", 3, UNREAD, 1), ("1", 11, UNREAD, 1)]
    scheduler.advance(plan, {"0": [1], "1": [1], "2": [1]})
    assert [(r.request_id, r.num_computed) for r in scheduler.running] == [("0", 3), ("1", 11)]


@pytest.mark.parametrize(
    "other",
    [
        request(1, 80),  # its prompt is incomplete
        request(1, 3, FREE.replace(repetition_penalty=2.0)),
        request(1, 3, GUIDED),
    ],
)
def test_plan_ahead_returns_none_if_the_scheduler_is_needed(other):
    scheduler = scheduler_with(request(0, 3), other)
    assert plan_ahead(planned(scheduler), scheduler) is None


def test_step_ahead_allocates_a_page_and_fills_a_page_that_is_then_cached():
    scheduler = scheduler_with(request(0, 8), request(1, 7))
    plan = planned(scheduler)
    ahead = plan_ahead(plan, scheduler)
    assert ahead is not None
    assert [len(row.pages.get("full", ())) for row in ahead.rows] == [1, 0]
    assert [len(one.page_keys) for one in scheduler.running] == [1, 0]
    for step in (plan, ahead):
        scheduler.advance(step, {"0": [1], "1": [1]})
    assert [len(one.page_keys) for one in scheduler.running] == [1, 1]


def test_plan_ahead_returns_none_without_a_free_page():
    scheduler = scheduler_with(request(0, 8))
    plan = planned(scheduler)
    pool = scheduler.pages.pools["full"]
    pool.allocate(pool.num_free)
    assert plan_ahead(plan, scheduler) is None


def test_plan_ahead_returns_none_while_requests_wait():
    scheduler = scheduler_with(request(0, 3))
    plan = planned(scheduler)
    scheduler.add(request(1, 3))
    assert plan_ahead(plan, scheduler) is None
