"""Sums in one order: the same inputs produce the same bits in every program and on every mesh.

`batch_invariant` of a configuration selects this order. The native library computes products and
attention: a sum has one order, whatever the other rows are. On several devices each sum is computed
whole on one device, so that no order of a reduction over devices matters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

if TYPE_CHECKING:
    from ed_infra.config import EasyDeLBaseConfig

#: Logical axis of each dimension of an array; None = the dimension is not split.
Axes = Sequence[str | None]

_CONFIG: ContextVar[EasyDeLBaseConfig | None] = ContextVar("sums have one order", default=None)


@contextmanager
def chosen_by(config: EasyDeLBaseConfig) -> Iterator[None]:
    """Trace the block with sums in one order if the configuration selects this order."""
    with restore_config(config if config.batch_invariant else None):
        yield


@contextmanager
def restore_config(config: EasyDeLBaseConfig | None) -> Iterator[None]:
    """Trace the block with the order that `get_active_config` returned."""
    token = _CONFIG.set(config)
    try:
        yield
    finally:
        _CONFIG.reset(token)


def get_active_config() -> EasyDeLBaseConfig | None:
    """Return the configuration that selects sums in one order; None without one."""
    return _CONFIG.get()


def active() -> bool:
    """Return whether sums have one order."""
    return _CONFIG.get() is not None


def several_devices() -> bool:
    """Return whether sums have one order on a mesh of several devices, outside a `shard_map`."""
    config = _CONFIG.get()
    if config is None or config.mesh.size == 1:
        return False
    return not jax.sharding.get_abstract_mesh().manual_axes


def in_part() -> bool:
    """Return whether sums have one order, and the code runs on one device: a mesh of one device, or
    a part of a `shard_map`."""
    return active() and not several_devices()


def unshard_last_axis(x: jax.Array) -> jax.Array:
    """Return an array whose last axis is not split over devices, so that its sum has one order."""
    config = _CONFIG.get()
    if config is None or not several_devices():
        return x
    spec = PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * (x.ndim - 1), None)
    return jax.lax.with_sharding_constraint(x, NamedSharding(config.mesh, spec))


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
def sigmoid(x: jax.Array) -> jax.Array:
    """Return the sigmoid of `x`, computed in float32, in the dtype of `x`."""
    return (1 / (1 + exp(-x.astype(jnp.float32)))).astype(x.dtype)


sigmoid.defjvps(lambda tangent, y, _: tangent * y * (1 - y))


@jax.custom_jvp
def replace_gradient(value: jax.Array, reference: jax.Array) -> jax.Array:
    """Return the first array with the gradient of the second, which has other roundings."""
    return value


replace_gradient.defjvp(lambda arrays, tangents: (arrays[0], tangents[1]))


def with_ordinary_gradient(values: object, function: Callable[[], Any]) -> Any:
    """Return a tree of arrays with the gradients of the tree that a function returns.

    The function is traced without the order, and only a program with gradients computes it. Its
    arrays have the sizes of `values`.
    """

    def only_for_gradients() -> Any:
        return function()

    with restore_config(None):
        reference_values = jax.jit(only_for_gradients)()
    return jax.tree.map(
        lambda value, reference: replace_gradient(value.reshape(reference.shape), reference),
        values,
        reference_values,
    )


#: Name, in a program, of the function of `with_ordinary_gradient`.
ONLY_FOR_GRADIENTS = "only_for_gradients"


def run_on_shards(
    function: Callable[..., Any],
    arrays: Sequence[jax.Array],
    axes: Sequence[Axes],
    results: Sequence[tuple[Axes, tuple[int, ...]]],
) -> Any:
    """Return `function(*arrays)`, computed by each device on its part of the arrays.

    Args:
        function: a function of arrays whose results are a list.
        arrays, axes: the arguments and their logical axes, as `batch` and `heads`.
        results: logical axes and shapes of the results.
    """
    config = _CONFIG.get()
    if config is None or not several_devices():
        return function(*arrays)

    def spec(names: Axes, shape: tuple[int, ...]) -> PartitionSpec:
        return config.partition_manager.resolve(tuple(names), "train", shape, config.mesh)

    run = jax.shard_map(
        function,
        mesh=config.mesh,
        in_specs=tuple(spec(names, x.shape) for names, x in zip(axes, arrays, strict=True)),
        out_specs=[spec(names, shape) for names, shape in results],
        check_vma=False,
    )
    return run(*arrays)
