"""Methods that train on sampled completions: generations, steps, checkpoints, meshes."""

from __future__ import annotations

import functools
import json

import jax
import numpy as np
import pytest
from ed_infra.errors import CheckpointError, ConfigError
from ed_trainers.arguments import arguments_class
from ed_trainers.online.phase import HELD_OUT
from ed_trainers.rewards import RewardError
from method_runs import StopAt, near, near_reports, rows_of
from online_runs import NEW, Prompts, even, one_step, online, phase_of

GROUPS = ("grpo", "gspo", "gfpo", "rloo", "rlvr")


@pytest.fixture(scope="module")
def whole(toy_of_module, tmp_path_factory):
    """A run of two generations of two steps, each learned from twice, to its end."""
    directory = tmp_path_factory.mktemp("whole")
    run = reused(toy_of_module, directory)
    return run, run.train(), rows_of(directory)


@pytest.fixture(scope="module")
def toy_of_module(toy):
    return toy.model


def reused(toy, directory, **given):
    options = {"steps_per_generation": 2, "num_iterations": 2, "num_train_epochs": 1}
    options |= {"epsilon": 0.01, "learning_rate": 3.0}
    return online("grpo", toy(), directory, generations=2, **options, **given)


def test_a_generation_lasts_several_steps(whole):
    run, output, rows = whole
    assert output.metrics["steps"] == 8 == run.total_steps
    assert run.feed.dataset.asked == [0, 1]
    assert run.method.rollout.versions == [0, 4]
    assert [row["step"] for row in rows] == list(range(1, 9))
    # The first step of a generation is on the policy; then the ratios move.
    ratios = [row["clip_ratio/region_mean"] for row in rows]
    assert ratios[0] == 0 == ratios[4] and max(ratios) > 0
    assert all(abs(row["sampling/importance_sampling_ratio/mean"] - 1) < 1e-4 for row in rows)
    lengths = {row["completions/mean_length"] for row in rows[:4]}
    assert len(lengths) == 1 and rows[0]["rollout_tokens"] == 16 * lengths.pop()


@pytest.mark.nightly
@pytest.mark.parametrize("step", [3, 4])
def test_stopped_in_a_generation_and_resumed(toy_of_module, whole, tmp_path, step):
    """The checkpoint contains sampled rows; between generations there are none."""
    _, output, rows = whole
    first = reused(toy_of_module, tmp_path, callbacks=[StopAt(step - 1)])
    assert first.train().stopped_by == "the test"
    second = reused(toy_of_module, tmp_path)
    resumed = second.train()
    assert rows_of(tmp_path) == rows
    logged = [(row["step"], row["generation"]) for row in read_completions(tmp_path)]
    assert logged == [(1, 0)] * 16 + [(5, 1)] * 16
    assert second.method.rollout.versions == [4]
    left, right = (jax.tree.leaves(out.state.graphstate) for out in (resumed, output))
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.nightly
def test_a_reward_function_that_fails_leaves_the_checkpoint(toy_of_module, tmp_path):
    asked = []

    def breaks(completion_ids):
        asked.append(len(completion_ids))
        return [1.0] if len(asked) == 3 else even(completion_ids)

    given = {"save_steps": 1, "beta": 0.0, "rewards": [breaks], "num_train_epochs": 1}
    run = online("grpo", toy_of_module(), tmp_path, **given)
    with pytest.raises(RewardError, match="'breaks' gave 1 values for 8 completions"):
        run.train()
    again = online("grpo", toy_of_module(), tmp_path, **given)
    assert again.train().metrics["steps"] == again.total_steps == 4
    assert again.method.rollout.versions == [2, 3]
    changed = online("grpo", toy_of_module(), tmp_path, num_iterations=2, **given)
    with pytest.raises(CheckpointError, match="num_iterations 1, now it is 2"):
        changed.train()


@pytest.fixture(scope="module")
def plain(toy_of_module):
    return functools.cache(
        lambda method: one_step(method, toy_of_module(), num_iterations=2, beta=0.1)
    )


