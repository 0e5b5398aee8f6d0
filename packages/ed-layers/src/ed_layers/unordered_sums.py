"""Sums of a function whose order XLA chooses for each program.

`batch_invariant` promises one order for each sum (`ed_layers.fixed_order`). The native library
computes such sums; a sum that XLA computes can have another order in another batch, so a model with
such a sum is refused.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from ed_layers import fixed_order

#: Primitives of jax that sum numbers, or combine partial sums of devices.
SUMS = {"dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "scatter-add"}
SUMS |= {"cumsum", "cumlogsumexp", "reduce_window_sum", "psum", "psum_invariant", "reduce_scatter"}


def call_ordered(function: Callable[[], Any]) -> Any:
    """Call a function and return its result, a tree of arrays.

    Raise ConfigError if XLA computes a sum of floating-point numbers on a CPU for the first array.
    Sums of two numbers have one order.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)()
    outputs = len(closed.jaxpr.outvars)
    used, _ = dce_jaxpr(closed.jaxpr, [at == 0 for at in range(outputs)])
    places = sorted({describe_equation(equation) for equation in find_unordered_sums(used)})
    if places:
        listing = "; ".join(places[:4]) + (
            f" and {len(places) - 4} more" if len(places) > 4 else ""
        )
        raise ConfigError(
            "batch_invariant=True: this model has sums without a fixed order, because the native "
            f"library does not compute them: {listing}. Set batch_invariant to false in the "
            "configuration of the model; the option of the same name of the engine needs no kernels"
        )
    return jax.tree.unflatten(jax.tree.structure(shapes), jaxpr_as_fun(closed)())


def find_unordered_sums(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations that sum more than two floating-point numbers."""
    for equation in jaxpr.eqns:
        if equation.params.get("name") == fixed_order.ONLY_FOR_GRADIENTS:
            continue
        result: Any = equation.outvars[0].aval if equation.outvars else None
        if (
            equation.primitive.name in SUMS
            and jnp.issubdtype(result.dtype, jnp.floating)
            and terms(equation) > 2
        ):
            yield equation
        for part in parts(equation):
            yield from find_unordered_sums(part)


def terms(equation: JaxprEqn) -> float:
    """Return the number of terms of a product or of a sum over axes; infinite for other sums."""
    params: dict[str, Any] = equation.params
    if equation.primitive.name == "dot_general":
        axes = params["dimension_numbers"][0][0]
    elif equation.primitive.name == "reduce_sum":
        axes = params["axes"]
    else:
        return math.inf
    summed: Any = equation.invars[0].aval
    return math.prod(summed.shape[axis] for axis in axes)


def parts(equation: JaxprEqn) -> Iterator[Jaxpr]:
    """Yield the functions that an equation calls on a CPU."""
    params: dict[str, Any] = equation.params
    platforms = params.get("branches_platforms")
    for value in params.values():
        inner = list(value) if isinstance(value, tuple | list) else [value]
        if platforms is not None and value is params.get("branches"):
            cpu_branches = [
                b for b, names in zip(inner, platforms, strict=True) if names and "cpu" in names
            ]
            inner = cpu_branches or inner
        for part in inner:
            if isinstance(part, ClosedJaxpr):
                yield part.jaxpr
            elif isinstance(part, Jaxpr):
                yield part


def describe_equation(equation: JaxprEqn) -> str:
    """Describe an equation: its name, and the function of the project that computes it."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if f"{os.sep}site-packages{os.sep}" not in frame.file_name or "ed_" in frame.file_name:
            file = os.path.basename(frame.file_name)
            return f"{equation.primitive.name} of {frame.function_name} in {file}"
    return equation.primitive.name
