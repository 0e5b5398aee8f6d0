"""Every optimizer against an independent one, and stacked layers and experts against single ones.

References are torch's and transformers' own optimizers where they have one, optax's, or numpy in
float64 from the paper. All run beside ours on the arrays of single layers.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_trainers.arguments import OPTIMIZERS, SFTArguments
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.optimizers.eight_bit import (
    EightBitArray,
    dequantize_blocks,
    levels,
    quantize_blocks,
)
from flax import nnx
from optimizer_runs import (
    STEPS,
    against,
    gradient,
    noise,
    noisy,
    numpy_gradient,
    ours,
    scanned,
    single,
    trained,
    unrolled,
    worst,
)

SETTINGS = {
    "adafactor": {"min_dim_size_to_factor": 4},
    "muon": {"adam_learning_rate": 0.003},
    "rmsprop": {"momentum": 0.9},
    "sgd": {"momentum": 0.9, "nesterov": True},
}


@pytest.mark.nightly
@pytest.mark.proves("optimizer", "optimizer_kwargs")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_stacked_layers_are_single_layers(name):
    tree = unrolled()
    given = {"optimizer": name, "optimizer_kwargs": SETTINGS.get(name, {})}
    alone, _ = trained(tree, **given)
    together, _ = trained(scanned(tree), **given)
    # Eight-bit codes turn over at a last bit, and then differ by a level.
    tolerance = 2e-3 if name.endswith("8bit") else 2e-5
    assert worst(together, scanned(alone), scanned(tree)) <= tolerance


@pytest.mark.nightly
def test_without_the_seam_layers_are_mixed():
    # Control: what adafactor makes of the stack as one array is far outside the tolerance.
    tree = unrolled()
    alone, _ = trained(tree, optimizer="adafactor", optimizer_kwargs=SETTINGS["adafactor"])
    tx = optax.adafactor(0.02, min_dim_size_to_factor=4)
    stacked = scanned(tree)

    @jax.jit
    def step(i, params, state):
        grads = jax.tree.map(lambda p: gradient(p, i), params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(stacked)
    for i in range(STEPS):
        stacked, state = step(jnp.float32(i), stacked, state)
    assert worst(stacked, scanned(alone), scanned(tree)) > 0.05


# --- against others, on the matrices of a layer and of an expert, and on a vector ---


def torch_loop(make, transpose=False):
    torch = pytest.importorskip("torch")

    def run(array):
        parameter = torch.nn.Parameter(torch.tensor(array.T.copy() if transpose else array))
        optimizer = make(torch, [parameter])
        for i in range(STEPS):
            p = parameter.detach().numpy()
            grad = numpy_gradient(p.T, i).T if transpose else numpy_gradient(p, i)
            parameter.grad = torch.tensor(np.ascontiguousarray(grad))
            optimizer.step()
        result = parameter.detach().numpy()
        return result.T if transpose else result

    return run


def decayed_by_hand(optimizer, torch):
    """torch's RMSprop and SGD add the decay to the gradient; ours is decoupled."""
    step = optimizer.step

    def decoupled():
        old = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        step()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        with torch.no_grad():
            for p, o in zip(parameters, old, strict=True):
                p -= 0.02 * 0.1 * o

    optimizer.step = decoupled
    return optimizer


def test_adamw_matches_torch():
    run = torch_loop(lambda torch, p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.1))
    against("adamw", run, 2e-5)


def test_sgd_matches_torch():
    def make(torch, p):
        optimizer = torch.optim.SGD(p, lr=0.02, momentum=0.9, nesterov=True)
        return decayed_by_hand(optimizer, torch)

    against("sgd", torch_loop(make), optimizer_kwargs=SETTINGS["sgd"])


def test_rmsprop_matches_torch():
    def make(torch, p):
        optimizer = torch.optim.RMSprop(p, lr=0.02, alpha=0.9, eps=1e-8, momentum=0.9)
        return decayed_by_hand(optimizer, torch)

    against("rmsprop", torch_loop(make), 2e-5, optimizer_kwargs=SETTINGS["rmsprop"])


