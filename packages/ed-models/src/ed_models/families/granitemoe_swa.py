"""GraniteMoeSWA (IBM 2026): GraniteMoeShared with a window in layers of type `sliding_attention`
and a base frequency of the rotary positions for each layer; 0 is none.

- a factor on the outputs of attention and experts
- a window in layers of type `sliding_attention`
- a base frequency of the rotary positions for each layer; 0 is none
- a trained logit of each head in the softmax (a sink)
- `num_experts_per_tok` of `num_local_experts` experts for each token, weighted by a softmax
- shared experts for all tokens
- a factor on the embeddings
- a factor on the logits

Numbers follow Hugging Face's `modeling_granitemoe_swa.py`; parameter names are its names.
"""

from __future__ import annotations

from dataclasses import replace

import transformers
from ed_infra.config import EasyDeLBaseConfig
from ed_infra.enums import TaskType
from ed_infra.registry import register_config, register_module
from ed_layers.attention.blocks.self_attention import SelfAttention
from ed_layers.attention.blocks.settings import MaskRule, Rotary, ScoreRule
from ed_layers.mlp import GatedMLP
from ed_layers.moe.experts import Experts
from ed_layers.moe.layer import Router, SparseMLP
from ed_layers.parts import Parts

from ed_models.body.context import build_theta_settings
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer, get_layer_window
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import STANDARD, Rule, fused, renamed, split, transpose


@register_config("granitemoe_swa")
class GraniteMoeSWAConfig(EasyDeLBaseConfig, transformers.GraniteMoeSWAConfig):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "granitemoe_swa"


class GraniteMoeSWADecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: GraniteMoeSWAConfig = parts.config
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
                mask=MaskRule(window=get_layer_window(config, index)),
                position=Rotary(str(config.layer_rope_theta[index]))
                if config.layer_rope_theta[index]
                else None,
                scores=ScoreRule(scale=config.attention_multiplier, sinks=True),
            ),
            mlp=mlp,
            factor=config.residual_multiplier,
        )


class GraniteMoeSWAModel(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = GraniteMoeSWAConfig
    layer_class = GraniteMoeSWADecoderLayer

    @staticmethod
    def layer_kinds(config):
        return list(zip(config.layer_types, config.layer_rope_theta, strict=True))

    def enter(self, x, ctx):
        return x * self.config.embedding_multiplier

    def rope_settings(self):
        return build_theta_settings(self.config, self.config.layer_rope_theta)


@register_module(TaskType.CAUSAL_LM, config=GraniteMoeSWAConfig, model_type="granitemoe_swa")
class GraniteMoeSWAForCausalLM(CausalLM):
    """GraniteMoeSWA with a language-model head."""

    body_class = GraniteMoeSWAModel

    WEIGHTS = renamed(
        {
            "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
            "mlp.gate": "block_sparse_moe.router",
            "mlp.shared_experts": "shared_mlp",
            "mlp": "block_sparse_moe",
        },
        Rule(
            ("{path}.experts.gate_proj.kernel", "{path}.experts.up_proj.kernel"),
            "{path}.experts.gate_up_proj",
            split(-2),
        ),
        Rule("{path}.experts.down_proj.kernel", "{path}.experts.down_proj", transpose),
        *fused(("gate_proj", "up_proj"), "input_linear"),
        *STANDARD,
    )

    def head(self):
        return replace(super().head(), scale=1 / self.config.logits_scaling)
