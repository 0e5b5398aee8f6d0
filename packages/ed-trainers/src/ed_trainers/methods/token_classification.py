"""Classification of words: the cross-entropy of the class of each word, at its first token.

Legend: b rows, s positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import jax
import jax.numpy as jnp
from ed_infra.inputs import Inputs
from ed_infra.outputs import TokenClassifierOutput

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.classes import class_losses, class_targets
from ed_trainers.losses.entities import EntityTags, entity_metrics
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.options.supervised import TokenClassificationArguments
from ed_trainers.placement import TOKENS
from ed_trainers.trainer import Trainer


def prepare(run: MethodRun[TokenClassificationArguments], batch: HostBatch) -> Prepared:
    """Return the arrays of the model, and `targets` and `weights` [b, s].

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s]; `labels` int [b, s], the class of a word at its first token
            and -100 elsewhere; optionally `segment_ids` and `position_ids`.
    """
    arrays = {**sequence_arrays(batch, ("labels",)), **class_targets(batch, run.learner)}
    read = {*arrays, "labels", "attention_mask"}
    return Inputs({**arrays, **further_arrays(batch, read)}, {"targets": TOKENS, "weights": TOKENS})


def loss(
    run: MethodRun[TokenClassificationArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the cross-entropy, summed over the words.

    The metrics are the accuracy of words and, if the class names are tags such as `B-PER`,
    precision, recall and F1 of entities.
    """
    call = cast(Callable[..., TokenClassifierOutput], models.learner)
    output = call(**batch.select(models.learner.input_names), key=key)
    targets, weights = batch["targets"], batch["weights"]
    total, words, accuracy = class_losses(output.logits, targets, weights)
    metrics = {"accuracy": accuracy}
    names = run.learner.config.id2label or {}
    tags = EntityTags.of({int(number): name for number, name in names.items()})
    if tags is not None:
        predicted = jnp.argmax(output.logits, axis=-1)
        metrics |= entity_metrics(tags, predicted, targets, weights > 0, batch["segment_ids"])
    return Loss.of(output, total, words, **metrics)


TOKEN_CLASSIFICATION = Method[MethodRun[TokenClassificationArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "accuracy")
)


class TokenClassificationTrainer(Trainer):
    """Trains a `TokenClassifier`; `arguments` are `TokenClassificationArguments`."""

    entry = METHODS["token_classification"]
    record = TOKEN_CLASSIFICATION
