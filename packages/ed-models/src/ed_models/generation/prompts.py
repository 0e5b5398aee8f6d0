"""The prompts of `generate`: validation, padding, and the arguments of the prefill.

Legend: b rows, s prompt length, w bucket of prompt lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.errors import ConfigError
from ed_infra.inputs import Inputs
from jaxtyping import Bool, Int
from transformers import PretrainedConfig

from ed_models.protocol import LanguageModel

#: Smallest number of positions of a prompt, and of a decoder's first tokens.
SMALLEST_BUCKET, SMALLEST_START = 16, 1
#: Output of an encoder [b, t, d], which callers may pass instead of the encoder's inputs.
ENCODER_OUTPUTS = "encoder_outputs"
TokenRows = jax.Array | np.ndarray | Sequence[Sequence[int]]


@dataclass(frozen=True)
class PromptBatch:
    """Validated prompts.

    Attributes:
        ids: token ids as passed by the caller, int32 [b, s].
        token_mask: whether an entry is a token, [b, s].
        lengths: number of tokens of each row, int32 [b].
        inputs: further arrays of the prompts; for an encoder-decoder, the arrays of the encoder.
    """

    ids: Int[np.ndarray, "b s"]
    token_mask: Bool[np.ndarray, "b s"]
    lengths: Int[np.ndarray, " b"]
    inputs: Inputs = field(default_factory=lambda: Inputs({}))

    @classmethod
    def read(
        cls,
        ids: Int[np.ndarray, "b s"],
        attention_mask: TokenRows | None,
        padding: int | None,
        vocab_size: int | None,
    ) -> PromptBatch:
        """Validate prompts.

        Args:
            ids: result of `as_token_ids`.
            attention_mask: [b, s], 1 for a token, 0 for padding.
            padding: the padding token at the start of rows, used without a mask.
            vocab_size: number of tokens; None = unknown.

        Raises:
            ConfigError: see `generate`.
        """
        token_mask = _build_token_mask(ids, attention_mask, padding)
        lengths = token_mask.sum(axis=1).astype(np.int32)
        if not lengths.all():
            raise ConfigError(f"row {int(np.argmin(lengths))} of input_ids contains only padding")
        return cls(_in_vocabulary(ids, token_mask, vocab_size), token_mask, lengths)

    def align_tokens(self, smallest: int = SMALLEST_BUCKET) -> tuple[np.ndarray, np.ndarray]:
        """Return right-aligned tokens and their validity, [b, w]; w is at least `smallest`."""
        return right_aligned(self.ids, self.token_mask, bucket(int(self.lengths.max()), smallest))

    def source(self, model: LanguageModel) -> Int[np.ndarray, "b u"]:
        """Return the tokens of the encoder, or of the prompts; -1 = padding.

        Raises:
            ConfigError: the encoder does not read tokens.
        """
        if not is_encoder_decoder(model):
            return np.where(self.token_mask, self.ids, -1)
        if "input_ids" not in self.inputs:
            raise ConfigError(
                "encoder_repetition_penalty and encoder_no_repeat_ngram_size need the tokens of "
                "the encoder: pass input_ids, or omit these options"
            )
        return np.where(self.inputs["attention_mask"] != 0, self.inputs["input_ids"], -1)

    def check_room(self, config: EasyDeLBaseConfig, new: int) -> None:
        """Check that a model has positions for the prompts and `new` more tokens.

        Raises:
            ConfigError: the model has too few positions.
        """
        limit, prompt = longest_sequence(config.get_text_config()), int(self.lengths.max())
        if limit is None or prompt + new <= limit:
            return
        raise ConfigError(
            f"{prompt} prompt tokens and max_new_tokens={new} need {prompt + new} positions, but "
            f"the model has max_position_embeddings={limit}: request at most "
            f"{limit - prompt} new tokens"
            if prompt < limit
            else f"the prompt has {prompt} tokens, which leaves no room in the model's "
            f"max_position_embeddings={limit}: shorten the prompt"
        )


def bucket(n: int, smallest: int = SMALLEST_BUCKET) -> int:
    """Round up to a power of two, at least `smallest`, to limit the number of compiled programs."""
    return max(smallest, 1 << (n - 1).bit_length())


def right_aligned(
    ids: np.ndarray, token_mask: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Move the tokens of each row to the right edge of [b, width]; return tokens and validity."""
    tokens = np.zeros((len(ids), width), np.int32)
    valid = np.zeros((len(ids), width), np.int32)
    for row, (values, keep) in enumerate(zip(ids, token_mask, strict=True)):
        packed = values[keep]
        tokens[row, width - len(packed) :] = packed
        valid[row, width - len(packed) :] = 1
    return tokens, valid


