"""DINOv2 with registers (Darcet et al. 2023): DINOv2 with tokens that collect global features.

- the register tokens have no positions, and lie between the class token and the patches
- positions are resized with antialiasing

Numbers and parameter names follow Hugging Face's `modeling_dinov2_with_registers.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module

from ed_models.body.scaled_vision import DINOV2_MODULES, DINOV2_NAMES, DINOV2_RULES, DINOv2Layer
from ed_models.body.vision import VisionEmbeddings, VisionTower
from ed_models.tasks.image_classification import ImageClassifier


@register_config("dinov2_with_registers")
class Dinov2WithRegistersConfig(EasyDeLBaseConfig, transformers.Dinov2WithRegistersConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "dinov2_with_registers"
    attribute_map = {
        **transformers.Dinov2WithRegistersConfig.attribute_map,
        "attention_dropout": "attention_probs_dropout_prob",
    }


@register_module(
    TaskType.BASE_VISION, config=Dinov2WithRegistersConfig, model_type="dinov2_with_registers"
)
class Dinov2WithRegistersModel(VisionTower):
    """Embeddings, layers and a norm; the pooled output is the class token."""

    layer_class = DINOv2Layer
    interpolates = True
    reads = "both"
    names, rules = DINOV2_NAMES, DINOV2_RULES
    MODULES = DINOV2_MODULES
    ignored_names = ("embeddings.mask_token", "classifier.{path}")

    @staticmethod
    def embedding(parts):
        return VisionEmbeddings(
            parts,
            tokens=["cls_token"],
            lead=2,
            registers=parts.config.num_register_tokens,
            masks=1,
            antialias=True,
        )

    def pool_features(self, x):
        return x[:, 0]


@register_module(
    TaskType.IMAGE_CLASSIFICATION,
    config=Dinov2WithRegistersConfig,
    model_type="dinov2_with_registers",
)
class Dinov2WithRegistersForImageClassification(ImageClassifier):
    """A head for the class token and the mean of the patches."""

    tower_class = Dinov2WithRegistersModel
    prefix = "dinov2_with_registers"
