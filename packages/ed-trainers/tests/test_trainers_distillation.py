"""Students learn from teachers: most of the gap closes; answers are learned as they are given."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer, arguments_class, trainer_class
from method_runs import documents, one_step, packed

QUIET = {"use_tensorboard": False, "do_last_save": False, "total_batch_size": 8, "log_steps": 50}


def test_most_of_the_gap_closes(toy, tmp_path):
    held_out = toy.loader(steps=4, seed=9)

    def loss(model):
        return SFTTrainer(SFTArguments(), model, None, held_out).evaluate()["eval_loss"]

    teacher = toy.model(seed=5)
    arguments = SFTArguments(
        save_directory=str(tmp_path / "teacher"),
        max_training_steps=150,
        learning_rate=3e-2,
        **QUIET,
    )
    SFTTrainer(arguments, teacher, toy.loader()).train()
    student = toy.model(seed=1)
    start, best = loss(student), loss(teacher)
    assert start - best > 0.5, "or there is no gap"
    distilled = arguments_class("distillation")(
        save_directory=str(tmp_path / "student"),
        max_training_steps=150,
        learning_rate=3e-2,
        alpha=1.0,
        **QUIET,
    )
    trainer = trainer_class("distillation")(
        distilled, student, toy.loader(seed=4), frozen={"teacher": teacher}
    )
    trainer.train()
    assert (start - loss(trainer.model)) / (start - best) > 0.8


def test_hidden_states_are_compared_layer_by_layer():
    def model(layers, seed, **given):
        config = LlamaConfig(
            **{
                "vocab_size": 32,
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "num_hidden_layers": layers,
                "sharding_axis_dims": (1, 1, 1, 1, 1),
                **given,
            }
        )
        return LlamaForCausalLM.create(config, seed=seed)

    random = np.random.default_rng(0)
    batch = packed([documents(random, 2, good=[True, True]) for _ in range(2)])

    def distance(**given):
        options = {"hidden_state_loss_weight": 0.5, **given}
        frozen = {"teacher": model(4, 1)}
        return one_step("distillation", model(2, 0), batch, frozen=frozen, **options)[1]

    both = distance()
    first, last = distance(hidden_state_layers=[1]), distance(hidden_state_layers=[2])
    mean = (first["hidden_state_loss"] + last["hidden_state_loss"]) / 2
    assert both["hidden_state_loss"] == pytest.approx(mean, rel=1e-5)
    assert first["hidden_state_loss"] != pytest.approx(last["hidden_state_loss"])
    with pytest.raises(ConfigError, match="the student has 2 layers"):
        distance(hidden_state_layers=[3])
    frozen = {"teacher": model(2, 1, hidden_size=8)}
    with pytest.raises(ConfigError, match="models of equal width"):
        one_step("distillation", model(2, 0), batch, frozen=frozen, hidden_state_loss_weight=1.0)


def test_the_teachers_answers_are_the_rows(toy):
    asked = []

    class Teacher(toy.Model):
        def generate(self, ids, *, attention_mask, max_new_tokens):
            asked.append((ids, attention_mask))
            answers = np.tile([[7, 8, 2, 0]], (len(ids), 1))  # 2 ends it
            answers[0] = [9, 9, 9, 9]
            return SimpleNamespace(sequences=np.concatenate([ids, answers], axis=1))

    config = toy.Config()
    config.eos_token_id = 2
    arguments = arguments_class("seq_kd")(
        total_batch_size=2, max_prompt_length=3, max_completion_length=4
    )
    trainer = trainer_class("seq_kd")(arguments, toy.model(), frozen={"teacher": Teacher(config)})
    assert not trainer.method.frozen.leaves, "the steps hold no teacher"
    batch = SimpleNamespace(input_ids=[[4, 5, 6, 10], [11]])
    rows = trainer.prepare(batch)
    np.testing.assert_array_equal(asked[0][0], [[5, 6, 10], [0, 0, 11]])
    np.testing.assert_array_equal(asked[0][1], [[1, 1, 1], [0, 0, 1]])
    np.testing.assert_array_equal(
        rows["input_ids"], [[5, 6, 10, 9, 9, 9, 9], [11, 7, 8, 2, 0, 0, 0]]
    )
    np.testing.assert_array_equal(rows["weights"], [[0, 0, 1, 1, 1, 1, 0], [1, 1, 1, 0, 0, 0, 0]])
    trainer.prepare(batch)
    assert len(asked) == 1, "a prompt is answered once"
