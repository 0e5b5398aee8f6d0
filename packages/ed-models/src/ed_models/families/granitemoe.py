"""Granite 3 MoE (IBM 2024): Granite with experts.

- embeddings, attention scores, residual branches and logits have a factor each
- the weights of the chosen experts are the softmax of their logits alone
- the experts of a layer have one tensor for gate and up projection, and one for down

Numbers follow Hugging Face's `modeling_granitemoe.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, renamed, split, transpose


@register_config("granitemoe")
class GraniteMoeConfig(EasyDeLBaseConfig, transformers.GraniteMoeConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granitemoe"


class GraniteMoeDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before, scaled, and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteMoeConfig = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                scores=ScoreRule(scale=config.attention_multiplier),
            ),
            mlp=SparseMLP(
                parts,
                gate=Router(parts, experts, k),
                experts=Experts(parts, experts, config.intermediate_size),
            ),
            factor=config.residual_multiplier,
        )


class GraniteMoeModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteMoeConfig
    layer_class = GraniteMoeDecoderLayer

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=GraniteMoeConfig, model_type="granitemoe")
class GraniteMoeForCausalLM(CausalLM):
    """Granite-MoE with a language-model head."""

    body_class = GraniteMoeModel
    WEIGHTS = renamed(
        {"mlp": "block_sparse_moe", "gate": "router.layer"},
        Rule(
            ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
            "{path}.input_linear.weight",
            split(-2),
        ),
        Rule("{path}.experts.down_proj.kernel", "{path}.output_linear.weight", transpose),
        *STANDARD,
    )
    MODULES = Modules(
        {
            "block_sparse_moe.input_linear": "block_sparse_moe.experts.gate_up_proj",
            "block_sparse_moe.output_linear": "block_sparse_moe.experts.down_proj",
        }
    )

    def head(self):
        return replace(super().head(), scale=1 / self.config.logits_scaling)
