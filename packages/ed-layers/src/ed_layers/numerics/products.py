"""Uses of products: with plain matrices, with several matrices in one call, and with codes.

Legend: n rows, i in features, o out features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ed_layers.fixed_order import KernelChoice
from ed_layers.numerics import KernelUse, describe_case
from ed_layers.projections.dot import Combination, Weight, multiply
from ed_layers.projections.matmul import matmul
from ed_layers.quantization.encoding import encode
from ed_layers.quantization.qarray import QArray, Turned
from ed_layers.quantization.stored import Scales

#: Bounds of the sizes of a check: rows and columns of a product.
PRODUCT_ROWS, PRODUCT_COLUMNS = 256, 2048


def describe_product(x: jax.Array, w: jax.Array, transposed: bool) -> KernelUse:
    """Return the use of the native product of a plain matrix."""
    rows, inputs = min(x.size // x.shape[-1], PRODUCT_ROWS), x.shape[-1]
    outputs = min(w.shape[0 if transposed else 1], PRODUCT_COLUMNS)
    size = (outputs, inputs) if transposed else (inputs, outputs)

    def reference(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ (w.T if transposed else w)

    return KernelUse(
        "product: native",
        describe_case(
            f"{rows} x {inputs} x {outputs}", np.dtype(x.dtype).name, transposed=transposed
        ),
        np.dtype(x.dtype),
        lambda x, w: matmul(x, w, transposed=transposed),
        reference,
        lambda draw: [draw.normal(size=(rows, inputs)), draw.normal(size=size)],
    )


def describe_products(
    static: Combination, x: jax.Array, weights: Sequence[Weight], biases: Sequence[jax.Array]
) -> KernelUse:
    """Return the use of one native call with several matrices."""
    rows, inputs = min(x.size // x.shape[-1], PRODUCT_ROWS), x.shape[-1]
    outputs = [min(w.shape[-1], PRODUCT_COLUMNS) for w in weights]
    plans = [prepare_codes(w, inputs, o) for w, o in zip(weights, outputs, strict=True)]
    builders = [build for build in plans if build is not None]
    is_plain, count = not builders, len(weights)

    def split(arrays: Sequence[jax.Array]) -> tuple[jax.Array, tuple[Any, ...], tuple[Any, ...]]:
        x, *remaining_arrays = arrays
        matrices = tuple(remaining_arrays[:count]) if is_plain else tuple(f() for f in builders)
        return x, matrices, tuple(remaining_arrays[count if is_plain else 0 :])

    def run(*arrays: jax.Array) -> Any:
        x, matrices, biases = split(arrays)
        static_now = static._replace(choice=KernelChoice.get_current())
        return multiply(static_now, x, matrices, biases)

    def reference(*arrays: jax.Array) -> Any:
        x, matrices, biases = split(arrays)
        results = [x @ (w if is_plain else decode_exactly(w)) for w in matrices]
        if biases:
            results = [y + bias for y, bias in zip(results, biases, strict=True)]
        return static.of(results)

    sizes = [(rows, inputs)]
    sizes += [(inputs, o) for o in outputs] if is_plain else []
    sizes += [(o,) for o in outputs] if biases else []
    words = describe_case(
        f"{rows} x {inputs} x {' + '.join(map(str, outputs))}",
        x.dtype.name,
        *[w.format for w in weights[:1] if isinstance(w, QArray)],
        activation=static.act,
        gated=static.gated,
        biases=bool(biases),
    )
    return KernelUse(
        "products: Triton" if static.runs_on_gpu(x, weights) else "products: native",
        words,
        np.dtype(x.dtype),
        run,
        reference,
        lambda draw: [draw.normal(size=size) * size[0] ** -0.5 for size in sizes],
    )


def describe_codes(x: jax.Array, w: QArray | Turned, kernel: str) -> KernelUse:
    """Return the use of a product with a quantized matrix.

    Args:
        kernel: name of the kernel.
    """
    rows, inputs = min(x.size // x.shape[-1], PRODUCT_ROWS), x.shape[-1]
    is_turned, table = isinstance(w, Turned), w.table if isinstance(w, Turned) else w
    outputs = min(w.shape[-1], PRODUCT_COLUMNS)
    build = prepare_codes(table, inputs, outputs)
    assert build is not None, "a matrix of codes"

    def run(x: jax.Array) -> jax.Array:
        return (Turned(build().transpose()) if is_turned else build()).product(x)

    def reference(x: jax.Array) -> jax.Array:
        return quantize_exactly(x, build()) @ decode_exactly(build())

    words = describe_case(
        f"{rows} x {inputs} x {outputs}",
        table.format,
        np.dtype(x.dtype).name,
        transposed=is_turned,
        activations=table.activations,
    )
    dtype = np.dtype(x.dtype)
    return KernelUse(
        f"product of codes: {kernel}",
        words,
        dtype,
        run,
        reference,
        lambda draw: [draw.normal(size=(rows, inputs))],
        # Rounded activations have the gradient of the activations.
        has_gradient=not table.activations,
    )


def prepare_codes(w: Weight, inputs: int, outputs: int) -> Callable[[], QArray] | None:
    """Return a function that builds a random quantized matrix [i, o] in the format of another
    matrix; None if the matrix is a plain array."""
    if not isinstance(w, QArray):
        return None
    group = inputs // w.groups if w.groups > 1 else inputs
    double, rounds, name = isinstance(w.scale, Scales), w.activations, w.format

    @cache
    def build() -> QArray:
        numbers = np.random.default_rng(3).normal(size=(inputs, outputs))
        with jax.ensure_compile_time_eval():
            x = jnp.asarray(numbers, jnp.float32)
            return encode(x, name, group, double=double, activations=rounds)

    return build


def decode_exactly(w: QArray) -> jax.Array:
    """Return the numbers of a quantized matrix."""
    return w.dense(jnp.float32).astype(jnp.float64)


def quantize_exactly(x: jax.Array, w: QArray) -> jax.Array:
    """Return activations as the product with a matrix rounds them."""
    if not w.activations:
        return x
    grouped = x.reshape(*x.shape[:-1], w.groups, -1)
    scale = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True) / 127
    rounded = jnp.round(grouped / jnp.where(scale == 0, 1, scale)) * scale
    return rounded.reshape(x.shape)
