"""Masked language modeling: the cross-entropy of masked tokens, for pre-training and fine-tuning.

Legend: b rows, s positions, k selected positions of a row at most, d hidden.
"""

from __future__ import annotations

from typing import Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.sharding.axes import LogicalAxes
from ed_layers.losses import TokenLoss
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.masking import (
    STEP_KEY,
    MaskTokenizer,
    Vocabulary,
    feed,
    get_batch_number,
    masked_rows,
)
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.losses.scoring import forward
from ed_trainers.losses.token_loss import token_cross_entropy
from ed_trainers.options.supervised import MLMArguments
from ed_trainers.trainer import Trainer

#: Logical axes of an array with one value for each selected position.
_SELECTED: LogicalAxes = ("batch", None)


class Transforms(Protocol):
    """A masked language model: its head reads the result of `transform`."""

    def transform(self, hidden: jax.Array) -> jax.Array:
        """Return the input of the head."""
        ...


class MLMRun(MethodRun[MLMArguments]):
    """A run of `mlm`, with the vocabulary of its tokenizer."""

    vocabulary: Vocabulary

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        if self.tokenizer is None:
            raise ConfigError(
                "masked language modeling needs a tokenizer, whose mask token and special tokens "
                "it reads: pass processing_class"
            )
        tokenizer = cast(MaskTokenizer, self.tokenizer)
        self.vocabulary = Vocabulary.of(tokenizer, whole_words=self.arguments.whole_word_mask)


def prepare(run: MLMRun, batch: HostBatch) -> Prepared:
    """Mask the tokens of a batch; see `masked_rows`.

    Masks are drawn from `seed`, the step and the tokens of a row. An evaluation masks the same
    tokens each time.

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s]; optionally `segment_ids`, `position_ids`, `labels` (tokens
            with the label -100 are not masked) and `loss_weights`.

    Returns:
        The arrays of the model, and `masked_positions`, `targets` and `weights` [b, k].
    """
    arrays = sequence_arrays(batch, ("labels", "loss_weights"))
    weights = np.asarray(batch.get("loss_weights", np.ones(arrays["input_ids"].shape)), np.float32)
    if "labels" in batch:
        weights = np.where(np.asarray(batch["labels"]) >= 0, weights, np.float32(0))
    options = run.arguments
    rows = masked_rows(
        arrays["input_ids"],
        arrays["segment_ids"],
        weights,
        run.vocabulary,
        probabilities=(
            options.mlm_probability,
            options.mask_replace_prob,
            options.random_replace_prob,
        ),
        seed=(options.seed, get_batch_number(batch)),
    )
    arrays |= {
        "input_ids": rows.input_ids,
        "masked_positions": rows.positions,
        "targets": rows.targets,
        "weights": rows.weights,
    }
    read = {*arrays, STEP_KEY, "labels", "attention_mask", "loss_weights"}
    selected = ("masked_positions", "targets", "weights")
    return Inputs({**arrays, **further_arrays(batch, read)}, dict.fromkeys(selected, _SELECTED))


def loss(run: MLMRun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the weighted sum of `-log p(target)` in nats over the masked positions.

    The head computes logits of the selected positions only. Label smoothing and z-loss apply in
    training only, when there is a key.
    """
    model, arguments = models.learner, run.arguments
    output = forward(model, batch, key)
    assert output.last_hidden_state is not None
    selected_states = jnp.take_along_axis(
        output.last_hidden_state, batch["masked_positions"][..., None], axis=1
    )
    extra = TokenLoss()
    if key is not None:
        extra = TokenLoss(arguments.label_smoothing_factor, arguments.z_loss_coefficient)
    total = token_cross_entropy(
        cast(Transforms, model).transform(selected_states),
        model.head(),
        batch["targets"],
        batch["weights"],
        sharding=run.placement.sharding(batch["targets"].shape, _SELECTED),
        chunk=arguments.lmhead_chunksize,
        loss=extra,
    )
    return Loss.of(output, total, jnp.sum(batch["weights"]))


MLM = Method[MLMRun](run=MLMRun, prepare=prepare, loss=loss, feed=feed)


class MLMTrainer(Trainer):
    """Trains a `MaskedLM` to predict masked tokens; `arguments` are `MLMArguments`."""

    entry = METHODS["mlm"]
    record = MLM
