"""Which checkpoints stay, which model a run ends with, the mean of parameters, saving on demand."""

from __future__ import annotations

import os
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import ConfigError
from ed_trainers import Callback, SFTArguments, SFTTrainer
from ed_trainers.checkpoints.checkpoint import Checkpoints
from ed_trainers.figures.metrics import CLOCKED, read_metrics
from ed_trainers.optimizers import build_optimizer, build_schedule, get_ema_params
from ed_trainers.optimizers.ema import EmaState
from ed_trainers.running.evaluation import Best
from pydantic import ValidationError

SETTINGS = {
    "total_batch_size": 8,
    "max_training_steps": 12,
    "log_steps": 1,
    "learning_rate": 0.02,
    "use_tensorboard": False,
}
EVALUATED = {"save_steps": 2, "evaluation_steps": 2}


def trainer(toy, directory, callbacks=(), dims=(1, 1, 1, 1, 1), **given):
    arguments = SFTArguments(save_directory=str(directory), **{**SETTINGS, **given})
    return SFTTrainer(
        arguments,
        model=toy.model(dims),
        train_dataset=toy.loader(),
        eval_dataset=toy.loader(steps=2, seed=9),
        callbacks=callbacks,
    )


def kept(directory):
    return sorted(int(path.name) for path in (directory / "checkpoints").iterdir())


def evaluated(directory):
    rows = read_metrics(directory / "metrics.jsonl")
    return {row["step"]: row for row in rows if "eval_loss" in row}


@pytest.mark.proves("save_best_k", "save_total_limit")
@pytest.mark.nightly
def test_the_newest_and_the_best_stay(toy, tmp_path):
    given = {**EVALUATED, "learning_rate": 3.0}  # far too high: it gets worse
    trainer(toy, tmp_path, **given, save_best_k=2, save_total_limit=1).train()
    losses = {step: row["eval_loss"] for step, row in evaluated(tmp_path).items()}
    best = sorted(losses, key=losses.get)[:2]
    assert 12 not in best
    assert kept(tmp_path) == sorted({*best, 12})
    # Without a limit, one newest checkpoint is kept in addition to the best.
    trainer(toy, tmp_path / "one", **given, save_best_k=2).train()
    assert kept(tmp_path / "one") == sorted({*best, 12})


@pytest.mark.nightly
@pytest.mark.proves("load_best_model_at_end", "metric_for_best_model", "greater_is_better")
@pytest.mark.parametrize("greater", [None, True])
def test_a_run_ends_with_the_best(toy, tmp_path, capsys, greater):
    given = {
        **EVALUATED,
        "learning_rate": 3.0,
        "load_best_model_at_end": True,
        "metric_for_best_model": "perplexity",
        "greater_is_better": greater,
        "save_total_limit": 1,
    }
    run = trainer(toy, tmp_path, **given)
    output = run.train()
    figures = {step: row["eval_perplexity"] for step, row in evaluated(tmp_path).items()}
    choose = max if greater else min
    best = choose(figures, key=figures.get)
    assert output.best_checkpoint_path.name == str(best)
    assert output.checkpoint_path.name == "12"
    assert kept(tmp_path) == sorted({best, 12})
    assert int(output.state.step) == best
    assert run.evaluate()["eval_perplexity"] == figures[best]
    assert f"the model of step {best}, where eval_perplexity is {figures[best]}" in (
        capsys.readouterr().out
    )
    # The same command again: the same model.
    again = trainer(toy, tmp_path, **given).train()
    assert int(again.state.step) == best


def test_best_checkpoint_score_respects_metric_direction():
    def score(metric, greater=None, **row):
        return Best(SFTArguments(**best, metric_for_best_model=metric, greater_is_better=greater))

    best = {**EVALUATED, "save_best_k": 1}
    assert score("loss").score({"eval_loss": 2.0}) == -2.0
    assert score("eval_loss", True).score({"eval_loss": 2.0}) == 2.0
    assert score("reward_margin").score({"eval_reward_margin": 2.0}) == 2.0
    assert score(None).score({"eval_loss": float("nan")}) is None
    assert score(None).score(None) is None


def test_a_figure_that_is_not_there_is_named(toy, tmp_path):
    run = trainer(toy, tmp_path, **EVALUATED, save_best_k=1, metric_for_best_model="los")
    with pytest.raises(ConfigError, match=r"'eval_los'.*did you mean 'eval_loss'"):
        run.train()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"save_best_k": 1}, "save_best_k compares checkpoints"),
        ({"load_best_model_at_end": True, "save_steps": 3, "evaluation_steps": 2}, "multiple"),
        ({"metric_for_best_model": "loss"}, "has no effect without"),
        ({"greater_is_better": False}, "has no effect without"),
        ({"use_ema": False}, "no effect without ema_decay"),
    ],
)
def test_contradictory_arguments_raise_error(given, message):
    with pytest.raises((ValidationError, ConfigError), match=message):
        SFTArguments(**given)


