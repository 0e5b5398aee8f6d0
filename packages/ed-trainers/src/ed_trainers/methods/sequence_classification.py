"""Classification of texts and of pairs of texts: the cross-entropy of the class of each row.

Legend: b rows, s positions.
"""

from __future__ import annotations

import jax
from ed_infra.inputs import Inputs
from ed_infra.outputs import SequenceClassifierOutput
from ed_infra.sharding.axes import LogicalAxes

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.classes import class_losses, class_targets, outputs_of_texts
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.options.supervised import SequenceClassificationArguments
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[SequenceClassificationArguments], batch: HostBatch) -> Prepared:
    """Return the arrays of the model, and `targets` and `weights` [b].

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s], `segment_ids` or `attention_mask`, `labels` int [b]; a row
            with the label -100 is ignored.
    """
    arrays = {**sequence_arrays(batch), **class_targets(batch, run.learner)}
    read = {*arrays, "labels", "attention_mask"}
    axes: dict[str, LogicalAxes] = {"targets": ("batch",), "weights": ("batch",)}
    return Inputs({**arrays, **further_arrays(batch, read)}, axes)


def loss(
    run: MethodRun[SequenceClassificationArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the cross-entropy, summed over the rows."""
    del run
    output: SequenceClassifierOutput = outputs_of_texts(models.learner, batch, key)
    total, rows, accuracy = class_losses(output.logits, batch["targets"], batch["weights"])
    return Loss.of(output, total, rows, accuracy=accuracy)


SEQUENCE_CLASSIFICATION = Method[MethodRun[SequenceClassificationArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "accuracy")
)


class SequenceClassificationTrainer(Trainer):
    """Trains a `SequenceClassifier`; `arguments` are `SequenceClassificationArguments`."""

    entry = METHODS["sequence_classification"]
    record = SEQUENCE_CLASSIFICATION
