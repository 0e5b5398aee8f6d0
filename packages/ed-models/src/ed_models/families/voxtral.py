"""Voxtral (Mistral AI 2025): the encoder of Whisper, a projector, and a decoder such as Llama.

- a recording is cut into parts of 30 seconds, of which each is a log-mel spectrogram
- four encoder positions become one feature, so a part has 375 features
- the table of positions is not trained

The numbers follow Hugging Face's `modeling_voxtral.py`.

Legend: b rows, i recordings of a row, m mel bins, f frames, t encoder positions, n features of a
row, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import transformers
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.inputs import Encoded
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.bart import BartStack, self_attention
from ed_models.body.context import layer_context
from ed_models.body.encoder import BIDIRECTIONAL
from ed_models.body.layers import DecoderLayer
from ed_models.body.over_decoder import OverDecoder
from ed_models.body.tiles import OTHER_NAMES, STORED, TIED
from ed_models.body.vision import tower_rules
from ed_models.body.whisper_encoder import (
    FORM,
    WhisperFrontEnd,
    WhisperPositions,
    checked_frames,
)
from ed_models.tasks.audio_text import AudioTextLM
from ed_models.weights.rules import STANDARD, Rule, equal, permute, renamed

#: Parts of our names -> those of the audio tower.
NAMES: Mapping[str, str] = {
    "front_end.conv1": "conv1",
    "front_end.conv2": "conv2",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "norm": "layer_norm",
}
RULES = (
    Rule("front_end.{conv}.kernel", "front_end.{conv}.weight", permute(2, 1, 0)),
    Rule("front_end.{conv}.bias", "front_end.{conv}.bias", equal),
    *STANDARD,
)


class VoxtralEncoderConfig(EasyDeLBaseConfig, transformers.VoxtralEncoderConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "voxtral_encoder"
    attribute_map = {
        **transformers.VoxtralEncoderConfig.attribute_map,
        "hidden_act": "activation_function",
    }


@register_config("voxtral")
class VoxtralConfig(EasyDeLBaseConfig, transformers.VoxtralConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `audio_config`.
    """

    model_type = "voxtral"
    nested_configs: ClassVar[Mapping[str, type]] = {"audio_config": VoxtralEncoderConfig}
    text_config: Any = None
    audio_config: Any = None


def encoder_layer(parts: Parts, index: int) -> DecoderLayer:
    """Create a layer of the audio tower."""
    config = parts.config
    attention = self_attention(parts, FORM, config.num_attention_heads, mask=BIDIRECTIONAL)
    mlp = MLP(parts, config.intermediate_size, dropout=config.activation_dropout)
    return DecoderLayer(parts, self_attn=attention, mlp=mlp, dropout=config.dropout)


class VoxtralEncoder(BartStack):
    """Convolutions, positions, layers and a norm."""

    def __init__(self, parts: Parts):
        config = parts.config
        parts = replace(parts, norm_of_family=partial(parts.layer_norm, eps=1e-5))
        depth, positions = config.num_hidden_layers, WhisperPositions(parts)
        super().__init__(parts, FORM, encoder_layer, depth, config.layerdrop, positions)
        self.front_end, self.config = WhisperFrontEnd(parts), config

    def encode(self, features: Float[Array, "b m f"]) -> Float[Array, "b t d"]:
        """Return the outputs for spectrograms."""
        x = self.front_end(checked_frames(features, self.config))
        ctx, _ = layer_context(self.config, (x.shape[0], x.shape[1]), ropes={})
        x, *_ = self(x, ctx, None)
        return x


class VoxtralProjector(nnx.Module):
    """Two linear layers from joined encoder positions to the decoder."""

    def __init__(self, parts: Parts):
        config: VoxtralConfig = parts.config
        inputs, d = config.audio_config.intermediate_size, config.text_config.hidden_size
        self.linear_1 = parts.linear(inputs, d, axes=(None, "embed"))
        self.linear_2 = parts.linear(d, d, axes=("embed", None))
        self.act = config.projector_hidden_act

    def __call__(self, x: Float[Array, "b n f"]) -> Float[Array, "b n d"]:
        return self.linear_2(activation(self.act)(self.linear_1(x)))


class VoxtralModel(OverDecoder, EasyDeLBaseModule):
    """Audio tower, projector and decoder."""

    config_class = VoxtralConfig

    def __init__(
        self,
        config: Any,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        numbers = self.dtype, self.param_dtype, precision
        self.audio_tower = VoxtralEncoder(Parts(config.audio_config, rngs, *numbers))
        self.multi_modal_projector = VoxtralProjector(Parts(config, rngs, *numbers))
        text = registry.get_module(TaskType.CAUSAL_LM, config.text_config.model_type)
        self.language_model = text.body_class(
            config.text_config, dtype, param_dtype, precision, rngs=rngs
        )

    def encode(self, input_features: Float[Array, "b i m f"]) -> Encoded:
        """Return the features of all recordings of a row, one after another."""
        b, i, *size = input_features.shape
        hidden = self.audio_tower.encode(input_features.reshape(b * i, *size))
        joined = hidden.reshape(b, -1, self.config.audio_config.intermediate_size)
        features = self.multi_modal_projector(joined)
        return Encoded(features, jnp.ones(features.shape[:2], jnp.int32))


@register_module(TaskType.ANY_TO_ANY, config=VoxtralConfig, model_type="voxtral")
class VoxtralForConditionalGeneration(AudioTextLM):
    """Voxtral with a language-model head."""

    body_class = VoxtralModel
    DERIVED = {}
    TIED_WEIGHTS = TIED
    OTHER_NAMES = {**OTHER_NAMES, "model.audio_tower": "audio_tower"}
    WEIGHTS = (
        *tower_rules("model.audio_tower", "audio_tower", NAMES, RULES),
        *renamed(STORED, *STANDARD),
    )
