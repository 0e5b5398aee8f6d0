"""CLIP (Radford et al. 2021): a vision tower and a text encoder with embeddings in one space.

- a class token in front of the patches, and a norm before the first layer
- the class token after the last norm is the pooled output of an image, the end token that of a text
- trained with the cross-entropies of matching pairs, in both directions

Numbers and parameter names follow Hugging Face's `modeling_clip.py`.
"""

from __future__ import annotations

import jax.numpy as jnp
import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts
from flax import nnx

from ed_models.body.text_tower import TextTower
from ed_models.body.vision import VisionEmbeddings, VisionTower
from ed_models.tasks.image_classification import ImageClassifier
from ed_models.tasks.image_text_match import ImageTextMatcher, softmax_pair_loss


@register_config("clip_vision_model")
class CLIPVisionConfig(EasyDeLBaseConfig, transformers.CLIPVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "clip_vision_model"


@register_module(TaskType.BASE_VISION, config=CLIPVisionConfig, model_type="clip_vision_model")
class CLIPVisionModel(VisionTower):
    """CLIP's vision tower."""

    reads = "mean"

    @staticmethod
    def embedding(parts):
        return VisionEmbeddings(parts, bias=False, tokens=["cls_token"])

    def add_parts(self, parts: Parts):
        self.pre_norm = parts.own_norm(parts.config.hidden_size)

    def enter(self, x):
        return self.pre_norm(x)

    def leave(self, x):
        return x

    def pool_features(self, x):
        return self.norm(x[:, 0])


@register_config("clip_text_model")
class CLIPTextConfig(EasyDeLBaseConfig, transformers.CLIPTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "clip_text_model"


@register_module(TaskType.BASE_MODULE, config=CLIPTextConfig, model_type="clip_text_model")
class CLIPTextModel(TextTower):
    """CLIP's text tower; the pooled output is the first end token."""

    config_class = CLIPTextConfig

    def pool_features(self, x, input_ids):
        end = self.config.eos_token_id
        # The first checkpoints state the end token 2; their end token has the largest id.
        places = input_ids if end == 2 else (input_ids == end).astype(jnp.int32)
        at = jnp.argmax(places, axis=-1)
        return jnp.take_along_axis(x, at[:, None, None], axis=1)[:, 0]


@register_config("clip")
class CLIPConfig(EasyDeLBaseConfig, transformers.CLIPConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "clip"


@register_module(TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION, config=CLIPConfig, model_type="clip")
class CLIPModel(ImageTextMatcher):
    """Both towers, and projections of their pooled outputs."""

    pair_loss = softmax_pair_loss

    def add_parts(self, parts: Parts):
        config, e = parts.config, parts.config.projection_dim
        text, vision = config.text_config.hidden_size, config.vision_config.hidden_size
        self.text_projection = parts.linear(text, e, axes=("embed", None))
        self.visual_projection = parts.linear(vision, e, axes=("embed", None))
        start = jnp.asarray(config.logit_scale_init_value, parts.param_dtype)
        self.logit_scale = nnx.Param(start, axes=())

    def get_text_features(self, input_ids, attention_mask=None, **inputs):
        pooled = super().get_text_features(input_ids, attention_mask, **inputs)
        return self.text_projection(pooled)

    def get_image_features(self, pixel_values, **inputs):
        return self.visual_projection(super().get_image_features(pixel_values, **inputs))

    def scale_cosines(self, cosines):
        return cosines * jnp.exp(self.logit_scale.get_value().astype(jnp.float32))


@register_module(TaskType.IMAGE_CLASSIFICATION, config=CLIPConfig, model_type="clip")
class CLIPForImageClassification(ImageClassifier):
    """CLIP's vision tower with a head for the mean of the patches."""

    tower_class = CLIPVisionModel
    prefix = "vision_model"
    ignored_names = ("text_model.{path}", "{part}_projection.weight", "logit_scale")
