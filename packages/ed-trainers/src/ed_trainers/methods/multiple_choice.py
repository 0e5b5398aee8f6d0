"""Multiple choice: the cross-entropy of the right one of several texts.

Legend: b rows, n choices, s positions.
"""

from __future__ import annotations

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.sharding.axes import LogicalAxes

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Method, MethodRun, Prepared
from ed_trainers.losses.classes import compute_class_loss
from ed_trainers.losses.pairs import choice_batch
from ed_trainers.options.supervised import MultipleChoiceArguments
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[MultipleChoiceArguments], batch: HostBatch) -> Prepared:
    """Stack the choices, [b, n, s], with `targets` and `weights` [b].

    Args:
        run: the run of the method.
        batch: `choice_1_input_ids`, …, and `labels` int [b], the number of the right choice from 0.

    Raises:
        ConfigError: a choice or the labels are missing, or a label is no number of a choice.
    """
    count = run.arguments.num_choices
    if "labels" not in batch:
        raise ConfigError(f"a batch of choices has labels, not only {', '.join(sorted(batch))}")
    labels = np.asarray(batch["labels"], np.int32)
    if labels.max(initial=-1) >= count:
        raise ConfigError(
            f"the label {labels.max()} is invalid: the choices of a row have the numbers 0 to "
            f"{count - 1}; correct the rows, or set num_choices"
        )
    choices = choice_batch(batch, run.arguments.sides)
    label_mask = labels >= 0
    targets = {"targets": np.where(label_mask, labels, 0), "weights": label_mask.astype(np.float32)}
    axes: dict[str, LogicalAxes] = dict.fromkeys(targets, ("batch",))
    return Inputs({**choices, **targets}, {**choices.declared, **axes})


MULTIPLE_CHOICE = Method[MethodRun[MultipleChoiceArguments]](
    prepare=prepare, loss=compute_class_loss, per_token=False, progress_columns=("loss", "accuracy")
)


class MultipleChoiceTrainer(Trainer):
    """Trains a `MultipleChoice` model; `arguments` are `MultipleChoiceArguments`."""

    entry = METHODS["multiple_choice"]
    record = MULTIPLE_CHOICE