@pytest.mark.nightly
def test_presets_of_grpo_are_grpo_with_the_settings_of_their_papers(toy_of_module):
    for given in ({}, {"beta": 0.1, "epsilon": 0.01, "epsilon_high": None}):
        settings = {"beta": 0.0, "epsilon": 3e-4, "epsilon_high": 4e-4, **given}
        left = one_step("gspo", toy_of_module(), num_iterations=2, **given)
        right = one_step("grpo", toy_of_module(), num_iterations=2, loss_type="gspo", **settings)
        near(left[0], right[0], 0)
        assert left[1] == right[1]
    left, right = (one_step(method, toy_of_module(), beta=0.1) for method in ("gfpo", "grpo"))
    near(left[0], right[0], 0)
    assert left[1] == right[1], "without num_remains_in_group nothing is filtered"


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["grpo", "gfpo", "rloo", "sdpo"])
def test_step_of_prompts_equals_the_step_of_their_completions(toy_of_module, method):
    given = {"num_return_sequences": 4, "rows": 8, "accumulation": 2}
    if method == "gfpo":
        given |= {"num_remains_in_group": 2, "rows": 4}
    left = one_step(method, toy_of_module(), **given)
    right = one_step(method, toy_of_module(), **{**given, "rows": 2}, batch_unit="prompts")
    near(left[0], right[0], 0)
    assert left[1] == right[1]


@pytest.mark.nightly
def test_filtered_groups_keep_the_short_and_efficient_completions(toy_of_module, tmp_path):
    given = {"num_remains_in_group": 2, "rows": 4, "eval_dataset": Prompts(2, generations=1)}
    run = online("gfpo", toy_of_module(), tmp_path, num_return_sequences=4, **given)
    phase, options = phase_of(run), run.arguments
    assert options.loader_batch_size == 2, "two prompts with two trained completions each"
    sampled = phase.complete(run.feed.dataset.batch_at(0), run.weights(), 0)
    assert len(sampled) == 8
    rows, figures = phase.get_rows(sampled, run.weights(), 0)
    rewards = np.asarray(even(sampled.completion_ids))
    lengths = np.asarray([len(ids) for ids in sampled.completion_ids])
    efficiency = rewards / lengths
    scores = 0.5 * efficiency / efficiency.max() + 0.5 * (1 - lengths / NEW)
    kept = [
        4 * group + one
        for group in range(2)
        for one in sorted(np.argsort(-scores[4 * group :][:4], kind="stable")[:2])
    ]
    np.testing.assert_allclose(rows["rewards"], rewards[kept], rtol=1e-6)
    of_groups = rewards[kept].reshape(2, 2)
    wanted = (of_groups - of_groups.mean(1, keepdims=True)) / (
        of_groups.std(1, ddof=1, keepdims=True) + 1e-4
    )
    np.testing.assert_allclose(rows["advantages"], wanted.reshape(-1), atol=1e-5)
    for row, number in enumerate(kept):
        own = sampled.prompt_ids[number] + sampled.completion_ids[number]
        assert rows["input_ids"][row, : len(own)].tolist() == own
    assert figures["rewards/even/mean"] == pytest.approx(rewards.mean()), "of all completions"
    assert figures["completions/mean_trained_length"] == lengths[kept].mean()
    held_out = phase.generate(run.feed.dataset.batch_at(0), run.weights(), HELD_OUT)
    assert len(held_out.rows["rewards"]) == 8, "an evaluation counts all completions"
    assert 0 <= run.evaluate()["eval_reward"] <= 1


def test_a_completion_without_a_reward_remains_last(toy_of_module, tmp_path):
    def half(completion_ids):
        return [None if i % 4 < 2 else 0.1 for i in range(len(completion_ids))]

    given = {"num_remains_in_group": 3, "rows": 6, "rewards": (half,)}
    run = online("gfpo", toy_of_module(), tmp_path, num_return_sequences=4, **given)
    rows = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    np.testing.assert_array_equal(rows["scored"].reshape(2, 3).sum(1), [2, 2])


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["grpo", pytest.param("rloo", marks=pytest.mark.nightly)])
def test_microbatches_on_a_mesh_equal_one_batch_on_a_device(toy_of_module, plain, method):
    moved, report = plain(method)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4, "or nothing is tested"
    model = toy_of_module((2, 2, 1, 2, 1))
    other, other_report = one_step(method, model, 2, num_iterations=2, beta=0.1)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("method", GROUPS)
