"""Connectionist temporal classification (Graves et al. 2006): speech to labels without alignments.

The loss is the log-probability of the labels over all their alignments.

Legend: b rows, n samples, t time steps, l labels, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_infra.outputs import TokenClassifierOutput
from ed_infra.sharding.axes import LogicalAxes
from ed_models.protocol import LanguageModel
from ed_models.tasks.ctc import CTCModel
from jaxtyping import Array, Float, Int

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.methods.transcripts import BestLabels
from ed_trainers.options.supervised import CTCArguments
from ed_trainers.state import EasyDeLState
from ed_trainers.trainer import Trainer


def ctc_losses(
    logits: Float[Array, "b t v"],
    steps: Int[Array, " b"],
    labels: Int[Array, "b l"],
    lengths: Int[Array, " b"],
    *,
    blank: int,
    zero_infinity: bool,
) -> Float[Array, " b"]:
    """Return `-log p(labels)` of each row in nats, as `torch.nn.functional.ctc_loss`.

    Args:
        logits: scores of the labels.
        steps: time steps of each row; later ones are padding.
        labels: the labels, with padding at the end.
        lengths: labels of each row.
        blank: the label of no output.
        zero_infinity: whether a row without an alignment has the loss and the gradient 0 instead of
            infinity.
    """
    logit_padding = jnp.arange(logits.shape[1]) >= steps[:, None]
    padding = jnp.arange(labels.shape[1]) >= lengths[:, None]
    possible = _count_needed_steps(labels, lengths) <= steps
    # Padded labels are read, but have no effect; rows without an alignment have no gradient.
    safe = jnp.where(padding, 0 if blank else 1, labels)
    logits = jnp.where(possible[:, None, None], logits, 0)
    losses = optax.ctc_loss(
        logits,
        logit_padding.astype(logits.dtype),
        safe,
        padding.astype(logits.dtype),
        blank_id=blank,
    )
    return jnp.where(possible, losses, 0.0 if zero_infinity else jnp.inf)


def _count_needed_steps(labels: Int[Array, "b l"], lengths: Int[Array, " b"]) -> Int[Array, " b"]:
    """Return the fewest time steps of an alignment: one per label, and between equal labels."""
    pair_mask = jnp.arange(1, labels.shape[1]) < lengths[:, None]
    return lengths + jnp.sum((labels[:, 1:] == labels[:, :-1]) & pair_mask, axis=1)


def steps_needed(labels: Int[np.ndarray, "b l"], lengths: Int[np.ndarray, " b"]) -> np.ndarray:
    """Return the fewest time steps of an alignment of each row, on the host."""
    pair_mask = np.arange(1, labels.shape[1]) < lengths[:, None]
    return lengths + np.sum((labels[:, 1:] == labels[:, :-1]) & pair_mask, axis=1)


_ROWS: LogicalAxes = ("batch",)


class CTCRun(MethodRun[CTCArguments]):
    """A run of `ctc`."""

    best_labels: BestLabels

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        self.best_labels = BestLabels(self)


def prepare(run: CTCRun, batch: HostBatch) -> Prepared:
    """Return the arrays of the model, and `labels` [b, l], `label_lengths` and `weights` [b].

    Args:
        run: the run of the method.
        batch: `input_values` float [b, n], optionally `attention_mask` [b, n], and `labels` int
            [b, l]; negative labels are ignored. A row without samples has the weight 0.

    Raises:
        ConfigError: an array is missing, a label is invalid, or a row has more labels than time
            steps and the configuration does not set `ctc_zero_infinity`.
    """
    for name in ("input_values", "labels"):
        if name not in batch:
            raise ConfigError(f"a batch for ctc has {name}, not only {', '.join(sorted(batch))}")
    values = np.asarray(batch["input_values"], np.float32)
    mask = np.asarray(batch.get("attention_mask", np.ones(values.shape)), np.int32) != 0
    labels = np.asarray(batch["labels"], np.int32)
    label_mask = labels >= 0
    # Labels before ignored ones, as the loss reads them.
    labels = np.take_along_axis(labels, np.argsort(~label_mask, axis=1, kind="stable"), axis=1)
    lengths = label_mask.sum(axis=1).astype(np.int32)
    labels = np.where(np.arange(labels.shape[1]) < lengths[:, None], labels, 0)
    samples = mask.sum(axis=1)
    real = samples > 0
    _check(run, labels, lengths, samples, real)
    arrays = {
        "input_values": values,
        "attention_mask": mask.astype(np.int32),
        "labels": labels,
        "label_lengths": lengths,
        "weights": real.astype(np.float32),
    }
    return Inputs(arrays, {"label_lengths": _ROWS, "weights": _ROWS})


def _check(
    run: CTCRun,
    labels: np.ndarray,
    lengths: np.ndarray,
    samples: np.ndarray,
    real: np.ndarray,
) -> None:
    config = run.learner.config
    used = np.arange(labels.shape[1]) < lengths[:, None]
    if labels.max(initial=0) >= config.vocab_size:
        raise ConfigError(
            f"the label {labels.max()} is invalid: vocab_size is {config.vocab_size}: use the "
            "tokenizer of the model"
        )
    if (used & (labels == config.pad_token_id)).any():
        raise ConfigError(
            f"the label {config.pad_token_id} is the blank (pad_token_id), which no transcript "
            "contains: use -100 for padding"
        )
    needed, steps = steps_needed(labels, lengths), _steps(config, samples)
    wrong = np.flatnonzero(real & (needed > steps))
    if len(wrong) and not config.ctc_zero_infinity:
        row = int(wrong[0])
        raise ConfigError(
            f"row {row} of the batch needs {needed[row]} time steps (one for each of "
            f"{lengths[row]} labels and between equal labels), and its {samples[row]} samples have "
            f"{steps[row]}: drop the row, or set ctc_zero_infinity in the model's configuration"
        )


def _steps(config: EasyDeLBaseConfig, samples: np.ndarray) -> np.ndarray:
    """Return the time steps of each row on the host; `output_lengths` would use a device."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = np.maximum((samples - kernel) // stride + 1, 0)
    return samples


