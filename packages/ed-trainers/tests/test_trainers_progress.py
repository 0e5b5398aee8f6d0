"""The terminal and the summary show the figures of the method."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ed_trainers import Callback, arguments_class, trainer_class
from ed_trainers.arguments import METHODS
from ed_trainers.batches import Feed
from ed_trainers.figures import progress as progress_module
from ed_trainers.figures.header import format_count, format_header
from ed_trainers.figures.progress import Progress, format_duration
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


def test_without_a_terminal_a_line_appears_every_ten_seconds(capsys, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: clock.now)
    bar = Progress("rich", total=100)
    for step in range(1, 101):
        clock.now += 3.0
        figures = {"loss": 1.0} if step % 50 == 0 or bar.is_line_due() else None
        bar.step(step, figures)
        if step in (1, 50, 51, 100):
            bar.row({"step": step, "loss": 1.0})
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0] for line in lines] == [
        f"step {step}" for step in (*range(1, 100, 4), 100)
    ]
    assert lines[1] == "step 5/100  loss 1.0000  5 min left"
    assert lines[-2:] == ["step 97/100  loss 1.0000  9 s left", "step 100/100  loss 1.0000"]


def test_durations_and_counts_have_their_largest_units():
    durations = [format_duration(seconds) for seconds in (0.2, 90, 91, 3600, 12_000, 180_000)]
    assert durations == ["1 s", "90 s", "2 min", "1 h", "3 h 20 min", "2 d 2 h"]
    counts = [format_count(count) for count in (12, 4_880, 134.5e6, 1.72e9, 2e12)]
    assert counts == ["12", "4.88k", "134M", "1.72B", "2T"]


def test_the_header_names_model_data_steps_devices_and_directory(toy, tmp_path):
    model = toy.model()
    arguments = arguments_class("sft")(
        save_directory=str(tmp_path / "run"),
        total_batch_size=8,
        frozen_parameters="lm_head|embed",
    )
    trainer = trainer_class("sft")(arguments, model, toy.loader(steps=5))
    state = trainer._first_state()
    header = format_header(trainer.method, state, Feed(toy.loader(steps=5)), 20, None, 3.0)
    lines = dict(line.split(maxsplit=1) for line in header.splitlines())
    assert [*lines] == ["model", "data", "steps", "devices", "directory", "time"]
    assert type(model).__name__ in lines["model"] and "trains" in lines["model"]
    assert "40 rows in an epoch" in lines["data"] and lines["steps"].startswith("20 (4 epochs)")
    assert "float32" in lines["devices"] and lines["directory"] == str(tmp_path / "run")
    assert lines["time"] == "about 60 s left"


@pytest.mark.nightly
def test_the_header_precedes_the_first_compilation(toy, tmp_path, capsys):
    arguments = arguments_class("sft")(
        save_directory=str(tmp_path),
        total_batch_size=8,
        max_training_steps=1,
        use_tensorboard=False,
        do_last_save=False,
    )
    printed = []

    class Watch(Callback):
        def on_train_begin(self, trainer, step):
            printed.append(capsys.readouterr().out)

    trainer_class("sft")(arguments, toy.model(), toy.loader(), callbacks=[Watch()]).train()
    assert printed[0].startswith("model ") and "directory" in printed[0]
