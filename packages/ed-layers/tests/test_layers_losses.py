"""Chunked log-probabilities equal those from full logits, and so do the gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_layers.losses import TokenLoss, cross_entropy_sum, token_logprobs

N, D, V = 37, 16, 50


@pytest.fixture(scope="module")
def parts():
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(N, D)), jnp.float32)
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)
    targets = jnp.asarray(rng.integers(0, V, N), jnp.int32)
    weights = jnp.asarray(rng.integers(0, 2, N), jnp.float32)
    return hidden, head, targets, weights


def full(hidden, head, targets):
    logits = hidden @ head
    logz = jax.nn.logsumexp(logits, axis=-1)
    return logits[jnp.arange(N), targets] - logz, logz


@pytest.mark.parametrize("chunk", [1, 8, 37, 1024])
def test_logprobs_do_not_depend_on_the_chunk(parts, chunk):
    hidden, head, targets, _ = parts
    for ours, expected in zip(
        token_logprobs(hidden, head, targets, chunk=chunk), full(*parts[:3]), strict=True
    ):
        np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize("chunk", [8, 1024])
@pytest.mark.daily("8")
def test_both_losses_have_the_full_loss_and_its_gradients(parts, chunk):
    hidden, head, targets, weights = parts

    def reference(hidden, head):
        return 3.0 * jnp.sum(-weights * full(hidden, head, targets)[0])

    def fused(hidden, head):
        return 3.0 * cross_entropy_sum(hidden, head, targets, weights, chunk=chunk)

    def chunked(hidden, head):
        return 3.0 * jnp.sum(-weights * token_logprobs(hidden, head, targets, chunk=chunk)[0])

    expected, expected_grads = jax.value_and_grad(reference, (0, 1))(hidden, head)
    for loss in (fused, chunked):
        value, grads = jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head)
        np.testing.assert_allclose(value, expected, rtol=1e-6)
        np.testing.assert_allclose(loss(hidden, head), expected, rtol=1e-6)
        for a, b in zip(grads, expected_grads, strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [TokenLoss(0.1), TokenLoss(z_loss=0.3), TokenLoss(0.2, 0.05)])
@pytest.mark.parametrize("chunk", [8, 1024])
def test_smoothing_and_z_loss_are_those_of_full_logits(parts, loss, chunk):
    hidden, head, targets, weights = parts

    def reference(hidden, head):
        # Equation 7 of Szegedy et al. 2016; section 5 of PaLM.
        logits = hidden @ head
        logp = jax.nn.log_softmax(logits)
        even = jnp.full((N, V), loss.label_smoothing / V)
        wanted = even.at[jnp.arange(N), targets].add(1 - loss.label_smoothing)
        squares = jnp.square(jax.nn.logsumexp(logits, -1))
        return 3.0 * jnp.sum(weights * (loss.z_loss * squares - jnp.sum(wanted * logp, -1)))

    def fused(hidden, head):
        return 3.0 * cross_entropy_sum(hidden, head, targets, weights, chunk=chunk, loss=loss)

    expected, expected_grads = jax.value_and_grad(reference, (0, 1))(hidden, head)
    value, grads = jax.jit(jax.value_and_grad(fused, (0, 1)))(hidden, head)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(fused(hidden, head), expected, rtol=1e-6)
    for a, b in zip(grads, expected_grads, strict=True):
        assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max()


def test_a_dropped_token_has_no_gradient(parts):
    hidden, head, targets, weights = parts
    grad = jax.grad(cross_entropy_sum)(hidden, head, targets, weights)
    assert not np.asarray(grad)[np.asarray(weights) == 0].any()
    assert np.abs(np.asarray(grad)[np.asarray(weights) == 1]).min() > 0


def test_no_array_of_all_logits_exists():
    """The compiled step of 4096 tokens keeps a chunk of logits, not all 128 MiB of them."""
    n, d, v, chunk = 4096, 16, 8192, 128

    def step(hidden, head, targets, weights):
        return jax.value_and_grad(cross_entropy_sum, (0, 1))(
            hidden, head, targets, weights, chunk=chunk
        )

    shapes = [((n, d), jnp.float32), ((d, v), jnp.float32), ((n,), jnp.int32), ((n,), jnp.float32)]
    lowered = jax.jit(step).lower(*[jax.ShapeDtypeStruct(*shape) for shape in shapes])
    assert lowered.compile().memory_analysis().temp_size_in_bytes < n * v * 4 / 4
