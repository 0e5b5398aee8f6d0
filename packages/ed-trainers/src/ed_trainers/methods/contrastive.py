"""Images and their captions: the loss of CLIP or SigLIP over all pairs of the step.

The loss is that of the model (`ImageTextMatcher.pair_loss`): a text is compared with the images of
all rows of the step, on every mesh and number of hosts.

Legend: b rows, s positions, c channels, h height, w width.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric
from ed_infra.sharding.axes import LogicalAxes
from ed_models.tasks.image_text_match import ImageTextMatcher

from ed_trainers.arguments import METHODS
from ed_trainers.batches import IMAGE_AXES, HostBatch, get_pixel_values
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.options.supervised import ContrastiveArguments
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[ContrastiveArguments], batch: HostBatch) -> Prepared:
    """Return `pixel_values` [b, c, h, w], `input_ids` [b, s] and `pairs` [b].

    Args:
        run: the run of the method.
        batch: `pixel_values` float [b, 1, c, h, w] or [b, c, h, w], `input_ids` int [b, s], and
            optionally `segment_ids` [b, s]; a row without tokens is ignored.

    Raises:
        ConfigError: an array is missing.
    """
    if "input_ids" not in batch:
        raise ConfigError(f"a batch for {run.name} has input_ids, not only {', '.join(batch)}")
    ids = np.asarray(batch["input_ids"], np.int32)
    real = np.asarray(batch.get("segment_ids", np.ones(ids.shape)), np.int32).any(axis=1)
    arrays = {
        "pixel_values": get_pixel_values(batch, run.name),
        "input_ids": ids,
        "pairs": real.astype(np.float32),
    }
    axes: dict[str, LogicalAxes] = {"pixel_values": IMAGE_AXES, "pairs": ("batch",)}
    return Inputs(arrays, axes)


def loss(
    run: MethodRun[ContrastiveArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the pairs, and how often the caption of an image is the nearest.

    The texts have no attention mask, as in the processors of both families: SigLIP reads padding.
    """
    del run
    model = cast(ImageTextMatcher, models.learner)
    output = model(batch["input_ids"], batch["pixel_values"], key=key)
    pairs, kind = batch["pairs"], cast(Any, type(model))
    total, count = kind.pair_loss(output.logits_per_text, pairs)
    scores = output.logits_per_image + jnp.where(pairs > 0, 0.0, -jnp.inf)
    right = jnp.argmax(scores, axis=-1) == jnp.arange(pairs.size)
    accuracy = Metric.of(jnp.sum(pairs * right), count)
    return Loss.of(output, total, count, accuracy=accuracy)


CONTRASTIVE = Method[MethodRun[ContrastiveArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "accuracy")
)


class ContrastiveTrainer(Trainer):
    """Trains an `ImageTextMatcher`; `arguments` are `ContrastiveArguments`."""

    entry = METHODS["contrastive"]
    record = CONTRASTIVE
