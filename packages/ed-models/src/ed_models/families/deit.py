"""DeiT (Touvron et al. 2020): ViT with a distillation token after the class token.

Numbers and parameter names follow Hugging Face's `modeling_deit.py`.
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

#: The class of transformers with two heads.
_TEACHER = "DeiTForImageClassificationWithTeacher"


@register_config("deit")
class DeiTConfig(EasyDeLBaseConfig, transformers.DeiTConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "deit"
    attribute_map = {
        **transformers.DeiTConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }


@register_module(TaskType.BASE_VISION, config=DeiTConfig, model_type="deit")
class DeiTModel(VisionTower):
    """Embeddings, layers, a norm and a pooler of the class token."""

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
        return VisionEmbeddings(parts, tokens=["cls_token", "distillation_token"], lead=2)

    def add_parts(self, parts: Parts):
        if self.pooling:
            self.pooler = TokenPooling(parts)

    def pool_features(self, x):
        return self.pooler(x[:, 0]) if self.pooling else None


@register_module(TaskType.IMAGE_CLASSIFICATION, config=DeiTConfig, model_type="deit")
class DeiTForImageClassification(ImageClassifier):
    """DeiT with a head for the class token.

    Published distilled models have a second head for the distillation token, and the logits are the
    mean of both heads. `architectures` of the configuration selects this form.
    """

    tower_class = DeiTModel
    prefix = "deit"

    @property
    def has_teacher(self) -> bool:
        """Whether the model has a second head, which a teacher trained."""
        return _TEACHER in (self.config.architectures or ())

    @property
    def architecture(self) -> str | None:
        return _TEACHER if self.has_teacher else None

    def add_head(self, parts, features):
        if not self.has_teacher:
            super().add_head(parts, features)
            return
        labels = parts.config.num_labels
        self.cls_classifier, self.distillation_classifier = (
            parts.linear(features, labels, axes=("embed", None), bias=True) for _ in range(2)
        )

    def scores(self, x, **inputs):
        if not self.has_teacher:
            return super().scores(x, **inputs)
        return (self.cls_classifier(x[:, 0]) + self.distillation_classifier(x[:, 1])) / 2