@pytest.mark.parametrize(
    ("dims", "accumulation"),
    [
        ((1, 1, 1, 1, 1), 2),
        ((1, 1, 1, 1, 1), 8),
        ((8, 1, 1, 1, 1), 1),
        ((1, 8, 1, 1, 1), 1),
        ((1, 4, 1, 2, 1), 2),
        ((1, 2, 1, 1, 4), 4),
    ],
    ids=str,
)
def test_every_mesh_and_accumulation_equals_one_device(
    toy_of_module, plain, method, dims, accumulation
):
    moved, report = plain(method)
    model = toy_of_module(dims)
    other, other_report = one_step(method, model, accumulation, num_iterations=2, beta=0.1)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
def test_adaptive_entropy_continues_at_a_checkpoint(toy_of_module, tmp_path):
    given = {
        "use_adaptive_entropy": True,
        "entropy_target": 9.0,
        "entropy_coef": 0.1,
        "num_iterations": 2,
        "num_train_epochs": 1,
    }

    def begin(path, **more):
        return online("grpo", toy_of_module(), path, generations=2, **given, **more)

    begin(tmp_path / "whole").train()
    whole = rows_of(tmp_path / "whole")
    assert [row["entropy_coef"] for row in whole] == pytest.approx([0.1, 0.105, 0.11, 0.115])
    assert [row["entropy_loss"] == 0 for row in whole] == [True, False, False, False]
    first = begin(tmp_path / "halves", callbacks=[StopAt(2)])
    assert first.train().stopped_by == "the test"
    begin(tmp_path / "halves").train()
    rows = rows_of(tmp_path / "halves")
    for name in ("loss", "entropy_coef", "entropy_loss"):
        assert [row[name] for row in rows] == [row[name] for row in whole], name


@pytest.mark.nightly
@pytest.mark.parametrize(
    "loss_type", ["grpo", "dr_grpo", "bnpo", "gspo", "cispo", "luspo", "sapo", "vespo"]
)
def test_microbatches_equal_one_batch_for_every_loss(toy_of_module, loss_type):
    moved, report = one_step("grpo", toy_of_module(), loss_type=loss_type)
    other, other_report = one_step("grpo", toy_of_module(), 4, loss_type=loss_type)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
def test_chunks_equal_the_whole_and_full_logits_are_nowhere(toy_of_module, plain):
    moved, _ = plain("grpo")
    given = {"num_iterations": 2, "beta": 0.1, "lmhead_chunksize": 7}
    near(one_step("grpo", toy_of_module(), **given)[0], moved, 2e-5)
    run = online("grpo", toy_of_module(), "unused", lmhead_chunksize=7, beta=0.1)
    batch = phase_of(run).generate(run.feed.dataset.batch_at(0), run.weights(), 0).rows
    graphdef, params, other = run.model.split_module()

    def objective(params):
        from ed_trainers import Models
        from flax import nnx

        models = Models(nnx.merge(graphdef, params, other), {})
        return run.loss(models, run.prepare(batch), None).sums["main_loss"].sum

    text = str(jax.make_jaxpr(jax.grad(objective))(params))
    assert "f32[7,32]" in text
    assert "f32[56,32]" not in text and "f32[8,7,32]" not in text


@pytest.mark.nightly
def test_held_out_prompts_are_completed_and_scored(toy_of_module, tmp_path):
    run = online(
        "grpo",
        toy_of_module(),
        tmp_path,
        max_training_steps=12,
        optimizer="adamw",
        learning_rate=0.05,
        num_return_sequences=8,
        rows=64,
        beta=0.0,
        eval_dataset=Prompts(3, generations=2, seed=7),
    )
    before = run.evaluate()["eval_reward"]
    after = run.train().metrics["eval_reward"]
    assert 0.3 < before < 0.7 and after > 0.9, "the share of even tokens rises"


