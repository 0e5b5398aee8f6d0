"""A method with a frozen model, and a layer with a loss, an update and metrics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.outputs import CausalLMOutput, Metric
from ed_layers.updated import Updated
from ed_trainers import (
    Callback,
    Loss,
    Method,
    MethodEntry,
    Models,
    Role,
    SFTArguments,
    SFTTrainer,
    trainer_of,
)
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.token_loss import token_logprobs
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.placement import microbatches
from ed_trainers.state import EasyDeLState
from ed_trainers.step import build_eval_step, build_train_step
from flax import nnx

EXPERTS, COEFFICIENT, RATE = 4, 0.5, 1e-3
MAIN = {"main_loss": (0.0, 1.0)}


def follow_load(bias, load):
    """The rule of the router's bias: one step towards the experts that saw fewer tokens."""
    return bias + RATE * jnp.sign(jnp.mean(load) - load)


@pytest.fixture
def routed(toy):
    """`routed(dims, ...)`: the toy model with a router before its head."""

    class Routed(toy.Model):
        def __init__(self, config, **given):
            super().__init__(config, **given)
            router = jax.random.normal(jax.random.key(7), (self.norm.shape[0], EXPERTS)) * 0.3
            self.router = nnx.Param(router, axes=("embed", None))
            self.router_bias = Updated(jnp.zeros(EXPERTS), axes=(None,), rule=follow_load)

        def __call__(self, input_ids, *, segment_ids, **inputs):
            hidden = (
                super().__call__(input_ids, segment_ids=segment_ids, **inputs).last_hidden_state
            )
            scores = hidden @ self.router[...] + self.router_bias[...]
            real = (segment_ids > 0).astype(jnp.float32)
            # The z-loss of routers, over all tokens that are not padding.
            z = COEFFICIENT * jnp.square(jax.nn.logsumexp(scores, axis=-1))
            chosen = jax.nn.one_hot(jnp.argmax(scores, -1), EXPERTS) * real[..., None]
            load = jnp.sum(chosen, axis=(0, 1))
            return CausalLMOutput(
                last_hidden_state=hidden * jax.nn.sigmoid(jnp.max(scores, -1, keepdims=True)),
                losses={"router_z": Metric.of(jnp.sum(z * real), jnp.sum(real))},
                aux={"first_expert": Metric.of(load[0], jnp.sum(real))},
                updates={"router_bias": load},
            )

    return lambda dims=(1, 1, 1, 1, 1), **given: Routed(toy.Config(dims), **given).shard_model()


def distill_loss(run, models, batch, key):
    """Cross-entropy, and nearness to the log-probabilities of a frozen model."""
    where = run.placement.sharding(batch["targets"].shape, stacked=False)

    def score(model, key):
        output = model(**batch.select(model.input_names), logits_at="none", key=key)
        hidden = output.last_hidden_state
        return output, token_logprobs(hidden, model.head(), batch["targets"], sharding=where)[0]

    output, own = score(models.learner, key)
    _, reference = score(models["reference"], None)
    far = jnp.square(own - reference)
    weight = jnp.sum(batch["weights"])
    total = jnp.sum(batch["weights"] * (far - own))
    distance = Metric.of(jnp.sum(batch["weights"] * far), weight)
    return Loss.of(output, total, weight, distance=distance)


DISTILL = Method(prepare=lambda run, batch: next_token_batch(batch), loss=distill_loss)
ENTRY = MethodEntry(SFTArguments, DISTILL, roles=(Role("reference", required=True),))
Distill = trainer_of(DISTILL, ENTRY, "Distill")


