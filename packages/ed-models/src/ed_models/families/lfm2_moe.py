"""LFM2 with experts (Liquid AI 2025): gated short convolutions, attention, and sigmoid routing.

- scores of experts are sigmoids; a bias that training moves without a gradient joins in the choice
- the first `num_dense_layers` layers are dense
- queries and keys of attention are RMS-normed

Numbers follow Hugging Face's `modeling_lfm2_moe.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.short_conv import SHORT_CONV, ShortConvDecoder, ShortConvLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import renamed


@register_config("lfm2_moe")
class Lfm2MoeConfig(EasyDeLBaseConfig, transformers.Lfm2MoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "lfm2_moe"


class Lfm2MoeDecoderLayer(ShortConvLayer):
    """A convolution or attention, then a feed-forward layer or experts."""

    def __init__(self, parts: Parts, index: int):
        dense = index < parts.config.num_dense_layers
        mlp = GatedMLP(parts, hidden_act="silu") if dense else self.sparse(parts)
        super().__init__(parts, index, mlp)

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: Lfm2MoeConfig = parts.config
        gate = Router(
            parts,
            config.num_experts,
            config.num_experts_per_tok,
            score="sigmoid",
            normalize=config.norm_topk_prob,
            scale=config.routed_scaling_factor,
            selection_bias=config.use_expert_bias,
        )
        f = config.moe_intermediate_size
        experts = Experts(parts, config.num_experts, f, hidden_act="silu")
        return SparseMLP(parts, gate=gate, experts=experts)


class Lfm2MoeModel(ShortConvDecoder):
    """Embedding, decoder layers, final norm."""

    config_class = Lfm2MoeConfig
    layer_class = Lfm2MoeDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return [(kind, i < config.num_dense_layers) for i, kind in enumerate(config.layer_types)]


@register_module(TaskType.CAUSAL_LM, config=Lfm2MoeConfig, model_type="lfm2_moe")
class Lfm2MoeForCausalLM(CausalLM):
    """LFM2 with experts and a language-model head."""

    body_class = Lfm2MoeModel
    WEIGHTS = renamed({"mlp.gate.e_score_correction_bias": "mlp.expert_bias"}, *SHORT_CONV)
