"""Shardings of parameters and batches from logical axes, and sharded creation of modules.

A parameter declares the logical axes of one layer when it is created:
`nnx.Param(value, axes=("embed", "heads"))`. The functions depend only on the (abstract) state of a
module and on a configuration, not on a global mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

import jax
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from ed_infra import parameter_names
from ed_infra.errors import ConfigError, MeshError, did_you_mean
from ed_infra.logging import get_logger, once
from ed_infra.rules import Rules
from ed_infra.sharding.axes import split_mesh_axes
from ed_infra.sharding.partition import PartitionManager, fit_spec

M = TypeVar("M", bound=nnx.Module)
State = nnx.State | nnx.Module
TreePath = tuple[Any, ...]
#: (regular expression over canonical names, spec of one layer) pairs; the first match decides.
Overrides = Sequence[tuple[str, Any]]

logger = get_logger(__name__)


class ShardedConfig(Protocol):
    """The part of a configuration that determines shardings."""

    @property
    def mesh(self) -> Mesh:
        """The device mesh."""
        ...

    @property
    def partition_manager(self) -> PartitionManager:
        """Resolves logical axes to mesh axes."""
        ...

    @property
    def sharding_rules(self) -> Overrides | None:
        """Overrides of the user."""
        ...

    def own_partition_rules(self) -> Overrides | None:
        """Overrides of the class."""
        ...


def _leaves(state: State) -> list[tuple[TreePath, Any]]:
    """Return the variables of a state (or module) with their storage paths."""
    if isinstance(state, nnx.Module):
        state = nnx.state(state)
    return list(nnx.to_flat_state(state))


def _array(variable: object) -> Any:
    return variable.get_value() if isinstance(variable, nnx.Variable) else variable


def _axes(variable: object) -> tuple[str | None, ...] | None:
    axes = variable.get_metadata().get("axes") if isinstance(variable, nnx.Variable) else None
    return None if axes is None else tuple(axes)


def list_logical_axes(state: State) -> dict[TreePath, tuple[str | None, ...] | None]:
    """Return the logical axes of each variable by storage path, for one layer.

    A variable without declared axes has None and is replicated.
    """
    return {path: _axes(variable) for path, variable in _leaves(state)}


def specs(
    state: State,
    config: ShardedConfig | PartitionManager,
    mesh: Mesh | AbstractMesh | None = None,
    overrides: Overrides | None = None,
) -> Any:
    """Return the `PartitionSpec` of each variable, in the structure of `state`.

    Args:
        state: `nnx.State` or module, abstract or not.
        config: The configuration, with the default mesh and overrides.
        mesh: Mesh of the arrays; may be abstract.
        overrides: Rules (`ed_infra.rules`) with precedence over the logical axes; specs of one
            layer.

    Returns:
        A state of the same structure; a quantized matrix has a spec for each of its arrays. An
        indivisible dimension is replicated, which is logged once. A stacked leaf has None for its
        layer dimension.

    Raises:
        ConfigError: A rule matches nothing, uses an axis that the mesh lacks, or differs between
            layers that share one array.
    """
    manager, place, overrides = _settings(config, mesh, overrides)
    rules = _rules(overrides, place)
    flat = []
    for path, variable in _leaves(state):
        spec = _layer_spec(path, variable, rules, manager, place)
        if len(spec) and parameter_names.is_stacked(path):
            spec = PartitionSpec(None, *spec)
        flat.append(
            (path, _fitted_tree(spec, _array(variable), place, parameter_names.canonical(path)[0]))
        )
    rules.check_used()
    return nnx.from_flat_state(flat)


def _fitted_tree(spec: PartitionSpec, value: object, place: Mesh | AbstractMesh, name: str) -> Any:
    """Return the spec of an array, or of each array of a quantized matrix in its structure.

    The arrays have the rank of the matrix. Indivisible small arrays are not logged.
    """
    leaves, treedef = jax.tree.flatten(value)
    largest = max(leaves, key=lambda leaf: math.prod(leaf.shape))
    fitted = []
    for leaf in leaves:
        try:
            fitted_spec, notes = fit_spec(spec, tuple(leaf.shape), place)
        except MeshError as error:
            raise MeshError(f"{name}: {error}") from None
        fitted.append(fitted_spec)
        for note in notes if leaf is largest else ():
            once(logger, f"{_family(name)}: {note}; replicated along it")
    return jax.tree.unflatten(treedef, fitted)


def shardings(
    state: State,
    config: ShardedConfig | PartitionManager,
    mesh: Mesh | None = None,
    overrides: Overrides | None = None,
) -> Any:
    """Return the `NamedSharding` of each variable, in the structure of `state`; see `specs`."""
    place = _settings(config, mesh, overrides)[1]
    flat = nnx.to_flat_state(specs(state, config, place, overrides))
    placed = [
        (path, jax.tree.map(lambda spec: NamedSharding(place, spec), tree)) for path, tree in flat
    ]
    return nnx.from_flat_state(placed)


def build_partition_rules(
    state: State, config: ShardedConfig, mesh: Mesh | None = None, fully_sharded: bool = True
) -> tuple[tuple[str, PartitionSpec], ...]:
    """Return the sharding as (regular expression, spec) rules, one for each kind of parameter.

    The rules equal the result of `specs` before dimensions are checked against sizes. As overrides
    they change nothing.

    Args:
        state: See `specs`.
        config: See `specs`.
        mesh: See `specs`.
        fully_sharded: Whether to include the fully-sharded axis; serving with only tensor
            parallelism omits it.
    """
    manager, place, overrides = _settings(config, mesh, None)
    matcher = _rules(overrides, place)
    omitted = None if fully_sharded else manager.axis.fully_sharded_data_parallel_axis
    rules: dict[str, PartitionSpec] = {}
    for path, variable in _leaves(state):
        spec = _without(omitted, _layer_spec(path, variable, matcher, manager, place))
        for name in parameter_names.canonical(path):
            pattern = "^" + re.sub(r"\\\.\d+(?=\\\.)", r"\\.\\d+", re.escape(name)) + "$"
            if rules.setdefault(pattern, spec) != spec:
                rules["^" + re.escape(name) + "$"] = spec
    # Rules for single layers precede rules for all layers.
    ordered = sorted(rules.items(), key=lambda item: r"\d+" in item[0])
    return tuple(ordered)


def create_sharded(build: Callable[[], M], config: ShardedConfig, **settings: Any) -> M:
    """Create a module whose parameters are initialized in their shards.

    No device or host holds a complete parameter: `build` is traced for shapes and then compiled
    with the shardings of its outputs.

    Args:
        build: Creates the module, with `nnx.Rngs` from a seed; it has no arguments.
        config: The configuration with mesh and rules.
        settings: `mesh` and `overrides` of `specs`.
    """

    def parts() -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(build())

    with nnx.use_eager_sharding(False):
        # Both calls of jax use one trace, because they receive the same function.
        abstract = jax.eval_shape(parts)
        placed = jax.tree.leaves(shardings(abstract[1], config, **settings))
        structure = jax.tree.structure(abstract)
        graphdef, state = jax.jit(parts, out_shardings=jax.tree.unflatten(structure, placed))()
        return nnx.merge(graphdef, state)


def _fill_state(state: nnx.State, values: Iterable[Any]) -> Any:
    """Return a state with new arrays, given in flat order."""
    flat = []
    for (path, variable), value in zip(nnx.to_flat_state(state), values, strict=True):
        flat.append(
            (path, variable.replace(value) if isinstance(variable, nnx.Variable) else value)
        )
    return nnx.from_flat_state(flat)


def shard(module: M, config: ShardedConfig, **settings: Any) -> M:
    """Return the module with its parameters placed by the configuration; see `specs`."""
    graphdef, state = nnx.split(module)
    by_path = dict(nnx.to_flat_state(shardings(state, config, **settings)))
    return _place_module(graphdef, state, lambda path: by_path[path])


def gather(module: M, config: ShardedConfig, mesh: Mesh | None = None) -> M:
    """Return the module with parameters replicated over the mesh."""
    everywhere = NamedSharding(_settings(config, mesh, None)[1], PartitionSpec())
    graphdef, state = nnx.split(module)
    return _place_module(graphdef, state, lambda path: everywhere)


def _place_module(
    graphdef: nnx.GraphDef, state: nnx.State, get_sharding: Callable[[TreePath], NamedSharding]
) -> Any:
    flat = nnx.to_flat_state(state)
    arrays = [_array(variable) for _, variable in flat]
    moved = jax.device_put(arrays, [get_sharding(path) for path, _ in flat])
    with nnx.use_eager_sharding(False):
        return nnx.merge(graphdef, _fill_state(state, moved))


def constrain(
    x: jax.Array,
    axes: Sequence[str | None],
    config: ShardedConfig,
    mode: str = "train",
) -> jax.Array:
    """Constrain the sharding of an activation; a no-op on one device.

    Args:
        x: The activation.
        axes: For each dimension a key of `ed_infra.sharding.axes.ACTIVATION_AXES`, or None.
        config: The configuration with mesh and rules.
        mode: `"train"`, `"prefill"` or `"decode"`.
    """
    mesh = config.mesh
    if mesh.size == 1:
        return x
    if len(axes) != x.ndim:
        raise ConfigError(f"{len(axes)} axes {tuple(axes)} for an array of shape {x.shape}")
    spec = config.partition_manager.resolve(axes, mode, x.shape, mesh)
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


def make_global(batch: object, sharding: object, *, rows: int | None = None, axis: int = 0) -> Any:
    """Convert a batch of numpy arrays on each process to global arrays.

    Each process copies only the parts of its devices.

    Args:
        batch: A pytree of numpy arrays. Without `rows` the arrays are the whole batch, equal on all
            processes. With `rows` they are the rows `local_rows(sharding, rows)` of the batch.
        sharding: One sharding for all arrays, or a pytree of shardings. Entries beyond the rank of
            an array, and axes that do not divide its dimensions, are dropped.
        rows: Size of the whole batch along `axis`, if each process has a part.
        axis: The dimension of the rows; 1 if microbatches are stacked along dimension 0.

    Raises:
        ConfigError: A process has a wrong number of rows.
    """

    def place(array: ArrayLike, target: NamedSharding) -> jax.Array:
        array = np.asarray(array)
        first, shape = 0, array.shape
        if rows is not None:
            local_range = local_rows(target, rows, axis)
            first, shape = local_range.start, (*shape[:axis], rows, *shape[axis + 1 :])
            if array.ndim <= axis or array.shape[axis] != local_range.stop - local_range.start:
                raise ConfigError(
                    f"an array of shape {array.shape} from process {jax.process_index()}, which "
                    f"holds rows {local_range.start} to {local_range.stop} of {rows}: pass these "
                    f"{local_range.stop - local_range.start} rows "
                    "(ed_infra.sharding.placement.local_rows)"
                )
        fitted = _fit_sharding(target, shape)

        def part(index: Any) -> np.ndarray:
            if rows is None:
                return array[index]
            start, stop, _ = index[axis].indices(rows)
            local_slice = slice(start - first, stop - first)
            return array[(*index[:axis], local_slice, *index[axis + 1 :])]

        return jax.make_array_from_callback(shape, fitted, part)

    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda array: place(array, sharding), batch)  # type: ignore
    return jax.tree.map(place, batch, sharding)


def local_rows(sharding: NamedSharding, rows: int, axis: int = 0) -> slice:
    """Return the rows of a global batch on the devices of this process, as one range.

    Processes with equal rows (they differ along `tp` or `sp`) get the same range.

    Args:
        sharding: Sharding of the batch; its entry `axis` splits the rows.
        rows: Rows of the whole batch.
        axis: See `make_global`.
    """
    row_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[axis:]))
    fitted = _fit_sharding(row_sharding, (rows,))
    device_indices = fitted.addressable_devices_indices_map((rows,)).values()
    ranges = [index[0].indices(rows) for index in device_indices if index is not None]
    return slice(min(r[0] for r in ranges), max(r[1] for r in ranges))


def _fit_sharding(sharding: NamedSharding, shape: tuple[int, ...]) -> NamedSharding:
    spec = fit_spec(PartitionSpec(*sharding.spec[: len(shape)]), shape, sharding.mesh)[0]
    return NamedSharding(sharding.mesh, spec)


def _settings(
    config: ShardedConfig | PartitionManager,
    mesh: Mesh | AbstractMesh | None,
    overrides: Overrides | None,
) -> tuple[PartitionManager, Any, Overrides]:
    if isinstance(config, PartitionManager):
        if mesh is None:
            raise ConfigError("a PartitionManager has no mesh: pass mesh=...")
        return config, mesh, overrides or ()
    if overrides is None:
        overrides = (*(config.sharding_rules or ()), *(config.own_partition_rules() or ()))
    return config.partition_manager, mesh if mesh is not None else config.mesh, overrides


def _layer_spec(
    path: TreePath,
    variable: object,
    rules: Rules[PartitionSpec],
    manager: PartitionManager,
    mesh: Mesh | AbstractMesh,
) -> PartitionSpec:
    """Return the spec of a parameter of one layer, from its rule or its logical axes."""
    spec = rules.at(path)
    if spec is not None:
        return spec
    axes = _axes(variable)
    if axes is None:
        return PartitionSpec()
    shape = tuple(_array(variable).shape)
    return manager.param(axes, shape[1:] if parameter_names.is_stacked(path) else shape, mesh)


def _without(axis: str | None, spec: PartitionSpec) -> PartitionSpec:
    if axis is None:
        return spec
    remaining_names = [
        tuple(name for name in split_mesh_axes(entry) if name != axis) for entry in spec
    ]
    return PartitionSpec(
        *(names[0] if len(names) == 1 else names or None for names in remaining_names)
    )


def _family(name: str) -> str:
    """Return the name of a parameter without its layer number, for one message for all layers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _rules(overrides: Overrides, mesh: Mesh | AbstractMesh) -> Rules[PartitionSpec]:
    """Return the rules, after checking that the mesh has their axes and each is used once."""
    for pattern, spec in overrides:
        used = [axis for entry in spec for axis in split_mesh_axes(entry)]
        for axis in used:
            if axis not in mesh.axis_names:
                raise ConfigError(
                    f"sharding rule {pattern!r} names the mesh axis {axis!r}"
                    f"{did_you_mean(axis, mesh.axis_names)} (axes: {', '.join(mesh.axis_names)})"
                )
            if used.count(axis) > 1:
                raise ConfigError(
                    f"sharding rule {pattern!r} uses the mesh axis {axis!r} twice in {spec}: the "
                    "devices along an axis can split one dimension only"
                )
    specs = [(pattern, PartitionSpec(*spec)) for pattern, spec in overrides]
    return Rules(specs, kind="sharding rule")
