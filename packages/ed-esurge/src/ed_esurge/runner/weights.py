"""The arrays of the served model: its replaceable weights and the slots of adapters.

Compiled functions accept the arrays as one flat list and rebuild the model from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.sharding.mesh import part_on
from ed_layers import native
from ed_layers.lora.slots import SlotParam, write_slot
from ed_layers.native.library import on_whole_arrays
from ed_layers.packing import memory_for_numbers, pack
from ed_models.protocol import LanguageModel
from flax import nnx

Tree = TypeVar("Tree")
Leaf = jax.Array | np.ndarray
#: First and last + 1 index of each dimension: the part of an array that a device holds.
_Place = tuple[tuple[int, int], ...]
#: The parts of an array that a process holds.
HostParts = dict[_Place, np.ndarray]
#: Weights that can replace others: a model, its state, or the leaves of its state.
NewWeights = LanguageModel | nnx.State | list[Leaf]


class _Structure(NamedTuple):
    """A model without its arrays, before it is packed, and whether numbers are packed."""

    graphdef: nnx.GraphDef
    treedef: Any
    likes: list[jax.ShapeDtypeStruct]
    numbers: bool

    def pack_leaves(self, leaves: list[jax.Array]) -> list[jax.Array]:
        """Return the leaves of the packed model."""
        model = nnx.merge(self.graphdef, jax.tree.unflatten(self.treedef, leaves))
        packed = _pack_model(cast(LanguageModel, model), self.numbers)
        return jax.tree.leaves(nnx.state(cast(nnx.Module, packed)))


def _pack_model(model: LanguageModel, numbers: bool) -> LanguageModel:
    with native.chosen_by(model.config):
        return cast(LanguageModel, pack(cast(nnx.Module, model), numbers=numbers))


class ServedWeights:
    """The arrays of the served model.

    Args:
        model: the model, in the layout that the caller chose. Its arrays are not copied, except
            matrices of linear layers on a CPU, which are served in the order of the native library
            (`ed_layers.packing`). New weights keep the structure of `model`.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._given: _Structure | None = None
        # The weights of a model with adapter slots are replaced without the slots.
        has_slots = bool(jax.tree.leaves(nnx.state(cast(nnx.Module, model), SlotParam)))
        numbers = (
            not has_slots
            and on_whole_arrays()  # accelerators pack nothing
            and memory_for_numbers(cast(nnx.Module, model))
        )
        packed = model if has_slots else _pack_model(model, numbers)
        if packed is not model:
            graphdef, state = nnx.split(cast(nnx.Module, model))
            leaves, treedef = jax.tree.flatten(state)
            self._given = _Structure(graphdef, treedef, abstract(leaves), numbers)
            model = packed
        self._graphdef, places, state = nnx.split(cast(nnx.Module, model), SlotParam, ...)
        leaves, self._treedef = jax.tree.flatten(state)
        self._own: list[jax.Array] | None = leaves
        self._places, self._treedef_of_places = jax.tree.flatten(places)
        self._like_own = abstract(leaves)
        # An array that weights without a copy share with their owner: panels have three axes.
        self._never_packed = min(range(len(leaves)), key=lambda i: leaves[i].ndim)
        self._asleep: list[HostParts] | None = None  # in host memory
        self._finite: bool | None = None  # computed on demand
        self._followers: list[tuple[ServedWeights, Callable[[nnx.State], nnx.State]]] = []
        self.like: list[jax.ShapeDtypeStruct] = [*self._like_own, *abstract(self._places)]
        """Shapes, dtypes and shardings of `leaves`."""
        # The model without its arrays, so that replaced weights are freed.
        self.model = self.merge_leaves(self.like)

    def add_follower(
        self, follower: ServedWeights, select: Callable[[nnx.State], nnx.State]
    ) -> None:
        """Give another model, which shares arrays with this one, the same weights from now on.

        Args:
            follower: the weights of the other model.
            select: returns its state from the state of this model.
        """
        self._followers.append((follower, select))

    def merge_leaves(self, leaves: list[jax.Array] | list[jax.ShapeDtypeStruct]) -> LanguageModel:
        """Return the model with the given leaves."""
        edge = len(self._like_own)
        state = jax.tree.unflatten(self._treedef, leaves[:edge])
        places = jax.tree.unflatten(self._treedef_of_places, leaves[edge:])
        return cast(LanguageModel, nnx.merge(self._graphdef, places, state))

    @property
    def graphdefs(self) -> tuple[object, ...]:
        """The static parts of the model."""
        return self._graphdef, self._treedef, self._treedef_of_places

    @property
    def there(self) -> bool:
        """Whether the weights are on the device."""
        return self._own is not None

    @property
    def leaves(self) -> list[jax.Array]:
        """All arrays: weights and adapter slots.

        Raises:
            EasyDeLError: the weights were dropped or deleted.
        """
        if self._own is None:
            raise EasyDeLError(
                "the engine has no weights: those of `with engine.weights(...)` went with the end "
                "of the block; call update_model_weights(model), or run inside such a block"
            )
        if self._own[self._never_packed].is_deleted():
            raise EasyDeLError(
                "the engine's weights were deleted by their owner (a train step donates its "
                "arrays): call update_model_weights(model), which copies"
            )
        return [*self._own, *self._places]

    def check_weights(self, new: NewWeights) -> list[Leaf]:
        """Validate new weights and return their leaves in the order of the served model.

        Raises:
            ConfigError: the structure or a shape differs.
        """
        if isinstance(new, nnx.Module):
            model = cast(LanguageModel, new)
            new = model if model.layout == self.model.layout else model.to_layout(self.model.layout)
            new = nnx.state(cast(nnx.Module, new))
        leaves, treedef = jax.tree.flatten(new)
        module_treedef, likes = self._treedef, self._like_own
        if self._given is not None:
            module_treedef, likes = self._given.treedef, self._given.likes
        same = len(leaves) == len(likes) if isinstance(new, list) else False
        if not same and treedef != module_treedef:
            raise ConfigError(
                "the new weights have another structure than the served model: give a module of "
                f"the same config, or a state with its {len(likes)} leaves (got {len(leaves)})"
            )
        for like, leaf in zip(likes, leaves, strict=True):
            if like.shape != leaf.shape:
                raise ConfigError(f"a new weight has shape {leaf.shape}, the served {like.shape}")
        return leaves

    def replace(self, new: NewWeights, *, copy: bool = True) -> None:
        """Replace the weights. Adapters do not change.

        Args:
            new: a module of the same architecture in any layout, its state, or its leaves.
            copy: whether to copy the arrays. False shares arrays that need no conversion.

        Raises:
            ConfigError: the structure or a shape differs.
        """
        theirs = nnx.state(new) if isinstance(new, nnx.Module) else new
        leaf_ids = {id(leaf) for leaf in jax.tree.leaves(theirs)}
        leaves = self.check_weights(new)

        def place(like: jax.ShapeDtypeStruct, leaf: Leaf) -> jax.Array:
            if not isinstance(leaf, jax.Array):
                leaf = np.array(leaf)  # jax may alias host memory instead of copying
            array = jnp.asarray(leaf, like.dtype)
            shared = copy and id(array) in leaf_ids
            # Weights on the devices of all replicas already include the shards of this replica.
            array = part_on(array, like.sharding) if like.sharding is not None else array
            return jax.device_put(array, like.sharding, may_alias=not shared)

        likes = self._like_own if self._given is None else self._given.likes
        own_leaves = [place(*pair) for pair in zip(likes, leaves, strict=True)]
        treedef = self._treedef if self._given is None else self._given.treedef
        for follower, select in self._followers:
            # Leaves: variables of the two models may differ in their metadata.
            selected = jax.tree.leaves(select(jax.tree.unflatten(treedef, own_leaves)))
            follower.replace(selected, copy=False)
        self._own = own_leaves if self._given is None else self._given.pack_leaves(own_leaves)
        self._asleep = None
        self._finite = None

    def are_finite(self) -> bool:
        """Return whether all weights are finite. The result is cached until they change."""
        if self._finite is None:
            floats = [x for x in self.leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
            self._finite = all(bool(jnp.isfinite(leaf).all()) for leaf in floats)
        return self._finite

    def drop(self) -> None:
        """Release the weights."""
        self._own = self._asleep = None
        for follower, _ in self._followers:
            follower.drop()

    def to_host(self) -> None:
        """Move the weights from device memory to host memory. Each process keeps the parts that its
        devices hold.

        Raises:
            EasyDeLError: the weights were dropped.
        """
        self._asleep = [get_host_parts(leaf) for leaf in self.leaves[: len(self._like_own)]]
        self._own = None
        for follower, _ in self._followers:
            follower.to_host()

    def from_host(self) -> None:
        """Move the weights of `to_host` back to the device. No effect without such weights."""
        if self._asleep is not None:
            pairs = zip(self._like_own, self._asleep, strict=True)
            self._own = [from_parts(like, parts) for like, parts in pairs]
            self._asleep = None
        for follower, _ in self._followers:
            follower.from_host()

    # ---- slots of adapters

    @property
    def places(self) -> list[jax.Array]:
        """Arrays of the adapter slots; empty if the engine serves no adapters."""
        return self._places

    def put(self, places: list[jax.Array]) -> None:
        """Replace `places` by the result of `with_adapter`."""
        self._places, self._finite = places, None


def with_adapter(
    places: list[jax.Array], place: jax.Array, values: list[jax.Array]
) -> list[jax.Array]:
    """Return the adapter slots with an adapter written to one slot. Runs on the device."""
    return [write_slot(leaf, place, value) for leaf, value in zip(places, values, strict=True)]


def get_host_parts(array: jax.Array) -> HostParts:
    """Return the parts of an array on the devices of this process, each part once."""
    shards = {_place(shard.index, array.shape): shard.data for shard in array.addressable_shards}
    return {place: np.asarray(jax.device_get(data)) for place, data in shards.items()}


def from_parts(like: jax.ShapeDtypeStruct, parts: HostParts) -> jax.Array:
    """Return the array of `get_host_parts` on its devices."""

    def of(index: tuple[slice, ...] | None) -> np.ndarray:
        return parts[_place(index, like.shape)]

    return jax.make_array_from_callback(like.shape, like.sharding, of)


def _place(index: tuple[slice, ...] | None, shape: tuple[int, ...]) -> _Place:
    """Return the first and the last + 1 index of each dimension of a part."""
    assert index is not None, "the device holds a part"
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def abstract(tree: Tree) -> Tree:
    """Return the shapes, dtypes and shardings of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
