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
    Cache,
    ContiguousCache,
    CrossCache,
    DenseCache,
    Format,
    HybridCache,
    LayerCacheSpec,
    PagedCache,
    RaggedBatch,
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
def test_latents_are_stored_once(window, layout, format, mechanism):
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


@pytest.mark.parametrize("format", [None, Format("int8")])
def test_pages_of_latents(format):
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


def test_latents_that_cannot_be():
    with pytest.raises(ValueError, match="value_dim=16 is more than the head_dim=12"):
        LayerCacheSpec(1, 12, value_dim=16, values_in_keys=True)
    for create in (HybridCache.create, HybridCache.create_paged):
        sizes: Any = {"batch_size": 1, "capacity": 4}
        if create == HybridCache.create_paged:
            sizes = {"num_pages": 1, "page_size": 4}
        with pytest.raises(ConfigError, match="group_size 6 does not divide the 8 numbers"):
            create([LATENT], **sizes, format=Format("int8", 6))


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
    """What the layer gives for one sequence alone."""
    h, out = 0.0, []
    for value in x:
        h = 0.5 * h + value
        out.append(h)
    return np.asarray(out)


H_STATE = RecurrentSpec((StateSpec("h", ()),))


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_rows_of_a_recurrent_model(layout):
    """Left-padded prompts, then tokens: each row as it is alone; padding moves no state."""
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
def test_sequences_of_a_recurrent_model(layout):
    """Sequences come, go, and are preempted; each step some of them, and each as it is alone."""
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
