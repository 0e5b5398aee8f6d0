"""GLM-4.5 and 4.6 (Zhipu AI 2025): sigmoid routing with a bias for the choice, a shared expert.

- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- experts are chosen from the best groups; weights add up to `routed_scaling_factor`
- the first `first_k_dense_replace` layers are dense
- half of each head turns; queries and keys are RMS-normed if `use_qk_norm` is set

Numbers follow Hugging Face's `modeling_glm4_moe.py`; parameter names are its names. Layers that
predict further tokens are not loaded.
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

from ed_models.body.decoder import Decoder
from ed_models.body.experts import sigmoid_experts
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, carry


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
            norm=QKNorm(parts.norm if config.use_qk_norm else None),
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
