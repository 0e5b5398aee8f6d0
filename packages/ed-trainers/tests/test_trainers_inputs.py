"""Named arrays of any rank: kept by `prepare`, placed by their axes, and passed to the model."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import CausalLMOutput
from ed_trainers import SFTArguments, SFTTrainer
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.pairs import as_rows, pair_batch
from ed_trainers.placement import microbatches, pad_rows, with_arrays
from flax import nnx
from jax.sharding import PartitionSpec
from method_runs import near, near_reports, one_step

IMAGE = (2, 3, 4, 4)


class Images:
    """Rows with two images each."""

    def __init__(self, loader):
        self.loader, self.steps_per_epoch = loader, loader.steps_per_epoch

    def batch_at(self, step):
        batch = self.loader.batch_at(step)
        rows = len(batch["input_ids"])
        pixels = np.random.default_rng(step).normal(size=(rows, *IMAGE)).astype(np.float32)
        return {**batch, "pixel_values": pixels, "source": ["web"] * rows}


@pytest.fixture
def seeing(toy):
    """`seeing(dims)`: a toy model whose hidden states depend on the images of a row."""

    class Seeing(toy.Model):
        input_names = ("input_ids", "segment_ids", "position_ids", "pixel_values")

        def __init__(self, config, **given):
            super().__init__(config, **given)
            shape = (IMAGE[1], self.norm.shape[0])
            self.tower = nnx.Param(jnp.ones(shape) * 0.1, axes=(None, "embed"))

        def __call__(self, input_ids, *, pixel_values, **inputs):
            body = super().__call__(input_ids, **inputs)
            seen = jnp.mean(pixel_values, axis=(1, 3, 4)) @ self.tower[...]
            return CausalLMOutput(last_hidden_state=body.last_hidden_state + seen[:, None])

    return lambda dims=(1, 1, 1, 1, 1): Seeing(toy.Config(dims)).shard_model()


@pytest.mark.nightly
def test_images_reach_the_model_in_microbatches_and_on_meshes(toy, seeing):
    batch = Images(toy.loader()).batch_at(0)
    moved, report = one_step("sft", seeing(), batch)
    assert np.max(np.abs(moved["tower"][...])) > 1e-4, "or the images are not read"
    for dims in ((1, 1, 1, 1, 1), (2, 2, 1, 2, 1), (1, 1, 1, 2, 4)):
        other, other_report = one_step("sft", seeing(dims), batch, 4)
        near(other, moved, 2e-5)
        near_reports(other_report, report, 2e-5)


@pytest.mark.nightly
def test_images_are_trained_and_evaluated_with_padded_rows(toy, seeing, tmp_path):
    arguments = SFTArguments(
        save_directory=str(tmp_path),
        total_batch_size=8,
        max_training_steps=3,
        eval_batch_size=3,
        learning_rate=0.02,
        log_steps=1,
        use_tensorboard=False,
        do_last_save=False,
    )
    held_out = Images(toy.loader(steps=1, seed=9))
    run = SFTTrainer(arguments, seeing(), Images(toy.loader()), held_out)
    before = run.evaluate()["eval_loss"]
    whole = SFTTrainer(arguments.replace(eval_batch_size=None), seeing(), None, held_out)
    assert before == pytest.approx(whole.evaluate()["eval_loss"], rel=1e-6)
    assert run.train().metrics["eval_loss"] < before


def test_prepare_keeps_numeric_arrays_and_their_axes(toy):
    batch = Images(toy.loader()).batch_at(0)
    made = next_token_batch(batch)
    assert isinstance(made, Inputs)
    np.testing.assert_array_equal(made["pixel_values"], batch["pixel_values"])
    assert "source" not in made and "labels" not in made
    assert made.get_logical_axes("targets") == ("batch", "sequence")
    assert made.get_logical_axes("pixel_values") == ("batch", None, None, None, None)
    parts = microbatches(made, 4)
    assert parts["pixel_values"].shape == (4, 2, *IMAGE)
    assert pad_rows(made, 11)["pixel_values"].shape == (11, *IMAGE)


def test_arrays_are_sharded_by_declared_axes_not_by_their_last_axis(toy):
    run = SFTTrainer(SFTArguments(), toy.model((1, 2, 1, 1, 4)))
    batch = {"input_ids": np.zeros((8, 16), int), "pixel_values": np.zeros((8, *IMAGE), np.float32)}
    made = with_arrays(next_token_batch(batch), ("batch",), score=np.zeros(8, np.float32))
    for stacked, lead in ((False, ()), (True, (None,))):
        placed = run.placement.place(microbatches(made, 2) if stacked else made, stacked=stacked)
        rows, tokens = placed["score"].sharding.spec, placed["targets"].sharding.spec
        assert rows[: len(lead)] == lead and rows[len(lead)] is not None
        assert tokens[len(lead) + 1] == "sp"
        images = placed["pixel_values"].sharding.spec
        assert all(axis is None for axis in images[len(lead) + 1 :])
        assert isinstance(images, PartitionSpec)


def test_arrays_of_pairs_keep_their_rank_as_rows():
    sides = {
        f"{side}_{name}": array
        for side in ("chosen", "rejected")
        for name, array in (
            ("input_ids", np.ones((3, 5), int)),
            ("pixel_values", np.zeros((3, *IMAGE), np.float32)),
        )
    }
    pairs = pair_batch(sides)
    assert pairs["pixel_values"].shape == (3, 2, *IMAGE)
    assert pairs.get_logical_axes("input_ids") == ("batch", None, "sequence")
    rows = as_rows(jax.tree.map(jnp.asarray, pairs))
    assert rows["pixel_values"].shape == (6, *IMAGE) and rows["input_ids"].shape == (6, 5)


# Encoder-decoders.

T5 = SimpleNamespace(
    input_names=("input_ids", "segment_ids", "decoder_input_ids", "decoder_segment_ids"),
    config=SimpleNamespace(to_dict=lambda: {"pad_token_id": 0, "decoder_start_token_id": 9}),
)


def test_decoder_targets_are_unshifted_labels_within_segments():
    batch = {
        "input_ids": np.array([[5, 6, 7, 0]]),
        "segment_ids": np.array([[1, 1, 2, 0]]),
        "labels": np.array([[3, 4, 8, 1, -100]]),
        "decoder_segment_ids": np.array([[1, 1, 2, 2, 0]]),
        "loss_weights": np.array([[1, 0.5, 1, 1, 1]], np.float32),
    }
    made = next_token_batch(batch, T5)
    np.testing.assert_array_equal(made["targets"], [[3, 4, 8, 1, 0]])
    np.testing.assert_array_equal(made["weights"], [[1, 0.5, 1, 1, 0]])
    np.testing.assert_array_equal(made["decoder_input_ids"], [[9, 3, 9, 8, 0]])
    np.testing.assert_array_equal(made["decoder_position_ids"], [[0, 1, 0, 1, 0]])
    np.testing.assert_array_equal(made["position_ids"], [[0, 1, 0, 0]])


def test_decoder_segments_end_at_the_last_label():
    batch = {"input_ids": np.ones((1, 3), int), "labels": np.array([[-100, 4, -100, 6, -100]])}
    made = next_token_batch(batch, T5)
    np.testing.assert_array_equal(made["decoder_segment_ids"], [[1, 1, 1, 1, 0]])
    np.testing.assert_array_equal(made["targets"], [[0, 4, 0, 6, 0]])
    np.testing.assert_array_equal(made["weights"], [[0, 1, 0, 1, 0]])
    np.testing.assert_array_equal(made["decoder_input_ids"], [[9, 0, 4, 0, 0]])


def test_given_decoder_tokens_are_kept():
    batch = {
        "input_ids": np.ones((1, 3), int),
        "labels": np.array([[4, 5]]),
        "decoder_input_ids": np.array([[7, 4]]),
    }
    made = next_token_batch(batch)
    np.testing.assert_array_equal(made["decoder_input_ids"], [[7, 4]])
    np.testing.assert_array_equal(made["targets"], [[4, 5]])


def test_decoder_batch_without_labels_raises_config_error():
    with pytest.raises(ConfigError, match="has labels, the tokens of the decoder"):
        next_token_batch({"input_ids": np.ones((1, 3), int)}, T5)
    with pytest.raises(ConfigError, match=r"decoder_input_ids has shape \(1, 3\), labels has"):
        next_token_batch(
            {
                "input_ids": np.ones((1, 3), int),
                "labels": np.ones((1, 2), int),
                "decoder_input_ids": np.ones((1, 3), int),
            }
        )
