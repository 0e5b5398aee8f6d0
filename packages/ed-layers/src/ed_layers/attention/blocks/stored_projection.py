"""Queries, keys and values of few tokens on one NVIDIA GPU: one Triton kernel projects, normalizes
and rotates them, and writes the keys and values into the pages of the engine.

A program computes the columns of one head. Its columns are two halves that rotate with each other,
and the columns that stay. The attention that follows reads the pages, so it needs no other kernel.

Legend: T flat tokens, d hidden, h heads, g kv heads, k head dim, v value dim, r2 half of the
rotated dimensions, P pages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from ed_layers.cache.codes import LARGEST_CODES, Codes, Numbers
from ed_layers.cache.storage import At
from ed_layers.devices import get_triton_block
from ed_layers.fixed_order import KernelChoice
from ed_layers.norms import RMSNorm
from ed_layers.projections import few_rows_gpu
from ed_layers.projections.few_rows_gpu import (
    ColumnBlock,
    RowBlocks,
    accumulate,
    load_columns,
)
from ed_layers.projections.linear import Linear

#: Maximum number of rows of a block.
MOST_BLOCK_ROWS = 64


class HeadNorm(NamedTuple):
    """A root-mean-square norm of each head.

    Attributes:
        weight: [k].
        eps: added to the mean square.
        offset: added to the weight.
    """

    weight: Float[Array, " k"]
    eps: float
    offset: float


class Columns(NamedTuple):
    """Some columns of a head, inside the kernel.

    Attributes:
        numbers: their numbers in the head.
        real: which of them exist; None = all.
    """

    numbers: Int[Array, " c"]
    real: jax.Array | None

    @classmethod
    def of(cls, first: int, count: int, step: int = 1) -> Columns:
        """Return `count` columns from `first` on; the block has a power of two of them."""
        size = get_triton_block(count)
        number = jnp.arange(size)
        return cls(first + step * number, None if size == count else number < count)

    def mask(self, rows: Bool[Array, " r"]) -> Bool[Array, "r c"]:
        """Return which columns of which rows exist."""
        mask = jnp.broadcast_to(rows[:, None], (rows.shape[0], self.numbers.shape[0]))
        return mask if self.real is None else mask & self.real[None]


@dataclass
class ProjectedKeys:
    """Keys and values that a kernel projects while it writes them into pages: a `KeysWriter`.

    `write` and `compute` set `queries`.

    Attributes:
        x: the rows, [T, d].
        weights: of queries, keys and values: [d, h * k], [d, g * k], [d, g * v].
        biases: of the projections, [o]; or empty.
        norms: of queries and of keys; None = none.
        rope: cosine and sine of the positions, [T, r2]; None = no rotation.
        interleaved: whether pairs are adjacent elements instead of halves.
        head_dim, value_dim: k and v.
        project: returns queries, keys and values [1, T, heads, numbers] without the kernel.
        interpret: compute the kernel in plain XLA, for tests without a GPU.
        queries: [T, h, k].
    """

    x: Float[Array, "T d"]
    weights: Sequence[jax.Array]
    biases: Sequence[jax.Array]
    norms: tuple[HeadNorm | None, HeadNorm | None]
    rope: tuple[jax.Array, jax.Array] | None
    interleaved: bool
    head_dim: int
    value_dim: int
    project: Callable[[], tuple[jax.Array, jax.Array, jax.Array]]
    interpret: bool = False
    queries: jax.Array = field(init=False)

    @classmethod
    def build(
        cls,
        x: Float[Array, "1 T d"],
        layers: Sequence[Linear],
        norms: Sequence[nnx.Module],
        *,
        rope: tuple[jax.Array, jax.Array] | None,
        interleaved: bool,
        head_dim: int,
        project: Callable[[], tuple[jax.Array, jax.Array, jax.Array]],
    ) -> ProjectedKeys | None:
        """Return the kernel for layers; None if it does not compute them.

        Args:
            x: the rows.
            layers: projections of queries, keys and values.
            norms: of queries and keys; or empty.
            rope: cosine and sine, [1, T, r2].
            interleaved, head_dim, project: see the class.
        """
        first, choice = layers[0], KernelChoice.get_current()
        if any(
            type(layer) is not Linear
            or (layer.dtype, layer.use_bias) != (first.dtype, first.use_bias)
            for layer in layers
        ) or not all(type(norm) is RMSNorm and norm.has_weight for norm in norms):
            return None
        x = x[0].astype(first.dtype)
        weights = [layer.weight for layer in layers]
        if not few_rows_gpu.supports_few_rows(choice, x.shape[0], x.dtype, weights):
            return None
        head_norms = [
            HeadNorm(norm.weight.get_value(), norm.eps, norm.offset)
            for norm in norms
            if isinstance(norm, RMSNorm)
        ]
        return cls(
            x,
            [w for w in weights if isinstance(w, jax.Array)],
            [layer.bias.get_value().astype(x.dtype) for layer in layers if layer.use_bias],
            (head_norms[0], head_norms[1]) if head_norms else (None, None),
            None if rope is None else (rope[0][0], rope[1][0]),
            interleaved,
            head_dim,
            head_dim,
            project,
        )

    def compute(self) -> tuple[jax.Array, jax.Array]:
        """Return keys [1, T, g, k] and values [1, T, g, v], for a cache that writes them."""
        q, k, v = self.project()
        self.queries = q[0]
        return k, v

    def can_write(self, pages: Numbers) -> bool:
        """Return whether the kernel writes into pages: keys and values are separate, and quantized
        ones have one scale for each head."""
        is_separate = pages.shape[-2] == 2
        return is_separate and (not isinstance(pages, Codes) or pages.scale.shape[-2] == 1)

    def write(self, pages: Numbers, at: At, slots: Int[Array, " T"]) -> Numbers:
        """Return the pages with the new keys and values; see `PagedCache.write`.

        Args:
            pages: [P, page_size, g, 2, k], or with a leading layer axis.
            at: index of the layer.
            slots: slot of each token; a slot outside the pages is not written.
        """
        stored = pages if at else jax.tree.map(lambda array: array[None], pages)
        layer = jnp.reshape(jnp.asarray(at[0] if at else 0, jnp.int32), (1,))
        self.queries, stored = self.run(stored, layer, slots.astype(jnp.int32))
        return stored if at else jax.tree.map(lambda array: array[0], stored)

    def run(
        self, pages: Numbers, layer: Int[Array, 1], slots: Int[Array, " T"]
    ) -> tuple[Float[Array, "T h k"], Numbers]:
        """Run the kernel; see `write`.

        Args:
            pages: [L, P, page_size, g, 2, k].
        """
        from jax.experimental import pallas as pl
        from jax.experimental.pallas import triton

        tokens, shape = self.x.shape[0], self.get_blocks()
        counts = [w.shape[1] // n for w, n in zip(self.weights, self.dims, strict=True)]
        arrays = {"x": self.x, "slots": slots, "layer": layer}
        arrays |= dict(zip("qkv", self.weights, strict=True))
        arrays |= dict(zip(("q_bias", "k_bias", "v_bias"), self.biases, strict=False))
        for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=True):
            if norm is not None:
                arrays[name] = norm.weight
        if self.rope is not None:
            arrays |= dict(zip(("cos", "sin"), self.rope, strict=True))
        stored = jax.tree.leaves(pages)

        def project_and_store(*refs: jax.Ref) -> None:
            # The pages are arguments and, in the same memory, results.
            by_name = dict(zip(arrays, refs, strict=False))
            queries, *targets = refs[-1 - len(stored) :]
            number, row_block, first = pl.program_id(0), pl.program_id(1), 0
            for kind, count in enumerate(counts):

                @pl.when((number >= first) & (number < first + count))
                def _(kind: int = kind, first: int = first) -> None:
                    results = [queries] if kind == 0 else targets
                    self.compute_head(shape, kind, number - first, row_block, by_name, results)

                first += count

        queries = jax.ShapeDtypeStruct((tokens, counts[0], self.head_dim), self.x.dtype)
        results = (queries, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored))
        queries, *stored = pl.pallas_call(
            project_and_store,
            grid=(sum(counts), -(-tokens // shape.rows)),
            out_shape=results,
            input_output_aliases={len(arrays) + i: 1 + i for i in range(len(stored))},
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=shape.stages),
            interpret=self.interpret,
            name="project_and_store",
        )(*arrays.values(), *stored)
        return queries, jax.tree.unflatten(jax.tree.structure(pages), stored)

    @property
    def dims(self) -> tuple[int, int, int]:
        """Numbers of a query, of a key and of a value."""
        return self.head_dim, self.head_dim, self.value_dim

    def get_blocks(self) -> RowBlocks:
        """Return the blocks of rows, which are small enough that the heads occupy a GPU."""
        rows = min(self.x.shape[0], MOST_BLOCK_ROWS)
        shape = RowBlocks.of(rows, self.weights, can_split=False, interpret=self.interpret)
        return replace(shape, columns=self.head_dim, count=self.x.shape[0])

    def compute_head(
        self,
        shape: RowBlocks,
        kind: int,
        head: jax.Array,
        row_block: jax.Array,
        refs: Mapping[str, jax.Ref],
        targets: Sequence[jax.Ref],
    ) -> None:
        """Compute one head of a block of rows, and write it.

        Args:
            shape: sizes.
            kind: 0 for queries, 1 for keys, 2 for values.
            head: number of the head.
            row_block: number of the block of rows.
            refs: references by name.
            targets: queries [T, h, k]; or the pages, with their scales if they are quantized.
        """
        from jax.experimental.pallas import triton

        name, dim = "qkv"[kind], self.dims[kind]
        row = row_block * shape.rows + jnp.arange(shape.rows)
        real_row = row < shape.count
        parts = self.split_head(kind)
        blocks = [ColumnBlock(refs[name], head * dim + part.numbers, part.real) for part in parts]
        accs = accumulate(shape, refs["x"], blocks, row)
        if (bias := refs.get(f"{name}_bias")) is not None:
            accs = [
                acc + load_columns(bias, columns, real)[None]
                for acc, (_, columns, real) in zip(accs, blocks, strict=True)
            ]
        norm = self.norms[kind] if kind < 2 else None
        if norm is not None:
            squares = sum((jnp.sum(acc * acc, axis=1) for acc in accs), jnp.zeros(shape.rows))
            factor = jax.lax.rsqrt(squares / dim + norm.eps)[:, None]
            weight = refs[f"{name}_norm"]
            accs = [
                acc * factor * (load_columns(weight, *part) + norm.offset)[None]
                for acc, part in zip(accs, parts, strict=True)
            ]
        if kind < 2 and self.rope is not None:
            pair = Columns.of(0, self.rope[0].shape[-1])
            at, mask = (row[:, None], pair.numbers[None]), pair.mask(real_row)
            cos, sin = (triton.load(refs[x].at[at], mask=mask, other=0) for x in ("cos", "sin"))
            a, b = accs[:2]
            accs[:2] = [a * cos - b * sin, b * cos + a * sin]
        if kind == 0:
            for acc, part in zip(accs, parts, strict=True):
                at = targets[0].at[row[:, None], head, part.numbers[None]]
                triton.store(at, acc.astype(targets[0].dtype), mask=part.mask(real_row))
            return
        slot = triton.load(refs["slots"].at[row], mask=real_row, other=0)
        slots = targets[0].shape[1] * targets[0].shape[2]
        is_stored = real_row & (slot >= 0) & (slot < slots)
        slot = jnp.where(is_stored, slot, 0)
        token = TokenSlots(is_stored, slot, refs["layer"][0], head, kind - 1)
        unused = targets[0].shape[-1] - dim
        if unused:  # the narrower of keys and values is padded
            parts = [*parts, Columns.of(dim, unused)]
            accs = [*accs, jnp.zeros((shape.rows, parts[-1].numbers.shape[0]), jnp.float32)]
        token.store(accs, parts, targets)

    def split_head(self, kind: int) -> list[Columns]:
        """Return the columns of a head: two halves that rotate, and the others."""
        dim = self.dims[kind]
        half = 0 if kind == 2 or self.rope is None else self.rope[0].shape[-1]
        parts: list[Columns] = []
        if half and self.interleaved:
            parts += [Columns.of(0, half, 2), Columns.of(1, half, 2)]
        elif half:
            parts += [Columns.of(0, half), Columns.of(half, half)]
        if 2 * half < dim:
            parts.append(Columns.of(2 * half, dim - 2 * half))
        return parts


class TokenSlots(NamedTuple):
    """The slots of a block of tokens, inside the kernel.

    Attributes:
        is_stored: which tokens are written.
        slot: slot of each token.
        layer, head: numbers of the layer and of the key head.
        way: 0 for keys, 1 for values.
    """

    is_stored: Bool[Array, " r"]
    slot: Int[Array, " r"]
    layer: jax.Array
    head: jax.Array
    way: int

    def store(
        self,
        numbers: Sequence[Float[Array, "r c"]],
        parts: Sequence[Columns],
        targets: Sequence[jax.Ref],
    ) -> None:
        """Write the columns of one head of the tokens; see `Format.encode` for codes."""
        from jax.experimental.pallas import triton

        pages = targets[0]
        page, offset = (f(self.slot, pages.shape[2]) for f in (jax.lax.div, jax.lax.rem))
        if len(targets) > 1:
            largest = LARGEST_CODES[pages.dtype]
            tops = [jnp.max(jnp.abs(x), axis=1) for x in numbers]
            scale = functools.reduce(jnp.maximum, tops) / largest
            divisor = jnp.where(scale == 0, 1, scale)[:, None]
            numbers = [x / divisor for x in numbers]
            at = targets[1].at[self.layer, page, self.head, self.way, 0, offset]
            triton.store(at, scale, mask=self.is_stored)
        for x, part in zip(numbers, parts, strict=True):
            if pages.dtype == jnp.int8:
                x = jnp.floor(x + 0.5)  # Triton rounds towards zero
            column = part.numbers[None]
            at = pages.at[self.layer, page[:, None], offset[:, None], self.head, self.way, column]
            triton.store(at, x.astype(pages.dtype), mask=part.mask(self.is_stored))
