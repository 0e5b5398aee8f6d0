"""How far a student's attention is from a teacher's, some queries at a time.

Wang et al., MiniLM, arXiv:2002.10957, eq. 5: the divergence KL(teacher || student) of the weights
of each query, a mean over heads.

Legend: b rows, s positions, h heads, c queries of a chunk.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_layers.attention.kernels.vanilla import Watched, attention_weights
from jaxtyping import Array, Float

# Weights [b, h, c, s] of both models exist at the same time.
QUERIES = 128
# The logarithm of a weight of 0, where the two models see different tokens.
_LEAST = 1e-30


def attention_divergences(
    student: Watched, teacher: Watched, *, queries: int = QUERIES
) -> Float[Array, "b s"]:
    """Divergence of the attention of each query, in nats; gradients go to the student.

    Args:
        student, teacher: a layer of each, over the same tokens.
        queries: number of queries whose attention weights exist at the same time; the backward
            pass computes them again.

    Raises:
        ConfigError: the layers have different numbers of heads.
    """
    heads = student.q.shape[2], teacher.q.shape[2]
    if heads[0] != heads[1]:
        raise ConfigError(
            f"the teacher has {heads[1]} heads, the student {heads[0]}: attention_loss_weight "
            "needs equally many"
        )
    b, s = student.q.shape[:2]
    size = min(queries, s)

    @jax.checkpoint
    def compute_chunk(carry: None, part: tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]):
        student_weights, teacher_weights = (
            attention_weights(_with_queries(side, chunk))
            for side, chunk in zip((student, teacher), part, strict=True)
        )
        teacher_weights = jax.lax.stop_gradient(teacher_weights)
        log_ratio = jnp.log(jnp.maximum(teacher_weights, _LEAST)) - jnp.log(
            jnp.maximum(student_weights, _LEAST)
        )
        return carry, jnp.mean(jnp.sum(teacher_weights * log_ratio, axis=-1), axis=1)

    parts = tuple(_chunks(side, size) for side in (student, teacher))
    _, divergences = jax.lax.scan(compute_chunk, None, parts)
    return divergences.swapaxes(0, 1).reshape(b, -1)[:, :s]


def _chunks(seen: Watched, size: int) -> tuple[jax.Array, ...]:
    """Queries, and their segments and order, [n, b, c, ...]; padding at the end."""

    def split(x: jax.Array) -> jax.Array:
        b, s = x.shape[:2]
        x = jnp.pad(x, [(0, 0), (0, -s % size), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(b, -1, size, *x.shape[2:]).swapaxes(0, 1)

    return split(seen.q), split(seen.mask_info.q_segment_ids), split(seen.mask_info.q_index)


def _with_queries(seen: Watched, chunk: tuple[jax.Array, ...]) -> Watched:
    q, segment_ids, index = chunk
    mask_info = replace(seen.mask_info, q_segment_ids=segment_ids, q_index=index, in_order=False)
    return seen._replace(q=q, mask_info=mask_info)
