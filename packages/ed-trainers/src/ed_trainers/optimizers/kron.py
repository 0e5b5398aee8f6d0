"""PSGD with Kronecker factors: `quad` and `skew`.

Li, arXiv:1512.04202; Pooladzandi and Li, arXiv:2402.04553. The momentum G of a matrix is multiplied
by two preconditioners, `L'L G R'R`. Each update moves the factors L and R towards factors for which
the products of the result with its own transpose are multiples of the identity. `quad` keeps the
factors symmetric; `skew` rotates them towards symmetric factors (an orthogonal Procrustes step).

A matrix is divided into blocks, and each block has two factors. A factor of a long axis
(`max_size_dense`), or of an axis of a vector, is diagonal and is stored as a vector.

Legend: m rows, n columns of a block; r, c number of blocks along each axis.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ed_trainers.optimizers.per_array import create_transformation
from ed_trainers.options.optimizers import KronSettings, SkewSettings, get_matrix_shape

# Constants of the authors' implementation.
_BOUND_DECAY = 0.95  # of the running bounds of the curvature
_LEAST_RATE, _RATE_STEPS = 0.4, 10_000  # of the preconditioners' learning rate
_BALANCE_EVERY = 100  # steps
_LARGEST_RMS, _ADAM_RMS = 1.1, 5.0
_MAX_ROTATION = 1 / 8
_PROBES, _ITERATIONS = 4, 5  # of the estimate of a spectral norm


class KronState(NamedTuple):
    """State of an array.

    Attributes:
        count: number of updates.
        momentum: running mean of the gradients, like the array.
        left, right: factors of the blocks, [r, c, m, m] and [r, c, n, n]; diagonal ones are
            [r, c, m] and [r, c, n].
        left_bound, right_bound: running bounds of the curvature, float32 [r, c].
    """

    count: jax.Array
    momentum: jax.Array
    left: jax.Array
    right: jax.Array
    left_bound: jax.Array
    right_bound: jax.Array


class _Axis(NamedTuple):
    """The blocks along one axis: the length of a block, and how much of each block is used."""

    length: int
    used: tuple[int, ...]
    dense: bool

    @classmethod
    def of(cls, size: int, settings: KronSettings, *, dense: bool) -> _Axis:
        if not dense or size > settings.max_size_dense:
            return cls(size, (size,), False)
        length = min(settings.block_size, size)
        count = -(-size // length)
        return cls(length, (*[length] * (count - 1), size - length * (count - 1)), True)

    def factors(self, scale: float, dtype: str) -> np.ndarray:
        """Return the first factors along the axis, [blocks, ...]."""
        used_mask = (np.arange(self.length) < np.asarray(self.used)[:, None]).astype(np.float32)
        factor_values = (
            used_mask[:, :, None] * np.eye(self.length, dtype=np.float32)
            if self.dense
            else used_mask
        )
        return (scale * factor_values).astype(jnp.dtype(dtype))


def scale_by_kron(settings: KronSettings) -> optax.GradientTransformation:
    """Return the transformation of `quad` or `skew` for one array."""
    rotates = isinstance(settings, SkewSettings)

    def axes(shape: tuple[int, ...]) -> tuple[_Axis, _Axis]:
        rows, columns = get_matrix_shape(shape)
        dense = len(shape) > 1
        return _Axis.of(rows, settings, dense=dense), _Axis.of(columns, settings, dense=dense)

    def init(param: jax.Array) -> KronState:
        rows, columns = axes(param.shape)
        scale, dtype = settings.preconditioner_init_scale, settings.dtype
        left, right = (axis.factors(scale, dtype) for axis in (rows, columns))
        if param.ndim <= 1:
            right = np.ones_like(right)
        grid = (len(rows.used), len(columns.used))
        bounds = jnp.zeros(grid, jnp.float32)
        return KronState(
            jnp.zeros((), jnp.int32),
            jnp.zeros(param.shape, settings.dtype),
            jnp.asarray(np.broadcast_to(left[:, None], (*grid, *left.shape[1:]))),
            jnp.asarray(np.broadcast_to(right[None], (*grid, *right.shape[1:]))),
            bounds,
            bounds,
        )

    def update(
        grad: jax.Array, state: KronState, param: jax.Array | None = None
    ) -> tuple[jax.Array, KronState]:
        del param
        count, b1 = state.count + 1, settings.b1
        mean = b1 * state.momentum.astype(jnp.float32) + (1 - b1) * grad.astype(jnp.float32)
        direction = mean / (1 - b1**count)
        if settings.normalize_grads:
            direction = direction / (jnp.linalg.norm(direction) + 1e-6)
        rows, columns = axes(grad.shape)
        rate = settings.preconditioner_lr * jax.lax.rsqrt(1 + count / _RATE_STEPS)
        rate = jnp.maximum(rate, _LEAST_RATE)
        noise = settings.noise_scale * jax.random.normal(
            jax.random.fold_in(jax.random.key(0), count), (rows.length, columns.length)
        )

        def update_block(block, left, right, left_bound, right_bound, m, n):
            used = jnp.arange(rows.length)[:, None] < m
            used &= jnp.arange(columns.length)[None] < n
            white = whiten_block(left, block + noise * used, right)
            left, left_bound = update_factor(left, white, n, left_bound, rate, rotates=rotates)
            if grad.ndim > 1:
                right, right_bound = update_factor(
                    right, white.T, m, right_bound, rate, rotates=rotates
                )
            return whiten_block(left, block, right), left, right, left_bound, right_bound

        left, right = state.left.astype(jnp.float32), state.right.astype(jnp.float32)
        if grad.ndim > 1:
            left, right = _balance_factors(left, right, count % _BALANCE_EVERY == 0)
        blocks = _blocks(direction.reshape(sum(rows.used), sum(columns.used)), rows, columns)
        sizes = np.meshgrid(
            *(np.asarray(axis.used, np.float32) for axis in (rows, columns)), indexing="ij"
        )
        over_grid = jax.vmap(jax.vmap(update_block))
        white, left, right, left_bound, right_bound = over_grid(
            blocks, left, right, state.left_bound, state.right_bound, *map(jnp.asarray, sizes)
        )
        preconditioned_direction = _join_blocks(white, rows, columns).reshape(grad.shape)
        rms = jnp.sqrt(jnp.mean(jnp.square(preconditioned_direction)))
        preconditioned_direction = preconditioned_direction * (
            _LARGEST_RMS / jnp.maximum(rms, _LARGEST_RMS)
        )
        if settings.lr_style == "adam":
            preconditioned_direction = preconditioned_direction / _ADAM_RMS
        mean, left, right = (x.astype(settings.dtype) for x in (mean, left, right))
        state = KronState(count, mean, left, right, left_bound, right_bound)
        return preconditioned_direction.astype(grad.dtype), state

    return create_transformation(init, update)


def whiten_block(left: jax.Array, block: jax.Array, right: jax.Array) -> jax.Array:
    """Return `L'L G R'R` for a block G [m, n]."""
    return _apply_factor(right, _apply_factor(left, block).T).T


def _apply_factor(factor: jax.Array, block: jax.Array) -> jax.Array:
    if factor.ndim == 1:
        return jnp.square(factor)[:, None] * block
    return factor.T @ (factor @ block)


def update_factor(
    factor: jax.Array,
    white: jax.Array,
    used_columns: jax.Array,
    bound: jax.Array,
    rate: jax.Array,
    *,
    rotates: bool,
) -> tuple[jax.Array, jax.Array]:
    """Return a factor after an update, and the running bound of the curvature.

    Args:
        factor: the factor [m, m], or its diagonal [m].
        white: the whitened block [m, n].
        used_columns: number of used columns of the block, the target of the diagonal of `white
            white'`.
        bound: the running bound.
        rate: learning rate of the factors.
        rotates: whether the update is that of `skew`.
    """
    if factor.ndim == 1:
        gram = jnp.sum(jnp.square(white), axis=1)
        norm = jnp.max(gram)
    else:
        gram = white @ white.T
        norm = spectral_norm(gram)
    bound = jnp.maximum(
        _BOUND_DECAY * bound + (1 - _BOUND_DECAY) * (norm + used_columns), norm + used_columns
    )
    step = rate / bound if rotates else rate / (2 * bound)
    if factor.ndim == 1:
        gain = 1 - step * (gram - used_columns)
        return factor * (gain if rotates else jnp.square(gain)), bound
    factor = factor - step * (gram @ factor - used_columns * factor)
    if rotates:
        return _rotate_factor(factor), bound
    factor = factor - step * (factor @ gram - used_columns * factor)
    return (factor + factor.T) / 2, bound


def _rotate_factor(factor: jax.Array) -> jax.Array:
    """Rotate a factor towards a symmetric one: an approximate orthogonal Procrustes step."""
    skew = factor.T - factor
    largest = jnp.max(jnp.abs(skew))
    skew = skew / jnp.maximum(largest, jnp.finfo(jnp.float32).tiny)
    first = skew @ factor
    second = skew @ first
    gain, curvature = jnp.trace(first), jnp.trace(second)
    angle = _MAX_ROTATION / jnp.maximum(spectral_norm(skew), jnp.finfo(jnp.float32).tiny)
    best = -gain / jnp.where(curvature < 0, curvature, -1.0)
    angle = jnp.where(curvature < 0, jnp.minimum(angle, best), angle)
    turned = factor + angle * (first + 0.5 * angle * second)
    return jnp.where((gain > 0) & (largest > 0), turned, factor)


def spectral_norm(matrix: jax.Array) -> jax.Array:
    """Return a lower bound of the largest singular value of a normal matrix, by power iteration."""
    tiny = jnp.finfo(jnp.float32).tiny
    scale = jnp.maximum(jnp.max(jnp.abs(matrix)), tiny)
    matrix = matrix / scale
    energy = jnp.mean(jnp.square(matrix), axis=1)
    row = jnp.argmax(energy)
    start = matrix[row] * jax.lax.rsqrt(jnp.maximum(energy[row], tiny))
    vectors = start + jax.random.normal(jax.random.key(0), (_PROBES, matrix.shape[1]))
    vectors = vectors @ matrix
    for _ in range(_ITERATIONS):
        vectors = vectors / jnp.maximum(jnp.max(jnp.abs(vectors)), tiny) @ matrix
    lengths = jnp.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / jnp.maximum(lengths, tiny) @ matrix
    return jnp.max(jnp.linalg.norm(vectors, axis=1)) * scale


def _balance_factors(
    left: jax.Array, right: jax.Array, now: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Give both factors of each block the same largest entry, which does not change the product."""
    first, second = (jnp.max(jnp.abs(x), axis=tuple(range(2, x.ndim))) for x in (left, right))
    ratio = jnp.where(now, jnp.sqrt(second / first), 1.0)
    return (
        left * ratio.reshape(ratio.shape + (1,) * (left.ndim - 2)),
        right / ratio.reshape(ratio.shape + (1,) * (right.ndim - 2)),
    )


def _blocks(matrix: jax.Array, rows: _Axis, columns: _Axis) -> jax.Array:
    """Divide a matrix into blocks [r, c, m, n], the last ones padded with zeros."""
    r, c = len(rows.used), len(columns.used)
    more = (r * rows.length - matrix.shape[0], c * columns.length - matrix.shape[1])
    padded = jnp.pad(matrix, tuple((0, n) for n in more))
    return padded.reshape(r, rows.length, c, columns.length).transpose(0, 2, 1, 3)


def _join_blocks(blocks: jax.Array, rows: _Axis, columns: _Axis) -> jax.Array:
    """Return the matrix of blocks; the inverse of `_blocks`."""
    r, c, m, n = blocks.shape
    matrix = blocks.transpose(0, 2, 1, 3).reshape(r * m, c * n)
    return matrix[: sum(rows.used), : sum(columns.used)]
