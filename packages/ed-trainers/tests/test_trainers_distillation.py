"""Distillation closes most of the gap to the teacher, and trains on the given answers."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_layers.attention.kernels.vanilla import Watched, attention_weights
from ed_layers.attention.scoring import Scoring
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import SFTArguments, SFTTrainer, arguments_class, trainer_class
from ed_trainers.losses.attention import attention_divergences
from method_runs import documents, near_reports, one_step, packed

QUIET = {"use_tensorboard": False, "do_last_save": False, "total_batch_size": 8, "log_steps": 50}


@pytest.mark.nightly
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


def llama(layers, seed, **given):
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


def rows():
    random = np.random.default_rng(0)
    return packed([documents(random, 2, good=[True, True]) for _ in range(2)])


@pytest.mark.nightly
def test_hidden_states_are_compared_layer_by_layer():
    batch = rows()

    def distance(**given):
        options = {"hidden_state_loss_weight": 0.5, **given}
        frozen = {"teacher": llama(4, 1)}
        return one_step("distillation", llama(2, 0), batch, frozen=frozen, **options)[1]

    both = distance()
    first, last = distance(hidden_state_layers=[1]), distance(hidden_state_layers=[2])
    mean = (first["hidden_state_loss"] + last["hidden_state_loss"]) / 2
    assert both["hidden_state_loss"] == pytest.approx(mean, rel=1e-5)
    assert first["hidden_state_loss"] != pytest.approx(last["hidden_state_loss"])
    with pytest.raises(ConfigError, match="the student has 2 layers"):
        distance(hidden_state_layers=[3])
    frozen = {"teacher": llama(2, 1, hidden_size=8)}
    with pytest.raises(ConfigError, match="models of equal width"):
        one_step("distillation", llama(2, 0), batch, frozen=frozen, hidden_state_loss_weight=1.0)


@pytest.mark.nightly
def test_attention_is_compared_in_any_storage_of_layers_on_any_mesh():
    batch = rows()

    def step(layers=None, scan=True, dims=(1, 1, 1, 1, 1), **teacher):
        both = {"initializer_range": 0.5, "scan_layers": scan, "sharding_axis_dims": dims}
        frozen = {"teacher": llama(4, 1, **both, **teacher)}
        options = {"attention_loss_weight": 1.0, "attention_layers": layers}
        return one_step("distillation", llama(2, 0, **both), batch, frozen=frozen, **options)[1]

    both = step([1, 2])
    near_reports(step([1, 2], dims=(1, 2, 1, 2, 2)), both, 2e-5)
    first, last = step([1], scan=False)["attention_loss"], step(scan=False)["attention_loss"]
    assert both["attention_loss"] == pytest.approx((first + last) / 2, rel=1e-5)
    assert first != pytest.approx(last)
    assert first > 1e-3 < last
    with pytest.raises(ConfigError, match=r"attention_layers .3.: the student has 2 layers"):
        step([3])
    with pytest.raises(ConfigError, match="the teacher has 4 heads, the student 2"):
        step(num_attention_heads=4)


@pytest.mark.nightly
def test_queries_are_compared_some_at_a_time():
    keys = jax.random.split(jax.random.key(0), 4)
    segments = np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 1, 2, 2, 2]])

    def layer(q, k, heads):
        shape = (2, 8, heads, 4)
        sides = jax.random.normal(q, shape), jax.random.normal(k, (2, 8, 1, 4))
        return Watched(*sides, MaskInfo.from_segments(segments), Scoring(0.5))

    student, teacher = layer(*keys[:2], 2), layer(*keys[2:], 2)

    @jax.jit
    def weights(q):
        return [attention_weights(side) for side in (student._replace(q=q), teacher)]

    @partial(jax.jit, static_argnums=1)
    def divergences(q, queries):
        def total(q):
            found = attention_divergences(student._replace(q=q), teacher, queries=queries)
            return jnp.sum(found), found

        return jax.grad(total, has_aux=True)(q)

    own, other = map(np.asarray, weights(student.q))
    here = other > 0
    ratio = np.log(other, where=here, out=np.zeros_like(other))
    ratio -= np.log(own, where=here, out=np.zeros_like(own))
    slopes, found = divergences(student.q, 8)
    np.testing.assert_allclose(found, (other * ratio).sum(-1).mean(1), atol=1e-6)
    for left, right in zip(divergences(student.q, 3), (slopes, found), strict=True):
        np.testing.assert_allclose(left, right, atol=1e-6)


@pytest.mark.nightly
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
