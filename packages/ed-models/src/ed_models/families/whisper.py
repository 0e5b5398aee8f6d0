"""Whisper (Radford et al. 2022): speech to text, in the language of the speech or in English.

- BART with norms before attention and feed-forward, and after each stack
- the encoder reads a log-mel spectrogram of 30 seconds through two convolutions
- both stacks have tables of positions; keys have no bias

Numbers and parameter names follow Hugging Face's `modeling_whisper.py`.

Legend: b batch, m mel bins, f frames, t = f / 2 encoder positions, d hidden.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.registry import register_config, register_module
from ed_layers.convolution import Convolution
from ed_layers.parts import Parts
from ed_layers.sinusoids import SinusoidalPositions, fairseq
from ed_layers.updated import Updated
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.bart import FIELDS, BartBody, BartForm
from ed_models.body.spec_augment import SpecAugment
from ed_models.tasks.seq2seq import DECODER_INPUTS, Seq2SeqLM
from ed_models.tasks.seq2seq_names import BART_WEIGHTS
from ed_models.weights.rules import Rule, equal, ignore, permute, renamed


@register_config("whisper")
class WhisperConfig(EasyDeLBaseConfig, transformers.WhisperConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "whisper"
    attribute_map = {
        **transformers.WhisperConfig.attribute_map,
        **FIELDS,
        "max_position_embeddings": "max_target_positions",
    }


class WhisperFrontEnd(nnx.Module):
    """Two convolutions over the frames of a spectrogram; the second halves their number."""

    def __init__(self, parts: Parts):
        config = parts.config
        d = config.d_model
        self.conv1 = Convolution(parts, config.num_mel_bins, d, taps=3, padding=1)
        self.conv2 = Convolution(parts, d, d, taps=3, stride=2, padding=1)

    def __call__(self, x: Float[Array, "b f m"]) -> Float[Array, "b t d"]:
        x = jax.nn.gelu(self.conv1(x), approximate=False)
        return jax.nn.gelu(self.conv2(x), approximate=False)


class WhisperPositions(nnx.Module):
    """The positions of the encoder: a table in the checkpoint, which is not trained."""

    def __init__(self, parts: Parts):
        config = parts.config
        rows = jnp.arange(config.max_source_positions)[None]
        table = SinusoidalPositions(fairseq(config.d_model), parts.param_dtype)(rows)[0]
        self.embedding = Updated(table, axes=(None, "embed"))
        self.dtype = parts.dtype

    def __call__(self, position_ids: Int[Array, "b t"]) -> Float[Array, "b t d"]:
        # The positions of an encoder without padding are 0, 1, 2, ...
        return self.embedding.get_value()[None, : position_ids.shape[1]].astype(self.dtype)


class WhisperModel(BartBody):
    """Convolutions, encoder, embedding, decoder."""

    config_class = WhisperConfig
    form = BartForm(pre_norm=True, embed_norm=False, key_bias=False, first_position=0)

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
        features = inputs["input_features"]
        expected = self.config.num_mel_bins, 2 * self.config.max_source_positions
        if features.shape[1:] != expected:
            raise ConfigError(
                f"input_features has rows of {list(features.shape[1:])}, but the model reads "
                f"{list(expected)} (mel bins, frames): use the feature extractor of the checkpoint"
            )
        features = features.swapaxes(1, 2)
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
