"""`sdpo`: the teacher and its prompts, steps on every mesh, resumed runs."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_trainers.arguments import arguments_class
from method_runs import StopAt, near, near_reports, rows_of
from online_runs import NEW, Prompts, Words, Written, one_step, online, phase_of
from pydantic import ValidationError

SUCCESS = {"success_reward_threshold": 0.5}
MODES = {
    "sampled_token": {},
    "full_logits": {"distillation_mode": "full_logits", "distillation_alpha": 0.5},
    "topk_logits": {
        "distillation_mode": "topk_logits",
        "distillation_topk": 5,
        "distillation_add_tail": True,
        "distillation_weight": 0.5,
        "beta": 0.1,
    },
}


@pytest.fixture(scope="module")
def toy(toy):
    return toy.model


def sharp(model):
    """A toy whose distributions depend on the prompt; otherwise divergences are mostly rounding."""
    model.kernel.set_value(10 * model.kernel[...])
    return model


def first_rows(run):
    sampled = phase_of(run).complete(run.feed.dataset.batch_at(0), run.weights(), 0)
    return sampled, *phase_of(run).get_rows(sampled, run.weights(), 0)


def test_the_teacher_reads_another_successful_completion(toy, tmp_path):
    run = online("sdpo", toy(), tmp_path, **SUCCESS)
    sampled, rows, figures = first_rows(run)
    good = rows["rewards"] >= 0.5
    assert 0 < good.sum() < len(good), "or nothing is tested"
    for row in range(len(good)):
        start = row // 4 * 4
        others = [n for n in range(start, start + 4) if good[n] and n != row]
        assert rows["distilled"][row] == bool(others)
        answer = sampled.completion_ids[row]
        prompt = sampled.prompt_ids[row]
        if others:
            shown = Words().decode(sampled.completion_ids[others[0]], True)
            text = f"{sampled.prompts[row]}\nCorrect solution:\n\n{shown}\n\n\n\n"
            prompt = Words()(f"{text}Correctly solve the original question.\n")["input_ids"]
        length = len(prompt) + len(answer)
        assert rows["teacher_input_ids"][row, :length].tolist() == prompt + answer
        assert not rows["teacher_segment_ids"][row, length:].any()
        # The places predict the tokens of the completion in both rows.
        at = np.flatnonzero(rows["weights"][row])
        places = rows["teacher_places"][row, at]
        assert rows["teacher_targets"][row, places].tolist() == answer
    assert figures["self_distillation/reprompt_sample_fraction"] == rows["distilled"].mean()


def test_feedback_replaces_or_joins_the_successful_completion(toy, tmp_path):
    class Told(Prompts):
        def batch_at(self, step):
            batch = super().batch_at(step)
            return batch._replace(fields={**batch.fields, "privileged_context": ["31 30", None]})

    given = {"include_environment_feedback": True, "success_reward_threshold": 9.0}
    run = online("sdpo", toy(), tmp_path, **given)
    with pytest.raises(ConfigError, match="privileged_context"):
        first_rows(run)
    run.feed.dataset = Told(2, batch=Written)
    _, rows, figures = first_rows(run)
    np.testing.assert_array_equal(rows["distilled"], [1] * 4 + [0] * 4)
    assert all({31, 30} <= {*ids.tolist()} for ids in rows["teacher_input_ids"][:4])
    assert figures["self_distillation/feedback_used_fraction"] == 0.5


def test_reprompts_keep_their_last_tokens(toy, tmp_path):
    run = online("sdpo", toy(), tmp_path, max_reprompt_len=5, **SUCCESS)
    _, rows, _ = first_rows(run)
    lengths = rows["teacher_segment_ids"].sum(1)[rows["distilled"] > 0]
    assert lengths.size and lengths.max() <= 5 + NEW


def test_prompts_of_ids_are_refused(toy, tmp_path):
    run = online("sdpo", toy(), tmp_path, **SUCCESS)
    run.feed.dataset = Prompts(2)
    with pytest.raises(ConfigError, match="neither a text nor a chat"):
        first_rows(run)


@pytest.mark.nightly
@pytest.mark.parametrize("mode", MODES)
def test_microbatches_on_a_mesh_equal_one_batch_on_a_device(toy, mode):
    given = {**SUCCESS, **MODES[mode], "num_iterations": 2}
    moved, report = one_step("sdpo", sharp(toy()), **given)
    assert max(np.max(np.abs(x)) for x in jax.tree.leaves(moved)) > 1e-4, "or nothing is tested"
    other, other_report = one_step("sdpo", sharp(toy((2, 2, 1, 2, 1))), 2, **given)
    near(other, moved, 2e-5)
    near_reports(other_report, report, 2e-5)
    if mode != "sampled_token":
        near(one_step("sdpo", sharp(toy()), lmhead_chunksize=7, **given)[0], moved, 2e-5)


@pytest.mark.nightly
def test_without_distillation_a_step_is_that_of_grpo(toy):
    given = {"num_iterations": 2, "beta": 0.1}
    moved, report = one_step("sdpo", toy(), distillation_weight=0.0, **given)
    wanted, expected = one_step("grpo", toy(), **given)
    near(moved, wanted, 0)
    assert report == expected


@pytest.mark.daily("ema")
@pytest.mark.parametrize("kind", ["ema", "base", "live"])
def test_teacher_weights_follow_their_kind(toy, tmp_path, kind):
    given = {"teacher_model_kind": kind, "teacher_update_rate": 0.25, "learning_rate": 3.0}
    run = online("sdpo", toy(), tmp_path, num_train_epochs=1, generations=3, **given, **SUCCESS)
    begin = np.array(run.model.kernel[...])
    run.train()
    now = np.asarray(run.model.kernel[...])
    assert np.abs(now - begin).max() > 1e-3
    frozen = run.method.frozen
    models = frozen.merge(frozen.leaves)
    if kind == "live":
        assert not models
        return
    teacher = np.asarray(models["teacher"].kernel[...])
    if kind == "base":
        np.testing.assert_array_equal(teacher, begin)
    else:
        assert 0 < np.abs(teacher - begin).max() < np.abs(now - begin).max()


@pytest.mark.nightly
@pytest.mark.parametrize("step", [3, 4])
def test_resumed_run_equals_uninterrupted_run(toy, tmp_path, step):
    def run(directory, *callbacks):
        options = {"steps_per_generation": 2, "num_iterations": 2, "num_train_epochs": 1}
        given = {**options, **SUCCESS, "learning_rate": 1.0, "callbacks": callbacks}
        return online("sdpo", toy(), tmp_path / directory, generations=2, **given)

    output = run("whole").train()
    assert run("parts", StopAt(step - 1)).train().stopped_by == "the test"
    resumed = run("parts").train()
    assert rows_of(tmp_path / "parts") == rows_of(tmp_path / "whole")
    for a, b in zip(jax.tree.leaves(resumed.state), jax.tree.leaves(output.state), strict=True):
        np.testing.assert_array_equal(a, b)


def test_options_that_contradict_each_other():
    for given, words in [
        ({"distillation_alpha": 0.5}, "omit distillation_alpha"),
        ({"distillation_mode": "topk_logits"}, "needs distillation_topk"),
        ({"distillation_topk": 5}, "only distillation_mode topk_logits reads"),
        ({"distillation_add_tail": True}, "only distillation_mode topk_logits reads"),
        ({"sync_ref_model": True, "beta": 0.1, "distillation_weight": 0.5}, "both follow"),
        ({"use_successful_as_teacher": False}, "set one of the two"),
        ({"reprompt_template": "{prompt}"}, "must have the fields"),
        ({"solution_template": "{"}, "is no template"),
        ({"distillation_type": "js"}, "unknown distillation_type 'js'"),
        ({"num_return_sequences": 1, "distillation_weight": 0.5}, "num_return_sequences to 2"),
        ({"num_return_sequences": 1, "dont_reprompt_on_self_success": True}, "omit it, or set"),
    ]:
        with pytest.raises(ValidationError, match=words):
            arguments_class("sdpo")(**given)
    idle = dict(arguments_class("sdpo")().idle())
    assert {"epsilon", "beta", "feedback_template"} <= {*idle}
    assert "epsilon" not in dict(arguments_class("sdpo")(distillation_weight=0.5).idle())