def one_step(routed, batch, accumulation, dims=(1, 1, 1, 1, 1), trainable=(), **given):
    """State by name before and after a step of plain gradient descent, its report, the trainer."""
    rows = batch["input_ids"].shape[0]
    arguments = SFTArguments(
        total_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        **{"optimizer": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, **given},
    )
    model = routed(dims)
    run = Distill(arguments, model, frozen={"reference": routed(dims, seed=5)})
    schedule = build_schedule(arguments, 10)
    state = EasyDeLState.create(
        model=model,
        tx=build_optimizer(arguments, schedule),
        init_opt_state=True,
        trainable=trainable,
    )
    parts = microbatches(run.prepare(batch), accumulation)
    step = build_train_step(state, run.method, schedule, rows=rows // accumulation, seed=0)
    before = jax.tree.map(np.array, state)
    placed = run.placement.place(parts, stacked=True)
    leaves, report = step(tuple(jax.tree.leaves(state)), placed)
    after = jax.tree.map(np.array, jax.tree.unflatten(jax.tree.structure(state), leaves))
    return before, after, jax.device_get(report), run


def near(left, right, tolerance):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert np.max(np.abs(a - b)) <= tolerance * np.max(np.abs(b))


@pytest.mark.nightly
def test_the_step_is_the_gradient_of_the_sum_of_the_means(toy, routed):
    # Reference: one differentiation of main / weight + layer / weight over the whole batch.
    batch = toy.loader(rows=8).batch_at(0)
    before, after, report, run = one_step(routed, batch, 1)
    model, reference = routed(), routed(seed=5)
    graphdef, params, other = model.split_module()
    prepared = run.prepare(batch)

    def objective(params):
        models = Models(nnx.merge(graphdef, params, other), {"reference": reference})
        loss = run.loss(models, prepared, None)
        return sum(metric.sum / metric.weight for metric in loss.sums.values()), loss

    grads, loss = jax.grad(objective, has_aux=True)(params)
    assert loss.sums["main_loss"].weight != loss.sums["router_z"].weight, "or nothing is tested"
    moved = jax.tree.map(lambda a, b: a - b, before.graphstate, after.graphstate)
    near(moved, grads, 1e-5)
    # The layer's loss is in it: the router would hardly move without.
    alone = jax.grad(lambda p: objective(p)[1].sums["main_loss"].value)(params)
    assert np.max(np.abs(grads["router"][...] - alone["router"][...])) > 0.1 * np.max(
        np.abs(grads["router"][...])
    )
    for name in ("main_loss", "router_z"):
        assert report[name] == pytest.approx(float(loss.sums[name].value), rel=1e-6)
    assert report["loss"] == pytest.approx(report["main_loss"] + report["router_z"], rel=1e-6)
    for name in ("first_expert", "distance"):
        assert report[name] == pytest.approx(float(loss.metrics[name].value), rel=1e-6)


@pytest.mark.nightly
def test_the_bias_of_a_frozen_router_stays(toy, routed):
    def adapted(dims, **given):
        model = routed(dims, **given)
        model.adapter = nnx.Dict(weight=nnx.Param(jnp.ones(2), axes=(None,)))
        return model

    batch = toy.loader(rows=8).batch_at(0)
    rules = [("^adapter", True), ("", False)]
    before, after, *_ = one_step(adapted, batch, 1, trainable=rules)
    for name in ("router", "router_bias"):
        was, now = (np.asarray(state.graphother[name][...]) for state in (before, after))
        np.testing.assert_array_equal(now, was)


@pytest.mark.daily("2")
@pytest.mark.parametrize("accumulation", [2, 8])
def test_accumulation_equals_the_big_batch(toy, routed, accumulation):
    batch = toy.loader(rows=8).batch_at(0)
    before, big, big_report, _ = one_step(routed, batch, 1)
    _, small, small_report, _ = one_step(routed, batch, accumulation)
    moved = jax.tree.map(lambda a, b: b - a, before.graphstate, big.graphstate)
    moved_small = jax.tree.map(lambda a, b: b - a, before.graphstate, small.graphstate)
    near(moved_small, moved, 1e-5)  # differences of float32 parameters
    near(small.graphstate, big.graphstate, 1e-6)
    # The bias moved by one step of its rule, not by one for each microbatch.
    bias = [np.asarray(state.graphother["router_bias"][...]) for state in (before, big, small)]
    np.testing.assert_array_equal(bias[2], bias[1])
    assert set(np.abs(bias[1] - bias[0]).tolist()) <= {0.0, np.float32(RATE).item()}
    assert np.any(bias[1] != bias[0])
    assert small_report.keys() == big_report.keys()
    for name, value in big_report.items():
        assert small_report[name] == pytest.approx(value, rel=1e-6), name


def test_dividing_all_by_one_weight_would_not_pass(toy, routed):
    # Control: the weights of the two losses are apart by far more than the tolerance.
    batch = toy.loader(rows=8).batch_at(0)
    prepared = next_token_batch(batch)
    ratio = prepared["weights"].sum() / np.count_nonzero(prepared["segment_ids"])
    assert ratio < 0.95
    by_row = prepared["weights"].sum(1) / np.count_nonzero(prepared["segment_ids"], axis=1)
    assert by_row.max() - by_row.min() > 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(1, 8, 1, 1, 1), (2, 2, 1, 2, 1), (1, 2, 1, 1, 4)], ids=str)
