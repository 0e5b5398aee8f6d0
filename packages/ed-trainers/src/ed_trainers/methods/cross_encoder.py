"""Cross-encoders (rerankers): a classifier with one output scores a query with a document.

`binary_cross_entropy` and `mse` are the losses of sentence-transformers' cross-encoders;
`localized_contrastive` is that of Gao et al., arXiv:2101.08751.

Legend: b rows, n documents of a row, s positions.
"""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric, SequenceClassifierOutput
from ed_infra.sharding.axes import LogicalAxes
from ed_models.protocol import LanguageModel
from jax.nn import log_sigmoid

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.classes import class_losses, outputs_of_texts
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.losses.pairs import as_rows, choice_batch
from ed_trainers.methods.held_out import HeldOutOutputs, score_metrics
from ed_trainers.options.supervised import BCE, CONTRASTIVE, CrossEncoderArguments
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[CrossEncoderArguments], batch: HostBatch) -> Prepared:
    """Return the arrays of the model, [b, s] or [b, n, s], and `labels` and `weights` [b].

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s], `segment_ids` or `attention_mask`, and `labels` [b], numbers;
            or `positive_input_ids`, `negative_1_input_ids`, … for `localized_contrastive`.

    Raises:
        ConfigError: the model has several outputs, an array is missing, or a label of
            `binary_cross_entropy` is not between 0 and 1.
    """
    outputs = run.learner.config.num_labels
    if outputs != 1:
        raise ConfigError(
            f"a cross-encoder has one output, and the model has num_labels={outputs}: use a model "
            "for sequence classification with num_labels=1"
        )
    axes: dict[str, LogicalAxes] = {"labels": ("batch",), "weights": ("batch",)}
    if run.arguments.sides:
        choices = choice_batch(batch, run.arguments.sides)
        row_mask = np.any(choices["segment_ids"] > 0, axis=(1, 2))
        numbers = {
            "labels": np.zeros(len(row_mask), np.float32),
            "weights": row_mask.astype(np.float32),
        }
        return Inputs({**choices, **numbers}, {**choices.declared, **axes})
    if "labels" not in batch:
        raise ConfigError(
            f"a batch of pairs has labels, not only {', '.join(sorted(batch))}: use rows with "
            "query, document and label"
        )
    arrays = sequence_arrays(batch)
    row_mask = np.any(arrays["segment_ids"] > 0, axis=1)
    labels = np.where(row_mask, np.asarray(batch["labels"], np.float32), 0.0).astype(np.float32)
    if run.arguments.loss_type == BCE and not np.all((labels >= 0) & (labels <= 1)):
        wrong = labels[(labels < 0) | (labels > 1)][0]
        raise ConfigError(
            f"the label {wrong} is invalid: binary_cross_entropy reads labels from 0 to 1; scale "
            "the labels, or set loss_type: mse"
        )
    arrays |= {"labels": labels, "weights": row_mask.astype(np.float32)}
    return Inputs({**arrays, **further_arrays(batch, {*arrays, "attention_mask"})}, axes)


def loss(
    run: MethodRun[CrossEncoderArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the loss summed over the rows, and the accuracy."""
    labels, weights = batch["labels"], batch["weights"]
    texts = {name: x for name, x in batch.items() if name not in ("labels", "weights")}
    compared = run.arguments.loss_type == CONTRASTIVE
    rows = as_rows(texts) if compared else Inputs(texts)
    output: SequenceClassifierOutput = outputs_of_texts(models.learner, rows, key)
    scores = output.logits[:, 0].astype(jnp.float32)
    count = jnp.sum(weights)
    if compared:
        scores = scores.reshape(len(weights), -1)
        target = jnp.zeros(len(weights), jnp.int32)
        total, count, accuracy = class_losses(scores, target, weights)
        return Loss.of(output, total, count, accuracy=accuracy)
    if run.arguments.loss_type == BCE:
        factor = 1.0 if run.arguments.pos_weight is None else run.arguments.pos_weight
        losses = -factor * labels * log_sigmoid(scores) - (1 - labels) * log_sigmoid(-scores)
        right = ((scores > 0) == (labels > 0.5)).astype(jnp.float32)
        accuracy = Metric.of(jnp.sum(weights * right), count)
        return Loss.of(output, jnp.sum(weights * losses), count, accuracy=accuracy)
    return Loss.of(output, jnp.sum(weights * (scores - labels) ** 2), count)


class CrossEncoderRun(MethodRun[CrossEncoderArguments]):
    """A run of `cross_encoder`."""

    outputs: HeldOutOutputs

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.outputs = HeldOutOutputs(self)


def measure(
    run: CrossEncoderRun, batches: Iterable[HostBatch], state: EasyDeLState
) -> dict[str, float]:
    """Return the metrics of the scores of held-out rows."""

    def scores(model: LanguageModel, batch: Batch) -> jax.Array:
        texts = {name: x for name, x in batch.items() if name not in ("labels", "weights")}
        rows = as_rows(texts) if run.arguments.sides else Inputs(texts)
        logits = outputs_of_texts(model, rows, None).logits[:, 0].astype(jnp.float32)
        return logits.reshape(len(batch["weights"]), -1) if run.arguments.sides else logits

    return score_metrics(run, run.outputs.each(batches, state, scores))


CROSS_ENCODER = Method[CrossEncoderRun](
    run=CrossEncoderRun,
    prepare=prepare,
    loss=loss,
    measure=measure,
    per_token=False,
    progress_columns=("loss", "accuracy"),
)


class CrossEncoderTrainer(Trainer):
    """Trains a `SequenceClassifier` with one output; `arguments` are `CrossEncoderArguments`."""

    entry = METHODS["cross_encoder"]
    record = CROSS_ENCODER
