"""Products of few rows on one NVIDIA GPU, with the operations around them, in Triton kernels.

A decode step reads each matrix once, so its time is that of the bytes, plus a launch for each
operation. One kernel computes several products of the same rows and the activation between them.
If a result has too few blocks for a GPU, several programs divide the depth of a block. The sum of
their parts is then computed by the operation that follows (`ed_layers.stream_gpu`).

Legend: m rows, i in features, o out features, s splits of the depth, r rows of a block, c columns
of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_layers.activations import activation
from ed_layers.devices import LEAST_TRITON_BLOCK, get_triton_block, get_triton_precision
from ed_layers.fixed_order import KernelChoice

#: Maximum number of rows: products of more rows need more time than reading the matrix.
MOST_FEW_ROWS = 256
#: The largest blocks of rows and columns.
ROWS, COLUMNS = 128, 128
#: Bytes of a row of a block along the depth.
DEPTH_BYTES = 128
#: Number of blocks that occupy a GPU, its multiprocessors, and the maximum number of splits.
ENOUGH_BLOCKS, MULTIPROCESSORS, MOST_SPLITS = 96, 132, 8
#: Smaller matrices cost a launch, whatever kernel computes the product.
LEAST_NUMBERS = 2**16
#: Activations that Triton computes in the kernel.
TRITON_ACTS = frozenset(
    {"silu", "swish", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu", "relu", "relu2"}
    | {"gelu", "gelu_python", "linear", "sigmoid", "relu6"}
)


def supports_few_rows(
    choice: KernelChoice, rows: int, dtype: DTypeLike, weights: Sequence[object]
) -> bool:
    """Return whether the kernels compute products of `rows` rows with plain matrices.

    Args:
        choice: choice of kernels; the model must be on one GPU.
        rows: m.
        dtype: dtype of the rows.
        weights: matrices [i, o].
    """
    return (
        choice.allows_gpu_kernels
        and 0 < rows <= MOST_FEW_ROWS
        and jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        and all(
            isinstance(w, jax.Array)
            and w.ndim == 2
            and w.size >= LEAST_NUMBERS
            and w.dtype == dtype
            for w in weights
        )
    )


class ColumnBlock(NamedTuple):
    """Columns of a matrix that a program multiplies.

    Attributes:
        matrix: reference to [i, o].
        columns: numbers of the columns.
        real: which columns exist; None = all.
    """

    matrix: jax.Ref
    columns: Int[Array, " c"]
    real: jax.Array | None = None


@dataclass(frozen=True)
class RowBlocks:
    """Sizes of the blocks of a kernel, known when it is traced.

    Attributes:
        rows, columns, depth: r, c, and the size of a block along the depth.
        splits: s.
        count: m.
        inputs: i.
        precision: of products of float32 numbers.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    count: int
    inputs: int
    precision: jax.lax.DotAlgorithmPreset | None = None

    @classmethod
    def of(
        cls, rows: int, weights: Sequence[jax.Array], *, can_split: bool, interpret: bool
    ) -> RowBlocks:
        """Return the blocks of products of `rows` rows.

        Args:
            rows: m.
            weights: matrices [i, o].
            can_split: whether several programs may divide the depth.
            interpret: see `multiply_few_rows`.
        """
        dtype, inputs = weights[0].dtype, weights[0].shape[0]
        block_rows = min(ROWS, get_triton_block(rows))
        depth = DEPTH_BYTES // dtype.itemsize
        row_blocks, outputs = -(-rows // block_rows), min(w.shape[1] for w in weights)

        def count_blocks(columns: int) -> int:
            return row_blocks * -(-outputs // columns)

        columns = COLUMNS if can_split else COLUMNS // 2
        while (
            columns > 2 * LEAST_TRITON_BLOCK
            and count_blocks(columns) < ENOUGH_BLOCKS
            and not can_split
        ):
            columns //= 2
        most = min(MOST_SPLITS, inputs // (4 * depth))
        splits = min(most, MULTIPROCESSORS // count_blocks(columns)) if can_split else 1
        precision = None if interpret else get_triton_precision(dtype)
        return cls(block_rows, columns, depth, max(1, splits), rows, inputs, precision)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 8 if self.rows * self.columns >= 2**13 else 4

    @property
    def stages(self) -> int:
        """Blocks of the depth that are loaded ahead."""
        return 4 if self.rows <= ROWS // 2 else 3


def accumulate(
    shape: RowBlocks,
    x: jax.Ref,
    blocks: Sequence[ColumnBlock],
    row: Int[Array, " r"],
    split: jax.Array | int = 0,
) -> list[Float[Array, "r c"]]:
    """Return the products of a block of rows with blocks of columns, float32, inside a kernel.

    Args:
        shape: sizes.
        x: reference to the rows [m, i].
        blocks: blocks of columns of matrices with equal i.
        row: numbers of the rows; further rows than m are zero.
        split: number of the part of the depth.
    """
    from jax.experimental.pallas import triton

    dot = partial(triton.dot, precision=shape.precision)
    real_row, is_even = (row < shape.count)[:, None], shape.inputs % shape.depth == 0

    def visit(j: jax.Array, totals: list[jax.Array]) -> list[jax.Array]:
        at = j * shape.depth + jnp.arange(shape.depth)
        inside = at < shape.inputs
        mask = jnp.broadcast_to(real_row, (shape.rows, shape.depth))
        mask = mask if is_even else mask & inside[None]
        numbers = triton.load(x.at[row[:, None], at[None]], mask=mask, other=0)
        sums: list[jax.Array] = []
        for total, (matrix, columns, real) in zip(totals, blocks, strict=True):
            masks = [] if real is None else [real[None]]
            masks += [] if is_even else [inside[:, None]]
            mask = None
            for one in masks:
                one = jnp.broadcast_to(one, (shape.depth, columns.shape[0]))
                mask = one if mask is None else mask & one
            other = None if mask is None else 0
            values = triton.load(matrix.at[at[:, None], columns[None]], mask=mask, other=other)
            sums.append(total + dot(numbers, values).astype(jnp.float32))
        return sums

    steps = -(-shape.inputs // shape.depth)
    share = -(-steps // shape.splits)
    first, end = split * share, jnp.minimum((split + 1) * share, steps)
    empty = [jnp.zeros((shape.rows, columns.shape[0]), jnp.float32) for _, columns, _ in blocks]
    if shape.splits == 1:
        first, end = 0, steps
    return jax.lax.fori_loop(first, end, visit, empty)


def multiply_few_rows(
    x: Float[Array, "*rows i"],
    weights: Sequence[Float[Array, "i o"]],
    biases: Sequence[Float[Array, " o"]] = (),
    *,
    act: str | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows o"]:
    """Return `x @ w` of one matrix, or `act(x @ gate) * (x @ up)` of two, in one launch.

    Args:
        x: the rows.
        weights: one matrix, or a gate and a matrix of the same shape.
        biases: [o] for each matrix, or empty.
        act: Hugging Face's name of the activation of the first product; None = none.
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    flat = x.reshape(-1, x.shape[-1])
    shape = RowBlocks.of(flat.shape[0], weights, can_split=False, interpret=interpret)
    rows, outputs = flat.shape[0], weights[0].shape[1]

    def product_of_few_rows(x: jax.Ref, *refs: jax.Ref) -> None:
        *arrays, out = refs
        column = pl.program_id(0) * shape.columns + jnp.arange(shape.columns)
        row = pl.program_id(1) * shape.rows + jnp.arange(shape.rows)
        real = None if outputs % shape.columns == 0 else column < outputs
        blocks = [ColumnBlock(matrix, column, real) for matrix in arrays[: len(weights)]]
        results = accumulate(shape, x, blocks, row)
        for i, bias in enumerate(arrays[len(weights) :]):
            results[i] += load_columns(bias, column, real)[None]
        if act is not None:
            results[0] = activation(act)(results[0])
        result = math.prod(results[1:], start=results[0])
        mask = (row < rows)[:, None] & (column < outputs)[None]
        triton.store(out.at[row[:, None], column[None]], result.astype(out.dtype), mask=mask)

    y = pl.pallas_call(
        product_of_few_rows,
        grid=(-(-outputs // shape.columns), -(-rows // shape.rows)),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), x.dtype),
        compiler_params=triton.CompilerParams(num_warps=shape.warps, num_stages=shape.stages),
        interpret=interpret,
        name="product_of_few_rows",
    )(flat, *weights, *biases)
    return y.reshape(*x.shape[:-1], outputs)


def load_columns(
    array: jax.Ref, columns: Int[Array, " c"], real: jax.Array | None
) -> Float[Array, " c"]:
    """Return numbers of a reference [o] in float32; zeros where a column does not exist."""
    from jax.experimental.pallas import triton

    other = None if real is None else 0
    return triton.load(array.at[columns], mask=real, other=other).astype(jnp.float32)


def multiply_in_parts(
    x: Float[Array, "*rows i"], w: Float[Array, "i o"], *, interpret: bool = False
) -> Float[Array, "s m o"]:
    """Return parts whose sum is `x @ w`: float32, or in the dtype of `x` if there is one part.

    Args:
        x: m rows.
        w: the matrix.
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    flat = x.reshape(-1, x.shape[-1])
    shape = RowBlocks.of(flat.shape[0], [w], can_split=True, interpret=interpret)
    rows, outputs = flat.shape[0], w.shape[1]

    def parts_of_few_rows(x: jax.Ref, matrix: jax.Ref, out: jax.Ref) -> None:
        column = pl.program_id(0) * shape.columns + jnp.arange(shape.columns)
        row = pl.program_id(1) * shape.rows + jnp.arange(shape.rows)
        split = pl.program_id(2)
        real = None if outputs % shape.columns == 0 else column < outputs
        (result,) = accumulate(shape, x, [ColumnBlock(matrix, column, real)], row, split)
        mask = (row < rows)[:, None] & (column < outputs)[None]
        at = out.at[split, row[:, None], column[None]]
        triton.store(at, result.astype(out.dtype), mask=mask)

    dtype = x.dtype if shape.splits == 1 else jnp.float32
    return pl.pallas_call(
        parts_of_few_rows,
        grid=(-(-outputs // shape.columns), -(-rows // shape.rows), shape.splits),
        out_shape=jax.ShapeDtypeStruct((shape.splits, rows, outputs), dtype),
        compiler_params=triton.CompilerParams(num_warps=shape.warps, num_stages=shape.stages),
        interpret=interpret,
        name="parts_of_few_rows",
    )(flat, w)
