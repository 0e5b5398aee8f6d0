"""The arrays of the served model: its weights, which can be replaced, and the places of adapters.

Functions of the device take them as one flat list, and make the model of it again.
"""

from __future__ import annotations

from typing import TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.slices import part_on
from ed_layers.lora_slots import SlotParam, written
from ed_models.protocol import LanguageModel
from flax import nnx

Tree = TypeVar("Tree")
Leaf = jax.Array | np.ndarray
#: Weights that can replace others: a model, its state, or the leaves of its state.
NewWeights = LanguageModel | nnx.State | list[Leaf]


class Weights:
    """See the module.

    Args:
        model: its leaves are used as they are (the caller chose the layout).
    """

    def __init__(self, model: LanguageModel) -> None:
        self._graphdef, places, state = nnx.split(cast(nnx.Module, model), SlotParam, ...)
        leaves, self._treedef = jax.tree.flatten(state)
        self._own: list[jax.Array] | None = leaves
        self._places, self._treedef_of_places = jax.tree.flatten(places)
        self._like_own = abstract(leaves)
        self._asleep: list[np.ndarray] | None = None  # in host memory
        self._finite: bool | None = None  # not known before somebody asks
        self.like: list[jax.ShapeDtypeStruct] = [*self._like_own, *abstract(self._places)]
        """Shapes, dtypes and shardings of `leaves`."""
        # The model without its arrays, so that weights that are replaced are freed.
        self.model = self.merged(self.like)

    def merged(self, leaves: list[jax.Array] | list[jax.ShapeDtypeStruct]) -> LanguageModel:
        """The model of such leaves."""
        edge = len(self._like_own)
        state = jax.tree.unflatten(self._treedef, leaves[:edge])
        places = jax.tree.unflatten(self._treedef_of_places, leaves[edge:])
        return cast(LanguageModel, nnx.merge(self._graphdef, places, state))

    @property
    def graphdefs(self) -> tuple[object, ...]:
        """Everything of the model besides its arrays."""
        return self._graphdef, self._treedef, self._treedef_of_places

    @property
    def there(self) -> bool:
        """Whether there are weights on the device."""
        return self._own is not None

    @property
    def leaves(self) -> list[jax.Array]:
        """All arrays.

        Raises:
            EasyDeLError: there are no weights.
        """
        if self._own is None:
            raise EasyDeLError(
                "the engine has no weights: those of `with engine.weights(...)` went with the end "
                "of the block; call update_model_weights(model), or run inside such a block"
            )
        if self._own[0].is_deleted():
            raise EasyDeLError(
                "the engine's weights were deleted by their owner (a train step donates its "
                "arrays): call update_model_weights(model), which copies"
            )
        return [*self._own, *self._places]

    def checked(self, new: NewWeights) -> list[Leaf]:
        """Return the leaves of other weights of the same architecture, in the order of this one.

        Raises:
            ConfigError: structure or a shape differs.
        """
        if isinstance(new, nnx.Module):
            model = cast(LanguageModel, new)
            new = model if model.layout == self.model.layout else model.to_layout(self.model.layout)
            new = nnx.state(cast(nnx.Module, new))
        leaves, treedef = jax.tree.flatten(new)
        same = len(leaves) == len(self._like_own) if isinstance(new, list) else False
        if not same and treedef != self._treedef:
            raise ConfigError(
                "the new weights have another structure than the served model: give a module of "
                f"the same config, or a state with its {len(self._like_own)} leaves "
                f"(got {len(leaves)})"
            )
        for like, leaf in zip(self._like_own, leaves, strict=True):
            if like.shape != leaf.shape:
                raise ConfigError(f"a new weight has shape {leaf.shape}, the served {like.shape}")
        return leaves

    def replace(self, new: NewWeights, *, copy: bool = True) -> None:
        """Serve other weights of the same architecture; adapters stay where they are.

        Args:
            new: a module (in any layout), a state with the leaves of this one, or such leaves.
            copy: own the arrays, whatever becomes of the caller's; False uses them as they are
                where type and place are the same.

        Raises:
            ConfigError: structure or a shape differs.
        """
        theirs = nnx.state(new) if isinstance(new, nnx.Module) else new
        own = {id(leaf) for leaf in jax.tree.leaves(theirs)}
        leaves = self.checked(new)

        def place(like: jax.ShapeDtypeStruct, leaf: Leaf) -> jax.Array:
            if not isinstance(leaf, jax.Array):
                leaf = np.array(leaf)  # a device may read host memory in place
            array = jnp.asarray(leaf, like.dtype)
            shared = copy and id(array) in own
            # A replica's part of weights that lie on the devices of all replicas is there already.
            array = part_on(array, like.sharding) if like.sharding is not None else array
            return jax.device_put(array, like.sharding, may_alias=not shared)

        self._own = [place(*pair) for pair in zip(self._like_own, leaves, strict=True)]
        self._asleep = None
        self._finite = None

    def are_finite(self) -> bool:
        """Whether no weight is NaN or infinite; computed once for the weights that are served."""
        if self._finite is None:
            floats = [x for x in self.leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
            self._finite = all(bool(jnp.isfinite(leaf).all()) for leaf in floats)
        return self._finite

    def drop(self) -> None:
        """Let go of the weights."""
        self._own = self._asleep = None

    def to_host(self) -> None:
        """Let go of the device's memory, and keep the weights in the host's.

        Raises:
            EasyDeLError: there are no weights, or other processes have parts of them.
        """
        leaves = self.leaves[: len(self._like_own)]
        if not all(leaf.is_fully_addressable for leaf in leaves):
            raise EasyDeLError(
                "weights that lie on the devices of several processes cannot be kept in one host's "
                "memory: sleep(level=2), and update_model_weights before waking up"
            )
        self._asleep = [np.asarray(jax.device_get(leaf)) for leaf in leaves]
        self._own = None

    def from_host(self) -> None:
        """Put the weights that `to_host` keeps back on the device; nothing where it keeps none."""
        if self._asleep is not None:
            pairs = zip(self._like_own, self._asleep, strict=True)
            self._own = [jax.device_put(leaf, like.sharding) for like, leaf in pairs]
            self._asleep = None

    # ---- places of adapters

    @property
    def places(self) -> list[jax.Array]:
        """What adapters lie in; none where none are served."""
        return self._places

    def put(self, places: list[jax.Array]) -> None:
        """Take the arrays that `with_adapter` has made of `places`."""
        self._places, self._finite = places, None


def with_adapter(
    places: list[jax.Array], place: jax.Array, values: list[jax.Array]
) -> list[jax.Array]:
    """The places with an adapter in one of them; a function of the device."""
    return [written(leaf, place, value) for leaf, value in zip(places, values, strict=True)]


def abstract(tree: Tree) -> Tree:
    """Shapes, dtypes and shardings of arrays."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