def test_without_an_eval_dataset_nothing_is_best(toy):
    arguments = SFTArguments(**EVALUATED, save_best_k=1)
    with pytest.raises(ConfigError, match="pass an eval_dataset"):
        SFTTrainer(arguments, model=toy.model(), train_dataset=toy.loader())


@pytest.mark.parametrize("how", ["signal", "callback"])
def test_signal_or_callback_saves_checkpoint_on_demand(toy, tmp_path, how):
    class Ask(Callback):
        def on_log(self, trainer, row):
            if row["step"] == 4 and how == "signal":
                os.kill(os.getpid(), signal.SIGUSR1)
            elif row["step"] == 4:
                trainer.save_checkpoint()

    before = signal.getsignal(signal.SIGUSR1)
    output = trainer(toy, tmp_path, [Ask()]).train()
    assert output.stopped_by is None
    # One step late: the row of step 4 is written while step 5 runs.
    assert kept(tmp_path) == [5, 12]
    assert signal.getsignal(signal.SIGUSR1) == before


def test_retention_keeps_newest_and_best_checkpoints(tmp_path):
    class Info:
        def __init__(self, step):
            self.step = step

    def stay(**given):
        checkpoints = Checkpoints(tmp_path, score=lambda step: scores.get(step), **given)
        infos = [Info(step) for step in (1, 2, 3, 4)]
        return checkpoints.should_preserve(infos, context=None)

    scores = {1: 5.0, 2: 7.0, 3: 5.0}
    assert stay(keep=None) == [True] * 4
    assert stay(keep=1) == [False, False, False, True]
    assert stay(keep=1, keep_best=1) == [False, True, False, True]
    assert stay(keep=1, keep_best=2) == [True, True, False, True]  # of equals the first


@pytest.mark.nightly
@pytest.mark.proves("ema_decay")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_mean_is_that_of_the_parameters_after_each_update(dtype):
    arguments = SFTArguments(ema_decay=0.75, learning_rate=0.1)
    tx = build_optimizer(arguments, build_schedule(arguments, 10))
    params = {"w": jnp.asarray([1.0, -2.0], dtype)}
    state = tx.init(params)
    plain = build_optimizer(arguments.replace(ema_decay=None), build_schedule(arguments, 10))
    other = plain.init(params)
    exact = {"w": params["w"].astype(jnp.float32)}
    mean = np.asarray(exact["w"])
    for step in range(5):
        grads = {"w": jnp.asarray([0.1 * step, 1.0])}
        updates, state = tx.update(grads, state, params)
        _, other = plain.update(grads, other, params)
        exact = optax.apply_updates(exact, updates)
        mean = 0.75 * mean + 0.25 * np.asarray(exact["w"])
        params = {"w": exact["w"].astype(dtype)}
    np.testing.assert_allclose(state.inner.ema["w"], mean, rtol=1e-6)
    assert get_ema_params(params, state)["w"].dtype == params["w"].dtype
    assert get_ema_params(params, other) is params


@pytest.mark.nightly
@pytest.mark.proves("use_ema")
def test_the_mean_is_evaluated_saved_and_resumed(toy, tmp_path):
    given = {**EVALUATED, "ema_decay": 0.9}
    run = trainer(toy, tmp_path / "mean", **given, dims=(1, 8, 1, 1, 1))
    output = run.train()
    ema = jax.tree.leaves(output.state.opt_state, is_leaf=lambda node: isinstance(node, EmaState))
    ema = next(part for part in ema if isinstance(part, EmaState)).ema
    for mean, parameter in zip(
        jax.tree.leaves(ema), jax.tree.leaves(output.state.graphstate), strict=True
    ):
        np.testing.assert_array_equal(mean, parameter)
        assert mean.sharding == parameter.sharding
    assert run.evaluate()["eval_loss"] == output.metrics["eval_loss"]
    last = trainer(toy, tmp_path / "last", **given, use_ema=False, dims=(1, 8, 1, 1, 1)).train()
    assert last.metrics["train_loss"] == output.metrics["train_loss"]
    assert last.metrics["eval_loss"] != output.metrics["eval_loss"]

    class Stop(Callback):
        def on_save(self, trainer, step):
            trainer.stop("the test")

    trainer(toy, tmp_path / "parts", [Stop()], **given, dims=(1, 8, 1, 1, 1)).train()
    resumed = trainer(toy, tmp_path / "parts", **given, dims=(1, 8, 1, 1, 1)).train()
    rows = [
        [
            {name: value for name, value in row.items() if name not in CLOCKED}
            for row in read_metrics(tmp_path / folder / "metrics.jsonl")
        ]
        for folder in ("mean", "parts")
    ]
    assert rows[0] == rows[1]
    for one, other in zip(
        jax.tree.leaves(output.state), jax.tree.leaves(resumed.state), strict=True
    ):
        np.testing.assert_array_equal(one, other)
