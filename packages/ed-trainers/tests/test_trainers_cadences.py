"""When a run begins, evaluates and saves: warm-up, epochs, minutes, and the first step."""

from __future__ import annotations

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ed_infra.errors import ConfigError
from ed_trainers import EasyDeLState, SFTArguments, SFTTrainer
from ed_trainers.arguments import idle_options
from ed_trainers.batches import Cadence, Epochs, Feed, evaluation_batches
from ed_trainers.optimizers import build_optimizer, build_schedule
from ed_trainers.optimizers.build import RateState
from ed_trainers.running import stopping
from ed_trainers.running.stopping import StopRequest
from pydantic import ValidationError
from test_trainers_loop import StopAt, exact, trainer


def test_warmup_ratio_is_the_number_of_steps_of_transformers():
    for total in (1, 7, 70, 1000):
        for ratio in (0.03, 0.1, 1.0):
            steps = math.ceil(total * ratio)  # transformers.TrainingArguments.get_warmup_steps
            assert SFTArguments(warmup_ratio=ratio).count_warmup_steps(total) == steps
    assert SFTArguments().count_warmup_steps(70) == 0
    assert SFTArguments(warmup_steps=3).count_warmup_steps(70) == 3
    idle = idle_options(SFTArguments(warmup_ratio=1.0, max_training_steps=5))
    assert [name for name, _ in idle] == ["warmup_ratio"]


@pytest.mark.nightly
@pytest.mark.parametrize("scheduler", ["none", "linear", "cosine", "wsd"])
def test_a_warmup_by_ratio_is_the_schedule_of_its_steps(scheduler):
    given = {"learning_rate": 0.5, "scheduler": scheduler}
    by_ratio = build_schedule(SFTArguments(warmup_ratio=0.1, **given), 40)(jnp.arange(40))
    by_steps = build_schedule(SFTArguments(warmup_steps=4, **given), 40)(jnp.arange(40))
    np.testing.assert_array_equal(by_ratio, by_steps)
    assert by_ratio[0] == 0.125


@pytest.mark.parametrize(
    ("given", "key", "words"),
    [
        ({"warmup_ratio": 1.1}, "warmup_ratio", "less than or equal to 1"),
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "warmup_ratio", "keep one"),
        ({"save_interval_minutes": 0}, "save_interval_minutes", "greater than 0"),
        ({"max_evaluation_steps": 0}, "max_evaluation_steps", "greater than 0"),
        ({"per_epoch_training_steps": -1}, "per_epoch_training_steps", "greater than 0"),
        ({"step_start_point": -1}, "step_start_point", "greater than or equal to 0"),
        ({"step_start_point": 9, "max_training_steps": 9}, "step_start_point", "leaves no step"),
        ({"force_step_start_point": True}, "force_step_start_point", "no effect"),
        ({"eval_strategy": "epochs"}, "eval_strategy", "'no', 'steps' or 'epoch'"),
        ({"eval_strategy": "steps"}, "eval_strategy", "needs evaluation_steps"),
        ({"save_strategy": "epoch", "save_steps": 5}, "save_strategy", "exclude each other"),
        ({"save_steps": 2.5}, "save_steps", "a share of the run below 1"),
        ({"log_steps": 0}, "log_steps", "greater than 0"),
        ({"saves_per_epoch": 2, "save_steps": 5}, "saves_per_epoch", "exclude each other"),
        ({"evals_per_epoch": 2, "eval_strategy": "no"}, "eval_strategy", "exclude each other"),
        ({"warmup_steps": 0.1, "warmup_ratio": 0.1}, "warmup_ratio", "keep one"),
        ({"frozen_parameters": "("}, "frozen_parameters", "is not a pattern"),
        ({"frozen_parameters": "a", "trainable_rules": [["b", True]]}, "frozen_parameters", "keep"),
    ],
)
def test_contradictions_of_cadences_are_errors_at_their_key(given, key, words):
    with pytest.raises(ValidationError) as caught:
        SFTArguments(**given)
    problem = caught.value.errors()[0]
    assert problem["loc"] == (key,) and words in problem["msg"]


