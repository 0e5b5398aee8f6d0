"""The cross-entropy of a sharded batch: each device takes its own tokens.

`cross_entropy_sum` walks over chunks of tokens. Left to itself, the compiler splits that walk over
devices with different rows in some meshes only, and repeats work in others (counted for a small
Llama on eight devices over `dp`: three times the operations). Here the rows and positions of a
device are walked by that device, and the sums meet once.

Legend: b sequences, s positions, d hidden, v vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from ed_layers.losses import cross_entropy_sum
from jax.sharding import NamedSharding, PartitionSpec


def token_cross_entropy(
    hidden: jax.Array,
    head: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    sharding: NamedSharding,
    chunk: int | None = None,
) -> jax.Array:
    """Weighted sum of `-log p(target)`, in nats.

    Args:
        hidden: [b, s, d], after the last norm.
        head: [d, v].
        targets: int [b, s].
        weights: float32 [b, s]; 0 drops a token.
        sharding: of `targets`; its mesh axes are those that tokens are split over.
        chunk: tokens whose logits exist at once on a device; None lets the loss choose.

    Returns:
        A float32 scalar.
    """
    options = {} if chunk is None else {"chunk": chunk}
    spec = sharding.spec
    axes = _axes(spec)

    def local(hidden: Any, head: Any, targets: Any, weights: Any) -> jax.Array:
        total = cross_entropy_sum(
            hidden.reshape(-1, hidden.shape[-1]),
            head,
            targets.reshape(-1),
            weights.reshape(-1),
            **options,
        )
        return total[None]

    if not axes:
        return local(hidden, head, targets, weights)[0]
    # The other axes (tensor parallelism over the vocabulary) stay with the compiler.
    split = partial(
        jax.shard_map,
        mesh=sharding.mesh,
        in_specs=(PartitionSpec(*spec), PartitionSpec(), spec, spec),
        out_specs=PartitionSpec(axes),
        axis_names=set(axes),
        check_vma=False,
    )
    return jnp.sum(split(local)(hidden, head, targets, weights))


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Mesh axes that a spec names, in order."""
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
    return tuple(axis for entry in entries for axis in entry)
