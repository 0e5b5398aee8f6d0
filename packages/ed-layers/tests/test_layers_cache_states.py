"""States of recurrent layers: rows of `generate`, and slots that sequences lease."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import ragged
from ed_layers.cache import HybridCache, RaggedBatch, RecurrentCache, RecurrentSpec, StateSpec

STATE = RecurrentSpec((StateSpec("conv", (3, 2)), StateSpec("ssm", (4,), "bfloat16")))


def test_recurrent_cache_sets_states_of_one_layer():
    cache = RecurrentCache.create([STATE] * 2, batch_size=3)
    new = {"conv": jnp.ones((3, 3, 2)), "ssm": jnp.full((3, 4), 2.0)}
    cache = jax.jit(lambda cache, layer: cache.set(layer, new))(cache, jnp.int32(1))
    assert not np.asarray(cache.get(0)["conv"]).any()
    found = cache.get(1)
    np.testing.assert_array_equal(found["conv"], new["conv"])
    assert found["ssm"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"keeps the states \['conv', 'ssm'\]"):
        cache.set(0, {"conv": new["conv"]})


@pytest.mark.daily("leaves")
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_new_sequences_start_with_zero_states(layout):
    """A new sequence leases a state of zeros, and unused positions change no state."""
    cache = RecurrentCache.create([STATE] * 2, batch_size=4, layout=layout)
    step = ragged([3, 1, 0], [2, 1, 0], [2, 1, 0], used=2)
    new = {"conv": jnp.arange(18.0).reshape(3, 3, 2) + 1, "ssm": jnp.ones((3, 4))}
    assert not np.asarray(cache.get(0, ragged=step)["conv"]).any()
    cache = cache.set(0, new, ragged=step)
    np.testing.assert_array_equal(cache.get(0)["conv"][3], new["conv"][0])
    np.testing.assert_array_equal(cache.get(0)["conv"][1], new["conv"][1])
    assert not np.asarray(cache.get(0)["conv"])[[0, 2]].any(), "slot 0 belongs to no sequence here"
    later = ragged([1, 3, 0], [1, 2, 0], [2, 2, 0], used=2)
    found = cache.get(0, ragged=later)["conv"]
    np.testing.assert_array_equal(found[0], new["conv"][1])
    assert not np.asarray(found[1]).any(), "a new sequence in state 3"


# A recurrent layer: h = decay * h + x, for each sequence by itself.


def recurrent_layer(cache: Any, x: Any, segments: Any, batch: RaggedBatch | None) -> Any:
    """Its output and the cache: rows [b, s], or flat tokens [1, T]."""
    state = cache.get(1, ragged=batch)["h"]

    def token(state: Any, now: Any) -> Any:
        value, row, real = now
        new = jnp.where(real, 0.5 * state[row] + value, state[row])
        return state.at[row].set(new), new

    if batch is None:
        rows = jnp.arange(x.shape[0])
        state, out = jax.lax.scan(
            token, state, (x.T, jnp.broadcast_to(rows, x.T.shape), segments.T != 0)
        )
        return cache.set(1, {"h": state}), out.T
    real = jnp.arange(x.shape[1]) < batch.cu_q_lens[-1]
    state, out = jax.lax.scan(token, state, (x[0], batch.seq_of_token, real))
    return cache.set(1, {"h": state}, ragged=batch), out[None]


def recurrence(x: np.ndarray) -> np.ndarray:
    """Return the outputs of the layer for one sequence alone."""
    h, out = 0.0, []
    for value in x:
        h = 0.5 * h + value
        out.append(h)
    return np.asarray(out)


H_STATE = RecurrentSpec((StateSpec("h", ()),))


@pytest.mark.nightly
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_rows_of_a_recurrent_model(layout):
    """Left-padded prompts, then tokens: each row equals the row alone; padding changes no state."""
    x = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    segments = np.ones((3, 8), np.int32)
    segments[0, :2] = segments[2, :5] = 0
    cache: Any = HybridCache.create([H_STATE] * 2, batch_size=3, capacity=8, layout=layout)
    step = jax.jit(lambda cache, x, info: recurrent_layer(cache, x, info.q_segment_ids, None))
    outs, positions = [], []
    for now in (slice(0, 4), slice(4, 7), slice(7, 8)):
        cache, info, at = cache.begin(jnp.asarray(segments[:, now]))
        cache, out = step(cache, x[:, now], info)
        cache = cache.advance(out.shape[1])
        outs.append(out)
        positions.append(at)
    out, at = np.concatenate(outs, axis=1), np.concatenate(positions, axis=1)
    for row, kept in enumerate(segments != 0):
        np.testing.assert_allclose(out[row, kept], recurrence(x[row, kept]), rtol=1e-6)
        np.testing.assert_array_equal(at[row, kept], np.arange(kept.sum()))


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_states_are_copied_one_after_another(layout):
    """Each row contains its number; the fourth copy is not used."""
    copies = np.array([[0, 4, 2, 9], [2, 0, 3, 9]], np.int32)
    cache = RecurrentCache.create([STATE] * 2, batch_size=5, layout=layout)
    axis = 1 if layout == "stacked" else 0

    def number_rows(array):
        shape = [5 if i == axis else 1 for i in range(array.ndim)]
        return array + np.arange(5).reshape(shape).astype(array.dtype)

    copied = jax.jit(RecurrentCache.copy_rows)(jax.tree.map(number_rows, cache), copies, 3)
    for array in jax.tree.leaves(copied):
        rows = np.moveaxis(np.asarray(array, np.float32), axis, -1)
        np.testing.assert_array_equal(rows, np.broadcast_to([4, 1, 0, 0, 4], rows.shape))


@pytest.mark.daily("stacked")
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_sequences_of_a_recurrent_model(layout):
    """Sequences start, end and are preempted in mixed steps; each equals the sequence alone."""
    draw = np.random.default_rng(0)
    lengths = {"a": 9, "b": 5, "c": 7, "d": 3}
    x = {name: draw.normal(size=n).astype(np.float32) for name, n in lengths.items()}
    cache: Any = HybridCache.create_paged(
        [H_STATE] * 2, num_pages=1, page_size=4, num_states=2, layout=layout
    )
    free, slot = [0, 1], {}
    done = dict.fromkeys(x, 0)
    outs: dict[str, list[Any]] = {name: [] for name in x}
    step = jax.jit(lambda cache, x, batch: recurrent_layer(cache, x, None, batch))
    # Tokens of each sequence in a step; "-b": b is preempted, and starts anew later.
    script = ["a3 b2", "b1 a1", "-b a2 c4", "c3", "b4 a3", "b1 d2", "d1"]
    for line in script:
        parts = line.split()
        for name in (part[1:] for part in parts if part.startswith("-")):
            free.append(slot.pop(name))
            done[name], outs[name] = 0, []
        counts = {part[0]: int(part[1:]) for part in parts if not part.startswith("-")}
        for name in counts:
            slot.setdefault(name, free.pop() if name not in slot else slot[name])
        q_lens = [*counts.values(), *[0] * (3 - len(counts))]
        kv_lens = [*(done[name] + n for name, n in counts.items()), *[0] * (3 - len(counts))]
        slots = [*(slot[name] for name in counts), *[0] * (3 - len(counts))]
        flat = np.concatenate([x[name][done[name] :][:n] for name, n in counts.items()])
        batch = ragged(slots, q_lens, kv_lens, used=len(counts))
        pad = 8 - len(flat)
        batch = replace(batch, seq_of_token=jnp.pad(batch.seq_of_token, (0, pad)))
        cache, out = step(cache, jnp.pad(flat, (0, pad))[None], batch)
        at = 0
        for name, n in counts.items():
            outs[name].append(np.asarray(out)[0, at : at + n])
            done[name], at = done[name] + n, at + n
            if done[name] == lengths[name]:
                free.append(slot.pop(name))
    assert done == lengths
    for name, values in x.items():
        np.testing.assert_allclose(np.concatenate(outs[name]), recurrence(values), rtol=1e-6)