def test_both_strategies_by_epoch_allow_the_best_checkpoint():
    assert SFTArguments(eval_strategy=False).eval_strategy == "no"  # `no` in YAML
    both = {"save_strategy": "epoch", "eval_strategy": "epoch"}
    assert SFTArguments(load_best_model_at_end=True, **both).load_best_model_at_end
    with pytest.raises(ValidationError, match="both epoch"):
        SFTArguments(load_best_model_at_end=True, save_strategy="epoch")


@pytest.mark.parametrize(
    ("given", "allowed"),
    [
        ({"save_steps": 0.2, "eval_steps": 0.1}, True),
        ({"save_steps": 0.1, "eval_steps": 0.2}, False),
        ({"save_steps": 0.2, "eval_steps": 10}, False),
        ({"saves_per_epoch": 1, "evals_per_epoch": 4}, True),
        ({"saves_per_epoch": 4, "evals_per_epoch": 2}, False),
        ({"save_strategy": "epoch", "evals_per_epoch": 3}, True),
    ],
)
def test_the_best_checkpoint_needs_an_evaluation_at_each_save(given, allowed):
    if allowed:
        assert SFTArguments(load_best_model_at_end=True, **given).load_best_model_at_end
    else:
        with pytest.raises(ValidationError, match="compares checkpoints"):
            SFTArguments(load_best_model_at_end=True, **given)


#: Options of a run of 3 epochs of 10 steps -> the steps of the task.
DUE = {
    "eval_steps 4": [4, 8, 12, 16, 20, 24, 28],
    "eval_steps 0.25": [8, 16, 24],  # ceil(30 * 0.25), as in transformers
    "save_steps 0.1": [3, 6, 9, 12, 15, 18, 21, 24, 27, 30],
    "logging_steps 0.5": [15, 30],
    "evals_per_epoch 1": [10, 20, 30],
    "evals_per_epoch 2": [5, 10, 15, 20, 25, 30],
    "saves_per_epoch 3": [4, 7, 10, 14, 17, 20, 24, 27, 30],
    "evals_per_epoch 99": list(range(1, 31)),
    "evaluation_strategy epoch": [10, 20, 30],
    "save_strategy epoch": [10, 20, 30],
    "logging_strategy epoch": [10, 20, 30],
    "eval_strategy no": [],
    "logging_strategy no": [],
}


@pytest.mark.parametrize("case", DUE)
def test_every_spelling_of_a_cadence_names_steps(toy, case):
    key, value = case.split()
    task = {"ev": "evaluation", "sa": "save", "lo": "log"}[key[:2]]
    values = {key: float(value) if value[0].isdigit() else value}
    epochs = Epochs(Feed(toy.loader(steps=10)))
    cadence = Cadence.from_arguments(task, SFTArguments(**values), 30, epochs)
    assert [step for step in range(1, 31) if cadence.is_due(step)] == DUE[case]


def test_warmup_steps_below_one_are_a_share_as_in_transformers():
    assert SFTArguments(warmup_steps=0.1).count_warmup_steps(75) == 8
    assert SFTArguments(warmup_steps=1).count_warmup_steps(75) == 1
    assert SFTArguments(warmup_steps=1.0).warmup_steps == 1


def test_epochs_end_at_the_data_or_at_their_limit(toy):
    def ends(longest, dataset, until=13):
        epochs = Epochs(Feed(dataset), longest)
        return [step for step in range(1, until) if epochs.ends_at(step)]

    assert ends(None, toy.loader(steps=5)) == [5, 10]
    assert ends(4, toy.loader(steps=5)) == [4, 8, 12]
    assert ends(9, toy.loader(steps=5)) == [5, 10]
    counted = toy.loader()
    counted.count_steps = lambda epochs: (0, 5, 9, 16)[epochs]
    assert ends(None, counted) == [5, 9]
    stream = iter([])
    assert ends(6, stream) == [6, 12]
    assert Epochs(Feed(stream), 6).count_steps(3) == 18
    with pytest.raises(ConfigError, match="set per_epoch_training_steps"):
        ends(None, stream)


