"""Classification of images: the cross-entropy of the class of each image.

Legend: b rows, c channels, h height, w width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
from ed_infra.inputs import Inputs
from ed_infra.outputs import ImageClassifierOutput
from ed_infra.sharding.axes import LogicalAxes

from ed_trainers.arguments import METHODS
from ed_trainers.batches import IMAGE_AXES, HostBatch, get_pixel_values
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.classes import class_losses, class_targets
from ed_trainers.options.supervised import ImageClassificationArguments
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[ImageClassificationArguments], batch: HostBatch) -> Prepared:
    """Return `pixel_values` [b, c, h, w], `targets` and `weights` [b].

    Args:
        run: the run of the method.
        batch: `pixel_values` float [b, 1, c, h, w] or [b, c, h, w], and `labels` int [b]; a row
            with the label -100 is ignored.
    """
    arrays = {
        "pixel_values": get_pixel_values(batch, run.name),
        **class_targets(batch, run.learner),
    }
    axes: dict[str, LogicalAxes] = {
        "pixel_values": IMAGE_AXES,
        "targets": ("batch",),
        "weights": ("batch",),
    }
    return Inputs(arrays, axes)


def loss(
    run: MethodRun[ImageClassificationArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the cross-entropy, summed over the images."""
    del run
    call = cast(Callable[..., ImageClassifierOutput], models.learner)
    output = call(batch["pixel_values"], key=key)
    total, rows, accuracy = class_losses(output.logits, batch["targets"], batch["weights"])
    return Loss.of(output, total, rows, accuracy=accuracy)


IMAGE_CLASSIFICATION = Method[MethodRun[ImageClassificationArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "accuracy")
)


class ImageClassificationTrainer(Trainer):
    """Trains an `ImageClassifier`; `arguments` are `ImageClassificationArguments`."""

    entry = METHODS["image_classification"]
    record = IMAGE_CLASSIFICATION
