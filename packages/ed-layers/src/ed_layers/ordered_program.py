"""Programs whose sums and roundings do not depend on the other operations of a program.

`batch_invariant` promises one order for each sum (`ed_layers.fixed_order`). The native library
computes such sums; a sum that XLA computes can have another order in another batch, so a model with
such a sum is refused. XLA also contracts a product and a following sum to one operation, omits the
rounding of 16-bit numbers that it does not store, and has several exponentials. A program is
therefore rewritten: each operation is rounded to its dtype, and exponentials are polynomials.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from jax.core import ShapedArray
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

#: dtype -> integers of the same size.
_BITS = {jnp.dtype(k): n for k, n in (("float32", "uint32"), ("bfloat16", "uint16"))}


@jax.custom_jvp
def round_to_dtype(x: jax.Array) -> jax.Array:
    """Return an array whose numbers are rounded to its dtype in every program.

    XLA contracts a product and a following sum to one operation, and omits the rounding of 16-bit
    numbers that it does not store. Both depend on the other operations of a program.
    """
    if x.dtype not in _BITS:
        return x
    kind = _BITS[x.dtype]
    bits = jax.lax.bitcast_convert_type(x, kind)
    # The compiler cannot know that the second operand is 0 for all numbers.
    return jax.lax.bitcast_convert_type(bits ^ (x != x).astype(kind), x.dtype)


round_to_dtype.defjvps(lambda tangent, _, __: tangent)


#: Coefficients of `exp(r) = 1 + r + r**2 (c[0] r**5 + ... + c[5])` (Cephes).
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
#: ln 2 as a sum of two numbers; products of the first one with small integers are exact.
_LN2 = (0.693359375, -2.12194440e-4)
#: The smallest number whose exponential is not 0.
_LEAST = -87.3


@jax.custom_jvp
def exp(x: jax.Array) -> jax.Array:
    """Return `exp(x)`, computed in float32, in the dtype of `x`.

    XLA's CPU backend has two implementations of `exp`, which differ in the last bit, and selects
    one of them by the number of elements. This function is a polynomial.
    """
    # x = n ln 2 + r, so exp(x) = 2**n exp(r).
    dtype, x = x.dtype, x.astype(jnp.float32)
    n = jnp.round(jnp.clip(x, _LEAST, 89.0) * 1.44269504)
    r = jnp.clip(x, _LEAST, 89.0) - round_to_dtype(n * _LN2[0]) - round_to_dtype(n * _LN2[1])
    y = jnp.full_like(r, _EXP[0])
    for c in _EXP[1:]:
        y = round_to_dtype(y * r) + c
    y = round_to_dtype(y * round_to_dtype(r * r)) + r + 1
    # Two factors, because 2**128 is not a float32.
    power = n.astype(jnp.int32)
    for part in (power >> 1, power - (power >> 1)):
        y = y * jax.lax.bitcast_convert_type((part + 127) << 23, jnp.float32)
    return jnp.where(x < _LEAST, 0, y).astype(dtype)


exp.defjvps(lambda tangent, y, _: tangent * y)


@jax.custom_jvp
def _sigmoid(x: jax.Array) -> jax.Array:
    """Return the sigmoid of `x`, computed in float32, in the dtype of `x`."""
    return (1 / (1 + exp(-x.astype(jnp.float32)))).astype(x.dtype)


_sigmoid.defjvps(lambda tangent, y, _: tangent * y * (1 - y))


#: Name of the function of `fixed_order.with_ordinary_gradient` in a program.
ONLY_FOR_GRADIENTS = "only_for_gradients"

#: Primitives of jax that sum numbers, or combine partial sums of devices.
SUMS = {"dot_general", "ragged_dot_general", "conv_general_dilated", "reduce_sum", "scatter-add"}
SUMS |= {"cumsum", "cumlogsumexp", "reduce_window_sum", "psum", "psum_invariant", "reduce_scatter"}

#: Primitives that return numbers of their operands, and calls. A missing name costs time only.
_EXACT = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "pad"}
_EXACT |= {
    "dynamic_update_slice",
    "concatenate",
    "gather",
    "scatter",
    "rev",
    "copy",
    "name",
    "sort",
}
_EXACT |= {"select_n", "max", "min", "neg", "abs", "reduce_max", "reduce_min", "top_k", "ffi_call"}
_EXACT |= {"sharding_constraint", "optimization_barrier", "custom_vjp_call", "shard_map"}
_EXACT |= {"jit", "remat2", "scan", "while", "cond"}
#: Primitives whose float32 results XLA neither contracts nor omits.
_EXACT_FLOAT32 = _EXACT | {"add", "sub", "convert_element_type"}
#: Calls whose functions are not rewritten. `KernelChoice.wrap_function` rewrites functions with a
#: gradient of their own, because jax traces their forward pass again for a gradient.
OPAQUE = {"custom_vjp_call", "custom_jvp_call", "shard_map"}
#: Primitive -> function that replaces it.
REPLACEMENTS = {"exp": exp, "logistic": _sigmoid}


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
    results = jaxpr_as_fun(closed.replace(jaxpr=rewrite(closed.jaxpr)))()
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def round_operations(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of trees of arrays whose operations are rewritten."""

    def call_rewritten(*arguments: object) -> Any:
        closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arguments)
        rewritten = closed.replace(jaxpr=rewrite(closed.jaxpr))
        results = jaxpr_as_fun(rewritten)(*jax.tree.leaves(arguments))
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call_rewritten