def test_minutes_after_a_save_the_first_process_requests_the_next(monkeypatch):
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: clock.now)
    with StopRequest(save_interval=60.0) as stop:
        found = []
        for now in (159.0, 160.0, 170.0, 219.0, 220.0, 281.0):
            clock.now = now
            assert stop.reason is None
            if stop.take_save():
                found.append(now)
                stop.note_save()
        assert found == [160.0, 220.0, 281.0]
        monkeypatch.setattr(stopping.jax, "process_index", lambda: 1)
        clock.now = 900.0
        assert stop.reason is None and not stop.take_save(), "only the first process decides"


def test_a_start_point_moves_the_count_of_the_schedule_alone():
    state = (
        optax.ScaleByAdamState(np.int32(2), np.zeros(3), np.zeros(3)),
        {"inner": [RateState(np.int32(2))]},
        optax.ScaleByScheduleState(np.int32(2)),
    )
    moved = EasyDeLState(np.int32(2), {}, {}, state, None).at_step(6)
    assert [int(x) for x in (moved.step, moved.opt_state[0].count)] == [6, 2]
    assert [int(moved.opt_state[2].count), int(moved.opt_state[1]["inner"][0].count)] == [6, 6]


@pytest.mark.nightly
def test_updates_after_a_start_point_are_those_of_optax_with_a_later_schedule():
    params = {"kernel": jnp.ones((3,)), "norm": jnp.ones((2,))}
    grads = jax.tree.map(lambda p: 0.5 * p, params)
    given = {"learning_rate": 0.1, "scheduler": "linear", "weight_decay": 0.0}
    arguments = SFTArguments(**given)
    schedule = build_schedule(arguments, 10)
    ours = build_optimizer(arguments, schedule)
    state = EasyDeLState(jnp.int32(0), params, {}, ours.init(params), None, ours).at_step(6)
    shifted = optax.adamw(lambda count: schedule(count + 6), weight_decay=0.0)
    theirs, other = shifted.init(params), params
    for _ in range(3):
        state = state.apply_gradients(grads=grads)
        updates, theirs = shifted.update(grads, theirs, other)
        other = optax.apply_updates(other, updates)
    assert int(state.step) == 9
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), state.graphstate, other)


def test_a_limit_ends_a_pass_over_held_out_batches(toy):
    loader, rows = toy.loader(steps=3), [{"a": np.full(1, i)} for i in range(3)]
    assert [evaluation_batches(loader, limit)[1] for limit in (None, 2, 9)] == [3, 2, 3]
    assert [evaluation_batches(rows, limit)[1] for limit in (None, 2, 9)] == [3, 2, 3]
    assert evaluation_batches(iter(rows), 2)[1] == 2
    assert list(evaluation_batches(rows, 2)[0]) == rows[:2]
    assert SFTArguments(per_epoch_evaluation_steps=2).max_evaluation_steps == 2
    del loader.steps_per_epoch
    with pytest.raises(ConfigError, match="Set max_evaluation_steps"):
        evaluation_batches(loader)
    batches, count = evaluation_batches(loader, 2)
    assert count == len(list(batches)) == 2


@pytest.mark.nightly
def test_an_evaluation_reads_the_first_batches(toy, tmp_path):
    def evaluate(limit, dataset, **given):
        arguments = SFTArguments(save_directory=str(tmp_path), **{limit: 2}, **given)
        return SFTTrainer(arguments, model=toy.model(), eval_dataset=dataset).evaluate()

    expected = SFTTrainer(
        SFTArguments(save_directory=str(tmp_path)),
        model=toy.model(),
        eval_dataset=[toy.loader().batch_at(step) for step in (0, 1)],
    ).evaluate()
    endless = SimpleNamespace(batch_at=toy.loader().batch_at)
    assert evaluate("max_evaluation_steps", endless) == expected
    assert evaluate("per_epoch_evaluation_steps", [endless.batch_at(i) for i in range(5)]) == (
        expected
    )


@pytest.mark.nightly
def test_epochs_set_length_evaluations_and_checkpoints(toy, tmp_path):
    given = {"max_training_steps": None, "num_train_epochs": 3, "per_epoch_training_steps": 4}
    strategies = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    trainer(toy, tmp_path / "epoch", **given, **strategies).train()
    trainer(toy, tmp_path / "steps", evaluation_steps=4, save_steps=4).train()
    assert exact(tmp_path / "epoch") == exact(tmp_path / "steps")
    saved = [{p.name for p in (tmp_path / d / "checkpoints").iterdir()} for d in ("epoch", "steps")]
    assert saved[0] == saved[1] == {"4", "8", "12"}
    trainer(toy, tmp_path / "never", eval_strategy="no", max_training_steps=2).train()
    assert not [row for row in exact(tmp_path / "never") if "eval_loss" in row]


