"""Caches of encoders, of recurrent layers, and of layers that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cache_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import BOUNDS, Engine, G, K, sequence, whole
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import (
    Format,
    HybridCache,
    LayerCacheSpec,
    RaggedBatch,
    RecurrentSpec,
    StateSpec,
    WindowCache,
)
from ed_layers.cache.recurrent import RecurrentCache

FULL, NEAR = LayerCacheSpec(G, K), LayerCacheSpec(G, K, window=4)
CROSS = LayerCacheSpec(G, K, group="cross")
STATE = RecurrentSpec((StateSpec("conv", (3, 2)), StateSpec("ssm", (4,), "bfloat16")))
VANILLA, DECODE = Mechanism(), Mechanism(decode="autoregressive_decodeattn")


@pytest.mark.parametrize(
    ("mechanism", "format"), [(VANILLA, None), (DECODE, None), (VANILLA, "int8")]
)
def test_an_encoder_is_written_once_and_then_read(mechanism, format):
    """Two encoders, one shorter; the decoder reads them token by token, in no order."""
    spoken = sequence(5)[0]
    _, k, v = sequence(7)
    cache: Any = HybridCache.create(
        [(FULL, CROSS)],
        batch_size=1,
        capacity=8,
        cross_capacity=9,
        layout="leaves",
        format=Format(format) if format else None,
    )
    encoder = jnp.asarray([[1, 1, 1, 1, 1, 0, 0]])
    outs: list[Any] = []
    for i in range(5):
        cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
        kv: Any = (None, None)
        if i == 0:
            kv = k, v
            info = replace(info, kv_segment_ids=encoder, kv_index=jnp.zeros_like(encoder))
        options: Any = {"cache": cache, "group": "cross", "mechanism": mechanism}
        out, cache = attend(spoken[:, i : i + 1], *kv, info, **options)
        outs.append(out)
        cache = cache.advance(1)
    expected = whole([spoken, k[:, :5], v[:, :5]], causal=False)
    assert cases.error(jnp.concatenate(outs, axis=1), expected) <= BOUNDS[format]
    long: Any = sequence(10)
    info = MaskInfo.full(1, 10)
    with pytest.raises(ValueError, match="10 positions do not fit into a cache for 9"):
        attend(*long, info, cache=cache, group="cross", mechanism=VANILLA)


def test_states_of_rows():
    cache = RecurrentCache.create([STATE] * 2, batch_size=3)
    new = {"conv": jnp.ones((3, 3, 2)), "ssm": jnp.full((3, 4), 2.0)}
    cache = jax.jit(lambda cache, layer: cache.set(layer, new))(cache, jnp.int32(1))
    assert not np.asarray(cache.get(0)["conv"]).any()
    found = cache.get(1)
    np.testing.assert_array_equal(found["conv"], new["conv"])
    assert found["ssm"].dtype == jnp.bfloat16
    with pytest.raises(ValueError, match=r"keeps the states \['conv', 'ssm'\]"):
        cache.set(0, {"conv": new["conv"]})


def ragged(state_slots: list[int], q_lens: list[int], kv_lens: list[int], used: int) -> RaggedBatch:
    ints: Any = lambda x: jnp.asarray(x, jnp.int32)  # noqa: E731
    return RaggedBatch(
        cu_q_lens=ints(np.cumsum([0, *q_lens])),
        kv_lens=ints(kv_lens),
        seq_of_token=ints(np.repeat(np.arange(len(q_lens)), q_lens)),
        slots={"full": ints(np.zeros(sum(q_lens)))},
        page_table={"full": ints(np.zeros((len(q_lens), 1)))},
        state_slots=ints(state_slots),
        num_seqs=ints(used),
    )


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_states_of_sequences(layout):
    """Sequences lease states: one that begins gets zeros, and unused places touch nobody's."""
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


