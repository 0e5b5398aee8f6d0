"""DINOv2 (Oquab et al. 2023): a self-supervised vision transformer.

- layers with trained factors on their outputs; a gated feed-forward layer in the largest model
- the positions are resized for images of another size
- a classifier reads the class token and the mean of the patches

Numbers and parameter names follow Hugging Face's `modeling_dinov2.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.scaled_vision import DINOV2_MODULES, DINOV2_NAMES, DINOV2_RULES, DINOv2Layer
from ed_models.body.vision import VisionEmbeddings, VisionTower
from ed_models.tasks.image_classification import ImageClassifier


@register_config("dinov2")
class Dinov2Config(EasyDeLBaseConfig, transformers.Dinov2Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "dinov2"
    attribute_map = {
        **transformers.Dinov2Config.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }


@register_module(TaskType.BASE_VISION, config=Dinov2Config, model_type="dinov2")
class Dinov2Model(VisionTower):
    """Embeddings, layers and a norm; the pooled output is the class token."""

    layer_class = DINOv2Layer
    interpolates = True
    reads = "both"
    names, rules = DINOV2_NAMES, DINOV2_RULES
    MODULES = DINOV2_MODULES
    ignored_names = ("embeddings.mask_token", "classifier.{path}")

    @staticmethod
    def embedding(parts):
        masks = 1 if parts.config.use_mask_token else None
        return VisionEmbeddings(parts, tokens=["cls_token"], lead=2, masks=masks)

    def pool_features(self, x):
        return x[:, 0]


@register_module(TaskType.IMAGE_CLASSIFICATION, config=Dinov2Config, model_type="dinov2")
class Dinov2ForImageClassification(ImageClassifier):
    """A head for the class token and the mean of the patches."""

    tower_class = Dinov2Model
    prefix = "dinov2"
