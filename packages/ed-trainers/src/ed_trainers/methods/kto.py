"""Kahneman-Tversky optimization: single good and bad answers, relative to a reference point.

Ethayarajh et al., arXiv:2402.01306, eqs. 7 and 8. The reference point, the divergence from the
reference, is estimated as in TRL's trainer: the mean log-ratio of prompts with answers to other
prompts, at least 0, without gradient. The mean is over the whole step, or the whole evaluation.

Legend: b rows, s positions and slots of answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.inputs import Inputs
from ed_infra.outputs import Metric
from jax.nn import sigmoid

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, Models, Prepared
from ed_trainers.losses.next_token import next_token_batch
from ed_trainers.losses.scoring import learner_logps
from ed_trainers.losses.segments import Answers
from ed_trainers.methods.labelled import prepare_labelled, score_answers
from ed_trainers.methods.reference import ReferenceRun, compute_ahead
from ed_trainers.options.preference import KTOArguments
from ed_trainers.placement import TOKENS, with_arrays
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer

_OTHER = "other_"


class AnswerDocument(NamedTuple):
    """Token ids of a prompt and its answer."""

    prompt: np.ndarray
    answer: np.ndarray


def prepare(run: ReferenceRun[KTOArguments], batch: HostBatch) -> Prepared:
    """Add `other_*`: the same prompts, each with the answer to another prompt."""
    inputs = prepare_labelled(run, batch)
    rows = split_documents(inputs, batch)
    answers = [inside[-1].answer for inside in rows if inside]
    # The only document of a batch has no other answer.
    is_single = sum(map(len, rows)) == 1
    return _with_others(run, inputs, rows, answers[-1] if answers and not is_single else None)


def _held_out(
    run: ReferenceRun[KTOArguments], batches: Iterable[HostBatch], state: EasyDeLState
) -> Iterator[Prepared]:
    """Yield the held-out batches, with pairs that do not depend on the batch size.

    The first row of a batch gets the last answer of the previous batch. If the first row of the
    evaluation has one document, the document is not part of the reference point.
    """
    del state
    previous_answer: np.ndarray | None = None
    for batch in batches:
        inputs = prepare_labelled(run, batch)
        rows = split_documents(inputs, batch)
        yield _with_others(run, inputs, rows, previous_answer)
        previous_answer = next(
            (inside[-1].answer for inside in reversed(rows) if inside), previous_answer
        )


def _with_others(
    run: ReferenceRun[KTOArguments],
    inputs: Prepared,
    rows: list[list[AnswerDocument]],
    previous_answer: np.ndarray | None,
) -> Prepared:
    if run.arguments.loss_type != "kto":
        return inputs
    length = inputs["input_ids"].shape[1]
    mismatched_inputs = next_token_batch(build_mismatched_rows(rows, length, previous_answer))
    mismatched_inputs = run.reference.add_logps(mismatched_inputs)
    return with_arrays(
        inputs, TOKENS, **{f"{_OTHER}{name}": array for name, array in mismatched_inputs.items()}
    )


def _statistics(
    run: ReferenceRun[KTOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> dict[str, Metric]:
    """Return the mean log-ratio of prompts with answers to other prompts, `kl`."""
    if run.arguments.loss_type != "kto":
        return {}
    mismatched_inputs = Inputs(
        {n.removeprefix(_OTHER): x for n, x in batch.items() if n.startswith(_OTHER)}
    )
    _, logps = learner_logps(run, models, mismatched_inputs, key)
    answers = Answers.of(logps, mismatched_inputs["weights"], mismatched_inputs["segment_ids"])
    ratios = jax.lax.stop_gradient(answers.logps) - run.reference.logps(models, mismatched_inputs)
    return {"kl": Metric.of(jnp.sum(answers.present * ratios), jnp.sum(answers.present))}


def loss(
    run: ReferenceRun[KTOArguments], models: Models, batch: Batch, key: jax.Array | None
) -> Loss:
    """Return the loss summed over the answers, weighted by kind."""
    arguments, beta = run.arguments, run.arguments.beta
    output, scored = score_answers(run, models, batch, key)
    count = jnp.sum(scored.good + scored.bad)
    metrics = scored.metrics(beta)
    if arguments.loss_type == "kto":
        kl = batch["kl"] if "kl" in batch else _statistics(run, models, batch, key)["kl"].value
        kl = jax.lax.stop_gradient(jnp.maximum(kl, 0.0))
        good = 1 - sigmoid(beta * (scored.ratios - kl))
        bad = 1 - sigmoid(beta * (kl - scored.ratios))
        metrics["kl"] = Metric.of(kl * count, count)
    else:
        good, bad = 1 - sigmoid(beta * scored.ratios), sigmoid(beta * scored.ratios)
    good = arguments.desirable_weight * scored.good * good
    bad = arguments.undesirable_weight * scored.bad * bad
    return Loss.of(output, jnp.sum(good + bad), count, **metrics)


def whole_batches(run: ReferenceRun[KTOArguments]) -> bool:
    """Whether answers move between rows, or the reference is computed before training."""
    return run.reference.is_computed_ahead or run.arguments.loss_type == "kto"


def split_documents(
    inputs: Mapping[str, np.ndarray], batch: HostBatch
) -> list[list[AnswerDocument]]:
    """Return the documents of each row.

    Args:
        inputs: `input_ids` and `segment_ids` [b, s].
        batch: the loader's batch. `labels` mark the answers; without labels, a whole document is
            an answer.
    """
    ids = inputs["input_ids"]
    answered = np.asarray(batch.get("labels", ids)) != -100
    return [
        [
            AnswerDocument(row[document_mask & ~is_answer], row[document_mask & is_answer])
            for number in range(1, int(numbers.max(initial=0)) + 1)
            for document_mask in [numbers == number]
        ]
        for row, numbers, is_answer in zip(ids, inputs["segment_ids"], answered, strict=True)
    ]


def build_mismatched_rows(
    rows: list[list[AnswerDocument]], length: int, previous_answer: np.ndarray | None
) -> dict[str, np.ndarray]:
    """Return rows with the same prompts, each followed by the answer of the previous document.

    Within a row of several documents the answers rotate, so the row keeps its length. A row with
    one document gets the last answer of the previous row, truncated at the end of the row.

    Args:
        rows: the documents of each row.
        length: number of positions of a row.
        previous_answer: the answer before the first row. If None, a first row with one document
            stays empty.
    """
    shape = (len(rows), length)
    names = ("input_ids", "segment_ids", "position_ids")
    out = {name: np.zeros(shape, np.int32) for name in names}
    out["labels"] = np.full(shape, -100, np.int32)
    for row, inside in enumerate(rows):
        used = 0
        for number, (prompt, _) in enumerate(inside):
            answer = inside[number - 1].answer if len(inside) > 1 else previous_answer
            if answer is None:
                continue
            text = np.concatenate([prompt, answer])[: length - used]
            at = slice(used, used + len(text))
            used = at.stop
            out["input_ids"][row, at] = text
            out["segment_ids"][row, at] = number + 1
            out["position_ids"][row, at] = np.arange(len(text))
            out["labels"][row, at] = np.where(np.arange(len(text)) < len(prompt), -100, text)
        if inside:
            previous_answer = inside[-1].answer
    return out


KTO = Method[ReferenceRun[KTOArguments]](
    prepare=prepare,
    loss=loss,
    statistics=_statistics,
    held_out=_held_out,
    run=ReferenceRun,
    before_training=compute_ahead,
    whole_batches=whole_batches,
    per_token=False,
    progress_columns=("loss", "kl", "rewards/chosen", "rewards/rejected"),
)


class KTOTrainer(Trainer):
    """Trains a model to write good answers and not bad ones; `arguments` are `KTOArguments`."""

    entry = METHODS["kto"]
    record = KTO
