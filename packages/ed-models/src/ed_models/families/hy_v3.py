"""HYV3 (Tencent HunYuan Team 2026): Llama with norms of queries and keys by head and
`num_experts_per_tok` of `num_experts` experts for each token, weighted by sigmoids.

- norms of queries and keys by head
- `num_experts_per_tok` of `num_experts` experts for each token, weighted by sigmoids
- a bias that takes part only in the choice of experts
- shared experts for all tokens

Numbers follow Hugging Face's `modeling_hy_v3.py`; parameter names are its names.
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

from ed_models.adapters.peft_layout import Modules
from ed_models.body.decoder import Decoder
from ed_models.body.layers import DecoderLayer
from ed_models.tasks.causal_lm import CausalLM
from ed_models.weights.rules import EXPERTS, STANDARD, renamed


@register_config("hy_v3")
class HYV3Config(EasyDeLBaseConfig, transformers.HYV3Config):
    """Architecture fields from `transformers`, execution fields from `EasyDeLBaseConfig`."""

    model_type = "hy_v3"


class HYV3DecoderLayer(DecoderLayer):
    """Attention and experts, each normed before and added to the stream."""

    def __init__(self, parts: Parts, index: int):
        config: HYV3Config = parts.config
        experts, k = config.num_experts, config.num_experts_per_tok
        sparse = config.mlp_layer_types[index] == "sparse"
        mlp = (
            SparseMLP(
                parts,
                gate=Router(
                    parts,
                    experts,
                    k,
                    score="sigmoid",
                    scale=config.router_scaling_factor,
                    selection_bias=True,
                ),
                experts=Experts(parts, experts, config.moe_intermediate_size),
                shared=GatedMLP(
                    parts,
                    config.moe_intermediate_size * config.num_shared_experts,
                    bias=config.mlp_bias,
                ),
            )
            if sparse
            else GatedMLP(parts, bias=config.mlp_bias)
        )
        super().__init__(
            parts,
            self_attn=SelfAttention(parts, bias=config.attention_bias, norm=QKNorm(parts.norm)),
            mlp=mlp,
        )


class HYV3Model(Decoder):
    """Embedding, decoder layers, final norm."""

    config_class = HYV3Config
    layer_class = HYV3DecoderLayer

    @staticmethod
    def layer_kinds(config):
        return config.mlp_layer_types


@register_module(TaskType.CAUSAL_LM, config=HYV3Config, model_type="hy_v3")
class HYV3ForCausalLM(CausalLM):
    """HYV3 with a language-model head."""

    body_class = HYV3Model

    WEIGHTS = renamed(
        {
            "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
            "mlp.gate": "mlp.router.gate",
            "mlp.shared_experts": "mlp.shared_mlp",
        },
        EXPERTS,
        *STANDARD,
    )

    MODULES = Modules({"shared_mlp": "shared_experts"})
