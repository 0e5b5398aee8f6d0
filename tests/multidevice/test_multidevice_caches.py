"""A cache with slots sharded over devices is written and read on the devices of the slots."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import DenseCache, Format, LayerCacheSpec
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

B, H, G, K, LAYERS, CAPACITY = 2, 4, 2, 8, 2, 32
SINKS = jnp.asarray([0.5, -1.0, 2.0, 0.0], jnp.float32)


def mesh_of(**sizes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)
    )


def cache_of(
    sharding: Any, layout: Any, format: str | None, capacity: int = CAPACITY
) -> DenseCache:
    return DenseCache.create(
        [LayerCacheSpec(G, K)] * LAYERS,
        batch_size=B,
        capacity=capacity,
        layout=layout,
        sharding=sharding,
        format=Format(format) if format else None,
    )


def step(cache: Any, q: Any, k: Any, v: Any, features: Any, layout: str) -> tuple[Any, Any]:
    cache, info, _ = cache.begin(jnp.ones(q.shape[:2], jnp.int32))

    def one(carry: Any, layer: Any) -> tuple[Any, None]:
        q, cache = carry
        out, cache = attend(
            q, k, v, info, cache=cache, layer=layer, mechanism=Mechanism(), **features
        )
        return (out, cache), None

    if layout == "stacked":
        (q, cache), _ = jax.lax.scan(one, (q, cache), jnp.arange(LAYERS))
    else:
        for layer in range(LAYERS):
            (q, cache), _ = one((q, cache), layer)
    return q, cache.advance(q.shape[1])


def inputs(n: int) -> list[Any]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=(B, n, x, K)).astype(np.float32) for x in (H, G, G)]


CASES = [
    ("stacked", None, {"fsdp": 2, "tp": 2, "sp": 2}, {"window": 9}),
    ("leaves", "int8", {"fsdp": 1, "tp": 2, "sp": 4}, {"sinks": SINKS, "soft_cap": 2.0}),
    pytest.param("leaves", None, {"fsdp": 2, "tp": 1, "sp": 4}, {}, marks=pytest.mark.nightly),
    pytest.param(
        *("stacked", "fp8", {"fsdp": 1, "tp": 1, "sp": 8}, {"chunk": 8}), marks=pytest.mark.nightly
    ),
]


@pytest.mark.daily("stacked-None-sizes0-features0")
@pytest.mark.parametrize(("layout", "format", "sizes", "features"), CASES)
def test_sharded_cache_slots_match_one_device(layout, format, sizes, features):
    """Write a prompt over several shards and across an edge, and single tokens next to edges."""
    mesh = mesh_of(**sizes)
    qkv = inputs(21)

    def outputs(sharding: Any) -> list[np.ndarray]:
        cache, outs, at = cache_of(sharding, layout, format), [], 0
        run = jax.jit(partial(step, features=features, layout=layout), donate_argnums=0)
        for n in (13, 1, 1, 1, 1, 4):
            out, cache = run(cache, *(x[:, at : at + n] for x in qkv))
            outs.append(np.asarray(out))
            at += n
        return outs

    split = NamedSharding(mesh, P("fsdp", "tp", "sp", None))
    for found, expected in zip(outputs(split), outputs(None), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("layout", "format", "slots"),
    [
        ("stacked", "int8", "sp"),
        ("stacked", None, None),
        ("leaves", "int8", None),
        pytest.param("stacked", None, "sp", marks=pytest.mark.nightly),
        pytest.param("leaves", None, "sp", marks=pytest.mark.nightly),
        pytest.param("leaves", "int8", "sp", marks=pytest.mark.nightly),
    ],
)
def test_decode_step_communicates_only_sums_and_copies_no_cache(layout, format, slots):
    """Rows and heads are on several devices; slots are sharded or not."""
    sharding = NamedSharding(mesh_of(fsdp=2, tp=2, sp=2), P("fsdp", "tp", slots, None))
    cache = cache_of(sharding, layout, format, capacity=2048)
    run = jax.jit(partial(step, features={}, layout=layout), donate_argnums=0)
    rows = NamedSharding(sharding.mesh, P("fsdp", None, "tp"))
    token = [jax.device_put(x, rows) for x in inputs(1)]
    compiled = run.lower(cache, *token).compile()
    text = compiled.as_text() or ""
    sent = {
        name: [
            int(np.prod([int(n) for n in dims.split(",") if n]))
            for dims in re.findall(rf"= \(?\w+\[([\d,]*)\]\S* {name}(?:-start)?\(", text)
        ]
        for name in ("all-gather", "all-to-all", "collective-permute", "all-reduce")
    }
    if slots:
        assert sent["all-reduce"], "softmax sums are merged"
    assert max((n for sizes in sent.values() for n in sizes), default=0) <= H * K, sent
    assert not sent["all-to-all"]
    stored = jax.tree.leaves((cache.keys, cache.values))
    shapes = {",".join(map(str, x.addressable_shards[0].data.shape)) for x in stored}
    copied = re.findall(r"= \(?\w+\[([\d,]+)\]\S* copy(?:-start)?\(", text)
    assert not [shape for shape in copied if shape in shapes]
    held = sum(x.addressable_shards[0].data.nbytes for x in stored)
    memory: Any = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= held


def test_every_device_stores_its_cache_shard():
    sharding = NamedSharding(mesh_of(fsdp=2, tp=2, sp=2), P("fsdp", "tp", "sp", None))
    cache: Any = cache_of(sharding, "stacked", "int8")
    assert cache.keys.values.addressable_shards[0].data.shape == (LAYERS, 1, 1, CAPACITY // 2, K)
    assert cache.keys.scale.addressable_shards[0].data.shape == (LAYERS, 1, 1, 1, CAPACITY // 2)


def test_bias_and_padding_work_with_sharded_slots():
    sharding = NamedSharding(mesh_of(fsdp=2, tp=2, sp=2), P("fsdp", "tp", "sp", None))
    q, k, v = inputs(6)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=(1, H, 6, CAPACITY)), jnp.float32)
    padded = jnp.asarray([[0, 0, 1, 1, 1, 1], [1] * 6])

    def out(sharding: Any) -> np.ndarray:
        cache, info, _ = cache_of(sharding, "leaves", None).begin(padded)
        assert isinstance(info, MaskInfo)
        run = jax.jit(
            lambda cache, info: attend(
                q, k, v, info, cache=cache, layer=0, bias=bias, mechanism=Mechanism()
            )[0]
        )
        return np.asarray(run(cache, info))

    np.testing.assert_allclose(out(sharding), out(None), atol=1e-5)