def test_adafactor_matches_transformers():
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")

    def make(torch, p):
        optimizer = transformers.optimization.Adafactor(
            p, lr=0.02, scale_parameter=True, relative_step=False, weight_decay=0.0
        )
        return decayed_by_hand(optimizer, torch)

    run = torch_loop(make)
    against("adafactor", run, 2e-5, optimizer_kwargs={"min_dim_size_to_factor": 1})


@pytest.mark.daily("match_rms_adamw")
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_matches_torch(adjust, monkeypatch):
    torch = pytest.importorskip("torch")
    # torch iterates in bfloat16; ours is float32.
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())

    def make(torch, p):
        if p[0].ndim == 2:
            return torch.optim.Muon(p, lr=0.02, weight_decay=0.1, adjust_lr_fn=adjust)
        return torch.optim.AdamW(p, lr=0.003, weight_decay=0.1)

    settings = {"adjust_lr_fn": adjust, "adam_learning_rate": 0.003}
    run = torch_loop(make, transpose=True)
    against("muon", run, 5e-4, optimizer_kwargs=settings)


def test_muon_leaves_embeddings_and_the_head_to_adamw():
    table = {"embedding": nnx.Param(jnp.asarray(single(1, "tall")), axes=("vocab", "embed"))}
    muon, _ = trained(table, optimizer="muon")
    adamw, _ = trained(table, optimizer="adamw")
    np.testing.assert_array_equal(muon["embedding"][...], adamw["embedding"][...])
    plain = {"lm_head": {"kernel": jnp.asarray(single(1, "tall"))}}
    muon, _ = trained(plain, optimizer="muon")
    adamw, _ = trained(plain, optimizer="adamw")
    np.testing.assert_array_equal(muon["lm_head"]["kernel"], adamw["lm_head"]["kernel"])


def test_lion_matches_paper_formula():
    def run(array):
        p, m = array.astype(np.float64), np.zeros_like(array, np.float64)
        for i in range(STEPS):
            g = numpy_gradient(p, i)
            p = p - 0.02 * (np.sign(0.9 * m + 0.1 * g) + 0.1 * p)
            m = 0.99 * m + 0.01 * g
        return p

    against("lion", run)


def test_mars_is_the_authors_with_adamw_for_vectors():
    def adamw(array):
        p = array.astype(np.float64)
        m, v = np.zeros_like(p), np.zeros_like(p)
        for i in range(STEPS):
            g = numpy_gradient(p, i)
            m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
            direction = (m / (1 - 0.9 ** (i + 1))) / (np.sqrt(v / (1 - 0.95 ** (i + 1))) + 1e-8)
            p = p - 0.02 * (direction + 0.1 * p)
        return p

    def run(array):
        if array.ndim == 1:
            return adamw(array)
        p = array.astype(np.float64)
        before, m, v = (np.zeros_like(p) for _ in range(3))
        for i in range(STEPS):
            g = numpy_gradient(p, i)
            c = g + 0.025 * 0.95 / 0.05 * (g - before)
            c = c / max(np.linalg.norm(c), 1.0)
            m, v = 0.95 * m + 0.05 * c, 0.99 * v + 0.01 * c * c
            direction = (m / (1 - 0.95 ** (i + 1))) / (np.sqrt(v / (1 - 0.99 ** (i + 1))) + 1e-8)
            p, before = p - 0.02 * (direction + 0.1 * p), g
        return p

    against("mars", run, 2e-5)


def test_schedule_free_is_the_papers():
    warmup = 5

    def run(array):
        x = z = array.astype(np.float64)
        v, total = np.zeros_like(x), 0.0
        for i in range(STEPS):
            y = 0.1 * z + 0.9 * x
            g = numpy_gradient(y, i)
            rate = 0.02 * min((i + 1) / warmup, 1.0)
            v = 0.999 * v + 0.001 * g * g
            step = g / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
            z = z - rate * (step + 0.1 * y)
            total += rate**2
            share = rate**2 / total
            x = (1 - share) * x + share * z
        return x

    against("schedule_free_adamw", run, 2e-5, warmup_steps=warmup)


