"""Native kernels on this machine: interpreted, traced, or compiled for a TPU that is not here."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.masks import MaskInfo
from ed_layers.attention import Mechanism
from ed_layers.attention.scoring import Scoring
from ed_layers.attention.splash import splash_attention
from ed_layers.attention.vanilla import vanilla_attention

ONE = (1, 1, 1, 1, 1)
B, S, H, G, K = 2, 200, 4, 2, 32
# Padding before, between and behind; two segments in one row and three in the other.
SEGMENTS = np.repeat([[0, 1, 0, 2, 0], [1, 1, 2, 2, 3]], [5, 100, 7, 60, 28], axis=1)


def mechanism(**fields: Any) -> Mechanism:
    return Mechanism.resolve(EasyDeLBaseConfig(**{"sharding_axis_dims": ONE, **fields}))


def inputs(value_dim: int = K, dtype: Any = jnp.float32) -> list[jax.Array]:
    draw = np.random.default_rng(0)
    shapes = [(B, S, H, K), (B, S, G, K), (B, S, G, value_dim), (B, S, H, value_dim), (H,)]
    return [jnp.asarray(draw.normal(size=shape), dtype) for shape in shapes]


def worst(found: Any, expected: Any) -> float:
    """The largest error relative to the largest value of its tensor."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)


SPLASH = {
    "window, cap, sinks": {"window": 19, "soft_cap": 2.0, "sinks": True},
    "causal": {},
    "bidirectional": {"causal": False},
    "bidirectional, window": {"causal": False, "window": 30},
    "chunk": {"chunk": 24},
    "traced chunk": {"chunk": jnp.asarray(24)},
    "value dim": {"value_dim": 64},
}


@pytest.mark.parametrize(
    "case",
    [
        name if i == 0 else pytest.param(name, marks=pytest.mark.nightly)
        for i, name in enumerate(SPLASH)
    ],
)
def test_splash_is_vanilla(case: str, record_property) -> None:
    given = dict(SPLASH[case])
    *qkv, d_out, sinks = inputs(given.pop("value_dim", K))
    info = MaskInfo.from_segments(SEGMENTS, causal=given.pop("causal", True))
    sinks = sinks if given.pop("sinks", False) else None

    def loss(attention: Any, qkv: Any, sinks: Any) -> Any:
        scoring = Scoring(K**-0.5, sinks=sinks, **given)
        out = attention(*qkv, info, scoring, mechanism())
        return jnp.sum(out * d_out), out

    def run(attention: Any) -> Any:
        of = jax.value_and_grad(partial(loss, attention), argnums=(0, 1), has_aux=True)
        (_, out), grads = jax.jit(of)(qkv, sinks)
        return out, grads

    out, grads = run(partial(splash_attention, "blocksparse", interpret=True))
    expected, expected_grads = run(vanilla_attention)
    errors = worst(out, expected), worst(grads, expected_grads)
    record_property("summary", f"splash, interpreted, {case}: {errors[0]:.1e}, {errors[1]:.1e}")
    assert errors[0] < 1e-5 and errors[1] < 1e-4
    assert not np.any(np.asarray(out)[SEGMENTS == 0])
