"""Log-probabilities and cross-entropy of sharded tokens: equal to one device, and to each other."""

from __future__ import annotations

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.sharding.mesh import create_mesh
from ed_layers.projections.head import Head
from ed_trainers.losses.token_loss import token_cross_entropy, token_logprobs
from ed_trainers.placement import Placement
from jax.sharding import NamedSharding, PartitionSpec

B, S, D, V = 8, 16, 24, 88  # V / tp is no other size
MESHES = [(1, 8, 1, 1, 1), (1, 2, 1, 4, 1), (2, 2, 1, 2, 1), (1, 2, 1, 1, 4), (1, 1, 1, 8, 1)]


def arrays():
    random = np.random.default_rng(0)
    weights = random.random((B, S)).astype(np.float32)
    weights[:, -3:] = 0.0
    return {
        "hidden": random.standard_normal((B, S, D)).astype(np.float32),
        "matrix": random.standard_normal((D, V)).astype(np.float32) * 0.3,
        "bias": random.standard_normal(V).astype(np.float32),
        "targets": random.integers(0, V, (B, S)).astype(np.int32),
        "weights": weights,
    }


def place(dims, toy):
    """The arrays on a mesh (the head split over `tp`), and the sharding of `targets`."""
    config = toy.Config(dims)
    tokens = Placement(config).sharding((B, S), stacked=False)

    def on(spec):
        return NamedSharding(config.mesh, PartitionSpec(*spec))

    where = {
        "hidden": on((*tokens.spec, *[None] * (2 - len(tokens.spec)), None)),
        "matrix": on((None, "tp")),
        "bias": on(("tp",)),
        "targets": tokens,
        "weights": tokens,
    }
    return {name: jax.device_put(array, where[name]) for name, array in arrays().items()}, tokens


def head_of(parts):
    return Head(parts["matrix"], bias=parts["bias"], scale=0.5, soft_cap=5.0)


def outcome(parts, sharding, chunk):
    """Log-probabilities and partitions, and gradients of a sum of both, with a z-loss."""

    def total(hidden, matrix, bias):
        own = {**parts, "matrix": matrix, "bias": bias}
        logp, logz = token_logprobs(
            hidden, head_of(own), parts["targets"], sharding=sharding, chunk=chunk
        )
        loss = jnp.sum(parts["weights"] * (0.1 * jnp.square(logz) - logp))
        return loss, (logp, logz)

    run = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2), has_aux=True))
    return jax.device_get(run(parts["hidden"], parts["matrix"], parts["bias"]))


def near(left, right, tolerance=1e-6):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.max(np.abs(a - b)) <= tolerance * max(1.0, np.max(np.abs(b)))


@pytest.fixture
def reference(toy):
    """In float64, without any chunk or mesh."""
    raw = {name: np.asarray(a, np.float64) for name, a in arrays().items()}
    logits = (raw["hidden"] @ raw["matrix"] + raw["bias"]) * 0.5
    logits = 5.0 * np.tanh(logits / 5.0)
    logz = np.log(np.sum(np.exp(logits), -1))
    at = raw["targets"].astype(int)[..., None]
    return SimpleNamespace(logp=np.take_along_axis(logits, at, -1)[..., 0] - logz, logz=logz)


@pytest.mark.parametrize("dims", MESHES, ids=str)
@pytest.mark.daily("(2, 2, 1, 2, 1)")
def test_token_loss_on_every_mesh_matches_one_device(toy, reference, dims):
    one = outcome(*place((1, 1, 1, 1, 1), toy), None)
    np.testing.assert_allclose(one[0][1][0], reference.logp, atol=5e-6)
    np.testing.assert_allclose(one[0][1][1], reference.logz, atol=5e-6)
    parts, sharding = place(dims, toy)
    many = outcome(parts, sharding, None)
    near(many, one)


