"""Products of few rows with a quantized matrix on NVIDIA GPUs: a Triton kernel that reads codes.

A product of few rows needs as much time as reading the matrix, and codes have half or a quarter of
the bytes of 16-bit numbers. A block of the result decodes blocks of codes in registers. If the
result has too few blocks for a GPU, several programs divide the depth of a block, and the sum of
their results becomes a part of the operation that follows.

Legend: m rows, i in features, o out features, n groups along i, b rows of codes (i, or i / 2 with
two codes in a byte), s splits of the depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_layers.devices import LEAST_TRITON_BLOCK, get_triton_block
from ed_layers.fixed_order import KernelChoice
from ed_layers.quantization.formats import FORMATS
from ed_layers.quantization.stored import Stored

#: Maximum number of rows: products of more rows need more time than reading the matrix.
MOST_CODE_ROWS = 256
#: The largest blocks of rows, columns and depth.
ROWS, COLUMNS, DEPTH = 128, 128, 64
#: Number of blocks that occupy a GPU, and the maximum number of parts of the depth.
ENOUGH_BLOCKS, MOST_SPLITS = 132, 16
#: Smaller matrices cost a launch, whatever their format is.
LEAST_CODES = 2**16


@dataclass(frozen=True)
class CodeBlocks:
    """Sizes and settings of the kernel, known when it is traced.

    Attributes:
        rows, columns, depth: sizes of a block; the depth counts rows of codes.
        splits: s.
        outputs, code_rows: o and b.
        in_byte: codes of a byte.
        group_rows: rows of codes of a group.
        groups: n.
        format: key of `FORMATS`.
        transposed: whether the codes are [o, b].
        exponents: whether scales are the bits of powers of two.
        precision: of the products.
    """

    rows: int
    columns: int
    depth: int
    splits: int
    outputs: int
    code_rows: int
    in_byte: int
    group_rows: int
    groups: int
    format: str
    transposed: bool
    exponents: bool
    precision: jax.lax.DotAlgorithmPreset | None

    @classmethod
    def of(cls, rows: int, w: Stored, precision: jax.lax.DotAlgorithmPreset | None) -> CodeBlocks:
        """Return the blocks of a product of `rows` rows."""
        transposed = w.axis == -1
        outputs, code_rows = w.codes.shape if transposed else w.codes.shape[::-1]
        group_rows = code_rows // w.groups
        block_rows = min(ROWS, get_triton_block(rows))
        columns = COLUMNS if block_rows > ROWS // 2 else COLUMNS // 2
        depth = DEPTH if w.groups == 1 else get_block_depth(group_rows)
        blocks = -(-outputs // columns) * -(-rows // block_rows)
        # The results of the splits are written and read: at most as many bytes as the codes.
        moved = 2 * 4 * rows * outputs
        most = min(MOST_SPLITS, code_rows // (4 * depth), outputs * code_rows // moved)
        splits = max(1, min(ENOUGH_BLOCKS // blocks, most))
        return cls(
            block_rows,
            columns,
            depth,
            splits,
            outputs,
            code_rows,
            FORMATS[w.format].in_byte,
            group_rows,
            w.groups,
            w.format,
            transposed,
            w.scale.dtype == jnp.float8_e8m0fnu if isinstance(w.scale, jax.Array) else False,
            precision,
        )


def get_block_depth(group_rows: int) -> int:
    """Return the largest power of two up to DEPTH that divides the rows of codes of a group."""
    return math.gcd(group_rows, DEPTH)


def supports(choice: KernelChoice, rows: int, dtype: DTypeLike, w: Stored) -> bool:
    """Return whether the kernel computes a product, if the program is compiled for a GPU."""
    return (
        choice.allowed
        and choice.on_one_gpu
        and 0 < rows <= MOST_CODE_ROWS
        and not w.activations
        and w.ndim == 2
        and w.codes.size >= LEAST_CODES
        and jnp.dtype(dtype) in (jnp.float32, jnp.bfloat16, jnp.float16)
        and (
            w.groups == 1
            or get_block_depth(w.codes.shape[w.axis] // w.groups) >= LEAST_TRITON_BLOCK
        )
    )


def multiply_codes(
    x: Float[Array, "*rows i"],
    w: Stored,
    *,
    precision: jax.lax.DotAlgorithmPreset | None = None,
    interpret: bool = False,
) -> Float[Array, "*rows o"]:
    """Return `x @ w` in the dtype of `x`; sums are float32.

    Args:
        x: the rows.
        w: a matrix [i, o], whose groups run along i. With `axis=-1`, a table [o, i] whose transpose
            is the matrix.
        precision: of products of float32 numbers; None = that of Triton, TF32.
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    flat = x.reshape(-1, x.shape[-1])
    shape = CodeBlocks.of(flat.shape[0], w, precision)
    scale = w.scale if isinstance(w.scale, jax.Array) else w.scale.numbers()
    if shape.exponents:
        scale = jax.lax.bitcast_convert_type(scale, jnp.uint8)
    arrays = {"x": flat, "codes": w.codes, "scale": scale}
    if w.zero is not None:
        arrays["zero"] = w.zero

    def product_of_codes(*refs: jax.Ref) -> None:
        by_name = dict(zip((*arrays, "out"), refs, strict=True))
        multiply_block(shape, *map(pl.program_id, range(3)), **by_name)

    rows, is_split = flat.shape[0], shape.splits > 1
    grid = (-(-shape.outputs // shape.columns), -(-rows // shape.rows), shape.splits)
    parts = pl.pallas_call(
        product_of_codes,
        grid=grid,
        out_shape=jax.ShapeDtypeStruct(
            (shape.splits, rows, shape.outputs), jnp.float32 if is_split else x.dtype
        ),
        compiler_params=triton.CompilerParams(
            num_warps=8 if shape.rows * shape.columns > 2**13 else 4, num_stages=3
        ),
        interpret=interpret,
        name="product_of_codes",
    )(*arrays.values())
    y = jnp.sum(parts, axis=0).astype(x.dtype) if is_split else parts[0]
    return y.reshape(*x.shape[:-1], shape.outputs)


def multiply_block(
    shape: CodeBlocks,
    column_block: jax.Array,
    row_block: jax.Array,
    split: jax.Array,
    *,
    x: jax.Ref,
    codes: jax.Ref,
    scale: jax.Ref,
    out: jax.Ref,
    zero: jax.Ref | None = None,
) -> None:
    """Compute one block of the result and one split of its depth.

    Args:
        shape: sizes and settings.
        column_block, row_block, split: numbers of the program.
        x: [m, i].
        codes, scale, zero: see `Stored`.
        out: [s, m, o].
    """
    from jax.experimental.pallas import triton

    row = row_block * shape.rows + jnp.arange(shape.rows)
    column = column_block * shape.columns + jnp.arange(shape.columns)
    real_row, real_column = row < x.shape[0], column < shape.outputs
    level = FORMATS[shape.format].level
    dot = partial(triton.dot, precision=shape.precision, trans_b=shape.transposed)

    def load_group(array: jax.Ref, group: jax.Array) -> jax.Array:
        """Return the scales or the zeros of the columns of a group, float32."""
        if array.shape == (1, 1):
            return jnp.broadcast_to(array[0, 0].astype(jnp.float32), (shape.columns,))
        at = (column, group) if shape.transposed else (group, column)
        numbers = triton.load(array.at[at], mask=real_column, other=0)
        return numbers if array.dtype == jnp.uint8 else numbers.astype(jnp.float32)

    def load_scale(group: jax.Array) -> jax.Array:
        numbers = load_group(scale, group)
        if not shape.exponents:
            return numbers
        bits = numbers.astype(jnp.int32)
        # The smallest scale, 2^-127, is not a normal number.
        bits = jnp.where(bits == 0, 0x00400000, bits << 23)
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def visit(j: jax.Array, total: jax.Array) -> jax.Array:
        depth = j * shape.depth + jnp.arange(shape.depth)
        inside = depth < shape.code_rows
        if shape.transposed:
            at, mask = (column[:, None], depth[None]), real_column[:, None] & inside[None]
        else:
            at, mask = (depth[:, None], column[None]), inside[:, None] & real_column[None]
        if jnp.issubdtype(codes.dtype, jnp.floating):  # Triton has no zero of 8 bits
            stored = triton.load(codes.at[at], mask=mask).astype(jnp.float32)
            stored = jnp.where(mask, stored, 0)
        else:
            stored = triton.load(codes.at[at], mask=mask, other=0)
        group = jax.lax.div(j * shape.depth, shape.group_rows)
        zeros = None if zero is None else load_group(zero, group).astype(jnp.float32)
        part = jnp.zeros((shape.rows, shape.columns), jnp.float32)
        for half in range(shape.in_byte):
            numbers = stored
            if shape.in_byte > 1:
                numbers = (stored.astype(jnp.int32) >> (4 * half)) & 15
            levels = numbers if numbers.dtype == jnp.float32 else level(numbers)
            if zeros is not None:
                levels -= zeros[:, None] if shape.transposed else zeros[None]
            at_x = (row[:, None], (depth * shape.in_byte + half)[None])
            rows = triton.load(x.at[at_x], mask=real_row[:, None] & inside[None], other=0)
            part += dot(rows, levels.astype(x.dtype)).astype(jnp.float32)
        return total + (part if shape.groups == 1 else part * load_scale(group)[None])

    steps = -(-shape.code_rows // shape.depth)
    share = -(-steps // shape.splits)
    end = jnp.minimum((split + 1) * share, steps)
    empty = jnp.zeros((shape.rows, shape.columns), jnp.float32)
    total = jax.lax.fori_loop(split * share, end, visit, empty)
    if shape.groups == 1:
        total *= load_scale(jnp.int32(0))[None]
    at = out.at[split, row[:, None], column[None]]
    triton.store(at, total.astype(out.dtype), mask=real_row[:, None] & real_column[None])
