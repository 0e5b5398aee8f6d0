"""A process reward model: after each step of an answer, whether the step is right.

Lightman et al., arXiv:2305.20050: the cross-entropy of two classes at the last token of each step.

Legend: b rows, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.outputs import Metric

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import token_scores
from ed_trainers.options.preference import PRMArguments
from ed_trainers.placement import with_arrays
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[PRMArguments], batch: HostBatch) -> Prepared:
    """Return `targets` int32 and `weights` float32 [b, s] from the labels of the steps.

    Args:
        run: the run of the method.
        batch: rows with `step_labels` float32 [b, s]: 1 or 0 at the last token of a step, -100
            elsewhere.

    Raises:
        ConfigError: the batch has no labels of steps.
    """
    del run
    if "step_labels" not in batch:
        raise ConfigError(
            f"a batch of steps has step_labels, not only {', '.join(sorted(batch))}: use rows "
            "with prompt, completions (a list of steps) and labels (one per step)"
        )
    inputs = next_token_batch({name: x for name, x in batch.items() if name != "step_labels"})
    labels = np.asarray(batch["step_labels"], np.float32)
    counts = (labels >= 0) & (inputs["segment_ids"] > 0)
    return with_arrays(
        inputs,
        targets=np.where(counts, labels, 0).astype(np.int32),
        weights=counts.astype(np.float32),
    )


def loss(run: MethodRun[PRMArguments], models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the cross-entropy, summed over the steps."""
    noise = run.arguments.neftune_noise_alpha
    output, scores = token_scores(models.learner, batch, key, labels=2, noise=noise)
    targets, weights = batch["targets"], batch["weights"]
    logps = jax.nn.log_softmax(scores, axis=-1)
    losses = -jnp.take_along_axis(logps, targets[..., None], axis=-1)[..., 0]
    right = (jnp.argmax(scores, axis=-1) == targets).astype(jnp.float32)
    steps = jnp.sum(weights)
    accuracy = Metric.of(jnp.sum(weights * right), steps)
    return Loss.of(output, jnp.sum(weights * losses), steps, accuracy=accuracy)


PRM = Method[MethodRun[PRMArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "accuracy")
)


class PRMTrainer(Trainer):
    """Trains a `SequenceClassifier` with two labels, 0 for wrong and 1 for right steps.

    `arguments` are `PRMArguments`.
    """

    entry = METHODS["prm"]
    record = PRM