def as_token_ids(input_ids: TokenRows) -> Int[np.ndarray, "b s"]:
    """Return the prompts as an array of integers.

    Raises:
        ConfigError: the rows differ in length, or the values are not integers.
    """
    try:
        ids = np.asarray(input_ids)
    except ValueError:
        raise ConfigError(
            "the rows of input_ids have different lengths; pad them on the left to one length, "
            "and pass attention_mask"
        ) from None
    if ids.ndim != 2 or 0 in ids.shape:
        raise ConfigError(
            f"input_ids has shape {list(ids.shape)}; it must be [rows, tokens], "
            "at least one of each"
        )
    if ids.dtype.kind not in "iu":
        raise ConfigError(f"input_ids has dtype {ids.dtype}; token ids are whole numbers")
    return ids


def _in_vocabulary(
    ids: Int[np.ndarray, "b s"], token_mask: Bool[np.ndarray, "b s"], vocab_size: int | None
) -> Int[np.ndarray, "b s"]:
    """Return the prompts as int32 after a check of all tokens except padding."""
    size = vocab_size or 2**31
    for row, at in np.argwhere(token_mask & ((ids < 0) | (ids >= size))):
        raise ConfigError(
            f"token {ids[row, at]} (row {row}, position {at} of input_ids) is not in the model's "
            f"vocabulary of {size} tokens; was the tokenizer made for another model?"
        )
    return ids.astype(np.int32)


def _build_token_mask(
    ids: Int[np.ndarray, "b s"], attention_mask: TokenRows | None, padding: int | None
) -> Bool[np.ndarray, "b s"]:
    if attention_mask is not None:
        mask = np.asarray(attention_mask)
        if mask.shape != ids.shape:
            raise ConfigError(
                f"attention_mask has shape {list(mask.shape)}, input_ids {list(ids.shape)}; "
                "they must be equal"
            )
        return mask != 0
    if padding is None:
        return np.ones(ids.shape, bool)
    return np.logical_or.accumulate(ids != padding, axis=1)


