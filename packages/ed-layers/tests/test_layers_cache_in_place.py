"""A compiled decode step writes into the cache that it was given, and copies none of it."""

from __future__ import annotations

import re
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import (
    DenseCache,
    Format,
    HybridCache,
    LayerCacheSpec,
    PagedCache,
    RaggedBatch,
)

H, G, K, LAYERS, CAPACITY, PAGE = 4, 2, 8, 6, 4096, 16
DECODE = Mechanism(decode="autoregressive_decodeattn")
VANILLA = Mechanism(decode="vanilla")
INT8 = Format("int8")
ONE = jnp.ones((1, 1), jnp.int32)


def make(kind: str, batch: int, layout: Any, format: Format | None) -> Any:
    """A cache of `kind`, and the group and window of its layers."""
    if kind == "paged":
        cache = PagedCache.create(
            [LayerCacheSpec(G, K)] * LAYERS,
            num_pages=CAPACITY // PAGE * batch,
            page_size=PAGE,
            layout=layout,
            format=format,
        )
        return cache, "full", None
    window = CAPACITY // 2 if kind == "window" else None
    specs = [LayerCacheSpec(G, K, window=window)] * LAYERS
    options: Any = {"batch_size": batch, "capacity": CAPACITY, "layout": layout, "format": format}
    if window:
        return HybridCache.create(specs, **options), "window", window
    return DenseCache.create(specs, **options), "full", None


def ragged(batch: int) -> RaggedBatch:
    one = jnp.arange(batch, dtype=jnp.int32)
    return RaggedBatch(
        cu_q_lens=jnp.arange(batch + 1, dtype=jnp.int32),
        kv_lens=one + 9,
        seq_of_token=one,
        slots={"full": one},
        page_table={"full": jnp.zeros((batch, CAPACITY // PAGE), jnp.int32)},
        state_slots=one,
        num_seqs=jnp.int32(batch),
        decode_only=True,
    )


def compiled_step(cache: Any, batch: int, layout: str, mechanism: Mechanism, **call: Any) -> Any:
    """One token through all layers, the cache donated: scanned, or unrolled."""
    flat = isinstance(cache, PagedCache)

    def step(cache: Any, q: Any, k: Any, v: Any, batch_info: Any) -> Any:
        info = None
        if not flat:
            cache, info, _ = cache.begin(jnp.ones((batch, 1), jnp.int32))
        inputs = {"ragged": batch_info, "mechanism": mechanism, **call}

        def one(carry: Any, layer: Any) -> Any:
            q, cache = carry
            return tuple(attend(q, k, v, info, cache=cache, layer=layer, **inputs)), None

        if layout == "stacked":
            (q, cache), _ = jax.lax.scan(one, (q, cache), jnp.arange(LAYERS))
        else:
            for layer in range(LAYERS):
                (q, cache), _ = one((q, cache), layer)
        return q, cache if flat else cache.advance(1)

    lead = (1, batch) if flat else (batch, 1)
    shapes = [(*lead, H, K), (*lead, G, K), (*lead, G, K)]
    q, k, v = (jnp.ones(shape, jnp.float32) for shape in shapes)
    batch_info = ragged(batch) if flat else None
    return jax.jit(step, donate_argnums=0).lower(cache, q, k, v, batch_info).compile()


def copies(text: Any, arrays: list[jax.Array]) -> list[str]:
    """Instructions of a compiled program that copy an array of the shape of one of the cache's."""
    shapes = {",".join(map(str, x.shape)) for x in arrays}
    found = re.findall(r"= \(?\w+\[([\d,]+)\]\S* (?:copy|copy-start)\(", text)
    return [shape for shape in found if shape in shapes]


DAILY = [
    ("dense", "stacked", 2, None),
    ("dense", "leaves", 1, INT8),
    ("window", "stacked", 1, None),
    ("window", "leaves", 2, INT8),
    ("paged", "stacked", 2, INT8),
    ("paged", "leaves", 2, None),
]
LAYOUTS: list[Any] = ["stacked", "leaves"]
ALL = list(product(["dense", "window", "paged"], LAYOUTS, [1, 4], [None, INT8]))
NIGHTLY = [pytest.param(*case, marks=pytest.mark.nightly) for case in ALL if case not in DAILY]


def check(kind: str, layout: Any, batch: int, format: Format | None) -> None:
    cache, group, window = make(kind, batch, layout, format)
    arrays = [x for x in jax.tree.leaves(cache) if x.ndim >= 4]
    held = sum(x.nbytes for x in arrays)
    for mechanism in [DECODE] if format or kind == "paged" else [VANILLA, DECODE]:
        compiled = compiled_step(cache, batch, layout, mechanism, group=group, window=window)
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= held
        assert not copies(compiled.as_text(), arrays)
        if CAPACITY < 1024:  # then it is temporary memory of another kind
            continue
        # A score matrix slices a layer's keys and values from a stack; blocks do not.
        layers = 2.5 if mechanism != DECODE else 0.5
        assert memory.temp_size_in_bytes < layers * held / LAYERS / 2, memory


@pytest.mark.daily("window-stacked-1-None")
@pytest.mark.parametrize(("kind", "layout", "batch", "format"), [*DAILY, *NIGHTLY])
def test_a_decode_step_copies_no_cache(kind, layout, batch, format):
    check(kind, layout, batch, format)


@pytest.mark.nightly
@pytest.mark.parametrize("capacity", [32, 48, 128, 256])
def test_nor_one_that_is_no_longer_than_a_block(capacity, monkeypatch):
    monkeypatch.setitem(globals(), "CAPACITY", capacity)
    for case in ALL:
        check(*case)


def test_a_copy_would_be_seen():
    cache, *_ = make("dense", 1, "leaves", None)

    def step(cache: Any) -> Any:  # not donated
        kv = jnp.ones((1, 1, G, K)), jnp.ones((1, 1, G, K))
        return cache.update(0, kv, mask_info=cache.begin(ONE)[1])[0]

    compiled = jax.jit(step).lower(cache).compile()
    assert copies(compiled.as_text(), jax.tree.leaves(cache.keys))
