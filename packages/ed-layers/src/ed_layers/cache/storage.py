"""Arrays of many layers: stacked for scanned depth, apart for unrolled depth.

Legend: L layers, b rows, s new tokens, g kv heads, t slots, k numbers of a head, n scales of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from ed_layers.cache.codes import Codes, Format, Numbers

Layout = Literal["stacked", "leaves"]
Layer = int | Int[Array, ""]

#: Where the arrays of one layer are in the numbers that hold it: `(layer,)` in a stack, or `()`.
At = tuple[Layer, ...]

# One array [L, ...] for scanned depth (a scan carries it and indexes it by a traced layer), or a
# tuple of L arrays for unrolled depth: slicing a stack inside jit copies the slice.
PerLayer = Numbers | tuple[Numbers, ...]

#: Where an array of one layer goes: a sharding, a function that gives it by the names of the axes
#: and the shape, or None, which leaves it to jax.
Place = Sharding | Callable[[tuple[str | None, ...], tuple[int, ...]], Sharding | None] | None

NumbersT = TypeVar("NumbersT", jax.Array, Numbers)
DimT = TypeVar("DimT")


class StorageOptions(TypedDict, total=False):
    """The fields of `Storage`, as caches take them."""

    dtype: DTypeLike
    layout: Layout
    sharding: Place
    format: Format | None


@dataclass(frozen=True)
class Storage:
    """How a cache stores its arrays.

    Attributes:
        dtype: of keys and values, unless they are quantized.
        layout: "stacked" for a scanned model, "leaves" for an unrolled one.
        sharding: of the arrays of one layer; see `Place`.
        format: of 8-bit storage; None stores `dtype`.
    """

    dtype: DTypeLike = jnp.float32
    layout: Layout = "stacked"
    sharding: Place = None
    format: Format | None = None

    def place(self, axes: tuple[str | None, ...], shape: tuple[int, ...]) -> Sharding | None:
        """The sharding of an array of one layer."""
        return self.sharding(axes, shape) if callable(self.sharding) else self.sharding

    def numbers(
        self, num_layers: int, shape: tuple[int, ...], sharding: Sharding | None, slot_axis: int
    ) -> PerLayer:
        """Allocate zeros for keys or values of all layers; codes and scales if quantized.

        Args:
            shape, sharding: of one layer, the numbers of a head last.
            slot_axis: the dimension along which tokens lie; scales have it last.
        """

        def make(lead: tuple[int, ...]) -> Numbers:
            if self.format is None:
                return zeros(lead, shape, self.dtype, sharding)
            scales = dims_of_scales(shape, slot_axis, self.format.groups(shape[-1]))
            where = sharding_of_scales(sharding, len(shape), slot_axis)
            codes = zeros(lead, shape, self.format.dtype, sharding)
            return Codes(codes, zeros(lead, scales, jnp.float32, where))

        return self.layers(num_layers, make)

    def layers(
        self, num_layers: int, make: Callable[[tuple[int, ...]], NumbersT]
    ) -> NumbersT | tuple[NumbersT, ...]:
        """Allocate an array for all layers; `make` makes it, given its leading dims."""
        if self.layout == "stacked":
            return make((num_layers,))
        return tuple(make(()) for _ in range(num_layers))


def zeros(
    lead: tuple[int, ...], shape: tuple[int, ...], dtype: DTypeLike, sharding: Sharding | None
) -> jax.Array:
    """Zeros on their devices; the layer axis of a stack is never sharded."""
    array = jnp.zeros((*lead, *shape), dtype)
    if isinstance(sharding, NamedSharding):
        spec = PartitionSpec(*(None,) * len(lead), *sharding.spec)
        sharding = NamedSharding(sharding.mesh, spec)
    return array if sharding is None else jax.device_put(array, sharding)


def dims_of_scales(dims: Sequence[DimT], slot_axis: int, groups: DimT) -> tuple[DimT, ...]:
    """Sizes or mesh axes of numbers [.., t, .., k], as their scales [.., n, t] have them."""
    return (*dims[:slot_axis], *dims[slot_axis + 1 : -1], groups, dims[slot_axis])


def sharding_of_scales(sharding: Sharding | None, ndim: int, slot_axis: int) -> Sharding | None:
    """Sharding of the scales of `ndim`-dimensional numbers that are sharded so."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    dims = (*sharding.spec, *(None,) * ndim)[:ndim]
    return NamedSharding(sharding.mesh, PartitionSpec(*dims_of_scales(dims, slot_axis, None)))


def layout_of(storage: PerLayer) -> Layout:
    """How the layers are stored."""
    return "leaves" if isinstance(storage, tuple) else "stacked"


def locate(storage: NumbersT | tuple[NumbersT, ...], layer: Layer) -> tuple[NumbersT, At]:
    """The numbers that hold a layer, and where it is in them."""
    if isinstance(storage, tuple):
        return storage[static_layer(layer)], ()
    return storage, (layer,)


def take_layer(numbers: NumbersT, at: At) -> NumbersT:
    """The layer out of numbers that hold it, as `locate` gives them."""
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
    """Replace one layer by `update(numbers, at)`, which writes into the numbers that hold the
    layer: in place, instead of taking the layer out and putting it back.
    """
    if isinstance(storage, tuple):
        index = static_layer(layer)
        return (*storage[:index], update(storage[index], ()), *storage[index + 1 :])
    return update(storage, (layer,))


def take_rows(
    storage: NumbersT | tuple[NumbersT, ...], rows: Int[Array, " n"]
) -> NumbersT | tuple[NumbersT, ...]:
    """Rows of the arrays of all layers, in this order; a row may come several times."""
    axis = 0 if isinstance(storage, tuple) else 1
    return jax.tree.map(lambda array: jnp.take(array, rows, axis=axis, mode="clip"), storage)


def static_layer(layer: Layer) -> int:
    """The layer as a Python int; unrolled storage cannot be indexed by a traced number."""
    if isinstance(layer, int):
        return layer
    raise TypeError(
        "this cache keeps one array per layer, for unrolled models, but a scanned model reads it: "
        "create it by the model's own init_cache()"
    )
