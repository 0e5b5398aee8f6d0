"""`sdft` and `iw_opd`: the teacher's prompts, skipped tokens, and the weights of early tokens."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.arguments import arguments_class
from ed_trainers.methods.iw_opd import weigh_tokens
from method_runs import StopAt, near, near_reports, rows_of
from online_runs import Batch, Words, one_step, online, phase_of
from pydantic import ValidationError

GIVEN = {"rewards": (), "num_return_sequences": 4, "distillation_topk": 5}


@pytest.fixture(scope="module")
def toy(toy):
    return toy.model


def first_rows(run):
    batch = run.feed.dataset.batch_at(0)
    completions = phase_of(run).complete(batch, run.weights(), 0)
    return batch, completions, phase_of(run).get_rows(completions, run.weights(), 0)[0]


def test_teacher_reads_the_demonstration_and_the_same_completion(toy, tmp_path):
    template = "{privileged_context} {prompt} 30"
    given = {**GIVEN, "teacher_prompt_template": template, "max_prompt_length": 6}
    batch, completions, rows = first_rows(online("sdft", toy(), tmp_path, **given))
    for row, answer in enumerate(completions.completion_ids):
        context = batch.fields["privileged_context"][row // 4]
        prompt = Words()(f"{context} {completions.prompts[row]} 30")["input_ids"]
        length = len(prompt) + len(answer)
        assert rows["teacher_input_ids"][row, :length].tolist() == prompt + answer
        at = np.flatnonzero(rows["weights"][row])
        places = rows["teacher_places"][row, at]
        assert rows["teacher_targets"][row, places].tolist() == answer


def test_first_tokens_of_completions_are_skipped(toy, tmp_path):
    _, completions, rows = first_rows(
        online("sdft", toy(), tmp_path, num_loss_tokens_to_skip=2, **GIVEN)
    )
    lengths = [len(ids) for ids in completions.completion_ids]
    assert rows["weights"].sum(1).tolist() == [max(length - 2, 0) for length in lengths]


def test_completions_after_the_teachers_prompts_are_trained_after_the_learners(toy, tmp_path):
    run = online("sdft", toy(), tmp_path, generate_from_teacher=True, num_iterations=2, **GIVEN)
    asked = []
    generate = run.method.rollout.generate
    run.method.rollout.generate = lambda ids, *a, **k: asked.extend(ids) or generate(ids, *a, **k)
    batch, completions, rows = first_rows(run)
    own = [list(ids) for ids in batch.input_ids for _ in range(4)]
    assert completions.prompt_ids == own and "old_logps" not in rows
    for ids, prompt, context in zip(
        asked, own, np.repeat(batch.fields["privileged_context"], 4), strict=True
    ):
        assert ids == [*prompt, int(context)][-3:]


def test_rows_without_a_demonstration_are_refused(toy, tmp_path):
    run = online("sdft", toy(), tmp_path, **GIVEN)
    batch = run.feed.dataset.batch_at(0)
    run.feed.dataset.batch_at = lambda step: batch._replace(fields={})
    with pytest.raises(ConfigError, match="reads a demonstration from the field"):
        first_rows(run)
    run.feed.dataset.batch_at = lambda step: Batch(batch.input_ids, batch.fields)
    with pytest.raises(ConfigError, match="neither a text nor a chat"):
        first_rows(run)


def test_options_that_contradict_each_other():
    for given, words in [
        ({"distillation_mode": "sampled_token"}, "set distillation_alpha to 1"),
        ({"distillation_mode": "full_logits", "distillation_topk": 5}, "only distillation_mode"),
        ({"teacher_prompt_template": "{prompt}"}, "must have the fields"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class("sdft")(**given)
    idle = dict(arguments_class("sdft")(generate_from_teacher=True).idle())
    assert {*idle} == {"teacher_update_rate", "teacher_sync_steps", "distillation_is_clip"}
    assert arguments_class("sdft")().support.top_k == 100
    assert arguments_class("sdft")(num_generations=2).rows_per_prompt == 2


def test_weights_of_tokens_fall_with_the_earlier_advantages():
    advantages = np.array([[0.0, 1.0, -3.0, 0.0, 4.0], [0.0, 0.0, 0.0, 0.0, 0.0]])
    weights = weigh_tokens(advantages, 0.5, 1e-8)
    np.testing.assert_allclose(weights[0], 1 + 0.5 * (1 - np.array([0, 0, 1, 4, 4]) / 8))
    np.testing.assert_array_equal(weights[1], 1.5)
    np.testing.assert_array_equal(weigh_tokens(advantages, 0.0, 1e-8), 1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", ["topk_logits", "full_logits", "sampled_token"])
def test_microbatches_on_a_mesh_equal_one_batch_on_a_device(toy, mode):
    def sharp(model):
        model.kernel.set_value(10 * model.kernel[...])
        return model

    size = {"topk_logits": 5}.get(mode)
    alpha = 1.0 if mode == "sampled_token" else 0.5
    given = {"rewards": (), "num_return_sequences": 4, "num_iterations": 2}
    given |= {"distillation_mode": mode, "distillation_topk": size, "distillation_alpha": alpha}
    moved, report = one_step("sdft", sharp(toy()), **given)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4, "or nothing is tested"
    other, other_report = one_step("sdft", sharp(toy((2, 2, 1, 2, 1))), 2, **given)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
def test_resumed_run_equals_uninterrupted_run(toy, tmp_path):
    def run(directory, *callbacks):
        given = {"steps_per_generation": 2, "num_iterations": 2, "num_train_epochs": 1, **GIVEN}
        given |= {"teacher_model_kind": "ema", "learning_rate": 1.0, "callbacks": callbacks}
        return online("sdft", toy(), tmp_path / directory, generations=2, **given)

    output = run("whole").train()
    assert run("parts", StopAt(2)).train().stopped_by == "the test"
    resumed = run("parts").train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(output.state), strict=True):
        np.testing.assert_array_equal(a, b)
