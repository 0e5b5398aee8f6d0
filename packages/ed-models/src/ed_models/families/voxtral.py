"""Voxtral (Mistral AI 2025): the encoder of Whisper, a projector, and a decoder such as Llama.

- a recording is padded to a multiple of 30 seconds, and cut into parts of 30 seconds
- four encoder positions become one feature, so a part has 375 features
- the table of positions is not trained

The numbers follow Hugging Face's `modeling_voxtral.py`.

Legend: b rows, n features of a row, f joined encoder positions, d hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.audio_text import AUDIO_TEXT_NAMES, AUDIO_WEIGHTS, AudioTextModel, AudioTower
from ed_models.body.tiles import TILED_MODULES
from ed_models.modalities.audio import RECORDINGS
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


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


class VoxtralModel(AudioTextModel):
    """Audio tower, projector and decoder."""

    config_class = VoxtralConfig
    projector_class = VoxtralProjector

    @staticmethod
    def tower(parts: Parts) -> AudioTower:
        return AudioTower(parts, layerdrop=parts.config.layerdrop)

    @property
    def positions_of_feature(self) -> int:
        audio = self.config.audio_config
        return audio.intermediate_size // audio.hidden_size


@register_module(TaskType.ANY_TO_ANY, config=VoxtralConfig, model_type="voxtral")
class VoxtralForConditionalGeneration(ConditionalLM):
    """Voxtral with a language-model head."""

    body_class = VoxtralModel
    modality = RECORDINGS
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = AUDIO_TEXT_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = AUDIO_WEIGHTS
