"""Saved recurrent states: which are stored, and when a sequence may continue from one. No jax.

The fake device compares the state of a row with all tokens before the row, so a stale state, a
state of another position and a state in another slot fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
from ed_esurge.core import state_store
from ed_esurge.core.pages import PageGroup
from ed_esurge.core.plan import StepPlan
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits, plan_ahead
from ed_esurge.core.state_store import StateStore
from ed_esurge.sampling import SamplingParams
from fake_pages import EOS, FakePages, expected

PAGE = 4


class Engine:
    """A scheduler with the fake device. `run` starts steps ahead, as the loop of an engine does."""

    def __init__(
        self,
        *,
        places: int = 64,
        pages: int = 60,
        kinds: str = "full",
        interval: int = 64,
        budget: int = 16,
        longest: int = 96,
        policy: Literal["fcfs", "priority"] = "fcfs",
        slots: int = 4,
        spacing: int = PAGE,
        **drafts: Any,
    ) -> None:
        groups = {"full": PageGroup(pages), "window": PageGroup(pages, 6)}
        groups = {name: group for name, group in groups.items() if name in kinds}
        self.states = StateStore(places, slots, PAGE, spacing=spacing, interval=interval)
        limits = StepLimits(slots, budget, longest, policy=policy)
        self.scheduler = Scheduler(
            limits, num_pages=groups, page_size=PAGE, states=self.states, **drafts
        )
        self.device = FakePages(groups, PAGE, 1, recurrent=True)
        self.requests: list[Request] = []
        self.plans: list[StepPlan] = []
        self.computed = 0

    def add(
        self,
        prompt: list[int],
        max_tokens: int = 1,
        salt: bytes = b"",
        *,
        end: int | None = EOS,
        priority: int = 0,
    ) -> Request:
        number = len(self.requests)
        request = Request(
            str(number),
            prompt,
            SamplingParams(),
            arrival=number,
            max_tokens=max_tokens,
            eos_token_ids=frozenset([] if end is None else [end]),
            salt=salt,
            priority=priority,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    def run(self, *, ahead: bool = True, each_step: Callable[[], object] = lambda: None) -> None:
        """Run all steps and compare the outputs."""
        coming: tuple[StepPlan, dict[str, list[int]]] | None = None
        while coming is not None or not self.scheduler.idle:
            if coming is None:
                plan = self.scheduler.schedule()
                assert plan is not None
                coming = plan, self._start(plan)
            plan, tokens = coming
            following = plan_ahead(plan, self.scheduler) if ahead else None
            coming = None if following is None else (following, self._start(following))
            self.scheduler.advance(plan, tokens)
            each_step()
        for request in self.requests:
            if request.finish_reason != "abort":
                ends = EOS in request.eos_token_ids
                alone = expected(list(request.prompt), request.max_tokens, ends=ends)
                assert request.output == alone
        assert not self.states._uncommitted

    def _start(self, plan: StepPlan) -> dict[str, list[int]]:
        self.plans.append(plan)
        self.computed += plan.total
        return self.device.run(plan)

    def ask(self, prompt: list[int], max_tokens: int = 1, salt: bytes = b"") -> int:
        """Run a request alone and return its number of cached tokens."""
        request = self.add(prompt, max_tokens, salt)
        self.run()
        assert request.num_cached is not None
        return request.num_cached


def draw(count: int, seed: int = 0) -> list[int]:
    """Return tokens that the fake model does not sample, so that no page is equal by chance."""
    rng = random.Random(seed)
    return [rng.randrange(9, 999) for _ in range(count)]


KINDS = pytest.mark.parametrize("kinds", ["full", "full window", "window", "only states"])


@KINDS
def test_second_turn_computes_at_most_one_page_and_the_new_turn(kinds: str) -> None:
    engine, prompt = Engine(kinds=kinds), draw(41)
    assert engine.ask(prompt, 12) == 0
    for turn in range(1, 4):
        known = len(prompt) + len(engine.requests[-1].output)
        prompt = [*prompt, *engine.requests[-1].output, *draw(5, turn)]
        before = engine.computed
        cached = engine.ask(prompt, 12)
        # The last token of an output is sampled but not computed.
        assert cached > known - 1 - PAGE
        outputs = len(engine.requests[-1].output)
        assert engine.computed - before == len(prompt) - cached + outputs - 1 + wasted(engine)


def wasted(engine: Engine) -> int:
    """Return the number of rows that were planned ahead for a request that had ended."""
    name, request = engine.requests[-1].request_id, engine.requests[-1]
    last = max(row.start for plan in engine.plans for row in plan.rows if row.request_id == name)
    return max(0, last + 2 - request.num_tokens)


def test_equal_prompt_computes_only_its_last_page() -> None:
    engine = Engine()
    # A prompt of 40 tokens computes one of them, so it cannot use the state after all of them.
    assert [engine.ask(draw(length)) for length in (3, 3, 41, 41, 40, 40)] == [0, 0, 0, 40, 0, 36]
    # The state of the adapter, or of another customer, is not that of the same tokens.
    assert engine.ask(draw(41), salt=b"adapter 1") == 0


def test_common_system_prompt_is_saved_where_prompts_leave_it() -> None:
    engine, system = Engine(), draw(23)
    cached = [engine.ask([*system, *draw(14, seed)]) for seed in range(1, 5)]
    # The second request finds where the prompts diverge, and saves this state for the others.
    assert cached == [0, 0, 20, 20]


def test_requests_of_one_step_wait_for_the_state_of_the_first() -> None:
    engine = Engine(budget=64)
    for _ in range(4):  # as `n=4` of one request
        engine.add(draw(41), 3)
    engine.run()
    assert [request.num_cached for request in engine.requests] == [0, 40, 40, 40]
    engine.add([*draw(41), 7], 3)
    engine.run()
    assert engine.requests[-1].num_cached == 40


def test_long_prompt_is_saved_at_intervals_that_are_evicted_first() -> None:
    engine, prompt = Engine(interval=16, places=3), draw(61)
    engine.ask(prompt)
    changed = [*prompt[:50], *draw(9, 1)]
    assert engine.ask(changed) == 48
    other = Engine(interval=16, places=3)
    other.ask(prompt)
    for seed in (2, 3):
        other.ask(draw(9, seed))
    # Of the states at 16, 32, 48 and 60 (the end), those inside of the prompt were evicted.
    assert other.ask(prompt) == 60
    assert other.states.num_evicted == 3


def test_conversations_in_turn_need_two_places_each() -> None:
    """Requests of many conversations alternate, the worst order for the least recently used."""
    engine = Engine(places=21, pages=400)
    prompts, before = [[*draw(12), *draw(9, seed)] for seed in range(1, 11)], [0] * 10
    for turn in range(5):
        cached = [engine.ask(prompt, 6) for prompt in prompts]
        # At most a page of the last prompt is computed again.
        assert all(count >= length - PAGE for count, length in zip(cached, before, strict=True))
        before = [len(prompt) for prompt in prompts]
        answered = zip(prompts, engine.requests[-10:], strict=True)
        prompts = [[*prompt, *request.output, *draw(7, turn)] for prompt, request in answered]
    assert engine.states.num_evicted > 20


def test_preempted_sequence_continues_from_its_last_state() -> None:
    engine = Engine(pages=20, longest=80, policy="priority")
    long = engine.add(draw(17), 50, end=None, priority=1)

    def interrupt() -> None:
        if len(long.output) == 40:
            engine.add(draw(29, 1), 4, priority=0)

    engine.run(each_step=interrupt)
    assert engine.scheduler.num_preemptions == 1
    starts = [
        row.start
        for plan in engine.plans
        for row in plan.rows
        if row.request_id in [new.request_id for new in plan.started]
    ]
    # The other request took 5 free pages, and the last 3 of the 15 pages of the preempted one.
    assert starts == [0, 0, 48]


def test_state_is_dropped_with_its_page() -> None:
    engine = Engine(pages=16, longest=64)
    engine.ask(draw(41))
    engine.ask(draw(60, 1))  # takes the pages of the first prompt
    assert engine.ask(draw(41)) == 0
    keys = engine.scheduler.pages.prefixes
    assert keys is not None
    assert all(key in keys.get_pages("full") for key in engine.states._place_of)


def test_new_weights_drop_all_states() -> None:
    engine = Engine()
    engine.ask(draw(41))
    engine.scheduler.forget_cached()
    assert (len(engine.states), engine.ask(draw(41))) == (0, 0)


def test_model_without_places_computes_whole_prompts() -> None:
    engine = Engine(places=0)
    assert [engine.ask(draw(41), 9) for _ in range(2)] == [0, 0]


def test_copies_of_slots_are_executed_before_their_source_changes() -> None:
    store = StateStore(2, 4, PAGE, spacing=PAGE, interval=8)
    store._copies = {1: 0, 2: 1, 3: 2}
    copies, _ = store.take()
    assert copies == ((2, 3), (1, 2), (0, 1))


def converse(seed: int, **sizes: Any) -> Engine:
    """Run conversations with common beginnings, disconnects, evictions and preemptions."""
    rng = random.Random(seed)
    engine = Engine(**{"pages": 26, "places": 5, "longest": 90, "interval": 16, **sizes})
    prompts = [draw(rng.randrange(5, 14), rng.randrange(2)) for _ in range(5)]

    def disconnect() -> None:
        if engine.scheduler.running and rng.random() < 0.03:
            engine.scheduler.finish(rng.choice(engine.scheduler.running).request_id, "abort")
        if rng.random() < 0.02:
            engine.scheduler.preempt_all()
            engine.scheduler.forget_cached()

    for turn in range(4):
        asked = [engine.add(prompt, rng.randrange(1, 12)) for prompt in prompts]
        # Commands arrive between steps, and a step that runs ahead is finished before.
        engine.run(ahead=turn % 2 == 0, each_step=lambda turn=turn: turn % 2 and disconnect())
        prompts = [
            [*request.prompt, *request.output, *draw(rng.randrange(1, 7), turn)]
            for request in asked
        ]
    return engine


@pytest.mark.parametrize("kinds", ["full", "full window", "only states"])
def test_conversations_under_pressure_receive_their_tokens(kinds: str) -> None:
    engines = [converse(seed, kinds=kinds) for seed in range(6)]
    assert sum(request.num_cached or 0 for e in engines for request in e.requests) > 300
    assert sum(engine.states.num_evicted for engine in engines) > 20
    assert kinds == "only states" or sum(e.scheduler.num_preemptions for e in engines) > 2


def stale_state(patch: pytest.MonkeyPatch) -> None:
    """Evict a state without forgetting its key."""

    def allocate(store: StateStore) -> int | None:
        return store._blank.pop() if store._blank else next(iter(store._place_of.values()), None)

    patch.setattr(StateStore, "_allocate", allocate)


def position_before(patch: pytest.MonkeyPatch) -> None:
    """Store a state under the key of the page before."""
    store_at = StateStore._store

    def store(self: StateStore, key: bytes, place: int, state: Any) -> None:
        keys = state.request.page_keys
        store_at(self, keys[max(keys.index(key) - 1, 0)], place, state)

    patch.setattr(StateStore, "_store", store)


def wrong_slot(patch: pytest.MonkeyPatch) -> None:
    """Restore into the slot of another sequence."""
    restore = StateStore.restore

    def restore_elsewhere(self: StateStore, request: Request) -> None:
        restore(self, request)
        assert request.slot is not None
        if request.slot in self._copies:
            self._copies[(request.slot + 1) % 4] = self._copies.pop(request.slot)

    patch.setattr(StateStore, "restore", restore_elsewhere)


def page_without_state(patch: pytest.MonkeyPatch) -> None:
    """Continue from pages without a state."""
    patch.setattr(StateStore, "__contains__", lambda self, key: key in self._known)


def unfinished_page(patch: pytest.MonkeyPatch) -> None:
    """Save states at other positions than page ends."""
    saved = StateStore.save

    def save(self: StateStore, request: Request, stop: int, slot: int | None) -> None:
        saved(self, request, stop - 1 if stop % PAGE == 1 else stop, slot)

    patch.setattr(StateStore, "save", save)


def key_without_prefix(patch: pytest.MonkeyPatch) -> None:
    """Compute keys that do not depend on the pages before."""
    page_key = state_store.extend_page_keys.__globals__["page_key"]
    patch.setitem(
        state_store.extend_page_keys.__globals__,
        "page_key",
        lambda previous, tokens, items=b"": page_key(b"", tokens[-1:], items),
    )


def kept_after_new_weights(patch: pytest.MonkeyPatch) -> None:
    """Reuse all places after new weights, but keep the keys."""

    def clear(store: StateStore) -> None:
        store._blank += [*store._place_of.values(), *store._spare.values(), *store._uncommitted]
        store._uncommitted.clear()
        store._copies.clear()

    patch.setattr(StateStore, "clear", clear)


def same_step(patch: pytest.MonkeyPatch) -> None:
    """Restore a state that the same step saves."""

    def save(self: StateStore, request: Request, stop: int, slot: int | None) -> None:
        saved(self, request, stop, slot)
        self.commit(tuple(self._saves))

    saved = StateStore.save
    patch.setattr(StateStore, "save", save)


FAULTS = (
    stale_state,
    position_before,
    wrong_slot,
    page_without_state,
    unfinished_page,
    key_without_prefix,
    kept_after_new_weights,
    same_step,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_conversations() -> None:
        for seed in range(12):
            converse(seed, kinds="only states" if seed % 2 else "full")

    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_conversations()
