"""Granite 4 (IBM 2025): Mamba-2 and attention, with Granite's multipliers and experts.

- `layer_types` selects the layers with attention, without positions unless
  `position_embedding_type` is `rope`
- every layer has a feed-forward that all tokens visit, and `num_local_experts` experts in parallel;
  none where that is 0
- embeddings, attention scores, residual branches and logits have a factor each

Numbers follow Hugging Face's `modeling_granitemoehybrid.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import Rotary, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.body.mamba import hybrid_mixer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import MAMBA2, Rule, fused, renamed, split, transpose


@register_config("granitemoehybrid")
class GraniteMoeHybridConfig(EasyDeLBaseConfig, transformers.GraniteMoeHybridConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granitemoehybrid"


class GraniteMoeHybridDecoderLayer(DecoderLayer):
    """Mamba-2 or attention, and a feed-forward, each normed before, scaled, and added."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteMoeHybridConfig = parts.config
        attends = parts.config.layer_types[index] == "full_attention"
        shared = GatedMLP(parts, config.shared_intermediate_size)
        super().__init__(
            parts,
            self_attn=self.attention(parts) if attends else hybrid_mixer(parts),
            name="self_attn" if attends else "mamba",
            mlp=self.sparse(parts, shared) if config.num_local_experts else shared,
            factor=config.residual_multiplier,
        )

    @staticmethod
    def attention(parts: Parts) -> SelfAttention:
        """Attention with the configured scale."""
        config: GraniteMoeHybridConfig = parts.config
        return SelfAttention(
            parts,
            bias=config.attention_bias,
            scores=ScoreRule(scale=config.attention_multiplier),
            position=Rotary() if config.position_embedding_type == "rope" else None,
        )

    @staticmethod
    def sparse(parts: Parts, shared: GatedMLP) -> SparseMLP:
        """The layer with experts."""
        config: GraniteMoeHybridConfig = parts.config
        experts = config.num_local_experts
        return SparseMLP(
            parts,
            gate=Router(parts, experts, config.num_experts_per_tok),
            experts=Experts(parts, experts, config.intermediate_size),
            shared=shared,
        )


class GraniteMoeHybridModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteMoeHybridConfig
    layer_class = GraniteMoeHybridDecoderLayer

    def rope_settings(self):
        return super().rope_settings() if self.config.position_embedding_type == "rope" else {}

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=GraniteMoeHybridConfig, model_type="granitemoehybrid")
class GraniteMoeHybridForCausalLM(CausalLM):
    """Granite 4 with a language-model head."""

    body_class = GraniteMoeHybridModel
    WEIGHTS = (
        Rule(
            ("{path}.mlp.experts.gate_proj.kernel", "{path}.mlp.experts.up_proj.kernel"),
            "{path}.block_sparse_moe.input_linear.weight",
            split(-2),
        ),
        Rule(
            "{path}.mlp.experts.down_proj.kernel",
            "{path}.block_sparse_moe.output_linear.weight",
            transpose,
        ),
        *renamed(
            {
                "mlp.gate": "block_sparse_moe.router.layer",
                "mlp.shared_experts": "shared_mlp",
                "mlp": "shared_mlp",
                "down_proj": "output_linear",
            },
            *fused(("gate_proj", "up_proj"), "input_linear"),
            *MAMBA2,
        ),
    )
    MODULES = Modules(
        {
            "block_sparse_moe.input_linear": "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.output_linear": "block_sparse_moe.experts.down_proj",
        }
    )

    def head(self):
        return replace(super().head(), scale=1 / self.config.logits_scaling)
