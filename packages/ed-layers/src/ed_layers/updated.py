"""Variables that training updates without a gradient, such as the bias of a router.

A layer reports sums (`Report.updates`). A train step adds the sums of its microbatches and then
applies the rule of the variable once, so the result does not depend on gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from ed_infra import parameter_names
from flax import nnx

#: `(value, reported sum) -> new value`, for one layer; hashable.
UpdateRule = Callable[[jax.Array, jax.Array], jax.Array]


class Updated(nnx.Variable):
    """A variable with a rule: `Updated(value, axes=("expert",), rule=BiasRule(rate=1e-3))`.

    An `Updated` variable is not a parameter: checkpoints and weight files contain it, optimizers
    ignore it. With `optional=True`, weight files omit zeros.
    """


def storage_name(path: tuple[Any, ...]) -> str:
    """Name of a variable in `updates`: its storage path, parts joined by `/`."""
    return "/".join(str(part) for part in parameter_names.normalize_parameter_name(path))


def apply_updates(
    state: nnx.State, updates: Mapping[str, jax.Array], trained: nnx.State | None = None
) -> nnx.State:
    """Return the state with each reported variable changed by its rule; traceable.

    Args:
        state: the variables of a model, with or without its parameters.
        updates: storage name -> sum over the step, [...] or [layers, ...] of stacked layers.
        trained: the trained parameters. The variable of a module without trained parameters stays
            unchanged: the bias of a frozen router belongs to the loaded router, and separately
            saved adapters could not store its change. None = all parameters are trained.

    Raises:
        KeyError: an update names no `Updated` variable of the state.
    """
    if not updates:
        return state
    flat, remaining_updates = [], dict(updates)
    learning = None
    if trained is not None:
        paths = [path for path, _ in nnx.to_flat_state(trained)]
        learning = {path[:length] for path in paths for length in range(len(path))}
    for path, variable in nnx.to_flat_state(state):
        reported = remaining_updates.pop(storage_name(path), None)
        if reported is not None and (learning is None or path[:-1] in learning):
            rule: Callable[..., jax.Array] = variable.get_metadata()["rule"]
            rule = jax.vmap(rule) if parameter_names.is_stacked(path) else rule
            variable = variable.replace(rule(variable.get_value(), reported))
        flat.append((path, variable))
    if remaining_updates:
        raise KeyError(
            f"updates of variables that the model does not have: {', '.join(remaining_updates)}"
        )
    return nnx.from_flat_state(flat)
