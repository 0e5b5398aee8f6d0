"""Batches for the loss of the next token, of texts and of transcripts of recordings.

The labels are shifted here, once, on the host.

Legend: b rows, s positions, t positions of a decoder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from ed_models.protocol import LanguageModel
from ed_models.tasks.causal_lm import next_token_targets

from ed_trainers.batches import HostBatch
from ed_trainers.placement import TOKENS

_INPUTS = ("segment_ids", "attention_mask", "position_ids")
_LABELS = ("labels", "loss_weights")
_DECODER = (
    "decoder_input_ids",
    "decoder_segment_ids",
    "decoder_attention_mask",
    "decoder_position_ids",
    "loss_weights",
)
_IGNORED = -100


def next_token_batch(batch: HostBatch, model: LanguageModel | None = None) -> Inputs[np.ndarray]:
    """Return a batch with targets and weights; numeric arrays of other names are kept.

    Position t gets the label of position t + 1 as its target, unless that label is ignored (-100),
    padding, or in another segment. For an encoder-decoder, decoder position t gets label t.

    Args:
        batch: `input_ids` int [b, s]; optionally `labels` (default: the inputs), `segment_ids`
            (default: `attention_mask`, else one segment per row), `position_ids` (default: counted
            within each segment), `loss_weights` float [b, s], the weight of each predicted token.
            For an encoder-decoder, `labels` and `loss_weights` are [b, t], with
            `decoder_input_ids` [b, t] (default: `labels` shifted to the right within each segment)
            and `decoder_segment_ids` [b, t] (default: one segment per row, up to the last label).
        model: the trained model; its `input_names` show whether it is an encoder-decoder.

    Returns:
        `input_ids`, `segment_ids`, `position_ids` int32 [b, s]; `targets` int32 and `weights`
        float32, [b, s] or [b, t]; a target whose weight is 0 is 0.

    Raises:
        ConfigError: `input_ids` or the labels of a decoder are missing, or shapes differ.
    """
    has_decoder = model is not None and "decoder_input_ids" in model.input_names
    has_decoder |= "decoder_input_ids" in batch
    arrays = sequence_arrays(batch, () if has_decoder else _LABELS)
    inputs, segments = arrays["input_ids"], arrays["segment_ids"]
    if has_decoder:
        arrays |= decoder_arrays(batch, model)
    else:
        labels = np.asarray(batch.get("labels", inputs), np.int32)
        targets, weights = next_token_targets(labels, segments)
        if "loss_weights" in batch:
            following = np.roll(np.asarray(batch["loss_weights"], np.float32), -1, axis=1)
            weights = np.where(weights > 0, following, np.float32(0))
        arrays |= {"targets": targets, "weights": weights}
    read = {*arrays, "labels", "attention_mask", "loss_weights", "decoder_attention_mask"}
    return Inputs({**arrays, **further_arrays(batch, read)}, {"targets": TOKENS, "weights": TOKENS})


def sequence_arrays(batch: HostBatch, like_inputs: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Return `input_ids`, `segment_ids` and `position_ids` int32 [b, s] of a batch.

    Args:
        batch: as for `next_token_batch`.
        like_inputs: names of further arrays that must have the shape of `input_ids`, if present.

    Raises:
        ConfigError: `input_ids` is missing, or shapes differ.
    """
    if "input_ids" not in batch:
        raise ConfigError(f"a batch has no input_ids, only {', '.join(sorted(batch))}")
    inputs = np.ascontiguousarray(batch["input_ids"], np.int32)
    _check_shapes(batch, "input_ids", (*_INPUTS, *like_inputs))
    segments = batch.get("segment_ids", batch.get("attention_mask"))
    segments = np.ones_like(inputs) if segments is None else np.asarray(segments, np.int32)
    positions = batch.get("position_ids")
    if positions is None:
        positions = np.where(segments > 0, places_in_segments(segments), 0)
    return {
        "input_ids": inputs,
        "segment_ids": segments,
        "position_ids": np.asarray(positions, np.int32),
    }


def further_arrays(batch: HostBatch, read: Collection[str]) -> dict[str, np.ndarray]:
    """Return the numeric arrays of a batch [b, ...] whose names are not in `read`."""
    extra_arrays = {name: np.asarray(array) for name, array in batch.items() if name not in read}
    # Text and values of the whole batch, which a loader may add, are no arrays of a model.
    rows = np.shape(batch["input_ids"])[:1]
    return {n: x for n, x in extra_arrays.items() if x.dtype.kind in "biuf" and x.shape[:1] == rows}


