"""The loop: written files, evaluation and save steps, stops, and exact resumption."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_trainers import Callback, SFTArguments, SFTTrainer, TrainingDiverged
from ed_trainers.figures.metrics import CLOCKED, read_metrics
from ed_trainers.running.stopping import StopRequest

SETTINGS = {
    "total_batch_size": 8,
    "max_training_steps": 12,
    "log_steps": 1,
    "learning_rate": 0.02,
    "scheduler": "cosine",
    "warmup_steps": 2,
    "use_tensorboard": False,
}


def trainer(
    toy, directory, *, dims=(1, 1, 1, 1, 1), loader=None, callbacks=(), dropout=0.1, **given
):
    arguments = SFTArguments(save_directory=str(directory), **{**SETTINGS, **given})
    return SFTTrainer(
        arguments,
        model=toy.model(dims, dropout=dropout),
        train_dataset=loader or toy.loader(),
        eval_dataset=toy.loader(steps=2, seed=9),
        callbacks=callbacks,
    )


def exact(directory: Path) -> list[dict]:
    """Return rows without times."""
    rows = read_metrics(Path(directory) / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in rows]


class StopAt(Callback):
    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_log(self, trainer, row):
        if row["step"] == self.step and "loss" in row:
            self.act(trainer)


def test_a_run_from_start_to_end(toy, tmp_path, capsys):
    seen = []

    class Watch(Callback):
        def on_train_begin(self, trainer, step):
            seen.append(("begin", step))

        def on_evaluate(self, trainer, metrics):
            seen.append(("evaluate", round(metrics["eval_loss"], 3)))

        def on_save(self, trainer, step):
            seen.append(("save", step))

        def on_train_end(self, trainer, step):
            seen.append(("end", step))

    run = trainer(
        toy, tmp_path, evaluation_steps=6, save_steps=4, save_total_limit=2, callbacks=[Watch()]
    )
    output = run.train()
    rows = exact(tmp_path)
    assert [r["step"] for r in rows if "loss" in r] == list(range(1, 13))
    assert [r["step"] for r in rows if "eval_loss" in r] == [6, 12]
    assert rows[-2]["loss"] < rows[0]["loss"]
    assert output.metrics["train_loss"] == rows[-2]["loss"]
    assert output.metrics["eval_loss"] == rows[-1]["eval_loss"]
    assert output.stopped_by is None
    assert output.checkpoint_path == tmp_path / "checkpoints" / "12"
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["12", "8"]
    assert (tmp_path / "model" / "config.json").exists()
    assert [kind for kind, _ in seen] == [
        "begin",
        "save",
        "evaluate",
        "save",
        "evaluate",
        "save",
        "end",
    ]
    # The model has the trained parameters: an evaluation returns the metrics of the run.
    assert run.evaluate()["eval_loss"] == output.metrics["eval_loss"]
    assert "the model is in" in capsys.readouterr().out


def test_rows_are_written_at_log_steps_and_at_both_ends(toy, tmp_path):
    trainer(toy, tmp_path, log_steps=5, max_training_steps=12).train()
    assert [r["step"] for r in exact(tmp_path) if "loss" in r] == [1, 5, 10, 12]


@pytest.mark.daily("signal")
@pytest.mark.parametrize("how", ["callback", "signal", "time"])
def test_stopped_and_resumed_equals_uninterrupted(toy, tmp_path, capsys, how):
    given = {"evaluation_steps": 5, "save_steps": 4}
    trainer(toy, tmp_path / "whole", **given).train()

    acts = {
        "callback": lambda t: t.stop("the test"),
        "signal": lambda t: os.kill(os.getpid(), signal.SIGTERM),
        "time": lambda t: None,
    }
    limit = {"training_time_limit": 1e-6} if how == "time" else {}
    first = trainer(
        toy, tmp_path / "parts", callbacks=[StopAt(4, acts[how])], **given, **limit
    ).train()
    reason = {"callback": "the test", "signal": "SIGTERM", "time": "time limit"}[how]
    assert first.stopped_by == reason
    stopped_at = int(first.checkpoint_path.name)
    # One step late: the row of step 4 is written while step 5 runs.
    assert stopped_at == (1 if how == "time" else 5)
    assert not (tmp_path / "parts" / "model").exists()
    assert "run the same command again" in capsys.readouterr().out

    second = trainer(toy, tmp_path / "parts", **given).train()
    assert f"resumed from step {stopped_at} of 12" in capsys.readouterr().out
    assert second.stopped_by is None
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")


def test_sigint_stops_a_training_in_the_background_and_nohup_ignores_sighup():
    """A shell script starts its background jobs with SIGINT ignored."""
    with signals_ignored(signal.SIGINT, signal.SIGHUP):
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.reason is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.reason == "SIGINT"
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@contextmanager
def signals_ignored(*numbers):
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_handlers_are_given_back(toy, tmp_path):
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    trainer(toy, tmp_path, max_training_steps=1).train()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_training_a_finished_run_again_changes_nothing(toy, tmp_path):
    first = trainer(toy, tmp_path).train()
    rows = exact(tmp_path)
    again = trainer(toy, tmp_path).train()
    assert exact(tmp_path) == rows
    assert again.metrics["train_loss"] == first.metrics["train_loss"]
    assert again.metrics["eval_loss"] == first.metrics["eval_loss"]
    assert again.checkpoint_path == first.checkpoint_path


@pytest.mark.nightly
def test_a_run_can_be_made_longer(toy, tmp_path, capsys):
    trainer(toy, tmp_path, max_training_steps=6).train()
    trainer(toy, tmp_path, max_training_steps=9).train()
    out = capsys.readouterr().out
    assert "resumed from step 6 of 9" in out
    assert "total steps 6 -> 9" in out
    assert [r["step"] for r in exact(tmp_path) if "loss" in r] == list(range(1, 10))


@pytest.mark.nightly
def test_resume_goes_on_on_another_mesh(toy, tmp_path):
    trainer(toy, tmp_path / "one").train()
    trainer(
        toy, tmp_path / "two", dims=(1, 8, 1, 1, 1), callbacks=[StopAt(3, lambda t: t.stop("x"))]
    ).train()
    trainer(toy, tmp_path / "two", dims=(2, 2, 1, 2, 1)).train()
    losses = [[r["loss"] for r in exact(tmp_path / d) if "loss" in r] for d in ("one", "two")]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


class Stream:
    """An iterator of batches that can be moved; shorter than the run, so that it repeats."""

    def __init__(self, loader, length):
        self.loader, self.length, self.at = loader, length, 0

    def __iter__(self):
        while self.at < self.length:
            self.at += 1
            yield self.loader.batch_at(self.at - 1)
        self.at = 0

    def __len__(self):
        return self.length

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.nightly
def test_iterator_dataset_resumes_at_saved_position(toy, tmp_path):
    def stream():
        return Stream(toy.loader(), 5)

    given = {"max_training_steps": None, "num_train_epochs": 2}
    trainer(toy, tmp_path / "whole", loader=stream(), **given).train()
    assert [r["step"] for r in exact(tmp_path / "whole") if "loss" in r] == list(range(1, 11))
    stop = StopAt(6, lambda t: t.stop("x"))
    trainer(toy, tmp_path / "parts", loader=stream(), callbacks=[stop], **given).train()
    trainer(toy, tmp_path / "parts", loader=stream(), **given).train()
    assert exact(tmp_path / "parts") == exact(tmp_path / "whole")


def test_evaluation_is_the_mean_over_tokens(toy, tmp_path):
    class Ragged:
        """One pass of batches whose numbers of rows differ."""

        def __iter__(self):
            for step, rows in enumerate((8, 8, 3)):
                yield {k: v[:rows] for k, v in toy.loader().batch_at(step).items()}

    results = []
    for rows in (None, 8, 2, 1):
        arguments = SFTArguments(save_directory=str(tmp_path), eval_batch_size=rows)
        run = SFTTrainer(arguments, model=toy.model(), eval_dataset=Ragged())
        results.append(run.evaluate())
    batches = list(Ragged())
    tokens = sum(int((b["labels"][:, 1:] != -100).sum()) for b in batches)
    assert {r["eval_tokens"] for r in results} == {tokens}
    for result in results[1:]:
        assert result["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-6)
    assert results[0]["eval_perplexity"] == pytest.approx(np.exp(results[0]["eval_loss"]))


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(toy, tmp_path):
    class Poisoned(type(toy.loader())):
        def batch_at(self, step):
            batch = super().batch_at(step)
            weight = np.inf if step == 6 else 1.0
            weights = np.full(batch["input_ids"].shape, weight, np.float32)
            return {**batch, "loss_weights": weights}

    with pytest.raises(TrainingDiverged, match=r"step 7: .*checkpoint of step 6 is intact"):
        trainer(toy, tmp_path, loader=Poisoned(), save_steps=3).train()
    steps = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir())
    assert steps == [3, 6]


@pytest.mark.nightly
def test_other_runs_are_refused_and_can_be_moved_aside(toy, tmp_path, capsys):
    trainer(toy, tmp_path).train()
    with pytest.raises(CheckpointError, match="seed 42, now it is 43"):
        trainer(toy, tmp_path, seed=43).train()
    with pytest.raises(CheckpointError, match="other data"):
        trainer(toy, tmp_path, loader=toy.loader(seed=1)).train()
    rows = exact(tmp_path)
    trainer(toy, tmp_path, seed=43, max_training_steps=2, resume_if_possible=False).train()
    assert "was moved to" in capsys.readouterr().out
    assert exact(tmp_path / "earlier-1") == rows
    assert [r["step"] for r in exact(tmp_path) if "loss" in r] == [1, 2]


def test_invalid_trainer_input_raises_config_error(toy, tmp_path):
    with pytest.raises(ConfigError, match="batches of 4 sequences, but total_batch_size is 8"):
        trainer(toy, tmp_path, loader=toy.loader(rows=4)).train()
    with pytest.raises(ConfigError, match="there is no train_dataset"):
        SFTTrainer(SFTArguments(), model=toy.model()).train()
    with pytest.raises(ConfigError, match="int has no batches"):
        SFTTrainer(SFTArguments(), model=toy.model(), train_dataset=3)
    with pytest.raises(ConfigError, match="requires SFTArguments, not dict"):
        SFTTrainer({}, model=toy.model())
    with pytest.raises(ConfigError, match="no eval_dataset"):
        SFTTrainer(SFTArguments(), model=toy.model()).evaluate()
