"""SigLIP (Zhai et al. 2023): a vision tower and a text encoder, trained with a sigmoid loss.

- no class token: a trained query attends to all patches, and its output is the pooled output

Numbers and parameter names follow Hugging Face's `modeling_siglip.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.vision import VisionTower
from ed_models.body.vision_pooling import AttentionPooling


@register_config("siglip_vision_model")
class SiglipVisionConfig(EasyDeLBaseConfig, transformers.SiglipVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "siglip_vision_model"


@register_module(TaskType.BASE_VISION, config=SiglipVisionConfig, model_type="siglip_vision_model")
class SiglipVisionModel(VisionTower):
    """SigLIP's vision tower; `vision_use_head: false` omits the pooling."""

    def add_parts(self, parts: Parts):
        if parts.config.vision_use_head:
            self.pooler = AttentionPooling(parts)

    def pooled(self, x):
        return self.pooler(x) if hasattr(self, "pooler") else None
