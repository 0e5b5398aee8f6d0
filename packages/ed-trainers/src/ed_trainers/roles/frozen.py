"""A frozen model whose weights follow the learner's: the reference of TR-DPO.

Gorbatovski et al., arXiv:2404.09656, section 3.1: every n steps the reference becomes
`alpha * learner + (1 - alpha) * reference`; with `alpha` 1 it becomes the learner. The weights that
follow are part of the state (`EasyDeLState.reference`), so a checkpoint holds them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.stored.arrays import flat_arrays, from_flat


class Following:
    """How a frozen model follows the learner, and the weights that it begins with.

    What follows are the weights that the learner learns. Others of the model, and its variables
    that are no parameters, stay as they are.

    Args:
        name: of the frozen model.
        model: the model; its arrays are copied.
        learned: the learner's parameters that learn.
        alpha: share of the learner in the mixture.
        every: steps between two mixtures.
        present: returns the present weights, a tree like `begin`.

    Raises:
        ConfigError: the model lacks a parameter that the learner learns, or has it in another
            shape.
    """

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        learned: nnx.State,
        *,
        alpha: float,
        every: int,
        present: Callable[[], nnx.State],
    ):
        self.name, self.alpha, self.every, self.present = name, alpha, every, present
        params = dict(nnx.to_flat_state(model.split_module()[1]))
        own = dict(nnx.to_flat_state(learned))
        for path, variable in own.items():
            if path not in params or params[path].shape != variable.shape:
                there = params[path].shape if path in params else "nothing that can learn"
                raise ConfigError(
                    f"sync_ref_model mixes learner and {name}, weight by weight: the learner's "
                    f"{'.'.join(map(str, path))} has the shape {variable.shape}, and the {name} "
                    f"has {there} there. Give a {name} of the learner's architecture and storage "
                    f"of layers, leave it out, or leave sync_ref_model out"
                )
        #: Names of the parameters that follow.
        self.paths = frozenset(own)
        follows = nnx.from_flat_state([(path, params[path]) for path in own])
        # Copied: a step donates what is in its state, and the model may be the learner itself.
        self.begin: nnx.State = jax.tree.map(jnp.copy, follows)
        self._treedef = jax.tree.structure(self.begin)

    def state_of(self, leaves: tuple[jax.Array, ...]) -> nnx.State:
        """Return a tree like `begin` of its leaves."""
        return jax.tree.unflatten(self._treedef, leaves)

    def moved(self, now: nnx.State, learned: nnx.State, step: jax.Array) -> nnx.State:
        """Return the weights after a step of the learner; traced.

        Args:
            now: a tree like `begin`.
            learned: the learner's parameters after the step.
            step: updates done.
        """
        own = flat_arrays(learned)

        def mixed() -> nnx.State:
            both = {name: (own[name], array) for name, array in flat_arrays(now).items()}
            return from_flat(now, {name: self._mixed(*pair) for name, pair in both.items()})

        return jax.lax.cond(step % self.every == 0, mixed, lambda: now)

    def _mixed(self, learner: jax.Array, reference: jax.Array) -> jax.Array:
        mixture = self.alpha * learner.astype(jnp.float32)
        mixture += (1 - self.alpha) * reference.astype(jnp.float32)
        return mixture.astype(reference.dtype)
