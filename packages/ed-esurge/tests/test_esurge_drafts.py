"""Drafts of models with recurrent states on a fake device, the kinds of drafts, and planted faults.

The fake device compares the state of a row with all tokens before the row, so a state of rejected
tokens, a stale state and a state of another position fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
from ed_esurge.config import SpeculativeConfig
from ed_esurge.core.drafts import DraftPlanner
from ed_esurge.core.ngrams import PromptLookup
from ed_esurge.core.plan import PlanRow
from ed_esurge.core.proposals import DraftLength, Proposer
from ed_esurge.core.request import Request
from ed_esurge.core.state_store import StateStore
from ed_esurge.core.suffixes import POOL_TOKENS, SuffixDecoding
from ed_esurge.runner.drafts import DRAFT_KINDS
from ed_esurge.sampling import SamplingParams
from fake_pages import next_token
from test_esurge_states import Engine, draw

SLOTS = 8


class Guesser(Proposer):
    """Proposes the right tokens, each wrong with a probability."""

    def __init__(self, most: int, wrong: float, seed: int) -> None:
        super().__init__(most)
        self._wrong, self._rng = wrong, random.Random(seed)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        tokens = [*request.prompt, *request.output]
        for _ in range(most):
            tokens.append(next_token(tokens))
        proposed = tokens[request.num_tokens :]
        return [t + 1 if self._rng.random() < self._wrong else t for t in proposed]


class DraftEngine(Engine):
    """An engine with drafts on the fake device."""

    def __init__(self, proposer: Proposer, *, places: int = 64, **sizes: Any) -> None:
        second = SLOTS + places
        super().__init__(
            places=places, slots=SLOTS, proposer=proposer, second_states=second, **sizes
        )


def converse(seed: int, *, wrong: float = 0.2, **sizes: Any) -> DraftEngine:
    """Run conversations with common beginnings, disconnects, evictions and preemptions."""
    rng = random.Random(seed)
    sizes = {"pages": 26, "places": 5, "longest": 90, "interval": 16, **sizes}
    engine = DraftEngine(Guesser(4, wrong, seed), **sizes)
    prompts = [draw(rng.randrange(5, 14), rng.randrange(2)) for _ in range(5)]

    def disconnect() -> None:
        if engine.scheduler.running and rng.random() < 0.02:
            engine.scheduler.finish(rng.choice(engine.scheduler.running).request_id, "abort")
        if rng.random() < 0.02:
            engine.scheduler.preempt_all()
            engine.scheduler.forget_cached()

    for turn in range(4):
        asked = [engine.add(prompt, rng.randrange(4, 14), end=None) for prompt in prompts]
        engine.run(each_step=lambda turn=turn: turn % 2 and disconnect())
        prompts = [
            [*request.prompt, *request.output, *draw(rng.randrange(1, 7), turn)]
            for request in asked
        ]
    return engine


@pytest.mark.parametrize("kinds", ["full", "full window", "only states"])
def test_drafted_conversations_under_pressure_receive_their_tokens(kinds: str) -> None:
    engines = [converse(seed, kinds=kinds) for seed in range(6)]
    proposers = [engine.scheduler.proposer for engine in engines]
    accepted = sum(p.num_accepted_tokens for p in proposers if p is not None)
    drafted = sum(p.num_draft_tokens for p in proposers if p is not None)
    assert 0.3 < accepted / drafted < 0.9
    assert sum(request.num_cached or 0 for e in engines for request in e.requests) > 300
    assert sum(engine.states.num_evicted for engine in engines) > 20
    assert kinds == "only states" or sum(e.scheduler.num_preemptions for e in engines) > 2


def test_drafts_save_the_same_states_as_plain_decoding() -> None:
    """A draft ends at the next state to save, so that the next turn continues from there."""
    cached: list[list[int]] = []
    for most in (1, 4):
        engine = DraftEngine(Guesser(most, 0.3, 0), pages=60)
        prompt, counts = draw(11), list[int]()
        for turn in range(4):
            engine.add(prompt, 13, end=None)
            engine.run()
            request = engine.requests[-1]
            counts.append(request.num_cached or 0)
            prompt = [*request.prompt, *request.output, *draw(3, turn)]
        cached.append(counts)
    assert cached[0] == cached[1] == [0, 20, 36, 52]


def test_accepted_drafts_reduce_the_number_of_steps() -> None:
    steps: list[int] = []
    for wrong in (1.0, 0.25, 0.0):
        engine = DraftEngine(Guesser(4, wrong, 0), spacing=64)
        engine.add(draw(9), 40, end=None)
        engine.run()
        steps.append(len(engine.plans))
    assert steps[0] == 40
    assert steps[2] < steps[1] < steps[0]
    assert steps[2] <= 10


# ---- planted faults


def keeps_rejected_state(patch: pytest.MonkeyPatch) -> None:
    """Continue from the state after rejected tokens."""
    settle = DraftPlanner.settle

    def settle_forwards(
        self: DraftPlanner, request: Request, row: PlanRow, sampled: Sequence[int], taken: int
    ) -> None:
        settle(self, request, row, sampled, taken)
        if row.states is not None:
            request.state_slot = row.states[1]

    patch.setattr(DraftPlanner, "settle", settle_forwards)


def keeps_old_state(patch: pytest.MonkeyPatch) -> None:
    """Continue from the state before the step although all proposals were accepted."""
    settle = DraftPlanner.settle

    def settle_backwards(
        self: DraftPlanner, request: Request, row: PlanRow, sampled: Sequence[int], taken: int
    ) -> None:
        slot = request.state_slot
        settle(self, request, row, sampled, taken)
        request.state_slot = slot

    patch.setattr(DraftPlanner, "settle", settle_backwards)


def computes_one_token_less(patch: pytest.MonkeyPatch) -> None:
    """Compute all accepted tokens again but the first."""
    settle = DraftPlanner.settle

    def settle_later(
        self: DraftPlanner, request: Request, row: PlanRow, sampled: Sequence[int], taken: int
    ) -> None:
        settle(self, request, row, sampled, taken)
        if len(sampled) < row.samples:
            request.num_computed = row.start + 1

    patch.setattr(DraftPlanner, "settle", settle_later)


def accepts_one_token_more(patch: pytest.MonkeyPatch) -> None:
    """Accept a sampled token after the first wrong proposal."""

    def accept(row: PlanRow, sampled: Sequence[int]) -> list[int]:
        pairs = zip(sampled, row.proposed, strict=False)
        right = next((i for i, (one, two) in enumerate(pairs) if one != two), row.samples - 1)
        return list(sampled[: right + 2])

    patch.setattr(PlanRow, "get_accepted_tokens", accept)


def writes_into_read_slot(patch: pytest.MonkeyPatch) -> None:
    """Write the state after a draft over the state before."""
    place = DraftPlanner.place_states

    def place_over(self: DraftPlanner, rows: Any, requests: Any) -> None:
        place(self, rows, requests)
        for name, row in rows.items():
            if row.states is not None and row.samples > 1:
                rows[name] = row._replace(states=(row.states[0], row.states[0]))

    patch.setattr(DraftPlanner, "place_states", place_over)


def saves_state_of_read_slot(patch: pytest.MonkeyPatch) -> None:
    """Save the state before a draft as the state after the draft."""
    save = StateStore.save

    def save_before(self: StateStore, request: Request, stop: int, slot: int | None) -> None:
        save(self, request, stop, request.state_slot)

    patch.setattr(StateStore, "save", save_before)


def saves_inside_of_draft(patch: pytest.MonkeyPatch) -> None:
    """Store the state after a draft under the key of the page end inside of the draft."""
    patch.setattr(StateStore, "count_steps", lambda self, starts, most: most)
    save = StateStore.save

    def save_earlier(self: StateStore, request: Request, stop: int, slot: int | None) -> None:
        save(self, request, stop // self.page_size * self.page_size, slot)

    patch.setattr(StateStore, "save", save_earlier)


def restores_into_old_slot(patch: pytest.MonkeyPatch) -> None:
    """Keep the slot of the state of the last sequence after a preemption."""
    from ed_esurge.core.scheduler import Scheduler

    release = Scheduler._let_go
    admit = Scheduler._admit
    slots: dict[str, int | None] = {}

    def let_go(self: Scheduler, request: Request) -> None:
        slots[request.request_id] = request.state_slot
        release(self, request)

    def admit_stale(self: Scheduler, request: Request, budget: int, num_rows: int):
        row = admit(self, request, budget, num_rows)
        if row is not None and slots.get(request.request_id) is not None:
            request.state_slot = slots[request.request_id]
        return row

    patch.setattr(Scheduler, "_let_go", let_go)
    patch.setattr(Scheduler, "_admit", admit_stale)


def shares_second_slots(patch: pytest.MonkeyPatch) -> None:
    """Use one second slot for two sequences."""
    place = DraftPlanner.place_states

    def place_together(self: DraftPlanner, rows: Any, requests: Any) -> None:
        place(self, rows, requests)
        for name, row in rows.items():
            if row.states is not None:
                merged = tuple(s - s % 2 if s >= SLOTS + 5 else s for s in row.states)
                rows[name] = row._replace(states=merged)

    patch.setattr(DraftPlanner, "place_states", place_together)


FAULTS = (
    keeps_rejected_state,
    keeps_old_state,
    computes_one_token_less,
    accepts_one_token_more,
    writes_into_read_slot,
    saves_state_of_read_slot,
    saves_inside_of_draft,
    restores_into_old_slot,
    shares_second_slots,
)


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_of_drafts_is_found(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_conversations() -> None:
        for seed in range(12):
            converse(seed, kinds="only states" if seed % 2 else "full")

    fault(monkeypatch)
    with pytest.raises((AssertionError, KeyError, IndexError)):
        run_conversations()


# ---- kinds and lengths


def request_of(name: str, prompt: list[int], output: list[int], salt: bytes = b"") -> Request:
    request = Request(name, prompt, SamplingParams(), max_tokens=64, salt=salt)
    request.output += output
    return request


def test_every_method_is_a_kind() -> None:
    assert set(DRAFT_KINDS) == set(get_args(SpeculativeConfig.model_fields["method"].annotation))


def test_suffixes_of_earlier_outputs_are_proposed_within_a_salt() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_spec_factor=4.0)
    proposer = SuffixDecoding(config)
    first = request_of("a", [1, 2, 3], [10, 11, 12, 13, 14, 15])
    assert list(proposer.propose(first, 4)) == []
    proposer.forget(first)
    second = request_of("b", [7, 8, 9], [10, 11, 12])
    assert list(proposer.propose(second, 4)) == [13, 14, 15]
    other = request_of("c", [7, 8, 9], [10, 11, 12], salt=b"another customer")
    assert list(proposer.propose(other, 4)) == []


def test_suffix_continuations_vote_and_own_repetitions_continue() -> None:
    proposer = SuffixDecoding(SpeculativeConfig(method="suffix", num_speculative_tokens=8))
    for name, last in (("a", 20), ("b", 21), ("c", 21)):
        proposer.forget(request_of(name, [1], [10, 11, 12, last, last + 1]))
    assert list(proposer.propose(request_of("d", [5], [10, 11, 12]), 8)) == [21, 22]
    # A repetition continues with the proposals themselves, up to the length of the context.
    repeated = request_of("e", [5], [6, 7, 8, 6, 7, 8])
    assert list(proposer.propose(repeated, 8)) == [6, 7, 8]


def test_suffix_pool_drops_the_oldest_outputs() -> None:
    config = SpeculativeConfig(method="suffix", suffix_decoding_max_cached_requests=2)
    proposer = SuffixDecoding(config)
    for number in range(4):
        proposer.forget(request_of(str(number), [1], [30 + number, 40, 50 + number, 60]))
    found = [[*proposer.propose(request_of(f"q{n}", [2], [30 + n, 40]), 2)] for n in range(4)]
    assert found == [[], [], [52, 60], [53, 60]]
    proposer.forget(request_of("long", [1], list(range(100, 100 + POOL_TOKENS))))
    assert proposer.propose(request_of("q", [2], [33, 40]), 2) == []


def test_number_of_proposals_follows_their_acceptance() -> None:
    length = DraftLength(4)
    assert length.get(0) == 4
    length.update(4, 1, 2)
    assert length.get(2) == 2
    length.update(2, 2, 5)
    length.update(3, 3, 9)
    assert length.get(9) == 4
    pauses, tokens = list[int](), 10
    for _ in range(40):
        if length.update(1, 0, tokens):
            assert length.get(tokens) == 0
            start = tokens
            while not length.get(tokens):
                tokens += 1
            pauses.append(tokens - start)
        tokens += 1
    assert pauses[:5] == [16, 32, 64, 128, 256]
    assert set(pauses[5:]) <= {256}


class Wrong(Guesser):
    """Proposes only wrong tokens, and adapts their number."""

    def __init__(self) -> None:
        super().__init__(4, 1.0, 0)
        self._adapts = True


def test_requests_after_useless_proposals_begin_with_one() -> None:
    proposer = Wrong()
    engine = DraftEngine(proposer, longest=96)
    counts: list[int] = []
    for _ in range(24):
        before = proposer.num_draft_tokens
        engine.add(draw(9), 80, end=None)
        engine.run()
        counts.append(proposer.num_draft_tokens - before)
    # A trial at the beginning, and after pauses of 16 and 32 tokens.
    assert counts[0] > counts[-1] == 3


def test_useless_proposals_are_switched_off_for_their_request() -> None:
    proposer = Wrong()
    engine = DraftEngine(proposer, longest=96)
    engine.add(draw(9), 80, end=None)
    engine.run()
    assert proposer.num_draft_tokens < 20
    assert proposer.num_pauses >= 2
    assert proposer.stats()["spec_decode_num_pauses"] == proposer.num_pauses
    assert not proposer._lengths


def test_prompt_lookup_forgets_finished_requests() -> None:
    proposer = PromptLookup(SpeculativeConfig())
    request = request_of("a", [1, 2, 3, 1, 2], [])
    assert list(proposer.propose(request, 2)) == [3, 1]
    proposer.release(request)
    assert not proposer._known