def test_periods_of_a_scan_find_their_layers():
    """Two windowed layers and a full one, three times: scanned as unrolled, token by token."""
    specs = [NEAR, NEAR, FULL] * 2
    qkv = sequence(9)

    def layers(cache: Any, q: Any, k: Any, v: Any, info: Any, first: Any) -> tuple[Any, Any]:
        outs = []
        for slot, spec in enumerate(specs[:3]):
            options: Any = {"group": spec.group, "window": spec.window, "mechanism": VANILLA}
            # Each layer has keys of its own, so that a mistaken index would be seen.
            scale = 1 + first + slot
            out, cache = attend(q, k / scale, v, info, cache=cache, layer=first + slot, **options)
            outs.append(out)
        return cache, jnp.stack(outs)

    def scanned(cache: Any, *args: Any) -> tuple[Any, Any]:
        cache, outs = jax.lax.scan(
            lambda cache, first: layers(cache, *args, first), cache, jnp.arange(0, 6, 3)
        )
        return cache, outs.reshape(6, *outs.shape[2:])

    def unrolled(cache: Any, *args: Any) -> tuple[Any, Any]:
        outs = []
        for first in (0, 3):
            cache, out = layers(cache, *args, first)
            outs.append(out)
        return cache, jnp.concatenate(outs)

    found = []
    runs: list[tuple[Any, Any]] = [("stacked", scanned), ("leaves", unrolled)]
    for layout, run in runs:
        cache: Any = HybridCache.create(specs, batch_size=1, capacity=12, layout=layout)
        assert (cache.layout, cache.capacity) == (layout, 12)
        assert isinstance(cache.caches["window"], WindowCache)
        step = jax.jit(run)
        outs, at = [], 0
        for n in (4, 1, 4):
            cache, info, positions = cache.begin(jnp.ones((1, n), jnp.int32))
            np.testing.assert_array_equal(positions[0], np.arange(at, at + n))
            cache, out = step(cache, *(x[:, at : at + n] for x in qkv), info)
            cache, at = cache.advance(n), at + n
            outs.append(out)
        found.append(jnp.concatenate(outs, axis=2))
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)
    for layer, spec in enumerate(specs):
        expected = whole([qkv[0], qkv[1] / (1 + layer), qkv[2]], window=spec.window)
        assert cases.error(found[0][layer], expected) <= BOUNDS[None]


def test_pages_of_two_groups():
    """Windowed layers with a pool and a table of their own, and a step that has one table."""
    qkv: list[Any] = sequence(6)
    cache: Any = HybridCache.create_paged(
        [NEAR, FULL], num_pages={"window": 2, "full": 3}, page_size=4
    )
    own = {
        "slots": {"full": jnp.arange(8, 14), "window": jnp.arange(0, 6)},
        "page_table": {"full": jnp.asarray([[2, 0]]), "window": jnp.asarray([[0, 1]])},
    }
    own["slots"]["full"] = jnp.asarray([8, 9, 10, 11, 0, 1])
    shared = {name: {"full": table["full"] % 8} for name, table in own.items()}
    shared["page_table"]["full"] = jnp.asarray([[0, 1]])
    shared["slots"]["full"] = jnp.arange(6)
    for tables in (own, shared):
        batch = replace(ragged([0], [6], [6], used=1), **tables)
        for layer, spec in enumerate((NEAR, FULL)):
            options: Any = {"group": spec.group, "window": spec.window, "mechanism": VANILLA}
            out, _ = attend(*qkv, None, cache=cache, layer=layer, ragged=batch, **options)
            assert cases.error(out, whole(qkv, window=spec.window)) <= BOUNDS[None]


def test_what_is_wrong_is_said():
    options: Any = {"batch_size": 1, "capacity": 4}
    cache: Any = HybridCache.create([NEAR, FULL], **options, layout="leaves")
    kv: list[Any] = sequence(1)
    cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
    with pytest.raises(ValueError, match="layer 0 keeps nothing in group 'full', but in window"):
        attend(*kv, info, cache=cache, layer=0, mechanism=VANILLA)
    with pytest.raises(ValueError, match="no group 'cross'"):
        attend(*kv, info, cache=cache, group="cross", mechanism=VANILLA)
    with pytest.raises(ValueError, match="layers of group 'window' differ"):
        HybridCache.create([NEAR, replace(NEAR, window=8)], **options)
    with pytest.raises(ValueError, match="two specs of group 'full'"):
        HybridCache.create([(FULL, FULL)], **options)
    with pytest.raises(ConfigError, match="cross_capacity"):
        HybridCache.create([(FULL, CROSS)], **options)
    with pytest.raises(ConfigError, match="num_states"):
        HybridCache.create_paged([FULL, STATE], num_pages=1, page_size=4)
    with pytest.raises(ConfigError, match="cross-attention"):
        HybridCache.create_paged([(FULL, CROSS)], num_pages=1, page_size=4)


@pytest.mark.nightly
def test_a_mixed_engine_step_of_windowed_layers():
    """A pool of one group that is not called "full", driven by a table that is."""
    engine = Engine([9, 12], pages=8, spec=LayerCacheSpec(G, K, window=6), window=6)
    for counts in ([9, 1], [0, 10], [0, 1]):
        engine.step(counts, padded_to=16)
    assert max(engine.close(i) for i in range(2)) <= BOUNDS[None]
