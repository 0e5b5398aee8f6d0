"""CLIP (Radford et al. 2021): a vision tower and a text encoder with embeddings in one space.

- a class token in front of the patches, and a norm before the first layer
- the class token after the last norm is the pooled output

Numbers and parameter names follow Hugging Face's `modeling_clip.py`.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.parts import Parts

from ed_models.body.vision import VisionEmbeddings, VisionTower


@register_config("clip_vision_model")
class CLIPVisionConfig(EasyDeLBaseConfig, transformers.CLIPVisionConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "clip_vision_model"


@register_module(TaskType.BASE_VISION, config=CLIPVisionConfig, model_type="clip_vision_model")
class CLIPVisionModel(VisionTower):
    """CLIP's vision tower."""

    @staticmethod
    def embedding(parts):
        return VisionEmbeddings(parts, bias=False, tokens=["cls_token"])

    def add_parts(self, parts: Parts):
        self.pre_norm = parts.own_norm(parts.config.hidden_size)

    def enter(self, x):
        return self.pre_norm(x)

    def leave(self, x):
        return x

    def pooled(self, x):
        return self.norm(x[:, 0])
