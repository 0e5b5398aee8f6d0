"""Scanned models learn as unrolled ones, with every optimizer, on any mesh, in any microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import ConfigError
from ed_infra.parameter_names import canonical
from ed_infra.specs import LoraSpec
from ed_models.families.gemma3_text import Gemma3Config, Gemma3ForCausalLM
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_models.families.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from ed_trainers import (
    EasyDeLState,
    SFTArguments,
    SFTTrainer,
    TrainingArguments,
    create_optimizer,
)
from ed_trainers.arguments import OPTIMIZERS
from ed_trainers.contract import Models
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.optimizers import apply_updates, build_optimizer, build_schedule
from ed_trainers.optimizers.muon import matrices
from ed_trainers.optimizers.per_array import own_shapes
from flax import nnx

SMALL = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "sharding_axis_dims": (1, 1, 1, 1, 1),
}
#: Optimizers that look at shapes, in the default suite; the others at night.
SEEING = ("adafactor", "muon")
NIGHTLY = [
    pytest.param(name, marks=() if name in SEEING else pytest.mark.nightly)
    for name in sorted(OPTIMIZERS)
]
STEPS = 30


def periodic(**given):
    """A windowed layer and a full one, twice: a stack over a period of two."""
    kinds = ["sliding_attention", "full_attention"] * 2
    config = Gemma3Config(**SMALL, head_dim=8, num_hidden_layers=4, layer_types=kinds, **given)
    return Gemma3ForCausalLM.create(config)


def sparse(**given):
    """A dense layer, then two with experts: two runs."""
    config = Qwen3MoeConfig(
        **SMALL,
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=20,
        mlp_only_layers=[0],
        **given,
    )
    return Qwen3MoeForCausalLM.create(config)


#: Optimizers of the default run.
DEFAULT = (("adafactor", periodic), ("muon", sparse))


#: Settings of the optimizers that are compared. Dion gives all columns of a factor the length 1, so
#: that the smallest ones of a full rank consist of rounding. SOAP gives a long axis of a matrix a
#: basis whose last vectors are arbitrary (a null space), and its updates depend on them; axes of 8
#: have full rank here, and a larger `eps` keeps Adam from enlarging the rounding of small entries.
SETTINGS = {
    "adafactor": {"min_dim_size_to_factor": 4},
    "dion": {"rank_fraction": 0.25},
    "soap": {"max_precond_dim": 8, "eps": 1e-3},
}


def moved(model, name):
    """The parameters by canonical name after 30 steps of gradients that differ by layer."""
    arguments = SFTArguments(optimizer=name, learning_rate=0.02, weight_decay=0.1, clip_grad=1.0)
    arguments = arguments.replace(optimizer_kwargs=SETTINGS.get(name, {}))
    tx = build_optimizer(arguments, build_schedule(arguments, STEPS))
    params = model.split_module()[1]

    @jax.jit
    def step(i, tree, state):
        grads = jax.tree.map(lambda p, first: jnp.cos(first * 40 + i) + 0.1 * p, tree, params)
        updates, state = tx.update(grads, state, tree)
        return apply_updates(tree, updates, state), state

    state, tree = jax.jit(tx.init)(params), params
    for i in range(STEPS):
        tree, state = step(jnp.float32(i), tree, state)
    return named(params), named(tree)


def named(tree):
    """Arrays by canonical name, one for each layer."""
    result = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        names = canonical(path)
        result |= zip(names, leaf, strict=True) if len(names) > 1 else {names[0]: leaf}
    return {name: np.asarray(array) for name, array in result.items()}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "make"),
    [
        pytest.param(name, make, marks=() if (name, make) in DEFAULT else pytest.mark.nightly)
        for name in sorted(OPTIMIZERS)
        for make in (periodic, sparse)
    ],
)
def test_a_scanned_model_is_updated_as_an_unrolled_one(name, make):
    model = make()
    before, scanned = moved(model, name)
    _, unrolled = moved(model.to_layout("leaves"), name)
    assert scanned.keys() == unrolled.keys() == before.keys()
    for key, array in unrolled.items():
        error = np.max(np.abs(scanned[key] - array)) / np.max(np.abs(array - before[key]))
        assert error <= (2e-3 if name.endswith("8bit") else 5e-5), (key, error)


@pytest.mark.nightly
def test_muon_takes_the_matrices_of_layers_and_experts():
    model = sparse()
    params = model.split_module()[1]
    chosen = jax.tree_util.tree_flatten_with_path(matrices(params))[0]
    taken = {canonical(path)[0].removesuffix(".kernel") for path, value in chosen if value}
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    attention = {f"model.layers.{i}.self_attn.{n}" for i in (0, 1) for n in names}
    dense = {f"model.layers.0.mlp.{n}_proj" for n in ("gate", "up", "down")}
    experts = {f"model.layers.1.mlp.experts.{n}_proj" for n in ("gate", "up", "down")}
    assert taken == attention | dense | experts | {"model.layers.1.mlp.gate"}
    shapes = named_shapes(own_shapes(params))
    assert shapes["model.layers.1.mlp.experts.up_proj.kernel"] == (16, 20)
    assert shapes["model.layers.1.self_attn.q_norm.weight"] == (8,)


def named_shapes(tree):
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {canonical(path)[0]: leaf.shape for path, leaf in leaves}


# --- training ---


def losses(directory, model, loader, **given):
    arguments = SFTArguments(
        save_directory=str(directory),
        total_batch_size=8,
        max_training_steps=4,
        log_steps=1,
        learning_rate=0.01,
        use_tensorboard=False,
        do_last_save=False,
        **given,
    )
    SFTTrainer(arguments, model, loader).train()
    return [row["loss"] for row in read_metrics(directory / "metrics.jsonl")]


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
@pytest.mark.parametrize(
    ("dims", "accumulation"),
    [
        ((1, 1, 1, 1, 1), 8),
        pytest.param((1, 1, 1, 1, 1), 2, marks=pytest.mark.nightly),
        pytest.param((8, 1, 1, 1, 1), 1, marks=pytest.mark.nightly),
        pytest.param((1, 8, 1, 1, 1), 1, marks=pytest.mark.nightly),
        ((1, 4, 1, 2, 1), 2),
    ],
    ids=str,
)
def test_meshes_and_microbatches_do_not_matter(toy, tmp_path, name, dims, accumulation):
    given = {"optimizer": name, "clip_grad": 1.0}
    if name == "soap":  # the bases of the axes of 32 have a null space
        given["optimizer_kwargs"] = {"max_precond_dim": 16}
    one = losses(tmp_path / "one", toy.model(), toy.loader(rows=8), **given)
    given["gradient_accumulation_steps"] = accumulation
    many = losses(tmp_path / "many", toy.model(dims), toy.loader(rows=8), **given)
    np.testing.assert_allclose(many, one, rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if name not in ("adamw", "rmsprop", "sgd")]
)
def test_resumed_optimizer_run_equals_uninterrupted_run(toy, tmp_path, name):
    def run(directory, steps):
        arguments = SFTArguments(
            save_directory=str(directory),
            optimizer=name,
            skip_bad_steps=True,
            total_batch_size=8,
            max_training_steps=steps,
            learning_rate=0.02,
            use_tensorboard=False,
        )
        return SFTTrainer(arguments, toy.model(), toy.loader()).train().state

    run(tmp_path / "parts", 3)
    whole, parts = run(tmp_path / "whole", 5), run(tmp_path / "parts", 5)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_schedule_free_evaluates_and_saves_the_average(toy, tmp_path):
    """The parameters of the state are x, the result of optax's `schedule_free_eval_params`."""
    arguments = SFTArguments(
        save_directory=str(tmp_path),
        optimizer="schedule_free_adamw",
        total_batch_size=8,
        max_training_steps=4,
        learning_rate=0.05,
        weight_decay=0.0,
        use_tensorboard=False,
        do_last_save=False,
    )
    loader = toy.loader()
    output = SFTTrainer(arguments, toy.model(), loader, toy.loader(steps=1, seed=9)).train()

    model = toy.model()
    trainer = SFTTrainer(arguments, model, loader)
    tx = optax.contrib.schedule_free_adamw(0.05)
    graphdef, y, other = model.split_module()

    def loss(params, batch):
        learner = nnx.merge(graphdef, params, other)
        return trainer.loss(Models(learner), batch, None).sums["main_loss"].value

    gradient, state = jax.jit(jax.grad(loss)), tx.init(y)
    for step in range(4):
        grads = gradient(y, trainer.prepare(loader.batch_at(step)))
        updates, state = tx.update(grads, state, y)
        y = optax.apply_updates(y, updates)
    theirs = optax.contrib.schedule_free_eval_params(state, y)
    for a, b in zip(jax.tree.leaves(output.state.graphstate), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-6)
    assert not np.allclose(y["kernel"][...], theirs["kernel"][...], atol=1e-4)


