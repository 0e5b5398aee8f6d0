"""Extractive question answering: the first and the last token of an answer in a context.

The loss of a row is that of transformers' `…ForQuestionAnswering` for the row without padding: the
mean of the cross-entropies of both positions. The loss does not depend on the width of padding.

Legend: b rows, s positions.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric, QuestionAnsweringOutput
from ed_infra.sharding.axes import LogicalAxes
from jaxtyping import Array, Float, Int

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.classes import class_losses, outputs_of_texts
from ed_trainers.losses.next_token import further_arrays, sequence_arrays
from ed_trainers.options.supervised import QuestionAnsweringArguments
from ed_trainers.trainer import Trainer

_POSITIONS = ("start_positions", "end_positions")
#: Number of tokens of a predicted answer at most, as in transformers' `run_qa.py`.
_LONGEST = 30
#: Score of padding, whose probability is 0.
_EXCLUDED = -1e30


def prepare(run: MethodRun[QuestionAnsweringArguments], batch: HostBatch) -> Prepared:
    """Return the arrays of the model, the positions, and `weights` [b].

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s], `segment_ids` or `attention_mask`, `start_positions` and
            `end_positions` int [b]; a row whose position is s or more has no loss, as in
            transformers.

    Raises:
        ConfigError: the positions are missing.
    """
    del run
    if any(name not in batch for name in _POSITIONS):
        raise ConfigError(
            f"a batch of questions has {' and '.join(_POSITIONS)}, not only "
            f"{', '.join(sorted(batch))}: use rows with question, context and answers"
        )
    arrays = sequence_arrays(batch)
    length = arrays["input_ids"].shape[1]
    answer_positions = {name: np.asarray(batch[name], np.int32) for name in _POSITIONS}
    inside = np.any(arrays["segment_ids"] > 0, axis=1)
    numbers: dict[str, np.ndarray] = {}
    for name, positions in answer_positions.items():
        numbers[name] = np.clip(positions, 0, length - 1)
        answer_mask = (positions < length) & inside
        numbers[name.replace("positions", "weights")] = answer_mask.astype(np.float32)
    read = {*arrays, *numbers, "labels", "attention_mask"}
    axes: dict[str, LogicalAxes] = dict.fromkeys(numbers, ("batch",))
    return Inputs({**arrays, **numbers, **further_arrays(batch, read)}, axes)


def loss(
    run: MethodRun[QuestionAnsweringArguments],
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the loss summed over the rows, and figures of the best span of tokens.

    `exact_match` is the share of rows whose best span is the answer, and `f1` the mean F1 of the
    tokens of both spans.
    """
    del run
    output: QuestionAnsweringOutput = outputs_of_texts(models.learner, batch, key)
    terms = []
    for name, logits in zip(_POSITIONS, (output.start_logits, output.end_logits), strict=True):
        weights = batch[name.replace("positions", "weights")]
        scores = jnp.where(batch["segment_ids"] > 0, logits, _EXCLUDED)
        terms.append(class_losses(scores, batch[name], weights))
    (first, rows, _), (last, _, _) = terms
    answer = (batch["start_positions"], batch["end_positions"])
    predicted_span = best_spans(output.start_logits, output.end_logits, batch["segment_ids"])
    exact = (predicted_span[0] == answer[0]) & (predicted_span[1] == answer[1])
    weights = batch["start_weights"]
    metrics = {
        "exact_match": Metric.of(jnp.sum(weights * exact), rows),
        "f1": Metric.of(jnp.sum(weights * span_f1(predicted_span, answer)), rows),
    }
    return Loss.of(output, (first + last) / 2, rows, **metrics)


def best_spans(
    start: Float[Array, "b s"], end: Float[Array, "b s"], segment_ids: Int[Array, "b s"]
) -> tuple[Int[Array, " b"], Int[Array, " b"]]:
    """Return the first and the last token of the span with the highest score of each row."""
    s = start.shape[1]
    place = jnp.arange(s)
    length = place[None, :] - place[:, None]
    allowed = (length >= 0) & (length < _LONGEST)
    token_mask = segment_ids > 0
    allowed = allowed & token_mask[:, :, None] & token_mask[:, None, :]
    scores = jnp.where(allowed, start[:, :, None] + end[:, None, :], -jnp.inf)
    best = jnp.argmax(scores.reshape(-1, s * s), axis=-1)
    return best // s, best % s


def span_f1(
    predicted_span: tuple[Int[Array, " b"], Int[Array, " b"]],
    answer: tuple[Int[Array, " b"], Int[Array, " b"]],
) -> Float[Array, " b"]:
    """Return the F1 of the tokens of two spans of each row."""
    common = (
        jnp.minimum(predicted_span[1], answer[1]) - jnp.maximum(predicted_span[0], answer[0]) + 1
    )
    sizes = predicted_span[1] - predicted_span[0] + answer[1] - answer[0] + 2
    return 2 * jnp.maximum(common, 0) / jnp.maximum(sizes, 1)


QUESTION_ANSWERING = Method[MethodRun[QuestionAnsweringArguments]](
    prepare=prepare, loss=loss, per_token=False, progress_columns=("loss", "exact_match", "f1")
)


class QuestionAnsweringTrainer(Trainer):
    """Trains a `QuestionAnswerer`; `arguments` are `QuestionAnsweringArguments`."""

    entry = METHODS["question_answering"]
    record = QUESTION_ANSWERING
