"""Variables that training changes without a gradient, such as the bias of a router.

A layer adds up what it sees (`Report.updates`); a train step sums that over its microbatches and
then applies the variable's rule once. So the result does not depend on the accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from ed_infra import paths
from flax import nnx

#: `(value, sum of what the layers reported) -> new value`, for one layer; hashable.
UpdateRule = Callable[[jax.Array, jax.Array], jax.Array]


class Updated(nnx.Variable):
    """A variable with a rule: `Updated(value, axes=("expert",), rule=BiasRule(rate=1e-3))`.

    It is no parameter: optimizers do not see it, checkpoints and weight files do.
    """


def storage_name(path: tuple[Any, ...]) -> str:
    """Name of a variable in `updates`: its storage path, parts joined by `/`."""
    return "/".join(str(part) for part in paths.normalize(path))


def apply_updates(
    state: nnx.State, updates: Mapping[str, jax.Array], trained: nnx.State | None = None
) -> nnx.State:
    """Return the state with each reported variable changed by its rule; traceable.

    Args:
        state: the variables of a model, or those of them that are no parameters.
        updates: storage name -> sum over the step, [...] or [layers, ...] of stacked layers.
        trained: the parameters that learn. A variable of a module none of whose own parameters
            learns stays as it is: the bias of a frozen router belongs to the router that was
            loaded, and adapters that are saved alone could not say how it moved. None = all learn.

    Raises:
        KeyError: an update names no `Updated` variable of the state.
    """
    if not updates:
        return state
    flat, left = [], dict(updates)
    learning = None if trained is None else {path[:-1] for path, _ in nnx.to_flat_state(trained)}
    for path, variable in nnx.to_flat_state(state):
        reported = left.pop(storage_name(path), None)
        if reported is not None and (learning is None or path[:-1] in learning):
            rule: Any = variable.get_metadata()["rule"]
            rule = jax.vmap(rule) if paths.is_stacked(path) else rule
            variable = variable.replace(rule(variable.get_value(), reported))
        flat.append((path, variable))
    if left:
        raise KeyError(f"updates of variables that the model does not have: {', '.join(left)}")
    return nnx.from_flat_state(flat)
