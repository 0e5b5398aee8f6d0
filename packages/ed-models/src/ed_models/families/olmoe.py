"""OLMoE (Muennighoff et al. 2024): 64 small experts in each layer.

- queries and keys are RMS-normed over all heads together; projections are clipped to `clip_qkv`
- the softmax weights of the chosen experts add up to one only if `norm_topk_prob` is set

Numbers follow Hugging Face's `modeling_olmoe.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD


@register_config("olmoe")
class OlmoeConfig(EasyDeLBaseConfig, transformers.OlmoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "olmoe"


class OlmoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: OlmoeConfig = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        attention = SelfAttention(
            parts,
            bias=config.attention_bias,
            norm=QKNorm(parts.norm, heads="all", clip=config.clip_qkv),
        )
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k, normalize=config.norm_topk_prob),
            experts=Experts(parts, experts, config.intermediate_size),
        )
        super().__init__(parts, self_attn=attention, mlp=mlp)


class OlmoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = OlmoeConfig
    layer_class = OlmoeDecoderLayer


@register_module(TaskType.CAUSAL_LM, config=OlmoeConfig, model_type="olmoe")
class OlmoeForCausalLM(CausalLM):
    """OLMoE with a language-model head."""

    body_class = OlmoeModel
    WEIGHTS = (EXPERTS, *STANDARD)
