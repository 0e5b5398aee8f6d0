"""Rules of the scheduler: chunks, prefixes, padding, windows, host memory, priorities. No jax."""

from __future__ import annotations

import pytest
from ed_esurge.core.host_pages import HostPages
from ed_esurge.core.padding import STEP, first_part, pick_shape
from ed_esurge.core.page_pool import pages_of_sequence
from ed_esurge.core.pages import FREED, PageGroup
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request, Status
from ed_esurge.core.scheduler import Scheduler, StepLimits
from ed_esurge.sampling import SamplingParams

SHAPES = ((16, 8), (64, 16), (256, 16), (512, 16))  # of an engine on a CPU


class Ones(Proposer):
    """Proposes the maximum number of tokens."""

    def propose(self, request: Request, most: int) -> list[int]:
        return [1] * most

    def forget(self, request: Request) -> None:
        pass


def make(prompt: list[int], number: int, *, max_tokens: int = 4, **kw) -> Request:
    return Request(
        str(number), prompt, SamplingParams(), max_tokens=max_tokens, arrival=number, **kw
    )


def run(scheduler: Scheduler, tokens: int = 3) -> None:
    while (plan := scheduler.schedule()) is not None:
        scheduler.advance(plan, {row.request_id: [tokens] for row in plan.rows if row.samples})


def test_long_prompt_is_chunked_and_does_not_starve_decodes():
    scheduler = Scheduler(StepLimits(4, 8, 64), num_pages=32, page_size=4)
    scheduler.add(make([1] * 4, 0, max_tokens=20))
    scheduler.advance(scheduler.schedule(), {"0": [3]})
    scheduler.add(make([2] * 30, 1))
    shares = []
    for _ in range(5):
        plan = scheduler.schedule()
        shares.append(plan.num_tokens)
        scheduler.advance(plan, {r.request_id: [3] for r in plan.rows if r.samples})
    assert shares == [{"0": 1, "1": 7}] * 4 + [{"0": 1, "1": 2}]


def test_second_request_reuses_full_pages_of_the_first():
    scheduler = Scheduler(StepLimits(2, 64, 64), num_pages=32, page_size=4)
    first, second = make([5] * 11, 0), make([5] * 11, 1)
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert second.num_cached == 8
    assert plan.num_tokens == {"1": 3}
    third = make([5] * 8, 2)  # a whole number of pages: the last page is recomputed for the logits
    scheduler.add(third)
    scheduler.schedule()
    assert third.num_cached == 4


@pytest.mark.parametrize(
    ("length", "decoding", "shares"),
    [
        (64, 0, [64]),
        (65, 0, [64, 1]),
        (130, 0, [64, 64, 2]),
        (150, 0, [150]),
        (260, 0, [256, 4]),
        (1100, 0, [512, 512, 64, 12]),
        (63, 1, [63]),
        (64, 7, [57, 7]),  # 64 tokens, and 14 tokens of which seven belong to decoding sequences
        (64, 8, [56, 8]),
        (121, 15, [121]),  # 49, 49 and 23 tokens would require three steps of 64
    ],
)
def test_last_prompt_of_a_step_is_split_to_reduce_padding(length, decoding, shares):
    limits = StepLimits(16, 512, 2048, shapes=SHAPES)
    scheduler = Scheduler(limits, num_pages=256, page_size=16, prefix_caching=False)
    for number in range(decoding):
        scheduler.add(make([1], number, max_tokens=50))
    if decoding:
        scheduler.advance(scheduler.schedule(), {str(n): [3] for n in range(decoding)})
    scheduler.add(make([2] * length, 99))
    taken = []
    while len(scheduler.requests["99"].output) < 1:
        plan = scheduler.schedule()
        taken.append(plan.num_tokens["99"])
        assert plan.total == taken[-1] + decoding
        scheduler.advance(plan, {row.request_id: [3] for row in plan.rows if row.samples})
    assert taken == shares


