"""SigLIP 2 (Tschannen et al. 2025), NaFlex: SigLIP for images of different sizes.

- an image is a sequence of patches, padded to one length, with a number of rows and columns
- the table of learned positions is resized to each image
- checkpoints of SigLIP 2 with a fixed size have the model type `siglip`

Numbers and parameter names follow Hugging Face's `modeling_siglip2.py`.

Legend: b images, n patches of an image, f numbers of a patch, d hidden, g positions along the side
of the table.
"""

from __future__ import annotations

from math import isqrt

import jax
import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.errors import ConfigError
from ed_infra.masks import MaskInfo
from ed_infra.outputs import BaseModelOutput
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx
from jaxtyping import Array, Float, Int

from ed_models.body.context import layer_context
from ed_models.body.text_tower import BidirectionalTextLayer, TextTower
from ed_models.body.vision import VisionTower
from ed_models.body.vision_pooling import AttentionPooling
from ed_models.tasks.image_classification import ImageClassifier
from ed_models.tasks.image_text_match import (
    ImageTextMatcher,
    add_scale_and_bias,
    sigmoid_pair_loss,
    with_scale_and_bias,
)

#: Arrays of images.
_IMAGES = ("pixel_values", "pixel_attention_mask", "spatial_shapes")


@register_config("siglip2_vision_model")
class Siglip2VisionConfig(EasyDeLBaseConfig, transformers.Siglip2VisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip2_vision_model"


class Siglip2Embeddings(nnx.Module):
    """A linear map of patches, and learned positions that are resized to each image."""

    def __init__(self, parts: Parts):
        config: Siglip2VisionConfig = parts.config
        d, side = config.hidden_size, config.patch_size
        numbers = config.num_channels * side * side
        self.side = isqrt(config.num_patches)
        self.patches = parts.linear(numbers, d, axes=(None, "embed"), bias=True)
        self.position_embedding = parts.table(config.num_patches, d, axes=(None, "embed"))

    def __call__(
        self, patches: Float[Array, "b n f"], sizes: Int[Array, "b 2"]
    ) -> Float[Array, "b n d"]:
        """Return the embeddings; `sizes` are the numbers of rows and columns of each image."""
        x = self.patches(patches)
        place = jnp.arange(patches.shape[1], dtype=jnp.int32)[None]
        height, width = sizes[:, :1], jnp.maximum(sizes[:, 1:], 1)
        place = jnp.where(place < height * width, place, 0)  # padding has the first position
        rows = compute_resize_weights(place // width, height, self.side)
        columns = compute_resize_weights(place % width, width, self.side)
        table = self.position_embedding.get_value().astype(jnp.float32)
        table = table.reshape(self.side, self.side, -1)
        exact = jax.lax.Precision.HIGHEST
        positions = jnp.einsum("bni,bnj,ijd->bnd", rows, columns, table, precision=exact)
        return x + positions.astype(x.dtype)


def compute_resize_weights(
    place: Int[Array, "b n"], count: Int[Array, "b 1"], side: int
) -> Float[Array, "b n g"]:
    """Return the weights of old positions in new ones: linear, and antialiased in smaller images.

    Args:
        place: number of the row or the column of each patch.
        count: number of rows or columns of the image.
        side: number of old positions.
    """
    scale = side / jnp.maximum(count, 1).astype(jnp.float32)
    center = (place + 0.5) * scale - 0.5
    distance = jnp.abs(jnp.arange(side) - center[..., None]) / jnp.maximum(scale, 1.0)[..., None]
    weights = jnp.maximum(1 - distance, 0.0)
    return weights / weights.sum(axis=-1, keepdims=True)


@register_module(
    TaskType.BASE_VISION, config=Siglip2VisionConfig, model_type="siglip2_vision_model"
)
class Siglip2VisionModel(VisionTower):
    """The vision tower; `vision_use_head: false` omits the pooling."""

    input_names = _IMAGES
    reads = "mean"

    @staticmethod
    def embedding(parts):
        return Siglip2Embeddings(parts)

    def add_parts(self, parts: Parts):
        if parts.config.vision_use_head:
            self.pooler = AttentionPooling(parts)

    def get_classifier_features(self, x, pixel_attention_mask=None, **inputs):
        if pixel_attention_mask is None:
            return jnp.mean(x, axis=1)
        real = pixel_attention_mask[..., None].astype(x.dtype)
        return jnp.sum(x * real, axis=1) / jnp.sum(real, axis=1)

    def __call__(
        self,
        pixel_values: Float[Array, "b n f"],
        *,
        pixel_attention_mask: Int[Array, "b n"] | None = None,
        spatial_shapes: Int[Array, "b 2"] | None = None,
        key: jax.Array | None = None,
        output_hidden_states: bool = False,
        **inputs: object,
    ) -> BaseModelOutput:
        """Encode images.

        Args:
            pixel_values: patches [b, n, f].
            pixel_attention_mask: nonzero for patches that are not padding.
            spatial_shapes: number of rows and columns of each image.
            key: dropout key; None = deterministic.
            output_hidden_states: also return the input of every layer and the output of the last.
            inputs: ignored; a tower for one size resizes positions only if an argument tells it to.

        Raises:
            ConfigError: an array is missing.
        """
        if pixel_attention_mask is None or spatial_shapes is None:
            raise ConfigError(
                "SigLIP 2 reads padded patches of images of different sizes: pass pixel_values "
                "[b, n, numbers], pixel_attention_mask [b, n] and spatial_shapes [b, 2] of its "
                "image processor"
            )
        keys = jnp.asarray(pixel_attention_mask).astype(jnp.int32)
        x = self.embeddings(pixel_values, jnp.asarray(spatial_shapes))
        index = jnp.broadcast_to(jnp.arange(keys.shape[1], dtype=jnp.int32), keys.shape)
        # Padding does not count as a key, but has an output.
        mask_info = MaskInfo(jnp.ones_like(keys), keys, index, index, causal=False)
        ctx, _ = layer_context(self.config, keys.shape, mask_info=mask_info, ropes={}, key=key)
        x, _, _, hidden = self.layers(x, ctx, keep_hidden=output_hidden_states)
        x = self.norm(x)
        pooler = getattr(self, "pooler", None)
        pooled = None if pooler is None else pooler(x, keys)
        return BaseModelOutput(x, hidden_states=hidden, pooler_output=pooled)


@register_config("siglip2_text_model")
class Siglip2TextConfig(EasyDeLBaseConfig, transformers.Siglip2TextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip2_text_model"


@register_module(TaskType.BASE_MODULE, config=Siglip2TextConfig, model_type="siglip2_text_model")
class Siglip2TextModel(TextTower):
    """SigLIP's bidirectional text tower, with a projection of the last token."""

    config_class = Siglip2TextConfig
    layer_class = BidirectionalTextLayer

    def add_parts(self, parts: Parts):
        super().add_parts(parts)
        config = parts.config
        sizes = config.hidden_size, config.projection_size
        self.pooler = parts.linear(*sizes, axes=("embed", None), bias=True)

    def pool_features(self, x, input_ids):
        return self.pooler(x[:, -1])


@register_config("siglip2")
class Siglip2Config(EasyDeLBaseConfig, transformers.Siglip2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip2"


@register_module(
    TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION, config=Siglip2Config, model_type="siglip2"
)
class Siglip2Model(ImageTextMatcher):
    """Both towers, and a scale and a bias of the similarities."""

    input_names = ("input_ids", "attention_mask", *_IMAGES)
    pair_loss = sigmoid_pair_loss

    def add_parts(self, parts: Parts):
        add_scale_and_bias(self, parts)

    def scale_cosines(self, cosines):
        return with_scale_and_bias(self, cosines)


@register_module(TaskType.IMAGE_CLASSIFICATION, config=Siglip2Config, model_type="siglip2")
class Siglip2ForImageClassification(ImageClassifier):
    """The vision tower with a head for the mean of the patches."""

    input_names = _IMAGES
    tower_class = Siglip2VisionModel
    prefix = "vision_model"
    ignored_names = ("text_model.{path}", "logit_scale", "logit_bias")