@pytest.mark.nightly
def test_bfloat16_masters_take_eight_bit_moments_and_low_rank_adapters(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**{**SMALL, **sizes})
    model = LlamaForCausalLM.create(config, param_dtype=jnp.bfloat16)
    adapted = model.apply_lora(LoraSpec(rank=64, alpha=8.0, targets=("q_proj",)))
    states = {}
    for name, module in (("whole", model), ("adapted", adapted)):
        arguments = TrainingArguments(optimizer="adamw_8bit", learning_rate=0.01)
        tx = create_optimizer(module, arguments)
        state = EasyDeLState.create(model=module, tx=tx, init_opt_state=True)
        step = jax.jit(lambda s: s.apply_gradients(grads=jax.tree.map(jnp.cos, s.graphstate)))
        states[name] = jax.device_get(step(state))
    kinds = {
        name: {str(leaf.dtype) for leaf in jax.tree.leaves(state.opt_state)}
        for name, state in states.items()
    }
    # Masters, scales and small moments are float32, large moments are codes.
    assert kinds["whole"] == kinds["adapted"] == {"float32", "uint8", "int32"}
    masters = {name: jax.tree.leaves(s.opt_state.masters) for name, s in states.items()}
    assert len(masters["whole"]) == len(jax.tree.leaves(states["whole"].graphstate))
    assert masters["adapted"] == []  # adapters are float32 themselves
    stored = {str(leaf.dtype) for leaf in jax.tree.leaves(states["whole"].graphstate)}
    assert stored == {"bfloat16"}


@pytest.mark.nightly
def test_create_optimizer_is_the_trainers():
    model = periodic()
    arguments = TrainingArguments(optimizer="muon", scheduler="cosine", max_training_steps=10)
    tx = create_optimizer(model, arguments)
    state = EasyDeLState.create(model=model, tx=tx, init_opt_state=True)
    ours = build_optimizer(arguments, build_schedule(arguments, 10))
    grads = jax.tree.map(jnp.cos, state.graphstate)
    parts = (grads, state.opt_state, state.graphstate)
    wanted, _ = jax.jit(ours.update)(*parts)
    found, _ = jax.jit(create_optimizer(state, arguments).update)(*parts)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    with pytest.raises(ConfigError, match="pass total_steps"):
        create_optimizer(model, TrainingArguments(scheduler="cosine"))
    with pytest.raises(ConfigError, match="weight decay rule 'kernal'"):
        create_optimizer(model, TrainingArguments(weight_decay_rules=[["kernal", 0.0]]))
