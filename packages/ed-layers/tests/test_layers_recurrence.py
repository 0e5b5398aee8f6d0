"""How recurrent layers see a batch: the same numbers whole, in chunks, packed, padded and served.

The layer is small, but has what all of them have: a convolution, and a state that decays.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import ragged
from ed_infra.masks import MaskInfo
from ed_layers.cache import HybridCache, RecurrentSpec, StateSpec
from ed_layers.context import Ctx
from ed_layers.parts import Parts
from ed_layers.recurrence.conv import ShortConv
from ed_layers.recurrence.rows import Rows
from flax import nnx

F, TAPS = 3, 4
DECAY = np.asarray([0.9, 0.5, 0.2], np.float32)
CONV = ShortConv(Parts(SimpleNamespace(initializer_range=1.0), nnx.Rngs(0)), F, TAPS, bias=True)
SPEC = RecurrentSpec((CONV.state_spec(), StateSpec("h", (F,))))


def step(h: Any, x: Any, begun: Any) -> tuple[Any, Any]:
    """`h[t] = decay * h[t - 1] + x[t]`: a sum over the tokens before; zeros would decay it, so an
    input has its own decay (1 in a place without a token)."""
    x, log_decay = x
    at = jnp.cumsum(log_decay, axis=1)
    weight = jnp.exp(at[:, :, None] - at[:, None])
    reach = jnp.tril(jnp.ones((x.shape[1],) * 2, bool))[None]
    from_state = jnp.exp(at) * h[:, None]
    if begun is not None:
        reach = reach & (begun[:, :, None] == begun[:, None])
        from_state = jnp.where((begun == 0)[..., None], from_state, 0)
    y = jnp.einsum("qtsf,qsf->qtf", jnp.where(reach[..., None], weight, 0), x) + from_state
    return y[:, -1], y


def mix(x: Any, ctx: Ctx, cache: Any, chunk: int) -> tuple[Any, Any]:
    rows = Rows.of(ctx, x.shape[:2], cache, chunk=chunk)
    states = rows.states(cache, 0, SPEC)
    u, states["conv"] = CONV(rows.enter(x), states["conv"], rows)
    decay = rows.mask_padding(jnp.broadcast_to(jnp.log(DECAY), u.shape))
    y, states["h"] = rows.scan(step, states["h"], (rows.mask_padding(u), decay))
    return rows.leave(y), rows.store(cache, 0, states, SPEC)


def alone(x: np.ndarray) -> np.ndarray:
    """Return the outputs of one sequence [n, f], token by token."""
    kernel, bias = np.asarray(CONV.kernel[...])[:, 0], np.asarray(CONV.bias[...])
    padded, h, out = np.pad(x, ((TAPS - 1, 0), (0, 0))), np.zeros(F), []
    for t in range(len(x)):
        h = DECAY * h + (padded[t : t + TAPS] * kernel).sum(axis=0) + bias
        out.append(h)
    return np.asarray(out)


def ctx_of(segments: Any, mode: Any = "train") -> Ctx:
    return Ctx(
        jnp.zeros(segments.shape, jnp.int32), {}, MaskInfo.from_segments(segments), mode=mode
    )


def near(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [4, 5, 64])
def test_packed_segments_match_separate_sequences(chunk: int) -> None:
    """Documents of a row, longer and shorter than a chunk, and padding before, between, after."""
    x = np.random.default_rng(0).normal(size=(2, 19, F)).astype(np.float32)
    segments = np.asarray(
        [[0, 0, *[1] * 9, *[2] * 1, *[3] * 2, 0, 0, *[4] * 3], [*[1] * 4, *[2] * 15]], np.int32
    )
    out, _ = jax.jit(lambda x, s: mix(x, ctx_of(s), None, chunk))(x, segments)
    for row in range(2):
        for segment in range(1, segments[row].max() + 1):
            at = segments[row] == segment
            near(np.asarray(out)[row, at], alone(x[row, at]))
    # Another document does not change a single bit.
    x[0, 2:11] += 1
    again, _ = jax.jit(lambda x, s: mix(x, ctx_of(s), None, chunk))(x, segments)
    np.testing.assert_array_equal(np.asarray(again)[0, 11:14], np.asarray(out)[0, 11:14])


@pytest.mark.nightly
def test_gradients_are_those_of_a_sequence_alone() -> None:
    x = np.random.default_rng(1).normal(size=(1, 14, F)).astype(np.float32)
    segments = np.asarray([[*[1] * 6, *[2] * 8]], np.int32)

    def loss(x: Any, segments: Any) -> Any:
        return jnp.sum(jnp.square(mix(x, ctx_of(segments), None, 4)[0]))

    got = jax.grad(loss)(x, segments)
    for at in (slice(0, 6), slice(6, 14)):
        near(got[:, at], jax.grad(loss)(x[:, at], np.ones_like(segments[:, at])))


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [4, 64])
def test_cached_rows_match_separate_sequences(chunk: int) -> None:
    """Prompts with padding anywhere, then more tokens, then one at a time."""
    x = np.random.default_rng(2).normal(size=(3, 16, F)).astype(np.float32)
    real = np.ones((3, 16), np.int32)
    real[0, :3] = real[1, 2:4] = real[1, 7] = real[2, :10] = 0
    cache: Any = HybridCache.create([SPEC], batch_size=3, capacity=16)
    parts = []
    for now in (slice(0, 9), slice(9, 14), slice(14, 15), slice(15, 16)):
        cache, info, _ = cache.begin(jnp.asarray(real[:, now]))
        ctx = replace(ctx_of(jnp.asarray(real[:, now])), mask_info=info, mode="prefill")
        out, cache = mix(x[:, now], ctx, cache, chunk)
        cache = cache.advance(out.shape[1])
        parts.append(out)
    out = np.concatenate(parts, axis=1)
    for row in range(3):
        at = real[row] != 0
        near(out[row, at], alone(x[row, at]))


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [4, 64])
def test_ragged_server_steps_match_separate_sequences(chunk: int) -> None:
    """Chunks of prompts and single tokens in one step, sequences that wait, and empty slots."""
    n, draw = 4, np.random.default_rng(3)
    x = draw.normal(size=(n, 24, F)).astype(np.float32)
    cache: Any = HybridCache.create_paged([SPEC], num_pages=1, page_size=4, num_states=n)
    done, got = np.zeros(n, int), [[] for _ in range(n)]
    for counts in ([9, 1, 4, 0], [1, 12, 1, 2], [1, 1, 0, 1], [5, 0, 11, 3]):
        done = done + counts
        batch = ragged([3, 1, 0, 2], counts, done, used=n)
        single = max(counts) == 1
        pad = 0 if single else 5
        width = sum(counts) + pad
        of_token = np.repeat([*range(n), n - 1], [*counts, pad])
        batch = replace(batch, seq_of_token=jnp.asarray(of_token, jnp.int32), decode_only=single)
        flat = [x[i, end - c : end] for i, (end, c) in enumerate(zip(done, counts, strict=True))]
        tokens = np.concatenate([*flat, np.full((pad, F), 7.0, np.float32)])[None]
        ctx = Ctx(jnp.zeros((1, width), jnp.int32), {}, ragged=batch, mode="decode")
        out, cache = mix(jnp.asarray(tokens), ctx, cache, chunk)
        ends = np.cumsum([0, *counts])
        for i in range(n):
            got[i].append(np.asarray(out)[0, ends[i] : ends[i + 1]])
    for i in range(n):
        near(np.concatenate(got[i]), alone(x[i, : done[i]]))
