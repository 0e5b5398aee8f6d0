"""Encoder-decoder language models.

Legend: b batch, t encoder positions, s decoder positions, d hidden, v vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

import jax
import jax.numpy as jnp
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Inputs
from ed_infra.outputs import CausalLMOutput
from ed_layers.cache.hybrid import HybridCache
from ed_layers.cache.protocol import Cache
from ed_layers.cache.ragged import RaggedBatch
from ed_layers.updated import Updated
from jaxtyping import Array, Float, Int

from ed_models.body.encoder_decoder import EncoderDecoder
from ed_models.tasks.causal_lm import LogitsAt, VocabularyHead, same_targets

if TYPE_CHECKING:
    from ed_layers.losses import TokenLoss

DECODER_INPUTS = (
    "decoder_input_ids",
    "decoder_attention_mask",
    "decoder_segment_ids",
    "decoder_position_ids",
)


class Seq2SeqLM(VocabularyHead):
    """An encoder and a decoder under `model`, and a head.

    The body has two methods. `encode(inputs, key=)` returns `Encoded`. `__call__` accepts tokens of
    the decoder, masks, positions, a cache and `encoded`, and returns a BaseModelOutput. The decoder
    writes the keys and values of `encoded` to the cache group "cross"; later calls with the cache
    omit `encoded`.
    """

    input_names = ("input_ids", "attention_mask", "segment_ids", *DECODER_INPUTS)

    #: Whether the logits have a bias, which is not trained.
    logits_bias: ClassVar[bool] = False

    def add_head(self, parts):
        super().add_head(parts)
        if self.logits_bias:
            zeros = jnp.zeros((1, self.model.embed_tokens.embedding.shape[0]), parts.param_dtype)
            self.final_logits_bias = Updated(zeros, axes=(None, "vocab"))

    def head(self):
        head = super().head()
        if self.logits_bias:
            head = replace(head, bias=self.final_logits_bias.get_value()[0])
        return head

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Run the encoder; see `ed_models.body.encoder_decoder.EncoderDecoder`."""
        return self.model.encode(inputs, key=key)

    def write_encoded(
        self, cache: HybridCache, encoded: Encoded, slot: int | Int[Array, ""]
    ) -> HybridCache:
        """Write the cross-attention keys and values of one encoder output to a serving cache.

        Args:
            cache: a cache of `init_paged_cache(..., encoder_length=)`.
            encoded: the encoder output of one sequence, b = 1.
            slot: the slot of the sequence, as in `RaggedBatch.state_slots`.
        """
        return cast(EncoderDecoder, self.model).write_encoded(cache, encoded, slot)

    def decode(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        encoded: Encoded | None = None,
        past_key_values: Cache | None = None,
        logits_at: LogitsAt = "all",
        **inputs: Any,
    ) -> CausalLMOutput:
        """Run the decoder on its tokens.

        Args:
            input_ids: token ids of the decoder, [b, s].
            encoded: the output of `encode`; None if the cache contains its keys and values.
            past_key_values: a cache; None in training.
            logits_at: see `CausalLM.__call__`.
            inputs: `inputs_embeds`, `attention_mask`, `segment_ids`, `position_ids`, `ragged`,
                `key` and `output_hidden_states`; see `CausalLM.__call__`.
        """
        body = self.model(input_ids, encoded=encoded, past_key_values=past_key_values, **inputs)
        return self.output(body, logits_at)

    def __call__(
        self,
        input_ids: Int[Array, "b t"] | None = None,
        *,
        decoder_input_ids: Int[Array, "b s"] | None = None,
        decoder_attention_mask: Int[Array, "b s"] | None = None,
        decoder_segment_ids: Int[Array, "b s"] | None = None,
        decoder_position_ids: Int[Array, "b s"] | None = None,
        encoded: Encoded | None = None,
        past_key_values: Cache | None = None,
        ragged: RaggedBatch | None = None,
        logits_at: LogitsAt = "all",
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        labels: Int[Array, "b s"] | None = None,
        **encoder_inputs: Array | None,
    ) -> CausalLMOutput:
        """Run the encoder, unless `encoded` or the cache contains its output, and the decoder.

        Args:
            input_ids: token ids of the encoder, [b, t].
            decoder_input_ids: token ids of the decoder, [b, s].
            decoder_attention_mask, decoder_segment_ids, decoder_position_ids: as
                `attention_mask`, `segment_ids` and `position_ids` of a decoder. Segments of encoder
                and decoder with the same number belong together.
            encoded: the output of `encode`, instead of `input_ids`.
            past_key_values: a cache; None in training.
            ragged: the flat batch of a serving step (then b = 1).
            logits_at, key, output_hidden_states: see `CausalLM.__call__`.
            labels: also return the loss of `compute_loss`.
            encoder_inputs: further arrays of the encoder, which `input_names` lists:
                `attention_mask` (nonzero = a token) and `segment_ids` (packed documents 1, 2, ...;
                0 = padding), [b, t]. A model for speech reads `input_features` or `input_values`
                instead of `input_ids`.

        Raises:
            ConfigError: the encoder does not read one of these arrays.
        """
        encoder_arrays = {"input_ids": input_ids, **encoder_inputs}
        encoder_arrays = {
            name: array for name, array in encoder_arrays.items() if array is not None
        }
        for name in encoder_arrays.keys() - {*self.input_names}:
            raise ConfigError(
                f"{type(self).__name__} does not read {name}; its inputs are "
                f"{', '.join(self.input_names)}"
            )
        if encoded is None and encoder_arrays:
            encoded = self.encode(Inputs(encoder_arrays), key=key)
        if labels is not None and decoder_input_ids is None:
            decoder_input_ids = self.shift_labels(labels)
        output = self.decode(
            decoder_input_ids,
            encoded=encoded,
            attention_mask=decoder_attention_mask,
            segment_ids=decoder_segment_ids,
            position_ids=decoder_position_ids,
            past_key_values=past_key_values,
            ragged=ragged,
            logits_at=logits_at,
            key=key,
            output_hidden_states=output_hidden_states,
        )
        return output if labels is None else self.add_loss(output, *same_targets(labels))[0]

    def compute_loss(
        self,
        input_ids: Int[Array, "b t"] | None = None,
        *,
        labels: Int[Array, "b s"],
        loss_config: TokenLoss | None = None,
        **inputs: Any,
    ) -> tuple[CausalLMOutput, Float[Array, ""]]:
        """Compute the mean cross-entropy of the labels in nats, without materializing the logits.

        Args:
            input_ids: token ids of the encoder.
            labels: the label of each decoder position; -100 is ignored. Without
                `decoder_input_ids`, the decoder reads `decoder_start_token_id` and the labels
                shifted right.
            loss_config: additional terms of the loss.
            inputs: further arguments of `__call__`.

        Returns:
            The output with `loss`, and the number of tokens in the mean.
        """
        if "decoder_input_ids" not in inputs:
            inputs["decoder_input_ids"] = self.shift_labels(labels)
        output = self(input_ids, logits_at="none", **inputs)
        return self.add_loss(output, *same_targets(labels), loss_config)

    def shift_labels(self, labels: Int[Array, "b s"]) -> Int[Array, "b s"]:
        """Return the tokens of the decoder: a first token, and the labels but the last."""
        tokens = jnp.where(labels == -100, self.config.pad_token_id, labels)
        return jnp.concatenate([self.first_tokens(tokens), tokens[:, :-1]], axis=1)

    def first_tokens(self, tokens: Int[Array, "b s"]) -> Int[Array, "b 1"]:
        """Return the first token that the decoder reads; `tokens` are the labels, padded.

        Raises:
            ConfigError: the configuration has no `decoder_start_token_id`.
        """
        start = getattr(self.config, "decoder_start_token_id", None)
        if start is None:
            raise ConfigError(
                "the configuration has no decoder_start_token_id, which precedes the labels: set "
                "that field, or pass decoder_input_ids"
            )
        return jnp.full_like(tokens[:, :1], start)