def rewrite(jaxpr: Jaxpr) -> Jaxpr:
    """Return a program in which each operation is rounded, and exponentials are polynomials."""
    equations: list[JaxprEqn] = []
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        outputs = equation.outvars
        if name in REPLACEMENTS and jnp.issubdtype(get_shape(outputs[0]).dtype, jnp.floating):
            call = REPLACEMENTS[name]
            equation = build_call(call, equation.invars[0], outputs[0], equation)
        elif name not in OPAQUE and equation.params.get("name") != ONLY_FOR_GRADIENTS:
            equation = equation.replace(params=rewrite_functions(equation.params))
        rounded = {at: output for at, output in enumerate(outputs) if is_inexact(name, output)}
        unrounded = [Var(v.aval) if at in rounded else v for at, v in enumerate(outputs)]
        equations.append(equation.replace(outvars=unrounded))
        for at, output in rounded.items():
            call = round_to_dtype
            equations.append(build_call(call, unrounded[at], output, equation))
    return jaxpr.replace(eqns=equations)


def rewrite_functions(params: Mapping[str, Any]) -> dict[str, object]:
    """Return the parameters of an operation with rewritten functions."""

    def rewrite_value(value: object) -> object:
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=rewrite(value.jaxpr))
        if isinstance(value, Jaxpr):
            return rewrite(value)
        return value

    return {
        name: tuple(map(rewrite_value, value)) if name == "branches" else rewrite_value(value)
        for name, value in params.items()
    }


def get_shape(array: Var | Literal) -> ShapedArray:
    """Return shape and dtype of an array of a program."""
    assert isinstance(array.aval, ShapedArray)
    return array.aval


def is_inexact(name: str, output: Var) -> bool:
    """Return whether XLA may omit the rounding of an operation, or contract the operation."""
    array, exact = output.aval, {jnp.bfloat16: _EXACT, jnp.float32: _EXACT_FLOAT32}
    return isinstance(array, ShapedArray) and any(
        array.dtype == kind and name not in names for kind, names in exact.items()
    )


def build_call(
    function: Callable[[jax.Array], jax.Array],
    operand: Var | Literal,
    output: Var,
    origin: JaxprEqn,
) -> JaxprEqn:
    """Return the equation `output = function(operand)` at the place of another equation."""
    array = get_shape(operand)
    call = trace_call(function, array.shape, jnp.dtype(array.dtype).name)
    return call.replace(
        invars=[operand], outvars=[output], ctx=origin.ctx, source_info=origin.source_info
    )


@lru_cache(1024)
def trace_call(
    function: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: str
) -> JaxprEqn:
    """Return the equation that calls a function with a gradient of its own."""
    (equation,) = jax.make_jaxpr(function)(jax.ShapeDtypeStruct(shape, dtype)).eqns
    return equation


def find_unordered_sums(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yield the equations that sum more than two floating-point numbers."""
    for equation in jaxpr.eqns:
        if equation.params.get("name") == ONLY_FOR_GRADIENTS:
            continue
        if (
            equation.primitive.name in SUMS
            and jnp.issubdtype(get_shape(equation.outvars[0]).dtype, jnp.floating)
            and terms(equation) > 2
        ):
            yield equation
        for part in _parts(equation):
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
    shape = get_shape(equation.invars[0]).shape
    return math.prod(shape[axis] for axis in axes)


def _parts(equation: JaxprEqn) -> Iterator[Jaxpr]:
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
