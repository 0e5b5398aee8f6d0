"""Additions to the stream of few rows on one NVIDIA GPU: a Triton kernel adds the parts of a
product to the stream, and normalizes the sum for the next layer.

The product, the addition and the norm are operations of three modules. `StreamSums` knows which
arrays are sums of parts, so the norm can compute the addition, too. The arrays themselves stay
valid: the compiler removes the additions whose results nothing else reads.

Legend: m rows, d hidden, s parts of a product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ed_layers.devices import get_triton_block
from ed_layers.fixed_order import KernelChoice
from ed_layers.norms import RMSNorm
from ed_layers.projections import few_rows_gpu
from ed_layers.projections.linear import Linear

if TYPE_CHECKING:
    from ed_layers.context import Ctx


class PartialProduct(NamedTuple):
    """A product as the sum of its parts.

    Attributes:
        parts: [s, m, d].
        bias: [d]; None = no bias.
    """

    parts: Float[Array, "s m d"]
    bias: Float[Array, " d"] | None


class StreamSum(NamedTuple):
    """The stream after an addition.

    Attributes:
        stream: the stream before, [..., d].
        product: the product that is added.
    """

    stream: Float[Array, "*rows d"]
    product: PartialProduct


class KnownArray(NamedTuple):
    """An array, and how else its values are known.

    Attributes:
        array: the array; its id is the key of the record.
        product: the parts that the array is the sum of.
        addition: the addition that computes the array.
        computed: the equal result of the kernel.
    """

    array: jax.Array
    product: PartialProduct | None = None
    addition: StreamSum | None = None
    computed: jax.Array | None = None


@dataclass(eq=False)
class StreamSums:
    """The sums of one trace, by their arrays.

    Attributes:
        interpret: compute the kernel in plain XLA, for tests without a GPU.
        arrays: id of an array -> its record, which keeps the array alive.
    """

    interpret: bool = False
    arrays: dict[int, KnownArray] = field(default_factory=dict)

    @classmethod
    def create(cls, rows: int) -> StreamSums | None:
        """Return the sums of a step of `rows` rows; None if no kernel computes them."""
        fits = KernelChoice.get_current().allows_gpu_kernels
        return cls() if fits and 0 < rows <= few_rows_gpu.MOST_FEW_ROWS else None

    def project(
        self, layer: Callable[..., jax.Array], x: Float[Array, "*rows i"], ctx: Ctx
    ) -> jax.Array:
        """Return `layer(x, ctx)`, a result that is added to the stream."""
        # Layers with adapters compute more than a product.
        if not isinstance(layer, Linear) or type(layer) is not Linear:
            return layer(x, ctx)
        choice, rows, weight = KernelChoice.get_current(), x.size // x.shape[-1], layer.weight
        x = x.astype(layer.dtype)
        is_plain = isinstance(weight, jax.Array)
        if not is_plain or not few_rows_gpu.supports_few_rows(choice, rows, x.dtype, [weight]):
            return layer(x, ctx)
        parts = few_rows_gpu.multiply_in_parts(x, weight, interpret=self.interpret)
        bias = layer.bias.get_value().astype(x.dtype) if layer.use_bias else None
        y = jnp.sum(parts, axis=0, dtype=jnp.float32)
        y = (y if bias is None else y + bias.astype(jnp.float32)).astype(x.dtype)
        y = y.reshape(*x.shape[:-1], -1)
        self.arrays[id(y)] = KnownArray(y, product=PartialProduct(parts, bias))
        return y

    def rename(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return `y`, an array with the values of `x`."""
        record = self.arrays.get(id(x))
        if record is not None:
            self.arrays[id(y)] = record._replace(array=y)
        return y

    def add(self, x: Float[Array, "*rows d"], y: Float[Array, "*rows d"]) -> jax.Array:
        """Return `x + y`: the stream after an addition."""
        x, record = self.get_computed(x), self.arrays.get(id(y))
        total = x + y
        if record is not None and record.product is not None and x.dtype == y.dtype:
            addition = StreamSum(x, record.product)
            self.arrays[id(total)] = KnownArray(total, addition=addition)
        return total

    def get_computed(self, x: jax.Array) -> jax.Array:
        """Return the result of the kernel that equals an array; without one, the array."""
        record = self.arrays.get(id(x))
        return x if record is None or record.computed is None else record.computed

    def normalize(
        self, norm: Callable[[jax.Array], jax.Array], x: Float[Array, "*rows d"]
    ) -> jax.Array:
        """Return `norm(x)` of the stream."""
        record = self.arrays.get(id(x), KnownArray(x))
        addition = None if record.computed is not None else record.addition
        if addition is None or not isinstance(norm, RMSNorm) or type(norm) is not RMSNorm:
            return norm(self.get_computed(x))
        total, normed = add_and_normalize(addition, norm, interpret=self.interpret)
        self.arrays[id(x)] = record._replace(computed=total)
        return normed


def add_and_normalize(
    one: StreamSum, norm: RMSNorm, *, interpret: bool = False
) -> tuple[Float[Array, "*rows d"], Float[Array, "*rows d"]]:
    """Return the sum in the dtype of the stream, and its norm.

    Args:
        one: the addition.
        norm: the norm of the sum.
        interpret: compute the kernel in plain XLA, for tests without a GPU.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import triton

    stream, (parts, bias) = one
    count, rows, d = parts.shape
    arrays = {"stream": stream.reshape(rows, d), "parts": parts}
    if bias is not None:
        arrays["bias"] = bias
    if norm.has_weight:
        arrays["weight"] = norm.weight.get_value()
    size = get_triton_block(d)
    eps, offset = norm.eps, norm.offset

    def sum_and_norm(*refs: jax.Ref) -> None:
        by_name = dict(zip(arrays, refs, strict=False))
        total_out, normed_out = refs[-2:]
        row, column = pl.program_id(0), jnp.arange(size)
        mask = None if size == d else column < d
        other = None if mask is None else 0

        def load(array: jax.Ref, *at: jax.Array | int) -> jax.Array:
            return triton.load(array.at[(*at, column)], mask=mask, other=other).astype(jnp.float32)

        total = load(by_name["parts"], 0, row)
        for part in range(1, count):
            total += load(by_name["parts"], part, row)
        if bias is not None:
            total += load(by_name["bias"])
        rounded = (total + load(by_name["stream"], row)).astype(total_out.dtype)
        triton.store(total_out.at[row, column], rounded, mask=mask)
        total = rounded.astype(jnp.float32)
        normed = total * jax.lax.rsqrt(jnp.sum(total * total) / d + eps)
        if norm.has_weight:
            normed *= load(by_name["weight"]) + offset
        triton.store(normed_out.at[row, column], normed.astype(normed_out.dtype), mask=mask)

    total, normed = pl.pallas_call(
        sum_and_norm,
        grid=(rows,),
        out_shape=(
            jax.ShapeDtypeStruct((rows, d), stream.dtype),
            jax.ShapeDtypeStruct((rows, d), norm.dtype),
        ),
        compiler_params=triton.CompilerParams(num_warps=8 if size > 2048 else 4, num_stages=1),
        interpret=interpret,
        name="sum_and_norm",
    )(*arrays.values())
    return total.reshape(stream.shape), normed.reshape(stream.shape)
