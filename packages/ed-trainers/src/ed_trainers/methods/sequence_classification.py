"""Classification of texts and of pairs of texts: the cross-entropy of the class of each row.

Legend: b rows, s positions.
"""

from __future__ import annotations

from ed_infra.inputs import Inputs
from ed_infra.sharding.axes import LogicalAxes

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Method, MethodRun, Prepared
from ed_trainers.losses.classes import class_targets, compute_class_loss
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


SEQUENCE_CLASSIFICATION = Method[MethodRun[SequenceClassificationArguments]](
    prepare=prepare, loss=compute_class_loss, per_token=False, progress_columns=("loss", "accuracy")
)


class SequenceClassificationTrainer(Trainer):
    """Trains a `SequenceClassifier`; `arguments` are `SequenceClassificationArguments`."""

    entry = METHODS["sequence_classification"]
    record = SEQUENCE_CLASSIFICATION
