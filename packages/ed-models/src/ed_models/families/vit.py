"""ViT (Dosovitskiy et al. 2020): a transformer over patches of an image.

- a class token in front of the patches, learned positions, pre-norm layers
- the body alone has a pooler: the class token after a linear layer and an activation

Numbers and parameter names follow Hugging Face's `modeling_vit.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.vision import VIT_MODULES, VIT_NAMES, VisionEmbeddings, VisionTower
from ed_models.body.vision_pooling import TokenPooling
from ed_models.tasks.image_classification import ImageClassifier


@register_config("vit")
class ViTConfig(EasyDeLBaseConfig, transformers.ViTConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "vit"
    attribute_map = {
        **transformers.ViTConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }


@register_module(TaskType.BASE_VISION, config=ViTConfig, model_type="vit")
class ViTModel(VisionTower):
    """Embeddings, layers, a norm and a pooler."""

    names = VIT_NAMES
    MODULES = VIT_MODULES
    ignored_names = (
        "embeddings.mask_token",
        "pooler.dense.{path}",
        "classifier.{path}",
        "decoder.{path}",
    )
    new_layers = ("pooler.dense",)

    @staticmethod
    def embedding(parts):
        return VisionEmbeddings(parts, tokens=["cls_token"], lead=2)

    def add_parts(self, parts: Parts):
        if self.pooling:
            self.pooler = TokenPooling(parts)

    def pool_features(self, x):
        return self.pooler(x[:, 0]) if self.pooling else None


@register_module(TaskType.IMAGE_CLASSIFICATION, config=ViTConfig, model_type="vit")
class ViTForImageClassification(ImageClassifier):
    """ViT with a head for the class token."""

    tower_class = ViTModel
    prefix = "vit"
