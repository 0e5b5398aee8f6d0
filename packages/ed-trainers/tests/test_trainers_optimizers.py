"""The optimizer chain: schedules, decay masks by canonical name, masters, clipping."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_trainers.arguments import OPTIMIZERS, SFTArguments
from ed_trainers.optimizers import (
    apply_updates,
    build_optimizer,
    build_schedule,
    decays,
    global_norm,
)
from jax.tree_util import DictKey, GetAttrKey


def optimizer(total=10, **given):
    arguments = SFTArguments(**given)
    return build_optimizer(arguments, build_schedule(arguments, total))


def params(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "q_proj": {"kernel": jax.random.normal(keys[0], (8, 4)).astype(dtype)},
        "input_layernorm": {"weight": jnp.ones((2, 8), dtype)},
        "o_proj": {"bias": jax.random.normal(keys[1], (4,)).astype(dtype)},
    }


def steps(tx, tree, count=3):
    state = tx.init(tree)
    for _ in range(count):
        grads = jax.tree.map(lambda p: jnp.cos(p.astype(jnp.float32)), tree)
        updates, state = tx.update(grads, state, tree)
        tree = apply_updates(tree, updates, state)
    return tree, state


def rates(total, **given):
    schedule = build_schedule(SFTArguments(**given), total)
    return [float(schedule(i)) for i in range(total)]


def test_learning_rate_schedules_match_reference_values():
    flat = rates(4, learning_rate=1.0, warmup_steps=2)
    np.testing.assert_allclose(flat, [0.5, 1, 1, 1])
    linear = rates(6, learning_rate=1.0, learning_rate_end=0.2, scheduler="linear", warmup_steps=2)
    np.testing.assert_allclose(linear, [0.5, 1, 1, 0.8, 0.6, 0.4], rtol=1e-6)
    cosine = rates(4, learning_rate=1.0, scheduler="cosine")
    np.testing.assert_allclose(cosine, 0.5 * (1 + np.cos(np.pi * np.arange(4) / 4)), rtol=1e-6)


@pytest.mark.proves("scheduler_kwargs")
def test_polynomial_is_that_of_torch():
    torch = pytest.importorskip("torch")
    ours = rates(5, learning_rate=1.0, scheduler="polynomial", scheduler_kwargs={"power": 2.0})
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    course = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=5, power=2.0)
    theirs = []
    for _ in range(5):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        course.step()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)
    linear = rates(5, learning_rate=1.0, scheduler="polynomial", learning_rate_end=0.5)
    np.testing.assert_allclose(linear, [1.0, 0.9, 0.8, 0.7, 0.6], rtol=1e-6)


@pytest.mark.parametrize("decay_type", ["linear", "cosine", "1-sqrt"])
def test_wsd_is_that_of_transformers(decay_type):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = {"num_decay_steps": 4, "decay_type": decay_type}
    given = {"learning_rate": 1.0, "scheduler": "wsd", "warmup_steps": 2}
    ours = rates(12, **given, scheduler_kwargs=settings, learning_rate_end=0.1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    course = transformers.get_wsd_schedule(
        optimizer, 2, 4, num_training_steps=12, decay_type=decay_type, min_lr_ratio=0.1
    )
    theirs = []
    for _ in range(13):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        course.step()
    # Their warm-up begins at zero, or at the minimum; ours is the one of every scheduler.
    np.testing.assert_allclose(ours[:2], [0.5, 1.0], rtol=1e-6)
    np.testing.assert_allclose(ours[2:], theirs[2:12], rtol=1e-6)


def test_wsd_decays_over_a_tenth_and_never_within_the_warm_up():
    stable = rates(20, learning_rate=1.0, scheduler="wsd")
    np.testing.assert_allclose(stable, [1.0] * 19 + [0.5])
    short = rates(
        6,
        learning_rate=1.0,
        scheduler="wsd",
        warmup_steps=4,
        scheduler_kwargs={"num_decay_steps": 6},
    )
    np.testing.assert_allclose(short, [0.25, 0.5, 0.75, 1.0, 1.0, 0.5])


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        (("model", "layers", "run_0_4_1", 0, "self_attn", "q_proj", "kernel"), True),
        (("model", "layers", "run_0_4_1", 0, "self_attn", "q_proj", "bias"), False),
        (("model", "layers", "run_0_4_1", 0, "input_layernorm", "weight"), False),
        (("model", "layers", "layer_3", "self_attn", "q_norm", "weight"), False),
        (("model", "norm", "weight"), False),
        (("norm",), False),
        (("model", "embed_tokens", "embedding"), True),
        (("lm_head", "kernel"), True),
        (("normalizer_proj", "kernel"), True),
        (("model", "layers", "layer_0", "mixer", "A_log"), False),
        (("model", "layers", "layer_0", "mixer", "dt_proj", "kernel"), True),
        (("model", "layers", "layer_0", "attention", "time_decay"), False),
        (("model", "layers", "layer_0", "self_attn", "input_gate_bias"), False),
        (("model", "layers", "layer_0", "self_attn", "input_gate_weight"), True),
    ],
)
def test_norms_and_biases_do_not_decay(path, expected):
    keys = tuple(DictKey(part) for part in path)
    assert decays(keys) is expected
    assert decays((*keys, GetAttrKey("value"))) is expected


def test_adamw_is_optax_adamw_with_a_mask():
    tree = params()
    ours, _ = steps(optimizer(learning_rate=0.1, weight_decay=0.5), tree)
    mask = {
        "q_proj": {"kernel": True},
        "input_layernorm": {"weight": False},
        "o_proj": {"bias": False},
    }
    theirs, _ = steps(optax.adamw(0.1, weight_decay=0.5, mask=mask), tree)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, theirs)


@pytest.mark.daily("float32-float32-lion_8bit")
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("master", ["float32", None])
def test_every_optimizer_moves_and_keeps_its_dtypes(name, dtype, master):
    tree = params(dtype)
    tx = optimizer(optimizer=name, learning_rate=0.1, clip_grad=1.0, master_dtype=master)
    new, state = steps(tx, tree)
    assert jax.tree.map(lambda x: x.dtype, new) == jax.tree.map(lambda x: x.dtype, tree)
    kinds = jax.tree.map(lambda x: (x.shape, x.dtype), (tx.init(tree), state))
    assert kinds[0] == kinds[1]
    moved = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), tree, new)
    assert all(jax.tree.leaves(moved))


@pytest.mark.parametrize("name", ["adafactor", "rmsprop", "sgd"])
@pytest.mark.daily("adafactor", "sgd")
def test_weight_decay_skips_norms_and_biases(name):
    tree = params()
    given = {"optimizer": name, "learning_rate": 0.01}
    plain, _ = steps(optimizer(**given, weight_decay=0.0), tree, count=1)
    decayed, _ = steps(optimizer(**given, weight_decay=0.5), tree, count=1)
    difference = jax.tree.map(lambda a, b: a - b, plain, decayed)
    # The difference of two parameters near 2 is exact to float32's spacing there.
    np.testing.assert_allclose(
        difference["q_proj"]["kernel"], 0.01 * 0.5 * tree["q_proj"]["kernel"], atol=5e-7
    )
    assert not np.any(difference["input_layernorm"]["weight"])
    assert not np.any(difference["o_proj"]["bias"])


def test_master_weights_accumulate_updates_below_bfloat16_resolution():
    # A step of 1e-3 is less than half a bfloat16 spacing at 1: without masters nothing moves.
    start = {"kernel": jnp.ones((4,), jnp.bfloat16)}

    def after(master):
        tx = optimizer(optimizer="sgd", learning_rate=1e-3, weight_decay=0.0, master_dtype=master)
        tree, state = start, tx.init(start)
        for _ in range(100):
            updates, state = tx.update({"kernel": jnp.ones((4,))}, state, tree)
            tree = apply_updates(tree, updates, state)
        return tree["kernel"], state

    stuck, _ = after(None)
    assert np.all(np.asarray(stuck, np.float32) == 1.0)
    moved, state = after("float32")
    np.testing.assert_allclose(np.asarray(moved, np.float32), 0.9, atol=4e-3)
    np.testing.assert_allclose(state.masters["kernel"], 0.9, rtol=1e-5)
    assert np.array_equal(moved, state.masters["kernel"].astype(jnp.bfloat16))


@pytest.mark.nightly
def test_clipping_bounds_the_update_and_adds_no_state():
    tree = params()
    tx = optimizer(optimizer="sgd", learning_rate=1.0, weight_decay=0.0, clip_grad=0.5)
    grads = jax.tree.map(lambda p: 100.0 * jnp.ones_like(p), tree)
    updates, _ = tx.update(grads, tx.init(tree), tree)
    np.testing.assert_allclose(global_norm(updates), 0.5, rtol=1e-6)
    small = jax.tree.map(lambda p: 1e-3 * jnp.ones_like(p), tree)
    updates, _ = tx.update(small, tx.init(tree), tree)
    jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -g), updates, small)
    free = optimizer(optimizer="sgd", learning_rate=1.0)
    assert jax.tree.structure(tx.init(tree)) == jax.tree.structure(free.init(tree))
