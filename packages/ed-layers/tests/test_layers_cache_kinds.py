"""Caches of encoders, of recurrent layers, and of layers that differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import cache_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import BOUNDS, Engine, G, K, ragged, sequence, whole
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import (
    Cache,
    ContiguousCache,
    CrossCache,
    DenseCache,
    Format,
    HybridCache,
    LayerCacheSpec,
    PagedCache,
    RecurrentCache,
    RecurrentSpec,
    StateCache,
    StateSpec,
    WindowCache,
)

FULL, NEAR = LayerCacheSpec(G, K), LayerCacheSpec(G, K, window=4)
CROSS = LayerCacheSpec(G, K, group="cross")
STATE = RecurrentSpec((StateSpec("conv", (3, 2)), StateSpec("ssm", (4,), "bfloat16")))
VANILLA, DECODE = Mechanism(), Mechanism(decode="autoregressive_decodeattn")


@pytest.mark.nightly
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


@pytest.mark.nightly
def test_periods_of_a_scan_find_their_layers():
    """Two windowed layers and a full one, three times: scanned as unrolled, token by token."""
    specs = [NEAR, NEAR, FULL] * 2
    qkv = sequence(9)

    def layers(cache: Any, q: Any, k: Any, v: Any, info: Any, first: Any) -> tuple[Any, Any]:
        outs = []
        for slot, spec in enumerate(specs[:3]):
            options: Any = {"group": spec.group, "window": spec.window, "mechanism": VANILLA}
            # Each layer has different keys, so that a wrong index would be visible.
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


@pytest.mark.nightly
def test_paged_cache_reads_separate_tables_per_group():
    """Windowed layers with a separate pool and table, and a step with one table."""
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


def test_invalid_cache_groups_raise_error():
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
    with pytest.raises(ConfigError, match="encoder: give the paged cache num_states"):
        HybridCache.create_paged([(FULL, CROSS)], num_pages=1, page_size=4)


@pytest.mark.nightly
def test_a_mixed_engine_step_of_windowed_layers():
    """A pool of one group that is not called "full", driven by a table that is."""
    engine = Engine([9, 12], pages=8, spec=LayerCacheSpec(G, K, window=6), window=6)
    for counts in ([9, 1], [0, 10], [0, 1]):
        engine.step(counts, padded_to=16)
    assert max(engine.close(i) for i in range(2)) <= BOUNDS[None]


def test_every_cache_keeps_its_protocol():
    """What layers and models call is there."""
    sizes: Any = {"batch_size": 1, "capacity": 8}
    mixed = HybridCache.create([NEAR, FULL, STATE], **sizes)
    states = RecurrentCache.create([STATE], batch_size=1)
    pages = PagedCache.create([FULL], num_pages=1, page_size=4)
    rows: list[ContiguousCache] = [
        DenseCache.create([FULL], **sizes),
        WindowCache.create([NEAR], **sizes),
        mixed,
    ]
    caches: list[Cache] = [*rows, CrossCache.create([CROSS], **sizes), pages]
    recurrent: list[StateCache] = [mixed, states]
    expected: list[tuple[Any, type]] = [
        *((cache, ContiguousCache) for cache in rows),
        *((cache, Cache) for cache in caches),
        *((cache, StateCache) for cache in recurrent),
    ]
    for cache, protocol in expected:
        names = {name for kind in protocol.__mro__ for name in vars(kind) if name[0] != "_"}
        assert names >= {"update"} or names == {"get", "set"}
        assert not [name for name in names if not hasattr(cache, name)]


# Values that are part of their keys: multi-head latent attention.

LATENT = LayerCacheSpec(1, 12, value_dim=8, values_in_keys=True)


def latent(n: int) -> list[np.ndarray]:
    """q, k and v of one row, where v is the first 8 of the 12 numbers of k."""
    draw = np.random.default_rng(0)
    q, k = (draw.normal(size=(1, n, heads, 12)).astype(np.float32) for heads in (4, 1))
    return [q, k, k[..., :8]]


@pytest.mark.nightly
@pytest.mark.parametrize("mechanism", [VANILLA, DECODE], ids=["vanilla", "decode"])
@pytest.mark.parametrize(
    ("window", "layout", "format"),
    [
        (None, "stacked", None),
        (None, "leaves", Format("int8", 4)),
        (4, "leaves", None),
        (4, "stacked", Format("int8")),
    ],
)
def test_latent_cache_stores_keys_once(window, layout, format, mechanism):
    qkv = latent(9)
    spec = replace(LATENT, window=window, group="window" if window else "full")
    options: Any = {"batch_size": 1, "capacity": 11, "layout": layout, "format": format}
    cache: Any = HybridCache.create([spec] * 2, **options).simplest()
    numbers = sum(x.size for x in jax.tree.leaves(cache.keys) if x.shape[-1] == 12)
    assert numbers == 2 * 12 * (window or 11)
    assert cache.values is None
    out = cases.in_steps(cache, qkv, [4, 1, 1, 3], mechanism=mechanism, window=window)
    bound = BOUNDS["int8" if format else None]
    assert cases.error(out, whole(qkv, window=window)) <= bound
    kv: Any = (qkv[1][:, :1], None)
    cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
    assert cache.update(0, kv, mask_info=info)[1].v.shape[-1] == 8, "a layer need not give values"


@pytest.mark.nightly
@pytest.mark.parametrize("format", [None, Format("int8"), Format("int8", 6)])
def test_paged_latent_cache_stores_no_values(format):
    qkv: list[Any] = latent(6)
    cache = PagedCache.create([LATENT], num_pages=2, page_size=4, format=format)
    pages: Any = cache.pages
    assert pages.shape == (1, 2, 4, 1, 1, 12), "no page for values"
    batch = replace(
        ragged([0], [6], [6], used=1),
        slots={"full": jnp.asarray([4, 5, 6, 7, 0, 1])},
        page_table={"full": jnp.asarray([[1, 0]])},
    )
    out, _ = attend(*qkv, None, cache=cache, ragged=batch, mechanism=VANILLA)
    assert cases.error(out, whole(qkv)) <= BOUNDS["int8" if format else None]


def test_invalid_latent_cache_options_raise_error():
    with pytest.raises(ValueError, match="value_dim=16 is more than the head_dim=12"):
        LayerCacheSpec(1, 12, value_dim=16, values_in_keys=True)
    for create in (HybridCache.create, HybridCache.create_paged):
        sizes: Any = {"batch_size": 1, "capacity": 4}
        if create == HybridCache.create_paged:
            sizes = {"num_pages": 1, "page_size": 4}
        cache = create([LATENT], **sizes, format=Format("int8", 6))  # 6 does not divide 8
        whole = create([LATENT], **sizes, format=Format("int8"))
        shapes = [jax.tree.map(jnp.shape, jax.tree.leaves(each)) for each in (cache, whole)]
        assert shapes[0] == shapes[1], "one scale per head"
