"""`draft`: the depths, what is trained, and the counted steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.testing import tiny_llama
from ed_models.families.llama import LlamaConfig, LlamaForCausalLM
from ed_trainers.contract import Models
from ed_trainers.methods.draft import DraftTrainer, count_accepted, count_steps
from ed_trainers.online.model_rollout import ModelRollout
from ed_trainers.options.distillation import DraftArguments
from flax import nnx
from pydantic import ValidationError

PROMPT, NEW, DEPTHS, SHORT = 4, 12, 3, 90
SIZES = {"max_prompt_length": PROMPT, "max_completion_length": NEW}


def create(**fields: Any) -> Any:
    known = {**tiny_llama(vocab_size=96, initializer_range=0.2), "mtp_head": "new", **fields}
    known.pop("model_type")
    known["eos_token_id"] = 2
    config = LlamaConfig(**known, sharding_axis_dims=(1, 1, 1, 1, 1))
    return LlamaForCausalLM.create(config, seed=1)


class Prompts:
    """Four prompts of a step."""

    def __init__(self, step: int):
        random = np.random.default_rng(step)
        self.input_ids = [random.integers(3, 90, PROMPT).tolist() for _ in range(4)]


class Rows:
    """A loader of four batches of prompts."""

    steps_per_epoch = 4

    def batch_at(self, step: int) -> Prompts:
        return Prompts(step % 4)


class HeldOut(Rows):
    """A loader of one batch of prompts."""

    steps_per_epoch = 1


def build_trainer(model: Any, folder: Path | str = "unused", **options: Any) -> DraftTrainer:
    known: dict[str, Any] = {
        "num_speculative_tokens": DEPTHS,
        "total_batch_size": 4,
        "weight_decay": 0.1,
        "warmup_steps": 0,
        "use_tensorboard": False,
        "progress_bar_type": "none",
        "save_directory": str(folder),
        **SIZES,
    }
    arguments = DraftArguments(**{**known, **options})
    rollout = ModelRollout(lambda learner: learner, 4)
    return DraftTrainer(
        arguments, model=model, train_dataset=Rows(), eval_dataset=HeldOut(), rollout=rollout
    )


def build_batch(model: Any) -> dict[str, Any]:
    """Return two rows of which the second is shorter, and the states of the model."""
    random = np.random.default_rng(0)
    ids = random.integers(3, 96, (2, PROMPT + NEW)).astype(np.int32)
    segments = np.ones_like(ids)
    ids[1, 11:], segments[1, 11:] = 0, 0
    places = np.arange(PROMPT + NEW)
    weights = ((places >= PROMPT - 1) & (places < np.array([[15], [10]]))).astype(np.float32)
    states = model(ids, segment_ids=segments, logits_at="none").last_hidden_state
    arrays = {
        "input_ids": ids,
        "segment_ids": segments,
        "position_ids": np.broadcast_to(places, ids.shape),
        "targets": np.roll(ids, -1, axis=1) * (weights > 0),
        "weights": weights,
        "states": states,
    }
    return {name: jnp.asarray(array) for name, array in arrays.items()}


class Drafts:
    """The drafts of one row by passes over the whole row, as an engine defines them."""

    def __init__(self, model: Any, batch: dict[str, Any], row: int) -> None:
        graphdef, self._state = nnx.split(model)
        self._length = int(batch["segment_ids"][row].sum())
        ids = batch["input_ids"][row : row + 1, : self._length]
        self._hidden = model(ids, logits_at="none").last_hidden_state
        embeds = model.model.embed(jnp.pad(ids[:, 1:], ((0, 0), (0, 1))), None)

        def apply_layer(state: Any, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            model = nnx.merge(graphdef, state)
            output = model.mtp(inputs_embeds=embeds, hidden=hidden).last_hidden_state
            return output, model.head()(output)[0, :, :SHORT]

        self._layer = jax.jit(apply_layer)

    def list_logits(self, start: int) -> list[jax.Array]:
        """Return the logits of each depth of the draft that starts at a position."""
        hidden, logits = self._hidden, []
        for place in range(start, min(start + DEPTHS, self._length)):
            output, scores = self._layer(self._state, hidden)
            logits.append(scores[place])
            # The next pair reads the state of the layer; later pairs are not visible.
            if place + 1 < self._length:
                hidden = hidden.at[0, place + 1].set(output[0, place])
        return logits


@pytest.mark.nightly
def test_loss_and_accepted_drafts_are_those_of_the_definition() -> None:
    model = create()
    options = {"alpha": 0.7, "depth_decay": 0.5, "draft_vocab_size": SHORT}
    trainer, batch = build_trainer(model, **options), build_batch(model)
    run: Any = trainer.method
    found = trainer.loss(Models(model), batch, None).sums["main_loss"]
    accepted = count_accepted(run, Models(model), batch)["accepted"]
    total = weight = 0.0
    for row, end in enumerate((15, 10)):
        drafts = Drafts(model, batch, row)
        ids = np.asarray(batch["input_ids"][row])
        teacher = jax.nn.log_softmax(model.head()(batch["states"][row])[:, :SHORT], axis=-1)
        # A draft starts at each position i whose token i + 2, at most `end`, is of the answer.
        for start in range(PROMPT - 2, end - 1):
            equal, is_leading = 0, True
            for depth, logits in enumerate(drafts.list_logits(start)):
                place = start + depth
                if place >= end - 1:
                    break
                student = jax.nn.log_softmax(logits, axis=-1)
                goal, target = teacher[place + 1], int(ids[place + 2])
                divergence = float(jnp.sum(jnp.exp(goal) * (goal - student)))
                nll = -float(student[target]) if target < SHORT else 0.0
                total += 0.5**depth * (0.7 * divergence + 0.3 * nll)
                weight += 0.5**depth
                is_leading &= int(logits.argmax()) == target
                equal += is_leading
            assert int(accepted[row, start]) == equal
    assert float(found.sum) == pytest.approx(total, rel=1e-4)
    assert float(found.weight) == pytest.approx(weight, rel=1e-6)


def test_steps_follow_the_accepted_drafts() -> None:
    weights = np.array([0, 1, 1, 1, 1, 1, 1, 0], np.float32)
    # The first token is that of the prompt's step. Its drafts start at position 1.
    assert count_steps(np.array([0, 2, 0, 0, 0, 1, 0, 0]), weights) == (5, 3)
    assert count_steps(np.zeros(8, int), weights) == (5, 5)
    assert count_steps(np.zeros(8, int), np.array([0, 1, 0, 0])) == (0, 0)


@pytest.mark.nightly
def test_only_the_layer_is_trained_and_drafts_are_accepted_more_often(tmp_path: Path) -> None:
    trainer = build_trainer(
        create(), tmp_path, max_training_steps=60, learning_rate=1e-2, num_iterations=4
    )
    before = {path: np.array(x[...]) for path, x in nnx.to_flat_state(nnx.state(trainer.model))}
    first = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert after["eval_divergence_1"] < 0.8 * first["eval_divergence_1"]
    assert after["eval_acceptance_length"] >= 1
    for path, array in nnx.to_flat_state(nnx.state(trainer.model)):
        changed = not np.array_equal(before[path], np.array(array[...]))
        assert changed == (path[0] == "mtp"), path


def test_options_and_models_that_train_nothing_raise_error() -> None:
    with pytest.raises(ConfigError, match="mtp_head='stored', or with mtp_head='new'"):
        build_trainer(create(mtp_head=None))
    with pytest.raises((ConfigError, ValidationError), match="omit trainable_rules"):
        DraftArguments(trainable_rules=(("^mtp", True),))