def test_prompts_before_other_requests_fill_the_step():
    limits = StepLimits(3, 512, 512, shapes=SHAPES)
    scheduler = Scheduler(limits, num_pages=200, page_size=16, prefix_caching=False)
    for number in range(4):
        scheduler.add(make([number + 1] * 100, number))
    shares = []
    for _ in range(2):
        plan = scheduler.schedule()
        shares.append(plan.num_tokens)
        scheduler.advance(plan, {row.request_id: [3] for row in plan.rows if row.samples})
    # The third request is the last: there is no slot for the fourth.
    assert shares == [{"0": 100, "1": 100, "2": 56}, {"0": 1, "1": 1, "2": 44}]
    scheduler = Scheduler(StepLimits(3, 512, 512), num_pages=200, page_size=16)
    scheduler.add(make([2] * 65, 0))
    assert scheduler.schedule().num_tokens == {"0": 65}


def test_running_prompt_is_chunked_only_when_no_request_can_be_admitted():
    limits = StepLimits(4, 512, 1024, shapes=SHAPES)
    scheduler = Scheduler(limits, num_pages=200, page_size=16, prefix_caching=False)
    scheduler.add(make([1] * 612, 0))
    scheduler.advance(scheduler.schedule(), {})
    scheduler.add(make([2] * 30, 1))
    scheduler.add(make([3] * 130, 2))
    plan = scheduler.schedule()
    assert plan.num_tokens == {"0": 100, "1": 30, "2": 126}


def test_proposals_use_padding_rows_only():
    limits = StepLimits(16, 512, 512, shapes=SHAPES)
    proposer = Ones(3)
    scheduler = Scheduler(limits, num_pages=200, page_size=16, proposer=proposer)
    scheduler.add(make([1], 0, max_tokens=40))
    scheduler.advance(scheduler.schedule(), {"0": [3]})
    totals = []
    for number, length in enumerate((62, 66, 20), 1):
        scheduler.add(make([number + 1] * length, number, max_tokens=1))
        plan = scheduler.schedule()
        totals.append(plan.num_tokens)
        proposed = {row.request_id: row.token_ids[1:] for row in plan.rows if row.samples > 1}
        sampled = {row.request_id: [*proposed.get(row.request_id, ()), 3] for row in plan.rows}
        scheduler.advance(plan, sampled)
    assert totals == [{"0": 2, "1": 62}, {"0": 1, "2": 63}, {"0": 4, "2": 3, "3": 20}]


