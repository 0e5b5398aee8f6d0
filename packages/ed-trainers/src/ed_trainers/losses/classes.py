"""The loss and the accuracy of classes.

Legend: b rows, c classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric, SequenceClassifierOutput
from ed_models.protocol import LanguageModel
from jaxtyping import Array, Float, Int

from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, MethodRun, Models


def class_targets(batch: HostBatch, model: LanguageModel) -> dict[str, np.ndarray]:
    """Return `targets` int32 and `weights` float32 with the shape of `labels`.

    A label of -100 has the weight 0.

    Raises:
        ConfigError: the batch has no labels, or a label exceeds the classes of the model.
    """
    if "labels" not in batch:
        raise ConfigError(
            f"a batch of a classifier has labels, not only {', '.join(sorted(batch))}"
        )
    labels = np.asarray(batch["labels"], np.int32)
    count = model.config.num_labels or 0
    if labels.size and labels.max() >= count:
        raise ConfigError(
            f"the label {labels.max()} is invalid: the model has {count} classes, 0 to "
            f"{count - 1}; set label_names or num_labels"
        )
    label_mask = labels >= 0
    return {"targets": np.where(label_mask, labels, 0), "weights": label_mask.astype(np.float32)}


def class_losses(
    scores: Float[Array, "*rows c"], targets: Int[Array, "*rows"], weights: Float[Array, "*rows"]
) -> tuple[Float[Array, ""], Float[Array, ""], Metric]:
    """Return the summed cross-entropy in nats, the sum of the weights, and the accuracy."""
    logps = jax.nn.log_softmax(scores.astype(jnp.float32), axis=-1)
    losses = -jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
    right = (jnp.argmax(scores, axis=-1) == targets).astype(jnp.float32)
    count = jnp.sum(weights)
    return jnp.sum(weights * losses), count, Metric.of(jnp.sum(weights * right), count)


def outputs_of_texts(model: LanguageModel, rows: Inputs, key: jax.Array | None) -> Any:
    """Call a model on rows that contain one text each.

    The model receives the segments as its mask, which marks the tokens that represent the text.
    """
    names = {*model.input_names} - {"segment_ids", "attention_mask"}
    call = cast(Callable[..., Any], model)
    return call(**rows.select(names), attention_mask=rows["segment_ids"], key=key)


def compute_class_loss(
    run: MethodRun[Any], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the cross-entropy of the class of each row of texts, summed over the rows."""
    del run
    output: SequenceClassifierOutput = outputs_of_texts(models.learner, batch, key)
    total, rows, accuracy = class_losses(output.logits, batch["targets"], batch["weights"])
    return Loss.of(output, total, rows, accuracy=accuracy)
