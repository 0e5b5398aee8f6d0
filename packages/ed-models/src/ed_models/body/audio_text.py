"""The body of audio-language models: the encoder of Whisper, a projector, and a decoder.

A recording is cut into parts of the length that the tower reads at once, such as 30 seconds. Each
part is a log-mel spectrogram.

Legend: b rows, i parts of the recordings of a row, m mel bins, f frames, t encoder positions, n
features of a row, d hidden.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar

import jax
import jax.numpy as jnp
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.inputs import Encoded, Inputs
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.bart import BartStack, self_attention
from ed_models.body.conditional import ConditionalModel
from ed_models.body.context import layer_context
from ed_models.body.encoder import BIDIRECTIONAL
from ed_models.body.layers import DecoderLayer
from ed_models.body.tiles import STORED, TILED_NAMES
from ed_models.body.vision import tower_rules
from ed_models.body.whisper_encoder import (
    FORM,
    WhisperFrontEnd,
    WhisperPositions,
    checked_frames,
)
from ed_models.weights.rules import STANDARD, Rule, equal, permute, renamed

#: Parts of our names -> those of the audio tower.
_NAMES: Mapping[str, str] = {
    "stack": "",
    "front_end.conv1": "conv1",
    "front_end.conv2": "conv2",
    "input_layernorm": "self_attn_layer_norm",
    "post_attention_layernorm": "final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "fc1",
    "mlp.down_proj": "fc2",
    "output_norm": "layer_norm",
}
_RULES = (
    Rule("front_end.{conv}.kernel", "front_end.{conv}.weight", permute(2, 1, 0)),
    Rule("front_end.{conv}.bias", "front_end.{conv}.bias", equal),
    *STANDARD,
)
#: Other names of tensors in checkpoints -> the names that the rules have.
AUDIO_TEXT_NAMES = {**TILED_NAMES, "model.audio_tower": "audio_tower"}
AUDIO_WEIGHTS = (
    *tower_rules("model.audio_tower", "audio_tower", _NAMES, _RULES),
    *renamed(STORED, *STANDARD),
)


def _layer(parts: Parts, index: int) -> DecoderLayer:
    """Create a layer of the audio tower."""
    config = parts.config
    attention = self_attention(parts, FORM, config.num_attention_heads, mask=BIDIRECTIONAL)
    mlp = MLP(parts, config.intermediate_size, dropout=config.activation_dropout)
    return DecoderLayer(parts, self_attn=attention, mlp=mlp, dropout=config.dropout)


class AudioTower(nnx.Module):
    """Convolutions, positions, layers and a norm.

    Args:
        parts: creates the layers.
        layerdrop: probability that training skips a layer.
        pooled: number of encoder positions of which the norm reads the mean.
    """

    def __init__(self, parts: Parts, *, layerdrop: float, pooled: int = 1):
        config = parts.config
        parts = replace(parts, norm_of_family=partial(parts.layer_norm, eps=1e-5))
        positions, form = WhisperPositions(parts), replace(FORM, pre_norm=False)
        self.front_end = WhisperFrontEnd(parts)
        self.stack = BartStack(parts, form, _layer, config.num_hidden_layers, layerdrop, positions)
        self.output_norm = parts.own_norm(config.hidden_size)
        self.config, self.pooled = config, pooled

    def __call__(
        self, features: Float[Array, "b m f"], mask: Int[Array, "b f"] | None = None
    ) -> Float[Array, "b t d"]:
        """Return the outputs for spectrograms.

        Args:
            features: log-mel spectrograms.
            mask: 1 for frames of sound, 0 for the padding after them; None = no padding.
        """
        x = self.front_end(checked_frames(features, self.config))
        b, t, d = x.shape
        segments = None
        if mask is not None:
            segments = (jnp.arange(t) < count_audio_positions(mask)[:, None]).astype(jnp.int32)
        ctx, _ = layer_context(self.config, (b, t), segment_ids=segments, ropes={})
        x, *_ = self.stack(x, ctx, None)
        count = t // self.pooled
        x = x[:, : count * self.pooled].reshape(b, count, self.pooled, d)
        return self.output_norm(x.mean(axis=2))


def count_audio_positions(mask: Int[Array, "b f"]) -> Int[Array, " b"]:
    """Return the numbers of encoder positions of recordings with these frames."""
    return (jnp.sum(mask != 0, axis=1, dtype=jnp.int32) + 1) // 2


class AudioTextModel(ConditionalModel):
    """Audio tower, projector and decoder; a family states tower and projector."""

    #: Creates the projector; `parts.config` is the configuration of the whole model.
    projector_class: ClassVar[Callable[[Parts], nnx.Module]]

    def add_towers(self, config: EasyDeLBaseConfig, rngs: nnx.Rngs) -> None:
        numbers = self.dtype, self.param_dtype, self.precision
        self.audio_tower = self.tower(Parts(config.audio_config, rngs, *numbers))
        self.multi_modal_projector = type(self).projector_class(Parts(config, rngs, *numbers))

    @staticmethod
    @abstractmethod
    def tower(parts: Parts) -> AudioTower:
        """Create the audio tower; `parts.config` is the configuration of the tower."""

    @property
    @abstractmethod
    def positions_of_feature(self) -> int:
        """Number of encoder positions that become one feature."""

    def encode(self, inputs: Inputs, *, key: jax.Array | None = None) -> Encoded:
        """Return the features of all recordings of a row, one after another.

        Args:
            inputs: `input_features` [b, i, m, f], spectrograms of the parts of recordings; and
                `feature_attention_mask` [b, i, f], 1 for frames of sound: shorter parts have fewer
                features. Without a mask, all parts have equally many features.
            key: without effect: towers are deterministic.
        """
        spectrograms, mask = inputs["input_features"], inputs.get("feature_attention_mask")
        b, i, *size = spectrograms.shape
        mask = None if mask is None else mask.reshape(b * i, -1)
        hidden = self.audio_tower(spectrograms.reshape(b * i, *size), mask)
        part_length = self.config.audio_config.max_source_positions // self.positions_of_feature
        features = self.multi_modal_projector(hidden.reshape(b, i * part_length, -1))
        if mask is None:
            return Encoded(features, jnp.ones(features.shape[:2], jnp.int32))
        counts = count_audio_positions(mask) // self.positions_of_feature
        real = (
            (jnp.arange(part_length) < counts[:, None])
            .reshape(b, i * part_length)
            .astype(jnp.int32)
        )
        order = jnp.argsort(1 - real, axis=1, stable=True)
        features = jnp.take_along_axis(features, order[..., None], axis=1)
        return Encoded(features, jnp.take_along_axis(real, order, axis=1))