def test_schedule_free_adamw_matches_optax():
    # optax keeps y as its parameters and computes x from it.
    array = jnp.asarray(single(1, "wide"))
    tx = optax.contrib.schedule_free_adamw(0.02, weight_decay=0.1)
    y, state = array, tx.init(array)
    for i in range(STEPS):
        updates, state = tx.update(noisy(y, jnp.int32(i)), state, y)
        y = optax.apply_updates(y, updates)
    theirs = optax.contrib.schedule_free_eval_params(state, y)
    mine = ours("schedule_free_adamw", {"wide": np.asarray(array)})["wide"]
    assert worst(mine, theirs, array) <= 2e-5


# --- Kronecker factors ---

KRON = {"block_size": 16, "max_size_dense": 39, "noise_scale": 0.0}


class NumpyKron:
    """`quad` and `skew` of one block [m, n] in float64; a vector is a block with one column."""

    def __init__(self, shape, dense, *, rotates):
        self.dense, self.rotates = dense, rotates
        self.factors = [np.eye(size) for size in shape]
        self.bounds = [0.0, 0.0]

    def white(self, block):
        left, right = self.factors
        return left.T @ left @ block @ right.T @ right

    def step(self, block, count, vector):
        rate = max(0.7 / np.sqrt(1 + count / 10_000), 0.4)
        if count % 100 == 0 and not vector:
            largest = [np.abs(f).max() for f in self.factors]
            mean = np.sqrt(np.prod(largest))
            self.factors = [f * mean / n for f, n in zip(self.factors, largest, strict=True)]
        white = self.white(block)
        for side in (0,) if vector else (0, 1):
            own = white if side == 0 else white.T
            self.factors[side] = self.moved(side, own, rate)
        return self.white(block)

    def moved(self, side, white, rate):
        factor, gram, others = self.factors[side], white @ white.T, white.shape[1]
        if not self.dense[side]:
            gram = np.diag(np.diag(gram))
        norm = estimated_norm(gram) if self.dense[side] else gram.max()
        bound = norm + others
        self.bounds[side] = max(0.95 * self.bounds[side] + 0.05 * bound, bound)
        distance = gram - others * np.eye(len(gram))
        if self.rotates:
            new = factor - rate / self.bounds[side] * distance @ factor
            return self.turned(new) if self.dense[side] else new
        half = np.eye(len(gram)) - rate / (2 * self.bounds[side]) * distance
        new = half @ factor @ half
        return (new + new.T) / 2

    @staticmethod
    def turned(factor):
        skew = factor.T - factor
        if not skew.any():
            return factor
        skew = skew / np.abs(skew).max()
        gain, curvature = np.trace(skew @ factor), np.trace(skew @ skew @ factor)
        if gain <= 0:
            return factor
        angle = 1 / 8 / estimated_norm(skew)
        if curvature < 0:
            angle = min(angle, -gain / curvature)
        return factor + angle * skew @ factor + angle**2 / 2 * skew @ skew @ factor


def estimated_norm(matrix):
    """The lower bound of the spectral norm, by power iteration with the implementation's probes."""
    scale = np.abs(matrix).max()
    if scale == 0:
        return 0.0
    matrix = matrix / scale
    energy = (matrix**2).mean(axis=1)
    row = energy.argmax()
    probes = np.asarray(jax.random.normal(jax.random.key(0), (4, len(matrix))), np.float64)
    vectors = (matrix[row] / np.sqrt(energy[row]) + probes) @ matrix
    for _ in range(5):
        vectors = vectors / np.abs(vectors).max() @ matrix
    vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True) @ matrix
    found = np.linalg.norm(vectors, axis=1).max() * scale
    exact = np.linalg.norm(matrix, 2) * scale
    assert 0.7 * exact <= found <= exact * (1 + 1e-9)
    return found


