"""Muon: momentum made orthogonal, matrix by matrix (https://kellerjordan.github.io/posts/muon).

Legend: i in features, o out features.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from ed_infra.parameter_names import canonical
from jaxtyping import Array, Float

from ed_trainers.optimizers.per_array import (
    create_transformation,
    logical_axes,
    map_parameters,
    stacked_axes,
)
from ed_trainers.options.optimizers import MuonSettings

#: Matrices of the vocabulary and of the classes, where a model does not declare its logical axes.
_TABLES = re.compile(r"(^|\.)(embed\w*|wte|wpe|lm_head|score)(\.|$)")

# Of a quintic polynomial whose iteration brings every singular value near 1 (Keller Jordan).
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class MuonState(NamedTuple):
    """Momentum of a matrix, float32 [i, o]."""

    momentum: jax.Array


def matrices(params: optax.Params | None) -> Any:
    """Return a tree like the parameters: whether Muon updates each parameter.

    Muon updates the matrices of layers and of experts. AdamW updates embeddings, the head of the
    vocabulary or of classes, and all parameters that are not matrices.
    """

    def is_matrix(path: Sequence[object], node: object) -> bool:
        leaves = jax.tree.leaves(node)
        if not leaves or leaves[0].ndim - stacked_axes(path, node) != 2:
            return False
        return "vocab" not in logical_axes(node) and not _TABLES.search(canonical(path)[0])

    return map_parameters(is_matrix, params)


def scale_by_muon(settings: MuonSettings) -> optax.GradientTransformation:
    """Return the transformation of Muon for one matrix [i, o]."""
    beta = settings.momentum

    def init(param: jax.Array) -> MuonState:
        return MuonState(jnp.zeros(param.shape, param.dtype))

    def update(
        grad: jax.Array, state: MuonState, param: jax.Array | None = None
    ) -> tuple[jax.Array, MuonState]:
        del param
        momentum = beta * state.momentum + (1 - beta) * grad
        direction = (1 - beta) * grad + beta * momentum if settings.nesterov else momentum
        i, o = grad.shape
        if settings.adjust_lr_fn == "match_rms_adamw":
            factor = 0.2 * max(i, o) ** 0.5
        else:
            factor = max(1.0, o / i) ** 0.5
        direction = orthogonal(direction, steps=settings.ns_steps, eps=settings.eps)
        return factor * direction, MuonState(momentum)

    return create_transformation(init, update)


def orthogonal(matrix: Float[Array, "i o"], *, steps: int, eps: float) -> Float[Array, "i o"]:
    """Bring the singular values of a matrix near 1 by Newton-Schulz iterations, in float32."""
    a, b, c = _COEFFICIENTS
    x = matrix.astype(jnp.float32)
    wide = x.shape[0] <= x.shape[1]
    x = x if wide else x.T
    x = x / jnp.maximum(jnp.linalg.norm(x), eps)

    def closer(_: int, x: jax.Array) -> jax.Array:
        gram = x @ x.T
        return a * x + (b * gram + c * gram @ gram) @ x

    x = jax.lax.fori_loop(0, steps, closer, x)  # a loop compiles once for all steps
    return x if wide else x.T