def test_a_mesh_equals_one_device(toy, routed, dims):
    batch = toy.loader(rows=16).batch_at(0)
    _, one, one_report, _ = one_step(routed, batch, 2)
    _, many, many_report, _ = one_step(routed, batch, 2, dims)
    near(many.graphstate, one.graphstate, 1e-6)
    near(many.graphother, one.graphother, 1e-6)
    for name, value in one_report.items():
        assert many_report[name] == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("dims", [(1, 1, 1, 1, 1), (2, 2, 1, 2, 1)], ids=str)
@pytest.mark.nightly
def test_the_weights_before_the_gradients_cost_no_forward_pass(toy, routed, dims):
    # With several microbatches, a separate scan sums the weights first.
    batch = toy.loader(rows=8).batch_at(0)
    arguments = SFTArguments(total_batch_size=8, gradient_accumulation_steps=4)
    model = routed(dims)
    run = Distill(arguments, model, frozen={"reference": routed(dims, seed=5)})
    schedule = build_schedule(arguments, 10)
    state = EasyDeLState.create(
        model=model, tx=build_optimizer(arguments, schedule), init_opt_state=True
    )
    placed = run.placement.place(microbatches(run.prepare(batch), 4), stacked=True)

    def products(lowered):
        text = lowered.compile().as_text()
        return text.count(" dot(") + text.count("__onednn$matmul")

    step = build_train_step(state, run.method, schedule, rows=2, seed=0)
    leaves = tuple(jax.tree.leaves(state))
    assert products(step.before.lower(leaves, run.method.frozen.leaves, placed)) == 0
    assert products(step.lower(leaves, placed)) > 0


def test_one_term_needs_no_weights_before(toy, routed):
    batch = toy.loader(rows=8).batch_at(0)
    arguments = SFTArguments(total_batch_size=8, gradient_accumulation_steps=4)
    run = SFTTrainer(arguments, model=toy.model())
    state = EasyDeLState.create(model=run.model)
    step = build_train_step(state, run.method, build_schedule(arguments, 10), rows=2, seed=0)
    placed = run.placement.place(microbatches(run.prepare(batch), 4), stacked=True)
    leaves = tuple(jax.tree.leaves(state))
    assert step.before(leaves, run.method.frozen.leaves, placed) == {}


@pytest.mark.nightly
def test_frozen_models_and_extra_losses_work_in_custom_method(toy, routed, tmp_path):
    reference = routed(seed=5)
    kept = jax.tree.map(np.array, nnx.state(reference))
    arguments = SFTArguments(
        save_directory=str(tmp_path),
        total_batch_size=8,
        gradient_accumulation_steps=2,
        max_training_steps=6,
        learning_rate=0.02,
        log_steps=1,
        use_tensorboard=False,
    )
    run = Distill(
        arguments,
        routed(),
        toy.loader(),
        toy.loader(steps=2, seed=9),
        frozen={"reference": reference},
    )
    output = run.train()
    for before, after in zip(
        jax.tree.leaves(kept), jax.tree.leaves(nnx.state(reference)), strict=True
    ):
        np.testing.assert_array_equal(after, before)  # also: they can still be read
    rows = read_metrics(tmp_path / "metrics.jsonl")
    trained, evaluated = rows[:-1], rows[-1]
    assert {"loss", "main_loss", "router_z", "first_expert", "distance"} <= trained[0].keys()
    assert {"eval_loss", "eval_main_loss", "eval_router_z", "eval_first_expert"} <= evaluated.keys()
    assert trained[-1]["router_z"] < trained[0]["router_z"]
    assert np.any(np.asarray(output.state.graphother["router_bias"][...]))