@pytest.mark.parametrize("others", [0, 7, 15])
def test_split_of_a_prompt_has_minimal_cost(others):
    def cost(part: int) -> int:
        return STEP + pick_shape(SHAPES, others + part, others + 1)[0]

    least = [0]
    for count in range(1, 513 - others):
        least.append(min(cost(part) + least[count - part] for part in range(1, count + 1)))
        parts: list[int] = []
        while (rest := count - sum(parts)) > 0:
            parts.append(first_part(SHAPES, others, others + 1, rest))
        assert sum(parts) == count
        assert sum(cost(part) for part in parts) == least[count]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_windowed_page_count_matches_touched_pages(size):
    for window in range(1, 9):
        for at_once in range(1, 9):
            first = [start - window + 1 for start in range(64)]
            touched = [
                (start + at_once - 1) // size - max(seen, 0) // size + 1
                for start, seen in enumerate(first)
            ]
            assert pages_of_sequence(window, 999, at_once, size) == max(touched)
    assert pages_of_sequence(None, 10, 1, size) == -(-10 // size)
    assert pages_of_sequence(100, 10, 1, size) == -(-10 // size)


def test_windowed_prefix_requires_only_pages_of_the_window():
    groups = {"window": PageGroup(20, window=4)}
    scheduler = Scheduler(StepLimits(2, 64, 32), num_pages=groups, page_size=2)
    scheduler.add(make([5] * 12, 0, max_tokens=1))
    plan = scheduler.schedule()
    pages = plan.rows[0].pages["window"]
    scheduler.advance(plan, {"0": [3]})
    for page in pages[:3]:
        scheduler.pages.prefixes.forget("window", page)
    second = make([5] * 12, 1, max_tokens=1)
    scheduler.add(second)
    row = scheduler.schedule().rows[0]
    assert (second.num_cached, row.start) == (
        10,
        10,
    )  # the two pages before position 10 are sufficient
    assert row.pages["window"][:5] == (FREED, FREED, FREED, *pages[3:5])
    scheduler.pages.prefixes.forget("window", pages[4])
    third = make([5] * 12, 2)
    scheduler.add(third)
    scheduler.schedule()
    assert third.num_cached == 0


def evicting(host_places: int) -> Scheduler:
    """Return a scheduler whose pool has the pages of one sequence."""
    return Scheduler(StepLimits(2, 64, 16), num_pages=4, page_size=4, host_places=host_places)


def test_host_prefix_of_one_salt_is_hidden_from_other_salts():
    scheduler = evicting(16)
    for number, (prompt, salt) in enumerate(
        [([1] * 13, b"a"), ([2] * 13, b"a"), ([1] * 13, b"b"), ([2] * 13, b"b"), ([1] * 13, b"a")]
    ):
        request = make(prompt, number, max_tokens=1, salt=salt)
        scheduler.add(request)
        run(scheduler)
        assert request.num_cached == (12 if number == 4 else 0)


def test_least_recently_used_host_page_is_evicted():
    host = HostPages(2)
    for page, key in enumerate([b"1", b"2", b"1", b"3"]):
        host.save(key, page)
    assert [key in host for key in (b"1", b"2", b"3")] == [True, False, True]
    assert host.saves == {0: 0, 1: 3}  # a stored page is not copied again


def test_host_page_with_a_pending_read_is_not_reused():
    host = HostPages(2)
    host.save(b"1", 10)
    host.save(b"2", 11)
    host.forget_moves()
    places = host.take([b"1"])
    host.save(b"3", 12)  # replaces key 2, because key 1 has a pending read
    assert (b"2" in host, b"3" in host) == (False, True)
    host.load([b"1"], places, [20])
    host.save(b"4", 13)
    host.save(b"5", 14)
    assert (b"1" in host, b"5" in host, b"4" in host) == (True, True, False)
    assert host.saves == {1 - places[0]: 14}
    host.save(b"1", 20)  # the device page is evicted before the copy
    assert (host.loads, b"1" in host) == ({}, True)
    full = HostPages(1)
    full.save(b"1", 10)
    full.load([b"1"], full.take([b"1"]), [20])
    full.save(b"2", 11)
    assert b"2" not in full
    nothing = HostPages(0)
    nothing.save(b"1", 10)
    assert not nothing.saves


def test_priority_orders_the_queue_and_preemption():
    limits = StepLimits(2, 64, 16, policy="priority")
    scheduler = Scheduler(limits, num_pages=5, page_size=4, prefix_caching=False)
    low = make([2] * 4, 0, max_tokens=12, priority=5)
    high = make([1] * 7, 1, max_tokens=9, priority=1)
    scheduler.add(low)
    scheduler.advance(scheduler.schedule(), {"0": [3]})
    scheduler.add(high)
    done = []
    while (plan := scheduler.schedule()) is not None:
        sampled = {row.request_id: [3] for row in plan.rows if row.samples}
        taken = scheduler.advance(plan, sampled)
        done += [name for name in taken if name not in scheduler.requests]
    assert done == ["1", "0"]
    assert (low.num_preemptions, high.num_preemptions) == (1, 0)
    assert (len(low.output), len(high.output)) == (12, 9)


def test_scheduler_errors_contain_the_numbers():
    with pytest.raises(ValueError, match="give at least 16 pages"):
        Scheduler(StepLimits(1, 8, 64), num_pages=3, page_size=4)
    with pytest.raises(ValueError, match="each needs one token"):
        Scheduler(StepLimits(9, 8, 64), num_pages=30, page_size=4)
    scheduler = Scheduler(StepLimits(1, 8, 8), num_pages=3, page_size=4)
    # The engine rejects such requests of users. In the scheduler they are bugs.
    with pytest.raises(AssertionError, match="exceed max_model_len 8"):
        scheduler.add(make([1] * 8, 0))
    scheduler.add(make([1], 1))
    with pytest.raises(AssertionError, match="in use"):
        scheduler.add(make([1], 1))
    assert scheduler.requests["1"].status is Status.WAITING
