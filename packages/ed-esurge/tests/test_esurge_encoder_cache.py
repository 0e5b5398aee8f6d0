"""Encoder inputs on the host: rows, budgets, prefix keys and plans, without a model."""

from __future__ import annotations

import numpy as np
import pytest
from ed_esurge.config import EngineConfig
from ed_esurge.core.commands import EncoderInput
from ed_esurge.core.encoder_cache import EncoderCache
from ed_esurge.core.prefix_cache import prompt_keys
from ed_esurge.core.request import Request
from ed_esurge.core.scheduler import Scheduler, StepLimits
from ed_esurge.engine.intake import Intake
from ed_esurge.sampling import SamplingParams
from ed_infra.errors import ConfigError
from hypothesis import given, settings
from hypothesis import strategies as st

PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PAGE = 4


class Items:
    """Items of up to 8 encoder positions."""

    names = ("pixel_values",)
    longest = 8
    has_axes = False

    def check(self, item):
        return None

    def gaps(self, arrays):
        return ()

    def positions(self, count, items):
        return None


def item(name: int, start: int, length: int) -> EncoderInput:
    return EncoderInput.of({"pixel_values": np.full((1, 2, 2), name, np.float32)}, start, length)


def request(name: str, length: int, *items: EncoderInput, arrival: int = 0) -> Request:
    return Request(name, [9] * length, PARAMS, max_tokens=4, arrival=arrival, encoder_inputs=items)


def scheduler(budget: int = 16, encoder: EncoderCache | None = None, **limits) -> Scheduler:
    return Scheduler(
        StepLimits(max_num_seqs=4, token_budget=budget, max_model_len=64, **limits),
        num_pages=64,
        page_size=PAGE,
        encoder=encoder or EncoderCache(32, 16),
    )


def run(plan, engine: Scheduler) -> None:
    engine.advance(plan, {row.request_id: [5] * row.samples for row in plan.rows if row.samples})


def test_key_depends_on_arrays_and_length():
    assert item(1, 0, 4).key == item(1, 8, 4).key
    assert len({item(1, 0, 4).key, item(2, 0, 4).key, item(1, 0, 5).key}) == 3


def test_item_is_encoded_by_first_chunk_that_needs_it():
    engine = scheduler(budget=8)
    engine.add(request("a", 20, item(1, 10, 6)))
    first, second, third = [], [], []
    for rows in (first, second, third):
        plan = engine.schedule()
        rows += [plan.items, plan.rows[0]]
        run(plan, engine)
    assert first[0] == () and first[1].features == ()
    assert [len(one.rows) for one in second[0]] == [6]
    rows = list(second[0][0].rows)
    assert second[1].features == [-1, -1, *rows]
    assert third[0] == () and third[1].features == ()
    assert engine.encoder.usage == 0  # no sequence holds the item, and its rows are kept
    assert item(1, 0, 6).key in engine.encoder


def test_equal_items_of_two_requests_are_encoded_once():
    engine = scheduler(budget=32)
    engine.add(request("a", 12, item(1, 2, 4)))
    engine.add(request("b", 12, item(1, 4, 4), arrival=1))
    plan = engine.schedule()
    assert len(plan.items) == 1
    a, b = plan.rows
    assert a.features[2:6] == b.features[4:8] == list(plan.items[0].rows)
    assert (engine.encoder.queries, engine.encoder.hits) == (2, 1)


def test_step_computes_at_most_its_budget_of_encoder_positions():
    engine = scheduler(budget=32, encoder=EncoderCache(64, 6))
    engine.add(request("a", 24, item(1, 0, 5), item(2, 6, 5), item(3, 12, 9)))
    counts = []
    while not engine.running or engine.running[0].num_computed < 24:
        plan = engine.schedule()
        counts.append((sum(len(one.rows) for one in plan.items), len(plan.rows[0].token_ids)))
        run(plan, engine)
    # The longest item exceeds the budget, and is encoded alone.
    assert counts == [(5, 6), (5, 6), (9, 12)]


def test_item_waits_for_rows_that_another_sequence_holds():
    engine = scheduler(budget=16, encoder=EncoderCache(8, 16), chunk=4)
    engine.add(request("a", 12, item(1, 0, 8)))
    engine.add(request("b", 12, item(2, 0, 8), arrival=1))
    plan = engine.schedule()
    assert [row.request_id for row in plan.rows] == ["a"]
    run(plan, engine)
    plan = engine.schedule()  # ends the item
    assert [row.request_id for row in plan.rows] == ["a"]
    run(plan, engine)
    plan = engine.schedule()
    assert [row.request_id for row in plan.rows] == ["a", "b"]
    assert item(1, 0, 8).key not in engine.encoder  # evicted for the second item


