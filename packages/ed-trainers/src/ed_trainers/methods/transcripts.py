"""Error rates of transcripts of held-out recordings, for methods that train models of speech."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import jax
import numpy as np
from ed_infra.errors import ConfigError
from ed_models.generation.options import special_token
from ed_models.generation.prompts import longest_sequence
from ed_models.tasks.ctc import best_labels
from flax import nnx

from ed_trainers.batches import HostBatch
from ed_trainers.contract import MethodRun
from ed_trainers.figures.word_errors import ErrorRates
from ed_trainers.losses.next_token import reads_sound
from ed_trainers.options.supervised import SFTArguments
from ed_trainers.rollout import until_end
from ed_trainers.state import EasyDeLState

#: Options of generate that a checkpoint of Whisper has in its generation_config.json.
_SUPPRESSED = ("suppress_tokens", "begin_suppress_tokens")


class Transcripts:
    """Transcribes held-out recordings with an encoder-decoder, and counts the errors.

    Raises:
        ConfigError: `predict_with_generate` is set, and the model reads no recordings, or there is
            no tokenizer.
    """

    def __init__(self, run: MethodRun[Any]):
        options = run.arguments
        self.active = isinstance(options, SFTArguments) and options.predict_with_generate
        if not self.active:
            return
        if not reads_sound(run.learner):
            raise ConfigError(
                f"predict_with_generate transcribes recordings, and {type(run.learner).__name__} "
                "reads none: omit predict_with_generate"
            )
        self.tokenizer = _get_tokenizer(run.tokenizer, "predict_with_generate")
        self.most = options.generation_max_length

    def rates(self, batches: Iterable[HostBatch], state: EasyDeLState) -> dict[str, float]:
        """Return `wer` and `cer`; empty without `predict_with_generate`."""
        if not self.active:
            return {}
        return count_errors(cast(Any, state.model), batches, self.tokenizer, self.most).rates()


def count_errors(
    model: Any,
    batches: Iterable[HostBatch],
    processor: object,
    most: int | None = None,
    limit: int | None = None,
) -> ErrorRates:
    """Transcribe held-out recordings with an encoder-decoder, greedily, and count the errors.

    Args:
        model: the model.
        batches: the recordings, and their transcripts as `labels`.
        processor: the processor of the model, or its tokenizer.
        most: most tokens of a transcript; None: the positions of the decoder.
        limit: most recordings; None: all.

    Raises:
        ConfigError: there is no tokenizer.
    """
    tokenizer, rates = _get_tokenizer(processor, "the word error rate"), ErrorRates()

    def read_text(tokens: Sequence[int] | np.ndarray) -> str:
        return tokenizer.decode([int(token) for token in tokens], skip_special_tokens=True)

    count = 0
    for batch in batches:
        rows = len(batch["labels"]) if limit is None else min(len(batch["labels"]), limit - count)
        part = {name: np.asarray(values)[:rows] for name, values in batch.items()}
        transcripts = _transcribe_batch(model, part, tokenizer, most)
        for row, tokens in zip(part["labels"], transcripts, strict=True):
            if (row >= 0).any():
                rates.add(read_text(row[row >= 0]), read_text(tokens))
        count += rows
        if count == limit:
            break
    return rates


def _transcribe_batch(
    model: Any, batch: HostBatch, tokenizer: object, most: int | None
) -> list[list[int]]:
    """Return the tokens of each transcript: greedy, with the tokens that begin it."""
    names = [name for name in model.input_names if not name.startswith("decoder_")]
    stored = json.loads(model.generation_json) if model.generation_json else {}
    start = stored.get("decoder_start_token_id")
    if start is None:
        start = special_token(model.config, "decoder_start_token_id")
    prefix = getattr(tokenizer, "prefix_tokens", None) or [start]
    longest = most or longest_sequence(model.config) or 448
    output = model.generate(
        inputs={name: batch[name] for name in names if name in batch},
        decoder_input_ids=[list(prefix)] * len(batch["labels"]),
        max_new_tokens=max(longest - len(prefix), 1),
        **{name: stored[name] for name in _SUPPRESSED if stored.get(name)},
    )
    return [until_end(row[len(prefix) :], model) for row in output.sequences.tolist()]


class BestLabels:
    """Reads the best label of each time step of a CTC model, and counts the errors."""

    def __init__(self, run: MethodRun[Any]):
        self.tokenizer: Any = None
        if run.tokenizer is not None:
            self.tokenizer = _get_tokenizer(run.tokenizer, "the error rates of an evaluation")
        self._step: Callable[..., tuple[jax.Array, jax.Array]] | None = None

    def rates(self, batches: Iterable[HostBatch], state: EasyDeLState) -> dict[str, float]:
        """Return `wer` and `cer`; empty for a trainer without a tokenizer."""
        if self.tokenizer is None:
            return {}
        rates, model = ErrorRates(), cast(Any, state.model)
        graphdef, variables = nnx.split(model)
        blank = model.config.pad_token_id
        if self._step is None:

            @jax.jit
            def score(
                variables: nnx.State, arrays: dict[str, jax.Array]
            ) -> tuple[jax.Array, jax.Array]:
                module = nnx.merge(graphdef, variables)
                mask = arrays["attention_mask"]
                return module(**arrays).logits, module.output_lengths((mask != 0).sum(axis=1))

            self._step = score
        for batch in batches:
            values = np.asarray(batch["input_values"], np.float32)
            mask = np.asarray(batch.get("attention_mask", np.ones(values.shape)), np.int32)
            arrays = {"input_values": values, "attention_mask": mask}
            logits, steps = jax.device_get(self._step(variables, arrays))
            for row, scores, count in zip(batch["labels"], logits, steps, strict=True):
                labels = np.asarray(row)
                if (labels >= 0).any():
                    predicted_labels = best_labels(scores[:count], blank)
                    rates.add(self.text(labels[labels >= 0]), self.text(predicted_labels))
        return rates.rates()

    def text(self, labels: Sequence[int] | np.ndarray) -> str:
        """Return the text of labels, which are merged already."""
        return self.tokenizer.decode([int(label) for label in labels], group_tokens=False)


def _get_tokenizer(processor: object, reason: str) -> Any:
    """Return the tokenizer of a processor, or the tokenizer itself.

    Raises:
        ConfigError: there is none.
    """
    tokenizer = getattr(processor, "tokenizer", processor)
    if not hasattr(tokenizer, "decode"):
        raise ConfigError(
            f"{reason} compares texts: pass the processor of the model as processing_class"
        )
    return tokenizer
