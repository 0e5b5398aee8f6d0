"""What attention is tested with: the cells of the matrix, and how each kind of mechanism is called.

How the helpers fit together: `attention_reference` computes one call and its gradients in float64
numpy (`Case.run`), from a mask of its own (`Mask`). This module makes such calls from cells, which
are sets of features that go together in a model, and runs them by `attend`: `case_of` is for
projected keys, `decode_case` for a dense cache, and `run` returns what `Case.run` returns.
`attention_pages` has the same two, `case_of` and `run`, for a step of the engine over pages.
`cache_cases` is for the tests of caches: rows and engines that go on for several steps, compared
with `whole`, the reference over the whole row. `attention_toy_kernel` has the kernels that another
package would bring.

A cell is a set of features that go together in a model. Lengths are no multiples of the blocks,
there are several blocks, rows are packed and padded, and the two rows of a batch differ.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from attention_reference import FARTHEST, Case, Mask
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_layers.attention import MECHANISMS, Mechanism, attend, kernels
from ed_layers.attention.kernel import Call, Kernel
from ed_layers.attention.scoring import Alibi, RelativeBias, compute_dropout_mask
from ed_layers.cache import DenseCache, LayerCacheSpec

BLOCK_Q, BLOCK_K = 16, 32
ALIBI = Alibi((0.5, 0.25, 0.02, 0.003), factor=0.7)
BUCKETS = 8
LENGTH, HEADS, HEAD_DIM = 77, 4, 16
SEGMENTS = np.repeat([[1, 2, 0, 3, 0], [1, 1, 2, 2, 2]], [20, 21, 3, 17, 16], axis=1)
DROPOUT = 0.3
KEY = jax.random.key(7)


@dataclass(frozen=True)
class Cell:
    """Features that a call uses, by the names of FEATURES; the model that combines them so."""

    doc: str
    bidirectional: bool = False
    cross: bool = False
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    value_dim: int | None = None
    bias: tuple[bool, bool] | None = None  # whether it differs by row, and by head
    alibi: bool = False
    relative: bool = False
    dropout: bool = False

    @property
    def features(self) -> frozenset[str]:
        """The names that are on."""
        return frozenset(n for n, x in vars(self).items() if n != "doc" and x not in (None, False))


CELLS = {
    "causal": Cell("Llama, Qwen"),
    "bidirectional": Cell("encoders: BERT, ModernBERT", bidirectional=True),
    "cross": Cell("chunked prompts: queries behind a prefix", cross=True),
    "window": Cell("Mistral", window=19),
    "chunk": Cell("Llama 4", chunk=8),
    "soft_cap": Cell("Grok", soft_cap=1.5),
    "sinks": Cell("gpt-oss, full layers", sinks=True),
    "value_dim": Cell("DeepSeek's MLA", value_dim=8),
    "bias": Cell("a bias by head", bias=(False, True)),
    "alibi": Cell("MPT", alibi=True),
    "relative": Cell("T5 decoder", relative=True),
    "dropout": Cell("GPT-2", dropout=True),
    "bidirectional+window": Cell("ModernBERT, local layers", bidirectional=True, window=19),
    "bidirectional+relative": Cell("T5 encoder", bidirectional=True, relative=True),
    "bidirectional+bias": Cell("a bias by row", bidirectional=True, bias=(True, False)),
    "bidirectional+cross": Cell("encoder-decoder", bidirectional=True, cross=True),
    "cross+window": Cell("Mistral, chunked prompts", cross=True, window=19),
    "window+soft_cap": Cell("Gemma 2", window=19, soft_cap=1.5),
    "window+sinks": Cell("gpt-oss, sliding layers", window=19, sinks=True),
    "relative+dropout": Cell("T5 in training", relative=True, dropout=True),
    "bias+dropout": Cell("a bias by row and head in training", bias=(True, True), dropout=True),
    "window+value_dim": Cell("MiMo", window=19, value_dim=24),
    "everything": Cell(
        "all but a direction",
        window=30,
        chunk=24,
        soft_cap=1.5,
        sinks=True,
        value_dim=24,
        bias=(True, True),
        alibi=True,
        dropout=True,
        cross=True,
    ),
}


def config(**fields: Any) -> EasyDeLBaseConfig:
    """A configuration with blocks smaller than the lengths here."""
    sizes = {"blocksize_q": BLOCK_Q, "blocksize_k": BLOCK_K, "sharding_axis_dims": (1, 1, 1, 1, 1)}
    return EasyDeLBaseConfig(**{**sizes, **fields})


@cache
def mechanism_of(name: str, features: frozenset[str] = frozenset(), **fields: Any) -> Mechanism:
    """The mechanism that a model resolves for these features and inputs."""
    if name == "ring":
        fields = {"sharding_axis_dims": (1, 1, 1, 1, 4), **fields}
    field = "decode_attn_mechanism" if MECHANISMS[name].reads == "cache" else "attn_mechanism"
    dropout = DROPOUT if "dropout" in features else 0.0
    return Mechanism.resolve(
        config(**{field: name}, **fields), features=features - {"dropout"}, dropout=dropout
    )


def readers(*kinds: str) -> list[str]:
    """Mechanisms that read one of these."""
    return [name for name, ability in MECHANISMS.items() if ability.reads in kinds]


def declared(name: str) -> list[str]:
    """The cells that a mechanism carries out."""
    return [cell for cell, it in CELLS.items() if it.features <= MECHANISMS[name].features]


def usual_cell(name: str) -> str:
    """The cell of a mechanism in the default run: the richest that it carries out; of `ring`, whose
    programs are large, one that is trained with."""
    rich = max(declared(name), key=lambda cell: len(CELLS[cell].features))
    return "window+soft_cap" if name == "ring" else rich


def case_of(cell: Cell, groups: int = 2, *, seed: int = 0, segments: Any = SEGMENTS) -> Case:
    """The call of a cell with random float32 numbers, which float64 represents exactly."""
    draw = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return draw.normal(size=shape).astype(np.float32)

    mask = Mask.packed(segments, causal=not cell.bidirectional)
    if cell.cross:  # the queries are the last 45 places, in which there is padding, too
        mask = last(mask, 45)
    b, s = mask.q_segments.shape
    t = mask.kv_segments.shape[1]
    rows, heads = cell.bias or (False, False)
    return Case(
        q=normal(b, s, HEADS, HEAD_DIM),
        k=normal(b, t, groups, HEAD_DIM),
        v=normal(b, t, groups, cell.value_dim or HEAD_DIM),
        mask=mask,
        window=cell.window,
        chunk=cell.chunk,
        soft_cap=cell.soft_cap,
        sinks=normal(HEADS) if cell.sinks else None,
        bias=normal(b if rows else 1, HEADS if heads else 1, s, t) if cell.bias else None,
        alibi=ALIBI if cell.alibi else None,
        relative=normal(BUCKETS, HEADS) if cell.relative else None,
        kept=stays(b, HEADS, s, t) if cell.dropout else None,
        rate=DROPOUT,
    )


def stays(b: int, h: int, s: int, t: int) -> np.ndarray:
    """What dropout keeps, [b, h, s, t]."""
    where = np.ogrid[:b, :h, :s, :t]
    return np.asarray(compute_dropout_mask(KEY, DROPOUT, *(jnp.asarray(x) for x in where)))


def last(mask: Mask, count: int) -> Mask:
    """The mask of the last queries only."""
    cut = {name: getattr(mask, name)[:, -count:] for name in ("q_segments", "q_index")}
    return replace(mask, **cut, in_order=False)


def info_of(mask: Mask) -> MaskInfo:
    """The mask for attention; for self-attention, built from segments only."""
    if mask.in_order:
        return MaskInfo.from_segments(mask.q_segments, causal=mask.causal)
    arrays = (mask.q_segments, mask.kv_segments, mask.q_index, mask.kv_index)
    return MaskInfo(*(jnp.asarray(x, jnp.int32) for x in arrays), causal=mask.causal)


def holding(inputs: dict[str, Any]) -> DenseCache:
    """A cache with room for the keys of the call, which then holds them and nothing else."""
    b, t, groups, head_dim = inputs["k"].shape
    spec = LayerCacheSpec(groups, head_dim, value_dim=inputs["v"].shape[-1])
    return DenseCache.create([spec], batch_size=b, capacity=t, layout="leaves")


@lru_cache(maxsize=16)  # a process cannot hold the programs of the whole matrix: 65530 mappings
def program(mechanism: Mechanism, at: int, through: str, dropout: bool, given: tuple) -> Any:
    """Jitted `(arrays, d_out) -> (out, gradients)`; one for all cases that differ in arrays only.

    Args:
        at: identity of the mechanism's configuration, which its equality leaves out.
        through: "call", "cache" (no gradients), or "forward" (neither cache nor gradients).
        given: static arguments of `attend`.
    """

    def out_of(inputs: dict[str, Any], rest: dict[str, Any]) -> jax.Array:
        return attend(
            inputs["q"],
            inputs["k"],
            inputs["v"],
            rest["mask"],
            cache=holding(inputs) if through == "cache" else None,
            sinks=inputs.get("sinks"),
            bias=inputs.get("bias"),
            relative=relative_of(inputs, causal=rest["mask"].causal),
            dropout_key=KEY if dropout else None,
            mechanism=mechanism,
            **dict(given),
            **rest["traced"],
        )[0].astype(jnp.float32)

    def both(inputs: dict[str, Any], rest: dict[str, Any], d_out: Any) -> tuple[Any, Any]:
        def loss(inputs: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            out = out_of(inputs, rest)
            return jnp.sum(out * d_out), out

        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(inputs)
        return out, grads

    return jax.jit(
        both if through == "call" else lambda inputs, rest, _: (out_of(inputs, rest), {})
    )


def relative_of(arrays: dict[str, Any], *, causal: bool) -> RelativeBias | None:
    """The bias by relative position, if a case has a table of it."""
    table = arrays.get("relative")
    return None if table is None else RelativeBias(table, FARTHEST, causal=causal)


def inputs_of(case: Case) -> dict[str, np.ndarray]:
    """What has a gradient, by name."""
    arrays = {name: getattr(case, name) for name in ("q", "k", "v", "sinks", "bias", "relative")}
    return {name: np.asarray(x, np.float32) for name, x in arrays.items() if x is not None}


def run(
    case: Case,
    mechanism: Mechanism,
    d_out: np.ndarray | None = None,
    *,
    cached: bool = False,
    traced: bool = False,
) -> dict[str, np.ndarray]:
    """As `Case.run`: the output, and with `d_out` the gradients by name; float32 products.

    Args:
        cached: keys and values are read from a cache.
        traced: window and chunk are traced scalars, in which 0 = no limit.
    """
    limits = {"window": case.window, "chunk": case.chunk}
    static = {"soft_cap": case.soft_cap, "scale": case.scale, "alibi": case.alibi}
    static |= {} if traced else limits
    through = "cache" if cached else "call" if d_out is not None else "forward"
    dropout = case.kept is not None
    f = program(mechanism, id(mechanism.config), through, dropout, tuple(static.items()))
    traced_limits = {name: np.int32(x or 0) for name, x in limits.items()} if traced else {}
    rest = {"mask": info_of(case.mask), "traced": traced_limits}
    with jax.default_matmul_precision("highest"):
        out, grads = f(inputs_of(case), rest, d_out)
    return {name: np.asarray(x, np.float32) for name, x in {"out": out, **grads}.items()}


def decode_case(cell: Cell, groups: int = 2, *, count: int = 1) -> Case:
    """A step of decoding `count` tokens, as a dense cache describes it: a row is padded on the
    left, slots behind the newest token hold what they hold."""
    written, segments = 60, np.ones_like(SEGMENTS)
    segments[0, :5] = segments[:, written:] = 0
    case = case_of(replace(cell, cross=False), groups, segments=segments)
    now = slice(written - count, written)
    slots = np.broadcast_to(np.arange(LENGTH), segments.shape)
    mask = Mask(segments[:, now], segments, slots[:, now], slots, case.mask.causal)
    kept = stays(len(segments), HEADS, count, LENGTH) if cell.dropout else None
    bias = None if case.bias is None else case.bias[:, :, now]
    return replace(case, q=case.q[:, now], mask=mask, bias=bias, kept=kept)


def noise(case: Case, seed: int = 1) -> np.ndarray:
    """A cotangent of the case's output, [b, s, h, d]."""
    shape = (*case.q.shape[:3], case.v.shape[-1])
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@contextmanager
def select_kernel(kernel: Kernel, monkeypatch: Any, cached: Any) -> Iterator[None]:
    """Let `attend` use only this kernel; `cached` is the `program` with the compiled calls."""

    def kernels_here(call: Call) -> list[Kernel]:
        assert call.name == kernel.mechanism
        return [kernel]

    monkeypatch.setattr(kernels, "kernels_here", kernels_here)
    cached.cache_clear()
    yield
    cached.cache_clear()
