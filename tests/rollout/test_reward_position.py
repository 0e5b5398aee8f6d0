"""Training and scoring read a reward model at the same token of a chat."""

from __future__ import annotations

import json

import numpy as np
import pytest
from ed_data import Inform, Mixture, build_loader, build_prompts
from ed_data.schema import REWARD
from ed_infra import registry
from ed_infra.enums import TaskType
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import arguments_class, trainer_class
from ed_trainers.rollout import Sampled

from tests.parity.chat_families import ANSWER, FAMILIES, USER

WRONG = {"role": "assistant", "content": "Five, I think."}
LENGTH = 64
QUIET = {"use_tensorboard": False, "progress_bar_type": "none", "save_directory": "run"}


class FixedAnswers:
    """A rollout that completes prompts with two alternating answers, each with an end token."""

    def __init__(self, tokenizer, answers, end):
        self.ids = [
            [*tokenizer(text, add_special_tokens=False)["input_ids"], end] for text in answers
        ]

    def generate(self, prompts, params, weights, *, seeds=None):
        ids = [self.ids[i % len(self.ids)] for i in range(len(prompts))]
        return [Sampled(own, [-1.0] * len(own), weights.version) for own in ids]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["chatml", "without_end"])
def test_training_pairs_and_sampled_answers_have_equal_scores(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    row = {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    mixture = Mixture(informs=[Inform(data_files="rows.jsonl")], cache_dir="cache")
    config = tiny_llama(vocab_size=len(tokenizer), num_hidden_layers=2, sharding_axis_dims=(1,) * 5)
    del config["model_type"]
    module = registry.get_module(TaskType.SEQUENCE_CLASSIFICATION, "llama")
    reward = module.create(LlamaConfig(**config, num_labels=1), seed=5)

    pairs = build_loader(mixture, tokenizer, seq_length=LENGTH, schema=REWARD)
    learner = trainer_class("reward")(arguments_class("reward")(**QUIET), reward, pairs)
    batch = learner.prepare(pairs.batch_at(0))
    trained = []
    for side in (0, 1):
        segment = batch["segment_ids"][:, side]
        logits = reward(
            batch["input_ids"][:, side],
            segment_ids=segment,
            position_ids=batch["position_ids"][:, side],
            logits_at="all",
        ).logits
        trained.append(float(np.sum(np.asarray(logits)[..., 0] * batch["last"][:, side])))

    arguments = arguments_class("grpo")(
        total_batch_size=2,
        num_return_sequences=2,
        max_prompt_length=LENGTH // 2,
        max_completion_length=LENGTH // 2,
        **QUIET,
    )
    prompts = build_prompts(mixture, tokenizer)
    end = tokenizer.convert_tokens_to_ids(family.end or family.eos)
    sampler = trainer_class("grpo")(
        arguments,
        LlamaForCausalLM.create(LlamaConfig(**config), seed=0),
        prompts,
        None,
        tokenizer,
        rollout=FixedAnswers(tokenizer, [ANSWER["content"], WRONG["content"]], end),
        frozen={"reward": reward},
    )
    weights = sampler.weights()
    phase, scorer = sampler.method.phase, sampler.method.scorer
    completions = phase.complete(prompts.batch_at(0), weights, number=0)
    scores = scorer.score(completions, completions.rows(LENGTH), weights)
    np.testing.assert_allclose(scores.rewards[:, 0], trained, atol=1e-5)
    assert abs(trained[0] - trained[1]) > 1e-4

    # A long prompt keeps its end, as with `truncation_side="left"` of transformers.
    tokenizer.truncation_side = "left"
    cut = tokenizer.apply_chat_template(
        [USER], add_generation_prompt=True, truncation=True, max_length=6
    )["input_ids"]
    phase.options = arguments.replace(max_prompt_length=6)
    completions = phase.complete(prompts.batch_at(0), weights, number=0)
    assert completions.prompt_ids == [cut, cut]
