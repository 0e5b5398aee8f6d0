"""Online methods train on completions of the real engine."""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
import pytest
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import EngineConfig
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError, EasyDeLError
from ed_infra.specs import EasyDeLQuantizationConfig, LoraSpec
from ed_infra.testing import tiny_llama
from ed_layers.native import library
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.figures.metrics import read_metrics

PROMPT, NEW = 8, 6
ONE = (1, 1, 1, 1, 1)


class Batch(NamedTuple):
    input_ids: list[list[int]]


class Prompts:
    steps_per_epoch = 3

    def batch_at(self, step: int) -> Batch:
        random = np.random.default_rng(step)
        return Batch([random.integers(3, 256, random.integers(2, 9)).tolist() for _ in range(2)])


def small(completion_ids: list[list[int]]) -> list[float]:
    return [float(np.mean([token < 128 for token in ids])) for ids in completion_ids]


def config(**fields) -> LlamaConfig:
    given = tiny_llama(**{"num_hidden_layers": 2, "sharding_axis_dims": ONE, **fields})
    del given["model_type"]
    return LlamaConfig(**given)


def train(directory, model, method="grpo", frozen=None, **given):
    """Train for three steps; return the trainer, its output and the rows of the record."""
    arguments = arguments_class(method)(
        save_directory=str(directory),
        total_batch_size=8,
        num_return_sequences=4,
        max_prompt_length=PROMPT,
        max_completion_length=NEW,
        max_training_steps=3,
        log_steps=1,
        learning_rate=0.02,
        use_tensorboard=False,
        do_last_save=False,
        progress_bar_type="none",
        **given,
    )
    rollout = EngineRollout.of(
        model, None, EngineConfig(page_size=8, max_num_seqs=8), length=arguments.row_length
    )
    trainer = trainer_class(method)(
        arguments,
        model,
        Prompts(),
        rollout=rollout,
        reward_functions=[small],
        frozen=frozen or {},
    )
    output = trainer.train()
    return trainer, output, read_metrics(directory / "metrics.jsonl")


def checked(rows):
    """Check that the engine's log-probabilities equal the trainer's at each step."""
    assert len(rows) == 3 and rows[0]["kl"] == pytest.approx(0, abs=1e-6) and rows[2]["kl"] > 1e-6
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["rollout_tokens"] > 0


@pytest.mark.nightly
def test_adapter_training_uses_base_model_as_reference(tmp_path):
    model = LlamaForCausalLM.create(config(scan_layers=True), seed=0)
    model = model.apply_lora(LoraSpec(rank=4), seed=1)
    trainer, _, rows = train(tmp_path, model)
    assert trainer.method.frozen.leaves == (), "no second copy of the weights"
    checked(rows)
    with pytest.raises(EasyDeLError, match="weights"):
        trainer.rollout.engine.generate([[3, 4]])


