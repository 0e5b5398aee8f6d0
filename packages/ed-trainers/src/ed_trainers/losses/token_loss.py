"""Log-probabilities and cross-entropy of a sharded batch: each device computes its own tokens.

`ed_layers.losses` loops over chunks of tokens. On its own, the compiler divides this loop over
devices with different rows in some meshes only, and repeats work in others (measured for a small
Llama on eight devices over `dp`: three times the operations). Here each device loops over its own
rows and positions. The compiler places the vocabulary: if the head is split over it, so are the
logits of a chunk.

Legend: b sequences, s positions, d hidden, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from ed_layers import losses
from ed_layers.projections.dot import Weight
from ed_layers.projections.head import Head
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

T = TypeVar("T")


def token_logprobs(
    hidden: Float[Array, "b s d"],
    head: Head | Weight,
    targets: Int[Array, "b s"],
    *,
    sharding: NamedSharding,
    chunk: int | None = None,
) -> tuple[Float[Array, "b s"], Float[Array, "b s"]]:
    """Log-probability of each target, and the log-partition, in nats; differentiable.

    Args:
        hidden: after the last norm.
        head: `model.head()`, or a matrix [d, v].
        targets: token ids in [0, v).
        sharding: of `targets`; its mesh axes are those that tokens are split over.
        chunk: tokens whose logits exist at the same time on a device; None = the default of the
            loss. The backward pass computes them again.

    Returns:
        `(logp, logz)`, float32, sharded as the targets are.
    """

    def local(hidden: jax.Array, head: Head, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logp, logz = losses.token_logprobs(
            _flat(hidden), head, targets.reshape(-1), **_options(chunk)
        )
        return logp.reshape(targets.shape), logz.reshape(targets.shape)

    spec = sharding.spec
    run = by_device(local, sharding, (spec, PartitionSpec(), spec), spec)
    return run(hidden, Head.of(head), targets)


def token_square_logprobs(
    hidden: Float[Array, "b s d"],
    head: Head | Weight,
    *,
    sharding: NamedSharding,
    chunk: int | None = None,
) -> Float[Array, "b s"]:
    """Log-probability that two samples at a position are the same token, in nats.

    Args:
        hidden: after the last norm.
        head: `model.head()`, or a matrix [d, v].
        sharding: of the positions; its mesh axes are those that tokens are split over.
        chunk: tokens whose logits exist at the same time on a device; None = the default of the
            loss.
    """

    def local(hidden: jax.Array, head: Head) -> jax.Array:
        def compute_chunk(carry: None, part: jax.Array) -> tuple[None, jax.Array]:
            logps = jax.nn.log_softmax(head(part), axis=-1)
            return carry, jax.nn.logsumexp(2 * logps, axis=-1)

        parts = losses.split_chunks(_flat(hidden), chunk or losses.DEFAULT_CHUNK)
        _, squares = jax.lax.scan(compute_chunk, None, parts)
        return squares.reshape(-1)[: hidden[..., 0].size].reshape(hidden.shape[:-1])

    spec = sharding.spec
    run = by_device(local, sharding, (spec, PartitionSpec()), spec)
    return run(hidden, Head.of(head))


def token_cross_entropy(
    hidden: Float[Array, "b s d"],
    head: Head | Weight,
    targets: Int[Array, "b s"],
    weights: Float[Array, "b s"],
    *,
    sharding: NamedSharding,
    chunk: int | None = None,
    loss: losses.TokenLoss = losses.TokenLoss(),  # noqa: B008 - a tuple of numbers
) -> Float[Array, ""]:
    """Weighted sum of `-log p(target)`, in nats; its gradient is made in the forward pass.

    Args:
        hidden: after the last norm.
        head: `model.head()`, or a matrix [d, v].
        targets: token ids in [0, v).
        weights: 0 drops a token.
        sharding: of `targets`; its mesh axes are those that tokens are split over.
        chunk: tokens whose logits exist at the same time on a device; None = the default of the
            loss.
        loss: additional terms of each token: label smoothing, z-loss.
    """

    def local(hidden: jax.Array, head: Head, targets: jax.Array, weights: jax.Array) -> jax.Array:
        flat = (_flat(hidden), head, targets.reshape(-1), weights.reshape(-1))
        total = losses.cross_entropy_sum(*flat, **_options(chunk), loss=loss)
        return total[None]

    spec = sharding.spec
    sums = PartitionSpec(_axes(spec)) if _axes(spec) else PartitionSpec()
    run = by_device(local, sharding, (spec, PartitionSpec(), spec, spec), sums)
    return jnp.sum(run(hidden, Head.of(head), targets, weights))


def by_device(
    local: Callable[..., T], sharding: NamedSharding, inputs: tuple[PartitionSpec, ...], out: object
) -> Callable[..., T]:
    """Let each device run a function on its own tokens; the other mesh axes are the compiler's."""
    axes = _axes(sharding.spec)
    if not axes:
        return local

    def run(*arguments: object) -> T:
        # XLA on CPUs aborts the process when such a program sums bfloat16 over devices, as the
        # gradient of an argument that every device has whole: there the sum is in float32.
        widen_flags = [spec == PartitionSpec() and _on_cpu(sharding) for spec in inputs]
        dtypes = [jax.tree.map(lambda x: x.dtype, argument) for argument in arguments]

        def narrow(*wide: object) -> T:
            return local(*(jax.tree.map(_as, *pair) for pair in zip(wide, dtypes, strict=True)))

        split = jax.shard_map(
            narrow if any(widen_flags) else local,
            mesh=sharding.mesh,
            in_specs=inputs,
            out_specs=out,
            axis_names=set(axes),
            check_vma=False,
        )
        wide = [
            jax.tree.map(_at_least_float32, argument) if is_whole else argument
            for argument, is_whole in zip(arguments, widen_flags, strict=True)
        ]
        return split(*wide)

    return jax.jit(run, inline=True)  # outside of any jit, jax refuses axes that are left out


def _on_cpu(sharding: NamedSharding) -> bool:
    return next(iter(sharding.device_set)).platform == "cpu"


def _as(array: jax.Array, dtype: jnp.dtype) -> jax.Array:
    return array if array.dtype == dtype else array.astype(dtype)


def _at_least_float32(array: jax.Array) -> jax.Array:
    narrow = jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4
    return array.astype(jnp.float32) if narrow else array


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Mesh axes that a spec names, in order."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return tuple(axis for entry in entries for axis in entry)


def _flat(hidden: jax.Array) -> jax.Array:
    return hidden.reshape(-1, hidden.shape[-1])


def _options(chunk: int | None) -> dict[str, int]:
    return {} if chunk is None else {"chunk": chunk}
