"""What caches are tested with: random sequences, attention over all of one, and a small engine.

Legend: n tokens, s tokens of a step, h heads, g kv heads, k head dim.
"""

from __future__ import annotations

from functools import partial
from itertools import count as counting
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_reference import Case, Mask
from attention_reference import error as error
from ed_layers.attention import Mechanism, attend
from ed_layers.cache import Format, LayerCacheSpec, PagedCache, RaggedBatch
from ed_layers.cache.codes import decode_numbers

H, G, K, LAYERS, PAGE = 4, 2, 8, 3, 4
SPECS = [LayerCacheSpec(G, K)] * LAYERS
VANILLA = Mechanism()
SINKS = np.asarray([0.5, -1.0, 2.0, 0.0], np.float32)

# Largest error of attention over quantized numbers, relative to its largest value.
BOUNDS = {None: 2e-6, "int8": 0.02, "fp8": 0.08}


def sequence(n: int, value_dim: int = K, *, seed: int = 0) -> list[np.ndarray]:
    """q, k and v of one row: [1, n, h, k], [1, n, g, k], [1, n, g, d]. A test's data is its own:
    the same whichever tests ran before."""
    draw = np.random.default_rng(seed)
    shapes = [(1, n, H, K), (1, n, G, K), (1, n, G, value_dim)]
    return [draw.normal(size=shape).astype(np.float32) for shape in shapes]


def whole(qkv: list[np.ndarray], *, causal: bool = True, **features: Any) -> np.ndarray:
    """Attention over a whole row, in float64; features as in `Case`."""
    mask = Mask.packed(np.ones(qkv[0].shape[:2], int), causal)
    return Case(*qkv, mask, **features).run()["out"]


@partial(jax.jit, static_argnames=("mechanism", "group", "window", "chunk", "layer"))
def step(
    cache: Any,
    q: Any,
    k: Any,
    v: Any,
    segments: Any,
    *,
    mechanism: Any,
    group: str,
    window: int | None,
    chunk: int | None,
    layer: int = 1,
) -> tuple[Any, Any]:
    """One step of a contiguous cache through one layer: the cache, and its output and positions."""
    cache, info, positions = cache.begin(segments)
    limits: Any = {"window": window, "chunk": chunk}
    out, cache = attend(
        q, k, v, info, cache=cache, layer=layer, group=group, mechanism=mechanism, **limits
    )
    return cache.advance(q.shape[1]), (out, positions)


def in_steps(
    cache: Any,
    qkv: list[np.ndarray],
    steps: list[int],
    *,
    segments: np.ndarray | None = None,
    mechanism: Mechanism,
    group: str = "full",
    window: int | None = None,
    chunk: int | None = None,
) -> np.ndarray:
    """Attention of a row (or several), some tokens at a time, through a contiguous cache."""
    rows, n = qkv[0].shape[:2]
    segments = np.ones((rows, n), np.int32) if segments is None else segments
    outs, at = [], 0
    for count in steps:
        now = slice(at, at + count)
        parts = (x[:, now] for x in (*qkv, segments))
        options = {"mechanism": mechanism, "group": group, "window": window, "chunk": chunk}
        cache, (out, _) = step(cache, *parts, **options)
        outs.append(np.asarray(out))
        at += count
    return np.concatenate(outs, axis=1)


class Engine:
    """A hand-driven engine: random pages, any mix of prefill chunks and single tokens."""

    def __init__(
        self,
        lengths: list[int],
        layout: Any = "stacked",
        *,
        pages: int,
        slots: int = 6,
        format: str | None = None,
        spec: LayerCacheSpec = SPECS[0],
        mechanism: Mechanism = VANILLA,
        **features: Any,
    ):
        self.seeds = counting()
        self.sequences = [sequence(n, spec.values, seed=next(self.seeds)) for n in lengths]
        self.done = [0] * len(lengths)
        self.outs: list[list[np.ndarray]] = [[] for _ in lengths]
        self.cache = PagedCache.create(
            [spec] * LAYERS,
            num_pages=pages,
            page_size=PAGE,
            layout=layout,
            format=Format(format) if format else None,
        )
        self.free = list(np.random.default_rng(0).permutation(pages))
        self.table = [self.take(n) for n in lengths]
        self.slots, self.width = slots, max(len(t) for t in self.table) + 1
        self.features = features

        @jax.jit
        def attention(cache: Any, q: Any, k: Any, v: Any, ragged: RaggedBatch) -> Any:
            options: dict[str, Any] = {**features, "mechanism": mechanism}
            return attend(q, k, v, None, cache=cache, layer=2, ragged=ragged, **options)

        self.attention = attention

    def take(self, tokens: int) -> list[int]:
        """Return pages for this number of tokens."""
        return [self.free.pop() for _ in range(-(-tokens // PAGE))]

    def close(self, i: int) -> float:
        """The error of a sequence that has ended; its pages are free again."""
        expected = whole(self.sequences[i], **self.features)
        assert self.done[i] == expected.shape[1]
        self.free += self.table[i]
        return error(np.concatenate(self.outs[i], axis=1), expected)

    def replace(self, i: int, length: int) -> None:
        """Replace a closed sequence by another sequence."""
        self.sequences[i] = sequence(length, seed=next(self.seeds))
        self.done[i], self.outs[i] = 0, []
        self.table[i] = self.take(length)

    def step(self, counts: list[int], padded_to: int) -> None:
        """Run `counts[i]` tokens of sequence i."""
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
        flat = [np.concatenate(x, axis=1) for x in zip(*parts, strict=True)]
        flat = [np.pad(x, ((0, 0), (0, pad), (0, 0), (0, 0))) for x in flat]
        out, self.cache = self.attention(self.cache, *flat, ragged)
        for row, i in enumerate(active):
            self.outs[i].append(np.asarray(out)[:, cu[row] : cu[row + 1]])
            expected = np.arange(self.done[i], self.done[i] + counts[i])
            np.testing.assert_array_equal(positions[cu[row] : cu[row + 1]], expected)
            self.done[i] += counts[i]


def ragged(state_slots: list[int], q_lens: list[int], kv_lens: list[int], used: int) -> RaggedBatch:
    """A step of sequences that have state slots, without pages; `used` of them are real."""
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


def numbers(codes: Any) -> jax.Array:
    """Return the values of codes."""
    return decode_numbers(codes, jnp.float32)
