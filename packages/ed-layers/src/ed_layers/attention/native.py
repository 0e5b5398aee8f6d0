"""What every native kernel shares: whether it runs here, what stands in for it, and devices.

A mechanism with a native kernel computes the same everywhere. Where its kernel is not, or cannot
take a call, the memory-lean XLA core of `blockwise` does it; what was taken is said once.

Legend: b batch, s query length, t key length, h heads, g kv heads, k head dim of queries and keys,
d head dim of values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from ed_infra.logging import get_logger, once
from ed_infra.masks import MaskInfo
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ed_layers.attention.blockwise import blockwise_attention
from ed_layers.attention.hardware import platform_of
from ed_layers.attention.mechanism import MECHANISMS, Mechanism
from ed_layers.attention.scoring import Scoring

logger = get_logger(__name__)


def as_blockwise(
    name: str,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    mask_info: MaskInfo,
    scoring: Scoring,
    mechanism: Mechanism,
) -> Float[Array, "b s h d"]:
    """The lean XLA core, by the block sizes of mechanism `name`."""
    settings = (("blockwise", mechanism.settings_of(name)),)
    mechanism = replace(mechanism, settings=settings)
    return blockwise_attention(q, k, v, mask_info, scoring, mechanism)


def native_platform(mechanism: Mechanism, name: str) -> str | None:
    """The platform that the model runs on if the mechanism has a kernel there and may use it."""
    if mechanism.settings_of(name).platform == "jax":
        return None
    platform = platform_of(mechanism.config)
    return platform if platform in dict(MECHANISMS[name].kernels) else None


def taken(mechanism: Mechanism, name: str, kernel: str, refusals: list[str]) -> bool:
    """Whether a call goes to a kernel; says so once, or why not.

    Args:
        name: the mechanism.
        kernel: what its kernel is called.
        refusals: what the kernel cannot do of what the call asks for; empty if it takes it.
    """
    if not refusals:
        once(logger, f"attention: {name!r} runs {kernel}", level=logging.INFO)
        return True
    # Whoever asks for a language is told more loudly that it is not used.
    level = logging.WARNING if mechanism.settings_of(name).platform else logging.INFO
    reasons = "; ".join(refusals)
    once(logger, f"attention: {name!r} runs in plain XLA, not {kernel}: {reasons}", level=level)
    return False


def limit_of(limit: Any) -> int | None:
    """A static window or chunk without its spelling 0 for "no limit"."""
    return limit if isinstance(limit, int) and limit > 0 else None


def static(limit: Any) -> bool:
    """Whether a window or chunk is known when the program is traced."""
    return limit is None or isinstance(limit, int)


#: `(q, k, v, row data [b, ...], head data [h]) -> out [b, s, h, d]` on one device.
Kernel = Callable[[jax.Array, jax.Array, jax.Array, Any, Any], jax.Array]


def over_devices(
    kernel: Kernel,
    config: Any,
    q: Float[Array, "b s h k"],
    k: Float[Array, "b t g k"],
    v: Float[Array, "b t g d"],
    rows: Any,
    heads: Any = None,
) -> Float[Array, "b s h d"]:
    """Run a kernel on each device's rows and heads, whole sequences: XLA cannot split a kernel.

    Args:
        config: of the model; its partition rules say how batch and heads are split.
        rows: pytree of arrays with the batch as first axis.
        heads: pytree of arrays with the heads as first axis.
    """
    mesh = getattr(config, "mesh", None)
    if mesh is None or mesh.size == 1:
        return kernel(q, k, v, rows, heads)
    names = ("batch", None, "heads")
    placed = config.partition_manager.resolve(names, "train", q.shape, mesh)
    batch, _, head = (*placed, None, None, None)[:3]
    axes = (head,) if isinstance(head, str) else tuple(head or ())
    ways = math.prod(mesh.shape[axis] for axis in axes)
    # Key heads that do not divide are repeated, so that each device has those of its queries.
    repeat = math.lcm(k.shape[2], ways) // k.shape[2]
    if repeat > 1:
        k, v = (jnp.repeat(x, repeat, axis=2) for x in (k, v))
    spec = P(batch, None, head)
    run = jax.shard_map(
        kernel,
        mesh=mesh,
        in_specs=(spec, spec, spec, P(batch), P(head)),
        out_specs=spec,
        check_vma=False,
    )
    return run(q, k, v, rows, heads)
