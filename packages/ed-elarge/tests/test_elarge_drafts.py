"""A trained draft: the trainer's evaluation and the engine count the same steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from ed_esurge import SamplingParams, eSurge
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.methods.draft import DraftTrainer, compute_length
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.options.distillation import DraftArguments

PROMPT, NEW = 5, 24


class Prompts:
    """Prompts of a step: the beginnings of eight sequences, with other numbers at each step."""

    def __init__(self, step: int) -> None:
        random = np.random.default_rng(step)
        self.input_ids = [random.integers(3, 90, PROMPT).tolist() for _ in range(8)]


class Rows:
    """A loader of prompts, from a first step."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.steps_per_epoch = first, steps

    def batch_at(self, step: int) -> Prompts:
        return Prompts(self.first + step % self.steps_per_epoch)


def create_model() -> Any:
    """Return a random model with an MTP layer that copies information about the next tokens."""
    fields = {**tiny_llama(vocab_size=96, initializer_range=0.06), "mtp_head": "new"}
    fields |= {"eos_token_id": 2}
    fields.pop("model_type")
    config = LlamaConfig(**fields, sharding_axis_dims=(1, 1, 1, 1, 1))
    return LlamaForCausalLM.create(config, seed=1)


def count_engine_steps(model: Any, drafts: int, vocab_size: int | None) -> list[tuple[int, int]]:
    """Return the tokens after the first one, and the steps, of each held-out prompt."""
    engine = eSurge(
        model,
        max_num_seqs=2,
        max_model_len=64,
        page_size=8,
        compile_runner=False,
        silent_mode=True,
        enable_prefix_caching=False,
        speculative_config={
            "method": "mtp",
            "num_speculative_tokens": drafts,
            "adaptive_length": False,
            "draft_vocab_size": vocab_size,
        },
    )
    params = SamplingParams(temperature=0, max_tokens=NEW, detokenize=False)
    pairs: list[tuple[int, int]] = []
    for prompt in Prompts(1000).input_ids:
        before = engine.stats()
        tokens = len(engine.generate([prompt], params)[0].outputs[0].token_ids)
        steps = int(engine.stats()["num_steps"] - before["num_steps"])
        pairs.append((tokens - 1, steps - 1))
    engine.terminate()
    return pairs


@pytest.mark.nightly
@pytest.mark.parametrize(("drafts", "vocab_size"), [(1, None), (4, 40)])
def test_evaluation_and_engine_count_the_same_steps(
    drafts: int, vocab_size: int | None, tmp_path: Any
) -> None:
    """Greedy answers to held-out prompts, after a training that makes some drafts right."""
    model = create_model()
    arguments = DraftArguments(
        num_speculative_tokens=drafts,
        draft_vocab_size=vocab_size,
        total_batch_size=8,
        max_prompt_length=PROMPT,
        max_completion_length=NEW,
        max_training_steps=60,
        num_iterations=4,
        learning_rate=5e-3,
        warmup_steps=0,
        use_tensorboard=False,
        progress_bar_type="none",
        save_directory=str(tmp_path),
    )
    trainer = DraftTrainer(
        arguments,
        model=model,
        train_dataset=Rows(0, 16),
        eval_dataset=Rows(1000, 1),
        rollout=ModelRollout(lambda learner: learner, 8),
    )
    before = trainer.evaluate()["eval_acceptance_length"]
    trained = trainer.train().state.model
    metrics = trainer.evaluate()
    assert float(trained.mtp.token_counts[...].sum()) > 0
    pairs = count_engine_steps(trained, drafts, vocab_size)
    length, error = compute_length([pair for pair in pairs if pair[1]])
    assert metrics["eval_acceptance_length"] == pytest.approx(length, rel=1e-12)
    assert metrics["eval_acceptance_length_error"] == pytest.approx(error, rel=1e-9)
    assert length > max(1.0, before)