def test_preempted_sequence_holds_no_item_and_encodes_again_after_clear():
    engine = scheduler(budget=8)
    engine.add(request("a", 16, item(1, 4, 8)))
    run(engine.schedule(), engine)
    assert engine.encoder.usage > 0
    engine.preempt_all()
    assert engine.encoder.usage == 0
    engine.forget_cached()
    assert len(engine.schedule().items) == 1


def test_finished_request_releases_its_items():
    engine = scheduler(budget=8)
    engine.add(request("a", 16, item(1, 4, 8)))
    run(engine.schedule(), engine)
    engine.finish("a", "abort")
    assert engine.encoder.usage == 0


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 8)), max_size=4),
        min_size=1,
        max_size=6,
    ),
    st.integers(8, 20),
    st.sampled_from([4, 7, 16]),
)
def test_every_placeholder_receives_its_row_under_any_traffic(requests, capacity, chunk):
    encoder = EncoderCache(capacity, 6)
    engine = scheduler(budget=16, encoder=encoder, chunk=chunk)
    table: dict[int, bytes] = {}
    for number, items in enumerate(requests):
        made, at = [], 0
        for name, gap, length in items:
            made.append(item(name, at + gap, length))
            at += gap + length
        engine.add(request(str(number), at + 1, *made, arrival=number))
    for _ in range(400):
        if engine.idle:
            break
        plan = engine.schedule()
        assert plan is not None
        rows = [row for one in plan.items for row in one.rows]
        assert len(rows) == len(set(rows))
        for one in plan.items:
            key = EncoderInput.of(one.arrays, 0, len(one.rows)).key
            table.update({row: (key, place) for place, row in enumerate(one.rows)})
        for row in plan.rows:
            own = engine.requests[row.request_id]
            expected = [
                next(
                    (
                        (one.key, position - one.start)
                        for one in own.encoder_inputs
                        if one.start <= position < one.start + one.length
                    ),
                    None,
                )
                for position in range(row.start, row.stop)
            ]
            features = row.features or [-1] * len(row.token_ids)
            assert [table.get(at) if at >= 0 else None for at in features] == expected
        run(plan, engine)
    assert engine.idle
    assert encoder.usage == 0


def test_prefix_keys_of_pages_depend_on_the_items_that_overlap():
    tokens = [9] * 17
    plain = prompt_keys(tokens, b"", PAGE)
    cat, dog = (prompt_keys(tokens, b"", PAGE, [item(name, 5, 2)]) for name in (1, 2))
    assert cat[0] == dog[0] == plain[0]
    assert all(len({a, b, c}) == 3 for a, b, c in zip(cat[1:], dog[1:], plain[1:], strict=True))
    moved = prompt_keys(tokens, b"", PAGE, [item(1, 6, 2)])
    assert moved[1] != cat[1]


def test_prefix_with_equal_items_is_shared_and_not_encoded_again():
    engine = scheduler(budget=32)
    for name, number in (("a", 1), ("b", 1), ("c", 2)):
        engine.add(request(name, 12, item(number, 2, 4)))
        plan = engine.schedule()
        cached = engine.requests[name].num_cached
        assert (len(plan.items), cached) == {"a": (1, 0), "b": (0, 8), "c": (1, 0)}[name]
        run(plan, engine)
        engine.finish(name, "abort")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([EncoderInput(b"", {"sound": np.zeros(2)}, 0, 2)], "array 'sound'; accepted arrays: pix"),
        ([item(1, 2, 2), item(2, 3, 2)], "they must begin at 4 or later"),
        ([item(1, 8, 5)], "end at position 13, but the prompt has 12 tokens"),
        ([item(1, 0, 9)], "more than the 8 encoder positions"),
    ],
)
def test_intake_rejects_items_that_do_not_match_the_prompt(items, message):
    intake = Intake(
        EngineConfig(),
        None,
        eos_token_ids=frozenset(),
        max_model_len=64,
        vocab_size=20,
        max_logprobs=0,
        items=Items(),
    )
    with pytest.raises(ConfigError, match=message):
        intake.prepare("a", [9] * 12, PARAMS, encoder_inputs=items)
