"""What tests of optimizers share: arrays of layers and experts, gradients, and training of both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_trainers.arguments import SFTArguments
from ed_trainers.optimizers import (
    apply_updates,
    build_optimizer,
    build_schedule,
    gradient_point,
)
from flax import nnx

LAYERS, EXPERTS, STEPS = 3, 2, 30
#: Shape of one array, its logical axes, and whether each layer has it once for every expert.
SHAPES = {
    "wide": ((12, 40), ("embed", "mlp"), False),
    "tall": ((40, 12), ("mlp", "embed"), False),
    "norm": ((12,), ("norm",), False),
    "experts": ((12, 20), ("embed", "mlp"), True),
    "large": ((72, 64), ("embed", "mlp"), False),
}


def single(layer, name, expert=0):
    """The array of one layer and one expert, float32; layers differ in size."""
    shape = SHAPES[name][0]
    random = np.random.default_rng((layer, sorted(SHAPES).index(name), expert))
    return (random.normal(size=shape) * 10.0 ** (layer - 1)).astype(np.float32)


def whole(layer, name):
    """The parameter of one layer."""
    _, axes, experts = SHAPES[name]
    if not experts:
        return nnx.Param(jnp.asarray(single(layer, name)), axes=axes)
    stack = np.stack([single(layer, name, e) for e in range(EXPERTS)])
    return nnx.Param(jnp.asarray(stack), axes=("expert", *axes))


def unrolled():
    layers = {f"layer_{i}": {n: {"kernel": whole(i, n)} for n in SHAPES} for i in range(LAYERS)}
    table = nnx.Param(jnp.asarray(single(0, "tall")), axes=("vocab", "embed"))
    return {"layers": layers, "embed_tokens": {"embedding": table}}


def scanned(tree):
    """The same with the layers stacked."""
    layers = list(tree["layers"].values())
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    return {"layers": {f"run_0_{LAYERS}_1": [stacked]}, "embed_tokens": tree["embed_tokens"]}


def gradient(p, step):
    """Depends on the parameter and on the step; layers differ by orders of magnitude."""
    return jnp.cos(p * 3 + step) * p * 0.1 + 0.01 * jnp.sin(p * 40)


def noise(shape):
    """Gradients of every step for an array, [steps, *shape]."""
    return np.random.default_rng(shape).normal(size=(STEPS, *shape)).astype(np.float32)


def noisy(p, step):
    """A gradient that is mostly noise: no optimizer makes much of its last bits."""
    return 0.3 * jnp.asarray(noise(p.shape))[step.astype(int)] + 0.1 * p


def numpy_gradient(p, i):
    return 0.3 * noise(p.shape)[i] + 0.1 * p


def trained(tree, steps=STEPS, gradient=gradient, **given):
    given = {"learning_rate": 0.02, "weight_decay": 0.1, **given}
    arguments = SFTArguments(**given)
    tx = build_optimizer(arguments, build_schedule(arguments, steps))

    @jax.jit
    def step(i, tree, state):
        grads = jax.tree.map(lambda p: gradient(p, i), gradient_point(tree, state))
        updates, state = tx.update(grads, state, tree)
        return apply_updates(tree, updates, state), state

    state = tx.init(tree)
    for i in range(steps):
        tree, state = step(jnp.float32(i), tree, state)
    return tree, state


def worst(ours, theirs, before):
    """Largest difference relative to the largest movement, over the arrays."""
    pairs = zip(*map(jax.tree.leaves, (ours, theirs, before)), strict=True)
    # numpy's largest: of a figure that is no number it is none, and the test fails.
    return float(np.max([np.max(np.abs(a - b)) / np.max(np.abs(b - c)) for a, b, c in pairs]))


# --- against others, on the matrices of a layer and of an expert, and on a vector ---


def ours(name, arrays, **given):
    """Train arrays (matrices and vectors of one layer) with an optimizer of ours."""
    tree = {key: nnx.Param(jnp.asarray(a), axes=("embed",) * a.ndim) for key, a in arrays.items()}
    new, _ = trained(tree, gradient=noisy, optimizer=name, weight_decay_rules=[["", 0.1]], **given)
    return {key: np.asarray(new[key].get_value()) for key in arrays}


def against(name, reference, tolerance=2e-6, **given):
    arrays = {"wide": single(1, "wide"), "tall": single(1, "tall"), "norm": single(1, "norm")}
    found = ours(name, arrays, **given)
    for key, array in arrays.items():
        wanted = reference(array)
        error = np.max(np.abs(found[key] - wanted)) / np.max(np.abs(wanted - array))
        assert error <= tolerance, (name, key, error)
