"""The placement of arrays on devices: the optimizer state like its parameters, batches by axes.

Legend: a microbatches of a step, b rows of a microbatch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import numpy as np
import optax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.parameter_names import normalize_parameter_name
from ed_infra.sharding.axes import LogicalAxes, split_mesh_axes
from ed_infra.sharding.placement import local_rows, make_global
from ed_models.protocol import LanguageModel
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec, Sharding

#: Logical axes of an array with one value for each token of a row.
TOKENS: LogicalAxes = ("batch", "sequence")


def replicate_sharding(sharding: Sharding) -> Sharding:
    """Return the sharding that replicates an array over the devices of another sharding."""
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, PartitionSpec())
    return sharding


def place_model(model: LanguageModel) -> None:
    """Shard a model in place if its parameters are not on the devices of its mesh."""
    leaves = jax.tree.leaves(nnx.state(model))
    devices = set(model.config.mesh.devices.flat)
    if any(leaf.sharding.device_set != devices for leaf in leaves):
        nnx.update(model, nnx.state(model.shard_model()))


def shardings_like(shapes: optax.OptState, params: nnx.State) -> optax.OptState:
    """Return a sharding for each leaf of an optimizer state.

    Moments and masters mirror the parameters: their path ends with the path of a parameter, and
    they have its shape. They get the sharding of the parameter. An array with the rank of its
    parameter, such as a basis or the scales of a moment, is sharded along the dimensions that it
    shares with the parameter. All other leaves (counts, factored moments) are replicated.

    Args:
        shapes: abstract optimizer state.
        params: the placed parameters.
    """
    placed = jax.tree_util.tree_flatten_with_path(params)[0]
    by_path = {normalize_parameter_name(path): leaf for path, leaf in placed}
    depths = sorted({len(path) for path in by_path}, reverse=True)
    default = replicate_sharding(placed[0][1].sharding)

    def choose(path: Sequence[object], leaf: jax.ShapeDtypeStruct) -> Sharding:
        names = normalize_parameter_name(path)
        for depth in depths:
            param = by_path.get(names[-depth:])
            if param is not None and param.shape == leaf.shape:
                return param.sharding
            if param is not None and param.ndim == leaf.ndim:
                return _share_sharding(param, leaf.shape, default)
        return default

    return jax.tree_util.tree_map_with_path(choose, shapes)


def _share_sharding(param: jax.Array, shape: Sequence[int], default: Sharding) -> Sharding:
    """Return the sharding of a parameter for the dimensions of a shape with the same size."""
    sharding = param.sharding
    if not isinstance(sharding, NamedSharding):
        return default
    spec = [*sharding.spec, *[None] * (param.ndim - len(sharding.spec))]
    dimensions = zip(spec, param.shape, shape, strict=True)
    shared = [entry if size == own else None for entry, own, size in dimensions]
    return NamedSharding(sharding.mesh, PartitionSpec(*shared)) if any(shared) else default


def microbatches(batch: Inputs[np.ndarray], count: int) -> Inputs[np.ndarray]:
    """Split the rows of a batch, [count * b, ...], into consecutive microbatches [count, b, ...].

    The declared axes stay those of one microbatch.
    """

    def split(array: np.ndarray) -> np.ndarray:
        return array.reshape(count, array.shape[0] // count, *array.shape[1:])

    return jax.tree.map(split, batch)


def pad_rows(batch: Inputs[np.ndarray], rows: int, axis: int = 0) -> Inputs[np.ndarray]:
    """Append rows of zeros up to a number of rows; zeros are padding and have no weight.

    Args:
        batch: arrays [..., b, ...].
        rows: number of rows of the result; a batch with more rows stays unchanged.
        axis: the dimension of the rows; 1 for stacked microbatches.
    """
    missing = rows - next(iter(batch.values())).shape[axis]
    if missing <= 0:
        return batch

    def pad_array(array: np.ndarray) -> np.ndarray:
        shape = (*array.shape[:axis], missing, *array.shape[axis + 1 :])
        return np.concatenate([array, np.zeros(shape, array.dtype)], axis)

    return jax.tree.map(pad_array, batch)


def with_arrays(
    batch: Inputs[np.ndarray], axes: LogicalAxes = TOKENS, **arrays: np.ndarray
) -> Inputs[np.ndarray]:
    """Return a batch with further arrays, or replaced ones, of the same logical axes."""
    return Inputs({**batch, **arrays}, {**batch.declared, **dict.fromkeys(arrays, axes)})


class Placement:
    """Puts host batches on the devices, each array by its declared logical axes.

    A dimension that the mesh axes do not divide is replicated.

    Args:
        config: the configuration of the model, with the mesh and the partition rules.
    """

    def __init__(self, config: EasyDeLBaseConfig):
        self.config = config
        self._mesh = config.mesh
        self._manager = config.partition_manager
        self._known: dict[tuple[tuple[int, ...], LogicalAxes], NamedSharding] = {}
        spec = self._manager.resolve(
            ("batch",), mode="train", shape=(self._mesh.size,), mesh=self._mesh
        )
        #: Number of parts into which the mesh divides the rows of a microbatch.
        self.row_shards = math.prod(
            self._mesh.shape[axis] for entry in spec for axis in split_mesh_axes(entry)
        )

    def sharding(
        self, shape: tuple[int, ...], axes: LogicalAxes = TOKENS, *, stacked: bool = False
    ) -> NamedSharding:
        """Return the sharding of an array.

        Args:
            shape: [b, ...] or, if `stacked`, [a, b, ...].
            axes: logical axes of [b, ...].
            stacked: whether the array holds several microbatches.
        """
        axes = (None, *axes) if stacked else axes
        sharding = self._known.get((shape, axes))
        if sharding is None:
            spec = self._manager.resolve(axes, mode="train", shape=shape, mesh=self._mesh)
            sharding = self._known[shape, axes] = NamedSharding(self._mesh, spec)
        return sharding

    def own_rows(self, rows: int) -> range:
        """Return the rows of a microbatch [rows, ...] that the devices of this process hold."""
        row_slice = local_rows(self.sharding((rows,), ("batch",)), rows)
        return range(row_slice.start, row_slice.stop)

    def padded_rows(self, rows: int) -> int:
        """Return the smallest number of at least `rows` rows that the devices can divide.

        Fewer rows than parts of the mesh are not padded: every device then computes all rows.
        """
        shards = self.row_shards
        return rows if rows < shards else -(-rows // shards) * shards

    def place(
        self, batch: Inputs[np.ndarray], *, stacked: bool, parts: int = 1
    ) -> Inputs[jax.Array]:
        """Return the arrays on the devices.

        Args:
            batch: the whole batch, the same on every process; or this process's `own_rows` of each
                microbatch.
            stacked: whether the arrays are [a, b, ...] instead of [b, ...].
            parts: the number of processes that share the rows of a microbatch.
        """
        axis = int(stacked)

        def place_array(name: str, array: np.ndarray) -> jax.Array:
            rows = array.shape[axis] * parts
            shape = (*array.shape[:axis], rows, *array.shape[axis + 1 :])
            axes = batch.get_logical_axes(name)[: len(shape) - axis]
            array_sharding = self.sharding(shape, axes, stacked=stacked)
            return make_global(array, array_sharding, rows=rows if parts > 1 else None, axis=axis)

        arrays = [place_array(name, array) for name, array in batch.items()]
        return jax.tree.unflatten(jax.tree.structure(batch), arrays)

    def frozen(self, role: str, model: LanguageModel) -> LanguageModel:
        """Return a frozen model, placed on the learner's mesh.

        Raises:
            ConfigError: the model was created for another mesh.
        """
        if model.config.mesh != self._mesh:
            raise ConfigError(
                f"the frozen model {role!r} is on the mesh {dict(model.config.mesh.shape)}, "
                f"the model on {dict(self._mesh.shape)}: one step reads both models, so create "
                "both with the same sharding_axis_dims"
            )
        place_model(model)
        return model
