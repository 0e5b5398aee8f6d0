"""`loss` and `eval_loss` are the optimized total; the terms of the total have their own names."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.outputs import CausalLMOutput, Metric
from ed_trainers import Models, SFTArguments, SFTTrainer, arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics
from ed_trainers.running.stopping import TrainingDiverged
from flax import nnx
from method_runs import Pairs, one_step

BALANCE = 0.25


def total_of(trainer, batch):
    """The optimized total of a batch, term by term."""
    loss = trainer.loss(Models(trainer.model), trainer.prepare(batch), None)
    return sum(float(term.value) for term in loss.sums.values()), loss


@pytest.fixture
def balanced(toy):
    """The toy model with an auxiliary loss, as models with experts have."""

    class Balanced(toy.Model):
        def __call__(self, input_ids, *, segment_ids, **inputs):
            body = super().__call__(input_ids, segment_ids=segment_ids, **inputs)
            tokens = (segment_ids > 0).sum()
            losses = {"router_balance": Metric.of(BALANCE * tokens, tokens)}
            return CausalLMOutput(last_hidden_state=body.last_hidden_state, losses=losses)

    return lambda: Balanced(toy.Config()).shard_model()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "options"), [("orpo", {"beta": 0.3}), ("cpo", {}), ("cpo", {"cpo_alpha": 0.5})]
)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_loss_of_a_step_is_the_optimized_total(toy, method, options, accumulation):
    batch = Pairs().batch_at(0)
    trainer = trainer_class(method)(arguments_class(method)(**options), toy.model())
    total, loss = total_of(trainer, batch)
    nll = float({**loss.sums, **loss.metrics}["nll_loss"].value)
    assert nll > 1
    _, report = one_step(method, toy.model(), batch, accumulation, **options)
    assert report["loss"] == pytest.approx(total, rel=1e-5)
    assert report["nll_loss"] == pytest.approx(nll, rel=1e-5)
    assert report["main_loss"] == pytest.approx(
        total - options.get("cpo_alpha", 1.0) * nll, abs=1e-4
    )


@pytest.mark.nightly
def test_eval_loss_is_the_optimized_total(toy):
    batch = Pairs().batch_at(0)
    arguments = arguments_class("orpo")(total_batch_size=8)
    trainer = trainer_class("orpo")(arguments, toy.model(), None, [batch])
    found = trainer.evaluate()
    assert found["eval_loss"] == pytest.approx(total_of(trainer, batch)[0], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(
        found["eval_main_loss"] + found["eval_nll_loss"], rel=1e-6
    )


def test_auxiliary_losses_count_in_the_loss_and_not_in_the_perplexity(toy, balanced):
    batch = toy.loader().batch_at(0)
    plain = SFTTrainer(SFTArguments(), toy.model(), None, [batch]).evaluate()
    with_balance = SFTTrainer(SFTArguments(), balanced(), None, [batch]).evaluate()
    assert with_balance["eval_loss"] == pytest.approx(plain["eval_loss"] + BALANCE, rel=1e-6)
    assert with_balance["eval_main_loss"] == pytest.approx(plain["eval_loss"], rel=1e-6)
    assert with_balance["eval_router_balance"] == pytest.approx(BALANCE)
    assert with_balance["eval_perplexity"] == pytest.approx(plain["eval_perplexity"], rel=1e-6)
    assert "eval_main_loss" not in plain


def test_an_infinite_term_ends_the_run(toy, tmp_path):
    class Endless(toy.Model):
        def __call__(self, input_ids, *, segment_ids, **inputs):
            body = super().__call__(input_ids, segment_ids=segment_ids, **inputs)
            losses = {"router_balance": Metric.of(np.inf, 1.0)}
            return CausalLMOutput(last_hidden_state=body.last_hidden_state, losses=losses)

    arguments = SFTArguments(
        save_directory=str(tmp_path), total_batch_size=8, max_training_steps=3, log_steps=1
    )
    with pytest.raises(TrainingDiverged, match="loss inf"):
        SFTTrainer(arguments, Endless(toy.Config()).shard_model(), toy.loader()).train()


@pytest.mark.nightly
def test_the_best_checkpoint_has_the_lowest_optimized_total(toy, tmp_path):
    arguments = arguments_class("orpo")(
        save_directory=str(tmp_path),
        total_batch_size=8,
        max_training_steps=8,
        learning_rate=0.3,
        evaluation_steps=2,
        save_steps=2,
        log_steps=1,
        load_best_model_at_end=True,
        use_tensorboard=False,
    )
    held_out = Pairs(seed=9).batch_at(0)
    trainer = trainer_class("orpo")(arguments, toy.model(), Pairs(), [held_out])
    output = trainer.train()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if "eval_loss" in row]
    lowest = min(rows, key=lambda row: row["eval_loss"])
    assert output.best_checkpoint_path.name == str(lowest["step"])
    objective = jax.jit(
        lambda state: sum(
            term.value
            for term in trainer.loss(
                Models(nnx.merge(graphdef, state)), trainer.prepare(held_out), None
            ).sums.values()
        )
    )
    graphdef, state = nnx.split(trainer.model)
    assert float(objective(state)) == pytest.approx(lowest["eval_loss"], rel=1e-5)
