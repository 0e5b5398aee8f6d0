"""What may be read while training overwrites the arrays: the model and its weights, and when."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from ed_infra.errors import EasyDeLError
from ed_trainers import (
    Callback,
    EasyDeLState,
    Rollout,
    Sampled,
    SFTArguments,
    SFTTrainer,
    trainer_of,
)
from flax import nnx


def trainer(toy, directory, *, kind=SFTTrainer, model=None, callbacks=(), **given):
    arguments = SFTArguments(
        **{
            "save_directory": str(directory),
            "total_batch_size": 8,
            "max_training_steps": 4,
            "learning_rate": 0.02,
            "log_steps": 1,
            "use_tensorboard": False,
            **given,
        }
    )
    model = toy.model() if model is None else model
    held_out = toy.loader(steps=1, seed=9)
    return kind(arguments, model, toy.loader(), held_out, callbacks=callbacks)


def kernel(model) -> np.ndarray:
    return np.array(model.kernel[...])


class Reader(Callback):
    """Reads the model at every event."""

    def __init__(self):
        self.seen, self.evaluated = [], []

    def _read(self, trainer, *_):
        self.seen.append(kernel(trainer.model))

    on_train_begin = on_log = on_save = on_train_end = _read

    def on_evaluate(self, trainer, metrics):
        self._read(trainer)
        # The callback reproduces the evaluation of the trainer.
        self.evaluated.append((metrics["eval_loss"], trainer.evaluate()["eval_loss"]))


@pytest.mark.nightly
def test_the_model_can_be_read_at_every_callback(toy, tmp_path):
    reader = Reader()
    run = trainer(
        toy, tmp_path, callbacks=[reader], save_steps=2, evaluation_steps=2, do_last_save=False
    )
    start = kernel(run.model)
    run.train()
    np.testing.assert_array_equal(reader.seen[0], start)
    # Rows come one step late: of step 1 while step 2 runs.
    assert len({array.tobytes() for array in reader.seen}) == 3, "of step 0, 2 and 4"
    np.testing.assert_array_equal(reader.seen[-1], kernel(run.model))
    assert len(reader.evaluated) == 2
    for said, again in reader.evaluated:
        assert said == again


def test_a_state_given_can_be_read_too(toy, tmp_path):
    class Steps(Callback):
        def __init__(self):
            self.seen = []

        def on_log(self, trainer, row):
            self.seen.append((int(trainer.state.step), kernel(trainer.state.model).tobytes()))

    steps = Steps()
    run = trainer(toy, tmp_path, model=EasyDeLState.create(model=toy.model()), callbacks=[steps])
    run.train()
    # The row of a step is written while the next one runs.
    assert [step for step, _ in steps.seen] == [2, 3, 4, 4, 4]
    assert len({data for _, data in steps.seen}) == 3


class Sampler:
    """A rollout that records the weights of its calls."""

    def __init__(self):
        self.kept, self.read = [], []

    def generate(self, prompts, params, weights):
        self.kept.append(weights)
        self.read.append(kernel(weights.model))
        logits = weights.model.embed_tokens[...][np.asarray([p[-1] for p in prompts])]
        tokens = np.argmax(np.asarray(logits), -1)
        return [Sampled([int(t)], [0.0], weights.version) for t in tokens]


def sampled(run, batch):
    """Requests a continuation of each row before each step."""
    prompts = [row[:4].tolist() for row in batch["input_ids"]]
    run.samples = run.rollout.generate(prompts, {"temperature": 1.0}, run.weights())
    return SFTTrainer.record.prepare(run, batch)


SelfTaught = trainer_of(
    replace(SFTTrainer.record, prepare=sampled),
    replace(SFTTrainer.entry, samples=True),
    "SelfTaught",
)


@pytest.mark.nightly
def test_a_rollout_reads_the_weights_before_each_step(toy, tmp_path):
    sampler = Sampler()
    assert isinstance(sampler, Rollout)
    run = trainer(toy, tmp_path, kind=SelfTaught)
    run.method.rollout, run.evaluator = sampler, None
    start = kernel(run.model)
    run.train()
    assert [weights.version for weights in sampler.kept] == [0, 1, 2, 3]
    assert [sample.weights_version for sample in run.method.samples] == [3] * 8
    np.testing.assert_array_equal(sampler.read[0], start)
    assert len({array.tobytes() for array in sampler.read}) == 4
    # Stored weights raise an error after they were overwritten.
    for weights in sampler.kept:
        with pytest.raises(EasyDeLError, match=rf"weights of step {weights.version} are overwr"):
            weights.state  # noqa: B018
        with pytest.raises(EasyDeLError, match="present weights"):
            weights.model  # noqa: B018


@pytest.mark.nightly
def test_sampling_does_not_change_training_metrics(toy, tmp_path):
    plain = trainer(toy, tmp_path / "plain").train()
    run = trainer(toy, tmp_path / "sampled", kind=SelfTaught)
    run.method.rollout = Sampler()
    assert run.train().metrics["eval_loss"] == plain.metrics["eval_loss"]


@pytest.mark.nightly
def test_outside_of_training_the_weights_are_the_models(toy, tmp_path):
    run = trainer(toy, tmp_path)
    assert run.weights().version == 0
    np.testing.assert_array_equal(kernel(run.weights().model), kernel(run.model))
    run.train()
    weights = run.weights()
    assert weights.version == 4
    np.testing.assert_array_equal(weights.state["kernel"][...], kernel(run.model))
    assert len(nnx.to_flat_state(weights.state)) == len(nnx.to_flat_state(nnx.state(run.model)))


@pytest.mark.nightly
def test_model_access_after_failed_step_raises_error(toy, tmp_path):
    class Break(Callback):
        def on_log(self, trainer, row):
            for leaf in trainer._loop._leaves:
                leaf.delete()
            trainer.model  # noqa: B018

    run = trainer(toy, tmp_path, callbacks=[Break()])
    with pytest.raises(EasyDeLError, match="load the newest checkpoint"):
        run.train()
