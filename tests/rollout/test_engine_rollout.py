"""A real engine completes prompts between training steps with the learner's weights."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from ed_elarge.engine.rollout import EngineRollout
from ed_esurge import eSurge
from ed_infra.errors import EasyDeLError
from ed_infra.testing import tiny_llama
from ed_models.conformance import forward
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers import Callback, SFTArguments, SFTTrainer
from ed_trainers.rollout import Rollout

ONE = (1, 1, 1, 1, 1)
PROMPTS = [[5, 6, 7], [9, 8], [11, 3, 4, 12]]
NEW = 5


class Rows:
    """A loader that returns the same rows at each step."""

    steps_per_epoch = 3

    def batch_at(self, step: int) -> dict[str, np.ndarray]:
        ids = np.random.default_rng(step).integers(3, 256, (4, 16)).astype(np.int32)
        places = np.broadcast_to(np.arange(16, dtype=np.int32), ids.shape)
        one = np.ones_like(ids)
        return {"input_ids": ids, "labels": ids, "segment_ids": one, "position_ids": places}


class CheckedCompletions(Callback):
    """Completes prompts after each step, and compares the completions with the model itself."""

    def __init__(self, rollout: Rollout):
        self.rollout = rollout
        self.answers: list[list[list[int]]] = []

    def on_log(self, trainer, row):
        if "loss" not in row:
            return
        weights = trainer.weights()
        params = {"max_tokens": NEW, "temperature": 0.0, "ignore_eos": True}
        sampled = self.rollout.generate(PROMPTS, params, weights)
        self.answers.append([list(one.token_ids) for one in sampled])
        for prompt, one in zip(PROMPTS, sampled, strict=True):
            whole = np.asarray([[*prompt, *one.token_ids]])
            logits = np.asarray(forward(trainer.model, input_ids=whole).logits)[0]
            logp = jax.nn.log_softmax(logits[len(prompt) - 1 : -1])
            assert np.argmax(logp, axis=-1).tolist() == list(one.token_ids)
            chosen = np.asarray(logp)[np.arange(NEW), one.token_ids]
            np.testing.assert_allclose(one.logprobs, chosen, atol=1e-5)
            assert one.weights_version == weights.version >= row["step"]


@pytest.mark.nightly
@pytest.mark.parametrize("scan_layers", [True, False], ids=["copied", "borrowed"])
def test_completions_use_current_weights_of_each_step(tmp_path, scan_layers):
    """On a CPU the engine has unrolled layers, so a scanned learner is copied for each call."""
    fields = tiny_llama(num_hidden_layers=2, scan_layers=scan_layers, sharding_axis_dims=ONE)
    del fields["model_type"]
    model = LlamaForCausalLM.create(LlamaConfig(**fields), seed=0)
    engine = eSurge(
        model.to_layout("leaves"),
        max_model_len=32,
        max_num_seqs=4,
        page_size=8,
        compile_runner=False,
        silent_mode=True,
    )
    rollout = EngineRollout(engine)
    assert isinstance(rollout, Rollout)
    checked = CheckedCompletions(rollout)
    arguments = SFTArguments(
        save_directory=str(tmp_path),
        total_batch_size=4,
        max_training_steps=3,
        log_steps=1,
        learning_rate=0.05,
        use_tensorboard=False,
        do_last_save=False,
    )
    SFTTrainer(arguments, model=model, train_dataset=Rows(), callbacks=[checked]).train()
    assert len(checked.answers) == 3
    assert checked.answers[0] != checked.answers[2], "the weights did not change"
    with pytest.raises(EasyDeLError, match="weights"):
        engine.generate(PROMPTS)
