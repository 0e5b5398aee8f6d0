"""The functions of `EasyLM.jax_utils`: random keys, dtypes, losses, meshes and shardings."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ed_infra.errors import ConfigError
from ed_infra.sharding.mesh import create_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from ed_elarge.easylm.checkpoints import float_dtype

PartitionRules = Sequence[tuple[str, PartitionSpec]]


class JaxRNG:
    """A key of jax that changes with each call, for code that needs a sequence of keys."""

    def __init__(self, rng: jax.Array) -> None:
        self.rng = rng

    @classmethod
    def from_seed(cls, seed: int) -> JaxRNG:
        """Return the generator of a seed."""
        return cls(jax.random.PRNGKey(seed))

    def __call__(self, keys: int | Iterable[str] | None = None) -> Any:
        """Return a key; a tuple of keys for a number; or a key for each name."""
        names = None if keys is None or isinstance(keys, int) else list(keys)
        count = 1 if keys is None else keys if isinstance(keys, int) else len(names or ())
        self.rng, *parts = jax.random.split(self.rng, count + 1)
        if keys is None:
            return parts[0]
        return tuple(parts) if names is None else dict(zip(names, parts, strict=True))


class _Generator:
    """The generator of this process."""

    value: JaxRNG | None = None


def init_rng(seed: int) -> None:
    """Set the seed of `next_rng`."""
    _Generator.value = JaxRNG.from_seed(seed)


set_random_seed = init_rng


def next_rng(keys: int | Iterable[str] | None = None) -> Any:
    """Return the next key, or keys, of the generator of this process.

    Raises:
        ConfigError: No seed is set.
    """
    if _Generator.value is None:
        raise ConfigError("next_rng has no seed: call set_random_seed(SEED) before")
    return _Generator.value(keys)


def get_float_dtype_by_name(dtype: str) -> Any:
    """Return the dtype of `bf16`, `fp16`, `fp32` or `fp64`."""
    return float_dtype(dtype)


def float_tensor_to_dtype(tensor: Any, dtype: Any) -> Any:
    """Return an array of numbers in another dtype; other values are returned unchanged."""
    target = float_dtype(dtype) if isinstance(dtype, str) else dtype
    present = getattr(tensor, "dtype", None)
    if target is None or present is None or not jnp.issubdtype(present, jnp.floating):
        return tensor
    return tensor.astype(target)


def float_to_dtype(tree: object, dtype: object) -> Any:
    """Convert the numbers of a tree of arrays to a dtype."""
    return jax.tree.map(partial(float_tensor_to_dtype, dtype=dtype), tree)


def cross_entropy_loss_and_accuracy(
    logits: Float[Array, "b s v"], tokens: Int[Array, "b s"], valid: object = None
) -> tuple[jax.Array, jax.Array]:
    """Return the mean of the losses of the rows, and the mean of their accuracies."""
    weights = jnp.ones(tokens.shape) if valid is None else jnp.asarray(valid, jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens)
    correct = (jnp.argmax(logits, axis=-1) == tokens).astype(jnp.float32)

    def mean(values: jax.Array) -> jax.Array:
        counts = jnp.maximum(weights.sum(axis=-1), 1e-10)
        return (jnp.where(weights > 0, values, 0.0).sum(axis=-1) / counts).mean()

    return mean(losses), mean(correct)


def global_norm(tree: object) -> jax.Array:
    """Return the norm of all arrays of a tree together."""
    return optax.global_norm(tree)


def average_metrics(metrics: Sequence[Any]) -> Any:
    """Return the mean of trees of numbers."""
    return jax.tree.map(lambda *values: jnp.mean(jnp.stack(values)), *metrics)


def named_tree_map(
    f: Callable[[Any, Any], Any],
    tree: object,
    is_leaf: Callable[[Any], bool] | None = None,
    sep: str | None = None,
) -> Any:
    """Map a function of (name, leaf) over a tree; the name is a tuple, or a text with `sep`."""

    def apply(path: jax.tree_util.KeyPath, leaf: object) -> Any:
        names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
        return f(names if sep is None else sep.join(names), leaf)

    return jax.tree_util.tree_map_with_path(apply, tree, is_leaf=is_leaf)


def match_partition_rules(rules: PartitionRules, params: object) -> Any:
    """Return the sharding of each array: that of the first rule whose pattern is in its name.

    Raises:
        ConfigError: No rule matches an array.
    """

    def find(name: str, leaf: jax.Array) -> PartitionSpec:
        if np.prod(np.shape(leaf)) == 1:
            return PartitionSpec()
        for pattern, spec in rules:
            if re.search(pattern, name):
                return spec
        raise ConfigError(f"no rule matches {name!r}: add ('.*', PartitionSpec()) at the end")

    return named_tree_map(find, params, sep="/")


def get_weight_decay_mask(exclusions: Iterable[str]) -> Callable[[Any], Any]:
    """Return the function from parameters to whether each decays."""
    patterns = list(exclusions)

    def decays(name: str, _: object) -> bool:
        return not any(re.search(pattern, name) for pattern in patterns)

    return lambda params: named_tree_map(decays, params, sep="/")


def tree_apply(fns: object, tree: object) -> Any:
    """Apply a tree of functions to a tree of values."""
    return jax.tree.map(lambda function, value: function(value), fns, tree)


def get_jax_mesh(axis_dims: str, names: Sequence[str]) -> Mesh:
    """Return the mesh of `1,-1,1`, or of `dp:1,fsdp:-1,mp:1`.

    Raises:
        ConfigError: The text has other axes.
    """
    parts = axis_dims.lstrip("!").replace(" ", "").split(",")
    named = dict(part.split(":", 1) for part in parts if ":" in part)
    numbers = [named.get(name, "") for name in names] if named else parts
    if len(numbers) != len(names) or not all(re.fullmatch(r"-?\d+", n) for n in numbers):
        raise ConfigError(f"axis_dims={axis_dims!r} must be a number for each of {list(names)}")
    return create_mesh([int(number) for number in numbers], names)


def make_shard_and_gather_fns(
    partition_specs: object, dtype_specs: object = None, *, mesh: Mesh | None = None
) -> tuple[Any, Any]:
    """Return the functions that place each array on a mesh, and those that read it from there.

    Args:
        partition_specs: Tree of shardings.
        dtype_specs: A dtype for all numbers; None: unchanged.
        mesh: The mesh; None: that of `jax.set_mesh`.

    Raises:
        ConfigError: There is no mesh.
    """
    target_mesh = mesh if mesh is not None else jax.sharding.get_mesh()
    if not target_mesh.axis_names:
        raise ConfigError("make_shard_and_gather_fns needs a mesh: pass mesh=get_jax_mesh(…)")

    def shard(spec: PartitionSpec) -> Callable[[Any], jax.Array]:
        place = NamedSharding(target_mesh, spec)
        return lambda array: jax.device_put(float_tensor_to_dtype(array, dtype_specs), place)

    def gather(spec: PartitionSpec) -> Callable[[Any], np.ndarray]:
        return lambda array: np.asarray(float_tensor_to_dtype(array, dtype_specs))

    def is_spec(value: object) -> bool:
        return isinstance(value, PartitionSpec)

    return (
        jax.tree.map(shard, partition_specs, is_leaf=is_spec),
        jax.tree.map(gather, partition_specs, is_leaf=is_spec),
    )


def get_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return numbers on the host."""
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
