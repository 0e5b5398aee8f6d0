"""Contiguous and paged caches produce the outputs of attention over the whole sequence."""

from __future__ import annotations

from typing import Any

import cache_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cache_cases import BOUNDS, LAYERS, SINKS, SPECS, Engine, G, K, sequence, whole
from ed_infra.errors import ConfigError
from ed_infra.specs import EasyDeLQuantizationConfig
from ed_layers.attention import Mechanism, attend
from ed_layers.attention.kernel import Settings
from ed_layers.cache import DenseCache, Format, HybridCache, LayerCacheSpec

VANILLA, DECODE = Mechanism(), Mechanism(decode="autoregressive_decodeattn")
STEPS = {"by_token": [1] * 14, "chunks": [4, 1, 1, 4, 4], "at_once": [14]}
WINDOW = 5


def cache_of(kind: str, layout: Any = "stacked", format: str | None = None, rows: int = 1) -> Any:
    """A cache, and how its layers call attention."""
    options: Any = {"batch_size": rows, "capacity": 16, "layout": layout}
    options["format"] = Format(format) if format else None
    if kind == "dense":
        return DenseCache.create(SPECS, **options), {}
    specs = [LayerCacheSpec(G, K, window=WINDOW)] * LAYERS
    return HybridCache.create(specs, **options), {"group": "window", "window": WINDOW}


@pytest.mark.daily("dense-leaves-vanilla")
@pytest.mark.parametrize("mechanism", [VANILLA, DECODE], ids=["vanilla", "decode"])
@pytest.mark.parametrize(("kind", "layout"), [("dense", "leaves"), ("window", "stacked")])
def test_in_steps_equals_at_once(kind, layout, mechanism):
    qkv = sequence(14)
    for steps in STEPS.values():
        cache, call = cache_of(kind, layout)
        out = cases.in_steps(cache, qkv, steps, mechanism=mechanism, **call)
        assert cases.error(out, whole(qkv, window=call.get("window"))) <= BOUNDS[None]


@pytest.mark.nightly
@pytest.mark.parametrize("format", [None, "int8"])
def test_splits_side_by_side_are_one_softmax(monkeypatch, format):
    """What accelerators compute, by the same XLA program: several splits a block, and their sum."""
    monkeypatch.setattr("ed_layers.attention.kernels.decode.get_platform", lambda config: "gpu")
    blocks = Mechanism(decode="autoregressive_decodeattn", default=Settings(4, 2))
    for window in (None, WINDOW):
        qkv = sequence(14)
        cache, _ = cache_of("dense", "leaves", format)
        out = cases.in_steps(cache, qkv, STEPS["chunks"], mechanism=blocks, window=window)
        assert cases.error(out, whole(qkv, window=window)) <= BOUNDS[format]


@pytest.mark.nightly
@pytest.mark.parametrize("mechanism", [VANILLA, DECODE], ids=["vanilla", "decode"])
@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("format", [None, "int8", "fp8"])
@pytest.mark.parametrize("kind", ["dense", "window"])
def test_any_steps_of_any_cache(kind, format, layout, mechanism):
    for seed in range(3):
        cuts = np.random.default_rng(seed).integers(1, 9, 14).cumsum()
        steps = np.diff([0, *cuts[cuts < 14], 14]).tolist()
        qkv = sequence(14)
        cache, call = cache_of(kind, layout, format)
        out = cases.in_steps(cache, qkv, steps, mechanism=mechanism, **call)
        assert cases.error(out, whole(qkv, window=call.get("window"))) <= BOUNDS[format]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "format"), [("dense", "int8"), ("window", "fp8")])
def test_quantized_cache_is_independent_of_step_sizes(kind, format, record_property):
    """The stored codes do not depend on the order of steps, and are near the numbers."""
    qkv = sequence(14)
    outs = []
    for steps in STEPS.values():
        cache, call = cache_of(kind, "leaves", format)
        outs.append(cases.in_steps(cache, qkv, steps, mechanism=VANILLA, **call))
    for out in outs[1:]:
        assert cases.error(out, outs[0]) <= BOUNDS[None]
    error = cases.error(outs[0], whole(qkv, window=call.get("window")))
    assert 1e-4 < error <= BOUNDS[format]
    record_property(
        "summary", f"{kind} cache in {format}: attention off by {error:.1e} (<= {BOUNDS[format]})"
    )


