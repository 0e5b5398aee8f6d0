"""Arrays on devices, from slices of files: each device gets its own, and a stack its layers.

Where the devices' memory is not the host's, a large stack is filled layer by layer, so that the
host has one layer at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra import parameter_names
from ed_layers.quantization.qarray import QArray
from ed_layers.quantization.simulated import Simulated
from flax import nnx

from ed_models.checkpoints.quantized_tensors import encoded_as, get_matrix_parts
from ed_models.checkpoints.weight_map import get_index_ranges
from ed_models.weights.blocks import Shape

#: `read(name, window, out)` fills `out` with those positions of a layer's tensor, in its dtype.
_Read = Callable[[str, Sequence[range], np.ndarray], None]
_Placement = jax.sharding.Sharding
_Leaf = TypeVar("_Leaf", jax.Array, QArray)

_ALIGNED = 64  # bytes; jax reuses a host buffer without a copy if its start is a multiple
_LARGE = 2**26  # bytes; a stack of at least this size is filled layer by layer


def fill(path: tuple, leaf: jax.ShapeDtypeStruct, placement: _Placement, read: _Read) -> jax.Array:
    """Make one parameter (a stack of layers, or one tensor)."""
    return _fill(
        parameter_names.canonical(path), parameter_names.is_stacked(path), leaf, placement, read
    )


def fill_simulated(path: tuple, leaf: Simulated, placement: Simulated, read: _Read) -> Simulated:
    """Create a trainable matrix that is rounded in products."""
    place = placement.value
    return replace(leaf, value=fill(path, leaf.value, place, read))  # type: ignore[arg-type]


def fill_stored(path: tuple, leaf: QArray, placement: QArray, read: _Read) -> QArray:
    """Make a quantized matrix from its codes and scales."""
    names, stacked = parameter_names.canonical(path), parameter_names.is_stacked(path)
    leaves = [
        _fill([f"{name}.{part}" for name in names], stacked, array, place, read)
        for (part, array), place in zip(
            get_matrix_parts(leaf).items(), jax.tree.leaves(placement), strict=True
        )
    ]
    return jax.tree.unflatten(jax.tree.structure(leaf), leaves)


def fill_quantized(path: tuple, leaf: QArray, placement: QArray, read: _Read) -> QArray:
    """Make a quantized matrix from a plain one, which is in memory for one layer at a time."""
    names, stacked = parameter_names.canonical(path), parameter_names.is_stacked(path)
    place: Any = placement.codes  # codes divide as the matrix does
    place = _get_layer_placement(place) if stacked else place
    shape = leaf.shape[1:] if stacked else leaf.shape

    def layer(name: str) -> QArray:
        dense_layer = _build_array(shape, place, partial(read, name), leaf.dtype)
        return encoded_as(dense_layer, leaf)

    if not stacked:
        return jax.device_put(layer(names[0]), placement)
    stack = _empty(leaf, placement)
    for row, name in enumerate(names):
        stack = jax.block_until_ready(_put(placement)(stack, layer(name), np.int32(row)))
    return stack


def _fill(
    names: Sequence[str],
    stacked: bool,
    leaf: jax.ShapeDtypeStruct,
    placement: _Placement,
    read: _Read,
) -> jax.Array:
    if not stacked:
        return _build_array(leaf.shape, placement, partial(read, names[0]), leaf.dtype)
    small = math.prod(leaf.shape) * leaf.dtype.itemsize < _LARGE
    if small or _in_host_memory(placement) or _divides_layers(placement):

        def fill(window: Sequence[range], out: np.ndarray) -> None:
            for row, layer in enumerate(window[0]):
                read(names[layer], window[1:], out[row, ...])

        return _build_array(leaf.shape, placement, fill, leaf.dtype)
    stack, by_layer = _empty(leaf, placement), _get_layer_placement(placement)
    for row, name in enumerate(names):
        layer = _build_array(leaf.shape[1:], by_layer, partial(read, name), leaf.dtype)
        stack = jax.block_until_ready(_put(placement)(stack, layer, np.int32(row)))
    return stack


def _empty(leaf: jax.ShapeDtypeStruct | QArray, placement: _Placement | QArray) -> Any:
    """Memory for a stack of arrays like these, on its devices."""
    return jax.tree.map(lambda a, place: jnp.zeros(a.shape, a.dtype, device=place), leaf, placement)


@lru_cache(maxsize=64)  # matrices of one shape share the program
def _put(placement: _Placement | QArray) -> Callable[[Any, Any, np.int32], Any]:
    """What writes a layer into its row of a stack."""
    return jax.jit(_with_row, donate_argnums=0, out_shardings=placement)


def _with_row(stack: _Leaf, layer: _Leaf, row: jax.Array) -> _Leaf:
    write = jax.lax.dynamic_update_index_in_dim
    return jax.tree.map(lambda a, layer_leaf: write(a, layer_leaf, row, 0), stack, layer)


def _divides_layers(placement: _Placement) -> bool:
    named = isinstance(placement, jax.sharding.NamedSharding)
    return named and len(placement.spec) > 0 and placement.spec[0] is not None


def _get_layer_placement(placement: _Placement) -> _Placement:
    """The location of one layer of a stack."""
    if not isinstance(placement, jax.sharding.NamedSharding):
        return placement
    return jax.sharding.NamedSharding(
        placement.mesh, jax.sharding.PartitionSpec(*placement.spec[1:])
    )


def _in_host_memory(placement: _Placement) -> bool:
    """Whether all devices use host memory, so that jax reuses an aligned buffer without a copy.

    A stack is then filled in place. Filling layer by layer would copy the stack once more.
    """
    return all(device.platform == "cpu" for device in placement.device_set)


def _buffer(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory without values, aligned as jax's own is."""
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    start = -memory.ctypes.data % _ALIGNED
    return memory[start : start + size].view(dtype).reshape(shape)


def _build_array(
    shape: Shape,
    placement: _Placement,
    fill: Callable[[Sequence[range], np.ndarray], None],
    dtype: np.dtype,
) -> jax.Array:
    """Make an array on the devices; `fill(window, out)` writes a slice of it, each slice once."""
    slices: dict[tuple, np.ndarray] = {}  # replicas ask for the same slice

    def read(index: tuple[slice, ...] | None) -> np.ndarray:
        assert index is not None
        window = get_index_ranges(index, shape)
        key = tuple((w.start, w.stop) for w in window)
        if key not in slices:
            slices[key] = _buffer([len(w) for w in window], dtype)
            fill(window, slices[key])
        return slices[key]

    return jax.make_array_from_callback(shape, placement, read)


class SeparateParam(nnx.Param):
    """A parameter in a weight file of its own, such as `2_Dense/model.safetensors`.

    The weight rules of the model do not apply to the parameter.
    """
