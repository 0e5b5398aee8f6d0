"""SigLIP (Zhai et al. 2023): a vision tower and a text encoder, trained with a sigmoid loss.

- no class token: a trained query attends to all patches, and its output is the pooled output
- the last token, also if it is padding, is the pooled output of a text
- trained with the binary cross-entropies of all pairs of a batch

Numbers and parameter names follow Hugging Face's `modeling_siglip.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

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


@register_config("siglip_vision_model")
class SiglipVisionConfig(EasyDeLBaseConfig, transformers.SiglipVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip_vision_model"


@register_module(TaskType.BASE_VISION, config=SiglipVisionConfig, model_type="siglip_vision_model")
class SiglipVisionModel(VisionTower):
    """SigLIP's vision tower; `vision_use_head: false` omits the pooling."""

    reads = "mean"

    def add_parts(self, parts: Parts):
        if parts.config.vision_use_head:
            self.pooler = AttentionPooling(parts)

    def pool_features(self, x):
        return self.pooler(x) if hasattr(self, "pooler") else None


@register_config("siglip_text_model")
class SiglipTextConfig(EasyDeLBaseConfig, transformers.SiglipTextConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip_text_model"


@register_module(TaskType.BASE_MODULE, config=SiglipTextConfig, model_type="siglip_text_model")
class SiglipTextModel(TextTower):
    """SigLIP's bidirectional text tower, with a projection of the last token."""

    config_class = SiglipTextConfig
    layer_class = BidirectionalTextLayer

    def add_parts(self, parts: Parts):
        super().add_parts(parts)
        config = parts.config
        sizes = config.hidden_size, config.projection_size
        self.pooler = parts.linear(*sizes, axes=("embed", None), bias=True)

    def pool_features(self, x, input_ids):
        return self.pooler(x[:, -1])


@register_config("siglip")
class SiglipConfig(EasyDeLBaseConfig, transformers.SiglipConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip"


@register_module(TaskType.ZERO_SHOT_IMAGE_CLASSIFICATION, config=SiglipConfig, model_type="siglip")
class SiglipModel(ImageTextMatcher):
    """Both towers, and a scale and a bias of the similarities."""

    pair_loss = sigmoid_pair_loss

    def add_parts(self, parts: Parts):
        add_scale_and_bias(self, parts)

    def scale_cosines(self, cosines):
        return with_scale_and_bias(self, cosines)


@register_module(TaskType.IMAGE_CLASSIFICATION, config=SiglipConfig, model_type="siglip")
class SiglipForImageClassification(ImageClassifier):
    """SigLIP's vision tower with a head for the mean of the patches."""

    tower_class = SiglipVisionModel
    prefix = "vision_model"
    ignored_names = ("text_model.{path}", "logit_scale", "logit_bias")
