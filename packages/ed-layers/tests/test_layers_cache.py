"""Dense and paged caches give what attention over the whole sequence gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import DenseCache, LayerCacheSpec, PagedCache, RaggedBatch

H, G, K, LAYERS, PAGE = 4, 2, 8, 3, 4
MECHANISM = Mechanism()
SPECS = [LayerCacheSpec(G, K)] * LAYERS
rng = np.random.default_rng(0)


def sequence(length):
    shapes = [(1, length, H, K), (1, length, G, K), (1, length, G, K)]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def whole(qkv, **features):
    info = MaskInfo.full(1, qkv[0].shape[1])
    return attend(*qkv, info, mechanism=MECHANISM, **features)[0]


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize("steps", [[1] * 9, [4, 1, 1, 3], [9]])
def test_dense_in_steps_equals_at_once(layout, steps):
    qkv = sequence(9)
    cache = DenseCache.create(SPECS, batch_size=1, capacity=12, layout=layout)
    outs, at = [], 0
    for n in steps:
        cache, info, positions = cache.begin(jnp.ones((1, n), jnp.int32))
        np.testing.assert_array_equal(positions[0], np.arange(at, at + n))
        part = [x[:, at : at + n] for x in qkv]
        out, cache = attend(*part, info, cache=cache, layer=1, mechanism=MECHANISM)
        cache, at = cache.advance(n), at + n
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), whole(qkv), atol=1e-6)


def test_left_padding_counts_no_position_and_gets_no_attention():
    qkv = sequence(6)
    cache = DenseCache.create(SPECS, batch_size=1, capacity=8)
    cache, info, positions = cache.begin(jnp.asarray([[0, 0, 1, 1, 1, 1]]))
    out, _ = attend(*qkv, info, cache=cache, layer=0, mechanism=MECHANISM)
    np.testing.assert_array_equal(positions, [[0, 0, 0, 1, 2, 3]])
    np.testing.assert_allclose(out[:, 2:], whole([x[:, 2:] for x in qkv]), atol=1e-6)


class Pages:
    """A hand-driven engine: random pages, any mix of prefill chunks and single tokens."""

    def __init__(self, lengths, layout, pages=40, slots=6):
        self.sequences = [sequence(n) for n in lengths]
        self.done = [0] * len(lengths)
        self.cache = PagedCache.create(SPECS, num_pages=pages, page_size=PAGE, layout=layout)
        free = list(rng.permutation(pages))
        self.table = [[free.pop() for _ in range(-(-n // PAGE))] for n in lengths]
        self.slots, self.width = slots, max(len(t) for t in self.table) + 1

    def step(self, counts, padded_to, **features):
        """Run `counts[i]` tokens of sequence i; return each one's attention output."""
        active = [i for i, n in enumerate(counts) if n]
        table = np.zeros((self.slots, self.width), np.int32)
        kv_lens = np.zeros(self.slots, np.int32)
        cu, seq_of, slots, parts = [0], [], [], []
        for row, i in enumerate(active):
            first, n = self.done[i], counts[i]
            table[row, : len(self.table[i])] = self.table[i]
            kv_lens[row] = first + n
            cu.append(cu[-1] + n)
            seq_of += [row] * n
            slots += [self.table[i][p // PAGE] * PAGE + p % PAGE for p in range(first, first + n)]
            parts.append([x[:, first : first + n] for x in self.sequences[i]])
        pad = padded_to - cu[-1]
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray(cu + [cu[-1]] * (self.slots + 1 - len(cu)), jnp.int32),
            kv_lens=jnp.asarray(kv_lens),
            seq_of_token=jnp.asarray(seq_of + [0] * pad, jnp.int32),
            slots={"full": jnp.asarray(slots + [10**6] * pad, jnp.int32)},
            page_table={"full": jnp.asarray(table)},
            state_slots=jnp.zeros(self.slots, jnp.int32),
            num_seqs=jnp.asarray(len(active), jnp.int32),
        )
        positions = np.asarray(ragged.positions())[0]
        flat = [jnp.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        flat = [jnp.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in flat]
        out, self.cache = attend(
            *flat, None, cache=self.cache, layer=2, ragged=ragged, mechanism=MECHANISM, **features
        )
        results = {}
        for row, i in enumerate(active):
            results[i] = out[:, cu[row] : cu[row + 1]]
            expected = np.arange(self.done[i], self.done[i] + counts[i])
            np.testing.assert_array_equal(positions[cu[row] : cu[row + 1]], expected)
            self.done[i] += counts[i]
        return results


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
@pytest.mark.parametrize(
    "features", [{}, {"window": 5}, {"chunk": 6}, {"soft_cap": 1.5}], ids=lambda f: str([*f])
)
def test_pages_in_mixed_steps_equal_at_once(layout, features):
    engine = Pages([13, 150, 3, 9], layout, pages=60)
    outs = {i: [] for i in range(4)}
    schedule = [
        [5, 0, 0, 1],
        [1, 140, 3, 1],
        [1, 1, 0, 1],
        [6, 9, 0, 6],
    ]
    for counts in schedule:
        for i, out in engine.step(counts, padded_to=160, **features).items():
            outs[i].append(out)
    for i, qkv in enumerate(engine.sequences):
        np.testing.assert_allclose(
            jnp.concatenate(outs[i], axis=1), whole(qkv, **features), atol=2e-6
        )


def test_padding_tokens_write_nothing():
    engine = Pages([4], "stacked")
    engine.step([4], padded_to=16)
    assert np.count_nonzero(np.asarray(engine.cache.pages).any((0, 3, 4, 5))) == 4
    assert not np.asarray(engine.cache.pages)[:2].any(), "only layer 2 was written"


def test_a_scanned_model_cannot_take_an_unrolled_cache():
    cache = DenseCache.create(SPECS, batch_size=1, capacity=4, layout="leaves")
    kv = sequence(1)
    cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))
    with pytest.raises(TypeError, match="init_cache"):
        jax.jit(lambda layer: attend(*kv, info, cache=cache, layer=layer, mechanism=MECHANISM))(0)


@pytest.mark.parametrize("layout", ["stacked", "leaves"])
def test_a_decode_step_writes_in_place(layout):
    """A donated step over all layers allocates no second cache: scanned, and unrolled."""
    specs = SPECS * 8

    def step(cache, q, k, v):
        cache, info, _ = cache.begin(jnp.ones((1, 1), jnp.int32))

        def one(carry, layer):
            q, cache = carry
            return attend(q, k, v, info, cache=cache, layer=layer, mechanism=MECHANISM), None

        if layout == "stacked":
            (q, cache), _ = jax.lax.scan(one, (q, cache), jnp.arange(len(specs)))
        else:
            for layer in range(len(specs)):
                (q, cache), _ = one((q, cache), layer)
        return q, cache.advance(1)

    cache = DenseCache.create(specs, batch_size=1, capacity=4096, layout=layout)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, *sequence(1)).compile()
    memory = compiled.memory_analysis()
    cache_bytes = sum(x.nbytes for x in jax.tree.leaves((cache.keys, cache.values)))
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes / 4