@pytest.mark.parametrize("kind", ["dense", "window"])
@pytest.mark.nightly
def test_left_padding_counts_no_position_and_gets_no_attention(kind):
    """Two rows, one padded by three tokens: each row has the outputs of the row alone."""
    long, short = sequence(12), sequence(9, seed=1)
    qkv = [
        np.concatenate([a, np.pad(b, ((0, 0), (3, 0), (0, 0), (0, 0)), constant_values=9.0)])
        for a, b in zip(long, short, strict=True)
    ]
    segments = np.ones((2, 12), np.int32)
    segments[1, :3] = 0
    cache, call = cache_of(kind, rows=2)
    steps = [7, 1, 1, 1, 1, 1]
    out = cases.in_steps(cache, qkv, steps, segments=segments, mechanism=DECODE, **call)
    window = call.get("window")
    assert cases.error(out[:1], whole(long, window=window)) <= BOUNDS[None]
    assert cases.error(out[1:, 3:], whole(short, window=window)) <= BOUNDS[None]
    assert not out[1, :3].any(), "padding sees nothing"
    _, _, positions = cache.begin(jnp.asarray(segments[:, :6]))
    np.testing.assert_array_equal(positions, [[0, 1, 2, 3, 4, 5], [0, 0, 0, 0, 1, 2]])


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("layout", "features"),
    [
        ("stacked", {}),
        ("leaves", {"window": 5}),
        ("stacked", {"chunk": 6}),
        pytest.param("leaves", {"soft_cap": 1.5}, marks=pytest.mark.nightly),
        ("stacked", {"sinks": SINKS, "window": 7}),
    ],
    ids=str,
)
def test_pages_in_mixed_steps_equal_at_once(layout, features):
    engine = Engine([13, 150, 3, 9], layout, pages=60, **features)
    for counts in ([5, 0, 0, 1], [1, 140, 3, 1], [1, 1, 0, 1], [6, 9, 0, 6]):
        engine.step(counts, padded_to=160)
    assert max(engine.close(i) for i in range(4)) <= BOUNDS[None]


@pytest.mark.parametrize("value_dim", [6, 12])
@pytest.mark.nightly
def test_values_of_another_width_in_pages(value_dim):
    engine = Engine([9, 6], pages=8, spec=LayerCacheSpec(G, K, value_dim))
    for counts in ([4, 6], [5, 0]):
        engine.step(counts, padded_to=12)
    assert max(engine.close(i) for i in range(2)) <= BOUNDS[None]


@pytest.mark.parametrize("format", [None, "int8", pytest.param("fp8", marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_freed_pages_serve_the_next_sequence(format, record_property):
    """In a full pool, a new sequence receives the pages of an earlier sequence."""
    engine = Engine([13, 30, 3], pages=13, slots=3, format=format, window=9)
    errors, following = [], {0: [9, 16, 5], 2: [4, 2, 1]}
    for counts in ([5, 12, 3], [8, 1, 0], [9, 1, 2], [0, 9, 2], [16, 0, 1], [0, 6, 1], [5, 1, 1]):
        for i in (0, 2):
            if counts[i] and engine.done[i] == engine.sequences[i][0].shape[1]:
                errors.append(engine.close(i))
                engine.replace(i, following[i].pop(0))
        engine.step(counts, padded_to=24)
    assert not any(following.values()), "all came"
    errors += [engine.close(i) for i in range(3)]
    assert max(errors) <= BOUNDS[format]
    if format:
        assert max(errors) > 1e-4, "nothing was quantized"
        text = f"pages in {format}: attention off by {max(errors):.1e} (<= {BOUNDS[format]})"
        record_property("summary", text)


def test_padding_tokens_write_no_cache_pages():
    engine = Engine([4], pages=40)
    engine.step([4], padded_to=16)
    assert np.count_nonzero(np.asarray(engine.cache.pages).any((0, 3, 4, 5))) == 4
    assert not np.asarray(engine.cache.pages)[:2].any(), "only layer 2 was written"


def test_a_scanned_model_cannot_take_an_unrolled_cache():
    cache = DenseCache.create(SPECS, batch_size=1, capacity=4, layout="leaves")
    kv: Any = sequence(1)
    cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
    with pytest.raises(TypeError, match="init_cache"):
        jax.jit(lambda layer: attend(*kv, info, cache=cache, layer=layer, mechanism=VANILLA))(0)


@pytest.mark.nightly
def test_cache_quantization_options_are_validated():
    for dtype in ("nf4", "int4", "w4a8", "w8a8", "mxfp8"):
        with pytest.raises(ConfigError, match="8-bit formats: int8, fp8"):
            Format.of(EasyDeLQuantizationConfig(dtype))
    with pytest.raises(ConfigError, match="group_size 3 does not divide the 8 numbers"):
        Format("int8", 3).groups(K)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(1, 5, G, K)), jnp.float32)
    errors = []
    for size in (None, 4, 1):
        codes = Format("int8", size).encode(x)
        assert codes.scale.shape == (1, 5, K // (size or K), G)
        errors.append(float(jnp.abs(cases.numbers(codes) - x).mean()))
    assert errors[0] > errors[1] > errors[2], "the finer, the nearer"
    zeros = Format("fp8").encode(jnp.zeros((1, 2, K)))
    assert not np.asarray(cases.numbers(zeros)).any()
