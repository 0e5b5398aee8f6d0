"""Shapes and buffers of a step."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_esurge.core.pages import FREED
from ed_esurge.core.plan import NewSequence, PlanRow, StepPlan
from ed_esurge.runner.batch import BatchBuilder
from ed_esurge.runner.buckets import Buckets, StepShape
from ed_esurge.runner.sampler_rows import SamplerRows
from ed_esurge.runner.slots import SlotTables
from ed_esurge.sampling import SamplingParams
from hypothesis import given
from hypothesis import strategies as st


@given(
    seqs=st.integers(1, 300),
    extra=st.integers(0, 3000),
    minimum=st.integers(1, 64),
    data=st.data(),
)
def test_a_shape_fits_every_step(seqs, extra, minimum, data):
    budget = seqs + extra
    buckets = Buckets(max_num_seqs=seqs, max_num_tokens=budget, pages=3, min_tokens=minimum)
    n = data.draw(st.integers(1, seqs))
    tokens = data.draw(st.integers(n, budget))
    for prefill in (False, True):
        shape = buckets.pick(tokens, n, prefill=prefill)
        assert shape in buckets.shapes
        assert shape.tokens >= tokens
        assert shape.seqs >= n
        # If the shape has as many tokens as slots, no sequence has two tokens. Attention uses this.
        assert (shape.tokens == shape.seqs) == (tokens == n and not prefill)
        assert not prefill or shape.tokens in buckets.prefill_tokens
    assert len(buckets.shapes) <= 24


def test_buckets_have_few_shapes():
    buckets = Buckets(max_num_seqs=16, max_num_tokens=512, pages=8)
    sizes = [(shape.tokens, shape.seqs) for shape in buckets.shapes]
    assert sizes == [(1, 1), (4, 4), (8, 8), (16, 8), (16, 16), (64, 16), (256, 16), (512, 16)]
    with pytest.raises(ValueError, match="exceeds the largest shape"):
        buckets.pick(17, 17)


def test_batch_buffer_round_trips_step_plan():
    params = SamplingParams(logprobs=2, presence_penalty=0.5)
    decode = NewSequence("d", 1, [1, 2, 3, 4, 5, 6], 4, params, seed=2**32 - 1)
    chunk = NewSequence("c", 0, [9, 8, 7, 6, 5], 5, SamplingParams(), seed=5)
    rows = (
        PlanRow("d", 1, 5, [6], {"full": [2], "window": [1]}, samples=1),
        PlanRow("c", 0, 0, [9, 8, 7], {"full": [3], "window": [4]}),
    )
    slots = SlotTables(4, ("full", "window"), pages=2, vocab_size=12)
    builder = BatchBuilder(slots, page_size=4, num_pages={"full": 10, "window": 6})
    for new in (decode, chunk):
        slots.start(new)
    slots.grow(PlanRow("d", 1, 0, [1, 2, 3, 4], {"full": [7], "window": [FREED]}))
    for row in rows:
        slots.grow(row)
    shape = StepShape(8, 3, 2)
    buffer, places = builder.build(StepPlan(1, rows), shape)
    assert list(places) == list(range(len(rows)))
    step = builder.fields(shape).unpack(buffer)
    ragged, rows = jax.tree.map(np.asarray, step.ragged), SamplerRows.of(step.rows)
    assert step.token_ids.tolist() == [[6, 9, 8, 7, 0, 0, 0, 0]]
    assert ragged.cu_q_lens.tolist() == [0, 1, 4, 4]
    assert ragged.kv_lens.tolist() == [6, 3, 0]
    assert ragged.seq_of_token[:4].tolist() == [0, 1, 1, 1]
    assert ragged.slots["full"].tolist() == [2 * 4 + 1, 12, 13, 14, 40, 40, 40, 40]
    assert ragged.slots["window"].tolist() == [5, 16, 17, 18, 24, 24, 24, 24]
    assert ragged.page_table["full"].tolist() == [[7, 2], [3, 3], [0, 0]]
    assert ragged.page_table["window"].tolist() == [[0, 1], [4, 4], [0, 0]]
    assert ragged.state_slots.tolist() == [1, 0, 4]  # 4 is none
    assert ragged.prompt_lens.tolist() == [4, 5, 0]
    assert ragged.num_seqs == 2
    assert step.logits_at.tolist() == [0, 3, 7]  # padding reads the last token
    assert rows.seed.tolist() == [-1, 0, 0]
    assert rows.slot.tolist() == [1, 4, 4]  # 4 is none
    assert rows.num_logprobs.tolist() == [2, -1, -1]
    assert rows.temperature.tolist() == [1.0, 0.0, 0.0]
    assert rows.presence_penalty.tolist() == [0.5, 0.0, 0.0]
    # The next sequence in the slot inherits nothing.
    slots.start(NewSequence("e", 1, [1], 1, SamplingParams(temperature=0)))
    slots.grow(row := PlanRow("e", 1, 0, [1], {"full": [5], "window": [5]}, samples=1))
    step = builder.fields(shape).unpack(builder.build(StepPlan(2, (row,)), shape)[0])
    assert np.asarray(step.ragged.page_table["full"]).tolist() == [[5, 5], [0, 0], [0, 0]]
    rows = SamplerRows.of(step.rows)
    assert rows.slot.tolist() == [4, 4, 4]
    assert rows.num_logprobs.tolist() == [-1, -1, -1]