def numpy_kron(array, *, rotates, steps=STEPS):
    """The parameter after the steps of `noisy`, with the blocks of `KRON`."""
    matrix = array.reshape(len(array), -1).astype(np.float64)
    dense = [array.ndim > 1 and size <= KRON["max_size_dense"] for size in matrix.shape]
    cuts = [
        [slice(at, min(at + 16, size)) for at in range(0, size, 16)] if is_dense else [slice(size)]
        for size, is_dense in zip(matrix.shape, dense, strict=True)
    ]
    grid = {
        (i, j): NumpyKron(matrix[rows, columns].shape, dense, rotates=rotates)
        for i, rows in enumerate(cuts[0])
        for j, columns in enumerate(cuts[1])
    }
    p, momentum = matrix, np.zeros_like(matrix)
    for i in range(steps):
        g = numpy_gradient(p.reshape(array.shape), i).reshape(p.shape)
        momentum = 0.95 * momentum + 0.05 * g
        direction = momentum / (1 - 0.95 ** (i + 1))
        for (row, column), block in grid.items():
            at = cuts[0][row], cuts[1][column]
            direction[at] = block.step(direction[at], i + 1, array.ndim == 1)
        rms = np.sqrt((direction**2).mean())
        p = p - 0.02 * (direction * 1.1 / max(rms, 1.1) / 5 + 0.1 * p)
    return p.reshape(array.shape)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["quad", "skew"])
def test_quad_and_skew_match_their_formulas(name):
    # The matrices have 2 blocks of 16 rows, one of them partly used, and a diagonal axis of 40.
    def run(array):
        return numpy_kron(array, rotates=name == "skew")

    against(name, run, 2e-4, optimizer_kwargs=KRON)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["quad", "skew"])
def test_preconditioned_gradients_become_white(name):
    # Gradients A N B with fixed A and B and white N: the factors invert A and B.
    random = np.random.default_rng(0)
    a, b = (random.normal(size=(8, 8)) + 3 * np.diag(10.0 ** np.arange(-2, 2, 0.5)) for _ in "ab")
    kwargs = {"b1": 0.0, "lr_style": None}
    arguments = SFTArguments(
        optimizer=name, optimizer_kwargs=kwargs, learning_rate=1.0, weight_decay=0.0
    )
    tx = build_optimizer(arguments, build_schedule(arguments, 400))
    tree = {"kernel": jnp.zeros((8, 8))}
    state, found = tx.init(tree), []
    update = jax.jit(tx.update)
    for step in range(400):
        grad = a @ random.normal(size=(8, 8)) @ b
        updates, state = update({"kernel": jnp.asarray(grad, jnp.float32)}, state, tree)
        found.append(np.asarray(updates["kernel"]) if step >= 300 else grad)
    before, after = (
        np.mean([g @ g.T for g in part], axis=0) for part in (found[:100], found[300:])
    )
    # The factors follow single gradients at a rate of 0.4 or more, so they fluctuate.
    assert np.linalg.cond(after) < 10 < 1000 < np.linalg.cond(before)


@pytest.mark.nightly
def test_balanced_factors_have_the_same_product():
    # Step 100 balances the factors, after which the parameters are still those of the formula.
    array = single(1, "tall")[:10]
    tree = {"kernel": nnx.Param(jnp.asarray(array), axes=("embed", "embed"))}
    given = {"optimizer": "quad", "optimizer_kwargs": KRON, "weight_decay_rules": [["", 0.1]]}
    steps = 101

    def longer(p, step):
        return 0.3 * jnp.asarray(noise(p.shape))[step.astype(int) % STEPS] + 0.1 * p

    new, _ = trained(tree, steps=steps, gradient=longer, **given)
    p = array.astype(np.float64)
    block, momentum = NumpyKron(p.shape, [True, True], rotates=False), np.zeros_like(p)
    for i in range(steps):
        momentum = 0.95 * momentum + 0.05 * (0.3 * noise(p.shape)[i % STEPS] + 0.1 * p)
        direction = block.step(momentum / (1 - 0.95 ** (i + 1)), i + 1, False)
        rms = np.sqrt((direction**2).mean())
        p = p - 0.02 * (direction * 1.1 / max(rms, 1.1) / 5 + 0.1 * p)
    assert worst(np.asarray(new["kernel"][...]), p, array) <= 2e-3


# --- eight bits ---