@pytest.mark.nightly
@pytest.mark.parametrize("chunk", [1, 5, 1000])
def test_the_chunk_does_not_matter(toy, chunk):
    parts, sharding = place((1, 2, 1, 2, 2), toy)
    near(outcome(parts, sharding, chunk), outcome(parts, sharding, None))


@pytest.mark.parametrize("dims", [(1, 1, 1, 1, 1), *MESHES[:4]], ids=str)
@pytest.mark.daily("(1, 2, 1, 4, 1)")
def test_the_weighted_sum_is_cross_entropy(toy, dims):
    parts, sharding = place(dims, toy)

    def by_sum(hidden, matrix, bias):
        head = head_of({**parts, "matrix": matrix, "bias": bias})
        return token_cross_entropy(
            hidden, head, parts["targets"], parts["weights"], sharding=sharding, chunk=4
        )

    def by_token(hidden, matrix, bias):
        head = head_of({**parts, "matrix": matrix, "bias": bias})
        logp, _ = token_logprobs(hidden, head, parts["targets"], sharding=sharding, chunk=4)
        return -jnp.sum(parts["weights"] * logp)

    given = (parts["hidden"], parts["matrix"], parts["bias"])
    left, right = (
        jax.device_get(jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*given))
        for f in (by_sum, by_token)
    )
    near(left, right)


@pytest.mark.nightly
def test_a_matrix_is_a_head(toy):
    parts, sharding = place((1, 2, 1, 2, 1), toy)
    given = (parts["targets"],)
    left = token_logprobs(parts["hidden"], parts["matrix"], *given, sharding=sharding)
    right = token_logprobs(parts["hidden"], Head(parts["matrix"]), *given, sharding=sharding)
    jax.tree.map(np.testing.assert_array_equal, left, right)


@pytest.mark.daily("(1, 2, 1, 4, 1)")
@pytest.mark.parametrize("dims", [(1, 8, 1, 1, 1), (1, 2, 1, 4, 1), (1, 2, 1, 1, 4)], ids=str)
def test_logits_exist_for_a_chunk_of_a_device_alone(toy, dims):
    # Neither forward nor backward holds more than [chunk, v / tp] float32.
    parts, sharding = place(dims, toy)
    tp = create_mesh(dims).shape["tp"]

    def total(hidden, matrix, bias):
        head = head_of({**parts, "matrix": matrix, "bias": bias})
        logp, logz = token_logprobs(hidden, head, parts["targets"], sharding=sharding, chunk=4)
        return jnp.sum(logz - logp)

    run = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
    text = run.lower(parts["hidden"], parts["matrix"], parts["bias"]).compile().as_text()
    shapes = [
        [int(size) for size in sizes.split(",")] for sizes in re.findall(r"f32\[([\d,]+)\]", text)
    ]
    wide = [shape for shape in shapes if V in shape or V // tp in shape]
    # D rows are the head and its gradient.
    rows = {np.prod(shape) // (V // tp) for shape in wide if D not in shape}
    assert max(rows) <= 4, rows


@pytest.mark.nightly
@pytest.mark.parametrize("dims", MESHES, ids=str)
def test_bfloat16_gradients_on_cpus_equal_those_of_one_device(toy, dims):
    # XLA on CPUs aborts the process if it sums bfloat16 gradients over devices.
    def gradients(dims):
        parts, tokens = place(dims, toy)
        narrow = ("hidden", "matrix", "bias")
        parts |= {name: parts[name].astype(jnp.bfloat16) for name in narrow}
        return outcome(parts, tokens, None)[1]

    for found, wanted in zip(gradients(dims), gradients((1, 1, 1, 1, 1)), strict=True):
        assert found.dtype == jnp.bfloat16
        # Each device rounds its logits; the sums over devices are float32.
        largest = np.abs(wanted.astype(np.float32)).max()
        difference = np.abs(found.astype(np.float32) - wanted.astype(np.float32)).max()
        assert difference <= 2**-7 * largest
