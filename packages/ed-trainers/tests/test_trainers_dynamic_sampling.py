"""Dynamic sampling of DAPO: groups with equal rewards are replaced by further prompts."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.arguments import arguments_class
from ed_trainers.online.completions import Completions
from ed_trainers.online.dynamic_sampling import are_unequal
from method_runs import StopAt, rows_of
from online_runs import Prompts, online, phase_of
from pydantic import ValidationError

ROUNDS, GROUP = 3, 2
GIVEN = {"filter_groups": True, "max_num_gen_batches": ROUNDS, "num_return_sequences": GROUP}


@pytest.fixture(scope="module")
def model(toy):
    return toy.model


def first_is_even(completion_ids):
    """1 for a completion whose first token is even; about half of the groups of two are equal."""
    return [float(ids[0] % 2 == 0) for ids in completion_ids]


def sum_tokens(completion_ids):
    return [sum(ids) / 100 for ids in completion_ids]


def run_of(model, directory, *, generations=6, rewards=(first_is_even,), **given):
    options = {"beta": 0.0, "max_training_steps": 2, **GIVEN, **given}
    return online("grpo", model(), directory, generations=generations, rewards=rewards, **options)


def test_groups_without_two_different_rewards_are_equal():
    nan = np.nan
    groups = np.array([[1, 1, 1], [1, 0, 1], [nan, 1, nan], [nan, 1, 0], [nan, nan, nan]])
    assert are_unequal(groups).tolist() == [False, True, False, True, False]


def test_generation_has_the_first_unequal_groups_of_its_rounds(model, tmp_path):
    run = run_of(model, tmp_path, max_training_steps=1)
    phase, loader = phase_of(run), run.feed.dataset
    weights, expected, rounds = run.weights(), [], 0
    for later in range(ROUNDS):
        prompts = Prompts(loader.count, 6).batch_at(later)
        sampled = phase.sample(prompts, weights, number=0, later=later)
        rewards = np.asarray(first_is_even(sampled.completion_ids)).reshape(-1, GROUP)
        for group in np.flatnonzero(rewards.std(axis=1)):
            expected.append(sampled.completion_ids[group * GROUP : group * GROUP + GROUP])
        rounds = later + 1
        if len(expected) >= loader.count:
            break
    assert rounds > 1, "the seed of this test replaces groups"
    batch = run.feed.batch(0)
    assert loader.asked == list(range(rounds))
    found = [
        ids[np.asarray(weights_of_row) > 0].tolist()
        for ids, weights_of_row in zip(batch["targets"], batch["weights"], strict=True)
    ]
    wanted = [ids for group in expected for ids in group][: len(found)]
    assert found[: len(wanted)] == wanted and len(wanted) >= 4
    assert run.feed.figures["num_gen_batches"] == rounds
    assert run.feed.figures["frac_reward_zero_std"] == 0


def test_rounds_are_bounded_and_equal_groups_fill_the_batch(model, tmp_path):
    run = run_of(model, tmp_path, rewards=[lambda completion_ids: [1.0] * len(completion_ids)])
    batch = run.feed.batch(1)
    assert run.feed.dataset.asked == [3, 4, 5]
    assert len(batch["targets"]) == 8 and not batch["advantages"].any()
    assert run.feed.figures["num_gen_batches"] == ROUNDS
    assert run.feed.figures["frac_groups_filtered"] == 1
    assert run.feed.figures["rollout_tokens"] > batch["weights"].sum()


def test_figures_of_rewards_are_those_of_all_sampled_completions(model, tmp_path):
    run = run_of(model, tmp_path)
    batch = run.feed.batch(0)
    assert batch["rewards"].mean() == 0.5, "unequal groups of two"
    assert run.feed.figures["rewards/first_is_even/mean"] != 0.5
    assert 0 < run.feed.figures["frac_groups_filtered"] < 1


def test_metric_compares_one_of_the_rewards(model, tmp_path):
    rewards = (first_is_even, sum_tokens)
    run = run_of(model, tmp_path, rewards=rewards, filter_groups_metric="first_is_even")
    run.feed.batch(0)
    whole = run_of(model, tmp_path, rewards=rewards)
    whole.feed.batch(0)
    filtered = "frac_groups_filtered"
    assert run.feed.figures[filtered] > whole.feed.figures[filtered]
    run = run_of(model, tmp_path, filter_groups_metric="accuracy")
    with pytest.raises(ConfigError, match=r"'accuracy' is no reward: .* one of first_is_even"):
        run.feed.batch(0)


def test_held_out_prompts_are_not_replaced(model, tmp_path):
    run = run_of(model, tmp_path)
    prompts = Prompts(4, 1, seed=5)
    rows = run.prepare(prompts.batch_at(0))
    assert len(rows["targets"]) == 4 * GROUP and prompts.asked == [0]


def test_pass_over_the_data_reserves_all_rounds(model, tmp_path):
    run = run_of(model, tmp_path, generations=7, num_iterations=2)
    assert run.feed.steps_per_epoch == 2 * 2
    assert run_of(model, tmp_path, generations=2).feed.steps_per_epoch == 1


def test_options_without_effect_or_sense_are_named():
    grpo, sdpo = arguments_class("grpo"), arguments_class("sdpo")
    idle = dict(grpo(max_num_gen_batches=4).idle())
    assert idle["max_num_gen_batches"] == "filter_groups is false"
    with pytest.raises(ValidationError, match="never unequal"):
        sdpo(filter_groups=True, num_return_sequences=1)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["grpo", "rloo", "gfpo", "sdpo"])
def test_every_method_with_groups_replaces_prompts(model, tmp_path, method):
    given = {"rewards": (first_is_even,), "max_training_steps": 6, "generations": 18, **GIVEN}
    if method == "gfpo":
        given |= {"num_return_sequences": 4, "num_remains_in_group": 2}
    online(method, model(), tmp_path, **given).train()
    rows = rows_of(tmp_path)
    assert all(row["num_gen_batches"] >= 1 for row in rows)
    assert any(row["frac_groups_filtered"] > 0 for row in rows)


@pytest.mark.nightly
def test_stopped_and_resumed_run_replaces_the_same_prompts(model, tmp_path):
    given = {"max_training_steps": 6, "steps_per_generation": 2, "generations": 20}
    whole = run_of(model, tmp_path / "whole", **given).train()
    for step in (2, 3):  # between two generations, and within one
        directory = tmp_path / str(step)
        first = run_of(model, directory, **given, callbacks=[StopAt(step - 1)])
        assert first.train().stopped_by == "the test"
        resumed = run_of(model, directory, **given).train()
        assert rows_of(directory) == rows_of(tmp_path / "whole")
        leaves = (jax.tree.leaves(out.state.graphstate) for out in (resumed, whole))
        for a, b in zip(*leaves, strict=True):
            np.testing.assert_array_equal(a, b)


def test_completions_of_batches_are_concatenated_with_their_encoders():
    def part(name, count, width):
        return Completions(
            prompts=[f"{name}{i}" for i in range(count)],
            prompt_ids=[[i] for i in range(count)],
            completion_ids=[[7]] * count,
            logprobs=[[0.0]] * count,
            completions=["x"] * count,
            ended=[True] * count,
            fields={name: list(range(count))},
            images={"pixels": np.ones((count, width))},
            documents=lambda: [[i] for i in range(count)],
            encode=lambda row, prompt: [len(name), row],
        )

    joined = Completions.concat([part("a", 2, 3), part("bb", 3, 5)])
    assert joined.prompts == ["a0", "a1", "bb0", "bb1", "bb2"]
    assert joined.fields == {"a": [0, 1, None, None, None], "bb": [None, None, 0, 1, 2]}
    assert joined.images["pixels"].sum(axis=1).tolist() == [3, 3, 5, 5, 5]
    assert joined.documents() == [[0], [1], [0], [1], [2]]
    chosen = joined.select([1, 4])
    assert chosen.encode(0, "p") == [1, 1] and chosen.encode(1, "p") == [2, 2]
    assert chosen.documents() == [[1], [2]]
