"""InternVL (Zhu et al. 2025): a vision tower over tiles, a projector, and a decoder such as Qwen2.

- an image is a grid of tiles and the whole image in the size of a tile
- squares of patches become one feature; `downsample_ratio` is the inverse of their side
- the outputs of the tower's layers have trained factors

The numbers follow Hugging Face's `modeling_internvl.py`.

Legend: t tiles, c channels, h height, w width, n patches of a tile, m features of a tile, v and d
hidden size of the tower and of the text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, QKNorm
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.scaled_vision import ScaledVisionLayer
from ed_models.body.tiles import (
    TILED_MODULES,
    TILED_NAMES,
    TILED_WEIGHTS,
    TiledImageTextModel,
    joined_squares,
)
from ed_models.body.vision import VIT_NAMES, VisionEmbeddings, VisionTower, tower_rules
from ed_models.modalities.images import TILES
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import NESTED_TIED

#: Parts of our names -> those of the vision tower.
_NAMES: Mapping[str, str] = {
    **{ours: theirs for ours, theirs in VIT_NAMES.items() if not ours.startswith(("self", "mlp"))},
    "self_attn.o_proj": "attention.projection_layer",
    "self_attn": "attention",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "layer_scale1.lambda1": "lambda_1",
    "layer_scale2.lambda1": "lambda_2",
}


class InternVLVisionConfig(EasyDeLBaseConfig, transformers.InternVLVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "internvl_vision"
    attribute_map = {"layerscale_value": "layer_scale_init_value"}


@register_config("internvl")
class InternVLConfig(EasyDeLBaseConfig, transformers.InternVLConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "internvl"
    nested_configs: ClassVar[Mapping[str, type]] = {"vision_config": InternVLVisionConfig}


class InternVLVisionLayer(ScaledVisionLayer):
    """A layer whose queries and keys may have norms."""

    def __init__(self, parts: Parts, index: int):
        config: InternVLVisionConfig = parts.config
        norm = partial(parts.norm, eps=1e-6) if config.use_qk_norm else None
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            out_bias=True,
            position=None,
            norm=QKNorm(norm, heads="all"),
            mask=MaskRule(causal=False),
        )
        super().__init__(parts, index, self_attn=attention)


class InternVLVisionModel(VisionTower):
    """Embeddings and layers, and a norm unless the pooled output would be a mean."""

    layer_class = InternVLVisionLayer
    interpolates = True
    names = _NAMES

    @staticmethod
    def build_norm(parts):
        norm = parts.norm if parts.config.norm_type == "rms_norm" else parts.layer_norm
        return partial(norm, eps=parts.config.layer_norm_eps)

    @staticmethod
    def last_norm(parts):
        config = parts.config
        if config.use_mean_pooling:
            return None
        return parts.layer_norm(config.hidden_size, eps=config.layer_norm_eps)

    @staticmethod
    def embedding(parts):
        config = parts.config
        return VisionEmbeddings(
            parts,
            tokens=["cls_token"],
            lead=2,
            masks=2 if config.use_mask_token else None,
            positions=config.use_absolute_position_embeddings,
        )


class InternVLProjector(nnx.Module):
    """Joins squares of patches; a norm and two linear layers."""

    def __init__(self, parts: Parts):
        config: InternVLConfig = parts.config
        self.side, self.act = int(1 / config.downsample_ratio), config.projector_hidden_act
        inputs, d = config.vision_config.hidden_size * self.side**2, config.text_config.hidden_size
        self.layer_norm = parts.layer_norm(inputs, eps=1e-5)
        self.linear_1 = parts.linear(inputs, d, axes=(None, "embed"), bias=True)
        self.linear_2 = parts.linear(d, d, axes=("embed", None), bias=True)

    def __call__(self, x: Float[Array, "t n v"]) -> Float[Array, "t m d"]:
        x = self.linear_1(self.layer_norm(joined_squares(x, self.side)))
        return self.linear_2(activation(self.act)(x))


class InternVLModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = InternVLConfig
    projector_class = InternVLProjector
    tower_class = InternVLVisionModel

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **extra_inputs: Array
    ) -> Float[Array, "t n d"]:
        """Return the features of tiles; the last layer counts after the norm."""
        if self.config.vision_feature_layer != -1:
            return self.multi_modal_projector(self.select_hidden_states(pixel_values))
        hidden = self.vision_tower(pixel_values).last_hidden_state
        return self.multi_modal_projector(hidden[:, 1:])


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=InternVLConfig, model_type="internvl")
class InternVLForConditionalGeneration(ConditionalLM):
    """InternVL with a language-model head."""

    body_class = InternVLModel
    modality = TILES
    TIED_WEIGHTS = NESTED_TIED
    OTHER_NAMES = TILED_NAMES
    MODULES = TILED_MODULES
    WEIGHTS = (*tower_rules("model.vision_tower", "vision_tower", _NAMES), *TILED_WEIGHTS)