def test_quantization_levels_match_the_paper():
    # Table and figure 4 of the paper: powers of ten, and linear fractions within each.
    signed, unsigned = levels(signed=True), levels(signed=False)
    assert signed.shape == unsigned.shape == (256,)
    assert signed.max() == unsigned.max() == 1.0 and 0.0 in signed and 0.0 in unsigned
    assert unsigned.min() == 0.0 and np.all(np.diff(signed) > 0) and np.all(np.diff(unsigned) > 0)
    np.testing.assert_allclose(np.sort(-signed[signed < 0]), signed[(signed > 0) & (signed < 1)])
    np.testing.assert_allclose(unsigned[1], 0.325e-6, rtol=1e-6)  # half of [0.1, 0.55] at 1e-6


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("columns", [256, 300, 64])
@pytest.mark.daily("64-True")
def test_eight_bits_are_the_nearest_level(signed, columns):
    x = np.random.default_rng(0).normal(size=(3, columns)).astype(np.float32) ** 3
    x = x if signed else np.abs(x)
    x[1] = 0.0
    blocks = quantize_blocks(jnp.asarray(x), signed=signed, block_size=128)
    assert blocks.codes.shape == x.shape and blocks.codes.dtype == jnp.uint8
    assert blocks.scales.shape == (3, -(-columns // min(128, columns)))
    back = np.asarray(dequantize_blocks(blocks, signed=signed, block_size=128))
    table = levels(signed=signed).astype(np.float64)
    for row in range(3):
        for start in range(0, columns, 128):
            block = x[row, start : start + 128].astype(np.float64)
            scale = np.max(np.abs(block))
            nearest = np.argmin(np.abs(block[:, None] - table * scale), axis=1)
            wanted = table[nearest] * scale
            off = np.abs(back[row, start : start + 128] - block)
            np.testing.assert_allclose(off, np.abs(wanted - block), atol=1e-6 * scale)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "lion", "muon"])
def test_eight_bit_moments_stay_close_to_full_precision(name):
    array = single(1, "large")  # 4608 numbers
    tree = {"large": jnp.asarray(array), "small": jnp.asarray(single(1, "wide"))}
    full, _ = trained(tree, gradient=noisy, optimizer=name)
    eight, state = trained(tree, gradient=noisy, optimizer=f"{name}_8bit")
    np.testing.assert_allclose(eight["small"], full["small"], atol=1e-7)
    moved = np.linalg.norm(full["large"] - array)
    assert 0 < np.linalg.norm(eight["large"] - full["large"]) < 0.1 * moved
    parts = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, EightBitArray))
    packed = [part for part in parts if isinstance(part, EightBitArray)]
    codes = [code for part in packed for code in jax.tree.leaves(part.codes)]
    assert [code.shape for code in codes] == [array.shape] * (2 if name == "adamw" else 1)


@pytest.mark.nightly
def test_eight_bit_adamw_is_the_papers():
    array, table = (
        single(1, "large"),
        {s: levels(signed=s).astype(np.float64) for s in (True, False)},
    )

    def rounded(x, signed):
        blocks = x.reshape(-1, 64)
        scale = np.max(np.abs(blocks), axis=1, keepdims=True)
        codes = np.abs(blocks[..., None] / scale[..., None] - table[signed]).argmin(-1)
        return (table[signed][codes] * scale).reshape(x.shape)

    p = array.astype(np.float64)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for i in range(8):
        g = numpy_gradient(p, i)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        direction = (m / (1 - 0.9 ** (i + 1))) / (np.sqrt(v / (1 - 0.999 ** (i + 1))) + 1e-8)
        p = p - 0.02 * (direction + 0.1 * p)
        m, v = rounded(m, True), rounded(v, False)
    tree = {"large": jnp.asarray(array)}
    found, _ = trained(tree, steps=8, gradient=noisy, optimizer="adamw_8bit")
    # A number between two levels may fall to the other one in float32.
    off = np.abs(found["large"] - p) / np.max(np.abs(p - array))
    assert np.mean(off > 1e-5) < 0.002 and off.max() < 0.2
