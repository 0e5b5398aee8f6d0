"""GLM-4.7-Flash (Zhipu AI 2026): latent attention, sigmoid routing with a bias for the choice.

- keys and values of all heads come from one latent, which is all that a cache stores
- `mlp_layer_types` selects the layers with experts; scores are sigmoids, as in DeepSeek-V3

Numbers follow Hugging Face's `modeling_glm4_moe_lite.py`; parameter names are its names. Layers
that predict further tokens are not loaded.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.latent_attention import LatentAttention
from ed_layers.mlp import GatedMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry


@register_config("glm4_moe_lite")
class Glm4MoeLiteConfig(EasyDeLBaseConfig, transformers.Glm4MoeLiteConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "glm4_moe_lite"


class Glm4MoeLiteDecoderLayer(DecoderLayer):
    """Latent attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: Glm4MoeLiteConfig = parts.config
        sparse = parts.config.mlp_layer_types[index] == "sparse"
        super().__init__(
            parts,
            self_attn=LatentAttention(parts, interleaved=config.rope_interleave),
            mlp=sigmoid_experts(parts) if sparse else GatedMLP(parts),
        )


class Glm4MoeLiteModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = Glm4MoeLiteConfig
    layer_class = Glm4MoeLiteDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.mlp_layer_types


@register_module(TaskType.CAUSAL_LM, config=Glm4MoeLiteConfig, model_type="glm4_moe_lite")
class Glm4MoeLiteForCausalLM(CausalLM):
    """GLM-4.7-Flash with a language-model head."""

    body_class = Glm4MoeLiteModel
    WEIGHTS = (EXPERTS, *STANDARD, carry("model.layers.47.{path}"))
