"""The Triton kernel for attention over pages equals the reference in float64.

Without a GPU, the kernel is interpreted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import attention_cases as cases
import attention_pages as pages
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_layers.attention.kernel import Paged, Settings
from ed_layers.attention.kernels import paged_gpu
from ed_layers.attention.kernels.paged import paged_attention
from ed_layers.attention.scoring import Scoring
from ed_layers.cache.codes import Format
from ed_layers.cache.protocol import Pages
from ed_layers.cache.ragged import RaggedBatch

KERNEL = replace(
    paged_gpu.KERNELS[0],
    platform=None,
    run=partial(paged_gpu.attend_pages, interpret=jax.default_backend() != "gpu"),
)
CELLS = [
    name
    for name in cases.declared(KERNEL.mechanism)
    if not cases.CELLS[name].features & KERNEL.lacks
]
PAGE_SIZE, PADDING = 8, 3
#: Tokens of each sequence in the engine: several blocks of keys, one key, and an empty slot.
LENGTHS = (150, 1, 70, 9, 0)


@pytest.fixture
def only_kernel(monkeypatch) -> Iterator[None]:
    with cases.select_kernel(KERNEL, monkeypatch, pages.program):
        yield


def error(result: np.ndarray, expected: np.ndarray) -> float:
    """The largest error relative to the largest value."""
    return float(np.max(np.abs(result - expected)) / np.max(np.abs(expected)))


@pytest.mark.daily("soft_cap", "value_dim", "window+sinks", "alibi", "relative")
@pytest.mark.parametrize("cell", CELLS)
def test_page_kernel_equals_the_reference_in_a_mixed_step(cell: str, only_kernel) -> None:
    case = pages.case_of(cases.CELLS[cell])
    mechanism = cases.mechanism_of(KERNEL.mechanism, cases.CELLS[cell].features)
    assert error(pages.run(case, mechanism), case.run()["out"]) <= 1e-5


def test_page_kernel_reads_no_number_of_other_pages(only_kernel) -> None:
    case = pages.case_of(cases.CELLS["window"])
    mechanism = cases.mechanism_of(KERNEL.mechanism, cases.CELLS["window"].features)
    clean = pages.run(case, mechanism)
    np.testing.assert_array_equal(pages.run(case, mechanism, fill=float("nan")), clean)


@dataclass(frozen=True)
class Step:
    """A step over pages of random numbers, in the second of two layers.

    Attributes:
        dim, value_dim: k and d; None = k.
        heads, groups: h and g.
        latent: whether values are the first numbers of their keys.
        format, group_size: of quantized pages; None = numbers.
        q_lens: tokens of each sequence in this step; None = one, a step that only decodes.
        window, chunk, soft_cap, sinks: settings of the scores.
        dtype: of queries and pages.
    """

    dim: int = 64
    value_dim: int | None = None
    heads: int = 4
    groups: int = 2
    latent: bool = False
    format: str | None = None
    group_size: int | None = None
    q_lens: Sequence[int] | None = None
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    dtype: Any = jnp.float32

    def build(self, **fields: Any) -> Paged:
        """Return the call."""
        draw = np.random.default_rng(0)

        def normal(*shape: int) -> jax.Array:
            return jnp.asarray(draw.normal(size=shape), self.dtype)

        counts = -(-np.asarray(LENGTHS) // PAGE_SIZE)
        table = np.zeros((len(counts), 2 * counts.max()), np.int32)
        numbers = draw.permutation(counts.sum() + 2)
        for row, start, count in zip(table, np.cumsum(counts) - counts, counts, strict=True):
            row[:count] = numbers[start : start + count]
        q_lens = np.array([*(self.q_lens or (1,) * (len(LENGTHS) - 1)), 0])
        tokens = q_lens.sum() + PADDING
        seq = np.pad(np.repeat(np.arange(len(q_lens)), q_lens), (0, PADDING))
        ragged = RaggedBatch(
            cu_q_lens=jnp.asarray([0, *np.cumsum(q_lens)], jnp.int32),
            kv_lens=jnp.asarray(LENGTHS, jnp.int32),
            seq_of_token=jnp.asarray(seq, jnp.int32),
            slots={},
            page_table={"full": jnp.asarray(table)},
            state_slots=jnp.zeros(len(table), jnp.int32),
            num_seqs=jnp.asarray(len(LENGTHS) - 1, jnp.int32),
            decode_only=self.q_lens is None,
        )
        width = max(self.dim, self.value_dim or 0)
        pool: Any = normal(2, len(numbers), PAGE_SIZE, self.groups, 2 - self.latent, width)
        if self.format is not None:
            # Slots before numbers, as `Format.encode` has them.
            codes = Format(self.format, self.group_size).encode(jnp.moveaxis(pool, 2, 4))
            pool = replace(codes, values=jnp.moveaxis(codes.values, 4, 2))
        scoring = Scoring(
            self.dim**-0.5,
            window=self.window,
            chunk=self.chunk,
            soft_cap=self.soft_cap,
            sinks=normal(self.heads) if self.sinks else None,
        )
        arguments = {"ragged": ragged, "scoring": scoring, **fields}
        stored = Pages(pool, (1,), "full", self.value_dim)
        q = normal(tokens, self.heads, self.dim)
        return Paged(name=KERNEL.mechanism, q=q, pages=stored, **arguments)


def attend_in_float64(call: Paged) -> np.ndarray:
    """Return attention from its definition, token by token, [T, h, d]."""
    ragged, scoring, pool = call.ragged, call.scoring, call.pages.pool
    if isinstance(pool, jax.Array):
        numbers = np.asarray(pool, np.float64)[1]
    else:
        codes, scale = np.asarray(pool.values, np.float64)[1], np.asarray(pool.scale)[1]
        scale = np.moveaxis(scale, 4, 1)
        numbers = codes * np.repeat(scale, codes.shape[-1] // scale.shape[-1], axis=-1)
    q, table = np.asarray(call.q, np.float64), np.asarray(ragged.page_table["full"])
    ends, lengths = np.asarray(ragged.cu_q_lens), np.asarray(ragged.kv_lens)
    out = np.zeros((*q.shape[:2], call.value_dim))
    for token in range(ends[-1]):
        seq = int(np.searchsorted(ends[1:], token, side="right"))
        position = lengths[seq] - ends[seq + 1] + token
        later = 0 if ragged.ahead is None else int(ragged.ahead[token])
        keys = np.arange(lengths[seq])
        visible = keys <= min(position + later, lengths[seq] - 1)
        visible &= position - keys < (scoring.window or np.inf)
        if scoring.chunk:
            visible &= keys // scoring.chunk == position // scoring.chunk
        keys = keys[visible]
        stored = numbers[table[seq, keys // PAGE_SIZE], keys % PAGE_SIZE]  # [y, g, ways, k]
        stored = np.repeat(stored, q.shape[1] // stored.shape[1], axis=1)
        k, v = stored[..., 0, : q.shape[2]], stored[..., -1, : call.value_dim]
        scores = np.einsum("hk,yhk->hy", q[token], k) * scoring.scale
        if scoring.soft_cap:
            scores = scoring.soft_cap * np.tanh(scores / scoring.soft_cap)
        sinks = np.full((q.shape[1], 1), -np.inf)
        if scoring.sinks is not None:
            sinks = np.asarray(scoring.sinks, np.float64)[:, None]
        scores = np.concatenate([scores, sinks], axis=1)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[token] = np.einsum("hy,yhd->hd", weights[:, :-1], v)
    return out


def check(call: Paged, tolerance: float = 1e-5) -> None:
    """Fail unless the kernel equals the reference, and plain XLA agrees."""
    assert KERNEL.refusals(call) == []
    expected = attend_in_float64(call)
    with jax.default_matmul_precision("highest"):
        result = KERNEL.run(call)
    assert result.dtype == call.q.dtype
    assert error(np.asarray(result, np.float64), expected) <= tolerance


MIXED = (70, 1, 3, 9)
STEPS = {
    "decode": Step(),
    "decode, one key head": Step(groups=1),
    "decode, as many key heads": Step(groups=4),
    "decode, 12 heads of 3": Step(heads=12, groups=3, dim=128),
    "decode, window": Step(window=40),
    "decode, chunk": Step(chunk=32),
    "decode, soft cap": Step(soft_cap=1.5),
    "decode, sinks": Step(sinks=True),
    "decode, window and sinks": Step(window=40, sinks=True),
    "decode, head dim 72": Step(dim=72),
    "decode, head dim 80": Step(dim=80),
    "decode, head dim 96": Step(dim=96),
    "decode, head dim 128": Step(dim=128),
    "decode, head dim 192 and 128": Step(dim=192, value_dim=128),
    "decode, head dim 256": Step(dim=256),
    "decode, latent": Step(dim=576, value_dim=512, heads=20, groups=1, latent=True),
    "decode, int8": Step(format="int8"),
    "decode, int8 by groups": Step(format="int8", group_size=16, dim=128),
    "decode, int8, latent": Step(
        dim=576, value_dim=512, heads=16, groups=1, latent=True, format="int8"
    ),
    "decode, fp8": Step(format="fp8", dim=128, sinks=True, window=40),
    "decode, bfloat16": Step(dtype=jnp.bfloat16, dim=128),
    "decode, int8, bfloat16": Step(dtype=jnp.bfloat16, dim=128, format="int8"),
    "mixed": Step(q_lens=MIXED),
    "mixed, 3 heads": Step(q_lens=MIXED, heads=6),
    "mixed, head dim 96": Step(q_lens=MIXED, dim=96),
    "mixed, head dim 256": Step(q_lens=MIXED, dim=256, window=40),
    "mixed, latent": Step(q_lens=MIXED, dim=576, value_dim=512, heads=40, groups=1, latent=True),
    "mixed, int8": Step(q_lens=MIXED, format="int8", sinks=True),
    "mixed, fp8 by groups": Step(q_lens=MIXED, format="fp8", group_size=32, soft_cap=1.5),
    "mixed, bfloat16": Step(q_lens=MIXED, dtype=jnp.bfloat16),
}


@pytest.mark.daily("decode, int8", "decode, window and sinks", "mixed, head dim 96")
@pytest.mark.parametrize("name", STEPS)
def test_page_kernel_equals_float64(name: str) -> None:
    step = STEPS[name]
    check(step.build(), 1e-5 if step.dtype == jnp.float32 else 1e-2)


@pytest.mark.parametrize("fields", [{"sinks": True}, {"window": 100}, {"format": "int8"}])
def test_page_kernel_merges_splits_of_the_keys(fields: dict[str, Any], monkeypatch) -> None:
    call = Step(**fields).build(settings=Settings(block_k=16, is_explicit=True))
    shape = paged_gpu.BlockShape.of(call, 1, interpret=True)
    assert shape.splits == 4
    check(call)
    monkeypatch.setattr(paged_gpu, "MOST_SPLITS", 1)
    check(call)


@pytest.mark.nightly
def test_page_kernel_sees_later_tokens_of_the_same_image() -> None:
    call = Step(q_lens=MIXED).build()
    ahead = np.zeros(len(call.ragged.seq_of_token), np.int32)
    ahead[20:60] = np.arange(40)[::-1]  # of the first sequence, over several blocks
    check(replace(call, ragged=replace(call.ragged, ahead=jnp.asarray(ahead))))


@pytest.mark.nightly
@pytest.mark.parametrize("format", [None, "int8"])
def test_page_kernel_divides_heads_among_devices(format: str | None) -> None:
    config = EasyDeLBaseConfig(sharding_axis_dims=(1, 1, 1, 2, 1))
    check(Step(q_lens=MIXED, sinks=True, format=format).build(config=config))


@pytest.mark.parametrize("q_lens", [None, MIXED], ids=["decode", "mixed"])
def test_page_kernel_writes_zeros_into_padding(q_lens: Sequence[int] | None) -> None:
    call = Step(q_lens=q_lens, sinks=True).build()
    result, expected = KERNEL.run(call), paged_attention(replace(call, config=None))
    np.testing.assert_array_equal(np.asarray(result)[-PADDING:], 0)
    np.testing.assert_array_equal(np.asarray(expected)[-PADDING:], 0)


@pytest.mark.parametrize(
    ("step", "fields", "words"),
    [
        (Step(dim=640), {}, "a head dim of 640"),
        (
            Step(),
            {"settings": Settings(block_q=48, is_explicit=True)},
            "blocks of (48, 64) tokens",
        ),
    ],
    ids=str,
)
def test_page_kernel_refuses_shapes_that_triton_lacks(
    step: Step, fields: dict[str, Any], words: str
) -> None:
    (reason,) = KERNEL.refusals(step.build(**fields))
    assert words in reason
