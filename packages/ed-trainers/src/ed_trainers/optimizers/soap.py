"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner (Vyas et al. 2024, arXiv 2409.11321).

The running means of `G G'` and `G' G` have eigenvectors, the bases of a matrix of gradients G. Adam
runs on the gradients in these bases. The bases are the eigenvectors after the first gradient, and
every `precondition_frequency` updates one step of orthogonal iteration moves them. As in the
authors' code, the first gradient only creates the bases, so the first update is 0.

The Gram matrix of the longer axis has a null space, whose eigenvectors are arbitrary. Adam's
updates depend on them, so another mesh or layout may give another run that is equally valid.

An axis that is longer than `max_precond_dim` has no basis. Vectors are updated by Adam, unless
`precondition_1d` is set. An array with more than two axes is processed as a matrix.

Legend: m rows, n columns of a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from ed_trainers.optimizers.per_array import create_transformation, per_array
from ed_trainers.options.optimizers import SoapSettings, get_matrix_shape


class SoapArrays(NamedTuple):
    """State of an array.

    Attributes:
        mu: first moment, like the array.
        nu: second moment in the bases, like the array.
        left_gram, right_gram: running means of `G G'` and `G' G`, float32 [m, m] and [n, n]; [1, 1]
            for an axis without a basis.
        left_basis, right_basis: columns are the vectors of the basis, shapes as before.
    """

    mu: jax.Array
    nu: jax.Array
    left_gram: jax.Array
    right_gram: jax.Array
    left_basis: jax.Array
    right_basis: jax.Array


class SoapState(NamedTuple):
    """Number of gradients of all arrays, and the states of the arrays.

    The count is a scalar, because a condition of each layer would compute both branches.
    """

    count: jax.Array
    arrays: optax.OptState


def scale_by_soap(settings: SoapSettings) -> optax.GradientTransformation:
    """Return the transformation of SOAP for a tree of parameters."""

    def init(params: optax.Params) -> SoapState:
        count = jnp.zeros((), jnp.int32)
        return SoapState(count, per_array(_scale_array(settings, count)).init(params))

    def update(
        updates: optax.Updates, state: SoapState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, SoapState]:
        with jax.default_matmul_precision("highest"):
            inner = per_array(_scale_array(settings, state.count))
            updates, arrays = inner.update(updates, state.arrays, params)
        return updates, SoapState(state.count + 1, arrays)

    return create_transformation(init, update)


def _scale_array(settings: SoapSettings, count: jax.Array) -> optax.GradientTransformation:
    """Return the transformation of one array after `count` gradients."""
    b1, b2 = settings.b1, settings.b2
    gram_decay = b2 if settings.shampoo_beta is None else settings.shampoo_beta

    def select_axes(shape: tuple[int, ...]) -> tuple[bool, bool]:
        rows, columns = get_matrix_shape(shape)
        if len(shape) < 2:
            return settings.precondition_1d and rows <= settings.max_precond_dim, False
        return rows <= settings.max_precond_dim, columns <= settings.max_precond_dim

    def init(param: jax.Array) -> SoapArrays:
        sizes = get_matrix_shape(param.shape)
        grams = [
            jnp.zeros((size, size) if selected else (1, 1), jnp.float32)
            for size, selected in zip(sizes, select_axes(param.shape), strict=True)
        ]
        zeros = jnp.zeros(param.shape, param.dtype)
        return SoapArrays(zeros, zeros, *grams, *grams)

    def update(
        grad: jax.Array, state: SoapArrays, param: jax.Array | None = None
    ) -> tuple[jax.Array, SoapArrays]:
        del param
        shape, (has_left, has_right) = get_matrix_shape(grad.shape), select_axes(grad.shape)
        matrix, mu, nu = (x.astype(jnp.float32).reshape(shape) for x in (grad, state.mu, state.nu))
        is_first = count == 0
        bases = state.left_basis if has_left else None, state.right_basis if has_right else None
        new_mu = b1 * mu + (1 - b1) * matrix
        new_nu = b2 * nu + (1 - b2) * jnp.square(_rotate(matrix, *bases))
        direction = _rotate(new_mu, *bases) / (jnp.sqrt(new_nu) + settings.eps)
        if settings.correct_bias:
            steps = jnp.maximum(count, 1)
            direction = direction * (jnp.sqrt(1 - b2**steps) / (1 - b1**steps))
        direction = _rotate(direction, *(None if b is None else b.T for b in bases))
        if settings.normalize_grads:
            direction = direction / (1e-30 + jnp.sqrt(jnp.mean(jnp.square(direction))))
        direction, mu, nu = (
            jnp.where(is_first, old, new)
            for old, new in ((0.0, direction), (mu, new_mu), (nu, new_nu))
        )
        grams = [
            gram_decay * gram + (1 - gram_decay) * product if selected else gram
            for gram, product, selected in (
                (state.left_gram, matrix @ matrix.T, has_left),
                (state.right_gram, matrix.T @ matrix, has_right),
            )
        ]
        if has_left or has_right:
            is_due = (count > 0) & (count % settings.precondition_frequency == 0)
            operands = nu, *grams, state.left_basis, state.right_basis
            branch = jnp.where(is_first, 1, jnp.where(is_due, 2, 0))
            nu, *new_bases = jax.lax.switch(
                branch,
                [
                    lambda nu, _, __, *old: (nu, *old),
                    lambda nu, *x: (nu, *map(_find_basis, x[:2], x[2:], (has_left, has_right))),
                    lambda nu, *x: _iterate_bases(nu, *x, has_left=has_left, has_right=has_right),
                ],
                *operands,
            )
        else:
            new_bases = [state.left_basis, state.right_basis]
        mu, nu = (x.reshape(grad.shape).astype(state.mu.dtype) for x in (mu, nu))
        direction = direction.reshape(grad.shape).astype(grad.dtype)
        return direction, SoapArrays(mu, nu, *grams, *new_bases)

    return create_transformation(init, update)


def _rotate(
    matrix: Float[Array, "m n"], left_basis: jax.Array | None, right_basis: jax.Array | None
) -> Float[Array, "m n"]:
    """Return `L' G R`; a basis that is None is the identity."""
    matrix = matrix if left_basis is None else left_basis.T @ matrix
    return matrix if right_basis is None else matrix @ right_basis


def _find_basis(gram: jax.Array, basis: jax.Array, selected: bool) -> jax.Array:
    """Return the eigenvectors of a Gram matrix by falling eigenvalue."""
    return jnp.linalg.eigh(gram)[1][:, ::-1] if selected else basis


def _iterate_bases(
    nu: jax.Array,
    left_gram: jax.Array,
    right_gram: jax.Array,
    left_basis: jax.Array,
    right_basis: jax.Array,
    *,
    has_left: bool,
    has_right: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the second moment and the bases after a step of orthogonal iteration.

    The vectors of a basis, and the second moments, are sorted by falling eigenvalue first.
    """
    if has_left:
        left_basis, order = _iterate_basis(left_gram, left_basis)
        nu = nu[order]
    if has_right:
        right_basis, order = _iterate_basis(right_gram, right_basis)
        nu = nu[:, order]
    return nu, left_basis, right_basis


def _iterate_basis(gram: jax.Array, basis: jax.Array) -> tuple[jax.Array, jax.Array]:
    eigenvalues = jnp.sum(basis * (gram @ basis), axis=0)
    order = jnp.argsort(-eigenvalues, stable=True)
    return jnp.linalg.qr(gram @ basis[:, order])[0], order
