"""Properties of the scheduler under random traffic: pages, budget, order, progress. No jax."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from ed_esurge.core.pages import FREED, PageGroup, pages_of_sequence
from ed_esurge.core.plan import StepPlan
from ed_esurge.core.proposals import Proposer
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits, plan_ahead
from ed_esurge.core.state_store import StateStore
from ed_esurge.sampling import SamplingParams
from fake_pages import EOS, FakePages, expected, next_token
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule


def steep(budget: int) -> tuple[tuple[int, int], ...]:
    """Return shapes whose last shape is too expensive to use."""
    return (2 * budget // 3, 99), (9999, 99)


class Guesses(Proposer):
    """Proposes the next tokens, and sometimes a wrong token."""

    def propose(self, request: Request, most: int) -> list[int]:
        tokens, proposed = [*request.prompt, *request.output], []
        for place in range(most):
            token = next_token(tokens + proposed)
            proposed.append(token if (len(tokens) + place) % 3 else token + 1)
        return proposed

    def forget(self, request: Request) -> None:
        pass


class Traffic(RuleBasedStateMachine):
    """Requests arrive and end at random while steps run. A tiny pool causes many preemptions."""

    @initialize(
        pages=st.integers(6, 14),
        size=st.sampled_from([1, 2, 3, 5]),
        seqs=st.integers(1, 5),
        extra=st.integers(0, 6),
        chunk=st.sampled_from([None, 1, 3]),
        policy=st.sampled_from(["fcfs", "priority"]),
        caching=st.booleans(),
        window=st.integers(1, 5),
        spare=st.integers(0, 6),
        at_once=st.integers(1, 3),
        guesses=st.integers(0, 3),
        host=st.integers(0, 12),
        ahead=st.booleans(),
        pads=st.booleans(),
        states=st.sampled_from([None, 0, 1, 2, 5, 20]),
    )
    def start(
        self,
        pages,
        size,
        seqs,
        extra,
        chunk,
        policy,
        caching,
        window,
        spare,
        at_once,
        guesses,
        host,
        ahead,
        pads,
        states,
    ):
        self.ahead = ahead and at_once == 1
        self.pending: tuple[StepPlan, dict[str, list[int]]] | None = None  # runs ahead
        self.longest = pages * size
        shapes = steep(seqs + extra) if pads else ()
        limits = StepLimits(seqs, seqs + extra, self.longest, chunk, policy, shapes)
        least = pages_of_sequence(window, self.longest, min(chunk or 99, seqs + extra), size)
        groups = {"full": PageGroup(pages), "window": PageGroup(least + spare, window)}
        recurrent = states is not None
        store = None
        if recurrent:
            guesses = host = 0
            at_once = 1
            caching = True
            store = StateStore(states, seqs, size, spacing=size + chunk if chunk else 1, interval=4)
        self.scheduler = Scheduler(
            limits,
            num_pages=groups,
            page_size=size,
            prefix_caching=caching,
            host_places=host,
            proposer=Guesses(guesses) if guesses else None,
            states=store,
        )
        self.device = FakePages(groups, size, at_once, recurrent=recurrent)
        self.all: list[Request] = []
        self.aborted: set[str] = set()

    @rule(data=st.data(), priority=st.integers(0, 2))
    def add(self, data, priority):
        length = data.draw(st.integers(1, self.longest - 1))
        prompt = data.draw(st.lists(st.integers(0, 1), min_size=length, max_size=length))
        number = len(self.all)
        request = Request(
            str(number),
            prompt,
            SamplingParams(),
            eos_token_ids=frozenset([EOS]),
            max_tokens=data.draw(st.integers(1, self.longest - length)),
            priority=priority,
            arrival=number,
        )
        self.scheduler.add(request)
        self.all.append(request)

    @rule(pick=st.integers(0, 100))
    @precondition(lambda self: self.all)
    def abort(self, pick):
        request = self.all[pick % len(self.all)]
        if self.scheduler.finish(request.request_id, "abort"):
            self.aborted.add(request.request_id)

    @rule()
    def step(self):
        scheduler = self.scheduler
        if self.pending is not None:
            plan, sampled = self.pending
            self.go_ahead(plan)
            scheduler.advance(plan, sampled)
            return
        before = {r.request_id for r in scheduler.waiting}
        head = [r.request_id for r in scheduler.waiting]
        plan = scheduler.schedule()
        if plan is None:
            assert scheduler.idle
            return
        assert plan.total <= scheduler.limits.token_budget
        assert plan.lines <= scheduler.limits.max_num_seqs
        assert len(plan.rows) == len(plan.num_tokens)
        admitted = [row.request_id for row in plan.rows if row.request_id in before]
        assert admitted == head[: len(admitted)]  # strictly from the head of the queue
        sampled = self.device.run(plan)
        assert set(sampled) == {row.request_id for row in plan.rows if row.samples}
        self.go_ahead(plan)
        before = {r.request_id: len(r.output) for r in self.all}
        taken = scheduler.advance(plan, sampled)
        grown = {r.request_id: len(r.output) - before[r.request_id] for r in self.all}
        assert all(grown[name] == taken.get(name, 0) for name in grown)
        most = {row.request_id: max(row.samples, self.device.at_once) for row in plan.rows}
        assert all(1 <= taken[name] <= most[name] for name in sampled)

    def go_ahead(self, plan):
        """Run a step before the scheduler receives the tokens of the running step."""
        following = plan_ahead(plan, self.scheduler) if self.ahead else None
        self.pending = None
        if following is not None:
            assert {row.request_id for row in following.rows} <= set(plan.num_tokens)
            self.pending = following, self.device.run(following)

    @rule()
    @precondition(lambda self: self.all)
    def other_weights(self):
        self.pending = None
        self.scheduler.preempt_all()
        self.scheduler.pages.forget_prefixes()
        for pool in self.scheduler.pages.pools.values():
            assert pool.num_free == pool.num_pages

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def pages_are_accounted_for(self):
        scheduler = self.scheduler
        size = scheduler.pages.page_size
        for group, pool in scheduler.pages.pools.items():
            tables = {r: r.pages[group] for r in scheduler.running}
            held = Counter(page for pages in tables.values() for page in pages if page != FREED)
            for page in range(pool.num_pages):
                assert pool.holders(page) == held[page]
            assert pool.num_free == pool.num_pages - len(held)
            for request, pages in tables.items():
                kept = [page for page in pages if page != FREED]
                assert len(set(kept)) == len(kept)
                assert len(pages) * size >= request.num_computed
                # Exactly the whole pages before the window are freed.
                freed = len(pages) - len(kept)
                assert pages[freed:] == kept
                window = scheduler.pages.windows.get(group, self.longest + 1)
                assert freed * size <= max(0, request.num_computed - window + 1)
                # A page that a sequence writes is not shared: only full pages have two holders.
                for page in pages[request.num_computed // size :]:
                    assert held[page] == 1
        for request in [*scheduler.waiting, *(r for r in self.all if r.finished)]:
            assert not request.pages
            assert request.slot is None
        slots = [r.slot for r in scheduler.running]
        assert len(set(slots)) == len(slots)

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def host_memory_is_bounded(self):
        prefixes = self.scheduler.pages.prefixes
        for host in prefixes.host.values() if prefixes is not None else ():
            places = [*host._place_of.values(), *host._blank]
            assert sorted(places) == list(range(host.places))  # no place is lost or used twice
            assert set(host.saves) | set(host.loads.values()) <= set(host._place_of.values())

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def places_of_states_are_accounted_for(self):
        states, first = self.scheduler.states, self.scheduler.limits.max_num_seqs
        if states is not None:
            places = [*states._place_of.values(), *states._spare.values(), *states._uncommitted]
            expected_places = list(range(first, first + states.places))
            assert sorted([*places, *states._blank]) == expected_places

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def the_queue_is_fair(self):
        by_priority = self.scheduler.limits.policy == "priority"
        queue = [(by_priority * r.priority, r.arrival) for r in self.scheduler.waiting]
        assert queue == sorted(queue)  # preempted requests come before later arrivals

    @invariant()
    @precondition(lambda self: hasattr(self, "scheduler"))
    def nobody_is_lost(self):
        live = {r.request_id for r in self.all if not r.finished}
        assert live == set(self.scheduler.requests)
        queued = [r.request_id for r in self.scheduler.waiting + self.scheduler.running]
        assert sorted(queued) == sorted(live)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        for _ in range(20_000):
            if self.scheduler.idle:
                break
            self.step()
        assert self.scheduler.idle, "the scheduler makes no progress"
        for pool in self.scheduler.pages.pools.values():
            assert pool.num_free == pool.num_pages
        for request in self.all:
            alone = expected(request.prompt, request.max_tokens)
            if request.request_id in self.aborted:
                assert request.output == alone[: len(request.output)]
            else:
                assert request.output == alone


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_evicted_pages_are_restored_from_host_memory():
    groups = {"full": PageGroup(4), "window": PageGroup(4, 99)}
    scheduler = Scheduler(StepLimits(2, 64, 16), num_pages=groups, page_size=4, host_places=6)
    device = FakePages(groups, 4, 1)
    seen = []
    for number, token in enumerate((1, 2, 1, 3, 1, 2)):
        request = Request(str(number), [token] * 13, SamplingParams(), max_tokens=1, arrival=number)
        scheduler.add(request)
        plan = scheduler.schedule()
        scheduler.advance(plan, device.run(plan))  # fails at an uncomputed position
        assert request.output == expected(request.prompt, 1)
        (saves, loads) = plan.moves.get("full", ({}, {}))
        seen.append((request.num_cached, len(saves), len(loads)))
    # Of six places, the pages of prompt 3 replace those of prompt 2.
    assert seen == [(0, 0, 0), (0, 3, 0), (12, 3, 3), (0, 0, 0), (12, 3, 3), (0, 0, 0)]
    prefixes = scheduler.pages.prefixes
    assert (prefixes.queries, prefixes.hits) == (6 * 13, 0)
    assert (prefixes.host_queries, prefixes.host_hits) == (6 * 13, 24)
    scheduler.pages.forget_prefixes()
    assert not any(len(host) for host in prefixes.host.values())
    assert not scheduler.pages.take_moves()


@pytest.mark.nightly
@pytest.mark.parametrize("pads", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_scheduler_completes_hundred_thousand_random_requests(seed, pads, record_property):
    """Each seed runs a fourth of the requests with other limits, and as many with costly padding.
    Outputs are right, all pages are freed, every request ends, and no step exceeds the budget."""
    rng = random.Random(seed)
    pages, size, seqs, extra = 24 + 8 * seed, 2 + seed, 6 + seed, 8 * seed
    policy = "priority" if seed % 2 else "fcfs"
    shapes = steep(seqs + extra) if pads else ()
    limits = StepLimits(seqs, seqs + extra, 40, 3 + seed, policy, shapes)
    least = pages_of_sequence(5, 40, min(3 + seed, seqs + extra), size)
    groups = {"full": PageGroup(pages), "window": PageGroup(least + pages // 2, 5)}
    proposer = Guesses(seed) if seed else None
    scheduler = Scheduler(
        limits, num_pages=groups, page_size=size, proposer=proposer, host_places=10 * seed
    )
    device = FakePages(groups, size, 1)
    begun: dict[str, Request] = {}
    number = done = steps = filled = 0
    since: dict[str, int] = {}
    while number < 25_000 or begun:
        while number < 25_000 and len(begun) < 20 and rng.random() < 0.7:
            length = rng.randint(1, 24)
            prompt = [rng.randrange(2) for _ in range(length)]
            request = Request(
                str(number),
                prompt,
                SamplingParams(),
                arrival=number,
                max_tokens=rng.randint(1, min(12, 40 - length)),
                # A steady stream of urgent requests starves the others, as the policy defines.
                priority=number // 100 - rng.randrange(3),
                eos_token_ids=frozenset([EOS]),
            )
            scheduler.add(request)
            begun[request.request_id], since[request.request_id] = request, steps
            number += 1
        if begun and rng.random() < 0.01:
            name = rng.choice(list(begun))
            scheduler.finish(name, "abort")
            request = begun.pop(name)
            assert (
                request.output
                == expected(request.prompt, request.max_tokens)[: len(request.output)]
            )
        plan = scheduler.schedule()
        if plan is None:
            assert scheduler.idle
            continue
        steps += 1
        assert plan.total <= limits.token_budget
        assert plan.lines <= limits.max_num_seqs
        filled += pads and plan.total == shapes[0][0]
        scheduler.advance(plan, device.run(plan))
        for row in plan.rows:
            request = begun.get(row.request_id)
            if request is not None and request.finished:
                assert request.output == expected(request.prompt, request.max_tokens)
                assert steps - since[row.request_id] < 2000
                del begun[row.request_id]
                done += 1
    assert scheduler.idle
    assert len(scheduler._slots) == limits.max_num_seqs
    for pool in scheduler.pages.pools.values():
        assert pool.num_free == pool.num_pages
    prefixes = scheduler.pages.prefixes
    assert (prefixes.host_hits > 0) == (seed > 0)
    assert (filled > 0) == pads
    text = f"seed {seed}: {done} done in {steps} steps, {scheduler.num_preemptions} preemptions"
    record_property("summary", f"{text}, {prefixes.host_hits} tokens from host memory")
