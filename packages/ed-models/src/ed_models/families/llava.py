"""LLaVA (Liu et al. 2023): a vision tower such as CLIP's, a projector, and a decoder such as Llama.

- the projector maps hidden states of one or several layers of the tower to the text's hidden size
- each image token of the text is replaced by one projected patch

The numbers follow Hugging Face's `modeling_llava.py`.

Legend: b rows, i images of a row, c channels, h height, w width, n positions of the tower.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import transformers
from ed_infra import registry
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.inputs import Encoded, Features
from ed_infra.outputs import BaseModelOutput
from ed_infra.registry import register_config, register_module
from ed_layers.activations import activation
from ed_layers.parts import Parts
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.vision import tower_rules
from ed_models.tasks.image_text import ImageTextLM
from ed_models.weights.rules import STANDARD, renamed


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

    def __call__(self, x: Float[Array, "b n f"]) -> Float[Array, "b n d"]:
        return self.linear_2(activation(self.hidden_act)(self.linear_1(x)))


class LlavaModel(EasyDeLBaseModule):
    """Vision tower, projector and decoder."""

    config_class = LlavaConfig

    def __init__(
        self,
        config: LlavaConfig,
        dtype: DTypeLike = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        precision: jax.lax.PrecisionLike = None,
        *,
        rngs: nnx.Rngs,
    ):
        super().__init__(config, dtype, param_dtype, precision)
        text = registry.get_module(TaskType.CAUSAL_LM, config.text_config.model_type)
        if text.WEIGHTS is not STANDARD:
            raise ConfigError(
                f"llava: text_config.model_type={config.text_config.model_type!r} is not "
                "supported: the names of its parameters differ from Llama's"
            )
        tower = registry.get_module(TaskType.BASE_VISION, config.vision_config.model_type)
        self.vision_tower = tower(config.vision_config, dtype, param_dtype, precision, rngs=rngs)
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        self.multi_modal_projector = LlavaProjector(parts)
        self.language_model = text.body_class(
            config.text_config, dtype, param_dtype, precision, rngs=rngs
        )

    @property
    def features(self) -> int:
        """Size of the hidden states, d."""
        return self.language_model.features

    @property
    def embed_tokens(self) -> Embed:
        """The token embedding."""
        return self.language_model.embed_tokens

    def encode(self, pixel_values: Float[Array, "b i c h w"]) -> Encoded:
        """Return the projected patches of all images of a row, one image after another."""
        config = cast(LlavaConfig, self.config)
        b, i, *shape = pixel_values.shape
        images = pixel_values.reshape(b * i, *shape)
        hidden = self.vision_tower(images, output_hidden_states=True).hidden_states
        layers = config.vision_feature_layer
        chosen = [hidden[k] for k in ([layers] if isinstance(layers, int) else layers)]
        if config.vision_feature_select_strategy == "default":
            chosen = [x[:, 1:] for x in chosen]  # without the class token
        features = self.multi_modal_projector(jnp.concatenate(chosen, axis=-1))
        features = features.reshape(b, i * features.shape[1], -1)
        return Encoded(features, jnp.ones(features.shape[:2], jnp.int32))

    def __call__(
        self,
        input_ids: Int[Array, "b s"] | None = None,
        *,
        features: Features | None = None,
        **inputs: Any,
    ) -> BaseModelOutput:
        """Run the decoder; see `ed_models.body.decoder.Decoder`."""
        output = self.language_model(input_ids, features=features, **inputs)
        updates = {f"language_model/{path}": value for path, value in output.updates.items()}
        return output.replace(updates=updates)

    def cache_specs(self):
        """Return the memory of each layer of the decoder."""
        return self.language_model.cache_specs()

    def prompt_class(self, prompt_len: int) -> int:
        """Return the class of a prompt length; see `Decoder.prompt_class`."""
        return self.language_model.prompt_class(prompt_len)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=LlavaConfig, model_type="llava")
class LlavaForConditionalGeneration(ImageTextLM):
    """LLaVA with a language-model head."""

    body_class = LlavaModel
    DERIVED = {}
    TIED_WEIGHTS = {"lm_head.kernel": "model.language_model.embed_tokens.embedding"}
    # Names of checkpoints before transformers 5, and of models in memory.
    OTHER_NAMES = {
        "vision_tower.vision_model": "vision_tower",
        "model.vision_tower": "vision_tower",
        "model.multi_modal_projector": "multi_modal_projector",
        "model.language_model": "language_model.model",
        "lm_head": "language_model.lm_head",
    }
    WEIGHTS = (
        *tower_rules("model.vision_tower", "vision_tower"),
        *renamed(
            {
                "lm_head": "language_model.lm_head",
                "model.language_model": "language_model.model",
                "model.multi_modal_projector": "multi_modal_projector",
            },
            *STANDARD,
        ),
    )
