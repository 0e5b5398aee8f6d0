"""The terminal and the summary show the figures of the method."""

from __future__ import annotations

import pytest
from ed_trainers import arguments_class, trainer_class
from ed_trainers.arguments import METHODS
from ed_trainers.figures.progress import Progress
from ed_trainers.methods import trainer_class as class_of
from method_runs import Pairs
from online_runs import Prompts, online


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_progress_columns(method):
    columns = class_of(method).record.progress_columns
    assert "loss" in columns and len(set(columns)) == len(columns) <= 4
    assert METHODS[method].samples <= (len(columns) > 1), "a sampled loss alone says nothing"


@pytest.mark.nightly
def test_the_terminal_shows_reward_and_divergence_of_a_method_that_samples(toy, tmp_path, capsys):
    run = online(
        "grpo",
        toy.model(),
        tmp_path,
        progress_bar_type="rich",
        max_training_steps=2,
        evaluation_steps=2,
        eval_dataset=Prompts(2, generations=1, seed=7),
    )
    metrics = run.train().metrics
    out = capsys.readouterr().out
    first = next(line for line in out.splitlines() if line.startswith("step 1/2"))
    assert first.startswith("step 1/2  reward 0.") and "  kl 0.0000  " in first
    assert "completions/mean_length" in first and "  loss " in first
    held_out = next(line for line in out.splitlines() if "eval_loss" in line)
    assert "eval_reward 0." in held_out
    assert {"train_loss", "train_reward", "train_kl", "eval_reward"} <= metrics.keys()


@pytest.mark.nightly
def test_the_terminal_shows_the_accuracy_of_pairs(toy, tmp_path, capsys):
    arguments = arguments_class("dpo")(
        save_directory=str(tmp_path),
        total_batch_size=8,
        max_training_steps=1,
        use_tensorboard=False,
        do_last_save=False,
    )
    trainer_class("dpo")(arguments, toy.model(), Pairs()).train()
    out = capsys.readouterr().out
    assert "step 1/1  loss 0.6931  rewards/accuracies 0.0000  rewards/margins 0.0000" in out


@pytest.mark.nightly
def test_a_row_without_a_figure_leaves_its_column_out(capsys):
    progress = Progress("rich", total=9, columns=("reward", "kl", "loss"))
    progress.row({"step": 3, "reward": 0.5, "loss": 0.0, "tokens_per_second": 1200.0})
    assert capsys.readouterr().out == "step 3/9  reward 0.5000  loss 0.0000  1,200 tokens/s\n"