def test_frozen_leaves_are_no_constants_of_the_program(toy, routed):
    batch = toy.loader(rows=8).batch_at(0)
    _, _, report, run = one_step(routed, batch, 1)
    method = run.method
    state = EasyDeLState.create(model=routed())
    step = build_eval_step(state, method)
    leaves = tuple(jax.tree.leaves((state.graphstate, state.graphother)))
    placed = run.placement.place(run.prepare(batch), stacked=False)
    lowered = step.lower(leaves, placed)
    wanted = len(leaves) + len(method.frozen.leaves) + len(placed)
    assert len(jax.tree.leaves(lowered.in_avals)) == wanted
    terms, _ = step(leaves, placed)
    assert sum(float(term.value) for term in terms.values()) == pytest.approx(
        report["loss"], rel=1e-6
    )


def test_the_learner_may_be_its_own_reference(toy, routed, tmp_path):
    model = routed()
    start = jax.tree.map(np.array, nnx.state(model))
    arguments = SFTArguments(
        save_directory=str(tmp_path),
        total_batch_size=8,
        max_training_steps=3,
        learning_rate=0.02,
        use_tensorboard=False,
        do_last_save=False,
    )
    run = Distill(arguments, model, toy.loader(), frozen={"reference": model})
    run.train()
    assert not np.array_equal(model.kernel[...], start["kernel"][...])
    models = run.method.frozen.merge(run.method.frozen.leaves)
    kept = nnx.state(models["reference"])
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(kept), jax.tree.leaves(start))


def test_missing_or_unknown_frozen_models_raise_config_error(toy, routed):
    with pytest.raises(ConfigError, match=r"reads the frozen model 'reference'.*frozen="):
        Distill(SFTArguments(), routed())
    with pytest.raises(ConfigError, match=r"'referense'; did you mean 'reference'"):
        Distill(SFTArguments(), routed(), frozen={"referense": routed()})
    with pytest.raises(ConfigError, match="unknown frozen model of SFTTrainer 'teacher'"):
        SFTTrainer(SFTArguments(), toy.model(), frozen={"teacher": toy.model()})
    with pytest.raises(ConfigError, match="same sharding_axis_dims"):
        Distill(SFTArguments(), routed(), frozen={"reference": routed((1, 8, 1, 1, 1))})
    with pytest.raises(ConfigError, match="did you mean 'reference'"):
        Models(routed(), {"reference": routed()})["refrence"]


@pytest.mark.parametrize(
    ("sums", "metrics", "words"),
    [
        ({}, {}, "no 'main_loss'"),
        (MAIN, {"grad_norm": (0.0, 1.0)}, "'grad_norm' is the name of another"),
        (MAIN, {"loss": (0.0, 1.0)}, "'loss' is the name of another"),
        ({**MAIN, "z": (0.0, 1.0)}, {"z": (0.0, 1.0)}, "'z' is the name of another"),
        (MAIN, {"load": (np.zeros(4), 1.0)}, r"'load' have the shapes \(4,\) and"),
    ],
)
def test_a_loss_that_cannot_be_logged_is_explained(sums, metrics, words):
    def of(pairs):
        return {name: Metric.of(*pair) for name, pair in pairs.items()}

    with pytest.raises(ConfigError, match=words):
        Loss(of(sums), of(metrics), {}).validate_terms()


@pytest.mark.nightly
def test_callbacks_see_the_figures_of_layers(toy, routed, tmp_path):
    seen = []

    class Watch(Callback):
        def on_log(self, trainer, row):
            seen.append(row.get("router_z"))

    arguments = SFTArguments(
        save_directory=str(tmp_path), total_batch_size=8, max_training_steps=2, log_steps=1
    )
    SFTTrainer(arguments, routed(), toy.loader(), callbacks=[Watch()]).train()
    assert len(seen) == 2 and all(isinstance(value, float) for value in seen)
