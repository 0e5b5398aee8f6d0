"""Which mechanism a call with "auto" takes: by platform, shape and features."""

from __future__ import annotations

import jax
from ed_infra.logging import get_logger, once

from ed_layers.attention.hardware import platform_of
from ed_layers.attention.mechanism import MECHANISMS, Mechanism
from ed_layers.attention.ring_layout import sequence_axes

logger = get_logger(__name__)

# The score matrix is materialised up to this many query tokens: measured on a CPU, blocks are
# faster from there on (four times at 512 tokens, ten times at 2048).
FULL_SCORES_LIMIT = 128


def choose(mechanism: Mechanism, q: jax.Array, k: jax.Array, features: frozenset[str]) -> str:
    """The mechanism of a call that reads what is projected; says once what "auto" took.

    Args:
        q: [b, s, h, k].
        k: [b, t, g, k].
        features: the names of FEATURES that the call uses.
    """
    if mechanism.name != "auto":
        return mechanism.name
    name = "blockwise" if q.shape[1] > FULL_SCORES_LIMIT else "vanilla"
    # Blocks of a split sequence would be gathered; whole scores of a short one may as well be.
    split = name == "blockwise" and sequence_axes(mechanism.config) is not None
    if split and features <= MECHANISMS["ring"].features:
        name = "ring"
    return said(name, platform_of(mechanism.config))


def said(name: str, platform: str) -> str:
    """Say once that "auto" took a mechanism."""
    once(logger, f"attention: auto takes {name!r} on {platform}", level=20)
    return name
