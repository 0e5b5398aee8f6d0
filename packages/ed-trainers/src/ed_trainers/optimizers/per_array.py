"""Optimizers that depend on shapes, for arrays that contain several layers or experts.

Scanned layers store their parameters as [layers, ...], and a layer with experts stores
[experts, in, out]. Factored moments, norms and orthogonal matrices must be computed for each layer
and each expert alone. `per_array` applies a transformation of one array to each layer and expert,
without the leading axes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import jax
import optax
from ed_infra.parameter_names import normalize_parameter_name, parse_run
from flax import nnx

#: Logical axis of experts: the first axis of their parameters.
EXPERT = "expert"


StateT = TypeVar("StateT")


def create_transformation(
    init: Callable[[Any], StateT],
    update: Callable[[Any, StateT, Any], tuple[Any, StateT]],
) -> optax.GradientTransformation:
    """Return a transformation of gradients; optax's types do not accept a class of states."""
    return optax.GradientTransformation(
        cast(optax.TransformInitFn, init), cast(optax.TransformUpdateFn, update)
    )


def logical_axes(node: object) -> tuple[str | None, ...]:
    """Return the logical axes of a parameter in one layer; empty if it declares none."""
    return tuple(node.get_metadata().get("axes") or ()) if isinstance(node, nnx.Variable) else ()


def map_parameters(
    function: Callable[[Sequence[object], Any], Any], params: optax.Params | None
) -> Any:
    """Replace each array of a tree of parameters by `function(path, parameter)`.

    Args:
        function: receives the storage path and the `nnx.Variable`, or the bare array.
        params: a tree of parameters; absent ones (`optax.MaskedNode`) stay absent.
    """

    def at(path: Sequence[object], node: object) -> Any:
        value = function(path, node)
        return jax.tree.map(lambda _: value, node)

    return jax.tree_util.tree_map_with_path(at, params, is_leaf=_is_variable)


def stacked_axes(path: Sequence[object], node: object) -> int:
    """Return the number of leading axes that stack layers and experts."""
    layers = sum(parse_run(key) is not None for key in normalize_parameter_name(path))
    return layers + (logical_axes(node)[:1] == (EXPERT,))


def own_shapes(params: optax.Params) -> Any:
    """Return the parameters; each leaf is replaced by the shape of one array."""

    def shape(path: Sequence[object], node: object) -> jax.ShapeDtypeStruct:
        leaf = jax.tree.leaves(node)
        full_shape = leaf[0].shape if leaf else ()
        return jax.ShapeDtypeStruct(full_shape[stacked_axes(path, node) :], "float32")

    return map_parameters(shape, params)


def per_array(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Apply a transformation of one array to each array of a tree, per layer and per expert.

    Args:
        inner: its `init` and `update` accept single arrays. The structure of its state must not
            depend on the array.

    Returns:
        A transformation of trees. Each leaf of the inner state is a tree like the parameters; a
        leaf of a stacked parameter has the leading axes of the parameter, counters too.
    """
    structure = jax.tree.structure(
        jax.eval_shape(inner.init, jax.ShapeDtypeStruct((2, 2), "float32"))
    )

    def lift_function(function: Callable[..., Any], count: int) -> Callable[..., Any]:
        for _ in range(count):
            function = jax.vmap(function)
        return function

    def counts(params: optax.Params) -> list[int]:
        return jax.tree.leaves(map_parameters(stacked_axes, params))

    def init(params: optax.Params) -> optax.OptState:
        leaves, treedef = jax.tree.flatten(params)
        states = [
            lift_function(inner.init, n)(p) for p, n in zip(leaves, counts(params), strict=True)
        ]
        return _columns(structure, treedef, states)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, optax.OptState]:
        assert params is not None
        treedef = jax.tree.structure(updates)
        columns = [jax.tree.leaves(column) for column in structure.flatten_up_to(state)]
        leaves = jax.tree.leaves(updates), jax.tree.leaves(params), counts(params)
        results: list[tuple[jax.Array, optax.OptState]] = []
        for u, p, n, *state_leaves in zip(*leaves, *columns, strict=True):
            inner_arguments = u, structure.unflatten(state_leaves)
            if results:
                # One array after another, so that temporary arrays of one exist at the same time.
                inner_arguments, results[-1] = jax.lax.optimization_barrier(
                    (inner_arguments, results[-1])
                )
            results.append(lift_function(inner.update, n)(*inner_arguments, p))
        new = jax.tree.unflatten(treedef, [result[0] for result in results])
        return new, _columns(structure, treedef, [result[1] for result in results])

    return create_transformation(init, update)


def _columns(structure: Any, treedef: Any, states: list[optax.OptState]) -> optax.OptState:
    """Convert a state for each array to one state whose leaves are trees of arrays."""
    rows = [structure.flatten_up_to(state) for state in states]
    trees = [
        jax.tree.unflatten(treedef, [row[i] for row in rows]) for i in range(structure.num_leaves)
    ]
    return structure.unflatten(trees)


def _is_variable(node: object) -> bool:
    return isinstance(node, nnx.Variable)
