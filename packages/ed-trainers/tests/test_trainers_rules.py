"""Rules over parameter names: trained parameters, learning rates and weight decay."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_layers.updated import Updated
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.optimizers import apply_updates, build_optimizer, build_schedule
from ed_trainers.stored.arrays import flat_arrays, leaf_names
from flax import nnx
from test_trainers_loop import StopAt, exact, trainer

BODY = [["embed_tokens", False], ["norm|bias", False], ["", True]]


def updates_of(tree, grads, **given):
    arguments = SFTArguments(**given)
    tx = build_optimizer(arguments, build_schedule(arguments, 10))
    updates, state = tx.update(grads, tx.init(tree), tree)
    new = apply_updates(tree, updates, state)
    return jax.tree.map(lambda a, b: np.asarray(b - a), tree, new)


def params():
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "q_proj": {"kernel": jax.random.normal(keys[0], (8, 4))},
        "norm": {"weight": jnp.ones((8,))},
        "embed": {"embedding": jax.random.normal(keys[1], (8, 4))},
    }


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "rmsprop", "sgd"])
def test_a_factor_on_the_learning_rate_is_another_learning_rate(name):
    tree = params()
    grads = jax.tree.map(jnp.cos, tree)
    given = {"optimizer": name, "weight_decay": 0.1, "clip_grad": 1.0}
    fast = updates_of(tree, grads, learning_rate=0.02, **given)
    slow = updates_of(tree, grads, learning_rate=0.005, **given)
    mixed = updates_of(
        tree, grads, learning_rate=0.02, learning_rate_rules=[["q_proj|norm", 0.25]], **given
    )
    # Differences of parameters near 1: exact to float32's spacing there.
    np.testing.assert_allclose(mixed["q_proj"]["kernel"], slow["q_proj"]["kernel"], atol=5e-7)
    np.testing.assert_allclose(mixed["norm"]["weight"], slow["norm"]["weight"], atol=5e-7)
    np.testing.assert_array_equal(mixed["embed"]["embedding"], fast["embed"]["embedding"])


@pytest.mark.parametrize("name", ["adamw", "lion", "adafactor", "rmsprop", "sgd"])
def test_decay_follows_the_first_rule_that_matches(name):
    tree = params()
    grads = jax.tree.map(jnp.zeros_like, tree)
    rules = [["norm", 0.5], ["q_proj", 0.0], ["proj", 9.0]]
    moved = updates_of(
        tree,
        grads,
        optimizer=name,
        learning_rate=0.01,
        weight_decay=0.1,
        weight_decay_rules=rules,
    )
    np.testing.assert_allclose(moved["norm"]["weight"], -0.01 * 0.5, atol=2e-7)
    assert not np.any(moved["q_proj"]["kernel"])
    np.testing.assert_allclose(
        moved["embed"]["embedding"], -0.01 * 0.1 * tree["embed"]["embedding"], atol=5e-7
    )


def test_the_state_of_the_optimizer_does_not_depend_on_the_rules():
    tree = params()

    def names(**given):
        arguments = SFTArguments(**given)
        return leaf_names(build_optimizer(arguments, build_schedule(arguments, 10)).init(tree))

    ruled = {"learning_rate_rules": [["norm", 2.0]], "weight_decay_rules": [["norm", 1.0]]}
    for name in ("adamw", "sgd"):
        assert names(optimizer=name, **ruled) == names(optimizer=name)


def run(toy, directory, model=None, loader=None, **given):
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": 3,
            "learning_rate": 0.02,
            "log_steps": 1,
            "use_tensorboard": False,
            **given,
        }
    )
    model = toy.model() if model is None else model
    return SFTTrainer(arguments, model, loader or toy.loader(), toy.loader(steps=1, seed=9))


def test_only_trainable_parameters_change_and_have_moments(toy, tmp_path):
    trainer = run(toy, tmp_path, trainable_rules=BODY)
    before = jax.tree.map(np.array, nnx.state(trainer.model))
    output = trainer.train()
    after = nnx.state(trainer.model)
    same = {name: bool(np.array_equal(before[name][...], after[name][...])) for name in before}
    assert same == {"embed_tokens": True, "norm": True, "bias": True, "kernel": False}
    assert leaf_names(output.state.graphstate) == ["kernel"]
    moments = [name for name in leaf_names(output.state.opt_state) if "/mu/" in name]
    assert len(moments) == 1 and moments[0].endswith("kernel")
    # The evaluation of the trainer and of the loop are one, and the model is whole.
    assert trainer.evaluate()["eval_loss"] == output.metrics["eval_loss"]
    # Resumption with other rules is refused, with the same rules it works.
    with pytest.raises(CheckpointError, match="trained with trainable_rules"):
        run(toy, tmp_path, max_training_steps=4).train()
    longer = run(toy, tmp_path, max_training_steps=4, trainable_rules=BODY).train()
    assert longer.metrics["steps"] == 4


@pytest.mark.nightly
def test_trainable_splits_stacks_by_their_names():
    model = LlamaForCausalLM.create(
        LlamaConfig(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            sharding_axis_dims=(1, 1, 1, 1, 1),
        )
    )
    whole = flat_arrays(model.split_module()[1])
    state = EasyDeLState.create(model=model, trainable=[("self_attn/.*_proj", True)])
    assert {name.split("/")[-2] for name in leaf_names(state.graphstate)} == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    merged = flat_arrays(state.model.split_module()[1])
    assert merged.keys() == whole.keys()
    tx = optax.adamw(1e-2)
    state = state.init_tx(tx)
    moved = jax.jit(lambda s: s.apply_gradients(grads=s.graphstate))(state)
    np.testing.assert_array_equal(
        moved.model.model.embed_tokens.embedding[...], model.model.embed_tokens.embedding[...]
    )
    with pytest.raises(ConfigError, match="one stacked array"):
        EasyDeLState.create(model=model, trainable=[("layers.1.self_attn", True)])


def test_variables_with_their_own_rule_do_not_learn(toy):
    model = toy.model()
    model.router_bias = Updated(jnp.zeros(4), axes=(None,), rule=max)
    model.codes = nnx.Param(jnp.zeros(4, jnp.int8))
    state = EasyDeLState.create(model=model, trainable=[("", True)])
    assert leaf_names(state.graphstate) == ["bias", "embed_tokens", "kernel", "norm"]
    with pytest.raises(ConfigError, match="trainable rule 'router_bias' matches no parameter"):
        EasyDeLState.create(model=model, trainable=[("router_bias", True), ("", True)])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"trainable_rules": [["kernal", True]]}, "trainable rule 'kernal'.*mean 'kernel'"),
        ({"trainable_rules": [["kernel", False]]}, "no parameter is trained"),
        ({"weight_decay_rules": [["kernal", 0.0]]}, "weight decay rule 'kernal'.*mean 'kernel'"),
        ({"learning_rate_rules": [["nrm", 0.1]]}, "learning rate rule 'nrm'.*mean 'norm'"),
        (
            {"trainable_rules": [["kernel", True]], "weight_decay_rules": [["embed", 0.0]]},
            "weight decay rule 'embed' matches no parameter",
        ),
    ],
)
def test_a_rule_that_matches_nothing_is_an_error_before_training(toy, tmp_path, given, words):
    with pytest.raises(ConfigError, match=words):
        run(toy, tmp_path, **given)


@pytest.mark.nightly
def test_a_state_has_its_own_split(toy, tmp_path):
    state = EasyDeLState.create(model=toy.model(), trainable=[("kernel", True)])
    with pytest.raises(ConfigError, match="a state has them selected"):
        run(toy, tmp_path, model=state, trainable_rules=[["kernel", True]])
    output = run(toy, tmp_path, model=state).train()
    assert leaf_names(output.state.graphstate) == ["kernel"]
    with pytest.raises(ConfigError, match="trainable requires a model; graphstate"):
        EasyDeLState.create(
            graphdef=state.graphdef,
            graphstate=state.graphstate,
            graphother=state.graphother,
            trainable=[("", True)],
        )


def test_frozen_parameters_are_the_rules_of_all_others(toy, tmp_path):
    def first_state(**given):
        arguments = SFTArguments(save_directory=str(tmp_path), **given)
        run = SFTTrainer(arguments, model=toy.model())
        state = run._first_state()
        return state.init_tx(build_optimizer(arguments, build_schedule(arguments, 3)))

    frozen = first_state(frozen_parameters="embed_tokens|^norm$")
    rules = first_state(trainable_rules=[["embed_tokens|^norm$", False], ["", True]])
    assert jax.tree.structure(frozen.opt_state) == jax.tree.structure(rules.opt_state)
    names = {"/".join(map(str, path)) for path, _ in nnx.to_flat_state(frozen.graphstate)}
    assert names == {"bias", "kernel"}
    sizes = sum(leaf.size for leaf in jax.tree.leaves(frozen.opt_state) if leaf.ndim)
    assert sizes == 2 * sum(leaf.size for leaf in jax.tree.leaves(frozen.graphstate))
    with pytest.raises(ConfigError, match="'embd' matches no parameter"):
        first_state(frozen_parameters="embd")
    with pytest.raises(ConfigError, match="no parameter is trained"):
        first_state(frozen_parameters=".*")


@pytest.mark.nightly
def test_a_run_with_frozen_parameters_equals_its_rules_and_resumes(toy, tmp_path):
    rules = {"trainable_rules": [["embed_tokens", False], ["", True]]}
    trainer(toy, tmp_path / "rules", **rules).train()
    given = {"frozen_parameters": "embed_tokens"}
    stop = StopAt(4, lambda t: t.stop("the test"))
    trainer(toy, tmp_path / "frozen", callbacks=[stop], **given).train()
    last = trainer(toy, tmp_path / "frozen", **given)
    last.train()
    assert exact(tmp_path / "frozen") == exact(tmp_path / "rules")
    np.testing.assert_array_equal(last.model.embed_tokens[...], toy.model().embed_tokens[...])
