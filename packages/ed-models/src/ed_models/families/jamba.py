"""Jamba (AI21 2024): Mamba and attention, experts in some layers.

- `attn_layer_period` and `attn_layer_offset` select the layers with attention, without positions;
  the others have Mamba, whose dt, B and C are RMS-normed
- `expert_layer_period` and `expert_layer_offset` select the layers with experts; the weights of the
  chosen ones are their softmax over all

Numbers follow Hugging Face's `modeling_jamba.py`; parameter names are its names.
"""

from __future__ import annotations

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts
from ed_layers.recurrence.mamba import MambaMixer

from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, MAMBA, renamed


@register_config("jamba")
class JambaConfig(EasyDeLBaseConfig, transformers.JambaConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "jamba"


class JambaDecoderLayer(DecoderLayer):
    """Mamba or attention, and a feed-forward or experts, each normed before and added."""

    def __init__(self, parts: Parts, index: int):
        config: JambaConfig = parts.config
        attends = config.layer_types[index] == "full_attention"
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, position=None) if attends else self.mamba_mixer(parts),
            name="self_attn" if attends else "mamba",
            mlp=self.sparse(parts) if config.layers_num_experts[index] > 1 else GatedMLP(parts),
        )

    @staticmethod
    def mamba_mixer(parts: Parts) -> MambaMixer:
        """The recurrence."""
        config: JambaConfig = parts.config
        return MambaMixer(
            parts,
            channels=config.mamba_expand * config.hidden_size,
            states=config.mamba_d_state,
            taps=config.mamba_d_conv,
            rank=int(config.mamba_dt_rank),
            bias=config.mamba_proj_bias,
            conv_bias=config.mamba_conv_bias,
            norm=parts.norm,
        )

    @staticmethod
    def sparse(parts: Parts) -> SparseMLP:
        """The layer with experts."""
        config: JambaConfig = parts.config
        gate = Router(parts, config.num_experts, config.num_experts_per_tok, normalize=False)
        experts = Experts(parts, config.num_experts, config.intermediate_size)
        return SparseMLP(parts, gate=gate, experts=experts)


class JambaModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = JambaConfig
    layer_class = JambaDecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.layers_num_experts, strict=True))

    def rope_settings(self):
        return {}


@register_module(TaskType.CAUSAL_LM, config=JambaConfig, model_type="jamba")
class JambaForCausalLM(CausalLM):
    """Jamba with a language-model head."""

    body_class = JambaModel
    WEIGHTS = renamed(
        {
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp.gate": "feed_forward.router",
            "mlp": "feed_forward",
        },
        EXPERTS,
        *MAMBA,
    )