def loss(run: CTCRun, models: Models, batch: Batch, key: jax.Array | None) -> Loss:
    """Return the summed losses of the rows, with the reduction of the model's configuration.

    "sum" is the sum over an optimizer step, also of several microbatches; the mean over evaluation
    batches is the mean of a row times the rows of a step. "mean" divides the loss of a row by the
    number of its labels, and is the mean over rows.
    """
    config = models.learner.config
    call = cast(Callable[..., TokenClassifierOutput], models.learner)
    mask = batch["attention_mask"]
    output = call(batch["input_values"], attention_mask=mask, key=key)
    lengths, weights = batch["label_lengths"], batch["weights"]
    losses = ctc_losses(
        output.logits,
        cast(CTCModel, models.learner).output_lengths(jnp.sum(mask, axis=1)),
        batch["labels"],
        lengths,
        blank=config.pad_token_id,
        zero_infinity=config.ctc_zero_infinity,
    )
    rows = jnp.sum(weights)
    if config.ctc_loss_reduction == "mean":
        losses, count = losses / jnp.maximum(lengths, 1), rows
    else:
        count = rows / run.arguments.sequences_per_step
    return Loss.of(output, jnp.sum(jnp.where(weights > 0, losses, 0)), count)


def measure(run: CTCRun, batches: Iterable[HostBatch], state: EasyDeLState) -> dict[str, float]:
    """Return the error rates of the best labels of held-out recordings."""
    return run.best_labels.rates(batches, state)


CTC = Method[CTCRun](run=CTCRun, prepare=prepare, loss=loss, measure=measure, per_token=False)


class CTCTrainer(Trainer):
    """Trains a `CTCModel`; `arguments` are `CTCArguments`."""

    entry = METHODS["ctc"]
    record = CTC