def test_invalid_online_setup_raises_config_error(toy_of_module, tmp_path):
    run = online("grpo", toy_of_module(), tmp_path, beta=0.0)
    with pytest.raises(ConfigError, match="requires batches of prompts, not dict"):
        phase_of(run).generate({"input_ids": np.zeros((2, 4))}, run.weights(), 0)
    with pytest.raises(ConfigError, match=r"16 rows, but 8 completions .* is 8: .*have 2 prompts"):
        run.feed.shuffle_rows(phase_of(run).generate(Prompts(4).batch_at(0), run.weights(), 0))
    run.method.rollout = None
    with pytest.raises(ConfigError, match="needs a rollout that completes prompts"):
        phase_of(run).generate(Prompts(2).batch_at(0), run.weights(), 0)
    with pytest.raises(ConfigError, match="needs rewards: set reward_functions"):
        online("grpo", toy_of_module(), tmp_path, rewards=())
    with pytest.raises(ConfigError, match="3 reward_weights for 1 rewards"):
        online("grpo", toy_of_module(), tmp_path, reward_weights=[1, 2, 3])
    with pytest.raises(ConfigError, match="with beta 0 no reference is read"):
        online("grpo", toy_of_module(), tmp_path, beta=0, frozen={"reference": toy_of_module()})


def test_options_that_contradict_each_other():
    from pydantic import ValidationError

    for given, words in [
        ({"total_batch_size": 6}, "not a multiple of num_return_sequences 4"),
        ({"loss_type": "gspo", "importance_sampling_level": "token"}, "a ratio for each"),
        ({"delta": 1.1}, "not above"),
        ({"loss_type": "cispo", "delta": 9.0}, "omit delta"),
        ({"loss_type": "sapo", "delta": 9.0}, "omit delta"),
        (
            {"loss_type": "vespo", "importance_sampling_correction": "sequence_mask"},
            "use token_truncate",
        ),
        ({"reward_functions": ["exact"], "reward_weights": [1, 2, 3]}, "one more for a reward"),
        ({"reward_functions": [{"exact": {}, "number": {}}]}, "is not a reward function"),
        ({"loss_type": "grpoo"}, "did you mean 'grpo'"),
        ({"group_size": 4, "num_generations": 4}, "two names of one option"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class("grpo")(**given)
    for method, given, words in [
        ("gspo", {"importance_sampling_level": "token"}, "omit it, or use grpo"),
        ("gfpo", {"num_remains_in_group": 4}, "use fewer than num_return_sequences"),
        ("gfpo", {"num_remains_in_group": 1}, "greater than or equal to 2"),
        ("gfpo", {"num_remains_in_group": 3, "total_batch_size": 8}, "num_remains_in_group 3"),
        ("gfpo", {"filter_by_length": False, "filter_by_efficiency": False}, "or use grpo"),
        ("on_policy_distillation", {"lmbda": 0.5}, "omit lmbda, or use gkd"),
        ("sparse_distillation", {"loss_top_k": 0}, "greater than or equal to 1"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class(method)(**given)
    assert ("trainer_type", "num_remains_in_group is not set: nothing is filtered, as in grpo") in (
        arguments_class("gfpo")().idle()
    )
    assert arguments_class("sparse-distillation")(top_k_teacher=3).loss_top_k == 3
    assert arguments_class("Nash-MD") is arguments_class("nash_md")
    assert arguments_class("grpo")(kl_coef=0.3, group_size=8).beta == 0.3
    assert arguments_class("rlvr")(reward_funcs="exact").reward_functions == ("exact",)


def read_completions(directory):
    lines = (directory / "completions.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.nightly
@pytest.mark.proves("num_completions_to_log")
def test_completions_with_rewards_are_logged_once_per_generation(toy_of_module, tmp_path, capsys):
    def second(completion_ids):
        return [None if ids[0] % 2 else 2.0 for ids in completion_ids]

    given = {"rewards": [even, second], "num_completions_to_log": 3, "progress_bar_type": "rich"}
    run = reused(toy_of_module, tmp_path, **given, max_training_steps=2)
    run.train()
    rows = read_completions(tmp_path)
    assert [(row["step"], row["generation"]) for row in rows] == [(1, 0)] * 3
    for row in rows:
        values = row["rewards"]
        assert list(values) == ["even", "second"] and values["second"] in (None, 2.0)
        assert row["reward"] == values["even"] + (values["second"] or 0)
        assert len(row["completion"]) == row["tokens"]
    printed = [line for line in capsys.readouterr().out.splitlines() if " continues " in line]
    highest, lowest = max(row["reward"] for row in rows), min(row["reward"] for row in rows)
    texts = [f"step 1: reward {value:.4g}: " for value in (highest, lowest)]
    assert [line[: len(text)] for line, text in zip(printed, texts, strict=True)] == texts
