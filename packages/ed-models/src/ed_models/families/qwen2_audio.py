"""Qwen2-Audio (Chu et al. 2024): the encoder of Whisper, a linear projector, and Qwen2.

- a recording has at most 30 seconds, to which the spectrogram is padded; attention ignores padding
- the mean of two encoder positions becomes one feature, so 30 seconds have 750 features, and a
  shorter recording has fewer
- the table of positions is not trained

The numbers follow Hugging Face's `modeling_qwen2_audio.py`.

Legend: b rows, n features of a row, a and d hidden size of the tower and of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.audio_text import AUDIO_TEXT_NAMES, AUDIO_WEIGHTS, AudioTextModel, AudioTower
from ed_models.body.tiles import TILED_MODULES
from ed_models.modalities.audio import MASKED_RECORDINGS
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED


class Qwen2AudioEncoderConfig(EasyDeLBaseConfig, transformers.Qwen2AudioEncoderConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "qwen2_audio_encoder"
    attribute_map = {
        **transformers.Qwen2AudioEncoderConfig.attribute_map,
        "hidden_act": "activation_function",
    }


@register_config("qwen2_audio")
class Qwen2AudioConfig(EasyDeLBaseConfig, transformers.Qwen2AudioConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `audio_config`.
    """

    model_type = "qwen2_audio"
    nested_configs: ClassVar[Mapping[str, type]] = {"audio_config": Qwen2AudioEncoderConfig}


class Qwen2AudioProjector(nnx.Module):
    """A linear layer from the tower to the decoder."""

    def __init__(self, parts: Parts):
        config: Qwen2AudioConfig = parts.config
        inputs, d = config.audio_config.hidden_size, config.text_config.hidden_size
        self.linear = parts.linear(inputs, d, axes=(None, "embed"), bias=True)

    def __call__(self, x: Float[Array, "b n a"]) -> Float[Array, "b n d"]:
        return self.linear(x)


class Qwen2AudioModel(AudioTextModel):
    """Audio tower, projector and decoder."""

    config_class = Qwen2AudioConfig
    projector_class = Qwen2AudioProjector

    @property
    def positions_of_feature(self) -> int:
        return 2

    @staticmethod
    def tower(parts: Parts) -> AudioTower:
        return AudioTower(parts, layerdrop=parts.config.encoder_layerdrop, pooled=2)


@register_module(TaskType.ANY_TO_ANY, config=Qwen2AudioConfig, model_type="qwen2_audio")
class Qwen2AudioForConditionalGeneration(ConditionalLM):
    """Qwen2-Audio with a language-model head."""

    body_class = Qwen2AudioModel
    modality = MASKED_RECORDINGS
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = AUDIO_TEXT_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = AUDIO_WEIGHTS
