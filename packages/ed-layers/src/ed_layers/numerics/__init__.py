"""The kernels that a program uses, and their errors against plain operations in float64.

`record.record_kernels` lists the kernels of a program while it is traced: code that selects a
kernel calls `KernelChoice.note`. A kernel is then called with random inputs of the shapes of the
program, forward and backward. Numbers of rows, tokens and columns are bounded, so a check needs
seconds; head dims, heads, page sizes, groups and depths of products are those of the program.

A further kind of kernels is a function that describes its use, and an entry of `record.USE_KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from ed_layers.fixed_order import KernelChoice

#: Largest error of a result and of a gradient, relative to the largest number, by the dtype of the
#: inputs.
TOLERANCES = {"float32": (1e-4, 5e-4), "bfloat16": (2e-2, 4e-2), "float16": (4e-3, 1e-2)}
#: The same for float32 products of accelerators, which round to TF32 or bfloat16 by default.
ROUNDED_PRODUCTS = (1e-2, 2e-2)

Draw = np.random.Generator


@dataclass(frozen=True)
class KernelUse:
    """A kernel with the shapes of one call.

    Attributes:
        title: kind and name of the kernel.
        case: shapes and features of the call.
        dtype: dtype of the inputs.
        run: calls the kernel with the inputs.
        reference: computes the same with plain operations, in float64.
        draw_inputs: draws the inputs with gradients.
        has_gradient: whether the program differentiates the kernel.
        choice: choice of kernels of the program.
    """

    title: str
    case: str
    dtype: np.dtype
    run: Callable[..., Any]
    reference: Callable[..., Any]
    draw_inputs: Callable[[Draw], Sequence[np.ndarray]]
    has_gradient: bool = True
    choice: KernelChoice = field(default_factory=KernelChoice)


class KernelErrors(NamedTuple):
    """Errors of a kernel, relative to the largest number of each result.

    Attributes:
        title, case: see `KernelUse`.
        forward, backward: errors of the result, and of the gradients; None = no gradient.
        limits: largest permitted errors.
    """

    title: str
    case: str
    forward: float
    backward: float | None
    limits: tuple[float, float]

    @property
    def is_right(self) -> bool:
        """Whether both errors are permitted."""
        forward, backward = self.limits
        return self.forward <= forward and (self.backward or 0.0) <= backward


def measure_errors(use: KernelUse) -> KernelErrors:
    """Return the errors of a kernel with random inputs."""
    draw = np.random.default_rng(0)
    inputs = [jnp.asarray(x, use.dtype) for x in use.draw_inputs(draw)]

    def run(inputs: Sequence[jax.Array]) -> Any:
        with use.choice.restore():
            return use.run(*inputs)

    out = jax.jit(run)(inputs)
    cotangent = [jnp.asarray(draw.normal(size=x.shape), x.dtype) for x in jax.tree.leaves(out)]
    cotangent = jax.tree.unflatten(jax.tree.structure(out), cotangent)

    def pull(function: Callable[..., Any], inputs: PyTree, cotangent: PyTree) -> PyTree:
        out, pull_back = jax.vjp(function, inputs)
        cotangent = jax.tree.map(lambda x, y: x.astype(y.dtype), cotangent, out)
        return pull_back(cotangent)[0]

    gradients = jax.jit(lambda x, y: pull(run, x, y))(inputs, cotangent) if use.has_gradient else ()
    exact_inputs, exact_cotangent = jax.tree.map(
        lambda x: np.asarray(x, np.float64), (inputs, cotangent)
    )
    with jax.enable_x64(True):
        expected = jax.jit(lambda x: use.reference(*x))(exact_inputs)
        forward = _get_error(out, expected)
        backward = None
        if use.has_gradient:
            exact = jax.jit(lambda x, y: pull(lambda x: use.reference(*x), x, y))
            backward = _get_error(gradients, exact(exact_inputs, exact_cotangent))
    return KernelErrors(use.title, use.case, forward, backward, get_error_limits(use))


def get_error_limits(use: KernelUse) -> tuple[float, float]:
    """Return the largest permitted errors of a result and of its gradients."""
    precision = jax.config.values["jax_default_matmul_precision"]
    is_rounded = jax.default_backend() != "cpu" and precision not in ("highest", "float32")
    if use.dtype == np.float32 and is_rounded:
        return ROUNDED_PRODUCTS
    return TOLERANCES[use.dtype.name]


def _get_error(result: PyTree, expected: PyTree) -> float:
    errors = [0.0]
    pairs = zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True)
    for x, y in pairs:
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        difference = float(np.abs(x - y).max(initial=0.0))
        largest = float(np.abs(y).max(initial=0.0)) or 1.0
        errors.append(difference / largest if np.isfinite(difference) else np.inf)
    return max(errors)


def describe_case(*parts: object, **features: object) -> str:
    """Return the case of a use: sizes, and the features that it has."""
    words = [str(part) for part in parts]
    words += [name for name, value in features.items() if value is True]
    words += [
        f"{name} {value}"
        for name, value in features.items()
        if value is not None and not isinstance(value, bool)
    ]
    return ", ".join(words)
