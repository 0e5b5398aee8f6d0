"""Span corruption: pre-training of encoder-decoders as T5 (Raffel et al., arXiv:1910.10683).

Legend: b rows, s positions of the encoder, t positions of the decoder.
"""

from __future__ import annotations

from typing import cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_models.protocol import LanguageModel

from ed_trainers.arguments import METHODS
from ed_trainers.batches import HostBatch
from ed_trainers.contract import Batch, Loss, Method, MethodRun, Models, Prepared
from ed_trainers.losses.masking import feed, get_batch_number
from ed_trainers.losses.next_token import next_token_batch, sequence_arrays
from ed_trainers.losses.spans import Sentinels, SentinelTokenizer, corrupted_rows, target_width
from ed_trainers.methods.sft import cross_entropy
from ed_trainers.options.supervised import SpanCorruptionArguments
from ed_trainers.trainer import Trainer


class SpanCorruptionRun(MethodRun[SpanCorruptionArguments]):
    """A run of `span_corruption`, with the sentinels of its tokenizer."""

    sentinels: Sentinels
    pad: int

    def create_parts(self, models: dict[str, LanguageModel]) -> None:
        """See `MethodRun`."""
        if self.tokenizer is None:
            raise ConfigError(
                "span corruption needs a tokenizer, whose sentinels it reads: pass processing_class"
            )
        self.sentinels = Sentinels.of(cast(SentinelTokenizer, self.tokenizer))
        pad = self.learner.config.pad_token_id
        self.pad = pad if isinstance(pad, int) else 0


def prepare(run: SpanCorruptionRun, batch: HostBatch) -> Prepared:
    """Replace spans of a batch by sentinels; see `corrupted_rows`.

    Spans are drawn from `seed`, the step and the tokens of a document. An evaluation corrupts the
    same spans each time.

    Args:
        run: the run of the method.
        batch: `input_ids` int [b, s]; optionally `segment_ids`.

    Returns:
        The arrays of an encoder-decoder, as `next_token_batch` returns them.
    """
    options = run.arguments
    sequences = sequence_arrays(batch)
    density, mean_span = options.noise_density, options.mean_noise_span_length
    rows = corrupted_rows(
        sequences["input_ids"],
        sequences["segment_ids"],
        run.sentinels,
        density=density,
        mean_span=mean_span,
        width=options.max_target_length
        or target_width(sequences["input_ids"].shape[1], density, mean_span),
        pad=run.pad,
        seed=(options.seed, get_batch_number(batch)),
    )
    arrays: dict[str, np.ndarray] = rows._asdict()
    return next_token_batch(arrays, run.learner)


def loss(
    run: SpanCorruptionRun,
    models: Models,
    batch: Batch,
    key: jax.Array | None,
) -> Loss:
    """Return the cross-entropy of the tokens of the decoder."""
    return cross_entropy(run, models, batch, key)


SPAN_CORRUPTION = Method[SpanCorruptionRun](
    run=SpanCorruptionRun, prepare=prepare, loss=loss, feed=feed
)


class SpanCorruptionTrainer(Trainer):
    """Trains a `Seq2SeqLM` to predict spans; `arguments` are `SpanCorruptionArguments`."""

    entry = METHODS["span_corruption"]
    record = SPAN_CORRUPTION
