"""Arrays of many layers: one stack for scanned depth, separate arrays for unrolled depth.

Legend: L layers, b rows, s new tokens, g kv heads, t slots, k numbers of a head, n scales of a
head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ed_layers.cache.codes import Codes, Format, Numbers

Layout = Literal["stacked", "leaves"]
Layer = int | Int[Array, ""]

#: Index of one layer in an array: `(layer,)` in a stack, or `()`.
At = tuple[Layer, ...]

# One array [L, ...] for scanned depth (a scan carries the array and indexes it by a traced layer),
# or a tuple of L arrays for unrolled depth: a slice of a stack inside jit is a copy.
PerLayer = Numbers | tuple[Numbers, ...]

#: Placement of the array of one layer: a sharding, a function of the axis names and the shape that
#: returns a sharding, or None (jax decides).
Place = Sharding | Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding | None] | None

NumbersT = TypeVar("NumbersT", jax.Array, Numbers)
DimT = TypeVar("DimT")


class StorageOptions(TypedDict, total=False):
    """The fields of `Storage`, as keyword arguments of caches."""

    dtype: DTypeLike
    layout: Layout
    sharding: Place
    format: Format | None


@dataclass(frozen=True)
class Storage:
    """Options of the arrays of a cache.

    Attributes:
        dtype: dtype of keys and values that are not quantized.
        layout: "stacked" for a scanned model, "leaves" for an unrolled model.
        sharding: placement of the arrays of one layer; see `Place`.
        format: format of 8-bit storage; None = numbers of `dtype`.
    """

    dtype: DTypeLike = jnp.float32
    layout: Layout = "stacked"
    sharding: Place = None
    format: Format | None = None

    def place(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Sharding | None:
        """Return the sharding of an array of one layer."""
        return self.sharding(axes, shape) if callable(self.sharding) else self.sharding

    def numbers(
        self, num_layers: int, shape: tuple[int, ...], sharding: Sharding | None, slot_axis: int
    ) -> PerLayer:
        """Allocate zeros for keys or values of all layers; codes and scales if quantized.

        Args:
            shape, sharding: shape and sharding of one layer; the last axis has the numbers of a
                head.
            slot_axis: the axis of the slots; scales have this axis last.
        """

        def make(lead: tuple[int, ...]) -> Numbers:
            if self.format is None:
                return zeros(shape, self.dtype, sharding, lead=lead)
            scales = dims_of_scales(shape, slot_axis, self.format.groups(shape[-1]))
            scale_sharding = sharding_of_scales(sharding, len(shape), slot_axis)
            codes = zeros(shape, self.format.dtype, sharding, lead=lead)
            return Codes(codes, zeros(scales, jnp.float32, scale_sharding, lead=lead))

        return self.layers(num_layers, make)

    def layers(
        self, num_layers: int, make: Callable[[tuple[int, ...]], NumbersT]
    ) -> NumbersT | tuple[NumbersT, ...]:
        """Allocate an array for all layers; `make` creates an array from its leading dimensions."""
        if self.layout == "stacked":
            return make((num_layers,))
        return tuple(make(()) for _ in range(num_layers))


def replicate_place(place: Place) -> Place:
    """Return the placement of arrays that every device of the same mesh has whole."""
    if callable(place):
        return lambda axes, shape: place((None,) * len(axes), shape)
    return NamedSharding(place.mesh, PartitionSpec()) if isinstance(place, NamedSharding) else place


def zeros(
    shape: tuple[int, ...],
    dtype: DTypeLike,
    sharding: Sharding | None = None,
    *,
    lead: tuple[int, ...] = (),
) -> jax.Array:
    """Allocate zeros on their devices; the layer axis of a stack is never sharded.

    On CPUs, other threads write the zeros after this function has returned.
    """
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*(None,) * len(lead), *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
    example = jax.device_put(np.zeros((), dtype))
    if isinstance(example, Tracer):
        array = jnp.zeros((*lead, *shape), dtype)
        return array if sharding is None else jax.device_put(array, sharding)
    devices = example.devices() if sharding is None else sharding.device_set
    is_local = all(device.process_index == jax.process_index() for device in devices)
    if is_local and all(device.platform == "cpu" for device in devices):
        return jax.device_put(np.zeros((*lead, *shape), dtype), sharding)
    return jnp.zeros((*lead, *shape), dtype, device=sharding)


def dims_of_scales(dims: Sequence[DimT], slot_axis: int, groups: DimT) -> tuple[DimT, ...]:
    """Convert sizes or mesh axes of numbers [.., t, .., k] to those of their scales [.., n, t]."""
    return (*dims[:slot_axis], *dims[slot_axis + 1 : -1], groups, dims[slot_axis])


def sharding_of_scales(sharding: Sharding | None, ndim: int, slot_axis: int) -> Sharding | None:
    """Convert the sharding of `ndim`-dimensional numbers to the sharding of their scales."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    dims = (*sharding.spec, *(None,) * ndim)[:ndim]
    return NamedSharding(sharding.mesh, PartitionSpec(*dims_of_scales(dims, slot_axis, None)))


def get_layout(storage: PerLayer) -> Layout:
    """Return the storage layout of the layers."""
    return "leaves" if isinstance(storage, tuple) else "stacked"


def locate(storage: NumbersT | tuple[NumbersT, ...], layer: Layer) -> tuple[NumbersT, At]:
    """Return the array that contains a layer, and the index of the layer in the array."""
    if isinstance(storage, tuple):
        return storage[static_layer(layer)], ()
    return storage, (layer,)


def take_layer(numbers: NumbersT, at: At) -> NumbersT:
    """Slice a layer from an array; `locate` returns both arguments."""
    if not at:
        return numbers
    index = jnp.asarray(at[0])
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, index, 0, keepdims=False), numbers
    )


def update_layer(
    storage: NumbersT | tuple[NumbersT, ...],
    layer: Layer,
    update: Callable[[NumbersT, At], NumbersT],
) -> NumbersT | tuple[NumbersT, ...]:
    """Replace one layer by `update(numbers, at)`, which writes into the array that contains the
    layer. The update is in place, without a slice and a copy back."""
    if isinstance(storage, tuple):
        index = static_layer(layer)
        return (*storage[:index], update(storage[index], ()), *storage[index + 1 :])
    return update(storage, (layer,))


def take_rows(
    storage: NumbersT | tuple[NumbersT, ...], rows: Int[Array, " n"]
) -> NumbersT | tuple[NumbersT, ...]:
    """Select rows of the arrays of all layers, in this order; a row may occur several times."""
    axis = 0 if isinstance(storage, tuple) else 1
    return jax.tree.map(lambda array: jnp.take(array, rows, axis=axis, mode="clip"), storage)


def static_layer(layer: Layer) -> int:
    """Return the number of a layer as an int; a traced number cannot index unrolled storage."""
    if isinstance(layer, int):
        return layer
    raise TypeError(
        "this cache keeps one array per layer, for unrolled models, but a scanned model reads it: "
        "create it by the model's own init_cache()"
    )
