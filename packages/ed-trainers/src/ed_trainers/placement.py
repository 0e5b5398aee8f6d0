"""Where arrays of a step live: optimizer state like its parameters, batches over rows and sequence.

Legend: a microbatches of a step, b rows of a microbatch, s sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import numpy as np
import optax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.parameter_names import normalize
from ed_infra.sharding.placement import local_rows, make_global
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding


def replicated(sharding: Sharding) -> Sharding:
    """Return the sharding that puts a whole copy on every device of another sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def place_model(model: LanguageModel) -> None:
    """Shard a model, in place, whose parameters are not on the devices of its mesh yet."""
    leaves = jax.tree.leaves(nnx.state(model))
    devices = set(model.config.mesh.devices.flat)
    if any(leaf.sharding.device_set != devices for leaf in leaves):
        nnx.update(model, nnx.state(model.shard_model()))


def shardings_like(shapes: optax.OptState, params: nnx.State) -> optax.OptState:
    """Choose a sharding for each leaf of an optimizer state.

    Moments and masters mirror the parameters: their path ends with the parameter's path and they
    have its shape. They are placed as it is; everything else (counts, factored moments) is
    replicated.

    Args:
        shapes: abstract optimizer state.
        params: the parameters, placed.
    """
    placed = jax.tree_util.tree_flatten_with_path(params)[0]
    by_path = {normalize(path): leaf for path, leaf in placed}
    depths = sorted({len(path) for path in by_path}, reverse=True)
    default = replicated(placed[0][1].sharding)

    def choose(path: Sequence[object], leaf: jax.ShapeDtypeStruct) -> Sharding:
        names = normalize(path)
        for depth in depths:
            param = by_path.get(names[-depth:])
            if param is not None and param.shape == leaf.shape:
                return param.sharding
        return default

    return jax.tree_util.tree_map_with_path(choose, shapes)


def microbatches(batch: Mapping[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Cut the rows of a batch, [count * b, ...], into consecutive microbatches, [count, b, ...]."""
    return {
        name: array.reshape(count, array.shape[0] // count, *array.shape[1:])
        for name, array in batch.items()
    }


def pad_rows(batch: Mapping[str, np.ndarray], rows: int) -> dict[str, np.ndarray]:
    """Append rows of zeros, which are padding and have no weight, up to a number of rows."""
    missing = rows - next(iter(batch.values())).shape[0]
    if missing <= 0:
        return dict(batch)
    return {
        name: np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
        for name, array in batch.items()
    }


class Placement:
    """Puts host batches on the devices: rows over the data axes, positions over the sequence axis.

    A dimension that does not divide is replicated.

    Args:
        config: the model's config; gives the mesh and the meaning of its axes.
    """

    def __init__(self, config: EasyDeLBaseConfig):
        self.config = config
        self._mesh = config.mesh
        self._manager = config.partition_manager
        self._known: dict[tuple[tuple[int, ...], bool], NamedSharding] = {}

    def sharding(self, shape: tuple[int, ...], *, stacked: bool) -> NamedSharding:
        """Return the sharding of an array [b, ..., s] or, `stacked`, [a, b, ..., s]."""
        sharding = self._known.get((shape, stacked))
        if sharding is None:
            lead = (None, "batch") if stacked else ("batch",)
            between = len(shape) - len(lead) - 1
            axes = (*lead, *[None] * between, "sequence") if between >= 0 else lead
            spec = self._manager.resolve(axes, mode="train", shape=shape, mesh=self._mesh)
            sharding = self._known[shape, stacked] = NamedSharding(self._mesh, spec)
        return sharding

    def own_rows(self, rows: int) -> range:
        """Return which rows of a microbatch [rows, ...] the devices of this process hold."""
        own = local_rows(self.sharding((rows,), stacked=False), rows)
        return range(own.start, own.stop)

    def place(
        self, batch: Mapping[str, np.ndarray], *, stacked: bool, parts: int = 1
    ) -> dict[str, jax.Array]:
        """Return the arrays on the devices.

        Args:
            batch: the whole batch, the same on every process; or this process's `own_rows` of each
                microbatch, which are one of so many `parts` of it.
            stacked: whether the arrays are [a, b, ...], not [b, ...].
            parts: see `batch`.
        """
        axis = int(stacked)

        def placed(array: np.ndarray) -> jax.Array:
            rows = array.shape[axis] * parts
            shape = (*array.shape[:axis], rows, *array.shape[axis + 1 :])
            where = self.sharding(shape, stacked=stacked)
            return make_global(array, where, rows=rows if parts > 1 else None, axis=axis)

        return {name: placed(array) for name, array in batch.items()}
