"""Frozen models: their arrays as arguments of compiled steps, and a reference that is synchronized.

The weights of a synchronized reference follow the learner's, as in TR-DPO (Gorbatovski et al.,
arXiv:2404.09656, section 3.1): every n steps the reference becomes
`alpha * learner + (1 - alpha) * reference`. These weights are part of the state
(`EasyDeLState.reference`), so checkpoints contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel
from flax import nnx

from ed_trainers.stored.arrays import flat_arrays, from_flat


class Following:
    """A frozen model whose weights follow the learner's, and its weights before training.

    Only the parameters that the learner trains are updated. The other variables stay unchanged.

    Args:
        name: role of the frozen model.
        model: the frozen model; its arrays are copied.
        learned: the trained parameters of the learner.
        alpha: share of the learner in the mixture.
        every: number of steps between two mixtures.
        present: returns the present weights, a tree like `begin`.

    Raises:
        ConfigError: the model lacks a trained parameter of the learner, or has another shape.
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
        learner_params = dict(nnx.to_flat_state(learned))
        for path, variable in learner_params.items():
            if path not in params or params[path].shape != variable.shape:
                there = params[path].shape if path in params else "no trainable parameter"
                raise ConfigError(
                    f"sync_ref_model mixes the weights of learner and {name}: the learner's "
                    f"{'.'.join(map(str, path))} has shape {variable.shape}, and the {name} has "
                    f"{there} at this name. Use a {name} of the learner's architecture and storage "
                    f"of layers, omit the {name}, or omit sync_ref_model"
                )
        #: Paths of the parameters that follow.
        self.paths = frozenset(learner_params)
        follows = nnx.from_flat_state([(path, params[path]) for path in learner_params])
        # A step donates the arrays of its state, and the model may be the learner itself.
        self.begin: nnx.State = jax.tree.map(jnp.copy, follows)
        self._treedef = jax.tree.structure(self.begin)

    def build_state(self, leaves: tuple[jax.Array, ...]) -> nnx.State:
        """Return a tree like `begin` with these leaves."""
        return jax.tree.unflatten(self._treedef, leaves)

    def update_reference(self, now: nnx.State, learned: nnx.State, step: jax.Array) -> nnx.State:
        """Return the weights after a step of the learner; traced.

        Args:
            now: a tree like `begin`.
            learned: the learner's parameters after the step.
            step: number of updates so far.
        """
        learner_arrays = flat_arrays(learned)

        def mix_states() -> nnx.State:
            array_pairs = {
                name: (learner_arrays[name], array) for name, array in flat_arrays(now).items()
            }
            return from_flat(
                now, {name: self._mix_arrays(*pair) for name, pair in array_pairs.items()}
            )

        return jax.lax.cond(step % self.every == 0, mix_states, lambda: now)

    def _mix_arrays(self, learner: jax.Array, reference: jax.Array) -> jax.Array:
        mixture = self.alpha * learner.astype(jnp.float32)
        mixture += (1 - self.alpha) * reference.astype(jnp.float32)
        return mixture.astype(reference.dtype)


class Frozen:
    """Split frozen models. Compiled steps receive their leaves as arguments.

    Args:
        models: the models by role.
        learner: the trained model. Steps overwrite its arrays, so an array that a frozen model
            shares with the learner is copied.
        following: the model that follows the learner, if any. Its moving weights are in the state
            instead.
    """

    def __init__(
        self,
        models: Mapping[str, LanguageModel] | None = None,
        learner: LanguageModel | None = None,
        following: Following | None = None,
    ):
        self.following = following
        self._graphdefs: dict[str, nnx.GraphDef] = {}
        parts: dict[str, tuple[nnx.State, nnx.State]] = {}
        for name, model in (models or {}).items():
            self._graphdefs[name], params, other_variables = model.split_module()
            if following is not None and name == following.name:
                params = _without(params, following.paths)
            parts[name] = (params, other_variables)
        overwritten: set[int] = set()
        if parts and learner is not None:
            overwritten = _buffers(jax.tree.leaves(learner.split_module()[1:]))
        leaves, self._treedef = jax.tree.flatten(parts)
        #: The arrays of the models that no step changes.
        self.fixed: tuple[jax.Array, ...] = tuple(
            jnp.copy(leaf) if overwritten and overwritten & _buffers([leaf]) else leaf
            for leaf in leaves
        )

    @property
    def description(self) -> tuple[object, ...]:
        """What a program reads of the models besides their arrays."""
        following = self.following
        moves = () if following is None else (following.name, following.alpha, following.every)
        return self._graphdefs, str(self._treedef), moves

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        """All present arrays of the models, in the order of the argument of `merge`."""
        return self.join_leaves(
            self.fixed, None if self.following is None else self.following.present()
        )

    def join_leaves(
        self, fixed: tuple[jax.Array, ...], reference: nnx.State | None
    ) -> tuple[jax.Array, ...]:
        """Return the argument of `merge` from `fixed` and the weights that follow the learner."""
        return (*fixed, *jax.tree.leaves(reference))

    def merge(self, leaves: tuple[jax.Array, ...]) -> dict[str, LanguageModel]:
        """Return the models with these leaves; called while tracing."""
        count = self._treedef.num_leaves
        parts = jax.tree.unflatten(self._treedef, leaves[:count])
        if self.following is not None:
            parts[self.following.name] += (self.following.build_state(leaves[count:]),)
        return {
            name: nnx.merge(graphdef, *parts[name]) for name, graphdef in self._graphdefs.items()
        }


def _without(params: nnx.State, paths: Container[object]) -> nnx.State:
    remaining_params = [
        (path, variable) for path, variable in nnx.to_flat_state(params) if path not in paths
    ]
    return nnx.from_flat_state(remaining_params)


def _buffers(leaves: list[jax.Array]) -> set[int]:
    """Return the memory addresses of the local shards of arrays."""
    return {
        shard.data.unsafe_buffer_pointer() for leaf in leaves for shard in leaf.addressable_shards
    }
