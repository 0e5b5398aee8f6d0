"""Which mechanism a call with "auto" takes: by platform, shape and features."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
from ed_infra.logging import get_logger, once

from ed_layers.attention.hardware import compute_capability_of, has_tokamax, platform_of
from ed_layers.attention.mechanism import MECHANISMS, Mechanism
from ed_layers.attention.ring_layout import sequence_axes

logger = get_logger(__name__)

# The score matrix is materialised up to this many query tokens: measured on a CPU, blocks are
# faster from there on (four times at 512 tokens, ten times at 2048).
FULL_SCORES_LIMIT = 128


# What keeps a call from the native kernels of a platform, beyond what their mechanisms lack.
NOT_ON_TPU = frozenset({"cross", "bias", "dropout"})
NOT_ON_GPU = frozenset({"bias", "dropout", "sinks"})


def choose(mechanism: Mechanism, q: jax.Array, k: jax.Array, features: frozenset[str]) -> str:
    """The mechanism of a call that reads what is projected; says once what "auto" took.

    Args:
        q: [b, s, h, k].
        k: [b, t, g, k].
        features: the names of FEATURES that the call uses.
    """
    if mechanism.name != "auto":
        return mechanism.name
    platform = platform_of(mechanism.config)
    name, why = chosen(mechanism, platform, q, features)
    once(logger, f"attention: auto takes {name!r} on {platform}: {why}", level=logging.INFO)
    return name


def chosen(
    mechanism: Mechanism, platform: str, q: jax.Array, features: frozenset[str]
) -> tuple[str, str]:
    """The mechanism, and in words why: by shape, by how the mesh splits, by kernel."""
    if q.shape[1] <= FULL_SCORES_LIMIT:
        return "vanilla", f"at most {FULL_SCORES_LIMIT} queries"
    # Blocks of a split sequence would be gathered.
    if sequence_axes(mechanism.config) is not None and features <= MECHANISMS["ring"].features:
        return "ring", "the mesh splits the sequence"
    name = native(mechanism, platform, q, features)
    if name is not None:
        return name, "its kernel fits"
    return "blockwise", f"more than {FULL_SCORES_LIMIT} queries"


def native(
    mechanism: Mechanism, platform: str, q: jax.Array, features: frozenset[str]
) -> str | None:
    """The mechanism whose native kernel takes a call on this platform, if there is one."""
    language = mechanism.settings_of("auto").platform
    if platform == "tpu" and language in (None, "pallas"):
        fits = not features & NOT_ON_TPU and q.dtype in (jnp.float32, jnp.bfloat16)
        return "blocksparse" if fits else None
    if platform == "gpu" and q.dtype in (jnp.bfloat16, jnp.float16) and not features & NOT_ON_GPU:
        widest = 256 if compute_capability_of(mechanism.config) >= (9, 0) else 128
        fits = features <= MECHANISMS["cudnn"].features and q.shape[-1] % 8 == 0
        if language is None and fits and q.shape[-1] <= widest:
            return "cudnn"
        if language in (None, "triton") and has_tokamax():
            return "flash_attn2"
    return None
