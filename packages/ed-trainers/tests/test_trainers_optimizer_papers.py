"""Newer optimizers against numpy in float64, written from their papers and the authors' code.

Every reference runs 30 steps on matrices and on a vector. Weight decay is decoupled in all of them;
the decay of the first step also applies where the authors skip the first update.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_trainers.arguments import SFTArguments
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.optimizers.eight_bit import levels
from ed_trainers.placement import shardings_like
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from optimizer_runs import STEPS, against, noisy, numpy_gradient, ours, single, trained, worst


def train_in_numpy(array, update):
    """Return the array after the steps of `noisy`; `update(gradient, step)` is the direction."""
    p = array.astype(np.float64)
    for i in range(STEPS):
        p = p - 0.02 * (update(numpy_gradient(p, i), i) + 0.1 * p)
    return p


class NumpyAdam:
    """Adam without weight decay."""

    def __init__(self, shape, b1=0.9, b2=0.999):
        self.b1, self.b2, self.m, self.v = b1, b2, np.zeros(shape), np.zeros(shape)

    def __call__(self, g, i):
        b1, b2 = self.b1, self.b2
        self.m, self.v = b1 * self.m + (1 - b1) * g, b2 * self.v + (1 - b2) * g * g
        return (self.m / (1 - b1 ** (i + 1))) / (np.sqrt(self.v / (1 - b2 ** (i + 1))) + 1e-8)


def limit_signs(direction, g):
    mask = (direction * g > 0).astype(np.float64)
    return direction * mask / max(mask.mean(), 1e-3)


def test_cautious_adamw_matches_algorithm_of_its_authors():
    def run(array):
        adam = NumpyAdam(array.shape)
        return train_in_numpy(array, lambda g, i: limit_signs(adam(g, i), g))

    against("adamw", run, 2e-5, optimizer_kwargs={"cautious": True})


def test_cautious_lion_matches_algorithm_of_its_authors():
    def run(array):
        m = np.zeros(array.shape)

        def update(g, i):
            nonlocal m
            direction = np.sign(0.9 * m + 0.1 * g)
            m = 0.99 * m + 0.01 * g
            return limit_signs(direction, g)

        return train_in_numpy(array, update)

    against("lion", run, 2e-5, optimizer_kwargs={"cautious": True})


def test_cautious_share_is_that_of_one_layer():
    tree = {f"layer_{i}": {"kernel": jnp.asarray(single(i, "wide"))} for i in range(2)}
    stack = jnp.stack([layer["kernel"] for layer in tree.values()])
    stacked = {"layers": {"run_0_2_1": [{"kernel": stack}]}}
    given = {"optimizer": "adamw", "optimizer_kwargs": {"cautious": True}, "steps": 4}
    alone, _ = trained({"layers": tree}, **given)
    together, _ = trained(stacked, **given)
    for index, layer in enumerate(alone["layers"].values()):
        found = together["layers"]["run_0_2_1"][0]["kernel"][index]
        np.testing.assert_allclose(found, layer["kernel"], atol=1e-6)


@pytest.mark.parametrize("clips", [True, False])
def test_adopt_matches_algorithm_of_its_authors(clips):
    def run(array):
        m, v = np.zeros(array.shape), np.zeros(array.shape)

        def update(g, i):
            nonlocal m, v
            if i == 0:
                v = g * g
                return 0.0
            normed = g / np.maximum(np.sqrt(v), 1e-6)
            if clips:
                normed = np.clip(normed, -(i**0.25), i**0.25)
            m, v = 0.9 * m + 0.1 * normed, 0.9999 * v + 0.0001 * g * g
            return m

        return train_in_numpy(array, update)

    # Without the limit, the second gradient is divided by numbers near 0.
    against("adopt", run, 2e-5 if clips else 5e-4, optimizer_kwargs={"use_clipping": clips})


@pytest.mark.parametrize("warmup", [None, 20])
def test_ademamix_matches_algorithm_of_its_authors(warmup):
    def compute_beta(step):
        if warmup is None or step >= warmup:
            return 0.99
        first, last = (np.log(0.5) / np.log(beta) - 1 for beta in (0.9, 0.99))
        half_life = (1 - step / warmup) * first + step / warmup * last
        return 0.5 ** (1 / (half_life + 1))

    def run(array):
        fast, slow, v = (np.zeros(array.shape) for _ in range(3))

        def update(g, i):
            nonlocal fast, slow, v
            beta = compute_beta(i + 1)
            alpha = 5.0 if warmup is None else 5.0 * min((i + 1) / warmup, 1)
            fast, slow = 0.9 * fast + 0.1 * g, beta * slow + (1 - beta) * g
            v = 0.999 * v + 0.001 * g * g
            numerator = fast / (1 - 0.9 ** (i + 1)) + alpha * slow
            return numerator / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)

        return train_in_numpy(array, update)

    settings = {"b3": 0.99, "alpha_warmup": warmup, "b3_warmup": warmup}
    against("ademamix", run, 2e-5, optimizer_kwargs=settings)


class NumpySoap:
    """SOAP of one matrix or vector: Adam between two bases."""

    def __init__(self, shape, longest, every, vectors=False):
        self.every, self.m, self.v, self.count = every, np.zeros(shape), np.zeros(shape), 0
        has_basis = [size <= longest and (len(shape) > 1 or vectors) for size in shape]
        self.grams = [
            np.zeros((n, n)) if has else None for n, has in zip(shape, has_basis, strict=True)
        ]
        self.bases = [None] * len(shape)

    def rotate(self, x, back=False):
        for axis, basis in enumerate(self.bases):
            if basis is not None:
                factor = basis if back else basis.T
                x = np.moveaxis(np.tensordot(factor, x, (1, axis)), 0, axis)
        return x

    def __call__(self, g, i):
        direction = 0.0
        if self.count:
            self.m = 0.95 * self.m + 0.05 * g
            self.v = 0.95 * self.v + 0.05 * self.rotate(g) ** 2
            step = self.rotate(self.m) / (np.sqrt(self.v) + 1e-8)
            bias = np.sqrt(1 - 0.95**self.count) / (1 - 0.95**self.count)
            direction = bias * self.rotate(step, back=True)
        for axis, gram in enumerate(self.grams):
            if gram is not None:
                flat = np.moveaxis(g, axis, 0).reshape(len(gram), -1)
                self.grams[axis] = 0.95 * gram + 0.05 * flat @ flat.T
        for axis, gram in enumerate(self.grams):
            if gram is None:
                continue
            if not self.count:
                self.bases[axis] = np.linalg.eigh(gram)[1][:, ::-1]
            elif self.count % self.every == 0:
                basis = self.bases[axis]
                order = np.argsort(-np.diag(basis.T @ gram @ basis), kind="stable")
                self.v = np.take(self.v, order, axis)
                self.bases[axis] = np.linalg.qr(gram @ basis[:, order])[0]
        self.count += 1
        return direction


def test_soap_matches_algorithm_of_its_authors():
    # An axis of 40 has no basis; the other axis has one, and vectors are updated by Adam.
    def run(array):
        return train_in_numpy(array, NumpySoap(array.shape, 20, 3))

    settings = {"max_precond_dim": 20, "precondition_frequency": 3}
    against("soap", run, 1e-4, optimizer_kwargs=settings)


@pytest.mark.nightly
def test_soap_with_two_bases_matches_algorithm_of_its_authors():
    # Gradients of a square matrix have full rank, so the first bases are unique up to signs.
    array = single(1, "tall")[:12]
    wanted = train_in_numpy(array, NumpySoap(array.shape, 20, 3))
    settings = {"precondition_frequency": 3}
    found = ours("soap", {"square": array}, optimizer_kwargs=settings)["square"]
    assert worst(found, wanted, array) <= 1e-4


class NumpyDion:
    """Dion of one matrix [out, in]."""

    def __init__(self, shape, rank):
        self.m, self.shape = np.zeros(shape), shape
        start = jax.random.normal(jax.random.key(0), (min(shape), rank))
        self.q = np.asarray(start, np.float64)

    def __call__(self, g, i):
        total = self.m + g
        tall = total if self.shape[0] >= self.shape[1] else total.T
        p = np.linalg.qr(tall @ self.q)[0]
        r = tall.T @ p
        self.q = r / (np.linalg.norm(r, axis=0) + 1e-8)
        low_rank, update = p @ r.T, p @ self.q.T
        if tall is not total:
            low_rank, update = low_rank.T, update.T
        self.m = total - 0.05 * low_rank
        return np.sqrt(self.shape[0] / self.shape[1]) * update


@pytest.mark.parametrize("fraction", [1.0, 0.25])
def test_dion_matches_algorithm_of_its_authors(fraction):
    rank = int(np.ceil(12 * fraction))

    def run(array):
        if array.ndim == 1:
            return train_in_numpy(array, NumpyAdam(array.shape))
        dion = NumpyDion(array.T.shape, rank)
        return train_in_numpy(array, lambda g, i: dion(g.T, i).T)

    against("dion", run, 1e-4, optimizer_kwargs={"rank_fraction": fraction})


def test_dion_without_gradients_does_not_lose_its_basis():
    tx = build_optimizer(
        SFTArguments(optimizer="dion", weight_decay=0.0), build_schedule(SFTArguments(), 3)
    )
    tree = {"kernel": nnx.Param(jnp.ones((6, 4)), axes=("embed", "mlp"))}
    state = tx.init(tree)
    updates, after = tx.update(jax.tree.map(jnp.zeros_like, tree), state, tree)
    assert not np.any(updates["kernel"][...])
    bases = [leaf for leaf in jax.tree.leaves(after) if leaf.shape == (4, 4)]
    assert len(bases) == 1 and np.any(bases[0])


@pytest.mark.nightly
def test_eight_bit_muon_is_muon_with_quantized_momentum():
    array, table = single(1, "large"), levels(signed=True).astype(np.float64)

    def quantize(x):
        blocks = x.reshape(-1, 64)
        scale = np.max(np.abs(blocks), axis=1, keepdims=True)
        codes = np.abs(blocks[..., None] / scale[..., None] - table).argmin(-1)
        return (table[codes] * scale).reshape(x.shape)

    def orthogonalize(x):
        x = x.T if x.shape[0] > x.shape[1] else x
        x = x / np.linalg.norm(x)
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        return x

    p, momentum = array.astype(np.float64), np.zeros(array.shape)
    for i in range(8):
        g = numpy_gradient(p, i)
        momentum = 0.95 * momentum + 0.05 * g
        step = orthogonalize(0.05 * g + 0.95 * momentum).T
        p = p - 0.02 * (step + 0.1 * p)
        momentum = quantize(momentum)
    tree = {"large": nnx.Param(jnp.asarray(array), axes=("embed", "mlp"))}
    found, _ = trained(tree, steps=8, gradient=noisy, optimizer="muon_8bit")
    # A number between two levels may fall to the other one in float32.
    assert worst(found["large"][...], p, array) < 1e-3


def test_bases_and_scales_are_sharded_like_their_parameter():
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"))
    sharding = NamedSharding(mesh, PartitionSpec(None, "fsdp", "tp"))
    array = jax.device_put(jnp.zeros((2, 64, 128)), sharding)
    params = nnx.State({"layers": {"run_0_2_1": {0: {"kernel": nnx.Param(array)}}}})
    specs = {}
    for name in ("soap", "adamw_8bit"):
        arguments = SFTArguments(optimizer=name)
        tx = build_optimizer(arguments, build_schedule(arguments, 3))
        shapes = jax.eval_shape(tx.init, params)
        pairs = zip(
            jax.tree.leaves(shapes), jax.tree.leaves(shardings_like(shapes, params)), strict=True
        )
        specs |= {(name, leaf.shape): tuple(place.spec) for leaf, place in pairs}
    assert specs["soap", (2, 64, 64)] == (None, "fsdp", None)
    assert specs["soap", (2, 128, 128)] == (None, None, "tp")
    assert specs["soap", (2, 64, 128)] == (None, "fsdp", "tp")
    assert specs["adamw_8bit", (2, 64, 1)] == (None, "fsdp", None)
    assert specs["soap", ()] == ()