def decoder_arrays(batch: HostBatch, model: LanguageModel | None) -> dict[str, np.ndarray]:
    """Return the arrays of the decoder, each [b, t]."""
    if "labels" not in batch:
        raise ConfigError(
            "a batch of an encoder-decoder has labels, the tokens of the decoder, not only "
            f"{', '.join(sorted(batch))}"
        )
    _check_shapes(batch, "labels", _DECODER)
    labels = np.asarray(batch["labels"], np.int32)
    decoder_segments = batch.get("decoder_segment_ids", batch.get("decoder_attention_mask"))
    if decoder_segments is None:
        label_mask = labels != _IGNORED
        decoder_segments = np.flip(np.maximum.accumulate(np.flip(label_mask, 1), axis=1), 1)
    segments = np.asarray(decoder_segments, np.int32)
    places = np.where(segments > 0, places_in_segments(segments), 0)
    tokens = batch.get("decoder_input_ids")
    if tokens is None:
        previous_labels = np.roll(labels, 1, axis=1)
        pad = 0 if model is None else _token(model, "pad_token_id", "eos_token_id")
        start = pad if model is None else _token(model, "decoder_start_token_id", "pad_token_id")
        tokens = np.where(
            places == 0, start, np.where(previous_labels == _IGNORED, pad, previous_labels)
        )
        tokens = np.where(segments > 0, tokens, pad)
    counts = (labels != _IGNORED) & (segments > 0)
    weights = counts.astype(np.float32)
    if "loss_weights" in batch:
        weights = weights * np.asarray(batch["loss_weights"], np.float32)
    return {
        "decoder_input_ids": np.asarray(tokens, np.int32),
        "decoder_segment_ids": segments,
        "decoder_position_ids": np.asarray(batch.get("decoder_position_ids", places), np.int32),
        "targets": np.where(counts, labels, 0),
        "weights": weights,
    }


def _check_shapes(batch: HostBatch, like: str, names: tuple[str, ...]) -> None:
    expected_shape = np.shape(batch[like])
    for name in names:
        if name in batch and np.shape(batch[name]) != expected_shape:
            raise ConfigError(
                f"{name} has shape {np.shape(batch[name])}, {like} has {expected_shape}"
            )


def _token(model: LanguageModel, *names: str) -> int:
    """Return the first special token of the model's configuration that is set."""
    fields: Mapping[str, object] = model.config.to_dict()
    for name in names:
        if isinstance(token := fields.get(name), int):
            return token
    raise ConfigError(
        f"the model's configuration has none of {', '.join(names)}: set one, or put "
        "decoder_input_ids into each batch"
    )


def places_in_segments(segment_ids: np.ndarray) -> np.ndarray:
    """Return the position of each token within its segment, from 0.

    This is `ed_infra.masks.segment_index` on the host: a device would delay each step.
    """
    reached = np.maximum.accumulate(segment_ids, axis=1)
    begins = np.diff(reached, axis=1, prepend=0) > 0
    places = np.arange(segment_ids.shape[1], dtype=np.int32)
    return places - np.maximum.accumulate(np.where(begins, places, 0), axis=1)


def reads_sound(model: LanguageModel) -> bool:
    """Return whether a model reads recordings instead of tokens.

    An audio-language model reads recordings as items of its prompts, so it also reads tokens.
    """
    names = {*model.input_names}
    return "input_ids" not in names and bool({"input_features", "input_values"} & names)


def speech_batch(batch: HostBatch, model: LanguageModel) -> Inputs[np.ndarray]:
    """Return a batch of recordings with targets and weights of their transcripts.

    Args:
        batch: the array that the model reads, `input_features` or `input_values`, optionally
            `attention_mask` of the samples, and the arrays of the decoder as for
            `next_token_batch`: `labels` int [b, t], ….
        model: the trained model.

    Raises:
        ConfigError: the recordings or the labels are missing, or shapes differ.
    """
    name = model.input_names[0]
    if name not in batch:
        raise ConfigError(
            f"a batch of {type(model).__name__} has {name}, not only {', '.join(sorted(batch))}"
        )
    sound: dict[str, np.ndarray] = {name: np.asarray(batch[name], np.float32)}
    if "attention_mask" in model.input_names and "attention_mask" in batch:
        sound["attention_mask"] = np.asarray(batch["attention_mask"], np.int32)
    decoder_inputs = decoder_arrays(batch, model)
    return Inputs({**sound, **decoder_inputs}, {"targets": TOKENS, "weights": TOKENS})
