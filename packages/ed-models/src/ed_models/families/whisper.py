"""Whisper (Radford et al. 2022): speech to text, in the language of the speech or in English.

- BART with norms before attention and feed-forward, and after each stack
- the encoder reads a log-mel spectrogram of 30 seconds through two convolutions
- both stacks have tables of positions; keys have no bias

Numbers and parameter names follow Hugging Face's `modeling_whisper.py`.

Legend: b batch, m mel bins, f frames, t = f / 2 encoder positions, d hidden.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.bart import BART_FIELDS, BartBody
from ed_models.body.spec_augment import SpecAugment
from ed_models.body.whisper_encoder import (
    FORM,
    WhisperFrontEnd,
    WhisperPositions,
    checked_frames,
)
from ed_models.tasks.seq2seq import DECODER_INPUTS, Seq2SeqLM
from ed_models.tasks.seq2seq_names import BART_WEIGHTS
from ed_models.weights.rules import Rule, equal, ignore, permute, renamed


@register_config("whisper")
class WhisperConfig(EasyDeLBaseConfig, transformers.WhisperConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "whisper"
    attribute_map = {
        **transformers.WhisperConfig.attribute_map,
        **BART_FIELDS,
        "max_position_embeddings": "max_target_positions",
    }


class WhisperModel(BartBody):
    """Convolutions, encoder, embedding, decoder."""

    config_class = WhisperConfig
    form = FORM

    @property
    def embed_scale(self):
        return 1.0

    @staticmethod
    def encoder_positions(parts):
        return WhisperPositions(parts)

    def add_embeddings(self, parts):
        config = parts.config
        padding = config.pad_token_id
        self.embed_tokens = parts.embed(config.vocab_size, config.d_model, padding=padding)
        self.front_end = WhisperFrontEnd(parts)

    def encoder_inputs(self, inputs, key):
        features = checked_frames(inputs["input_features"], self.config)
        if key is not None and self.config.apply_spec_augment:
            masks = SpecAugment.of(self.config).masks(key, features.shape)
            features = jnp.where(masks.time | masks.feature, 0, features)
        return self.front_end(features), {}


@register_module(TaskType.SPEECH_SEQUENCE_TO_SEQUENCE, config=WhisperConfig, model_type="whisper")
class WhisperForConditionalGeneration(Seq2SeqLM):
    """Whisper with a language-model head."""

    body_class = WhisperModel
    input_names = ("input_features", *DECODER_INPUTS)
    WEIGHTS = (
        Rule("model.embed_tokens.embedding", "model.decoder.embed_tokens.weight", equal),
        Rule("model.front_end.{conv}.kernel", "model.encoder.{conv}.weight", permute(2, 1, 0)),
        Rule("model.front_end.{conv}.bias", "model.encoder.{conv}.bias", equal),
        *renamed({"lm_head": "proj_out"}, *BART_WEIGHTS),
        ignore("proj_out.weight"),
    )