SAMPLINGS = [
    {"temperature": 0.7},
    {"temperature": 0.5, "top_p": 0.9},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.nightly
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_engine_and_trainer_compute_same_sampling_logprobs(tmp_path, sampling):
    model = LlamaForCausalLM.create(config(initializer_range=0.3), seed=0)
    rows = train(tmp_path, model, beta=0.0, **sampling)[2]
    for row in rows:
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        assert row["sampling/importance_sampling_ratio/min"] > 1 - 1e-3
        assert row["sampling/importance_sampling_ratio/max"] < 1 + 1e-3


@pytest.mark.nightly
@pytest.mark.skipif(library.level() is None, reason="the native library is not built")
@pytest.mark.proves("batch_invariant")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("dims", [ONE, (1, 4, 1, 2, 1)], ids=str)
def test_ratios_are_exactly_one_with_batch_invariant(tmp_path, dims, temperature):
    fields = config(batch_invariant=True, sharding_axis_dims=dims)
    model = LlamaForCausalLM.create(fields, seed=0)
    for row in train(tmp_path, model, beta=0.0, temperature=temperature)[2]:
        assert row["sampling/sampling_logp_difference/max"] == 0
        assert row["sampling/importance_sampling_ratio/min"] == 1
        assert row["sampling/importance_sampling_ratio/max"] == 1


@pytest.mark.nightly
def test_adapters_on_quantized_weights_train_online(tmp_path):
    model = LlamaForCausalLM.create(config(scan_layers=True), seed=0)
    model = model.quantize(EasyDeLQuantizationConfig("nf4", group_size=32))
    trainer, _, rows = train(tmp_path, model.apply_lora(LoraSpec(rank=4), seed=1))
    assert trainer.method.frozen.leaves == ()
    checked(rows)


@pytest.mark.nightly
def test_engine_samples_from_the_rounded_weights_of_training(tmp_path):
    """The model is rounded before the engine is created, as in a run file."""
    given = {"quantization_mode": "affine", "quantization_group_size": 16}
    spec = EasyDeLQuantizationConfig("int4", group_size=16, simulate=True)
    model = LlamaForCausalLM.create(config(scan_layers=True, initializer_range=0.3), seed=0)
    checked(train(tmp_path, model.quantize(spec), **given)[2])


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    model = LlamaForCausalLM.create(config(), seed=0)
    return train(tmp_path_factory.mktemp("one"), model)[2]


@pytest.mark.nightly
@pytest.mark.parametrize("dims", [(1, 8, 1, 1, 1), (1, 4, 1, 2, 1), (8, 1, 1, 1, 1)], ids=str)
def test_online_training_on_every_mesh_matches_one_device(on_one_device, tmp_path, dims):
    model = LlamaForCausalLM.create(config(sharding_axis_dims=dims), seed=0)
    rows = train(tmp_path, model)[2]
    checked(rows)
    for own, other in zip(rows, on_one_device, strict=True):
        # One different token would change the mean of 48 tokens by two hundredths.
        assert own["reward"] == pytest.approx(other["reward"], abs=1e-6)
        assert own["loss"] == pytest.approx(other["loss"], abs=1e-5)
        assert own["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


@pytest.mark.nightly
@pytest.mark.parametrize("method", ["grpo", "gspo", "gfpo", "rloo", "rlvr"])
def test_online_training_with_scanned_model_matches_unrolled_model(tmp_path, method):
    outputs = []
    for scan in (True, False):
        model = LlamaForCausalLM.create(config(scan_layers=scan), seed=0)
        _, output, rows = train(tmp_path / str(scan), model, method)
        outputs.append((output, [row["reward"] for row in rows]))
    (left, rewards), (right, others) = outputs
    assert rewards == others
    states = (out.state.model.to_layout("leaves").split_module()[1] for out in (left, right))
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.nightly
def test_a_reward_model_scores_the_last_token(tmp_path):
    module = registry.get_module(TaskType.SEQUENCE_CLASSIFICATION, "llama")
    reward = module.create(config(num_labels=1), seed=5)
    model = LlamaForCausalLM.create(config(), seed=0)
    trainer, _, rows = train(tmp_path, model, frozen={"reward": reward}, reward_weights=[0.0, 2.0])
    checked(rows)
    phase, scorer = trainer.method.phase, trainer.method.scorer
    batch = phase.complete(Prompts().batch_at(0), trainer.weights(), number=0)
    scores = scorer.score(batch, batch.rows(PROMPT + NEW), trainer.weights())
    assert scores.names == ("small", "reward_model")
    for i, (prompt, answer) in enumerate(zip(batch.prompt_ids, batch.completion_ids, strict=True)):
        logits = reward(np.asarray([[*prompt, *answer]])).logits
        own = float(np.asarray(logits).reshape(-1)[-1])
        assert scores.rewards[i, 1] == pytest.approx(own, abs=1e-4)
        assert scores.total[i] == pytest.approx(2 * own, abs=1e-4)


@pytest.mark.nightly
def test_reward_model_with_other_vocabulary_or_short_context_is_rejected(tmp_path):
    model = LlamaForCausalLM.create(config(), seed=0)
    module = registry.get_module(TaskType.SEQUENCE_CLASSIFICATION, "llama")
    other = module.create(config(num_labels=1, vocab_size=64), seed=5)
    with pytest.raises(ConfigError, match="64 tokens, the learner 256"):
        trainer_class("grpo")(arguments_class("grpo")(), model, frozen={"reward": other})
    with pytest.raises(ConfigError, match="need up to 9000 tokens"):
        EngineRollout.of(model, None, EngineConfig(page_size=8), length=9000)
