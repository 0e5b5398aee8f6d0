"""LLaVA (Liu et al. 2023): a vision tower such as CLIP's, a projector, and a decoder such as Llama.

- the projector maps hidden states of one or several layers of the tower to the text's hidden size
- each image token of the text is replaced by one projected patch

The numbers follow Hugging Face's `modeling_llava.py`.

Legend: t images, c channels, h height, w width, n positions of the tower, d hidden.
"""

from __future__ import annotations

from typing import Any, cast

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float

from ed_models.body.tiles import OTHER_NAMES, TIED, WEIGHTS, TiledImageTextModel
from ed_models.tasks.image_text import ImageTextLM


@register_config("llava")
class LlavaConfig(EasyDeLBaseConfig, transformers.LlavaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava"
    text_config: Any = None
    vision_config: Any = None


class LlavaProjector(nnx.Module):
    """Two linear layers from the tower to the decoder."""

    def __init__(self, parts: Parts):
        config: LlavaConfig = parts.config
        layers = config.vision_feature_layer
        count = 1 if isinstance(layers, int) else len(layers)
        inputs, d = count * config.vision_config.hidden_size, config.text_config.hidden_size
        bias = config.multimodal_projector_bias
        self.linear_1 = parts.linear(inputs, d, axes=(None, "embed"), bias=bias)
        self.linear_2 = parts.linear(d, d, axes=("embed", None), bias=bias)
        self.hidden_act = config.projector_hidden_act

    def __call__(self, x: Float[Array, "t n f"]) -> Float[Array, "t n d"]:
        return self.linear_2(activation(self.hidden_act)(self.linear_1(x)))


class LlavaModel(TiledImageTextModel):
    """Vision tower, projector and decoder."""

    config_class = LlavaConfig

    @staticmethod
    def projector(parts: Parts) -> nnx.Module:
        return LlavaProjector(parts)

    def tiles(
        self, pixel_values: Float[Array, "t c h w"], **others: Array
    ) -> Float[Array, "t n d"]:
        """Return the projected patches of images."""
        config = cast(LlavaConfig, self.config)
        hidden = self.vision_tower(pixel_values, output_hidden_states=True).hidden_states
        layers = config.vision_feature_layer
        chosen = [hidden[k] for k in ([layers] if isinstance(layers, int) else layers)]
        if config.vision_feature_select_strategy == "default":
            chosen = [x[:, 1:] for x in chosen]  # without the class token
        return self.multi_modal_projector(jnp.concatenate(chosen, axis=-1))


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaConfig, model_type="llava")
class LlavaForConditionalGeneration(ImageTextLM):
    """LLaVA with a language-model head."""

    body_class = LlavaModel
    DERIVED = {}
    TIED_WEIGHTS = TIED
    OTHER_NAMES = OTHER_NAMES
    WEIGHTS = WEIGHTS
