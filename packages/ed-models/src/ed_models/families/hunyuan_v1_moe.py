"""Hunyuan with experts (Tencent 2025): Hunyuan dense with routed experts and one for all tokens.

- each query and key head is RMS-normed after rotary positions, not before
- `moe_topk` of `num_experts` experts for each token; the number may differ between layers
- a softmax over the chosen experts weights their outputs

Numbers follow Hugging Face's `modeling_hunyuan_v1_moe.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import QKNorm
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("hunyuan_v1_moe")
class HunYuanMoEV1Config(EasyDeLBaseConfig, transformers.HunYuanMoEV1Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "hunyuan_v1_moe"


def get_topk(config: HunYuanMoEV1Config) -> list[int]:
    """Return the number of experts of a token in each layer."""
    k = config.moe_topk
    return [k] * config.num_hidden_layers if isinstance(k, int) else k


class HunYuanMoEV1DecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: HunYuanMoEV1Config = parts.config
        experts, k = config.num_experts, get_topk(config)[index]
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k),
            experts=Experts(parts, experts, config.intermediate_size),
            shared=GatedMLP(parts, config.intermediate_size),
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts, bias=config.attention_bias, norm=QKNorm(parts.norm, last=True)
            ),
            mlp=mlp,
        )


class HunYuanMoEV1Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = HunYuanMoEV1Config
    layer_class = HunYuanMoEV1DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return get_topk(config)


@register_module(TaskType.CAUSAL_LM, config=HunYuanMoEV1Config, model_type="hunyuan_v1_moe")
class HunYuanMoEV1ForCausalLM(CausalLM):
    """HunYuanMoEV1 with a language-model head."""

    body_class = HunYuanMoEV1Model

    WEIGHTS = renamed(
        {
            "self_attn.q_norm": "self_attn.query_layernorm",
            "self_attn.k_norm": "self_attn.key_layernorm",
            "mlp.gate": "mlp.gate.wg",
            "mlp.shared_experts": "mlp.shared_mlp",
        },
        EXPERTS,
        *STANDARD,
    )
