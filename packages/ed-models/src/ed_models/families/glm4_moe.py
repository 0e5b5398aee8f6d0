"""GLM-4.5 and 4.6 (Zhipu AI 2025), also for images: sigmoid routing with a bias for the choice.

- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- experts are chosen from the best groups; weights add up to `routed_scaling_factor`
- one expert is shared; the first `first_k_dense_replace` layers are dense
- half of each head turns; queries and keys are RMS-normed if `use_qk_norm` is set
- GLM-4.5V and 4.6V have the vision tower of GLM-4V, and positions with the axes of images

Numbers follow Hugging Face's `modeling_glm4_moe.py` and `modeling_glm4v_moe.py`; parameter names
are its names. Layers that predict further tokens are copied, not computed.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeTextConfig as _Text
from transformers.models.glm4v_moe.configuration_glm4v_moe import Glm4vMoeVisionConfig as _Vision

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.glm_vision import glm_tower, glm_weights
from ed_models.body.image_text import PatchedImageTextModel
from ed_models.body.layers import DecoderLayer
from ed_models.body.patch_tower import PatchTower
from ed_models.modalities.images import PATCHES
from ed_models.tasks.causal_lm import CausalLM
from ed_models.tasks.conditional import ConditionalLM
from ed_models.weights.rules import EXPERTS, NESTED_TIED, STANDARD, carry


@register_config("glm4_moe")
class Glm4MoeConfig(EasyDeLBaseConfig, transformers.Glm4MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4_moe"


class Glm4MoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Glm4MoeConfig = parts.config
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            out_bias=False,
            norm=QKNorm(parts.norm if getattr(config, "use_qk_norm", False) else None),
        )
        sparse = index >= config.first_k_dense_replace
        super().__init__(
            parts, self_attn=attention, mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts)
        )


class Glm4MoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4MoeConfig
    layer_class = Glm4MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [i >= config.first_k_dense_replace for i in range(config.num_hidden_layers)]


@register_module(TaskType.CAUSAL_LM, config=Glm4MoeConfig, model_type="glm4_moe")
class Glm4MoeForCausalLM(CausalLM):
    """GLM-4.5 with a language-model head."""

    body_class = Glm4MoeModel
    WEIGHTS = (
        EXPERTS,
        *STANDARD,
        *(carry(f"model.layers.{layer}.{{path}}") for layer in (46, 92)),
    )


class Glm4vMoeVisionConfig(EasyDeLBaseConfig, _Vision):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_moe_vision"


@register_config("glm4v_moe_text")
class Glm4vMoeTextConfig(EasyDeLBaseConfig, _Text):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_moe_text"


@register_config("glm4v_moe")
class Glm4vMoeConfig(EasyDeLBaseConfig, transformers.Glm4vMoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4v_moe"
    nested_configs = {"vision_config": Glm4vMoeVisionConfig}


class Glm4vMoeTextModel(Glm4MoeModel):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4vMoeTextConfig


@register_module(TaskType.CAUSAL_LM, config=Glm4vMoeTextConfig, model_type="glm4v_moe_text")
class Glm4vMoeTextForCausalLM(CausalLM):
    """The language model of GLM-4.5V."""

    body_class = Glm4vMoeTextModel
    WEIGHTS = (EXPERTS, *STANDARD, carry("model.layers.46.{path}"))


class Glm4vMoeModel(PatchedImageTextModel):
    """Vision tower and decoder."""

    config_class = Glm4vMoeConfig

    def tower(self, parts: Parts) -> PatchTower:
        return glm_tower(parts)


@register_module(TaskType.IMAGE_TEXT_TO_TEXT, config=Glm4vMoeConfig, model_type="glm4v_moe")
class Glm4vMoeForConditionalGeneration(ConditionalLM):
    """GLM-4.5V with a language-model head."""

    body_class = Glm4vMoeModel
    modality = PATCHES
    TIED_WEIGHTS = NESTED_TIED
    WEIGHTS = (
        *glm_weights((EXPERTS, *STANDARD)),
        *(
            carry(f"{prefix}.layers.{layer}.{{path}}")
            for prefix in ("model", "model.language_model")
            for layer in (46, 92)
        ),
    )
