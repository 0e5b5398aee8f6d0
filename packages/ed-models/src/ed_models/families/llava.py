"""LLaVA (Liu et al. 2023): a CLIP vision tower, a projector, and a decoder such as Llama.

- the tower (Radford et al. 2021) splits an image into patches, adds a class token and learned
  positions, and runs bidirectional layers
- the projector maps hidden states of one or several layers of the tower to the text's hidden size
- each image token of the text is replaced by one projected patch

The numbers follow Hugging Face's `modeling_llava.py` and `modeling_clip.py`.

Legend: b rows, i images of a row, c channels, h height, w width, p patch size, n patches + 1,
d hidden size of the tower.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Self, cast

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
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule
from ed_layers.mlp import MLP
from ed_layers.parts import Parts
from ed_layers.projections.embed import Embed
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from ed_models.base.module import EasyDeLBaseModule
from ed_models.body.context import layer_context
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.image_text import ImageTextLM
from ed_models.weights.rules import STANDARD, Rule, permute, renamed

#: Name of the vision tower in the model.
TOWER = "model.vision_tower"


class LlavaVisionConfig(EasyDeLBaseConfig, transformers.CLIPVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "clip_vision_model"


@register_config("llava")
class LlavaConfig(EasyDeLBaseConfig, transformers.LlavaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`.

    The execution fields also apply to `text_config` and `vision_config`.
    """

    model_type = "llava"
    text_config: Any = None
    vision_config: Any = None

    def __post_init__(self, **kwargs: Any):
        super().__post_init__(**kwargs)
        text: Any = self.text_config
        if not isinstance(text, EasyDeLBaseConfig):
            self.text_config = registry.get_config(text.model_type).from_dict(text.to_dict())
        vision: Any = self.vision_config
        if not isinstance(vision, EasyDeLBaseConfig):
            if vision.model_type != LlavaVisionConfig.model_type:
                raise ConfigError(
                    f"llava: vision_config.model_type={vision.model_type!r} is not supported, only "
                    f"{LlavaVisionConfig.model_type!r}"
                )
            self.vision_config = LlavaVisionConfig.from_dict(vision.to_dict())

    def seal(self) -> Self:
        """Copy the execution fields to the nested configurations, and make all immutable."""
        if not self.is_sealed:
            for nested in (self.text_config, self.vision_config):
                nested.read_basics_from_config(self)
        return super().seal()


class LlavaPatchEmbedding(nnx.Module):
    """A linear map of the patches of an image: a convolution whose stride is its size."""

    def __init__(self, parts: Parts):
        config: LlavaVisionConfig = parts.config
        self.size, self.dtype = config.patch_size, parts.dtype
        shape = config.num_channels, self.size, self.size, config.hidden_size
        kernel = parts.initializer(parts.rngs.params(), shape, parts.param_dtype)
        self.kernel = nnx.Param(kernel, axes=(None, None, None, "embed"))

    def __call__(self, images: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        b, c, h, w = images.shape
        p = self.size
        patches = images.astype(self.dtype).reshape(b, c, h // p, p, w // p, p)
        kernel = self.kernel.get_value().astype(self.dtype)
        x = jnp.einsum("bcipjq,cpqd->bijd", patches, kernel)
        return x.reshape(b, -1, x.shape[-1])


class LlavaPatches(nnx.Module):
    """Embeddings of the patches of an image, after a class token, with learned positions."""

    def __init__(self, parts: Parts):
        config: LlavaVisionConfig = parts.config
        d = config.hidden_size
        self.image_size, self.dtype = config.image_size, parts.dtype
        positions = (config.image_size // config.patch_size) ** 2 + 1
        self.class_embedding = nnx.Param(
            parts.initializer(parts.rngs.params(), (d,), parts.param_dtype), axes=("embed",)
        )
        self.patch_embedding = LlavaPatchEmbedding(parts)
        self.position_embedding = parts.embed(positions, d)

    def __call__(self, images: Float[Array, "b c h w"]) -> Float[Array, "b n d"]:
        b, _, h, w = images.shape
        size = self.image_size
        if (h, w) != (size, size):
            raise ConfigError(
                f"pixel_values has images of {h} x {w}, but vision_config.image_size is {size}: "
                "resize the images"
            )
        first = self.class_embedding.get_value().astype(self.dtype)
        first = jnp.broadcast_to(first, (b, 1, first.shape[0]))
        x = jnp.concatenate([first, self.patch_embedding(images)], axis=1)
        return x + self.position_embedding(jnp.arange(x.shape[1])[None])


class LlavaVisionLayer(DecoderLayer):
    """A pre-norm layer with bidirectional attention."""

    def __init__(self, parts: Parts, index: int):
        attention = SelfAttention(parts, bias=True, position=None, mask=MaskRule(causal=False))
        super().__init__(parts, self_attn=attention, mlp=MLP(parts))


class LlavaVisionEncoder(nnx.Module):
    """The layers of the tower."""

    def __init__(self, parts: Parts):
        self.layers = parts.stack(LlavaVisionLayer, parts.config.num_hidden_layers)


class LlavaVisionTower(nnx.Module):
    """CLIP's vision transformer. LLaVA does not use the last norm, but checkpoints contain it."""

    def __init__(self, parts: Parts):
        config: LlavaVisionConfig = parts.config
        norm = partial(parts.layer_norm, eps=config.layer_norm_eps)
        parts = replace(parts, norm_of_family=norm)
        self.config = config
        self.embeddings = LlavaPatches(parts)
        self.pre_layrnorm = norm(config.hidden_size)
        self.encoder = LlavaVisionEncoder(parts)
        self.post_layernorm = norm(config.hidden_size)

    def __call__(self, images: Float[Array, "b c h w"]) -> tuple[Float[Array, "b n d"], ...]:
        """Return the input of the first layer and the output of each layer."""
        x = self.pre_layrnorm(self.embeddings(images))
        ctx, _ = layer_context(self.config, (x.shape[0], x.shape[1]), ropes={})
        *_, hidden = self.encoder.layers(x, ctx, keep_hidden=True)
        assert hidden is not None
        return hidden


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
        parts = Parts(config, rngs, self.dtype, self.param_dtype, precision)
        self.vision_tower = LlavaVisionTower(replace(parts, config=config.vision_config))
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
        hidden = self.vision_tower(pixel_values.reshape(b * i, *shape))
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
    WEIGHTS = renamed(
        {
            "lm_head": "language_model.lm_head",
            "model.language_model": "language_model.model",
            TOWER: "vision_tower",
            "model.multi_modal_projector": "multi_modal_projector",
        },
        Rule(
            "{path}.patch_embedding.kernel",
            "{path}.patch_embedding.weight",
            permute(1, 2, 3, 0),
        ),
        *renamed(
            {
                "input_layernorm": "layer_norm1",
                "post_attention_layernorm": "layer_norm2",
                "self_attn.o_proj": "self_attn.out_proj",
                "mlp.up_proj": "mlp.fc1",
                "mlp.down_proj": "mlp.fc2",
            },
            *(
                Rule(f"{TOWER}.{rule.ours}", f"{TOWER}.{rule.hf}", rule.layout)
                for rule in STANDARD
                if isinstance(rule.ours, str)
            ),
        ),
        *STANDARD,
    )
