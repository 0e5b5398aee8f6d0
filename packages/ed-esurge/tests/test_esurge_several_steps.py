"""Several decode steps in one program produce the outputs of single steps."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge import SamplingParams, StructuredOutputs, eSurge
from ed_esurge.core.plan import PlanRow, StepPlan
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits, plan_ahead
from ed_esurge.core.step_time import MOST_STEPS, ONE_STEP, StepTime
from ed_esurge.runner.result import StepResult

FREE = SamplingParams(temperature=0.0, max_tokens=23, ignore_eos=True)
DRAWN = FREE.replace(temperature=1.0, seed=5)
SIZES = {
    "max_num_seqs": 4,
    "page_size": 8,
    "max_num_batched_tokens": 16,
    "max_num_seq_buckets": (4,),
    "max_model_len": 128,
    "compile_runner": False,
    "silent_mode": True,
}


@pytest.fixture(scope="module")
def single(llama, tokenizer):
    return eSurge(llama, tokenizer, num_scheduler_steps=1, enable_prefix_caching=False, **SIZES)


@pytest.fixture(scope="module")
def several(llama, tokenizer):
    return eSurge(llama, tokenizer, enable_prefix_caching=False, **SIZES)


@pytest.fixture
def steps(several, monkeypatch):
    """Number of decode steps of each program of `several`."""
    counts: list[int] = []
    run = several.loop.runner.run
    monkeypatch.setattr(
        several.loop.runner, "run", lambda plan: counts.append(plan.steps) or run(plan)
    )
    return counts


def told(outputs) -> list:
    """Return the outputs without times."""
    return [
        (one.index, one.token_ids, one.text, one.finish_reason, one.stop_reason, one.logprobs)
        for out in outputs
        for one in out.outputs
    ]


def served(engine, commands: dict[int, tuple]) -> tuple[dict[str, list[int]], list[str]]:
    """Return the tokens of each request, and the ids in the order of their ends.

    Args:
        commands: number of a step -> the arguments of `add_request`, or a request id to abort.
    """
    tokens: dict[str, list[int]] = {}
    ended: list[str] = []
    for number in range(1000):
        for arguments in commands.get(number, ()):
            if isinstance(arguments, str):
                assert engine.abort_request(arguments)
            else:
                engine.add_request(*arguments)
        if number > max(commands) and not engine.has_unfinished_requests:
            break
        for out in engine.step():
            tokens.setdefault(out.request_id, [])
            for one in out.outputs:
                tokens[out.request_id] += one.token_ids
            ended += [out.request_id] * out.finished
    assert engine.stats()["kv_cache_usage"] == 0
    return tokens, ended


@pytest.mark.daily("params1")
@pytest.mark.parametrize(
    "params",
    [
        FREE.replace(logprobs=3),
        DRAWN.replace(logprobs=2, top_p=0.9, top_k=40),
        DRAWN.replace(n=3, max_tokens=11, min_p=0.02),
        DRAWN.replace(logprobs=2, top_p=0.8, logprobs_mode="processed_logprobs"),
    ],
)
def test_several_steps_sample_the_same_tokens(single, several, prompts, steps, params):
    assert told(several.generate(prompts, params)) == told(single.generate(prompts, params))
    assert max(steps) > 1


@pytest.mark.nightly
def test_log_probabilities_of_an_invariant_model_are_bitwise_equal(make_llama, prompts):
    """Alone in several steps, and together with other requests in single steps."""
    model = make_llama(batch_invariant=True)
    one, other = (
        eSurge(model, num_scheduler_steps=count, enable_prefix_caching=False, **SIZES)
        for count in (1, 8)
    )
    params = FREE.replace(logprobs=3)
    together = told(one.generate(prompts, params))
    assert [told(other.generate(prompt, params))[0] for prompt in prompts] == together


def test_tokens_after_the_end_of_a_request_are_discarded(single, several, prompts, steps):
    for prompt in prompts[:3]:
        whole = single.generate(prompt, FREE)[0].outputs[0]
        for index in (1, 4, 9, 10):
            params = FREE.replace(stop_token_ids=(whole.token_ids[index],))
            assert told(several.generate(prompt, params)) == told(single.generate(prompt, params))
            assert told(several.generate(prompt, FREE.replace(max_tokens=index))) == told(
                single.generate(prompt, FREE.replace(max_tokens=index))
            )
        params = FREE.replace(stop=whole.text[5:7] or "e")
        assert told(several.generate(prompt, params)) == told(single.generate(prompt, params))
    assert max(steps) > 1


@pytest.mark.nightly
def test_requests_that_need_single_steps_are_served_with_others(single, several, prompts, steps):
    guided = StructuredOutputs(regex="[ab]{6}")
    params = [
        FREE,
        FREE.replace(repetition_penalty=1.3, max_tokens=7),
        SamplingParams(temperature=0.0, max_tokens=10, structured_outputs=guided),
        FREE.replace(min_tokens=3, max_tokens=5),
        DRAWN.replace(typical_p=0.7, max_tokens=9),
        FREE.replace(prompt_logprobs=1),
        DRAWN.replace(mirostat=2, max_tokens=6),
        DRAWN,
    ]
    assert told(several.generate(prompts, params)) == told(single.generate(prompts, params))
    assert {1, MOST_STEPS} <= {*steps}
    for prompt, own in zip(prompts[1:5], params[1:5], strict=True):
        steps.clear()
        several.generate(prompt, own)
        assert {*steps} == {1}


def test_arriving_request_is_admitted_after_the_started_programs(single, several, prompts):
    first, second = ("a", prompts[0], FREE.replace(max_tokens=60)), ("b", prompts[4], DRAWN)
    tokens, ended = served(several, {0: [first], 3: [second]})
    assert ended == ["b", "a"]
    for name, prompt, params in (first, second):
        assert tokens[name] == single.generate(prompt, params)[0].outputs[0].token_ids
    # Of two programs, one runs when the request arrives, and the other waits for the device.
    several.add_request(*first)
    for _ in range(3):
        several.step()
    several.add_request(*second)
    seen = [{out.request_id for out in several.step()} for _ in range(3)]
    assert "b" in set.union(*seen)
    for name in ("a", "b"):
        several.abort_request(name)
    while several.has_unfinished_requests:
        several.step()


def test_aborted_request_does_not_change_the_others(single, several, prompts):
    long = FREE.replace(max_tokens=70)
    commands = {
        0: [("a", prompts[0], long), ("b", prompts[4], long)],
        3: ["a", ("a", [7, 8], FREE)],
    }
    tokens, ended = served(several, commands)
    assert ended.count("a") == 2
    assert tokens["b"] == single.generate(prompts[4], long)[0].outputs[0].token_ids
    assert tokens["a"][-23:] == single.generate([7, 8], FREE)[0].outputs[0].token_ids


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"async_scheduling": False}, {"overlap_execution": True}])
def test_few_pages_do_not_change_the_tokens(llama, single, prompts, options):
    # A sequence of `max_model_len` needs all pages.
    sizes = {**SIZES, "max_model_len": 64, "num_pages": 8, "use_aot_forward": False, **options}
    engine = eSurge(llama, **sizes)
    tokens = [out.outputs[0].token_ids for out in engine.generate(prompts, FREE)]
    assert tokens == [out.outputs[0].token_ids for out in single.generate(prompts, FREE)]
    stats = engine.stats()
    assert stats["num_preemptions"] > 0
    assert stats["kv_cache_usage"] == 0


@pytest.mark.nightly
def test_pages_filled_by_several_steps_are_cached(llama):
    cached = []
    for count in (1, 8):
        engine = eSurge(llama, num_scheduler_steps=count, **SIZES)
        first = engine.generate([*range(50, 90)], FREE.replace(max_tokens=30))[0]
        again = [*first.prompt_token_ids, *first.outputs[0].token_ids, 7]
        second = engine.generate(again, FREE)[0]
        cached.append((second.metrics.num_cached_tokens, second.outputs[0].token_ids))
    assert cached[0] == cached[1]
    assert cached[0][0] == 64


# ---- the scheduler


def scheduler_with(*requests: Request, num_pages: int = 32, most: int = 8) -> Scheduler:
    scheduler = Scheduler(
        StepLimits(4, 64, 128, time=StepTime(most)), num_pages=num_pages, page_size=8
    )
    for one in requests:
        scheduler.add(one)
    return scheduler


def request(number: int, length: int, params: SamplingParams = FREE, max_tokens: int = 20):
    prompt = [5 + number] * length
    return Request(str(number), prompt, params, max_tokens=max_tokens, arrival=number)


def advanced(scheduler: Scheduler) -> StepPlan:
    """Return the next plan after the scheduler has processed its results."""
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.advance(plan, {row.request_id: [9] * plan.steps for row in plan.rows})
    return plan


def test_programs_end_with_the_shortest_request():
    scheduler = scheduler_with(request(0, 3), request(1, 11, max_tokens=5))
    assert [advanced(scheduler).steps for _ in range(4)] == [1, 4, 8, 7]
    assert scheduler.idle
    assert scheduler.pages.usage == 0


def test_program_has_the_pages_of_all_its_steps():
    scheduler = scheduler_with(request(0, 13))
    advanced(scheduler)
    plan = advanced(scheduler)
    assert (plan.steps, [len(row.pages["full"]) for row in plan.rows]) == (8, [1])
    assert scheduler.running[0].num_computed == 21
    assert len(scheduler.running[0].page_keys) == 2


def test_programs_are_shorter_if_pages_are_missing():
    scheduler = scheduler_with(request(0, 7), request(1, 54, max_tokens=60), num_pages=16)
    advanced(scheduler)
    before = scheduler.pages.pools["full"].num_free
    taken = scheduler.pages.pools["full"].allocate(before - 1)
    assert taken is not None
    plan = advanced(scheduler)
    assert plan.steps == 2  # the second sequence reaches the end of its page
    assert scheduler.pages.pools["full"].num_free == 0


@pytest.mark.parametrize(
    "params",
    [
        FREE.replace(repetition_penalty=2.0),
        FREE.replace(min_tokens=2),
        DRAWN.replace(typical_p=0.5),
        SamplingParams(structured_outputs=StructuredOutputs(regex="a*")),
    ],
)
def test_program_of_a_request_with_decisions_per_step_has_one_step(params):
    scheduler = scheduler_with(request(0, 3), request(1, 3, params))
    advanced(scheduler)
    assert advanced(scheduler).steps == 1


def test_program_has_one_step_while_a_request_waits_or_a_prompt_is_incomplete():
    scheduler = scheduler_with(request(0, 3), *(request(number, 3) for number in range(1, 6)))
    assert [advanced(scheduler).steps for _ in range(2)] == [1, 1]
    scheduler = scheduler_with(request(0, 3), request(1, 90))
    assert [advanced(scheduler).steps for _ in range(3)] == [1, 1, 8]


def test_plan_ahead_continues_after_all_steps_of_a_program():
    scheduler = scheduler_with(request(0, 3), request(1, 14))
    advanced(scheduler)
    plan = scheduler.schedule()
    assert plan is not None
    ahead = plan_ahead(plan, scheduler)
    assert ahead is not None
    assert (plan.steps, ahead.steps) == (8, 8)
    assert [row.start for row in ahead.rows] == [11, 22]
    assert [len(row.pages.get("full", ())) for row in ahead.rows] == [1, 1]
    for one in (plan, ahead):
        scheduler.advance(one, {row.request_id: [9] * 8 for row in one.rows})
    assert [one.num_computed for one in scheduler.running] == [19, 30]
    assert [len(one.page_keys) for one in scheduler.running] == [2, 3]


def test_failed_reservation_gives_all_pages_back():
    scheduler = scheduler_with(request(0, 7), request(1, 8), num_pages=16, most=1)
    plan = scheduler.schedule()
    assert plan is not None
    pool = scheduler.pages.pools["full"]
    pool.allocate(pool.num_free - 0)
    pages = [dict(one.pages) for one in scheduler.running]
    assert plan_ahead(plan, scheduler) is None
    assert [one.pages for one in scheduler.running] == pages


# ---- numbers


def test_only_short_steps_are_repeated():
    sizes = {"layers": 4, "weights": 14_000_000, "numbers": 3_500_000, "token_bytes": 4096}
    small = StepTime.estimate("cpu", **sizes)
    assert small.steps(1, 64) == MOST_STEPS
    assert 1 < small.steps(32, 32 * 64) < small.steps(8, 8 * 64) <= MOST_STEPS
    assert small.steps(32, 32 * 100_000) == 1
    sizes |= {"layers": 30, "weights": 540_000_000, "numbers": 135_000_000}
    assert StepTime.estimate("cpu", **sizes).most == 1
    assert ONE_STEP.steps(1, 0) == 1
    assert StepTime(4).steps(100, 10**6) == 4


def test_result_ends_a_row_before_logits_that_are_not_finite():
    rows = [PlanRow(name, slot, 3, (5,), {}, 1) for slot, name in enumerate("abc")]
    packed = np.zeros((12, 3), np.int32)
    packed[:, 0] = [5, 6, 7, 0, 5, -1, 7, 0, -1, 6, 7, 0]
    result = StepResult(StepPlan(1, tuple(rows), steps=3), packed, range(0, 12, 4))
    assert result.tokens() == {"a": [5, 6, 7], "b": [5], "c": [-1, 6, 7]}
    assert result.not_finite() == ["c"]
    assert result.get_interrupted_ids() == ["b"]