def longest_sequence(config: PretrainedConfig) -> int | None:
    """Return the maximum length of a text; None if the rotary factors adapt to any length."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") == "dynamic":
        return None
    longest = getattr(config, "max_position_embeddings", None)
    # RoBERTa's positions begin after the number of the padding token.
    return None if longest is None else longest - getattr(config, "first_position", 0)


def is_encoder_decoder(model: LanguageModel) -> bool:
    """Return whether a model has an encoder, and a separate decoder."""
    return "decoder_input_ids" in model.input_names


def prompt_inputs(
    model: LanguageModel, input_ids: TokenRows | None, arrays: Mapping[str, Any]
) -> Inputs:
    """Validate the arrays of prompts.

    Args:
        model: the model that reads the arrays.
        input_ids: token ids; None if the encoder reads another array.
        arrays: further arrays by name, each with one entry per row.

    Raises:
        ConfigError: the model does not read an array, an array has another number of rows, or the
            array that the model reads first is missing.
    """
    if input_ids is not None:
        arrays = model.batched_inputs(as_token_ids(input_ids), arrays)
        unread = get_processor_names(model)
        arrays = {name: array for name, array in arrays.items() if name not in unread}
    inputs = Inputs({name: np.asarray(array) for name, array in arrays.items()})
    if input_ids is not None:
        inputs = Inputs({"input_ids": as_token_ids(input_ids), **inputs}, inputs.declared)
    input_names = model.input_names
    encoded = (ENCODER_OUTPUTS,) if is_encoder_decoder(model) else ()
    main = next((name for name in (input_names[0], *encoded) if name in inputs), None)
    if main is None:
        raise ConfigError(f"{type(model).__name__} reads {input_names[0]}: pass this array")
    for name, array in inputs.items():
        if name not in (*input_names, *encoded):
            raise ConfigError(
                f"{type(model).__name__} does not read {name}; its inputs are "
                f"{', '.join(input_names)}"
            )
        if len(array) != len(inputs[main]):
            raise ConfigError(f"{name} has {len(array)} rows, but {main} has {len(inputs[main])}")
    return inputs


def get_processor_names(model: LanguageModel) -> tuple[str, ...]:
    """Return the arrays of processors of transformers that only `batched_inputs` reads."""
    modality = getattr(model, "modality", None)
    return () if modality is None else modality.unread


def decoder_start(model: LanguageModel, start: int | None, inputs: Inputs) -> tuple[Any, Any]:
    """Return the first tokens of a decoder [b, s], and their mask or None.

    Args:
        model: an encoder-decoder.
        start: `decoder_start_token_id`; used without `decoder_input_ids`.
        inputs: arrays of the call.

    Raises:
        ConfigError: there are neither `decoder_input_ids` nor a start token.
    """
    if "decoder_input_ids" in inputs:
        return inputs["decoder_input_ids"], inputs.get("decoder_attention_mask")
    if start is None:
        raise ConfigError(
            f"{type(model).__name__} has no decoder_start_token_id: pass decoder_start_token_id "
            "or decoder_input_ids"
        )
    rows = len(next(iter(inputs.values())))
    return np.full((rows, 1), start, np.int32), None


def encoder_inputs(prompts: PromptBatch, limit: int | None) -> Inputs:
    """Return the arrays of an encoder, padded on the right to a bucketed length.

    Args:
        prompts: the tokens of the encoder.
        limit: number of positions of the encoder; None = any number. A longer text is not padded.
    """
    length = prompts.ids.shape[1]
    width = bucket(length)
    width = width if limit is None else max(length, min(width, limit))
    pad = ((0, 0), (0, width - prompts.ids.shape[1]))
    ids = np.where(prompts.token_mask, prompts.ids, 0)
    return Inputs(
        {
            "input_ids": np.pad(ids, pad).astype(np.int32),
            "attention_mask": np.pad(prompts.token_mask, pad).astype(np.int32),
        }
    )


def count_positions(
    input_ids: Int[jax.Array, "b s"], attention_mask: Int[jax.Array, "b s"] | None
) -> Int[jax.Array, "b s"]:
    """Return the positions of the tokens of each row, which padding does not count."""
    mask = jnp.ones(input_ids.shape, jnp.int32) if attention_mask is None else attention_mask
    return jnp.maximum(jnp.cumsum(mask, axis=1, dtype=jnp.int32) - 1, 0)


def decoder_arguments(
    model: LanguageModel,
    input_ids: Int[jax.Array, "b s"],
    max_length: int,
    pad_token_id: int | None,
    attention_mask: Int[jax.Array, "b s"] | None,
    inputs: Inputs | None,
) -> dict[str, Any]:
    """Return the arguments of `decode`; see `EasyGenerationMixin.prepare_inputs_for_generation`."""
    if attention_mask is None and pad_token_id is not None:
        attention_mask = (input_ids != pad_token_id).astype(jnp.int32)
    arguments: dict[str, Any] = {"attention_mask": attention_mask}
    size = input_ids.shape[0], max_length
    if not is_encoder_decoder(model):
        if not inputs:
            arguments["position_ids"] = count_positions(input_ids, attention_mask)
        return {**arguments, **(inputs or {}), "past_key_values": model.init_cache(*size)}
    if inputs is None:
        name = model.input_names[0]
        raise ConfigError(f"{type(model).__name__} reads an encoder: pass inputs with {name}")
    encoded = model.encode(inputs)
    cache = model.init_cache(*size, encoder_length=encoded.segment_ids.shape[1])
    return {**arguments, "encoded": encoded, "past_key_values": cache}
