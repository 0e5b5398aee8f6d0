"""GraniteMoeShared (IBM 2024): GraniteMoe with shared experts for all tokens.

- a factor on the outputs of attention and experts
- `num_experts_per_tok` of `num_local_experts` experts for each token, weighted by a softmax
- shared experts for all tokens
- a factor on the embeddings
- a factor on the logits

Numbers follow Hugging Face's `modeling_granitemoeshared.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, fused, renamed, split, transpose


@register_config("granitemoeshared")
class GraniteMoeSharedConfig(EasyDeLBaseConfig, transformers.GraniteMoeSharedConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granitemoeshared"


class GraniteMoeSharedDecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteMoeSharedConfig = parts.config
        experts, k = config.num_local_experts, config.num_experts_per_tok
        mlp = SparseMLP(
            parts,
            gate=Router(parts, experts, k),
            experts=Experts(parts, experts, config.intermediate_size),
            shared=GatedMLP(parts, config.shared_intermediate_size)
            if config.shared_intermediate_size
            else None,
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(
                parts,
                bias=config.attention_bias,
                scores=ScoreRule(scale=config.attention_multiplier),
            ),
            mlp=mlp,
            factor=config.residual_multiplier,
        )


class GraniteMoeSharedModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteMoeSharedConfig
    layer_class = GraniteMoeSharedDecoderLayer

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier


@register_module(TaskType.CAUSAL_LM, config=GraniteMoeSharedConfig, model_type="granitemoeshared")
class GraniteMoeSharedForCausalLM(CausalLM):
    """GraniteMoeShared with a language-model head."""

    body_class = GraniteMoeSharedModel

    WEIGHTS = renamed(
        {
            "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
            "mlp.gate": "block_sparse_moe.router.layer",
            "mlp.shared_experts": "shared_mlp",
            "mlp": "block_sparse_moe",
        },
        Rule(
            ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
            "{path}.input_linear.weight",
            split(-2),
        ),
        Rule("{path}.experts.down_proj.kernel", "{path}.output_linear.weight", transpose),
        *fused(("gate_proj", "up_proj"), "input_linear"),
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
