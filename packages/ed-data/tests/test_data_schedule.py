"""Scheduled weights: exact in each block, and independent of the order of requests."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_data import Inform, Mixture, build_loader, build_prompts
from ed_data.order import plan, stream
from ed_data.order.schedule import UNIT, ScheduledOrder, WeightSchedule, divide_block
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

LINEAR = WeightSchedule("linear", (0, 10, 20), ((1.0, 0.0), (0.0, 2.0), (3.0, 1.0)))


@pytest.mark.proves("mixture.mixture_schedule.type")
def test_schedule_interpolates_weights_between_points():
    def shares(schedule: WeightSchedule, *steps: int) -> list[float]:
        return [round(schedule.parts(step)[0] / UNIT, 6) for step in steps]

    def of(kind: str) -> WeightSchedule:
        return WeightSchedule(kind, LINEAR.steps, LINEAR.weights)

    assert shares(of("step"), 0, 9, 10, 19, 20, 99) == [1, 1, 0, 0, 0.75, 0.75]
    assert shares(of("linear"), 0, 5, 10, 12, 20, 99) == [1, 0.5, 0, 0.15, 0.75, 0.75]
    assert shares(of("cosine"), 0, 5, 10, 20) == [1, 0.5, 0, 0.75]
    half = (1 - np.cos(np.pi / 4)) / 2
    assert shares(of("cosine"), 2.5)[0] == pytest.approx(1 - half, abs=1e-6)  # pyright: ignore
    assert all(sum(of("cosine").parts(step)) == UNIT for step in range(30))


blocks = st.lists(
    st.tuples(st.integers(1, 50), st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)),
    max_size=30,
)


@given(blocks)
def test_divided_blocks_follow_weights_within_two_documents(blocks):
    """After each block, each inform has its share of all documents within about one."""
    owed, drawn, due = [0, 0, 0], np.zeros(3), np.zeros(3)
    for size, weights in blocks:
        parts = WeightSchedule("step", (0,), (tuple(map(float, weights)),)).parts(0)
        counts, owed = divide_block(size, parts, owed)
        assert sum(counts) == size
        assert min(counts) >= 0
        assert sum(owed) == 0
        drawn += counts
        due += size * np.array(parts) / UNIT
        assert np.abs(drawn - due).max() <= 2


@given(
    st.lists(st.integers(1, 40), min_size=2, max_size=2),
    st.integers(1, 9),
    st.integers(3, 30),
    st.booleans(),
)
@settings(deadline=None, max_examples=40)
def test_any_window_can_be_computed_separately(sizes, block, window, shuffle):
    def fresh() -> ScheduledOrder:
        order = ScheduledOrder(sizes, LINEAR, block_size=block, seed=3, shuffle=shuffle)
        order.set_windows(window, lambda number: 3 * number)
        return order

    order = fresh()
    size, windows = order.epoch_size, -(-order.epoch_size // window)
    whole = [order.take(epoch, 0, size) for epoch in range(3)]
    informs = np.concatenate([inform for inform, _ in whole])
    for epoch, start, stop in ((2, size // 2, size), (0, 1, size), (1, 0, size // 2)):
        inform, document = fresh().take(epoch, start, stop)
        assert np.array_equal(inform, whole[epoch][0][start:stop])
        assert np.array_equal(document, whole[epoch][1][start:stop])
    counts = [(whole[0][0] == i).sum() for i in range(2)]
    assert order.documents_per_epoch() == counts
    # Each inform is repeated, so its documents occur equally often.
    for i in range(2):
        drawn = np.concatenate([d[inform == i] for inform, d in whole])
        times = np.bincount(drawn, minlength=sizes[i])
        assert times.max() - times.min() <= 1
    owed, at = [0, 0], 0
    for number in range(3 * windows):
        length = min(window, size - number % windows * window)
        for begin in range(0, length, min(block, size)):
            here = min(min(block, size), length - begin)
            expected, owed = divide_block(here, LINEAR.parts(3 * number), owed)
            assert [(informs[at : at + here] == i).sum() for i in range(2)] == expected
            at += here


@pytest.fixture
def scheduled(mixture, jsonl):
    """Two informs with different first characters; the weights move from `a` to `b`."""

    def make(**options) -> Mixture:
        informs = [
            {"name": name, "data_files": jsonl([f"{name} " * (3 + i % 5) for i in range(90)], name)}
            for name in ("a.jsonl", "b.jsonl")
        ]
        informs = [{**inform, "name": inform["name"][0]} for inform in informs]
        given = {
            "informs": informs,
            "mixture_weights": {"a": 1, "b": 0},
            "mixture_schedule": {
                "type": "linear",
                "points": [{"step": 40, "weights": {"a": 0, "b": 1}}],
            },
            "mixture_block_size": 8,
            "pack_seq_length": 32,
            "pack_shuffle": False,
            **options,
        }
        return mixture(**given)

    return make


def share_of_b(batches, tokenizer) -> float:
    texts = [
        tokenizer.decode(row, skip_special_tokens=True)
        for batch in batches
        for row in batch["input_ids"]
    ]
    a, b = ("".join(texts).count(letter) for letter in "ab")
    return b / (a + b)


@pytest.mark.proves(
    "mixture.mixture_schedule",
    "mixture.mixture_schedule.points",
    "mixture.mixture_schedule.points.step",
    "mixture.mixture_schedule.points.weights",
)
@pytest.mark.parametrize("how", [{}, {"streaming": True}])
def test_schedule_changes_the_shares_in_batches(scheduled, tokenizer, monkeypatch, how):
    """A run resumes exactly from any step."""
    for module, name in ((plan, "WINDOW"), (stream, "WINDOW_DOCUMENTS")):
        monkeypatch.setattr(module, name, 16)
    made = scheduled(**how)
    loader = build_loader(made, tokenizer, batch_size=2)
    states, batches = [], []
    for _ in range(60):
        states.append(json.dumps(loader.state_dict()))
        batches.append(next(loader))
    thirds = [share_of_b(batches[i : i + 10], tokenizer) for i in (0, 15, 45)]
    assert thirds[0] < 0.2 < 0.25 < thirds[1] < 0.7
    assert thirds[2] == 1
    for step in range(0, 60, 7):
        again = build_loader(made, tokenizer, batch_size=2)
        again.load_state_dict(json.loads(states[step]))
        for expected in batches[step : step + 3]:
            found = next(again)
            assert all(np.array_equal(found[key], expected[key]) for key in expected)
    other = made.replace(mixture_schedule={"points": [{"step": 40, "weights": {"a": 0, "b": 1}}]})
    with pytest.raises(ValueError, match="mixture_schedule"):
        build_loader(other, tokenizer, batch_size=2).load_state_dict(json.loads(states[3]))


def test_scheduled_batches_are_equal_on_the_fly_and_depend_on_batch_size(
    scheduled, tokenizer, monkeypatch
):
    monkeypatch.setattr(plan, "WINDOW", 16)
    made = scheduled()
    loader = build_loader(made, tokenizer, batch_size=2)
    other = build_loader(made.replace(pack_on_the_fly=True), tokenizer, batch_size=2)
    for step in (33, 0, 12):
        found, expected = other.batch_at(step), loader.batch_at(step)
        assert all(np.array_equal(found[key], expected[key]) for key in expected)
    assert sum(loader.stats["sources"][name]["per_epoch"] for name in "ab") == 180
    # A doubled batch size halves the steps, so the cache contains another plan.
    large = build_loader(made, tokenizer, batch_size=4)
    assert share_of_b([large.batch_at(s) for s in range(22, 27)], tokenizer) < 0.9


def test_prompt_batches_follow_mixture_schedule(scheduled, tokenizer, jsonl):
    informs = [
        Inform(name=n, data_files=jsonl([{"prompt": f"{n}{i}"} for i in range(40)], f"p-{n}.jsonl"))
        for n in "ab"
    ]
    made = scheduled(informs=informs, pack_tokens=False, mixture_block_size=4)
    prompts = build_prompts(made, tokenizer, batch_size=2)
    sources = [prompts.batch_at(step).sources for step in range(60)]
    assert {*sources[0], *sources[1]} == {"a"}
    assert {name for each in sources[42:] for name in each} == {"b"}
    assert prompts.batch_at(17).sources == sources[17]


POINT = {"step": 5, "weights": {"a": 1}}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mixture_weights": None}, "the weights at step 0"),
        ({"stop_strategy": "longest"}, "remove stop_strategy"),
        ({"mixture_weights": {"a": 0}}, "every weight is 0"),
        ({"mixture_schedule": {"points": []}}, "at least 1 item"),
        ({"mixture_schedule": {"points": [POINT, POINT]}}, "step 5 must be greater than 5"),
        ({"mixture_schedule": {"points": [{"step": 0, "weights": {"a": 1}}]}}, "greater than 0"),
        ({"mixture_schedule": {"points": [{"step": 1, "weights": {}}]}}, "'a' has no weight"),
        ({"mixture_schedule": {"points": [{"step": 1, "weights": {"a": 0}}]}}, "every weight"),
        (
            {"mixture_schedule": {"points": [{"step": 1, "weights": {"a": 1, "aa": 1}}]}},
            "there is no inform 'aa'; did you mean 'a'",
        ),
        ({"mixture_schedule": {"type": "cosin", "points": [POINT]}}, "'cosine'"),
    ],
)
def test_invalid_schedule_options_raise_validation_error(options, says):
    given = {"mixture_weights": {"a": 1}, "mixture_schedule": {"points": [POINT]}, **options}
    with pytest.raises(ValidationError, match=says):
        Mixture(informs=[{"data_files": "a.txt", "name": "a"}], **given)