@pytest.mark.nightly
def test_shares_and_numbers_per_epoch_are_their_steps_in_a_run(toy, tmp_path):
    given = {"max_training_steps": None, "num_train_epochs": 3, "per_epoch_training_steps": 4}
    times = {"evals_per_epoch": 2, "saves_per_epoch": 1, "load_best_model_at_end": True}
    trainer(toy, tmp_path / "epoch", **given, **times, eval_on_start=True).train()
    best = {"load_best_model_at_end": True}
    trainer(toy, tmp_path / "share", eval_steps=0.16, save_steps=0.32, **best).train()
    trainer(toy, tmp_path / "steps", eval_steps=2, save_steps=4, **best).train()
    rows = exact(tmp_path / "epoch")
    assert rows[0]["step"] == 0 and set(rows[0]) >= {"eval_loss"}
    assert rows[1:] == exact(tmp_path / "share") == exact(tmp_path / "steps")
    for name in ("epoch", "share", "steps"):
        saved = {path.name for path in (tmp_path / name / "checkpoints").iterdir()}
        assert saved == {"4", "8", "12"}


@pytest.mark.nightly
def test_minutes_save_checkpoints_that_resume_bit_for_bit(toy, tmp_path):
    trainer(toy, tmp_path / "whole").train()
    often = {"save_interval_minutes": 1e-9, "save_total_limit": 20}
    stop = StopAt(5, lambda t: t.stop("the test"))
    trainer(toy, tmp_path / "often", callbacks=[stop], **often).train()
    names = {p.name for p in (tmp_path / "often" / "checkpoints").iterdir()}
    assert names == {"1", "2", "3", "4", "5", "6"}
    trainer(toy, tmp_path / "often", **often).train()
    assert exact(tmp_path / "often") == exact(tmp_path / "whole")


@pytest.mark.nightly
def test_a_start_point_is_a_run_over_later_batches_and_resumes(toy, tmp_path):
    plain = {"scheduler": "none", "warmup_steps": 0, "dropout": 0.0}

    class Later(toy.loader):
        def batch_at(self, step):
            return super().batch_at(step + 6)

    trainer(toy, tmp_path / "later", loader=Later(), max_training_steps=6, **plain).train()
    trainer(toy, tmp_path / "start", step_start_point=6, **plain).train()
    ours, theirs = (
        [(r["step"], r["loss"]) for r in exact(tmp_path / d) if "loss" in r]
        for d in ("start", "later")
    )
    assert ours == [(step + 6, loss) for step, loss in theirs]
    begin = {"step_start_point": 6, "evaluation_steps": 3}
    trainer(toy, tmp_path / "whole", **begin).train()
    rows = exact(tmp_path / "whole")
    schedule = build_schedule(trainer(toy, tmp_path / "x").arguments, 12)
    for row in (row for row in rows if "loss" in row):
        assert row["learning_rate"] == pytest.approx(float(schedule(row["step"] - 1)), rel=1e-5)
    assert [r["step"] for r in rows if "eval_loss" in r] == [9, 12]
    stop = StopAt(8, lambda t: t.stop("the test"))
    trainer(toy, tmp_path / "parts", callbacks=[stop], **begin).train()
    trainer(toy, tmp_path / "parts", **begin).train()
    assert exact(tmp_path / "parts") == rows


@pytest.mark.nightly
def test_a_start_point_of_a_state_that_counts_needs_force(toy, tmp_path):
    state = EasyDeLState.create(model=toy.model(), step=3)
    given = {"save_directory": str(tmp_path), "total_batch_size": 8, "max_training_steps": 9}

    def train(**options):
        arguments = SFTArguments(**given, step_start_point=7, use_tensorboard=False, **options)
        return SFTTrainer(arguments, model=state, train_dataset=toy.loader()).train()

    with pytest.raises(ConfigError, match="has done 3 steps, and step_start_point is 7"):
        train()
    assert train(force_step_start_point=True).trained_steps == 2
